"""From what a loop recorded to reports, on a thread that no step waits for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import operator
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from precache.errors import UsageError
from precache.loading.ranks import find_rank
from precache.metering.rank_kv import RankStore
from precache.metering.report import RankStalls, SlowStep, StallReport, rare, slowest
from precache.outputs import Output
from precache.runtime.machine import Machine, MachineReader
from precache.runtime.ordered_map import Threads, collected
from precache.runtime.step_clock import LoaderStats

log = logging.getLogger(__name__)

Keys = tuple[str | int, ...]


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
        to: Any,  # whatever a user gave
        device: str | torch.device | None,
    ) -> Settings:
        """Raise `UsageError` for what cannot be."""
        steps = seconds = math.inf
        if isinstance(every, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?) ?s", every)
            seconds = float(match[1]) if match else 0
        elif not isinstance(every, bool):
            with contextlib.suppress(TypeError):
                steps = operator.index(every)
        if not (seconds > 0 and steps >= 1) or steps == seconds:
            raise UsageError(f"every is {every!r}; give steps, as 100, or seconds, as '30s'")
        if not 0 <= threshold <= 1:
            raise UsageError(f"threshold is {threshold!r}; give a share from 0 to 1, as 0.01")
        wrong = [to] if callable(to) else [each for each in to if not callable(each)]
        if wrong:
            raise UsageError(f"to has {wrong[0]!r}; give a list of callables, as [outputs.log()]")
        try:
            chosen = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise UsageError(f"device {device!r} is not one torch knows: {error}") from None
        return cls(name, steps, seconds, threshold, tuple(to), chosen)


@dataclass(frozen=True, order=True)
class Wait:
    """A long wait of the host, and where its samples' keys are to be had."""

    seconds: float
    step: int
    first: bool
    keys: Callable[[], Keys]


@dataclass(frozen=True)
class Window:
    """What is measured when a report is due."""

    stats: LoaderStats
    waits: tuple[Wait, ...]
    number: int
    step: int


def summarize(
    settings: Settings, window: Window, machine: Machine, rank: int, world_size: int
) -> StallReport:
    """A report of this rank alone."""
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


class Publisher:
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

    def publish(self, window: Window) -> None:
        """Have the thread do it; not where the loop is collected, which must take no lock, nor at
        the end of the process, where it has nobody to report to."""
        if collected():
            return
        self._last = self._threads.submit(self._publish, window)

    def close(self, hurry: bool) -> None:
        """Wait for the last report, for slower ranks only without `hurry`; end the thread."""
        if hurry:
            self._hurry.set()
        if self._threads.here and not collected():
            concurrent.futures.wait([self._last])
        self._threads.close()

    def _publish(self, window: Window) -> None:
        try:
            machine = self.machine.read()
            report = summarize(self._settings, window, machine, self._rank, self._world_size)
            report = self._among_ranks(report)
        except Exception:  # a report that cannot be made must not end a training
            log.exception("the report of step %d could not be made", window.step)
            return
        for output in self._settings.to:
            try:
                output(report)
            except Exception:  # it is the user's own code
                log.exception("the report of step %d could not be sent", window.step)

    def _among_ranks(self, report: StallReport) -> StallReport:
        """Tell the other ranks; on rank 0 with what they told."""
        if self._store is None:
            return report
        try:
            self._store.put(report.ranks[0])
            if self._rank == 0:
                ranks = tuple(self._store.gather(report.window, self._hurry))
                return dataclasses.replace(report, ranks=ranks)
            quiet = report.stall_ratio <= self._settings.threshold
            return dataclasses.replace(report, quiet=quiet)
        except (RuntimeError, ValueError) as error:
            # The store went with rank 0, or speaks of something else.
            log.info("ranks report one by one from here on: %s", error)
            self._store = None
        return report
