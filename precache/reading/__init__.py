"""Rows out of shards: local maps, range reads, the disk cache, prefetch.

Offers `VersionReader`'s columns to loaders; no torch but to map memory.
"""
