"""Read rows that other versions store: as their chunks are stored, or decoded."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from precache.errors import DamageError
from precache.reading.array_reader import ArrayReader
from precache.reading.ragged_reader import RaggedReader
from precache.reading.shard_files import ShardFiles, shard_files
from precache.reading.version_reader import open_reader
from precache.storage.base import Folder
from precache.storage.local_files import map_file
from precache.store.layout import CHECK_NBYTES
from precache.store.receipts import ChannelSums, ShardObject
from precache.store.tree import Leaf
from precache_workers.planning.assembly import ObjectId, taken_rows
from precache_workers.planning.catalogue import WHOLE, StoredArray, StoredRows, open_stored
from precache_workers.planning.stored_versions import UNREADABLE
from precache_workers.shards.shard_objects import DamagedObjectError

DECODE_BYTES, FETCH_BYTES = 4 << 20, 64 << 20
"""Bytes of rows that are decoded at a time: of a mapped object, and of one that is fetched."""


class StoredObject:
    """Rows of one object of an array, checked when they are first needed.

    If many rows are taken from it, all its bytes are read and checked before chunks are copied; of
    others, each chunk that is copied is decoded.

    Parameters
    ----------
    planned
        Rows that may be taken: numbers in the object, sorted.

    Attributes
    ----------
    count, is_hole
        Number of rows; which are holes: (count,) bool.
    row_shapes
        (rows, axes) int64 shapes of ragged rows; None for rows of one shape.
    whole
        Whether many of its rows are taken.
    sums
        What its version's records say of it; None if they have none.

    Raises
    ------
    DamagedObjectError
        It is not there or of another size, cannot be read, or is not what it was.
    """

    def __init__(
        self, objects: StoredObjects, array: StoredArray, shard: int, planned: np.ndarray
    ) -> None:
        self.array, self.shard, self._planned = array, shard, planned
        rows = array.rows_of(shard)
        self.first, self.count = rows.start, len(rows)
        self.whole = len(planned) >= WHOLE * self.count
        with self._damaged():
            self._files, self._reader = objects.reader(array, shard)
            version = self._files.version
            self.leaf: Leaf = version.shard_leaves(array.name)[shard]
            self._checks = version.checks(array.name, shard)
            sums = version.shard_sums(array.name)
            holes = version.holes
            shapes = version.row_shapes(array.name) if array.shape.ragged else None
            if self.whole and (fault := self.leaf.fault_of_size(self.folder.size(self.leaf.name))):
                raise DamageError(fault)
        self.row_shapes = None if shapes is None else shapes[rows.start : rows.stop]
        self.sums = None if sums is None else ChannelSums.of(sums[shard].tolist())
        self.is_hole = np.fromiter((row in holes for row in rows), np.bool_, self.count)
        self.chunk_rows = self._reader.array.chunk_rows
        self._held = planned[:0]

    @contextlib.contextmanager
    def _damaged(self) -> Iterator[None]:
        """Raise what reading raises in the block as `DamagedObjectError`."""
        try:
            yield
        except (*UNREADABLE, OSError) as error:
            raise DamagedObjectError(self.array, self.shard, error) from None

    @property
    def folder(self) -> Folder:
        return self.array.folder

    @property
    def stored(self) -> ShardObject:
        """The object, as a receipt has it."""
        row = self.array.shape
        raw = row.padded_nbytes(self.count, self.array.rows_per_shard)
        if self.row_shapes is not None:
            raw = int(self.row_shapes.prod(axis=1).sum()) * np.dtype(row.dtype).itemsize
        checks = self._checks.astype("<u4").tobytes().hex()
        return ShardObject(self.leaf.size, self.leaf.xxh3, raw, checks)

    # --- bytes ----------------------------------------------------------------------------------

    @functools.cached_property
    def _data(self) -> memoryview:
        """All bytes, checked; mapped where that is possible."""
        with self._damaged():
            descriptor = self.folder.open(self.leaf.name)
            if descriptor is None:
                data = memoryview(self.folder.read(self.leaf.name))
            else:
                try:
                    # To read all pages at once costs a tenth of reading them; Linux alone can.
                    data = map_file(descriptor, getattr(mmap, "MAP_POPULATE", 0)).data
                finally:
                    os.close(descriptor)
            if fault := self.leaf.fault(data):
                raise DamageError(f"{self.folder.path(self.leaf.name)}: {fault}")
        return data

    def open(self) -> memoryview:
        """Read and check the whole object."""
        self.whole = True
        return self._data

    def chunks(self, first: int, count: int) -> Iterator[tuple[memoryview, list[int]]]:
        """Yield consecutive chunks as they are stored, checked, and the length of each."""
        part = np.arange(first, first + count)
        with self._damaged():
            places = self._files.locate(self.first + part * self.chunk_rows)
            ends = places.starts + places.lengths
            if self.whole and (ends[:-1] == places.starts[1:]).all():
                yield self._data[places.starts[0] : ends[-1]], places.lengths.tolist()
                return
            for chunk, data in zip(part.tolist(), self._files.read(places), strict=True):
                self._require_sound(chunk, data)
                yield data, [len(data)]

    def _require_sound(self, chunk: int, data: memoryview) -> None:
        """Raise `DamageError` unless a chunk can be decoded, and is the recorded one."""
        array = self._reader.array
        if int.from_bytes(data[-CHECK_NBYTES:], "little") != self._checks[chunk]:
            raise DamageError(f"chunk {chunk} is not the one that was written")
        if self.row_shapes is not None:
            shape = tuple(self.row_shapes[chunk].tolist())
            array.decoder.decode_ragged(data, shape, array.dtype)
        else:
            array.decoder.decode(data, np.empty(array.chunk_shape, array.dtype))

    # --- rows -----------------------------------------------------------------------------------

    @functools.cached_property
    def _decoded(self) -> np.ndarray:
        array = self._reader.array
        nbytes = DECODE_BYTES if self._files.mapped else FETCH_BYTES
        rows = min(max(1, nbytes // max(1, array.row_nbytes)), self.count)
        return np.empty((rows, *array.row_shape), array.dtype)

    def row(self, row: int) -> np.ndarray:
        """Decode a row, and some that are needed next; valid until the next call."""
        if self.row_shapes is not None:
            [block] = self.blocks([row])
            only: np.ndarray = block[0]
            return only
        at = int(np.searchsorted(self._held, row))
        if self._held[at : at + 1].tolist() != [row]:
            start, at = int(np.searchsorted(self._planned, row)), 0
            run = self._planned[start : start + len(self._decoded)]
            run = run if run[:1].tolist() == [row] else np.array([row])
            deque(self.blocks(run), maxlen=0)
            self._held = run
        decoded: np.ndarray = self._decoded[at]
        return decoded

    def blocks(self, rows: Iterable[int]) -> Iterator[np.ndarray]:
        """Decode rows, several of one shape at once; each block is valid until the next."""
        numbers, self._held = self.first + np.fromiter(rows, np.int64), self._held[:0]
        with self._damaged():
            if isinstance(self._reader, RaggedReader):
                for row in self._reader.rows(numbers):
                    yield row[np.newaxis]
                return
            for start in range(0, len(numbers), len(self._decoded)):
                part = numbers[start : start + len(self._decoded)]
                self._reader.read(part, self._decoded[: len(part)])
                yield self._decoded[: len(part)]


class StoredObjects:
    """The stored objects that a shard takes rows of, each opened once for all fields."""

    def __init__(self, stored: StoredRows) -> None:
        taken = taken_rows(stored)
        self._planned = {object_id: rows for object_id, (_, rows) in taken.items()}
        self._opened: dict[ObjectId, StoredObject] = {}
        self._readers: dict[tuple[str, str], tuple[ShardFiles, ArrayReader]] = {}

    def reader(self, array: StoredArray, shard: int) -> tuple[ShardFiles, ArrayReader]:
        """Return the files of an array that have a shard, and the reader of its rows."""
        version, known = open_stored(array, shard), self._readers.get(array.place)
        if known is None or known[0].version is not version:
            files = shard_files(version, array.name)
            known = files, open_reader(version, array.name, objects=files)
            self._readers[array.place] = known
        return known

    def object(self, array: StoredArray, shard: int) -> StoredObject:
        """Return an object.

        Raises
        ------
        DamagedObjectError
            It is not there, or of another size.
        """
        key = array.place, shard
        if key not in self._opened:
            planned = self._planned.get(key, np.zeros(0, np.int64))
            self._opened[key] = StoredObject(self, array, shard, planned)
        return self._opened[key]
