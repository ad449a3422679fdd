"""The on-disk format: metadata, row table, small arrays, receipts, commits, leases.

`open` gives a `Version`; nothing here reads a shard's rows.
"""
