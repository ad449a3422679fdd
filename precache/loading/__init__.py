"""The training side: `Loader`, `CachedDataset`, `mix`, ranks, resumable positions.

`loading.gpu` gathers rows on a CUDA device.
"""
