"""Make reports from recorded steps and publish them, on a thread that no step waits for."""

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from precache.errors import UsageError
from precache.loading.options import named_device
from precache.loading.ranks import find_rank
from precache.metering.rank_kv import RankKeyValue
from precache.metering.report import RankStalls, SlowStep, StallReport, rare, slowest
from precache.outputs import Output
from precache.runtime.machine import Machine, MachineReader
from precache.runtime.ordered_map import Threads, collected
from precache.runtime.step_clock import LoaderStats

log = logging.getLogger(__name__)

SampleKeys = tuple[str | int, ...]


@dataclass(frozen=True)
class MeterSettings:
    """Validated options of a meter.

    Attributes
    ----------
    steps, seconds
        Interval between reports; the one that is not used is infinite.
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
        threshold: Any,  # unchecked user input, as `to` is
        to: Any,
        device: str | torch.device | None,
    ) -> MeterSettings:
        """Check the options of `precache.meter`; raises `UsageError`."""
        steps = seconds = math.inf
        if isinstance(every, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?) ?s", every)
            seconds = float(match[1]) if match else 0
        elif not isinstance(every, bool):
            with contextlib.suppress(TypeError):
                steps = operator.index(every)
        if not (seconds > 0 and steps >= 1) or steps == seconds:
            raise UsageError(
                f"every is {every!r}; give steps such as 100, or seconds such as '30s'"
            )
        if not isinstance(threshold, Real) or not 0 <= float(threshold) <= 1:
            raise UsageError(f"threshold is {threshold!r}; give a share from 0 to 1 such as 0.01")
        several = isinstance(to, Iterable) and not callable(to)
        wrong = [output for output in to if not callable(output)] if several else [to]
        if wrong:
            raise UsageError(
                f"to has {wrong[0]!r}; give a list of callables such as [outputs.log()]"
            )
        chosen = None if device is None else named_device(device)
        return cls(name, steps, seconds, float(threshold), tuple(to), chosen)


@dataclass(frozen=True, order=True)
class Wait:
    """A long wait of the host, and a function that returns the keys of its samples."""

    seconds: float
    step: int
    first: bool
    keys: Callable[[], SampleKeys]


@dataclass(frozen=True)
class Window:
    """The measurements for one report."""

    stats: LoaderStats
    waits: tuple[Wait, ...]
    number: int
    step: int


def summarize(
    settings: MeterSettings, window: Window, machine: Machine, rank: int, world_size: int
) -> StallReport:
    """Make the report of this rank alone."""
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
        transform_ratio=stats.transform_ratio,
        slow=slow,
        ranks=(own,),
        machine=machine,
        time=time.time(),
    )


_unclear: set[str] = set()
"""Errors about the rank of this process of which the log has a warning."""


def reporting_rank() -> tuple[int, int]:
    """Return rank and world size; 0 and 1 if they are unclear, since no meter ends a training."""
    try:
        return find_rank()
    except UsageError as error:
        if str(error) not in _unclear:
            _unclear.add(str(error))
            log.warning("the meter reports this process alone, as rank 0 of 1: %s", error)
        return 0, 1


class Publisher:
    """The thread that makes the reports of one iteration, shares them and calls the outputs."""

    def __init__(self, settings: MeterSettings) -> None:
        self.machine = MachineReader()
        self._settings = settings
        self._rank, self._world_size = reporting_rank()
        self._store: RankKeyValue | None = None
        self._hurry = threading.Event()
        self._threads = Threads(1, "precache-meter")
        self._last = self._threads.submit(self._open)

    def _open(self) -> None:
        self.machine.read()
        self._store = RankKeyValue.connect(self._settings.name, self._rank, self._world_size)

    def publish(self, window: Window) -> None:
        """Make and publish a report on the thread.

        It does nothing while the loop is garbage-collected, when taking a lock could deadlock, or
        at the end of the process.
        """
        if collected():
            return
        self._last = self._threads.submit(self._publish, window)

    def close(self, hurry: bool) -> None:
        """Wait for the last report and end the thread; with `hurry` do not wait for other ranks."""
        if hurry:
            self._hurry.set()
        if self._threads.here and not collected():
            concurrent.futures.wait([self._last])
        self._threads.close()

    def _publish(self, window: Window) -> None:
        try:
            machine = self.machine.read()
            report = summarize(self._settings, window, machine, self._rank, self._world_size)
            report = self._share(report)
        except Exception:  # a failed report must not end training
            log.exception("making the report of step %d failed", window.step)
            return
        for output in self._settings.to:
            try:
                output(report)
            except Exception:  # user code
                log.exception("sending the report of step %d failed", window.step)

    def _share(self, report: StallReport) -> StallReport:
        """Share the figures with the other ranks; on rank 0 add theirs to the report."""
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
            # The store ended with rank 0, or is not the expected one.
            log.info("this rank now reports its own figures alone: %s", error)
            self._store = None
        return report
