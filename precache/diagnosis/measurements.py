"""Measurements of a diagnosis, and the figures derived from them; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from precache.runtime.spread import Spread
from precache.runtime.usage import Usage
from precache.simulation.model import Times

SLOW = 3
"""Multiple of the median from which a batch counts as slow."""
OUTLIER = 10
"""Multiple of the median from which the only slow batch of all runs counts as an outlier."""


@dataclass(frozen=True)
class TimedRun:
    """Times and resource usage of one short run, in seconds.

    Attributes
    ----------
    seconds
        Time of each batch on the host, except batches that also started an epoch.
    total
        Time of all these batches, until the device has finished too.
    usage
        Resources used by this process and its descendants during the run.
    waits
        Part of each of `seconds` spent in the loader; 0 of the step alone.
    transform_share
        Share of the waits spent on transforms on the CPU; 0 if the loader does not report it.
    """

    seconds: tuple[float, ...]
    total: float
    usage: Usage
    waits: tuple[float, ...] = ()
    transform_share: float = 0.0

    def __add__(self, other: TimedRun) -> TimedRun:
        """Return the run of both."""
        pairs = zip(vars(self.usage).values(), vars(other.usage).values(), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        waited = [sum(run.waits) for run in (self, other)]
        shares = np.array([self.transform_share, other.transform_share])
        return TimedRun(
            seconds=self.seconds + other.seconds,
            total=self.total + other.total,
            usage=Usage(*sums),
            waits=self.waits + other.waits,
            transform_share=float(shares @ waited) / max(sum(waited), 1e-9),
        )

    @cached_property
    def times(self) -> Times:
        return np.array(self.seconds)

    @property
    def slow(self) -> list[int]:
        """Indices of the slow batches."""
        return np.flatnonzero(self.times > SLOW * Spread.of(self.seconds).median).tolist()

    @property
    def mean(self) -> float:
        """Mean time of a batch, until the device has finished too."""
        return max(1e-9, self.total / len(self.seconds))

    @property
    def stall(self) -> float:
        """Share of the time spent in the loader."""
        return min(1.0, sum(self.waits) / self.total) if self.waits else 0.0

    def without(self, batch: int) -> TimedRun:
        """Leave one batch out."""
        seconds = self.seconds[:batch] + self.seconds[batch + 1 :]
        waits = self.waits[:batch] + self.waits[batch + 1 :]
        return replace(self, seconds=seconds, waits=waits, total=self.total - self.seconds[batch])

    @property
    def computing(self) -> float:
        """Share of the time in which a process computes or waits for a core; 0 if unknown.

        At most the share of the rest of the time in which it computes: on a machine that others
        use, short waits for a core do not make a process that sleeps one that computes.
        """
        busy, ready = self.share(self.usage.cpu), self.share(self.usage.delay)
        return min(busy + ready, busy / max(0.1, 1 - ready))

    def share(self, seconds: float | None) -> float:
        """Return seconds of `usage` over the time of the run; 0 if unknown."""
        return (seconds or 0.0) / max(self.usage.wall, 1e-9)


@dataclass(frozen=True)
class Copies:
    """Seconds to copy a batch to a CUDA device.

    Attributes
    ----------
    pinned
        The loader's tensors are page-locked.
    as_given, from_pinned
        Time to copy the batch as the loader gives it, and from page-locked memory.
    exposed
        Extra time of a step on the batch as the loader gives it, over one on a batch that is on
        the device already.
    """

    pinned: bool
    as_given: float
    from_pinned: float
    exposed: float


@dataclass(frozen=True)
class Setup:
    """Facts about a loader and the machine.

    Attributes
    ----------
    workers, prefetch, in_order, pin_memory, persistent
        Options of a `DataLoader`; `workers` is None for other loaders.
    epoch
        Batches per epoch, if the loader has a length.
    cached
        The loader reads a precache store.
    cuda
        The step runs on CUDA.
    cores
        Cores available to this process.
    batch_nbytes
        Size of the batch's tensors and NumPy arrays.
    """

    workers: int | None = None
    prefetch: int = 2
    in_order: bool = True
    pin_memory: bool = False
    persistent: bool = False
    epoch: int | None = None
    cached: bool = False
    cuda: bool = False
    cores: int = 1
    batch_nbytes: int = 0


@dataclass(frozen=True)
class Measurements:
    """All measurements of a diagnosis.

    Attributes
    ----------
    step
        The step alone, on one batch that is on the device.
    loader
        The loader alone.
    together
        Loader and step, as in training.
    start
        Seconds until the first batch of an iteration, which also starts workers.
    take
        Seconds to take a batch that is ready from a worker process; 0 if unknown.
    single_worker
        One worker of the loader alone, if it has several.
    copies
        Copy times, if batches move from the host to a CUDA device.
    outlier
        Seconds of the only slow batch of all runs, which they leave out; 0 if there is none.
    """

    step: TimedRun
    loader: TimedRun
    together: TimedRun
    setup: Setup
    start: float = 0.0
    take: float = 0.0
    single_worker: TimedRun | None = None
    copies: Copies | None = None
    outlier: float = 0.0

    def without_outlier(self) -> Measurements:
        """Leave out a batch that is much slower than all others, of all runs of the loader."""
        runs = [(name, getattr(self, name)) for name in ("loader", "single_worker", "together")]
        slow = [(name, run, batch) for name, run in runs if run for batch in run.slow]
        if len(slow) != 1:
            return self
        [(name, run, batch)] = slow
        seconds = run.seconds[batch]
        if seconds < max(OUTLIER * Spread.of(run.seconds).median, 0.1 * run.total):
            return self
        return replace(self, **{name: run.without(batch), "outlier": seconds})

    @property
    def by_worker(self) -> TimedRun:
        """The run of a single worker if there is one, otherwise of the loader."""
        return self.single_worker or self.loader

    @property
    def runs(self) -> dict[str, TimedRun]:
        """The runs by name."""
        runs = {
            "step alone": self.step,
            "loader alone": self.loader,
            "one worker": self.single_worker,
            "both together": self.together,
        }
        return {name: run for name, run in runs.items() if run}
