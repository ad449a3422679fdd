"""The on-disk format: metadata, row table, small arrays, receipts, commits, leases.

`open` returns a `Version`; nothing here reads a shard's rows.
"""
