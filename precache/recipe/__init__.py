"""The declared recipe: fields, their ops and codecs, and its fingerprint.

An op computes by itself; `precache_workers.ops` decodes files and runs functions of the user.
"""
