"""Open the version that a training script needs, or build it once for all processes that need it.

`ensure` waits for a build in this process, in a background process or on a cluster; rank 0 lists
the source for all ranks. Imports `driver`, `jobs`, and the key-value store of `precache.loading`.
"""
