"""Builds as jobs of a Ray cluster: pack one, submit it, follow it, stop it."""
