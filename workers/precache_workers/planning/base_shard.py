"""Rows of an offered shard, as their chunks lie there or decoded."""

from __future__ import annotations

import functools
import math
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from precache.codecs.image import undo_image
from precache.errors import DamageError, StorageError
from precache.storage.base import Folder
from precache.storage.local_files import map_file
from precache.store.layout import decode_index
from precache.store.version import read_array_documents
from precache_workers.planning.reuse import BaseShard, OfferedField

DECODE_BYTES = 4 << 20
"""Of rows that are decoded at a time."""


class SpoiledBaseShard(StorageError):
    """What an earlier version offers of a field cannot be had after all."""

    def __init__(self, field: str, why: Exception | str) -> None:
        super().__init__(str(why))
        self.field = field


class BaseShardRows:
    """One object of an earlier version; it is read, and checked as a whole, when first needed.

    Until then its size alone speaks for it, as it does for shards that are linked whole: damage
    that keeps the size stays for `verify`, and for loaders' checksums, to find.

    Attributes
    ----------
    count
        Its rows.
    chunk_rows, row_shape
        Rows of a chunk; shape of a row.

    Raises
    ------
    StorageError
        It is not there, or of another size.
    SpoiledBaseShard
        It cannot be read, or is not what it was.
    """

    def __init__(self, offer: BaseShard, name: str) -> None:
        self.offered: OfferedField = offer.fields[name]
        self.count = len(offer.same)
        self._field, self._folder = name, self.offered.base or offer.folder
        if self._folder.size(self.offered.object_name) != self.offered.size:
            raise StorageError(f"{self._folder.path(self.offered.object_name)} is not what it was")
        documents = read_array_documents(self._folder, [self.offered.made.array])
        self._array = array = documents.popitem()[1]
        self.chunk_rows, *shape = array.chunk_shape
        self.row_shape = tuple(shape)
        self._chunks = -(-self.count // self.chunk_rows)
        nbytes = math.prod(array.chunk_shape) * np.dtype(array.dtype).itemsize
        self._together = max(1, DECODE_BYTES // max(1, nbytes))
        self._wanted = np.arange(self._chunks)
        self._held: Sequence[int] = ()

    def expect(self, rows: np.ndarray) -> None:
        """Have those chunks decoded together that hold these rows, and any other alone."""
        self._wanted = np.unique(rows // self.chunk_rows)

    @functools.cached_property
    def _object(self) -> tuple[memoryview, np.ndarray]:
        """The object's bytes, and where each of its chunks begins and the last one ends."""
        try:
            data = _mapped(self._folder, self.offered.object_name)
            found = (len(data), xxhash.xxh3_64_intdigest(data))
            if found != (self.offered.size, self.offered.stored.xxh3):
                raise DamageError(f"{self._folder.path(self.offered.object_name)} is damaged")
            entries = math.prod(self._array.chunks_per_object)
            index = decode_index(data[-entries * 16 - 4 :], entries)[: self._chunks]
        except (DamageError, OSError, StorageError) as error:
            raise SpoiledBaseShard(self._field, error) from None
        bounds = np.concatenate([[0], np.cumsum(index[:, 1], dtype=np.uint64)])
        if not np.array_equal(bounds[:-1], index[:, 0]):
            raise SpoiledBaseShard(self._field, "its chunks do not lie one after another")
        return data, bounds.astype(np.int64)

    def open(self) -> None:
        """Read and check it."""
        self._object  # noqa: B018 - a property that does it once

    def chunks(self, first: int, count: int) -> tuple[memoryview, np.ndarray]:
        """Bytes of chunks that follow each other, and the length of each."""
        data, bounds = self._object
        part = bounds[first : first + count + 1]
        return data[part[0] : part[-1]], np.diff(part)

    def row(self, row: int) -> np.ndarray:
        """A row by its place in the shard, decoded; valid until the next."""
        number, place = divmod(row, self.chunk_rows)
        decoded: np.ndarray = self.decoded(number)[place]
        return decoded

    def decoded(self, number: int) -> np.ndarray:
        """A chunk, decoded; valid until the next."""
        if number not in self._held:
            self._decode(number)
        chunk: np.ndarray = self._decoded[self._held.index(number)]
        return chunk

    def blocks(self, rows: range) -> Iterator[np.ndarray]:
        """Rows that follow each other, decoded, some at a time; valid until the next."""
        while rows:
            number, place = divmod(rows.start, self.chunk_rows)
            self.decoded(number)
            at = self._held.index(number)
            count = 1
            while self._held[at + count : at + count + 1] == [number + count]:
                count += 1
            block = self._decoded[at : at + count].reshape(-1, *self.row_shape)
            block = block[place : place + len(rows)]
            yield block
            rows = rows[len(block) :]

    @functools.cached_property
    def _decoded(self) -> np.ndarray:
        most = max(1, min(self._together, len(self._wanted)))
        return np.empty((most, *self._array.chunk_shape), self._array.dtype)

    def _decode(self, number: int) -> None:
        """Chunks from one on; the filter is undone for all of them at once, which costs less."""
        at = int(np.searchsorted(self._wanted, number))
        run = self._wanted[at : at + len(self._decoded)].tolist()
        self._held = held = run if run[:1] == [number] else [number]
        data, bounds = self._object
        try:
            for each, out in zip(held, self._decoded, strict=False):
                self._array.decoder.decode(data[bounds[each] : bounds[each + 1]], out)
        except DamageError as error:
            raise SpoiledBaseShard(self._field, error) from None
        if self._array.decoder.filtered:
            undo_image(self._decoded[: len(held)])


def _mapped(folder: Folder, name: str) -> memoryview:
    """An object's bytes: mapped where that can be, which costs a tenth of reading them."""
    descriptor = folder.open(name)
    if descriptor is None:
        return memoryview(folder.read(name))
    try:
        return map_file(descriptor, getattr(mmap, "MAP_POPULATE", 0)).data  # Linux alone has it
    finally:
        os.close(descriptor)
