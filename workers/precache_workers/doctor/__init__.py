"""Measurements of a source and this machine before anything is cached, and predictions."""
