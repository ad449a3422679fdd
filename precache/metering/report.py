"""Reports of a stall meter: figures of a window of steps, and their text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from precache.messages import first_ones, printable
from precache.runtime.machine import Machine
from precache.runtime.spread import Spread
from precache.units import ms

SHOWN_KEYS = 4
SHOWN_STEPS = 3

SampleKeys = tuple[str | int, ...]


@dataclass(frozen=True)
class SlowStep:
    """One of the longest waits.

    Attributes
    ----------
    step
        Number of the step since the meter was created, from 1.
    seconds
        Wait of the host for the batch.
    first
        Whether it was the first step of an iteration, which also starts workers and fills buffers.
    keys
        Keys of the batch's samples, or their rows; empty if neither is known.
    """

    step: int
    seconds: float
    first: bool = False
    keys: SampleKeys = ()

    def __str__(self) -> str:
        text = f"step {self.step} ({ms(self.seconds)} ms"
        if self.first:
            text += ", the first of an iteration"
        if self.keys:
            keys = [printable(str(key)) for key in self.keys]
            text += f": {first_ones(keys, most=SHOWN_KEYS)}"
        return text + ")"


@dataclass(frozen=True)
class RankStalls:
    """Figures of a window that a rank shares with the others."""

    rank: int
    window: int
    steps: int
    stall_ratio: float


@dataclass(frozen=True, kw_only=True)
class StallReport:
    """A summary of the steps since the last report.

    Attributes
    ----------
    name
        Name of the meter.
    rank, world_size
        Rank and number of ranks of the reporting process.
    window, step
        Number of this report, and of its last step.
    steps
        Number of steps in this report.
    data, iteration
        Times waiting for a batch, and times from requesting one to requesting the next.
    stall_ratio
        Sum of the data times over the sum of the iteration times.
    transform_ratio
        The part of `stall_ratio` that is waiting for transforms on the CPU, of a `Loader` or
        `precache.mix`; 0 for other loaders, where it is unknown.
    slow
        The longest waits, longest first, if they are `rare`; otherwise empty.
    ranks
        On rank 0 the last figures of every rank known; elsewhere the rank's own.
    machine
        CPU, GPU and I/O figures of the same time.
    time
        Unix time.
    stalls
        Whether the stall ratio is above the meter's threshold.
    """

    name: str
    rank: int
    world_size: int
    window: int
    step: int
    steps: int
    data: Spread
    iteration: Spread
    stall_ratio: float
    slow: tuple[SlowStep, ...]
    ranks: tuple[RankStalls, ...]
    machine: Machine
    time: float
    stalls: bool = True
    transform_ratio: float = 0.0

    @property
    def worst(self) -> RankStalls:
        """The rank with the highest stall ratio."""
        return max(self.ranks, key=lambda rank: rank.stall_ratio)

    @property
    def quiet(self) -> bool:
        """True on a rank other than 0 that does not stall."""
        return self.rank > 0 and not self.stalls

    def figures(self) -> dict[str, float]:
        """Return numbers by name, for plots; times in seconds, shares from 0 to 1."""
        values: dict[str, float | None] = {"stall_ratio": self.stall_ratio}
        if self.transform_ratio:
            values["transform_ratio"] = self.transform_ratio
        for part, times in (("data", self.data), ("iteration", self.iteration)):
            values |= {f"{part}_{name}_seconds": value for name, value in vars(times).items()}
        values |= vars(self.machine)
        if len(self.ranks) > 1:
            values |= {"worst_rank": self.worst.rank, "worst_stall_ratio": self.worst.stall_ratio}
        return {name: float(value) for name, value in values.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        worst = self.worst.rank if len(self.ranks) > 1 else None
        return {**dataclasses.asdict(self), "worst_rank": worst}

    def __str__(self) -> str:
        first = self.step - self.steps + 1
        steps = f"steps {first} to {self.step}" if self.steps > 1 else f"step {self.step}"
        share = f"{self.stall_ratio:.1%} of the time"
        if self.transform_ratio:
            loading = self.stall_ratio - self.transform_ratio
            share += f" ({self.transform_ratio:.1%} for transforms, {loading:.1%} for loading)"
        means = f"{ms(self.data.mean)} of {ms(self.iteration.mean)} ms per step"
        median, p95, most = map(ms, (self.data.median, self.data.p95, self.data.max))
        parts = [
            f"{printable(self.name)}, {steps}: waited for data {share}",
            f"{means} (waits: median {median}, p95 {p95}, max {most} ms)",
            *self._details(),
        ]
        prefix = f"rank {self.rank}: " if self.world_size > 1 else ""
        return prefix + "; ".join(parts)

    def _details(self) -> Iterator[str]:
        if self.slow:
            yield "rare slow samples: " + ", ".join(map(str, self.slow[:SHOWN_STEPS]))
        if len(self.ranks) > 1:
            known = f"{len(self.ranks)} of " * (len(self.ranks) < self.world_size)
            worst = f"rank {self.worst.rank} with {self.worst.stall_ratio:.1%}"
            yield f"worst of {known}{self.world_size} ranks: {worst}"
        if self.machine.cpu_cores is not None:
            yield f"CPU {self.machine.cpu_cores:.1f} cores"
        if self.machine.gpu_utilization is not None:
            yield f"GPU {self.machine.gpu_utilization:.0%}"
        if self.machine.io_wait is not None:
            yield f"I/O wait {self.machine.io_wait:.1%}"


def rare(data: Spread, stall_ratio: float, threshold: float) -> bool:
    """Return whether few long waits cause the stall: a high mean with a low median."""
    return stall_ratio > threshold and data.mean > 2 * data.median
