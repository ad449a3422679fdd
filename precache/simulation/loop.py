"""Recurrence of a training loop: when each batch is asked for, begun, ready, taken and done."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


class Batches(NamedTuple):
    """Times of each batch, in the order in which batches are asked for: (batches,) each.

    Attributes
    ----------
    worker
        Number of the worker that loads the batch.
    asked, begun, ready
        Times at which the batch is asked for, and its worker begins and finishes it.
    taken, done
        Times at which its step begins and ends.
    """

    worker: npt.NDArray[np.int64]
    asked: Times
    begun: Times
    ready: Times
    taken: Times
    done: Times


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a ``torch.utils.data.DataLoader``, and the times that it takes itself.

    Attributes
    ----------
    workers, prefetch, in_order
        `num_workers`, `prefetch_factor` and `in_order`. Without workers, the loop itself loads.
    startup
        Time at which workers can begin: one for all, or one each.
    handover
        Time from the moment when a batch is ready until the loop can take it.
    copy
        Time from the moment when the loop takes a batch until its step begins.
    """

    workers: int
    prefetch: int = 2
    in_order: bool = True
    startup: Sequence[float] = (0.0,)
    handover: float = 0.0
    copy: float = 0.0

    @property
    def lanes(self) -> int:
        """Number of batches that are loaded at a time."""
        return max(1, self.workers)

    @property
    def window(self) -> int:
        """Batches that are asked for and not taken, at most."""
        return max(1, self.workers * self.prefetch)


def run_loop(load: Times, step: Times, setting: Setting) -> Batches:
    """Compute the times of all batches, as a `DataLoader` hands them out; all in the same unit.

    As many batches as the window holds are asked for at the start, from one worker after another.
    When the loop takes a batch, its worker is asked for another one. Without workers, the loop asks
    when the step before has ended.

    Parameters
    ----------
    load, step
        Time to load each batch, in the order in which they are asked for, and of each step:
        (batches,).
    """
    count, window, loads, steps = len(load), setting.window, load.tolist(), step.tolist()
    free = np.resize(np.asarray(setting.startup, float), setting.lanes).tolist()
    worker = [0] * count
    asked, begun, ready, taken, done = ([0.0] * count for _ in range(5))
    arrivals: list[tuple[float, int]] = []

    def ask(number: int, lane: int, now: float) -> None:
        worker[number], asked[number], begun[number] = lane, now, max(now, free[lane])
        ready[number] = free[lane] = begun[number] + loads[number]
        heapq.heappush(arrivals, (ready[number], number))

    for number in range(min(window, count)):
        ask(number, number % setting.lanes, 0.0)
    now = 0.0
    for turn in range(count):
        number = turn if setting.in_order else heapq.heappop(arrivals)[1]
        received = max(now, ready[number] + setting.handover)
        taken[number] = received + setting.copy
        now = done[number] = taken[number] + steps[turn]
        if turn + window < count:
            ask(turn + window, worker[number], received if setting.workers else now)
    return Batches(np.array(worker), *map(np.array, (asked, begun, ready, taken, done)))
