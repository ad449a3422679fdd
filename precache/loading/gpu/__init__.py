"""Batches on a CUDA device: slots that it unpacks, and rows that it gathers itself.

`loading.stream` fills the slots of `device_slots`; `registered` has shards that the device reads
directly, `resident` whole versions in memory. nvCOMP, through `codecs`, is optional.
"""
