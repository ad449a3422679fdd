"""The stall clock: how long a training loop waits for its data."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 65_536
"""Steps kept between two reports."""


@dataclass(frozen=True)
class Times:
    """Seconds a step: mean, median, 95th percentile and maximum; zeros where there was none."""

    mean: float = 0.0
    median: float = 0.0
    p95: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        if not seconds:
            return cls()
        ordered = sorted(seconds)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return cls(statistics.fmean(ordered), statistics.median(ordered), p95, ordered[-1])


@dataclass(frozen=True)
class LoaderStats:
    """What a loader did since the last report.

    Attributes
    ----------
    batches, samples, bytes
        Handed out.
    data, step
        Waiting for a batch, and the caller's own time between two batches.
    stall_ratio
        Waiting over all; near 0 means that data is not what limits the training.
    """

    batches: int
    samples: int
    bytes: int
    data: Times
    step: Times
    stall_ratio: float


class StallClock:
    """Collects the two times of every step; cheap enough for every step."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._data: deque[float] = deque(maxlen=WINDOW)
        self._step: deque[float] = deque(maxlen=WINDOW)
        self._waited = self._worked = 0.0
        self._batches = self._samples = self._bytes = 0

    def batch(self, waited: float, samples: int, nbytes: int) -> None:
        """One batch was handed out after `waited` seconds."""
        self._data.append(waited)
        self._waited += waited
        self._batches += 1
        self._samples += samples
        self._bytes += nbytes

    def step(self, seconds: float) -> None:
        """The caller came back for the next batch after `seconds`."""
        self._step.append(seconds)
        self._worked += seconds

    def report(self) -> LoaderStats:
        """Everything since the last report, which starts a new one."""
        total = self._waited + self._worked
        stats = LoaderStats(
            self._batches,
            self._samples,
            self._bytes,
            Times.of(self._data),
            Times.of(self._step),
            self._waited / total if total else 0.0,
        )
        self._reset()
        return stats
