"""Measure a shard task: wall time by stage, CPU time, bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass

STAGES = ("fetch", "ops", "encode", "put")


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
    nbytes
        Bytes of the samples that were fetched.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.began = time.time()
        self.nbytes = 0
        self._cpu_before = time.process_time()
        self._since = time.perf_counter()

    def charge(self, stage: str) -> None:
        """Add the time since the last charge to a stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process since the start."""
        return time.process_time() - self._cpu_before
