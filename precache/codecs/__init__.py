"""Chunks <-> bytes: the codecs, the C kernels, the zarr-python plug-in, nvCOMP.

Every decoder writes into the caller's buffer.
"""
