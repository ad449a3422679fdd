"""Code of the CPU nodes: listing, decoding, the tasks that write shards, and the driver of a build.

`precache.building` is the only door to it, apart from what the viewer and `verify` share with it.
Imports the layers of `precache` below `building`; Ray only where `cluster` says.
"""
