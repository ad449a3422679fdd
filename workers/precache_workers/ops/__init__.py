"""Decoding, the ops of a field applied to samples, and their outputs on probes.

The digests of these outputs identify ops independently of library versions.
"""
