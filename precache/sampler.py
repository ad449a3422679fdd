"""The order of an epoch, as a function: position -> row, in constant memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

WINDOW = 65_536
"""Positions whose rows are computed together: of fewer, the calls for the last few that are still
outside of the range take most of the time."""

_ROUNDS = 6
_TABLE_BITS = 16
"""Halves of up to so many bits have each round tabulated, once: 3 MB at most."""

_U64 = np.uint64


def _mix(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al., OOPSLA 2014) over x + key; wraps modulo 2**64."""
    x = x + key
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> _U64(31))
    return mixed


class Permutation:
    """A keyed pseudo-random bijection of ``range(n)``, evaluated at any position.

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
        self._keys = np.frombuffer(digest, "<u8").astype(_U64)
        self._tables: np.ndarray | None = None
        if self._half <= _TABLE_BITS:
            halves = np.arange(1 << self._half, dtype=_U64)
            self._tables = self._mixed(halves, self._keys[:, None])

    def _mixed(self, halves: np.ndarray, key: np.ndarray) -> np.ndarray:
        mixed: np.ndarray = (_mix(halves, key) & _U64(self._mask)).astype(np.int64)
        return mixed

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        mixed = np.empty_like(x)
        for number in range(_ROUNDS):
            if self._tables is None:
                mixed = self._mixed(right.astype(_U64), self._keys[number])
            else:
                np.take(self._tables[number], right, out=mixed, mode="clip")
            left ^= mixed
            left, right = right, left
        return (left << self._half) | right

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Images of `positions` (any shape, each in ``range(n)``) as int64."""
        values = self._encrypt(np.asarray(positions, np.int64).reshape(-1))
        outside = np.flatnonzero(values >= self.n)
        while len(outside):
            again = self._encrypt(values[outside])
            values[outside] = again
            outside = outside[again >= self.n]
        return values.reshape(np.shape(positions))


class ValidRows:
    """The rows that are not holes, by rank; memory grows with the holes alone.

    Parameters
    ----------
    rows
        Rows of the version, holes included.
    holes
        Their row numbers, ascending.
    """

    def __init__(self, rows: int, holes: np.ndarray) -> None:
        self._before = np.asarray(holes, np.int64) - np.arange(len(holes), dtype=np.int64)
        self._count = rows - len(holes)

    def __len__(self) -> int:
        return self._count

    def __call__(self, ranks: np.ndarray) -> np.ndarray:
        """Row numbers (int64) of the valid rows with the given ranks."""
        ranks = np.asarray(ranks, np.int64)
        return ranks + np.searchsorted(self._before, ranks, side="right")

    def edges(self, block: int) -> np.ndarray:
        """Ranks (int64) at which each run of `block` rows begins, 0 first, and their number last.

        Runs without any valid row are left out.
        """
        holes = self._before + np.arange(len(self._before), dtype=np.int64)
        starts = np.arange(0, self._count + len(holes), block, dtype=np.int64)
        ranks = starts - np.searchsorted(holes, starts)
        return np.unique(np.append(ranks, self._count))


class BlockPermutation:
    """A bijection of ``range(n)`` that keeps what is read within a few blocks at a time.

    Blocks come in random order; each run of `window` of them is permuted as one. Memory grows with
    the blocks alone.

    Parameters
    ----------
    edges
        Where blocks begin, 0 first, ascending; n last.
    """

    def __init__(self, edges: np.ndarray, window: int, *key: int | str) -> None:
        blocks = len(edges) - 1
        order = Permutation(blocks, "blocks", *key)(np.arange(blocks))
        self._key = key
        self._window = window
        self._starts = edges[order]
        self._ends = np.cumsum(np.diff(edges)[order])
        self._group_ends = self._ends[
            np.minimum(np.arange(window - 1, blocks + window - 1, window), blocks - 1)
        ]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Images of `positions` (one axis, ascending, each in ``range(n)``) as int64."""
        values = np.empty(len(positions), np.int64)
        cuts = np.searchsorted(positions, self._group_ends).tolist()
        for group, (start, stop) in enumerate(zip([0, *cuts], cuts, strict=False)):
            if start < stop:
                values[start:stop] = self._within(group, positions[start:stop])
        return values

    def _within(self, group: int, positions: np.ndarray) -> np.ndarray:
        start = int(self._group_ends[group - 1]) if group else 0
        total = int(self._group_ends[group]) - start
        mixed = Permutation(total, "window", group, *self._key)(positions - start)
        blocks = slice(group * self._window, (group + 1) * self._window)
        ends = self._ends[blocks] - start
        # Rank less place, block by block: the blocks are few, and rows are many.
        shift = self._starts[blocks] - np.concatenate(([0], ends[:-1]))
        ranks: np.ndarray = mixed + shift[np.searchsorted(ends, mixed, side="right")]
        return ranks


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is shuffled: ``full``, or ``block`` within `window` blocks of `block` rows."""

    kind: str = "full"
    block: int = 1
    window: int = 1

    def permutation(self, valid: ValidRows, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """Position -> rank, both in ``range(len(valid))``."""
        if self.kind == "full":
            return Permutation(len(valid), "full", *key)
        return BlockPermutation(valid.edges(self.block), self.window, "block", *key)


@dataclass(frozen=True)
class Order:
    """Which rows an epoch reads, batch by batch.

    `shuffle` is None for a fixed order: that of the rows, or of `sequence` (int64 row numbers).
    """

    valid: ValidRows
    batch_size: int
    shuffle: Shuffle | None = Shuffle()
    seed: int = 0
    drop_last: bool = False
    sequence: np.ndarray | None = None

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(len(self.valid), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def blocks_at_once(self, block: int) -> int:
        """Runs of `block` rows that must be at hand at a time.

        Of a full shuffle, or a given sequence, all. Else those of the windows that one batch can
        be in, which are two where windows are larger than batches.
        """
        sizes = np.sort(np.diff(self.valid.edges(block)))
        if self.sequence is not None or (self.shuffle and self.shuffle.kind == "full"):
            return len(sizes)
        window = self.shuffle.window if self.shuffle else 1
        least = int(sizes[:window].sum())
        windows = max(0, self.batch_size - 2) // least + 2
        return min(len(sizes), windows * window)

    def epoch(self, epoch: int, start: int = 0) -> Generator[np.ndarray, None, None]:
        """Row numbers (int64) of each batch of an epoch, from batch number `start` on."""
        permute = self.shuffle and self.shuffle.permutation(self.valid, self.seed, epoch)
        step = max(1, WINDOW // self.batch_size) * self.batch_size
        stop = min(self.batches * self.batch_size, len(self.valid))
        for first in range(start * self.batch_size, stop, step):
            ranks = np.arange(first, min(first + step, stop), dtype=np.int64)
            if permute:
                ranks = permute(ranks)
            rows = self.valid(ranks) if self.sequence is None else self.sequence[ranks]
            for offset in range(0, len(rows), self.batch_size):
                yield rows[offset : offset + self.batch_size]
