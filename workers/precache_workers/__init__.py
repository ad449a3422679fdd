"""Code of the CPU nodes: listing, decoding, the tasks that write shards, and the driver of a build.

`precache.building` is the door to it for Python; the command line and the viewer use it, too.
Imports the layers of `precache` below `building`; Ray only where `cluster` says.
"""
