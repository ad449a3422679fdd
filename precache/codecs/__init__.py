"""Chunks <-> bytes: the codecs, the C kernels, the plug-in for zarr-python, nvCOMP.

Every decoder writes into the caller's buffer.
"""
