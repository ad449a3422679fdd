"""Whose turn it is when several sources are mixed: pure functions of (seed, epoch, step)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from precache.errors import UsageError
from precache.sampling.order import WINDOW, Permutation

FINEST = 1_000_000
"""Shares are taken as fractions with denominators up to this, so that a third is a third."""


def shares_of(weights: Sequence[float], sources: int) -> list[Fraction]:
    """Weights as fractions whose sum is one.

    Raises
    ------
    UsageError
        They are not one for each source, or make no sense.
    """
    if len(weights) != sources:
        raise UsageError(f"there are {len(weights)} weights for {sources} loaders; give one each")
    values = [float(weight) for weight in weights]
    for number, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"the weight of source {number} is {value}; give a number above 0")
        if value * FINEST < sum(values):
            raise UsageError(
                f"the weight of source {number} is {value}; give a millionth of their sum or more"
            )
    rough = [Fraction(value / sum(values)).limit_denominator(FINEST) for value in values]
    return [share / sum(rough) for share in rough]


@dataclass(frozen=True)
class Turns:
    """Which source a step takes a batch of, as a function of (seed, epoch, step).

    Attributes
    ----------
    lengths
        Batches of an epoch of each source.
    counts
        Batches of each in an epoch of the mixture.
    together
        Whether every step takes a batch of each.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    seed: int = 0
    together: bool = False

    @classmethod
    def of(
        cls, lengths: Sequence[int], shares: Sequence[Fraction] | None, until: str | int, seed: int
    ) -> Turns:
        """Turns by share of the steps, or together where there are no shares.

        Parameters
        ----------
        until
            ``all``: an epoch goes through every source at least once; ``first``: through none more
            than once; or its steps.

        Raises
        ------
        UsageError
            A source would have no batch.
        """
        each = shares or [Fraction(1)] * len(lengths)
        reach = [length / share for length, share in zip(lengths, each, strict=True)]
        if isinstance(until, int):
            steps = until
        else:
            steps = math.ceil(max(reach)) if until == "all" else math.floor(min(reach))
        counts = _dealt(steps, shares) if shares else [steps] * len(lengths)
        if 0 in counts:
            raise UsageError(
                f"source {counts.index(0)} gets no batch in an epoch of {steps} steps; raise its "
                "weight, or choose another until"
            )
        return cls(tuple(lengths), tuple(counts), seed, shares is None)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.counts[0] if self.together else sum(self.counts)

    def sources(self, epoch: int, start: int = 0) -> Generator[tuple[int, ...], None, None]:
        """Sources of each step of an epoch, from step number `start` on."""
        for first in range(start, len(self), WINDOW):
            steps = np.arange(first, min(first + WINDOW, len(self)), dtype=np.int64)
            if self.together:
                yield from [tuple(range(len(self.counts)))] * len(steps)
            else:
                yield from ((source,) for source in self._drawn(epoch, steps).tolist())

    def _drawn(self, epoch: int, steps: np.ndarray) -> np.ndarray:
        """A shuffle of as many cards of each source as it has batches, so that counts are exact."""
        cards = Permutation(len(self), "mix", self.seed, epoch)(steps)
        drawn: np.ndarray = np.searchsorted(np.cumsum(self.counts), cards, side="right")
        return drawn

    def places(self, epoch: int, start: int = 0) -> list[tuple[int, int]]:
        """Epoch and batch of each source from which it goes on at a step.

        A source that is gone through in every epoch begins each with an epoch of its own, and so
        leaves out no row; another goes on where it stopped.
        """
        taken = np.zeros(len(self.counts), np.int64)
        for first in range(0, 0 if self.together else start, WINDOW):
            steps = np.arange(first, min(first + WINDOW, start), dtype=np.int64)
            taken += np.bincount(self._drawn(epoch, steps), minlength=len(taken))
        if self.together:
            taken += start
        found = []
        for length, count, given in zip(self.lengths, self.counts, taken.tolist(), strict=True):
            whole = -(-count // length) * length if count >= length else count
            found.append(divmod(epoch * whole + given, length))
        return found


def _dealt(steps: int, shares: Sequence[Fraction]) -> list[int]:
    """Whole steps by share: rounded down, and the rest to the largest remainders."""
    exact = [steps * share for share in shares]
    counts = [math.floor(value) for value in exact]
    rest = sorted(range(len(shares)), key=lambda source: counts[source] - exact[source])
    for source in rest[: steps - sum(counts)]:
        counts[source] += 1
    return counts
