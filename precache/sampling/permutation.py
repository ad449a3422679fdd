"""A pseudo-random permutation as a function: position -> position, in constant memory."""

from __future__ import annotations

import hashlib

import numpy as np

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
                np.take(self._tables[number], right, out=mixed, mode="clip")
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
