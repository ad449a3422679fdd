"""A few samples before a build: what they answer, how long they take, and estimates from that.

Imports `shards` and lower layers; `estimate` is pure.
"""
