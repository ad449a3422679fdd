"""Schedules for mixing several sources, as pure functions of (seed, epoch, step)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from precache.errors import UsageError
from precache.sampling.order import Permutation

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


def counts_of(
    lengths: Sequence[int], shares: Sequence[Fraction] | None, until: str | int
) -> tuple[int, ...]:
    """Return the batches of each source in an epoch of a mixture.

    Parameters
    ----------
    lengths
        Batches in an epoch of each source.
    shares
        Of the steps, one source at each; None if every step takes a batch of every source.
    until
        End of an epoch. ``all``: every source was read at least once; ``first``: the first source
        is exhausted; or a number of steps.

    Raises
    ------
    UsageError
        A source would have no batch.
    """
    weights = shares or [Fraction(1)] * len(lengths)
    reach = [length / share for length, share in zip(lengths, weights, strict=True)]
    steps = until
    if isinstance(steps, str):
        steps = math.ceil(max(reach)) if until == "all" else math.floor(min(reach))
    counts = _apportion(steps, shares) if shares else [steps] * len(lengths)
    if 0 in counts:
        raise UsageError(
            f"source {counts.index(0)} gets no batch in an epoch of {steps} steps; raise its "
            "weight, or choose another until"
        )
    return tuple(counts)


@dataclass(frozen=True)
class MixSchedule:
    """The batches of an epoch of a mixture: an order over several sources.

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

    def __len__(self) -> int:
        """Number of steps of an epoch."""
        return self.counts[0] if self.together else sum(self.counts)

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the source of each batch of an epoch, and the batch's epoch and number there.

        Sources are drawn from a shuffled deck with one card per batch, so that counts are exact. A
        source that is read at least once per epoch starts each epoch of the mixture with a new one
        of its own, so that no row is left out. Other sources continue where they stopped.

        Returns
        -------
        tuple[np.ndarray, np.ndarray, np.ndarray]
            (batches,) int64, step by step: one a step, or with `together` one of each source.
        """
        lengths, counts = np.array([self.lengths, self.counts], np.int64)
        deck = np.repeat(np.arange(len(counts)), counts)
        if self.together:
            source = np.tile(np.arange(len(counts)), len(self))
        else:
            source = deck[Permutation(len(self), "mix", self.seed, epoch)(np.arange(len(self)))]
        nth = np.empty_like(source)
        nth[np.argsort(source, kind="stable")] = np.concatenate([np.arange(n) for n in counts])
        laps = -(-counts // lengths) * lengths
        per_epoch = np.where(counts >= lengths, laps, counts)
        return source, *np.divmod(epoch * per_epoch[source] + nth, lengths[source])


def _apportion(steps: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide steps by share (Hamilton's method: leftovers go to the largest remainders)."""
    exact = [steps * share for share in shares]
    counts = [math.floor(value) for value in exact]
    rest = sorted(range(len(shares)), key=lambda source: counts[source] - exact[source])
    for source in rest[: steps - sum(counts)]:
        counts[source] += 1
    return counts
