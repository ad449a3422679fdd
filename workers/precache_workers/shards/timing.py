"""What a shard task notes of its own running: wall time by stage, bytes, slow samples, where."""

from __future__ import annotations

import heapq
import time

from precache.store.receipts import SlowSample
from precache_workers.sources.base import Sample

STAGES = ("fetch", "ops", "encode", "put")
SLOWEST = 5
"""Samples of a shard that its receipt names."""


class Timing:
    """Clocks of one task, from when this is made.

    Attributes
    ----------
    seconds
        Wall time by stage.
    began
        Unix time.
    cpu_before
        CPU time of the process until then.
    nbytes
        Of the samples that were fetched.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.began = time.time()
        self.nbytes = 0
        self._heap = [(0.0, -1, 0)] * SLOWEST
        self.cpu_before = time.process_time()
        self._since = time.perf_counter()

    def charge(self, stage: str) -> float:
        """Give a stage the time since the last charge; returns that."""
        now = time.perf_counter()
        spent = now - self._since
        self.seconds[stage] += spent
        self._since = now
        return spent

    def count(self, sample: Sample) -> int:
        """Add a sample's bytes."""
        nbytes = sample.nbytes
        self.nbytes += nbytes
        return nbytes

    def note(self, row: int, seconds: float, nbytes: int) -> None:
        """Keep a sample in mind if it is among the slowest."""
        if seconds > self._heap[0][0]:
            heapq.heapreplace(self._heap, (seconds, row, nbytes))

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process since."""
        return time.process_time() - self.cpu_before

    def slowest(self) -> list[SlowSample]:
        """The few samples noted that took longest, longest first."""
        found = sorted(self._heap, reverse=True)
        return [SlowSample(row, seconds, size) for seconds, row, size in found if row >= 0]
