"""Rows gathered by a CUDA device: resident versions and registered shards."""
