"""Versions of a store after their build: list, compare, use, collect, verify, pull and push."""
