"""Rows that a CUDA device gathers: from resident versions and registered shards."""
