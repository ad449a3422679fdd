"""Measurements of a diagnosis, and the figures derived from them; pure."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import numpy as np

from precache.diagnosis.page_cache import Files
from precache.runtime.usage import Usage

SLOW = 3
"""Multiple of the median from which a batch counts as slow."""

OUTLIER = 10
"""Multiple of the median from which a single slow batch counts as an outlier."""

OUTLIER_BATCHES = 10
"""Fewest batches of a run that can have an outlier."""


@dataclass(frozen=True)
class TimedRun:
    """Times and resource usage of one short run.

    Attributes
    ----------
    seconds
        Time of each batch on the host, except batches that also started an epoch.
    total
        Time of all these batches, until the device has finished too.
    usage
        Resources used by this process and its descendants during the run.
    waits
        Part of each of `seconds` spent in the loader; 0 unless loader and step run together.
    transform_share
        Share of the waits spent on transforms on the CPU; 0 if the loader does not report it.
    """

    seconds: tuple[float, ...]
    total: float
    usage: Usage
    waits: tuple[float, ...] = ()
    transform_share: float = 0.0

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
        """Indices of the batches that took several times the median."""
        return [i for i, seconds in enumerate(self.seconds) if seconds > SLOW * self.median]

    @functools.cached_property
    def outlier(self) -> int | None:
        """Index of the only slow batch, if it alone distorts the mean."""
        slow = self.slow
        if len(self.seconds) < OUTLIER_BATCHES or len(slow) != 1:
            return None
        seconds = self.seconds[slow[0]]
        distorts = seconds > OUTLIER * self.median and seconds / sum(self.seconds) > 0.2
        return slow[0] if distorts else None

    @property
    def mean(self) -> float:
        """Mean seconds per batch, without an outlier."""
        if self.outlier is None:
            return self.total / len(self.seconds)
        return max(0.0, self.total - self.seconds[self.outlier]) / (len(self.seconds) - 1)

    @property
    def tail(self) -> float:
        """Share of the time by which slow batches exceed the median, without an outlier."""
        slow = [self.seconds[i] - self.median for i in self.slow if i != self.outlier]
        return sum(slow) / sum(self.seconds)

    @property
    def stall(self) -> float:
        """Share of the time spent in the loader, without an outlier."""
        kept = [i for i in range(len(self.waits)) if i != self.outlier]
        return min(1.0, sum(self.waits[i] for i in kept) / max(self.mean * len(kept), 1e-9))

    @property
    def cores(self) -> float | None:
        """Mean number of busy cores; None if unknown."""
        return None if self.usage.cpu is None else self.usage.cpu / max(self.usage.wall, 1e-9)

    @property
    def busy(self) -> float | None:
        """CPU time over the time in which a core was available; None if unknown."""
        if self.usage.cpu is None:
            return None
        available = self.usage.wall - (self.usage.delay or 0.0)
        return self.usage.cpu / max(available, 0.1 * self.usage.wall, 1e-9)

    def per_batch(self, counter: float | None) -> float:
        """Return a counter of `usage` per batch; 0 if unknown."""
        return 0.0 if counter is None else counter / max(self.usage.wall, 1e-9) * self.mean


@dataclass(frozen=True)
class Copies:
    """Seconds to copy a batch to a CUDA device.

    Attributes
    ----------
    pinned
        Whether the loader's tensors are page-locked.
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
    workers, prefetch
        Number of workers of a `DataLoader`, None for other loaders; and the number of batches that
        each worker prefetches.
    pin_memory, persistent
        Options of a `DataLoader`.
    epoch
        Batches per epoch, if the loader has a length.
    cached, block_shuffle
        Whether the loader reads a precache store, and whether it shuffles blocks.
    cuda
        Whether the step runs on CUDA.
    cores
        Cores available to this process.
    batch_nbytes
        Size of the batch's tensors and NumPy arrays.
    memory
        Memory in bytes that the page cache could use.
    files
        Files that the loader reads, if known.
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
    """All measurements of a diagnosis.

    Attributes
    ----------
    step
        The step alone, on one batch that is on the device.
    loader
        The loader alone; with files in the page cache if there is a `cold` run.
    together
        Loader and step, as in training.
    start
        Seconds until the first batch of an iteration, which also starts workers.
    single_worker
        One worker of the loader alone, if it has several.
    cold
        The loader alone, after its files were dropped from the page cache.
    cold_note
        Reason for the lack of a `cold` run; empty if there is one.
    sequential
        Bytes/s of reading one of the files sequentially from the disk.
    copies
        Copy times, if batches move from the host to a CUDA device.
    synchronisations
        Lines of the step at which the host waits for the device.
    """

    step: TimedRun
    loader: TimedRun
    together: TimedRun
    setup: Setup
    start: float = 0.0
    single_worker: TimedRun | None = None
    cold: TimedRun | None = None
    cold_note: str = ""
    sequential: float | None = None
    copies: Copies | None = None
    synchronisations: tuple[str, ...] = ()

    @property
    def by_worker(self) -> TimedRun:
        """The run of a single worker if there is one, otherwise of the loader."""
        return self.single_worker or self.loader

    @property
    def fits(self) -> bool:
        """True if later epochs read the page cache: the files fit into memory, or are unknown."""
        files, memory = self.setup.files, self.setup.memory
        return files is None or memory is None or files.nbytes < 0.8 * memory
