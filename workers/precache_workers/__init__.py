"""Code of the CPU nodes: listing, decoding, and the tasks that write shards."""
