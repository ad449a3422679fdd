"""Builds as jobs of a Ray cluster: packed, submitted, followed, stopped."""
