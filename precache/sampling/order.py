"""The order of an epoch, as a function: position -> row, in constant memory."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np

from precache.errors import UsageError

POSITIONS_AT_ONCE = 65_536
"""Number of positions that are mapped to rows at once. With fewer, most of the time goes into cycle
walking for the last few positions."""

MOST_SUMS = 1 << 22
"""Sums of weights that are kept: 32 MB."""

DRAWS_AT_ONCE = 16_384
"""Number of positions that rows are drawn for at once: for each, a block of weights is added up."""

_ROUNDS = 6
_TABLE_BITS = 16
"""Rounds over halves of up to this many bits use precomputed tables, 3 MB at most."""

U64 = np.uint64


def mix(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer (Steele et al., OOPSLA 2014) to x + key, modulo 2**64."""
    x = x + key
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> U64(31))
    return mixed


class Permutation:
    """A keyed pseudo-random bijection of ``range(n)``, n up to 2**62, evaluated at any position.

    A balanced Feistel network over the smallest even number of bits that holds `n`, with cycle
    walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): constant memory
    for any `n`, and the same on every platform and release.
    """

    def __init__(self, n: int, *key: int | str) -> None:
        self.n = n
        self._half = max(1, -(-max(1, (n - 1).bit_length()) // 2))
        self._mask = (1 << self._half) - 1
        text = "\x1f".join(map(str, key)).encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=b"precache-order").digest()
        self._keys = np.frombuffer(digest, "<u8").astype(U64)
        self._tables: np.ndarray | None = None
        if self._half <= _TABLE_BITS:
            halves = np.arange(1 << self._half, dtype=U64)
            self._tables = self._mixed(halves, self._keys[:, None])

    def _mixed(self, halves: np.ndarray, key: np.ndarray) -> np.ndarray:
        mixed: np.ndarray = (mix(halves, key) & U64(self._mask)).astype(np.int64)
        return mixed

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        mixed = np.empty_like(x)
        for number in range(_ROUNDS):
            if self._tables is None:
                mixed = self._mixed(right.astype(U64), self._keys[number])
            else:
                self._tables[number].take(right, out=mixed, mode="clip")
            left ^= mixed
            left, right = right, left
        return (left << self._half) | right

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map `positions` (any shape, each in ``range(n)``) to int64."""
        values = self._encrypt(np.asarray(positions, np.int64).reshape(-1))
        outside = np.flatnonzero(values >= self.n)
        while len(outside):
            walked = self._encrypt(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.n]
        return values.reshape(np.shape(positions))


class ValidRows:
    """The rows that are not holes, by index; takes memory only for the holes.

    Parameters
    ----------
    rows
        Number of rows of the version, holes included.
    holes
        Row numbers of the holes, ascending.
    """

    def __init__(self, rows: int, holes: np.ndarray) -> None:
        self._before = np.asarray(holes, np.int64) - np.arange(len(holes), dtype=np.int64)
        self._count = rows - len(holes)

    def __len__(self) -> int:
        return self._count

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Map indices to row numbers (int64)."""
        indices = np.asarray(indices, np.int64)
        return indices + np.searchsorted(self._before, indices, side="right")

    def edges(self, block: int) -> np.ndarray:
        """Return the indices (int64) at which blocks of `block` rows begin, then the number of
        valid rows. Blocks without valid rows are left out.
        """
        holes = self._before + np.arange(len(self._before), dtype=np.int64)
        starts = np.arange(0, self._count + len(holes), block, dtype=np.int64)
        indices = starts - np.searchsorted(holes, starts)
        return np.unique(np.append(indices, self._count))


class ChosenRows:
    """A selection of rows, by index in row order; takes memory for each selected row.

    Parameters
    ----------
    rows
        Row numbers, ascending, without duplicates.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Map indices to row numbers (int64)."""
        rows: np.ndarray = self._rows[indices]
        return rows

    def edges(self, block: int) -> np.ndarray:
        """Return the edges of blocks as `ValidRows.edges` does."""
        starts = np.arange(0, int(self._rows[-1]) + 1, block, dtype=np.int64)
        return np.unique(np.append(np.searchsorted(self._rows, starts), len(self._rows)))


class WeightSums:
    """Cumulative weights, of which those at the ends of blocks are kept: at most `MOST_SUMS`.

    Those between are added up again, in the same order, so that they are the same floats.

    Parameters
    ----------
    weights
        (rows,) of a version, none negative; kept, and not to be changed.
    valid
        The rows by index; all others have no weight.

    Raises
    ------
    UsageError
        No weight is above zero, or they are too large to be added up.
    """

    def __init__(self, weights: np.ndarray, valid: ValidRows | ChosenRows) -> None:
        self._weights, self._valid = weights, valid
        count = len(valid)
        self._size = max(1, -(-count // MOST_SUMS))
        self._sums = np.empty(-(-count // self._size))
        before, step = 0.0, self._size * max(1, POSITIONS_AT_ONCE // self._size)
        for start in range(0, count, step):
            sums = self.of(np.arange(start, min(start + step, count)))
            sums[0] += before
            with np.errstate(over="ignore"):  # which is refused below
                np.cumsum(sums, out=sums)
            before = sums[-1]
            ends = np.arange(self._size, len(sums) + self._size, self._size).clip(max=len(sums)) - 1
            first = start // self._size
            self._sums[first : first + len(ends)] = sums[ends]
        self.total = float(before)
        if not self.total > 0:
            raise UsageError("all weights are zero; give some row a weight above that")
        if not np.isfinite(self.total):
            raise UsageError("the sum of the weights is no finite number; give smaller ones")

    def of(self, indices: np.ndarray) -> np.ndarray:
        """Return the weights (float64) at indices, in memory of their own."""
        weights: np.ndarray = self._weights[self._valid(indices)].astype(np.float64)
        return weights

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Return the first index (int64) up to which the weights sum up to more than each sum.

        Of sums that are not below the total it is the first that reaches the total.

        Raises
        ------
        UsageError
            The weights were changed.
        """
        last = np.searchsorted(self._sums, self.total)
        blocks: np.ndarray = np.minimum(np.searchsorted(self._sums, sums, side="right"), last)
        if self._size == 1:
            return blocks
        places = blocks[:, None] * self._size + np.arange(self._size)
        outside = places >= len(self._valid)
        own = self.of(np.where(outside, 0, places))
        own[outside] = 0
        own[:, 0] += np.where(blocks > 0, self._sums[blocks - 1], 0)
        np.cumsum(own, axis=1, out=own)
        if (own[:, -1] != self._sums[blocks]).any():
            raise UsageError(
                "the weights were changed after they were given; give a copy, and for other "
                "weights make another Loader"
            )
        reached = own > np.minimum(sums, np.nextafter(self.total, 0))[:, None]
        indices: np.ndarray = places[:, 0] + reached.argmax(axis=1)
        return indices


class WeightedDraws:
    """Draws indices with replacement, with probabilities proportional to weights.

    The draw at a position is a function of the position and the key alone: the inverse of the
    cumulative weights at a hash of the position.
    """

    def __init__(self, sums: WeightSums, *key: int | str) -> None:
        self._sums = sums
        digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
        self._key = np.frombuffer(digest, "<u8").astype(U64)[0]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Draw the indices (int64) at `positions`."""
        mixed = mix(mix(positions.astype(U64), self._key), self._key)
        # The share first: the total of the smallest floats cannot be divided.
        level = (mixed >> U64(11)).astype(np.float64) / (1 << 53) * self._sums.total
        return self._sums.find(level)


class BlockPermutation:
    """A bijection of ``range(n)`` that reads only a few blocks at a time.

    Blocks come in random order, and the rows of each group of `window` blocks are permuted
    together. Takes memory only for the blocks.

    Parameters
    ----------
    edges
        Starts of the blocks, 0 first, ascending; n last.
    """

    def __init__(self, edges: np.ndarray, window: int, *key: int | str) -> None:
        blocks = len(edges) - 1
        order = Permutation(blocks, "blocks", *key)(np.arange(blocks))
        self._key = key
        self._window = window = min(window, max(1, blocks))
        self._starts = edges[order]
        self._ends = np.cumsum(np.diff(edges)[order])
        self._group_ends = self._ends[
            np.minimum(np.arange(window - 1, blocks + window - 1, window), blocks - 1)
        ]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map `positions` (one axis, each in ``range(n)``) to int64."""
        values = np.empty(len(positions), np.int64)
        groups = np.searchsorted(self._group_ends, positions, side="right")
        order = np.argsort(groups, kind="stable")
        cuts = np.flatnonzero(np.diff(groups[order], prepend=-1))
        for part in np.split(order, cuts[1:]) if len(order) else ():
            values[part] = self._within(int(groups[part[0]]), positions[part])
        return values

    def _within(self, group: int, positions: np.ndarray) -> np.ndarray:
        start = int(self._group_ends[group - 1]) if group else 0
        total = int(self._group_ends[group]) - start
        mixed = Permutation(total, "window", group, *self._key)(positions - start)
        blocks = slice(group * self._window, (group + 1) * self._window)
        ends = self._ends[blocks] - start
        # Index of a row minus its place in the group: one number per block, not per row.
        shift = self._starts[blocks] - np.concatenate(([0], ends[:-1]))
        indices: np.ndarray = mixed + shift[np.searchsorted(ends, mixed, side="right")]
        return indices


class NodePermutation:
    """A bijection of ``range(n)`` that divides the blocks among nodes.

    Node p modulo `nodes` reads position p. Each node's share of the indices is the same in every
    epoch.
    """

    def __init__(self, edges: np.ndarray, window: int, nodes: int, *key: int | str) -> None:
        self._shares = [
            BlockPermutation(share, window, "node", node, *key) if len(share) > 1 else None
            for node, share in enumerate(_shares(edges, nodes))
        ]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map `positions` (one axis, each in ``range(n)``) to int64."""
        values = np.empty(len(positions), np.int64)
        places, nodes = np.divmod(positions, len(self._shares))
        for node, share in enumerate(self._shares):
            own = np.flatnonzero(nodes == node)
            if share is not None and len(own):
                values[own] = share(places[own])
        return values


class BucketPermutation:
    """A bijection of ``range(n)`` by which batches have indices of one bucket.

    Indices are shuffled, then sorted by bucket, and cut into batches, which come in random order;
    the rest that fills no batch comes last. A batch where two buckets meet has indices of both.
    Takes memory for all indices.

    Parameters
    ----------
    buckets
        (n,) int by index, as `buckets_of` returns them.
    batch
        Positions of a batch.
    """

    def __init__(self, buckets: np.ndarray, batch: int, *key: int | str) -> None:
        mixed = Permutation(len(buckets), "rows", *key)(np.arange(len(buckets)))
        self._indices = mixed[np.argsort(buckets[mixed], kind="stable")]
        self._batch = batch
        self._batches = Permutation(len(buckets) // batch, "batches", *key)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map `positions` (one axis, each in ``range(n)``) to int64."""
        numbers, within = np.divmod(positions, self._batch)
        full = numbers < self._batches.n
        numbers[full] = self._batches(numbers[full])
        indices: np.ndarray = self._indices[numbers * self._batch + within]
        return indices


MOST_LENGTHS = 512
"""Lengths at which a bucket may end."""


def buckets_of(lengths: np.ndarray, count: int) -> np.ndarray:
    """Sort rows by length into at most `count` buckets that leave the least to pad: (n,) int16.

    Rows of a bucket are counted as long as its longest. The ends of buckets are found by dynamic
    programming, in integers, among all lengths, or some of the same share of all values.
    """
    ordered = np.sort(lengths.astype(np.int64))
    tops = np.unique(ordered)
    if len(tops) > MOST_LENGTHS:
        values = np.cumsum(ordered)
        shares = np.arange(1, MOST_LENGTHS + 1) / MOST_LENGTHS
        tops = np.unique(ordered[np.searchsorted(values / values[-1], shares)])
    rows = np.searchsorted(ordered, tops, side="right")
    costs = (rows[None] - rows[:, None]) * tops  # of a bucket behind one top, up to another
    costs[np.tril_indices(len(tops), -1)] = np.iinfo(np.int64).max // 2
    least, steps = rows * tops, list[np.ndarray]()
    for _ in range(min(count, len(tops)) - 1):
        sums = least[:, None] + costs
        steps.append(sums.argmin(0))
        least = sums.min(0)
    ends = [len(tops) - 1]
    for before in reversed(steps):
        ends.append(int(before[ends[-1]]))
    return np.searchsorted(tops[ends[:0:-1]], lengths).astype(np.int16)


def _shares(edges: np.ndarray, nodes: int) -> list[np.ndarray]:
    """Return the edges of each node's blocks; a block that spans two shares is split."""
    n = int(edges[-1])
    bounds = np.cumsum([0, *((n - node + nodes - 1) // nodes for node in range(nodes))])
    return [
        np.unique(np.concatenate(([start], edges[(edges > start) & (edges < stop)], [stop])))
        for start, stop in itertools.pairwise(bounds.tolist())
    ]


@dataclass(frozen=True)
class Shuffle:
    """Options of an epoch's shuffle.

    Attributes
    ----------
    kind
        ``full``; ``block`` to shuffle within groups of `window` blocks of `block` rows; or
        ``buckets`` and the name of a field, by whose lengths batches of `block` rows are made, of
        `window` buckets.
    nodes
        Number of nodes among which blocks are divided, in the same way in every epoch.
    """

    kind: str = "full"
    block: int = 1
    window: int = 1
    nodes: int = 1


class Steps:
    """Division of the positions of an epoch among steps and ranks.

    A step is named by its first position. It takes the positions from there on, as many as
    `global_batch`, of which each rank has an equal share; so the order of an epoch depends neither
    on the batch size nor on the number of ranks, and can be read from any position on. All ranks
    have the same number of batches, of equal sizes.

    ::

        11 rows, batch 2, 2 ranks     rank 0: 0 1 | 4 5 | 8 9
                                      rank 1: 2 3 | 6 7 | 10 0   <- filled up from the start
    """

    batch_size: int
    drop_last: bool
    rank: int
    world_size: int
    shuffle: Shuffle | None

    @property
    def count(self) -> int:
        """Number of rows of an epoch."""
        raise NotImplementedError

    @property
    def once(self) -> int:
        """Positions before this one have rows that come for the first time."""
        return self.count

    @functools.cached_property
    def global_batch(self) -> int:
        """Rows of one step over all ranks."""
        return self.batch_size * self.world_size

    def stop(self, first: int = 0) -> int:
        """Return the end of the last step of an epoch that is read from a position on."""
        left = self.count - first
        if self.drop_last:
            return first + left // self.global_batch * self.global_batch
        return first + -(-left // self.world_size) * self.world_size

    def batches(self, first: int = 0) -> int:
        """Return the number of batches of an epoch that is read from a position on."""
        return -(-(self.stop(first) - first) // self.global_batch)

    @property
    def largest(self) -> int:
        """Rows of the largest batch of this rank."""
        return min(self.batch_size, -(-self.count // self.world_size))

    def own(self, first: int, steps: int = 1) -> np.ndarray:
        """Return this rank's positions (int64) in some steps, step by step, ascending in each.

        They are an equal share of the step's positions, in order of their nodes.
        """
        size = min(steps * self.global_batch, self.stop(first) - first)
        whole, rest = divmod(size, self.global_batch)
        starts = first + self.global_batch * np.arange(whole, dtype=np.int64)
        share = self._share(first, self.global_batch if whole else 0)
        own = (starts[:, None] + share).reshape(-1)
        return np.append(own, first + size - rest + self._share(first, rest))

    def _share(self, first: int, size: int) -> np.ndarray:
        nodes = self.shuffle.nodes if self.shuffle else 1
        share = size // self.world_size
        start, end = self.rank * share, (self.rank + 1) * share
        if nodes == 1:
            return np.arange(start, end, dtype=np.int64)
        return np.sort(np.argsort((first + np.arange(size)) % nodes, kind="stable")[start:end])

    def again(self, first: int) -> np.ndarray | None:
        """Return numbers that make random draws differ for rows repeated within an epoch.

        Returns
        -------
        np.ndarray | None
            (n,) int64 for this rank's rows of a step: -1 minus the position of each row that may
            be a repetition, 0 for the others. None if no row can be one.
        """
        repeated = self.repeated(first)
        return None if repeated is None else np.where(repeated, -1 - self.own(first), 0)

    def repeated(self, first: int) -> np.ndarray | None:
        """Return which rows of a step come again, to fill up the end of the epoch.

        Returns
        -------
        np.ndarray | None
            (n,) bool, for this rank's rows. None if there is none.
        """
        if first + self.global_batch <= self.once:
            return None
        repeated: np.ndarray = self.own(first) >= self.once
        return repeated if repeated[-1] else None


@dataclass(frozen=True)
class Order(Steps):
    """The rows of an epoch, batch by batch.

    Without `drop_last`, rows from the start of the epoch fill up its end, as in
    `torch.utils.data.DistributedSampler`.

    Attributes
    ----------
    batch_size
        Rows per batch of one rank.
    shuffle
        None for the order of the rows.
    weights
        Of the rows, which are then drawn with replacement, whatever `shuffle` is.
    lengths
        (n,) int64 by index, for a shuffle in buckets.
    """

    valid: ValidRows | ChosenRows
    batch_size: int
    shuffle: Shuffle | None = Shuffle()
    seed: int = 0
    drop_last: bool = False
    weights: WeightSums | None = None
    rank: int = 0
    world_size: int = 1
    lengths: np.ndarray | None = None

    @property
    def by_epoch(self) -> bool:
        """True if epochs have different orders."""
        return self.shuffle is not None or self.weights is not None

    @property
    def count(self) -> int:
        return len(self.valid)

    @functools.cached_property
    def _buckets(self) -> np.ndarray | None:
        if self.lengths is None or self.shuffle is None:
            return None
        return buckets_of(self.lengths, self.shuffle.window)

    def again(self, first: int) -> np.ndarray | None:
        # Any row may be drawn a second time.
        return super().again(first) if self.weights is None else -1 - self.own(first)

    def epoch(self, epoch: int, first: int = 0) -> Generator[np.ndarray, None, None]:
        """Yield the row numbers (int64) of each batch of an epoch, from a position on."""
        for block in self.blocks(epoch, first):
            yield from self.cut(block())

    def cut(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the batches of a block."""
        for offset in range(0, len(rows), self.batch_size):
            yield rows[offset : offset + self.batch_size]

    def blocks(self, epoch: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        """Yield functions that compute the rows of several batches each, to be called anywhere."""
        permute = self._permutation(epoch)
        at_once = POSITIONS_AT_ONCE if self.weights is None else DRAWS_AT_ONCE
        steps = max(1, at_once // self.batch_size)
        for start in range(first, self.stop(first), steps * self.global_batch):
            yield functools.partial(self._rows, permute, start, steps)

    def _rows(
        self, permute: Callable[[np.ndarray], np.ndarray], start: int, steps: int
    ) -> np.ndarray:
        positions = self.own(start, steps)
        if self.stop(start) > self.count:  # the end is filled up from the beginning
            positions %= self.count
        return self.valid(permute(positions))

    def _permutation(self, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
        shuffle, key = self.shuffle, (self.seed, epoch)
        if self.weights is not None:
            return WeightedDraws(self.weights, "weighted", *key)
        if shuffle is None:
            return lambda positions: positions
        if self._buckets is not None:
            return BucketPermutation(self._buckets, shuffle.block, *key)
        if shuffle.kind == "full":
            return Permutation(self.count, "full", *key)
        edges = self.valid.edges(shuffle.block)
        if shuffle.nodes > 1:
            return NodePermutation(edges, shuffle.window, shuffle.nodes, *key)
        return BlockPermutation(edges, shuffle.window, "block", *key)
