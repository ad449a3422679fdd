"""Simulate loaders, a queue and a training loop; text, charts and a page that replays it.

Pure functions, except for those that write files.
"""
