"""Batches on a CUDA device: slots that it unpacks, and rows that it gathers itself."""
