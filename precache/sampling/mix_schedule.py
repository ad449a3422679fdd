"""Schedules for mixing several sources, as pure functions of (seed, epoch, step)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from precache.errors import UsageError
from precache.sampling.order import POSITIONS_AT_ONCE, Permutation

MAX_DENOMINATOR = 1_000_000
"""Largest denominator that weights are rounded to, so that a third is exactly a third."""


def shares_of(weights: Sequence[float], sources: int) -> list[Fraction]:
    """Convert weights to fractions whose sum is one.

    Raises
    ------
    UsageError
        The number of weights differs from that of sources, a weight is not positive and finite, or
        it is below a millionth of their sum.
    """
    if len(weights) != sources:
        raise UsageError(f"there are {len(weights)} weights for {sources} loaders; give one each")
    values = [float(weight) for weight in weights]
    for number, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"the weight of source {number} is {value}; give a number above 0")
        if value * MAX_DENOMINATOR < sum(values):
            raise UsageError(
                f"the weight of source {number} is {value}; give a millionth of their sum or more"
            )
    rough = [Fraction(value / sum(values)).limit_denominator(MAX_DENOMINATOR) for value in values]
    return [share / sum(rough) for share in rough]


@dataclass(frozen=True)
class MixSchedule:
    """Chooses the source of each step's batch, as a function of (seed, epoch, step).

    Attributes
    ----------
    lengths
        Batches in an epoch of each source.
    counts
        Batches of each source in an epoch of the mixture.
    together
        True if every step takes a batch of every source.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    seed: int = 0
    together: bool = False

    @classmethod
    def of(
        cls, lengths: Sequence[int], shares: Sequence[Fraction] | None, until: str | int, seed: int
    ) -> MixSchedule:
        """Make a schedule: one source per step, by `shares`, or all at every step if None.

        Parameters
        ----------
        until
            End of an epoch. ``all``: every source was read at least once; ``first``: the first
            source is exhausted; or a number of steps.

        Raises
        ------
        UsageError
            A source would have no batch.
        """
        weights = shares or [Fraction(1)] * len(lengths)
        reach = [length / share for length, share in zip(lengths, weights, strict=True)]
        if isinstance(until, int):
            steps = until
        else:
            steps = math.ceil(max(reach)) if until == "all" else math.floor(min(reach))
        counts = _apportion(steps, shares) if shares else [steps] * len(lengths)
        if 0 in counts:
            raise UsageError(
                f"source {counts.index(0)} gets no batch in an epoch of {steps} steps; raise its "
                "weight, or choose another until"
            )
        return cls(tuple(lengths), tuple(counts), seed, shares is None)

    def __len__(self) -> int:
        """Number of steps of an epoch."""
        return self.counts[0] if self.together else sum(self.counts)

    def sources(self, epoch: int, start: int = 0) -> Generator[tuple[int, ...], None, None]:
        """Yield the sources of each step of an epoch, from step number `start` on."""
        for first in range(start, len(self), POSITIONS_AT_ONCE):
            steps = np.arange(first, min(first + POSITIONS_AT_ONCE, len(self)), dtype=np.int64)
            if self.together:
                yield from [tuple(range(len(self.counts)))] * len(steps)
            else:
                yield from ((source,) for source in self._draw(epoch, steps).tolist())

    def _draw(self, epoch: int, steps: np.ndarray) -> np.ndarray:
        """Draw sources from a shuffled deck with one card per batch, so that counts are exact."""
        cards = Permutation(len(self), "mix", self.seed, epoch)(steps)
        drawn: np.ndarray = np.searchsorted(np.cumsum(self.counts), cards, side="right")
        return drawn

    def positions_at(self, epoch: int, start: int = 0) -> list[tuple[int, int]]:
        """Return the epoch and batch number at which each source continues at a step.

        A source that is read at least once per epoch starts each epoch of the mixture with a new
        one of its own, so that no row is left out. Other sources continue where they stopped.
        """
        taken = np.zeros(len(self.counts), np.int64)
        for first in range(0, 0 if self.together else start, POSITIONS_AT_ONCE):
            steps = np.arange(first, min(first + POSITIONS_AT_ONCE, start), dtype=np.int64)
            taken += np.bincount(self._draw(epoch, steps), minlength=len(taken))
        if self.together:
            taken += start
        positions = []
        for length, count, batches in zip(self.lengths, self.counts, taken.tolist(), strict=True):
            per_epoch = -(-count // length) * length if count >= length else count
            positions.append(divmod(epoch * per_epoch + batches, length))
        return positions


def _apportion(steps: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide steps by share (Hamilton's method: leftovers go to the largest remainders)."""
    exact = [steps * share for share in shares]
    counts = [math.floor(value) for value in exact]
    rest = sorted(range(len(shares)), key=lambda source: counts[source] - exact[source])
    for source in rest[: steps - sum(counts)]:
        counts[source] += 1
    return counts
