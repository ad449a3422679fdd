"""Simulations of a training loop that a `DataLoader` feeds."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precache.errors import UsageError
from precache.messages import aligned, as_text
from precache.runtime.integers import whole
from precache.runtime.spread import mean_and_cv
from precache.units import number

Times = npt.NDArray[np.float64]
MeasuredTimes = Sequence[float] | npt.NDArray[np.floating]
"""Measured times in milliseconds: (times,)."""
MOST_BATCHES = 1_000_000
LONGEST_MS = 1e12
"""Upper limit of a time, thirty years; longer times that are drawn are cut to it."""
BARS = 64
FIGURES = ("done", "startup", "batches_per_s", "stall_share")

SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    name: {"workers": 7, "step_ms": 100, "load_ms": load_ms, **more}
    for name, load_ms, more in (
        ("loading-bound", 2000, {"load_cv": 0.2}),
        ("balanced", 700, {"load_cv": 0.2}),
        ("step-bound", 350, {"load_cv": 0.2}),
        ("high-variance", 350, {"load_cv": 1}),
        ("synchronised", 2000, {}),
        ("desynchronised", 2000, {"startup_ms": np.arange(7) * 2000 / 7}),
    )
}
"""Arguments of `simulate`: workers that cannot keep up with the step, that just can, and that have
slack; slow batches that slack does not cover; workers that begin together, and one by one."""


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

    def ask(batch: int, lane: int, now: float) -> None:
        worker[batch], asked[batch], begun[batch] = lane, now, max(now, free[lane])
        ready[batch] = free[lane] = begun[batch] + loads[batch]
        heapq.heappush(arrivals, (ready[batch], batch))

    for batch in range(min(window, count)):
        ask(batch, batch % setting.lanes, 0.0)
    now = 0.0
    for turn in range(count):
        batch = turn if setting.in_order else heapq.heappop(arrivals)[1]
        received = max(now, ready[batch] + setting.handover)
        taken[batch] = received + setting.copy
        now = done[batch] = taken[batch] + steps[turn]
        if turn + window < count:
            ask(turn + window, worker[batch], received if setting.workers else now)
    return Batches(np.array(worker), *map(np.array, (asked, begun, ready, taken, done)))


@dataclass(frozen=True)
class Simulation:
    """A simulated loop, with all times in milliseconds; ``str()`` gives the text for people.

    Attributes
    ----------
    load, step
        Time to load each batch, in the order in which they are asked for, and of each step.
    limit
        End of the simulation, if it ends before the last batch. Times after it did not happen.
    """

    load: Times
    step: Times
    setting: Setting
    limit: float | None = None

    @cached_property
    def end(self) -> float:
        """End of the simulation."""
        return float(self.batches.done.max()) if self.limit is None else self.limit

    @cached_property
    def batches(self) -> Batches:
        """Times of each batch, in the order in which batches are asked for."""
        return run_loop(self.load, self.step, self.setting)

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Batches in the order in which the loop takes them: (taken,)."""
        order = np.argsort(self.batches.taken, kind="stable")
        return order[: int((self.batches.taken <= self.end).sum())]

    @cached_property
    def waits(self) -> Times:
        """Time without a step before each batch; the first is the start-up: (taken,)."""
        idle_since = np.append(0, self.batches.done[self.order][:-1])[: len(self.order)]
        return np.asarray(self.batches.taken[self.order] - idle_since)

    @property
    def done(self) -> int:
        """Number of batches whose step has ended."""
        return int((self.batches.done <= self.end).sum())

    @property
    def startup(self) -> float:
        """Time until the first step; the whole time if there is none."""
        return min(float(self.batches.taken.min()), self.end)

    @property
    def batches_per_s(self) -> float:
        """Batches done per second since the first step."""
        return 1e3 * self.done / (self.end - self.startup) if self.end > self.startup else 0.0

    @property
    def rate(self) -> float:
        """Batches done per second, the start included."""
        return 1e3 * self.done / self.end

    @property
    def stall_share(self) -> float:
        """Share of the time since the first step in which no step runs; 1 if there is none."""
        begun, done = (np.minimum(times, self.end) for times in self.batches[4:])
        steps, length = float((done - begun).sum()), self.end - self.startup
        return max(0.0, 1 - steps / length) if length else 1.0

    def with_workers(self, workers: int) -> Simulation:
        """Run the same batches with another number of workers, until the last one is asked for.

        After that, workers that have nothing left to load would count as slow ones.
        """
        run = Simulation(self.load, self.step, replace(self.setting, workers=workers))
        return replace(run, limit=float(run.batches.asked.max()) or None)

    def figures(self) -> Iterator[tuple[str, str]]:
        """Yield names and values of the results, those of one more worker last."""
        more, waits = self.with_workers(self.setting.workers + 1), self.waits[1:]
        late, longest = int((waits > 0).sum()), number(float(waits.max(initial=0)))
        yield "batches done", f"{self.done:,} in {self.end / 1e3:g} s"
        yield "first step", f"after {number(self.startup / 1e3)} s"
        yield "since then", f"{self.batches_per_s:,.2f} batches/s, stall {self.stall_share:.1%}"
        yield "longest wait", f"{longest} ms; waits before {late:,} of {len(waits):,} batches"
        rate, stall = more.batches_per_s, more.stall_share
        yield "one more worker", f"{rate:,.2f} batches/s, stall {stall:.1%}"

    def title(self) -> str:
        """Describe the loop in one line."""
        at, order = self.setting, "in order" if self.setting.in_order else "the first one ready"
        load, step = (
            number(mean) + " ms" + (f" (cv {cv:.2g})" if cv > 1e-6 else "")
            for mean, cv in map(mean_and_cv, (self.load, self.step))
        )
        setting = f"num_workers={at.workers}, prefetch_factor={at.prefetch}, {order}"
        return f"{setting}; {load} a batch, {step} a step"

    def __str__(self) -> str:
        bars = sparkline(self.waits[1 : BARS + 1])
        return as_text([self.title(), *aligned([*self.figures(), ("waits", bars)])])

    def to_dict(self) -> dict[str, Any]:
        """Return settings, figures, mean and cv of times, and all times in ms, for JSON."""
        more = self.with_workers(self.setting.workers + 1)
        return {
            "setting": asdict(self.setting),
            "load": [*mean_and_cv(self.load)],
            "step": [*mean_and_cv(self.step)],
            "end": self.end,
            **{name: getattr(self, name) for name in FIGURES},
            "one_more": {name: getattr(more, name) for name in FIGURES},
            "waits": self.waits.tolist(),
            "batches": {name: column.tolist() for name, column in self.batches._asdict().items()},
        }

    def html(self, path: str | Path) -> None:
        """Write a page that replays the simulation: one file that needs no network."""
        from precache.html.pages import save
        from precache.simulation.page import render_simulation

        save(render_simulation(self), path)


def simulate(
    load_ms: float | MeasuredTimes | None = None,
    step_ms: float | MeasuredTimes | None = None,
    workers: int | None = None,
    *,
    scenario: str | None = None,
    prefetch: int = 2,
    in_order: bool = True,
    startup_ms: float | MeasuredTimes | None = None,
    handover_ms: float = 0.0,
    copy_ms: float = 0.0,
    load_cv: float | None = None,
    step_cv: float | None = None,
    seconds: float = 30.0,
    seed: int = 0,
) -> Simulation:
    """Simulate a training loop that a ``torch.utils.data.DataLoader`` feeds.

    Each worker loads one batch at a time, and up to `prefetch` batches per worker are loaded ahead.
    The loop takes batches in the order in which they were asked for, and spends a step on each.
    In the long run, the rate is at most the lower of workers / load time and 1 / step time.

    The result's stall is the share of the time since the first step in which the loop waits for
    data. Workers that start together deliver together, so the loop waits at every N-th batch. With
    variance they drift apart: the spikes disappear, but the stall grows, since a slow batch holds
    up those that are ready behind it.

    Parameters
    ----------
    load_ms
        Time of one worker for one batch: a mean, or measured times (on the command line a file of
        them), which are used in their order, repeated.
    step_ms
        Time of one step, in the same way.
    workers
        `num_workers` of the `DataLoader`; 0 if the loop itself loads.
    scenario
        Settings of 7 workers and a step of 100 ms, where none are given: ``loading-bound``,
        ``balanced``, ``step-bound``, ``high-variance``, ``synchronised``, ``desynchronised``.
    prefetch
        `prefetch_factor` of the DataLoader: batches per worker.
    in_order
        ``in_order`` of the DataLoader: take batches as they were asked for, or the first one ready.
    startup_ms
        Time until workers can begin: one for all, or one each; 0 by default.
    handover_ms
        Time in which a finished batch reaches the training process.
    copy_ms
        Time in which the loop copies a batch to the device.
    load_cv, step_cv
        Coefficient of variation of gamma-distributed times: standard deviation over mean; 0 by
        default.
    seconds
        Simulated time.
    seed
        Seed of the drawn times.

    Raises
    ------
    UsageError
        If an argument is out of range, or two contradict each other.
    """
    given = {
        "load_ms": load_ms, "step_ms": step_ms, "workers": workers, "load_cv": load_cv,
        "startup_ms": startup_ms,
    }  # fmt: skip
    if scenario is not None and scenario not in SCENARIOS:
        raise UsageError(f"scenario is {scenario!r}; there are {', '.join(SCENARIOS)}")
    preset = {"startup_ms": 0.0, "load_cv": None, **SCENARIOS.get(scenario or "", {})}
    if np.ndim(0 if load_ms is None else load_ms):
        preset["load_cv"] = None  # measured times have their own spread
    settings = {**preset, **{name: value for name, value in given.items() if value is not None}}
    if missing := [name for name in given if name not in settings]:
        raise UsageError(f"give {' and '.join(missing)}, or a scenario: {', '.join(SCENARIOS)}")
    load_ms, step_ms, load_cv, workers = (
        settings[name] for name in ("load_ms", "step_ms", "load_cv", "workers")
    )
    seed = whole("seed", seed, 0)
    setting = Setting(
        workers=whole("workers", workers, 0),
        prefetch=whole("prefetch", prefetch, 1),
        in_order=bool(in_order),
        startup=_checked("startup_ms", settings["startup_ms"]).tolist(),
        handover=_checked("handover_ms", handover_ms, dimensions=0).item(),
        copy=_checked("copy_ms", copy_ms, dimensions=0).item(),
    )
    if not 1e-6 <= seconds <= 1e8:
        raise UsageError(f"seconds={seconds:g} is out of range: give 1e-6 to 1e8")
    end, count = 1e3 * seconds, 4 * setting.window + 64
    while count <= MOST_BATCHES:
        loads, steps = np.random.default_rng(seed).spawn(2)
        load = _draw("load", load_ms, load_cv, count, loads)
        found = Simulation(load, _draw("step", step_ms, step_cv, count, steps), setting, end)
        needed = len(found.order) + setting.window
        if needed < count:
            return replace(found, load=load[:needed], step=found.step[:needed])
        count *= 4
    raise UsageError(
        f"seconds={seconds:g} with workers={workers} and prefetch={prefetch} gives too many "
        f"batches: give a shorter time, or fewer (up to {MOST_BATCHES // 4:,} are simulated)"
    )


def _draw(
    name: str, ms: float | MeasuredTimes, cv: float | None, count: int, chance: np.random.Generator
) -> Times:
    """Return as many times as wanted, drawn from a distribution or repeated."""
    times, spread = _checked(f"{name}_ms", ms), cv or 0.0
    if not times.any():
        raise UsageError(f"{name}_ms has no time above 0; give milliseconds above 0")
    if not 0 <= spread <= 100 or (cv is not None and np.ndim(ms)):
        raise UsageError(
            f"{name}_cv={cv:g} is wrong: give 0 to 100, and none for a list of measured times, "
            "which have their own spread"
        )
    if spread > 1e-6:
        times = chance.gamma(spread**-2, times[0] * spread**2, count)
    return np.minimum(np.resize(times, count), LONGEST_MS)


def _checked(name: str, ms: float | MeasuredTimes, dimensions: int = 1) -> Times:
    try:
        if np.ndim(ms) > dimensions:
            raise TypeError
        times: Times = np.atleast_1d(np.asarray(ms)).astype(float, casting="same_kind")
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {ms!r}; give milliseconds") from None
    if wrong := [time for time in times.flat if not 0 <= time <= LONGEST_MS]:
        raise UsageError(f"{name} has {wrong[0]:g}; give milliseconds from 0")
    return times


def read_times(path: str | Path) -> list[float]:
    """Read milliseconds from a text file: numbers separated by white space or commas, # comments.

    Raises
    ------
    UsageError
        If the file cannot be read, holds no numbers, or holds other text.
    """
    try:
        text = re.sub(r"#.*", "", Path(path).read_text("utf-8"))
        times = [float(word) for word in re.split(r"[\s,]+", text) if word]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot read the times in {path}: {why}; give milliseconds, or a file of them"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}; give milliseconds") from None
    if not times:
        raise UsageError(f"{path} holds no times: write one time in ms per line")
    return times


def sparkline(values: Times) -> str:
    """Draw one character per value, as high as its share of the largest; a dot for 0."""
    levels = (7.99 * values / max(values.max(initial=0), 1e-300)).astype(int).tolist()
    return "".join("▁▂▃▄▅▆▇█"[n] if v > 0 else "·" for n, v in zip(levels, values, strict=True))
