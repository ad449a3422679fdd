"""The stall clock: how long a training loop waits for its data."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

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
class FetchedObjects:
    """Objects that came over the network, and their bytes."""

    objects: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class LoaderStats:
    """What a loader did since the last report.

    Attributes
    ----------
    batches, samples, bytes
        Handed out.
    data, step, iteration
        Waiting for a batch, the caller's own time until it comes back for the next one, and both
        together. On CUDA as the device spent it: what the host does while the device is busy does
        not count.
    stall_ratio
        Waiting over all; near 0 means that data is not what limits the training.
    cpu_seconds
        CPU time of the threads that read ahead and decode, in all.
    ready
        Batches that lay decoded when one was asked for, on average; near 0 means that decoding
        is what the loop waits for (of small batches, which come in rounds of up to 8, below 8).
    fetched
        From a remote store into the disk cache; what was there already does not count.
    repeated
        Rows of an epoch that follows a build which came a second time, in place of bad samples.
    """

    batches: int
    samples: int
    bytes: int
    data: Times
    step: Times
    iteration: Times
    stall_ratio: float
    cpu_seconds: float = 0.0
    ready: float = 0.0
    fetched: FetchedObjects = FetchedObjects()
    repeated: int = 0


class ThreadTime:
    """CPU time that several threads spend on one thing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Add what the calling thread spends in the block."""
        started = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += time.thread_time() - started

    def take(self) -> float:
        """Seconds since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


Mark = TypeVar("Mark")
Between = Callable[[Mark, Mark], float | None]
"""Seconds from one mark to a later one, or None as long as the device has not come by."""

Part = Literal["data", "step", "iteration"]


class StallClock(Generic[Mark]):
    """Tells waiting from working by two marks a step; cheap enough for every step.

    Parameters
    ----------
    mark
        Takes the time, such as `time.perf_counter`, or records an event on a device's stream.
    between
        Seconds from one mark to another.
    """

    def __init__(self, mark: Callable[[], Mark], between: Between[Mark]) -> None:
        self._mark = mark
        self._between = between
        self._asked: Mark | None = None
        self._arrived: Mark | None = None
        self._open: deque[tuple[Part, Mark, Mark]] = deque()
        self._reset()

    def _reset(self) -> None:
        self._times: dict[Part, deque[float]] = {
            part: deque(maxlen=WINDOW) for part in get_args(Part)
        }
        self._totals: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._batches = self._samples = self._bytes = self._ready = 0

    def begin(self) -> None:
        """An epoch begins: what the caller did since the last one is not a step."""
        self._arrived = None
        self.asked()

    def asked(self) -> None:
        """The caller came back for the next batch."""
        now = self._mark()
        if self._arrived is not None:
            self._open.append(("step", self._arrived, now))
            if self._asked is not None:
                self._open.append(("iteration", self._asked, now))
            self._settle()
        self._asked, self._arrived = now, None

    def arrived(self, samples: int = 0, nbytes: int = 0, ready: int = 0) -> None:
        """A batch is handed out; `ready` lay decoded when it was asked for."""
        self._arrived = self._mark()
        if self._asked is not None:
            self._open.append(("data", self._asked, self._arrived))
        self._batches += 1
        self._samples += samples
        self._bytes += nbytes
        self._ready += ready

    def forget(self) -> None:
        """The step in hand comes to no end: leave it out."""
        if self._arrived is not None and self._open and self._open[-1][2] is self._arrived:
            self._open.pop()
            self._batches -= 1
        self._asked = self._arrived = None

    def _settle(self) -> None:
        while self._open:
            part, start, end = self._open[0]
            seconds = self._between(start, end)
            if seconds is None:
                return
            self._open.popleft()
            self._times[part].append(seconds)
            self._totals[part] += seconds

    def report(
        self, cpu_seconds: float = 0.0, fetched: FetchedObjects | None = None
    ) -> LoaderStats:
        """Everything since the last report, which starts a new one."""
        self._settle()
        total = self._totals["data"] + self._totals["step"]
        stats = LoaderStats(
            batches=self._batches,
            samples=self._samples,
            bytes=self._bytes,
            data=Times.of(self._times["data"]),
            step=Times.of(self._times["step"]),
            iteration=Times.of(self._times["iteration"]),
            stall_ratio=self._totals["data"] / total if total else 0.0,
            cpu_seconds=cpu_seconds,
            ready=self._ready / self._batches if self._batches else 0.0,
            fetched=fetched or FetchedObjects(),
        )
        self._reset()
        return stats
