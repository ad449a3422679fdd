"""What the probes of a diagnosis measure, and the figures that follow from it; pure."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import numpy as np

from precache.diagnosis.page_cache import Files
from precache.runtime.usage import Usage

SLOW = 3
"""Times the median from which a batch counts as slow."""

OUTLIER = 10
"""Times the median from which a single slow batch counts as an outlier."""

ENOUGH = 10
"""Batches from which one can be called an outlier."""


@dataclass(frozen=True)
class Run:
    """One short run.

    Attributes
    ----------
    seconds
        Of each batch, as the host saw it; those that also started an epoch are left out.
    total
        Seconds of all of them, until the device was done as well.
    usage
        Of this process and its descendants meanwhile.
    waits
        The part of `seconds` that was spent in the loader, where a step was run as well.
    """

    seconds: tuple[float, ...]
    total: float
    usage: Usage
    waits: tuple[float, ...] = ()

    @functools.cached_property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        return float(np.percentile(self.seconds, 95))

    @property
    def max(self) -> float:
        return max(self.seconds)

    @functools.cached_property
    def slow(self) -> list[int]:
        """Numbers of the batches that took several times the median."""
        return [i for i, each in enumerate(self.seconds) if each > SLOW * self.median]

    @functools.cached_property
    def outlier(self) -> int | None:
        """The only slow batch, where it alone distorts the mean; it says nothing of a rate."""
        slow = self.slow
        if len(self.seconds) < ENOUGH or len(slow) != 1:
            return None
        (found,) = slow
        share = self.seconds[found] / sum(self.seconds)
        return found if self.seconds[found] > OUTLIER * self.median and share > 0.2 else None

    @property
    def mean(self) -> float:
        """Seconds a batch, without an outlier."""
        if self.outlier is None:
            return self.total / len(self.seconds)
        return max(0.0, self.total - self.seconds[self.outlier]) / (len(self.seconds) - 1)

    @property
    def tail(self) -> float:
        """Share of the time by which slow batches, an outlier aside, exceed the median."""
        slow = [self.seconds[i] - self.median for i in self.slow if i != self.outlier]
        return sum(slow) / sum(self.seconds)

    @property
    def stall(self) -> float:
        """Share of the time that was spent in the loader, an outlier aside."""
        kept = [i for i in range(len(self.waits)) if i != self.outlier]
        return min(1.0, sum(self.waits[i] for i in kept) / max(self.mean * len(kept), 1e-9))

    @property
    def cores(self) -> float | None:
        """That were kept busy on average."""
        return None if self.usage.cpu is None else self.usage.cpu / max(self.usage.wall, 1e-9)

    @property
    def busy(self) -> float | None:
        """CPU time over the time in which there was a core to have it on."""
        if self.usage.cpu is None:
            return None
        had = self.usage.wall - (self.usage.delay or 0.0)
        return self.usage.cpu / max(had, 0.1 * self.usage.wall, 1e-9)

    def a_batch(self, counter: float | None) -> float:
        """A counter of `usage`, for each batch; 0 where it is not known."""
        return 0.0 if counter is None else counter / max(self.usage.wall, 1e-9) * self.mean


@dataclass(frozen=True)
class Copies:
    """Seconds that a batch's copy to a CUDA device takes; `exposed` as a step has to wait for it.

    Attributes
    ----------
    pinned
        Whether the loader's tensors are page-locked.
    as_given, from_pinned
        Of a copy of the batch as it comes, and from page-locked memory.
    exposed
        By how much a step on the batch as it comes is slower than one on the device's.
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
    workers, prefetch
        Of a `DataLoader`, and batches that each has in the making; workers is None for others.
    pin_memory, persistent
        As a `DataLoader` has them.
    epoch
        Batches of one, where the loader knows.
    cached, block_shuffle
        Whether it reads a store of precache, and whole shards in a row.
    cuda
        Whether the step runs on CUDA.
    cores
        Of this process.
    batch_nbytes
        Of the batch's tensors.
    memory
        Bytes that could hold files.
    files
        That it reads, where they are known.
    """

    workers: int | None = None
    prefetch: int = 2
    pin_memory: bool = False
    persistent: bool = False
    epoch: int | None = None
    cached: bool = False
    block_shuffle: bool = False
    cuda: bool = False
    cores: int = 1
    batch_nbytes: int = 0
    memory: int | None = None
    files: Files | None = None


@dataclass(frozen=True)
class Measurements:
    """All that a verdict is made from.

    Attributes
    ----------
    step
        Alone, on one batch that lies on the device.
    loader
        Alone; warm where `cold` is there.
    together
        Both, as training runs them.
    start
        Seconds until the first batch of an iteration, which also starts workers.
    lane
        A single worker of the loader, where it has several.
    cold
        The loader alone, after its files were dropped from the page cache.
    cold_note
        Why there is none.
    sequential
        Bytes/s of reading one of its files from the disk in a row.
    copies
        Where batches come to a CUDA device from the host.
    synchronisations
        Places in the step where the host waits for the device.
    """

    step: Run
    loader: Run
    together: Run
    setup: Setup
    start: float = 0.0
    lane: Run | None = None
    cold: Run | None = None
    cold_note: str = ""
    sequential: float | None = None
    copies: Copies | None = None
    synchronisations: tuple[str, ...] = ()

    @property
    def by_worker(self) -> Run:
        """Of one that loads, where that is known; else of the loader."""
        return self.lane or self.loader

    @property
    def fits(self) -> bool:
        """Whether the files find room in memory, so that later epochs are warm."""
        files, memory = self.setup.files, self.setup.memory
        return files is None or memory is None or files.nbytes < 0.8 * memory
