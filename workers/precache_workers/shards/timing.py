"""Measure a shard task: wall time by stage, CPU time, bytes, slow samples."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

from precache.store.receipts import SlowSample

STAGES = ("fetch", "ops", "encode", "put")
SLOWEST_OF_SHARD = 5
"""Most samples that a receipt names."""


@dataclass(frozen=True)
class TimeCost:
    """Seconds of wall time and of CPU time."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: TimeCost) -> TimeCost:
        return TimeCost(self.wall + other.wall, self.cpu + other.cpu)

    def __mul__(self, count: float) -> TimeCost:
        return TimeCost(self.wall * count, self.cpu * count)

    def __truediv__(self, count: float) -> TimeCost:
        return TimeCost(self.wall / count, self.cpu / count)


class Timing:
    """Clocks of one task, which start when this is created.

    Attributes
    ----------
    seconds
        Wall time by stage.
    began
        Unix time.
    cpu_before
        CPU time of the process until then.
    nbytes
        Bytes of the samples that were fetched.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.began = time.time()
        self.nbytes = 0
        self._samples: list[tuple[float, int, int]] = []
        self.cpu_before = time.process_time()
        self._since = time.perf_counter()

    def charge(self, stage: str) -> float:
        """Add the time since the last charge to a stage; returns that time."""
        now = time.perf_counter()
        spent = now - self._since
        self.seconds[stage] += spent
        self._since = now
        return spent

    def note(self, row: int, seconds: float, nbytes: int) -> None:
        """Record a sample's time and bytes."""
        self.nbytes += nbytes
        self._samples.append((seconds, row, nbytes))

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process since the start."""
        return time.process_time() - self.cpu_before

    def slowest(self) -> list[SlowSample]:
        """Return the samples that took longest, longest first."""
        slowest = heapq.nlargest(SLOWEST_OF_SHARD, self._samples)
        return [SlowSample(row, seconds, size) for seconds, row, size in slowest]
