"""Decoding and the ops of a recipe, and their outputs on probes.

The digests of these outputs identify ops independently of library versions.
"""
