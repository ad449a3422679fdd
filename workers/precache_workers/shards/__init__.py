"""One shard: fetch, ops, encode, put, receipt. Idempotent, and no Ray in it."""
