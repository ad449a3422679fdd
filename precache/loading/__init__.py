"""The training side: `Loader`, `CachedDataset`, `mix`, ranks, resumable positions.

`loading.gpu` makes batches on a CUDA device.
"""
