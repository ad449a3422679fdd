"""Bytes at a path or URL: local disks, gs://, s3://, az://, https://.

Read, put atomically, create only, list; retries. `open` is the door.
"""
