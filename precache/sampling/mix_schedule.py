"""Schedules for mixing several sources, as pure functions of (seed, epoch, step)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Start:
    """Positions of the sources in an epoch that is resumed with other batch sizes, by source.

    Attributes
    ----------
    epoch
        Epoch of the mixture, in which `counts` batches of each source are left.
    epochs, rows
        Epoch of each source, and the rows of it that were received.
    left
        Batches that are left of that epoch.
    """

    epoch: int
    counts: tuple[int, ...]
    epochs: tuple[int, ...]
    rows: tuple[int, ...]
    left: tuple[int, ...]


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
    together
        True if every step takes a batch of every source.
    sizes
        Rows of a batch of each source, over all ranks; by default one.
    start
        The epoch that was resumed with other batch sizes, if one was.
    """

    lengths: tuple[int, ...]
    weights: tuple[Fraction, ...] | None = None
    until: str | int = "all"
    seed: int = 0
    together: bool = False
    sizes: tuple[int, ...] = ()
    start: Start | None = None

    @property
    def _shares(self) -> Sequence[Fraction]:
        """Source -> share of the steps."""
        if self.together:
            return [Fraction(1)] * len(self.lengths)
        return self.weights or [Fraction(n, sum(self.lengths)) for n in self.lengths]

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Batches of each source in an epoch of the mixture.

        Raises
        ------
        UsageError
            A source would have no batch.
        """
        shares, steps = self._shares, self.until
        if isinstance(steps, str):
            reach = [length / share for length, share in zip(self.lengths, shares, strict=True)]
            steps = math.ceil(max(reach)) if steps == "all" else math.floor(min(reach))
        # Hamilton's method: leftovers go to the largest remainders.
        exact = [steps * share for share in shares]
        counts = [math.floor(value) for value in exact]
        rest = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
        for source in () if self.together else rest[: steps - sum(counts)]:
            counts[source] += 1
        if 0 in counts:
            raise UsageError(
                f"source {counts.index(0)} gets no batch in an epoch of {steps} steps; raise its "
                "weight, or choose another until"
            )
        return tuple(counts)

    def __len__(self) -> int:
        """Number of steps of an epoch."""
        return self._steps(self.counts)

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch, or of the rest of one that was resumed."""
        return self._steps(self._counts(epoch))

    def _steps(self, counts: Sequence[int]) -> int:
        return max(counts) if self.together else sum(counts)

    def _counts(self, epoch: int) -> tuple[int, ...]:
        start = self._begun(epoch)
        return start.counts if epoch == start.epoch else self.counts

    def _begun(self, epoch: int) -> Start:
        """Return what an epoch goes on from."""
        if self.start is not None and epoch >= self.start.epoch:
            return self.start
        zeros = (0,) * len(self.lengths)
        return Start(0, self.counts, zeros, zeros, self.lengths)

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the source of each batch of an epoch, and the epoch and row there it begins at.

        Sources are drawn from a shuffled deck with one card per batch, so that counts are exact. A
        source that is read at least once per epoch starts each epoch of the mixture with a new one
        of its own, so that no row is left out. Other sources continue where they stopped.

        Returns
        -------
        tuple[np.ndarray, np.ndarray, np.ndarray]
            (batches,) int64, step by step: one a step, or with `together` one of each source.
        """
        counts, steps = self._counts(epoch), self.steps(epoch)
        deck = np.repeat(np.arange(len(counts)), counts)
        if self.together:
            source = np.tile(np.arange(len(counts)), steps)
        else:
            source = deck[Permutation(steps, "mix", self.seed, epoch)(np.arange(steps))]
        nth = np.empty_like(source)
        nth[np.argsort(source, kind="stable")] = np.concatenate([np.arange(n) for n in counts])
        return source, *self._places(epoch, source, nth)

    def _places(
        self, epoch: int, source: np.ndarray, nth: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch of a source, and the row there, at which its nth batch begins."""
        start = self._begun(epoch)
        columns = self.counts, self.lengths, start.counts, start.epochs, start.rows, start.left
        counts, lengths, rest, begun, rows, left = np.array(columns, np.int64)
        sizes = np.array(self.sizes or (1,) * len(counts), np.int64)
        if epoch > start.epoch:
            whole = counts >= lengths
            # The first lap that the rest of the first epoch has not begun.
            laps = np.maximum(-((left - rest) // lengths), np.where(rows == 0, -1, 0))
            first = np.where(whole, left + laps * lengths, rest)
            each = np.where(whole, -(-counts // lengths) * lengths, counts)
            nth = nth + (first + (epoch - start.epoch - 1) * each)[source]
        laps, batch = np.divmod(nth - left[source], lengths[source])
        batches = np.where(laps < 0, nth, batch) * sizes[source]
        return begun[source] + 1 + laps, batches + np.where(laps < 0, rows[source], 0)

    def resumed(
        self, new: MixSchedule, epoch: int, step: int, left: Sequence[Callable[[int], int]]
    ) -> MixSchedule:
        """Return a schedule of other batch sizes that goes on from a step of this one.

        Parameters
        ----------
        left
            By source: return the batches that are left of an epoch from a row on.
        """
        sources = np.arange(len(self.lengths))
        drawn = self.epoch(epoch)[0][: step * (len(sources) if self.together else 1)]
        begins = self._places(epoch, sources, np.bincount(drawn, minlength=len(sources)))
        ends = self._places(epoch, sources, np.array(self._counts(epoch)))
        epochs, rows = (tuple(column.tolist()) for column in begins)
        batches = tuple(count(row) for count, row in zip(left, rows, strict=True))
        counts = []  # of the same rows
        for source, (last, end) in enumerate(np.stack(ends, axis=1).tolist()):
            passes = last - epochs[source]
            over = (end if passes else end - rows[source]) / new.sizes[source]
            whole = passes and batches[source] + (passes - 1) * new.lengths[source]
            counts.append(whole + math.ceil(over))
        if self.together:
            counts = [max(counts)] * len(counts)
        return replace(new, start=Start(epoch, tuple(counts), epochs, rows, batches))
