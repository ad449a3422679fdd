"""Time limits for samples, and the name of the node, in a worker's process.

The lowest layer of `precache_workers`: it imports only errors of `precache`.
"""
