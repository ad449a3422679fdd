"""Record the steps of a loop, and publish a report when one is due."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from precache.loading.cuda_clock import stall_clock
from precache.metering.publisher import (
    MeterSettings,
    Publisher,
    SampleKeys,
    Wait,
    Window,
    reporting_rank,
    summarize,
)
from precache.metering.report import StallReport
from precache.runtime.machine import Machine
from precache.runtime.step_clock import WorkTime

KEPT_WAITS = 5
"""Longest waits whose samples are kept for the report."""

KEY_FIELDS = ("key", "__key__", "row")

Locate = Callable[[Any], Callable[[], SampleKeys]]
"""Returns for a batch, cheaply, a function that returns its samples' keys later."""

_windows: defaultdict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
"""Numbers of the reports by name, which continue if a script makes a new meter every epoch."""


def keys_in_batch(batch: Any) -> Callable[[], SampleKeys]:
    """Copy the field ``key`` or ``row`` of a mapping; its memory may be reused by a later batch.

    A field that holds anything but integers and text, such as the keys of attention, has no keys.
    """
    if isinstance(batch, Mapping):
        for name in KEY_FIELDS:
            field = batch.get(name)
            if isinstance(field, torch.Tensor):
                if field.is_floating_point() or field.is_complex():
                    continue
                tensor = field.clone()
                return lambda: tuple(tensor.flatten().tolist())
            if isinstance(field, np.ndarray):
                field = field.ravel().tolist()
            if isinstance(field, Sequence):
                values = [field] if isinstance(field, str | bytes) else field
                keys = tuple(key for key in map(_key, values) if key is not None)
                if len(keys) == len(values):
                    return lambda: keys
    return tuple


def _key(value: Any) -> str | int | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, str):
        return str(value)
    return int(value) if isinstance(value, int | np.integer) else None


class StallRecorder:
    """Records when a loop requests a batch and when it gets one.

    Parameters
    ----------
    locate
        Finds the keys of a batch's samples.
    work_time
        Returns the time in which the loader made batches, if it is known.
    """

    def __init__(
        self, settings: MeterSettings, locate: Locate, work_time: Callable[[], WorkTime] = WorkTime
    ) -> None:
        self._settings = settings
        self._locate = locate
        self._work_time = work_time
        self._reported_work = WorkTime()
        self._device = torch.device("cpu")
        self._clock = stall_clock(self._device)
        self._publisher: Publisher | None = None
        self._waits: list[Wait] = []
        self._step = self._steps = self._reported = 0
        self._requested_at = self._since = self._wait = 0.0
        self._first = self._in_hand = False

    def begin(self) -> None:
        """Start an iteration, which requests its first batch."""
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
        device = self._settings.device or torch.device("cuda" if on_cuda else "cpu")
        if device != self._device:
            self._clock, self._device = stall_clock(device), device
            self._reported = self._step
        self._clock.begin()
        if not self._steps:
            self._reported_work = self._work_time()
        self._requested_at = self._since = time.perf_counter()
        self._first, self._in_hand = True, False

    def batch_requested(self) -> None:
        """Record that the loop requests the next batch; publishes a report if one is due."""
        self._clock.requested()
        self._requested_at = time.perf_counter()
        if not self._in_hand:
            return
        self._in_hand = False
        self._steps += 1
        waited = self._requested_at - self._since
        if self._steps >= self._settings.steps or waited >= self._settings.seconds:
            self._report()

    def batch_arrived(self) -> None:
        """Record that the loop has a batch."""
        self._clock.arrived()
        self._wait = time.perf_counter() - self._requested_at
        self._in_hand = True
        self._step += 1

    def inspect(self, batch: Any) -> None:
        """Keep the samples of a long wait for the report."""
        if len(self._waits) < KEPT_WAITS or self._wait > self._waits[0].seconds:
            wait = Wait(self._wait, self._step, self._first, self._locate(batch))
            (heapq.heappush if len(self._waits) < KEPT_WAITS else heapq.heapreplace)(
                self._waits, wait
            )
        if self._first:
            # After the first batch, so that the loader has forked its processes before.
            self._first = False
            self._publisher = Publisher(self._settings)

    def finish(self, ended: bool) -> None:
        """End the iteration and report remaining steps; `ended` is False if it was left early."""
        if not ended:
            self._clock.forget()
            if self._in_hand:
                self._waits = [wait for wait in self._waits if wait.step != self._step]
                self._step, self._in_hand = self._step - 1, False
        if self._publisher is not None:
            self._report()
            self._publisher.close(hurry=not ended)
            self._publisher = None

    def take(self) -> StallReport:
        """Return a report of the steps since the last one, without publishing it."""
        machine = self._publisher.machine.read() if self._publisher else Machine()
        return summarize(self._settings, self._window(0), machine, *reporting_rank())

    def _window(self, number: int) -> Window:
        before, self._reported_work = self._reported_work, self._work_time()
        stats = self._clock.report(work=self._reported_work.plus(before, -1))
        self._reported += stats.batches
        window = Window(stats, tuple(self._waits), number, self._reported)
        self._waits = []
        self._steps, self._since = 0, self._requested_at
        return window

    def _report(self) -> None:
        # Without any step that the CUDA device has finished, the next report has them.
        if self._publisher is not None and self._clock.batches:
            self._publisher.publish(self._window(next(_windows[self._settings.name])))
