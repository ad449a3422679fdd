"""Discrete-event model of loading: loaders that make one batch at a time, a queue, one consumer.

Times are whole nanoseconds, so that simultaneous events compare equal.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.errors import UsageError
from precache.runtime.integers import whole
from precache.simulation.distributions import Durations, MeasuredTimes, durations

MOST_BATCHES = 1_000_000
MOST_LOADERS = 10_000
_NS = 1_000_000_000
NEVER = np.iinfo(np.int64).max

Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scenario:
    """Parameters of a simulation.

    Attributes
    ----------
    queue
        Capacity of the queue in batches, not counting the finished batch that each blocked loader
        holds; None for the number of loaders.
    """

    loaders: int
    load: Durations
    step: Durations
    queue: int | None = None
    seconds: float = 30.0
    seed: int = 0

    @property
    def capacity(self) -> int:
        """Capacity of the queue in batches."""
        return self.loaders if self.queue is None else self.queue

    @property
    def limit(self) -> float:
        """Long-run upper bound of batches/s: the lower of loaders / load time and 1 / step time."""
        return min(self.loading_limit, self.step_limit)

    @property
    def loading_limit(self) -> float:
        return 1000 * self.loaders / self.load.mean_ms

    @property
    def step_limit(self) -> float:
        return 1000 / self.step.mean_ms


@dataclass
class _Batches:
    """Times of each batch in nanoseconds, in the order in which loaders begin them."""

    loader: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def begin(self, loader: int, now: int, ready: int) -> int:
        self.loader.append(loader)
        self.begun.append(now)
        self.ready.append(ready)
        for times in (self.queued, self.taken, self.done):
            times.append(NEVER)
        return len(self.loader) - 1


class _EventLoop:
    """The event loop of one simulation.

    The n-th batch begun takes the n-th load time, whichever loader makes it; the n-th batch taken
    takes the n-th step time. With the same times, more loaders or a longer queue therefore never
    delay a batch: each event count is a monotone function of the others.
    """

    def __init__(self, scenario: Scenario) -> None:
        loads, steps = np.random.default_rng(scenario.seed).spawn(2)
        self.loads: Iterator[int] = scenario.load.draw(loads)
        self.steps: Iterator[int] = scenario.step.draw(steps)
        self.scenario = scenario
        self.batches = _Batches()
        self.events: list[tuple[int, int]] = []  # (time, batch); the end of a step is -1 - batch
        self.held: deque[int] = deque()  # finished batches of blocked loaders
        self.queue: deque[int] = deque()
        self.working = False

    def run(self, end: int) -> _Batches:
        for loader in range(self.scenario.loaders):
            self._begin(loader, 0)
        while self.events[0][0] <= end:
            now, batch = heapq.heappop(self.events)
            if batch < 0:
                self.working = False
            else:
                self.held.append(batch)
            self._advance(now)
        return self.batches

    def _begin(self, loader: int, now: int) -> None:
        ready = now + next(self.loads)
        heapq.heappush(self.events, (ready, self.batches.begin(loader, now, ready)))
        if len(self.batches.loader) > MOST_BATCHES:
            raise UsageError(
                f"seconds={self.scenario.seconds:g} gives more than {MOST_BATCHES:,} batches, "
                "the limit of a simulation: give a shorter time"
            )

    def _advance(self, now: int) -> None:
        while True:
            if not self.working and (self.queue or self.held):
                if not self.queue:
                    self._enqueue(now)
                self._take(self.queue.popleft(), now)
            elif self.held and len(self.queue) < self.scenario.capacity:
                self._enqueue(now)
            else:
                return

    def _enqueue(self, now: int) -> None:
        batch = self.held.popleft()
        self.queue.append(batch)
        self.batches.queued[batch] = now
        self._begin(self.batches.loader[batch], now)

    def _take(self, batch: int, now: int) -> None:
        self.working = True
        done = now + next(self.steps)
        self.batches.taken[batch], self.batches.done[batch] = now, done
        heapq.heappush(self.events, (done, -1 - batch))


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation; a batch is done when its step has ended.

    Attributes
    ----------
    scenario
        Parameters of the simulation.
    loader
        Loader of each batch, in the order in which batches were begun: (batches,) int64.
    begun, ready, queued, taken, done
        Times in nanoseconds at which a loader began each batch and finished it, the batch entered
        the queue, the consumer took it, and its step ended: (batches,) int64. Times after the end
        of the simulation did not happen.
    """

    scenario: Scenario
    loader: Nanoseconds
    begun: Nanoseconds
    ready: Nanoseconds
    queued: Nanoseconds
    taken: Nanoseconds
    done: Nanoseconds

    @property
    def end(self) -> int:
        """End of the simulation in nanoseconds."""
        return round(self.scenario.seconds * _NS)

    @property
    def setting(self) -> Scenario:
        """An older name of `scenario`."""
        return self.scenario

    @cached_property
    def batches(self) -> int:
        """Number of batches whose step has ended."""
        return int((self.done <= self.end).sum())

    @property
    def startup_s(self) -> float:
        """Seconds until the consumer took its first batch; the whole time if it took none."""
        return min(int(self.taken.min()), self.end) / _NS

    @property
    def rate(self) -> float:
        """Batches done per second since the consumer took the first one.

        In a short simulation it may exceed `Scenario.limit`: it includes the batches that were
        loaded during start-up.
        """
        rest = self.scenario.seconds - self.startup_s
        return self.batches / rest if rest else 0.0

    @cached_property
    def order(self) -> Nanoseconds:
        """Batches in the order in which the consumer took them: (taken,) int64."""
        order = np.argsort(self.taken, kind="stable")
        return order[: int((self.taken <= self.end).sum())]

    @cached_property
    def stalls_ms(self) -> npt.NDArray[np.float64]:
        """Wait of the consumer before each batch; the first is the start-up: (taken,) float64."""
        idle_since = np.concatenate([[0], self.done[self.order][:-1]])
        waits: npt.NDArray[np.float64] = self.taken[self.order] - idle_since[: len(self.order)]
        return waits / 1e6

    @cached_property
    def _waited(self) -> int:
        worked = np.minimum(self.done[self.order], self.end) - self.taken[self.order]
        return self.end - int(worked.sum())

    @property
    def stall_share_with_startup(self) -> float:
        """Share of the whole time that the consumer waited."""
        return self._waited / self.end

    @property
    def stall_share(self) -> float:
        """Share of the time since the first batch that the consumer waited; 1 if none came."""
        startup = min(int(self.taken.min()), self.end)
        return (self._waited - startup) / (self.end - startup) if startup < self.end else 1.0

    @cached_property
    def stall_by_place_ms(self) -> npt.NDArray[np.float64]:
        """Mean wait at each position in a round of one batch per loader: (loaders,) float64.

        Start-up is left out. Synchronous loaders have all the waiting at one position.
        """
        loaders = self.scenario.loaders
        waits = self.stalls_ms[1:]
        positions = np.arange(1, len(waits) + 1) % loaders
        sums = np.bincount(positions, waits, minlength=loaders)
        means: npt.NDArray[np.float64] = sums / np.maximum(1, np.bincount(positions, None, loaders))
        return means

    @property
    def stall_at_one_place(self) -> float:
        """Share of the waiting at the worst position of a round; 1 / loaders if it is even."""
        means = self.stall_by_place_ms
        return float(means.max() / means.sum()) if means.any() else 0.0

    @property
    def blocked_share(self) -> float:
        """Share of the loaders' time in which they were blocked by a full queue."""
        held = np.minimum(self.queued, self.end) - np.minimum(self.ready, self.end)
        return int(held.sum()) / (self.scenario.loaders * self.end)

    @cached_property
    def queue_depth(self) -> tuple[Nanoseconds, Nanoseconds]:
        """Times of changes, and the batches in the queue from then on: (changes,) int64 each."""
        times = np.concatenate([[0], self.queued, self.taken])
        changes = np.repeat([0, 1, -1], [1, len(self.queued), len(self.taken)])
        kept = times <= self.end
        times, changes = times[kept], changes[kept]
        order = np.argsort(times, kind="stable")
        times, depth = times[order], np.cumsum(changes[order])
        last = np.append(times[1:] != times[:-1], True)
        return times[last], depth[last]

    @property
    def queue_mean(self) -> float:
        """Time average of the batches in the queue."""
        times, depth = self.queue_depth
        return float(np.diff(times, append=self.end) @ depth) / self.end

    def with_one_more(self) -> Simulation:
        """Simulate one more loader, with the same times for the same batches."""
        return simulate_scenario(replace(self.scenario, loaders=self.scenario.loaders + 1))

    def html(self, path: str | Path) -> None:
        """Write a self-contained HTML page that replays the simulation."""
        from precache.html.pages import save
        from precache.simulation.page import render_simulation

        save(render_simulation(self), path)

    def to_dict(self) -> dict[str, Any]:
        """Return all results for JSON: times in ms, None for those after the end."""
        scenario, more = self.scenario, self.with_one_more()
        times, depth = self.queue_depth
        moments = ("begun", "ready", "queued", "taken", "done")
        return {
            "loaders": scenario.loaders,
            "queue": scenario.capacity,
            "load": _durations_dict(scenario.load),
            "step": _durations_dict(scenario.step),
            "seconds": scenario.seconds,
            "seed": scenario.seed,
            "batches": self.batches,
            "startup_s": self.startup_s,
            "rate_per_s": self.rate,
            "stall_share": self.stall_share,
            "stall_share_with_startup": self.stall_share_with_startup,
            "stall_at_one_place": self.stall_at_one_place,
            "blocked_share": self.blocked_share,
            "queue_mean": self.queue_mean,
            "limit": {
                "per_s": scenario.limit,
                "loading_per_s": scenario.loading_limit,
                "step_per_s": scenario.step_limit,
            },
            "one_more": {
                "batches": more.batches,
                "gain": more.batches - self.batches,
                "stall_share": more.stall_share,
                "stall_share_with_startup": more.stall_share_with_startup,
            },
            "series": {
                "stalls_ms": self.stalls_ms.tolist(),
                "stall_by_place_ms": self.stall_by_place_ms.tolist(),
                "queue_depth": {
                    "from_ms": _milliseconds(times, self.end),
                    "batches": depth.tolist(),
                },
                "made": {
                    "loader": self.loader.tolist(),
                    **{f"{m}_ms": _milliseconds(getattr(self, m), self.end) for m in moments},
                },
            },
        }


def _durations_dict(times: Durations) -> dict[str, Any]:
    values = {"mean_ms": times.mean_ms, "cv": times.cv, "dist": times.kind}
    return values | {"resolution_ms": times.resolution_ms, "measured": len(times.measured_ms)}


def _milliseconds(times: Nanoseconds, end: int) -> list[float | None]:
    return [time / 1e6 if time <= end else None for time in times.tolist()]


def simulate(
    load_ms: float | MeasuredTimes,
    step_ms: float | MeasuredTimes,
    loaders: int,
    *,
    queue: int | None = None,
    load_cv: float | None = None,
    step_cv: float | None = None,
    load_dist: str | None = None,
    step_dist: str | None = None,
    resolution_ms: float = 0.0,
    seconds: float = 30.0,
    seed: int = 0,
) -> Simulation:
    """Simulate loaders that feed a training loop.

    Each of `loaders` processes loads one batch at a time; all begin together. A finished batch goes
    into a queue, and its loader is blocked while the queue is full. One consumer takes the batches
    and runs a step on each.

    Parameters
    ----------
    load_ms, step_ms
        Time of one loader for one batch, and of the consumer for one step: a mean, or a sequence
        of measured times, used as `load_dist` and `step_dist` say.
    queue
        Capacity of the queue in batches, not counting the finished batch that each blocked loader
        holds; by default the number of loaders. Then 2 batches per loader are in progress, as in a
        ``torch.utils.data.DataLoader`` with ``prefetch_factor=2``.
    load_cv, step_cv
        Coefficient of variation: standard deviation over mean; 0 by default.
    load_dist, step_dist
        ``"gamma"`` (default with a variation), ``"lognormal"``, ``"exponential"`` or
        ``"constant"``; for measured times ``"cycle"`` (default: in their order, repeated) or
        ``"resample"`` (drawn at random).
    resolution_ms
        Load times are rounded up to a multiple of it; 0 for continuous time.

    Raises
    ------
    UsageError
        If an argument is out of range, or two contradict each other.
    """
    loaders, seed = whole("loaders", loaders), whole("seed", seed)
    queue = None if queue is None else whole("queue", queue)
    if not 1 <= loaders <= MOST_LOADERS:
        raise UsageError(f"loaders={loaders} is out of range: give 1 to {MOST_LOADERS:,}")
    if queue is not None and queue < 0:
        raise UsageError(f"queue={queue} is negative: give 0 or more batches")
    if not (math.isfinite(resolution_ms) and resolution_ms >= 0):
        raise UsageError(f"resolution_ms={resolution_ms:g} is out of range: give 0 or more")
    if not 1e-6 <= seconds <= 1e8:
        raise UsageError(f"seconds={seconds:g} is out of range: give more than 0, up to 1e8")
    if seed < 0:
        raise UsageError(f"seed={seed} is negative: give 0 or more")
    load = durations("load", load_ms, load_cv, load_dist, resolution_ms)
    step = durations("step", step_ms, step_cv, step_dist)
    return simulate_scenario(Scenario(loaders, load, step, queue, seconds, seed))


def simulate_scenario(scenario: Scenario) -> Simulation:
    """Simulate a scenario that `simulate` has checked."""
    batches = _EventLoop(scenario).run(round(scenario.seconds * _NS))
    columns = (getattr(batches, column.name) for column in fields(_Batches))
    return Simulation(scenario, *(np.array(column, np.int64) for column in columns))
