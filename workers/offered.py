"""Rows of an offered shard, as their chunks lie there or decoded."""

from __future__ import annotations

import math

import numpy as np
import xxhash

from precache.codecs import undo_image
from precache.errors import StorageError
from precache.layout import decode_index
from precache.store import read_array_documents
from workers.reuse import Offer, OfferedField


class OfferedRows:
    """One object of an earlier version, checked as a whole.

    Raises
    ------
    StorageError
        It cannot be read, or is not what it was.
    """

    def __init__(self, offer: Offer, name: str) -> None:
        self.offered: OfferedField = offer.fields[name]
        data = offer.folder.read(self.offered.object_name)
        found = (len(data), xxhash.xxh3_64_intdigest(data))
        if found != (self.offered.size, self.offered.xxh3):
            raise StorageError(f"{offer.folder.path(self.offered.object_name)} is damaged")
        self._data = memoryview(data)
        self._array = read_array_documents(offer.folder, [name])[name]
        chunks = math.prod(self._array.chunks_per_object)
        self._index = decode_index(self._data[-chunks * 16 - 4 :], chunks).tolist()
        self.chunk_rows = self._array.chunk_shape[0]
        self._decoded = np.empty(self._array.chunk_shape, self._array.dtype)
        self._holds = -1

    def chunk(self, number: int) -> memoryview:
        """A chunk's bytes."""
        offset, length = self._index[number]
        return self._data[offset : offset + length]

    def row(self, row: int) -> np.ndarray:
        """A row by its place in the shard, decoded; valid until the next."""
        chunk, place = divmod(row, self.chunk_rows)
        if chunk != self._holds:
            self._array.decoder.decode(self.chunk(chunk), self._decoded)
            if self._array.decoder.filtered:
                undo_image(self._decoded)
            self._holds = chunk
        decoded: np.ndarray = self._decoded[place]
        return decoded
