"""Read rows out of shards: local maps, range reads, the disk cache, prefetch.

Offers `VersionReader` to loaders; torch is used only to map memory.
"""
