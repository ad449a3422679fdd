"""Batches on a CUDA device: slots that it unpacks, and whole versions in its memory.

`loading.stream` fills the slots of `device_slots`. nvCOMP, through `codecs`, is optional.
"""
