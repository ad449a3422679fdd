"""Decoding and the ops of a recipe, and their outputs on probes.

The digests of these outputs are the part of an identity that libraries decide.
"""
