"""A model of loading: loaders that each make one batch at a time, a queue, one consumer.

Times are whole nanoseconds, so that events that coincide do so exactly.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.errors import UsageError
from precache.runtime.integers import whole
from precache.simulation.distributions import Durations, Measured, durations

MOST_BATCHES = 1_000_000
MOST_LOADERS = 10_000
_NS = 1_000_000_000
NEVER = np.iinfo(np.int64).max

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """What is simulated; `queue` holds finished batches, besides one in each loader's hands."""

    loaders: int
    load: Durations
    step: Durations
    queue: int | None = None
    seconds: float = 30.0
    seed: int = 0

    @property
    def room(self) -> int:
        """Batches that the queue holds: as many as there are loaders unless said otherwise."""
        return self.loaders if self.queue is None else self.queue

    @property
    def limit(self) -> float:
        """Batches a second that no schedule can exceed: loaders / load time, 1 / step time."""
        return min(self.loading_limit, self.step_limit)

    @property
    def loading_limit(self) -> float:
        return 1000 * self.loaders / self.load.mean_ms

    @property
    def step_limit(self) -> float:
        return 1000 / self.step.mean_ms


@dataclass
class _Batches:
    """What becomes of each batch, in the order in which they were begun; nanoseconds."""

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


class _Run:
    """One run of the events up to an end.

    The n-th load time is that of the n-th batch begun, whoever makes it, and the n-th step time
    that of the n-th batch taken. Then more loaders or a longer queue, with the same times, never
    make any batch later: each count of events is a monotone function of the other counts.
    """

    def __init__(self, setting: Setting) -> None:
        loads, steps = np.random.default_rng(setting.seed).spawn(2)
        self.loads: Iterator[int] = setting.load.drawn(loads)
        self.steps: Iterator[int] = setting.step.drawn(steps)
        self.setting = setting
        self.batches = _Batches()
        self.events: list[tuple[int, int]] = []  # when, and the batch; a step's end is -1 - batch
        self.held: deque[int] = deque()  # finished, in the hands of a loader that is blocked
        self.queue: deque[int] = deque()
        self.working = False

    def until(self, end: int) -> _Batches:
        for loader in range(self.setting.loaders):
            self._begin(loader, 0)
        while self.events[0][0] <= end:
            now, batch = heapq.heappop(self.events)
            if batch < 0:
                self.working = False
            else:
                self.held.append(batch)
            self._move_on(now)
        return self.batches

    def _begin(self, loader: int, now: int) -> None:
        ready = now + next(self.loads)
        heapq.heappush(self.events, (ready, self.batches.begin(loader, now, ready)))
        if len(self.batches.loader) > MOST_BATCHES:
            raise UsageError(
                f"seconds={self.setting.seconds:g} makes more than {MOST_BATCHES:,} batches, "
                "the most to simulate: shorten it"
            )

    def _move_on(self, now: int) -> None:
        while True:
            if not self.working and (self.queue or self.held):
                if not self.queue:
                    self._enqueue(now)
                self._take(self.queue.popleft(), now)
            elif self.held and len(self.queue) < self.setting.room:
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
    """What came of it, up to the end; a batch counts as done when its step has ended.

    Attributes
    ----------
    setting
        What was simulated.
    loader
        Number of the loader of each batch, in the order in which they were begun: (batches,)
        int64.
    begun, ready, queued, taken, done
        When a loader began each batch and had it ready, when it went into the queue, when the
        consumer took it and had done its step: (batches,) int64, nanoseconds. What lies after the
        end did not happen.
    """

    setting: Setting
    loader: Times
    begun: Times
    ready: Times
    queued: Times
    taken: Times
    done: Times

    @property
    def end(self) -> int:
        """Nanoseconds simulated."""
        return round(self.setting.seconds * _NS)

    @cached_property
    def batches(self) -> int:
        """Batches whose step has ended."""
        return int((self.done <= self.end).sum())

    @property
    def startup_s(self) -> float:
        """Seconds before the consumer had its first batch; all of them if none came."""
        return min(int(self.taken.min()), self.end) / _NS

    @property
    def rate(self) -> float:
        """Batches done a second from the first one's arrival on."""
        rest = self.setting.seconds - self.startup_s
        return self.batches / rest if rest else 0.0

    @cached_property
    def order(self) -> Times:
        """Batches that the consumer took, in that order: (taken,) int64."""
        order = np.argsort(self.taken, kind="stable")
        return order[: int((self.taken <= self.end).sum())]

    @cached_property
    def stalls_ms(self) -> npt.NDArray[np.float64]:
        """The consumer's wait before each batch that it took; the first is start-up: (taken,)."""
        idle_since = np.concatenate([[0], self.done[self.order][:-1]])
        waits: npt.NDArray[np.float64] = self.taken[self.order] - idle_since[: len(self.order)]
        return waits / 1e6

    @cached_property
    def _waited(self) -> int:
        worked = np.minimum(self.done[self.order], self.end) - self.taken[self.order]
        return self.end - int(worked.sum())

    @property
    def stall_share_with_startup(self) -> float:
        """Share of all the time that the consumer waited."""
        return self._waited / self.end

    @property
    def stall_share(self) -> float:
        """The same from the first batch's arrival on; 1 if none came."""
        startup = min(int(self.taken.min()), self.end)
        return (self._waited - startup) / (self.end - startup) if startup < self.end else 1.0

    @cached_property
    def stall_by_place_ms(self) -> npt.NDArray[np.float64]:
        """Mean wait at each place of a round of as many batches as there are loaders: (loaders,).

        Start-up is left out. Loaders that keep step with one another have it all at one place.
        """
        loaders = self.setting.loaders
        waits = self.stalls_ms[1:]
        places = np.arange(1, len(waits) + 1) % loaders
        sums = np.bincount(places, waits, minlength=loaders)
        means: npt.NDArray[np.float64] = sums / np.maximum(1, np.bincount(places, None, loaders))
        return means

    @property
    def stall_at_one_place(self) -> float:
        """Share of the waiting that the worst place of a round has; 1 / loaders if it is even."""
        means = self.stall_by_place_ms
        return float(means.max() / means.sum()) if means.any() else 0.0

    @property
    def blocked_share(self) -> float:
        """Share of the loaders' time in which they held a batch that the full queue kept out."""
        held = np.minimum(self.queued, self.end) - np.minimum(self.ready, self.end)
        return int(held.sum()) / (self.setting.loaders * self.end)

    @cached_property
    def queue_depth(self) -> tuple[Times, Times]:
        """Batches in the queue: from which nanosecond on, and how many, (changes,) int64 each."""
        times = np.concatenate([[0], self.queued, self.taken])
        more = np.repeat([0, 1, -1], [1, len(self.queued), len(self.taken)])
        kept = times <= self.end
        times, more = times[kept], more[kept]
        order = np.argsort(times, kind="stable")
        times, depth = times[order], np.cumsum(more[order])
        last = np.append(times[1:] != times[:-1], True)
        return times[last], depth[last]

    @property
    def queue_mean(self) -> float:
        """Batches in the queue, on average over the time."""
        times, depth = self.queue_depth
        return float(np.diff(times, append=self.end) @ depth) / self.end

    def with_one_more(self) -> Simulation:
        """The same with one loader more, and the same times for the same batches."""
        return run(replace(self.setting, loaders=self.setting.loaders + 1))

    def html(self, path: str | Path) -> None:
        """Write a page that plays it: one file, which needs no network."""
        from precache.simulation.pictures import write_page

        write_page(self, path)

    def png(self, path: str | Path) -> None:
        """Draw it, with matplotlib: ``pip install "precache[report]"``."""
        from precache.simulation.pictures import write_png

        write_png(self, path)

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON, times in milliseconds; null for what did not happen any more."""
        setting, more = self.setting, self.with_one_more()
        times, depth = self.queue_depth
        moments = ("begun", "ready", "queued", "taken", "done")
        return {
            "loaders": setting.loaders,
            "queue": setting.room,
            "load": _described(setting.load),
            "step": _described(setting.step),
            "seconds": setting.seconds,
            "seed": setting.seed,
            "batches": self.batches,
            "startup_s": self.startup_s,
            "rate_per_s": self.rate,
            "stall_share": self.stall_share,
            "stall_share_with_startup": self.stall_share_with_startup,
            "stall_at_one_place": self.stall_at_one_place,
            "blocked_share": self.blocked_share,
            "queue_mean": self.queue_mean,
            "limit": {
                "per_s": setting.limit,
                "loading_per_s": setting.loading_limit,
                "step_per_s": setting.step_limit,
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


def _described(times: Durations) -> dict[str, Any]:
    described = {"mean_ms": times.mean_ms, "cv": times.cv, "dist": times.kind}
    return described | {"resolution_ms": times.resolution_ms, "measured": len(times.measured_ms)}


def _milliseconds(times: Times, end: int) -> list[float | None]:
    return [time / 1e6 if time <= end else None for time in times.tolist()]


def simulate(
    load_ms: float | Measured,
    step_ms: float | Measured,
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

    Each of `loaders` processes makes one batch at a time, all beginning at once. A finished batch
    goes into a queue; while that is full, its loader is blocked. One consumer takes the batches
    and works a step on each.

    Parameters
    ----------
    load_ms, step_ms
        How long one loader takes for one batch, and the consumer for one step: a mean, or times
        that were measured, of which the n-th is that of the n-th batch.
    queue
        Finished batches that the queue holds besides the one in each loader's hands; by default
        as many as there are loaders, so that twice as many batches are under way, as with a
        ``torch.utils.data.DataLoader`` of ``prefetch_factor=2``.
    load_cv, step_cv
        Coefficient of variation: standard deviation over mean; 0 by default.
    load_dist, step_dist
        ``"gamma"`` (default where there is a variation), ``"lognormal"``, ``"exponential"`` or
        ``"constant"``; for measured times ``"cycle"`` (default) or ``"resample"``.
    resolution_ms
        Load times are rounded up to a multiple of it; 0 leaves time continuous.

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
        raise UsageError(f"queue={queue} is no number of batches: give 0 or more")
    if not (math.isfinite(resolution_ms) and resolution_ms >= 0):
        raise UsageError(f"resolution_ms={resolution_ms:g} is no grid: give 0 or more")
    if not 1e-6 <= seconds <= 1e8:
        raise UsageError(f"seconds={seconds:g} is out of range: give more than 0, up to 1e8")
    if seed < 0:
        raise UsageError(f"seed={seed} is negative: give 0 or more")
    load = durations("load", load_ms, load_cv, load_dist, resolution_ms)
    step = durations("step", step_ms, step_cv, step_dist)
    return run(Setting(loaders, load, step, queue, seconds, seed))


def run(setting: Setting) -> Simulation:
    """Simulate a setting that `simulate` has checked."""
    made = _Run(setting).until(round(setting.seconds * _NS))
    columns = (made.loader, made.begun, made.ready, made.queued, made.taken, made.done)
    return Simulation(setting, *(np.array(column, np.int64) for column in columns))
