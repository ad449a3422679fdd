"""Schedules for mixing several sources, as pure functions of (seed, epoch, step)."""

from __future__ import annotations

import contextlib
import functools
import math
import reprlib
from collections.abc import Mapping, Sequence
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
    values = list[float]()
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        values = [] if isinstance(weights, Mapping) else [float(weight) for weight in weights]
    if len(values) != sources:
        raise UsageError(f"weights is {reprlib.repr(weights)} for {sources} loaders; give one each")
    for number, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"the weight of source {number} is {value}; give a number above 0")
        if value < sum(values) / MAX_DENOMINATOR:
            raise UsageError(
                f"the weight of source {number} is {value}; give a millionth of their sum or more"
            )
    rough = [Fraction(value / sum(values)).limit_denominator(MAX_DENOMINATOR) for value in values]
    return [share / sum(rough) for share in rough]


@dataclass(frozen=True)
class MixSchedule:
    """The batches of an epoch of a mixture: an order over several sources.

    Attributes
    ----------
    lengths
        Batches in an epoch of each source.
    weights
        Shares of the steps that each source gets; by default in proportion to `lengths`.
    until
        End of an epoch. ``all``: every source was read at least once; ``first``: the first source
        is exhausted; or a number of steps.
    """

    lengths: tuple[int, ...]
    weights: tuple[Fraction, ...] | None = None
    until: str | int = "all"
    seed: int = 0

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Batches of each source in an epoch of the mixture.

        Raises
        ------
        UsageError
            A source would have no batch.
        """
        steps = self.until
        shares = self.weights or [Fraction(n, sum(self.lengths)) for n in self.lengths]
        if isinstance(steps, str):
            reach = [length / share for length, share in zip(self.lengths, shares, strict=True)]
            steps = math.ceil(max(reach)) if steps == "all" else math.floor(min(reach))
        # Hamilton's method: leftovers go to the largest remainders.
        exact = [steps * share for share in shares]
        counts = [math.floor(value) for value in exact]
        rest = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
        for source in rest[: steps - sum(counts)]:
            counts[source] += 1
        if 0 in counts:
            raise UsageError(
                f"source {counts.index(0)} gets no batch in an epoch of {steps} steps; raise its "
                "weight, or choose another until"
            )
        return tuple(counts)

    def __len__(self) -> int:
        """Number of steps of an epoch."""
        return sum(self.counts)

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the source of each batch of an epoch, and the epoch there and the batch of it.

        Sources are drawn from a shuffled deck with one card per batch, so that counts are exact. A
        source that is read at least once per epoch starts each epoch of the mixture with a new one
        of its own, so that no row is left out. Other sources continue where they stopped.

        Returns
        -------
        tuple[np.ndarray, np.ndarray, np.ndarray]
            (batches,) int64, step by step.
        """
        counts, lengths = np.array((self.counts, self.lengths), np.int64)
        deck, steps = np.repeat(np.arange(len(counts)), counts), len(self)
        source = deck[Permutation(steps, "mix", self.seed, epoch)(np.arange(steps))]
        nth = np.empty_like(source)
        nth[np.argsort(source, kind="stable")] = np.concatenate([np.arange(n) for n in counts])
        each = np.where(counts >= lengths, -(-counts // lengths) * lengths, counts)
        return source, *np.divmod(nth + (epoch * each)[source], lengths[source])
