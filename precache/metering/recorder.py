"""Record the steps of a loop, and publish a report when one is due."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from precache.errors import UsageError
from precache.loading.ranks import find_rank
from precache.metering.publisher import MeterSettings, Publisher, Wait, Window, publisher_of
from precache.metering.report import SampleKeys, SlowStep, StallReport
from precache.runtime.machine import Machine, current_device
from precache.runtime.step_clock import Counters, stall_clock
from precache.runtime.threads import collected

log = logging.getLogger(__name__)

KEPT_WAITS = 5
"""Longest waits whose samples are kept for the report."""

KEY_FIELDS = ("key", "__key__", "row")

Locate = Callable[[Any], Callable[[], SampleKeys]]
"""Returns for a batch, cheaply, a function that returns its samples' keys later."""


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


@functools.cache
def _warn_once(error: str) -> None:
    log.warning("the meter reports this process alone, as rank 0 of 1: %s", error)


def reporting_rank() -> tuple[int, int]:
    """Return rank and world size; 0 and 1 if they are unclear, since no meter ends a training."""
    try:
        return find_rank()
    except UsageError as error:
        _warn_once(str(error))
        return 0, 1


class StallRecorder:
    """Records when a loop requests a batch and when it gets one.

    Parameters
    ----------
    locate
        Finds the keys of a batch's samples.
    made
        Returns what the loader has done to make its batches, if it is known.
    """

    def __init__(
        self, settings: MeterSettings, locate: Locate, made: Callable[[], Counters] = Counters
    ) -> None:
        self._settings = settings
        self._locate = locate
        self._made = made
        self._reported = Counters()
        self._device = torch.device("cpu")
        self._clock = stall_clock(self._device)
        self._ranks = (0, 1)
        self._waits: list[Wait] = []
        self._arrived = self._steps = 0
        self._requested_at = self._since = self._wait = 0.0
        self._first = self._in_hand = self._running = False

    @property
    def publisher(self) -> Publisher:
        """The publisher of the meter's name, in this process."""
        return publisher_of(self._settings.name)

    def begin(self) -> None:
        """Start an iteration, which requests its first batch."""
        device = self._settings.device or current_device()
        if device != self._device:
            self._clock, self._device = stall_clock(device), device
            self._arrived = 0
        self._ranks = reporting_rank()
        self._clock.begin()
        if not self._steps:
            self._reported = self._made()
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
        self._arrived += 1

    def inspect(self, batch: Any) -> None:
        """Keep the samples of a long wait for the report."""
        if len(self._waits) < KEPT_WAITS or self._wait > self._waits[0][0].seconds:
            step = SlowStep(self.publisher.steps + self._arrived, self._wait, self._first)
            self._waits.append((step, self._locate(batch)))
            self._waits.sort(key=lambda wait: wait[0].seconds)
            del self._waits[:-KEPT_WAITS]
        if self._first:
            # After the first batch, so that the loader has forked its processes before.
            self._first, self._running = False, True
            self.publisher.start()

    def finish(self, ended: bool) -> None:
        """End the iteration and report remaining steps; `ended` is False if it was left early."""
        if not ended:
            self._clock.forget()
            if self._in_hand:
                last = self.publisher.steps + self._arrived
                self._waits = [wait for wait in self._waits if wait[0].step != last]
                self._arrived, self._in_hand = self._arrived - 1, False
        if self._running:
            self._report()
            self._running = False

    def take(self) -> StallReport:
        """Return a report of the steps since the last one, without publishing it."""
        ranks = self._ranks if self._running else reporting_rank()
        machine = self.publisher.machine.read() if self._running else Machine()
        return self._window(0, ranks).report(self._settings, machine)

    def _report(self) -> None:
        # The collector runs in the middle of anything, where taking a lock could deadlock. Without
        # any step that the CUDA device has finished, the next report has them.
        if not collected() and self._clock.batches:
            self.publisher.windows += 1
            window = self._window(self.publisher.windows, self._ranks)
            self.publisher.publish(self._settings, window)

    def _window(self, number: int, ranks: tuple[int, int]) -> Window:
        before, self._reported = self._reported, self._made()
        steps, made = self._clock.take(), self._reported.plus(before, -1)
        self.publisher.steps += steps.batches
        self._arrived -= steps.batches
        window = Window(steps, made, tuple(self._waits), number, self.publisher.steps, *ranks)
        self._waits = []
        self._steps, self._since = 0, self._requested_at
        return window
