"""Rows of an offered shard, as their chunks lie there or decoded."""

from __future__ import annotations

import math

import numpy as np
import xxhash

from precache.codecs import undo_image
from precache.errors import StorageError
from precache.layout import MISSING, decode_index
from precache.store import read_array_documents
from workers.reuse import Offer, OfferedField

DECODE_BYTES = 4 << 20
"""Of rows that are decoded at a time where all of them are wanted."""


class OfferedRows:
    """One object of an earlier version, checked as a whole.

    Raises
    ------
    StorageError
        It cannot be read, or is not what it was.
    """

    def __init__(self, offer: Offer, name: str) -> None:
        self.offered: OfferedField = offer.fields[name]
        folder = self.offered.base or offer.folder
        data = folder.read(self.offered.object_name)
        found = (len(data), xxhash.xxh3_64_intdigest(data))
        if found != (self.offered.size, self.offered.xxh3):
            raise StorageError(f"{folder.path(self.offered.object_name)} is damaged")
        self._data = memoryview(data)
        self._array = read_array_documents(folder, [self.offered.made.array]).popitem()[1]
        chunks = math.prod(self._array.chunks_per_object)
        self._index = decode_index(self._data[-chunks * 16 - 4 :], chunks).tolist()
        self.chunk_rows = self._array.chunk_shape[0]
        # Where chunks are copied, those that have to be decoded lie apart.
        nbytes = math.prod(self._array.chunk_shape) * np.dtype(self._array.dtype).itemsize
        step = 1 if self.offered.made.encoded else max(1, DECODE_BYTES // max(1, nbytes))
        shape = (min(step, chunks), *self._array.chunk_shape)
        self._decoded = np.empty(shape, self._array.dtype)
        self._rows = self._decoded.reshape(-1, *shape[2:])
        self._holds = -1

    def chunk(self, number: int) -> memoryview:
        """A chunk's bytes."""
        offset, length = self._index[number]
        return self._data[offset : offset + length]

    def row(self, row: int) -> np.ndarray:
        """A row by its place in the shard, decoded; valid until the next."""
        run, place = divmod(row, len(self._rows))
        if run != self._holds:
            self._decode(run * len(self._decoded))
            self._holds = run
        decoded: np.ndarray = self._rows[place]
        return decoded

    def _decode(self, first: int) -> None:
        """A run of chunks; the filter is undone for all of them at once, which costs less."""
        there = 0
        for entry in self._index[first : first + len(self._decoded)]:
            if entry[0] == MISSING:
                break
            self._array.decoder.decode(self.chunk(first + there), self._decoded[there])
            there += 1
        if self._array.decoder.filtered:
            undo_image(self._decoded[:there])
