"""What a stall meter reports: figures of a window of steps, and the line that says them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from precache.messages import printable
from precache.runtime.machine import Machine
from precache.runtime.step_clock import Times

SHOWN_KEYS = 4
SHOWN_STEPS = 3


@dataclass(frozen=True)
class SlowStep:
    """One of the longest waits.

    Attributes
    ----------
    step
        Counted from 1 since the meter was made.
    seconds
        That the host waited for the batch.
    first
        It was the first of its iteration, which also starts workers and fills buffers.
    keys
        Of the batch's samples, else their rows; empty where neither is known.
    """

    step: int
    seconds: float
    first: bool = False
    keys: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        what = f"step {self.step} ({_ms(self.seconds)} ms"
        if self.first:
            what += ", the first of an iteration"
        if self.keys:
            rest = len(self.keys) - SHOWN_KEYS
            shown = ", ".join(printable(str(key)) for key in self.keys[:SHOWN_KEYS])
            what += f": {shown}" + (f" … and {rest} more" if rest > 0 else "")
        return what + ")"


@dataclass(frozen=True)
class RankStalls:
    """What one rank tells the others of a window; times in seconds a step."""

    rank: int
    window: int
    steps: int
    stall_ratio: float
    data_mean: float
    iteration_mean: float


@dataclass(frozen=True)
class StallReport:
    """A summary of the steps since the last report.

    Attributes
    ----------
    name
        Of the meter.
    rank, world_size
        Of the process that reports.
    window, step
        Reports and steps so far.
    steps
        In this report.
    data, iteration
        Waiting for a batch, and from asking for it until asking for the next one.
    stall_ratio
        Time spent waiting over the time of the whole iterations.
    slow
        The longest waits, longest first, where they are `rare`; else empty.
    ranks
        The last report of every rank that was heard, on rank 0; elsewhere its own.
    machine
        What it did meanwhile.
    time
        Seconds since 1970.
    quiet
        Rank 0 speaks for this rank, which does not stall.
    """

    name: str
    rank: int
    world_size: int
    window: int
    step: int
    steps: int
    data: Times
    iteration: Times
    stall_ratio: float
    slow: tuple[SlowStep, ...]
    ranks: tuple[RankStalls, ...]
    machine: Machine
    time: float
    quiet: bool = False

    @property
    def worst(self) -> RankStalls:
        """The rank with the highest stall ratio."""
        return max(self.ranks, key=lambda each: each.stall_ratio)

    def figures(self) -> dict[str, float]:
        """Name -> number, for plots; times in seconds, shares from 0 to 1."""
        found: dict[str, float | None] = {"stall_ratio": self.stall_ratio}
        for part, times in (("data", self.data), ("iteration", self.iteration)):
            found |= {f"{part}_{name}_seconds": value for name, value in vars(times).items()}
        found |= vars(self.machine)
        if len(self.ranks) > 1:
            found |= {"worst_rank": self.worst.rank, "worst_stall_ratio": self.worst.stall_ratio}
        return {name: float(value) for name, value in found.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        worst = self.worst.rank if len(self.ranks) > 1 else None
        return {**dataclasses.asdict(self), "worst_rank": worst}

    def __str__(self) -> str:
        name = printable(self.name)
        parts = [
            f"{name}, step {self.step}: stalled {self.stall_ratio:.1%} of {self.steps} steps",
            f"data {_times(self.data)}",
            f"iteration {_times(self.iteration)}",
            *self._slow_words(),
            *self._rank_words(),
            *_machine_words(self.machine),
        ]
        who = f"rank {self.rank}: " if self.world_size > 1 else ""
        return who + "; ".join(parts)

    def _slow_words(self) -> list[str]:
        if not self.slow:
            return []
        return ["rare slow samples: " + ", ".join(map(str, self.slow[:SHOWN_STEPS]))]

    def _rank_words(self) -> list[str]:
        if len(self.ranks) < 2:
            return []
        heard = f"{len(self.ranks)} ranks"
        if len(self.ranks) < self.world_size:
            heard = f"{len(self.ranks)} of {self.world_size} ranks"
        return [f"worst of {heard}: rank {self.worst.rank} with {self.worst.stall_ratio:.1%}"]


def rare(data: Times, stall_ratio: float, threshold: float) -> bool:
    """Whether few waits are what makes the stall: a high mean with a low median."""
    return stall_ratio > threshold and data.mean > 2 * data.median


def slowest(data: Times, steps: Sequence[SlowStep]) -> tuple[SlowStep, ...]:
    """Those above the mean, longest first."""
    slow = [each for each in steps if each.seconds > data.mean]
    return tuple(sorted(slow, key=lambda each: -each.seconds))


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"


def _times(times: Times) -> str:
    mean, median, p95, most = map(_ms, (times.mean, times.median, times.p95, times.max))
    return f"mean {mean} ms, median {median}, p95 {p95}, max {most}"


def _machine_words(machine: Machine) -> list[str]:
    words = []
    if machine.cpu_cores is not None:
        words.append(f"CPU {machine.cpu_cores:.1f} cores")
    if machine.gpu_utilization is not None:
        words.append(f"GPU {machine.gpu_utilization:.0%}")
    if machine.io_wait is not None:
        words.append(f"I/O wait {machine.io_wait:.1%}")
    return words
