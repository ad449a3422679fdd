"""The declared recipe: fields, their ops and codecs, and its fingerprint.

Models only; `precache_workers.ops` computes what they declare.
"""
