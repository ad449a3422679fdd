"""Pure arithmetic of a version: rows, shards, chunks, and the index that ends a shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.errors import DamageError

TARGET_SHARD_BYTES = 128 << 20
TARGET_CHUNK_BYTES = 64 << 10
INDEX_ENTRY_NBYTES = 16
"""Bytes that the index of a shard has for a chunk: offset and length."""

INDEX_CHECKSUM_NBYTES = 4
"""Bytes of the CRC32C behind them."""

MIN_SHARDS = 16
MISSING = np.uint64(2**64 - 1)
"""Offset and length of a chunk that was never written."""


@dataclass(frozen=True)
class RowShape:
    """Shape and dtype of one stored row of a field.

    Attributes
    ----------
    ragged
        Rows differ in shape: `shape` is the one by which shards are sized, and has their number of
        axes.
    """

    shape: tuple[int, ...]
    dtype: str
    ragged: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {'of any shape' if self.ragged else tuple(self.shape)}"

    def described(self, kind: str | None) -> str:
        """Describe rows of a kind of field, such as ``text`` or ``ragged int64 (n,)``."""
        if kind in (None, "text", "bytes"):
            return kind or str(self)
        axes = str((0, *self.shape[1:])).replace("0", "n", 1)
        return f"{kind} {self.dtype} {axes}"

    @property
    def document(self) -> dict[str, Any]:
        """The row as documents describe it: those of rows of one shape do not know of ragged."""
        described = {"shape": list(self.shape), "dtype": self.dtype}
        return {**described, "ragged": True} if self.ragged else described

    def object_name(self, number: int) -> str:
        """Name of an object below the folder of an array of such rows."""
        return f"c/{number}" + "/0" * (0 if self.ragged else len(self.shape))

    @property
    def hole(self) -> tuple[int, ...]:
        """Shape of a row that is a hole."""
        return (0,) * len(self.shape) if self.ragged else self.shape

    def admits(self, row: np.ndarray, *, by_length: bool = False) -> bool:
        """Return whether a row can be stored.

        Ragged rows differ in their first axis if they differ `by_length`, else (C, H, W) in H, W.
        """
        if self.ragged:
            fixed = slice(1, None) if by_length else slice(1)
            same = row.ndim == len(self.shape) and row.shape[fixed] == self.shape[fixed]
            return same and row.dtype == self.dtype and row.nbytes < 2**32
        return row.shape == self.shape and row.dtype == self.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def rows_per_chunk(self) -> int:
        """Rows that would share a chunk if this were the only field."""
        return rows_per_chunk(self.nbytes)

    def chunk_rows(self, rows_per_shard: int) -> int:
        """Rows that share a chunk: a power of two that divides the rows of a shard; 1 if ragged."""
        return 1 if self.ragged else min(self.rows_per_chunk, rows_per_shard & -rows_per_shard)

    def padded_nbytes(self, rows: int, rows_per_shard: int) -> int:
        """Bytes of `rows` rows of a shard, padded to whole chunks."""
        step = self.chunk_rows(rows_per_shard)
        return -(-rows // step) * step * self.nbytes


def rows_per_chunk(row_nbytes: int) -> int:
    """Rows that share a chunk: a power of two, about 64 KiB together; 1 for a large row."""
    return max(1, 1 << int(math.log2(max(1, TARGET_CHUNK_BYTES // max(1, row_nbytes)))))


def rows_per_shard(rows: int, row_nbytes: Sequence[int], wanted: int | None = None) -> int:
    """Rows of a shard, the same for every field.

    Parameters
    ----------
    rows
        Rows of the version.
    row_nbytes
        Decoded bytes of one row, field by field.
    wanted
        Number that the user gave; rounded up to whole chunks.

    Notes
    -----
    The target is 128 MiB raw for a shard of the largest field. A small set is divided into about
    16 shards if its chunks allow it, so that several workers share the work.
    """
    largest = max(row_nbytes)
    step = rows_per_chunk(largest)
    several = len(set(map(rows_per_chunk, row_nbytes))) > 1
    if wanted is not None:
        return -(-wanted // step) * step
    most = max(1, min(TARGET_SHARD_BYTES // max(1, largest), rows // MIN_SHARDS))
    # A multiple lets rows of smaller fields share chunks; taken if it costs little balance.
    for shared in (64, 16, 4):
        if several and shared > step and most >= 8 * shared:
            step = shared
            break
    return max(1, most // step) * step


def encode_index(offsets: np.ndarray, lengths: np.ndarray) -> bytes:
    """Bytes of a shard index: (offset, length) pairs as little-endian u64, then CRC32C.

    Format: Zarr v3 `sharding_indexed` with ``index_codecs=[bytes(little), crc32c]``.
    """
    index = np.stack([offsets, lengths], axis=1).astype("<u8").tobytes()
    return index + kernels.crc32c(index).to_bytes(INDEX_CHECKSUM_NBYTES, "little")


def decode_index(tail: memoryview | bytes, chunks: int) -> np.ndarray:
    """Parse the bytes of a shard index into (chunks, 2) uint64 offsets and lengths.

    Raises
    ------
    DamageError
        The bytes are short or fail their CRC32C.
    """
    end = chunks * INDEX_ENTRY_NBYTES
    body, stored = bytes(tail[:end]), bytes(tail[end : end + INDEX_CHECKSUM_NBYTES])
    if len(stored) != INDEX_CHECKSUM_NBYTES or kernels.crc32c(body) != int.from_bytes(
        stored, "little"
    ):
        raise DamageError("the shard index fails its CRC32C")
    return np.frombuffer(body, "<u8").reshape(chunks, 2).astype(np.uint64, copy=False)


CHECK_NBYTES = 4
"""Bytes at the end of a chunk that are a checksum of its contents: a CRC32C, or that of zstd."""


def align(offset: int) -> int:
    """Round `offset` up to a multiple of 64."""
    return -(-offset // 64) * 64
