"""Make reports from recorded steps and publish them, on a thread that no step waits for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from precache.errors import UsageError
from precache.loading.job_store import job_store, key_prefix
from precache.loading.options import named_device
from precache.metering.report import RankStalls, SampleKeys, SlowStep, StallReport, rare
from precache.outputs import Output, terminal
from precache.runtime.machine import Machine, MachineReader
from precache.runtime.step_clock import Counters, Steps
from precache.runtime.threads import watch_process
from precache.units import parse_age

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Seconds between two looks of the thread for reports that are due."""
GATHER_SECONDS = 1.0
"""Time that rank 0 waits for the figures of other ranks."""
EXIT_SECONDS = 2.0
"""Seconds that the exit of the process waits for reports that are due."""


class MeterSettings:
    """Options of a meter.

    Attributes
    ----------
    steps, seconds
        Interval between reports; the one that is not used is infinite.

    Raises
    ------
    UsageError
        An option of `precache.meter` is invalid.
    """

    def __init__(
        self,
        name: str,
        every: int | str,
        threshold: Any,  # unchecked user input, as `to` is
        to: Any,
        device: str | torch.device | None,
    ) -> None:
        self.steps = self.seconds = math.inf
        if isinstance(every, str):
            with contextlib.suppress(UsageError):
                self.seconds = parse_age(every)
        elif not isinstance(every, bool):
            with contextlib.suppress(TypeError):
                self.steps = operator.index(every)
        if not (self.seconds > 0 and self.steps >= 1) or self.steps == self.seconds:
            raise UsageError(
                f"every is {every!r}; give steps such as 100, or a time such as '30s' or '5m'"
            )
        if not isinstance(threshold, Real) or not 0 <= float(threshold) <= 1:
            raise UsageError(f"threshold is {threshold!r}; give a share from 0 to 1 such as 0.01")
        to = [terminal()] if to is None else to
        several = isinstance(to, Iterable) and not callable(to)
        wrong = [output for output in to if not callable(output)] if several else [to]
        if wrong:
            raise UsageError(
                f"to has {wrong[0]!r}; give a list of callables such as [outputs.log()]"
            )
        self.name, self.threshold, self.to = name, float(threshold), tuple[Output, ...](to)
        self.device = None if device is None else named_device(device)


Wait = tuple[SlowStep, Callable[[], SampleKeys]]
"""A long wait of the host, and a function that returns the keys of its samples."""


class Window(NamedTuple):
    """The measurements for one report.

    Attributes
    ----------
    made
        What the loader did to make its batches.
    waits
        The longest ones, in ascending order.
    number, step
        Of the report, and of its last step.
    rank, world_size
        Of this process, when the iteration began.
    """

    steps: Steps
    made: Counters
    waits: tuple[Wait, ...]
    number: int
    step: int
    rank: int
    world_size: int

    def report(self, settings: MeterSettings, machine: Machine) -> StallReport:
        """Make the report of this rank alone."""
        stats = self.steps.stats(made=self.made)
        slow: tuple[SlowStep, ...] = ()
        if rare(stats.data, stats.stall_ratio, settings.threshold):
            long = [wait for wait in reversed(self.waits) if wait[0].seconds > stats.data.mean]
            slow = tuple(dataclasses.replace(step, keys=keys()) for step, keys in long)
        own = RankStalls(self.rank, self.number, stats.batches, stats.stall_ratio)
        return StallReport(
            name=settings.name,
            rank=self.rank,
            world_size=self.world_size,
            window=self.number,
            step=self.step,
            steps=stats.batches,
            data=stats.data,
            iteration=stats.iteration,
            stall_ratio=stats.stall_ratio,
            transform_ratio=stats.transform_ratio,
            slow=slow,
            ranks=(own,),
            machine=machine,
            time=time.time(),
            stalls=stats.stall_ratio > settings.threshold,
        )


class RankKeyValue:
    """The last figures of each rank, one key per rank, in the store at ``MASTER_ADDR``.

    It is the store of the job's rendezvous (torchrun's, or that of rank 0). A separate connection
    keeps our requests from delaying others.
    """

    def __init__(self, store: Any, name: str, world_size: int) -> None:
        self._keys = [f"{key_prefix(name)}/{number}" for number in range(world_size)]
        self._store = store
        self._reporting: list[str] = []
        self._silent: set[int] = set()

    def put(self, stalls: RankStalls) -> None:
        """Publish the figures of this rank."""
        self._store.set(self._keys[stalls.rank], json.dumps(dataclasses.asdict(stalls)))

    def gather(self, window: int, is_last: Callable[[], bool]) -> list[RankStalls]:
        """Return the last figures of every rank that has published any, in order of ranks.

        It waits up to `GATHER_SECONDS` for figures of `window`, but not for ranks that have never
        published any by the end of an earlier call.

        Parameters
        ----------
        is_last
            Returns False if a later window is due, so that there is no time for this one.
        """
        until, seconds = time.monotonic() + GATHER_SECONDS, 0.01
        ranks = set(range(len(self._keys)))
        while True:
            figures = self._read()
            awaited = ranks - self._silent - {s.rank for s in figures if s.window >= window}
            if not awaited or time.monotonic() > until or not is_last():
                self._silent = ranks - {stalls.rank for stalls in figures}
                return figures
            time.sleep(seconds)
            seconds *= 2

    def _read(self) -> list[RankStalls]:
        known = (key in self._reporting or self._store.check([key]) for key in self._keys)
        self._reporting = [key for key, is_known in zip(self._keys, known, strict=True) if is_known]
        values = self._store.multi_get(self._reporting)
        return [RankStalls(**json.loads(value)) for value in values]


class Publisher:
    """Publishes the reports of all meters of one name in this process, on one thread.

    Steps and reports are numbered through, so a script may make a new meter in every epoch.

    Attributes
    ----------
    steps, windows
        Number of the last step, and of the last report.
    machine
        Load of the machine since the last report, or the beginning of the iteration.
    """

    def __init__(self) -> None:
        watch_process()  # so that `collected` holds for an iterator that the collector ends
        self.steps = self.windows = 0
        self.machine = MachineReader()
        self._ranks = (0, 1)
        self._store: RankKeyValue | None = None
        self._due: deque[Callable[[], object]] = deque()
        self._look = threading.Event()
        self._thread: threading.Thread | None = None
        # Unlike `weakref.finalize`, it runs at the end of a process of `multiprocessing`, too.
        Finalize(None, self.flush, (EXIT_SECONDS,), exitpriority=0)

    def start(self) -> None:
        """Read the machine, and start the thread if there is none yet."""
        self.machine = MachineReader()
        self._due.append(self.machine.read)
        if self._thread is None:
            # A daemon, since an output may never return.
            self._thread = threading.Thread(target=self._run, name="precache-meter", daemon=True)
            self._thread.start()
        self._look.set()

    def publish(self, settings: MeterSettings, window: Window) -> None:
        """Leave a report to the thread, which is not woken: it might take the caller's core."""
        self._due.append(functools.partial(self._publish, settings, window, self.machine))

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all reports so far are published, but no longer than some seconds."""
        if self._thread is not None:
            published = threading.Event()
            self._due.append(published.set)
            self._look.set()
            published.wait(seconds)

    def _run(self) -> None:
        while True:
            self._look.wait(LOOK_SECONDS)
            self._look.clear()
            while self._due:
                try:
                    self._due.popleft()()
                except Exception:  # the thread lasts for all reports to come
                    log.exception("measuring the machine failed")

    def _publish(self, settings: MeterSettings, window: Window, machine: MachineReader) -> None:
        try:
            report = self._share(window.report(settings, machine.read()))
        except Exception:  # a failed report must not end training
            log.exception("making the report of step %d failed", window.step)
            return
        for output in settings.to:
            try:
                output(report)
            except Exception:  # user code
                log.exception("sending the report of step %d failed", window.step)

    def _share(self, report: StallReport) -> StallReport:
        """Share the figures with the other ranks; on rank 0 add theirs to the report."""
        ranks = report.rank, report.world_size
        if ranks != self._ranks:
            self._ranks, store = ranks, job_store(report.world_size)
            self._store = store if store is None else RankKeyValue(store, report.name, ranks[1])
        # The store may end with the process group.
        if self._store is None or not dist.is_initialized():
            return report
        try:
            self._store.put(report.ranks[0])
            if report.rank == 0:
                window = report.window
                figures = self._store.gather(window, lambda: self.windows == window)
                return dataclasses.replace(report, ranks=tuple(figures))
        except (RuntimeError, ValueError) as error:
            # The store ended with rank 0, or is not the expected one.
            log.info("this rank now reports its own figures alone: %s", error)
            self._store = None
        return report


def publisher_of(name: str) -> Publisher:
    """Return this process's only publisher of a name; a forked process has its own."""
    return _publisher(name, os.getpid())


@functools.cache
def _publisher(name: str, process: int) -> Publisher:
    return Publisher()
