"""The stall clock, which measures how long a training loop waits for its data.

A CUDA step returns as soon as it is queued, so the host cannot measure it, and a wait for data
during which the device runs queued steps costs nothing. So on CUDA one event is recorded when the
caller requests a batch and another when it receives one, both on the caller's current stream. The
device passes the first when it has done all earlier work. It passes the second immediately if the
host has recorded it by then, else when the host does. The time between the two is how long the
device was idle for lack of the batch, plus copies and transforms that fetching queued on that
stream. Nothing here waits for the device: an event that is not passed is checked a step later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from precache.runtime.spread import Spread
from precache.units import counted, number, plain, size

if TYPE_CHECKING:
    import torch

KEPT_STEPS = 65_536
"""Steps kept between two reports."""


@dataclass(frozen=True)
class FetchedObjects:
    """Objects fetched over the network, and their bytes."""

    objects: int = 0
    nbytes: int = 0


class Counters(NamedTuple):
    """Sums that only grow, of what a loader has done to make its batches on the CPU.

    Attributes
    ----------
    threads
        Seconds of the threads that read ahead, decode and transform, including what they waited
        for.
    transforms
        The part of `threads` that was spent in transforms.
    loop
        Seconds of the loop's own thread, in transforms.
    cpu_seconds
        CPU time of the threads.
    objects, nbytes
        Objects fetched into a disk cache, and their bytes.
    repeated
        Rows read a second time.
    """

    threads: float = 0.0
    transforms: float = 0.0
    loop: float = 0.0
    cpu_seconds: float = 0.0
    objects: int = 0
    nbytes: int = 0
    repeated: int = 0

    def plus(self, other: Counters, sign: int = 1) -> Counters:
        """Add counters, or subtract them with the sign -1."""
        sums: Iterable[Any] = map(lambda own, more: own + sign * more, self, other)
        return Counters(*sums)

    def wait_for_transforms(self, waited: float) -> float:
        """Return how many of the seconds that a loop waited were for transforms.

        These are the seconds of the loop's own transforms. The rest of the wait is divided like the
        threads' time.
        """
        share = self.transforms / self.threads if self.threads > 0 else 0.0
        return min(waited, self.loop + max(0.0, waited - self.loop) * share)


@dataclass(frozen=True)
class LoaderStats:
    """Statistics of a loader since the last report; ``str()`` gives the text for people.

    Attributes
    ----------
    batches, samples, bytes
        Batches of steps that have ended, their rows and their bytes.
    data, step, iteration
        Seconds of waiting for a batch, of the caller's own work until it requests the next one, and
        of both together. On CUDA this is the device's time: the host's work while the device is
        busy does not count.
    stall_ratio
        Waiting over all time; near 0 means that data does not limit the training.
    transform_ratio
        The part of `stall_ratio` that is waiting for transforms on the CPU; the rest is waiting for
        loading.
    cpu_seconds
        CPU time of the threads that read ahead, decode and, on the CPU, transform.
    fetched
        Objects fetched from a remote store into the disk cache.
    repeated
        Rows read a second time: to fill up the end of an epoch on several ranks, or in place of bad
        samples in an epoch that follows a build.
    ranks
        Ranks that share each step's rows.
    compared
        Ranks known to have made the same loader at the same place, this one included; None with one
        rank, or before an epoch has ended. Whether ranks beyond these agree is unknown.
    """

    batches: int
    samples: int
    bytes: int
    data: Spread
    step: Spread
    iteration: Spread
    stall_ratio: float
    cpu_seconds: float = 0.0
    fetched: FetchedObjects = FetchedObjects()
    repeated: int = 0
    transform_ratio: float = 0.0
    ranks: int = 1
    compared: int | None = None

    def __str__(self) -> str:
        if not self.batches:
            return "no finished batch since the last report (it ends when the next is asked for)"
        seconds = self.batches * (self.data.mean + self.step.mean)
        speed = f", {number(self.samples / seconds)} samples/s" if seconds else ""
        read = f"{counted(self.samples, 'sample')}, {size(self.bytes)}{speed}"
        lines = [
            f"{counted(self.batches, 'batch')}: {read}",
            f"waiting for data  {self.stall_ratio:6.1%}  {self.data.in_ms()} per batch",
        ]
        if self.transform_ratio:
            loading = self.stall_ratio - self.transform_ratio
            lines.append(f"  for transforms  {self.transform_ratio:6.1%}")
            lines.append(f"  for loading     {loading:6.1%}")
        lines.append(
            f"your own step     {1 - self.stall_ratio:6.1%}  {self.step.in_ms()} per batch"
        )
        lines.append(f"loader's threads  {plain(self.cpu_seconds, 3)} CPU-s")
        if self.fetched.objects:
            fetched = f"{self.fetched.objects:,} objects, {size(self.fetched.nbytes)}"
            lines.append(f"fetched           {fetched}")
        if self.repeated:
            lines.append(f"repeated          {counted(self.repeated, 'row')}, to fill up the epoch")
        if self.compared is not None and self.compared < self.ranks:
            compared = f"{self.compared:,} of {self.ranks:,}"
            lines.append(f"ranks compared    {compared}; the others may read overlapping rows")
        return "\n".join(lines)


class ThreadTime:
    """CPU time and wall time of several threads, added up.

    Attributes
    ----------
    cpu, wall
        Seconds since the beginning.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cpu = self.wall = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Add the CPU time and the wall time of the calling thread in the block."""
        started, wall = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.cpu += time.thread_time() - started
                self.wall += time.perf_counter() - wall


Mark = TypeVar("Mark")
Between = Callable[[Mark, Mark], float | None]
"""Returns the seconds from one mark to a later one; None before the device has passed both."""


class _EndedStep(NamedTuple, Generic[Mark]):
    """A step that has ended: three marks, and what its batch consists of."""

    requested: Mark
    arrived: Mark
    ended: Mark
    samples: int
    nbytes: int


@dataclass
class Steps:
    """Measured steps, of which the times of the last `KEPT_STEPS` are kept.

    Attributes
    ----------
    data, work
        Seconds of each step that the loop waited, and worked.
    """

    data: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    work: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    data_total: float = 0.0
    work_total: float = 0.0
    batches: int = 0
    samples: int = 0
    nbytes: int = 0

    def stats(self, made: Counters = Counters()) -> LoaderStats:  # noqa: B008  # immutable
        """Return the statistics of these steps, whose batches were `made` so."""
        total = self.data_total + self.work_total
        transforms = made.wait_for_transforms(self.data_total)
        return LoaderStats(
            batches=self.batches,
            samples=self.samples,
            bytes=self.nbytes,
            data=Spread.of(self.data),
            step=Spread.of(self.work),
            iteration=Spread.of([sum(both) for both in zip(self.data, self.work, strict=True)]),
            stall_ratio=self.data_total / total if total else 0.0,
            transform_ratio=transforms / total if total else 0.0,
            cpu_seconds=made.cpu_seconds,
            fetched=FetchedObjects(made.objects, made.nbytes),
            repeated=made.repeated,
        )


class StallClock(Generic[Mark]):
    """Separates waiting from working by two marks per step; cheap enough for every step.

    Parameters
    ----------
    mark
        Returns the time, such as `time.perf_counter`, or records an event on a device's stream.
    between
        Seconds from one mark to another.
    """

    def __init__(self, mark: Callable[[], Mark], between: Between[Mark]) -> None:
        self._mark = mark
        self._between = between
        self._requested: Mark | None = None
        self._arrived: Mark | None = None
        self._batch = 0, 0
        self._open: deque[_EndedStep[Mark]] = deque()
        self._steps = Steps()

    @property
    def batches(self) -> int:
        """Batches that the next report has."""
        self._settle()
        return self._steps.batches

    def begin(self) -> None:
        """Begin an epoch: the caller's time since the last one is not a step."""
        self._arrived = None
        self.requested()

    def requested(self) -> None:
        """Record that the caller requests the next batch, which ends a step."""
        now = self._mark()
        if self._requested is not None and self._arrived is not None:
            self._open.append(_EndedStep(self._requested, self._arrived, now, *self._batch))
            self._settle()
        self._requested, self._arrived = now, None

    def arrived(self, samples: int = 0, nbytes: int = 0) -> None:
        """Record that a batch is handed out."""
        self._arrived, self._batch = self._mark(), (samples, nbytes)

    def forget(self) -> None:
        """Leave out the current step, which does not end."""
        self._requested = self._arrived = None

    def _settle(self) -> None:
        """Count the steps that the device has finished, each as a whole."""
        while self._open:
            requested, arrived, ended, samples, nbytes = self._open[0]
            data, work = self._between(requested, arrived), self._between(arrived, ended)
            if data is None or work is None:
                return
            self._open.popleft()
            steps = self._steps
            steps.data.append(data)
            steps.work.append(work)
            steps.data_total += data
            steps.work_total += work
            steps.batches += 1
            steps.samples += samples
            steps.nbytes += nbytes

    def take(self) -> Steps:
        """Return the steps since the last call.

        A step that has not ended, or that the device has not finished, is in a later one.
        """
        self._settle()
        steps, self._steps = self._steps, Steps()
        return steps


def stall_clock(device: torch.device) -> StallClock[Any]:
    """Make a clock that measures by events on CUDA, else by the host's clock."""
    if device.type == "cuda":
        return StallClock(lambda: _record_event(device), _seconds_between)
    return StallClock(time.perf_counter, lambda start, end: end - start)


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Record a timed event on the caller's current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
    """Return the device's seconds between two events; None before it has passed both."""
    # Both, since they may be on different streams. torch's own method has no types.
    if not (start.query() and end.query()):  # type: ignore[no-untyped-call]
        return None
    return float(start.elapsed_time(end)) / 1e3
