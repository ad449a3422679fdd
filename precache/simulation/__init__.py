"""A model of loaders, queue and training loop, its pictures and its player.

Pure but for writing files.
"""
