"""Records the steps of a loop, and says when a report is due."""

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
from precache.loading.ranks import find_rank
from precache.metering.publisher import Keys, Publisher, Settings, Wait, Window, summarize
from precache.metering.report import StallReport
from precache.runtime.machine import Machine

KEPT = 5
"""Longest waits whose samples are remembered until the report."""

KEY_FIELDS = ("key", "__key__", "row")

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
        self._device = torch.device("cpu")
        self._clock = stall_clock(self._device)
        self._publisher: Publisher | None = None
        self._waits: list[Wait] = []
        self._step = self._steps = 0
        self._asked_at = self._since = self._wait = 0.0
        self._first = self._in_hand = False

    def begin(self) -> None:
        """An iteration begins, and its first batch is asked for."""
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
        device = self._settings.device or torch.device("cuda" if on_cuda else "cpu")
        if device != self._device:
            self._clock, self._device = stall_clock(device), device
        self._clock.begin()
        self._asked_at = self._since = time.perf_counter()
        self._first, self._in_hand = True, False

    def asked(self) -> None:
        """The loop came back for the next batch; a report may be due."""
        self._clock.requested()
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
        self._clock.arrived()
        self._wait = time.perf_counter() - self._asked_at
        self._in_hand = True
        self._step += 1

    def look(self, batch: Any) -> None:
        """Remember which samples a long wait was for."""
        if len(self._waits) < KEPT or self._wait > self._waits[0].seconds:
            wait = Wait(self._wait, self._step, self._first, self._locate(batch))
            (heapq.heappush if len(self._waits) < KEPT else heapq.heapreplace)(self._waits, wait)
        if self._first:
            # Behind the first batch, so that a loader's own processes are forked before.
            self._first = False
            self._publisher = Publisher(self._settings)

    def finish(self, ended: bool) -> None:
        """The iteration is over; it may have been left early. Reports what is left."""
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
        return summarize(self._settings, self._window(0), machine, *rank)

    def _window(self, number: int) -> Window:
        window = Window(self._clock.report(), tuple(self._waits), number, self._step)
        self._waits = []
        self._steps, self._since = 0, self._asked_at
        return window

    def _report(self) -> None:
        window = self._window(next(_windows[self._settings.name]))
        # On CUDA the device may not have come by any of these steps: they are of the next report.
        if self._publisher is not None and window.stats.iteration.max > 0:
            self._publisher.publish(window)
