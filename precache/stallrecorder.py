"""Records the steps of a loop, and reports them from a thread that no step waits for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import heapq
import itertools
import logging
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from precache.errors import UsageError
from precache.eventclock import stall_clock
from precache.machine import Machine, MachineReader
from precache.outputs import Output
from precache.prefetch import Threads, collected
from precache.ranks import find_rank
from precache.rankstore import RankStore
from precache.stallclock import LoaderStats, StallClock, Times
from precache.stalls import RankStalls, SlowStep, StallReport, rare, slowest

log = logging.getLogger(__name__)

KEPT = 5
"""Longest waits whose samples are remembered until the report."""

KEY_FIELDS = ("key", "__key__", "row")

Keys = tuple[str | int, ...]
Locate = Callable[[Any], Callable[[], Keys]]
"""From a batch, at once and cheaply, to what tells its samples' keys later."""

_windows: defaultdict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
"""Reports of each name in this process: a meter made anew for every epoch goes on counting."""


def keys_in_batch(batch: Any) -> Callable[[], Keys]:
    """What a batch says of its samples: the field ``key`` or ``row`` of a mapping.

    Copied, since its memory may be that of a later batch when it is asked for.
    """
    if isinstance(batch, Mapping):
        for name in KEY_FIELDS:
            found = batch.get(name)
            if isinstance(found, torch.Tensor):
                tensor = found.detach().clone()
                return lambda: tuple(tensor.flatten().tolist())
            if isinstance(found, np.ndarray | Sequence):
                values = np.array(found, object).ravel()
                return lambda: tuple(values.tolist())
    return tuple


@dataclass(frozen=True)
class Settings:
    """How a meter reports; validated.

    Attributes
    ----------
    steps, seconds
        A report after so many; infinity for the one that does not count.
    """

    name: str
    steps: float
    seconds: float
    threshold: float
    to: tuple[Output, ...]
    device: torch.device | None

    @classmethod
    def of(
        cls,
        name: str,
        every: int | str,
        threshold: float,
        to: Sequence[Output],
        device: str | torch.device | None,
    ) -> Settings:
        """Raise `UsageError` for what cannot be."""
        steps = seconds = math.inf
        if isinstance(every, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?) ?s", every)
            seconds = float(match[1]) if match else 0
        elif isinstance(every, int):
            steps = every
        if not (seconds > 0 and steps >= 1) or steps == seconds:
            raise UsageError(f"every is {every!r}; give steps, as 100, or seconds, as '30s'")
        if not 0 <= threshold <= 1:
            raise UsageError(f"threshold is {threshold!r}; give a share from 0 to 1, as 0.01")
        for each in to:
            if not callable(each):
                raise UsageError(f"to has {each!r}; give callables, as those of precache.outputs")
        try:
            chosen = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise UsageError(f"device {device!r} is not one torch knows: {error}") from None
        return cls(name, steps, seconds, threshold, tuple(to), chosen)


@dataclass(frozen=True, order=True)
class _Wait:
    """A long wait of the host, and where its samples' keys are to be had."""

    seconds: float
    step: int
    first: bool
    keys: Callable[[], Keys]


@dataclass(frozen=True)
class _Window:
    """What is measured when a report is due."""

    stats: LoaderStats
    waits: tuple[_Wait, ...]
    number: int
    step: int


class StallRecorder:
    """Told by a loop when it asks for a batch and when it has one.

    Parameters
    ----------
    locate
        Where to find the keys of a batch's samples.
    """

    def __init__(self, settings: Settings, locate: Locate) -> None:
        self._settings = settings
        self._locate = locate
        self._clock: StallClock[Any] | None = None
        self._device = torch.device("cpu")
        self._publisher: _Publisher | None = None
        self._waits: list[_Wait] = []
        self._step = self._steps = 0
        self._asked_at = self._since = self._wait = 0.0
        self._first = self._in_hand = False

    def begin(self) -> None:
        """An iteration begins, and its first batch is asked for."""
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = self._settings.device or torch.device("cuda" if on_cuda else "cpu")
        if self._clock is None or device != self._device:
            self._clock, self._device = stall_clock(device), device
        self._clock.begin()
        self._asked_at = self._since = time.perf_counter()
        self._first, self._in_hand = True, False

    def asked(self) -> None:
        """The loop came back for the next batch; a report may be due."""
        assert self._clock is not None  # begin() comes first
        self._clock.asked()
        self._asked_at = time.perf_counter()
        if not self._in_hand:
            return
        self._in_hand = False
        self._steps += 1
        waited = self._asked_at - self._since
        if self._steps >= self._settings.steps or waited >= self._settings.seconds:
            self._report()

    def arrived(self) -> None:
        """The loop has a batch."""
        assert self._clock is not None  # begin() comes first
        self._clock.arrived()
        self._wait = time.perf_counter() - self._asked_at
        self._in_hand = True
        self._step += 1

    def look(self, batch: Any) -> None:
        """Remember which samples a long wait was for."""
        if len(self._waits) < KEPT or self._wait > self._waits[0].seconds:
            wait = _Wait(self._wait, self._step, self._first, self._locate(batch))
            (heapq.heappush if len(self._waits) < KEPT else heapq.heapreplace)(self._waits, wait)
        if self._first:
            # Behind the first batch, so that a loader's own processes are forked before.
            self._first = False
            self._publisher = _Publisher(self._settings)

    def finish(self, ended: bool) -> None:
        """The iteration is over; it may have been left early. Reports what is left."""
        assert self._clock is not None  # begin() comes first
        if not ended:
            self._clock.forget()
            if self._in_hand:
                self._waits = [each for each in self._waits if each.step != self._step]
                self._step, self._in_hand = self._step - 1, False
        if self._publisher is not None:
            if self._steps:
                self._report()
            self._publisher.close(hurry=not ended)
            self._publisher = None

    def take(self) -> StallReport:
        """The steps since the last report, which starts a new one; sent nowhere."""
        machine = self._publisher.machine.read() if self._publisher else Machine()
        rank = find_rank()
        return _summary(self._settings, self._window(0), machine, *rank)

    def _window(self, number: int) -> _Window:
        stats = LoaderStats(0, 0, 0, Times(), Times(), Times(), 0.0)
        if self._clock is not None:
            stats = self._clock.report()
        window = _Window(stats, tuple(self._waits), number, self._step)
        self._waits = []
        self._steps, self._since = 0, self._asked_at
        return window

    def _report(self) -> None:
        window = self._window(next(_windows[self._settings.name]))
        # On CUDA the device may not have come by any of these steps: they are of the next report.
        if self._publisher is not None and window.stats.iteration.max > 0:
            self._publisher.publish(window)


def _summary(
    settings: Settings, window: _Window, machine: Machine, rank: int, world_size: int
) -> StallReport:
    stats = window.stats
    slow: tuple[SlowStep, ...] = ()
    if rare(stats.data, stats.stall_ratio, settings.threshold):
        waits = [SlowStep(w.step, w.seconds, w.first, w.keys()) for w in window.waits]
        slow = slowest(stats.data, waits)
    own = RankStalls(
        rank, window.number, stats.batches, stats.stall_ratio, stats.data.mean, stats.iteration.mean
    )
    return StallReport(
        name=settings.name,
        rank=rank,
        world_size=world_size,
        window=window.number,
        step=window.step,
        steps=stats.batches,
        data=stats.data,
        iteration=stats.iteration,
        stall_ratio=stats.stall_ratio,
        slow=slow,
        ranks=(own,),
        machine=machine,
        time=time.time(),
    )


class _Publisher:
    """The thread of one iteration that makes reports, tells other ranks, and calls outputs."""

    def __init__(self, settings: Settings) -> None:
        self.machine = MachineReader()
        self._settings = settings
        self._rank, self._world_size = find_rank()
        self._store: RankStore | None = None
        self._hurry = threading.Event()
        self._threads = Threads(1, "precache-meter")
        self._last = self._threads.submit(self._open)

    def _open(self) -> None:
        self.machine.read()
        self._store = RankStore.connect(self._settings.name, self._rank, self._world_size)

    def publish(self, window: _Window) -> None:
        """Have the thread do it."""
        # Where the interpreter is ending, a loop that it ends has nobody to report to.
        with contextlib.suppress(RuntimeError):
            self._last = self._threads.submit(self._publish, window)

    def close(self, hurry: bool) -> None:
        """Wait for the last report, for slower ranks only without `hurry`; end the thread."""
        if hurry:
            self._hurry.set()
        if self._threads.here and not collected():
            concurrent.futures.wait([self._last])
        self._threads.close()

    def _publish(self, window: _Window) -> None:
        try:
            machine = self.machine.read()
            report = _summary(self._settings, window, machine, self._rank, self._world_size)
            report = self._with_others(report)
        except Exception:  # a report that cannot be made must not end a training
            log.exception("the report of step %d could not be made", window.step)
            return
        if self._rank and self._store and report.stall_ratio <= self._settings.threshold:
            return
        for output in self._settings.to:
            try:
                output(report)
            except Exception:  # it is the user's own code
                log.exception("the report of step %d could not be sent", window.step)

    def _with_others(self, report: StallReport) -> StallReport:
        if self._store is None:
            return report
        try:
            self._store.put(report.ranks[0])
            if self._rank == 0:
                ranks = tuple(self._store.gather(report.window, self._hurry))
                return dataclasses.replace(report, ranks=ranks)
        except (RuntimeError, ValueError) as error:
            # The store went with rank 0, or speaks of something else.
            log.info("ranks report one by one from here on: %s", error)
            self._store = None
        return report
