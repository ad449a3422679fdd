"""Read rows that other versions store: as their chunks are stored, or decoded."""

from __future__ import annotations

import functools
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from precache.codecs.image import undo_image
from precache.errors import DamageError, StorageError
from precache.storage.base import Folder, required
from precache.storage.local_files import map_file
from precache.store.layout import INDEX_CHECKSUM_NBYTES, INDEX_ENTRY_NBYTES, MISSING, decode_index
from precache.store.receipts import ChannelSums, ShardObject
from precache.store.tree import Leaf
from precache.store.zarr_metadata import Array
from precache_workers.planning.assembly import Assembly, taken_rows
from precache_workers.planning.catalogue import WHOLE, StoredArray, open_stored
from precache_workers.planning.stored_versions import UNREADABLE
from precache_workers.planning.target_version import object_name

DECODE_BYTES = 4 << 20
"""Bytes of rows that are decoded at a time."""

ObjectId = tuple[tuple[str, str], int]
"""Version and name of an array, and number of its shard."""


class DamagedObjectError(StorageError):
    """A stored object turns out to be missing or damaged.

    Attributes
    ----------
    object_id, name
        The object; its version and name as one text.
    """

    def __init__(self, array: StoredArray, shard: int, why: Exception | str) -> None:
        super().__init__(str(why))
        self.object_id: ObjectId = array.place, shard
        self.name = f"{array.folder.name}/{object_name(array.name, array.shape, shard)}"


class StoredObject:
    """Rows of one object of an array; they are read and checked when they are first needed.

    An object of which many rows are needed is read and checked as a whole, of others only chunks.

    Parameters
    ----------
    planned
        Rows that may be taken: numbers in the object, sorted.

    Attributes
    ----------
    count, holes
        Number of rows; those that are holes.
    row_shapes
        (rows, axes) int64 shapes of ragged rows; None for rows of one shape.
    whole
        Whether it is read as a whole.
    stored, sums
        What its version's records say of it; `sums` is None if they have none.

    Raises
    ------
    DamagedObjectError
        It is not there or of another size, cannot be read, or is not what it was.
    """

    def __init__(self, array: StoredArray, shard: int, planned: np.ndarray) -> None:
        self.array, self.shard = array, shard
        rows = array.rows_of(shard)
        self.first, self.count = rows.start, len(rows)
        self.whole = len(planned) >= WHOLE * self.count
        try:
            version = open_stored(array)
            self._array: Array = version.arrays[array.name][1]
            self.leaf: Leaf = version.shard_leaves(array.name)[shard]
            self._checks = version.checks(array.name, shard)
            sums = version.shard_sums(array.name)
            holes = version.holes
            shapes = version.row_shapes(array.name) if array.shape.ragged else None
            if self.whole and array.folder.size(self.leaf.name) != self.leaf.size:
                raise StorageError(f"{array.folder.path(self.leaf.name)} is not what it was")
        except UNREADABLE as error:
            raise self._damaged(error) from None
        self.row_shapes = None if shapes is None else shapes[rows.start : rows.stop]
        self.sums = None if sums is None else ChannelSums.of(sums[shard].tolist())
        self.is_hole = np.fromiter((row in holes for row in rows), np.bool_, self.count)
        self.chunk_rows = self._array.chunk_shape[0]
        self._planned = np.unique(planned // self.chunk_rows)
        self._held: Sequence[int] = ()

    def _damaged(self, why: Exception | str) -> DamagedObjectError:
        return DamagedObjectError(self.array, self.shard, why)

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
        return ShardObject(
            self.leaf.size, self.leaf.xxh3, raw, self._checks.astype("<u4").tobytes().hex()
        )

    # --- bytes ----------------------------------------------------------------------------------

    @functools.cached_property
    def _index(self) -> np.ndarray:
        """Offset and length of each chunk: (chunks, 2) int64."""
        entries = math.prod(self._array.chunks_per_object)
        nbytes = entries * INDEX_ENTRY_NBYTES + INDEX_CHECKSUM_NBYTES
        start = max(0, self.leaf.size - nbytes)
        try:
            index = decode_index(self._bytes(start, nbytes), entries)
        except DamageError as error:
            raise self._damaged(error) from None
        index = index[: -(-self.count // self.chunk_rows)]
        if (index == MISSING).any() or (index.sum(1) > start).any() or (index[:, 1] < 4).any():
            raise self._damaged("its index points outside of it")
        return index.astype(np.int64)

    @functools.cached_property
    def _data(self) -> memoryview | None:
        """All bytes, mapped where that is possible; None if ranges of them are read."""
        folder, name = self.folder, self.leaf.name
        try:
            descriptor = folder.open(name)
            if descriptor is None:
                data = memoryview(folder.read(name)) if self.whole else None
            else:
                # To read all pages at once costs a tenth of reading them; Linux alone can.
                flags = getattr(mmap, "MAP_POPULATE", 0) if self.whole else 0
                try:
                    data = map_file(descriptor, flags).data
                finally:
                    os.close(descriptor)
        except (OSError, StorageError) as error:
            raise self._damaged(error) from None
        if data is not None and len(data) != self.leaf.size:
            raise self._damaged(f"{folder.path(name)} is not what it was")
        if self.whole and data is not None and xxhash.xxh3_128_intdigest(data) != self.leaf.xxh3:
            raise self._damaged(f"{folder.path(name)} is damaged")
        return data

    def open(self) -> memoryview:
        """Read and check the whole object."""
        if not self.whole:
            self.whole = True
            self.__dict__.pop("_data", None)
        assert self._data is not None  # as it is read as a whole
        return self._data

    def _bytes(self, start: int, length: int) -> memoryview:
        if self._data is not None:
            return self._data[start : start + length]
        try:
            [data] = self.folder.read_ranges([(self.leaf.name, start, length)])
            return memoryview(required(data))
        except StorageError as error:
            raise self._damaged(error) from None

    @functools.cached_property
    def _ahead(self) -> dict[int, memoryview]:
        """Chunks of a remote object that are needed, read together."""
        if self._data is not None:
            return {}
        places = self._index[self._planned].tolist()
        parts = self.folder.read_ranges([(self.leaf.name, *place) for place in places])
        try:
            return {
                n: memoryview(required(p))
                for n, p in zip(self._planned.tolist(), parts, strict=True)
            }
        except StorageError as error:
            raise self._damaged(error) from None

    def _chunk(self, number: int) -> memoryview:
        """Bytes of a chunk, which end as the version's tree says."""
        data = self._ahead.get(number)
        if data is None:
            data = self._bytes(*self._index[number].tolist())
        if int.from_bytes(data[-4:], "little") != self._checks[number]:
            raise self._damaged(f"chunk {number} is not the one that was written")
        return data

    # --- rows -----------------------------------------------------------------------------------

    def chunks(self, first: int, count: int) -> Iterator[tuple[memoryview, list[int]]]:
        """Yield consecutive chunks as they are stored, checked, and the length of each."""
        part = self._index[first : first + count]
        ends = part.sum(1)
        if self.whole and self._data is not None and (ends[:-1] == part[1:, 0]).all():
            yield self._data[part[0, 0] : ends[-1]], part[:, 1].tolist()
            return
        for number in range(first, first + count):
            self.row(number * self.chunk_rows)
            data = self._chunk(number)
            yield data, [len(data)]

    def row(self, row: int) -> np.ndarray:
        """Decode a row; valid until the next call."""
        if self.row_shapes is not None:
            shape = tuple(self.row_shapes[row].tolist())
            try:
                return self._array.decoder.decode_ragged(self._chunk(row), shape, self._array.dtype)
            except DamageError as error:
                raise self._damaged(error) from None
        number, offset = divmod(row, self.chunk_rows)
        decoded: np.ndarray = self._decoded_chunk(number, self._planned)[offset]
        return decoded

    def blocks(self, rows: Iterable[int]) -> Iterator[np.ndarray]:
        """Decode rows, consecutive ones together; each block is valid until the next."""
        if self.row_shapes is not None:
            yield from (self.row(row)[np.newaxis] for row in rows)
            return
        numbers = np.fromiter(rows, np.int64)
        chunks = np.unique(numbers // self.chunk_rows)
        while len(numbers):
            number, offset = divmod(int(numbers[0]), self.chunk_rows)
            self._decoded_chunk(number, chunks)
            at = self._held.index(number)
            count = 1
            while self._held[at + count : at + count + 1] == [number + count]:
                count += 1
            breaks = np.flatnonzero(np.diff(numbers) != 1)
            follow = int(breaks[0]) + 1 if len(breaks) else len(numbers)
            block = self._decoded[at : at + count].reshape(-1, *self._array.chunk_shape[1:])
            block = block[offset : offset + follow]
            yield block
            numbers = numbers[len(block) :]

    @functools.cached_property
    def _decoded(self) -> np.ndarray:
        chunks = max(1, DECODE_BYTES // max(1, self._array.chunk_nbytes))
        chunks = min(chunks, -(-self.count // self.chunk_rows))
        return np.empty((chunks, *self._array.chunk_shape), self._array.dtype)

    def _decoded_chunk(self, number: int, wanted: np.ndarray) -> np.ndarray:
        """Decode a chunk, and some of those that are wanted next: undoing the filter of all of them
        at once costs less."""
        if number not in self._held:
            at = int(np.searchsorted(wanted, number))
            run = wanted[at : at + len(self._decoded)].tolist()
            self._held = run if run[:1] == [number] else [number]
            try:
                for chunk, out in zip(self._held, self._decoded, strict=False):
                    self._array.decoder.decode(self._chunk(chunk), out)
            except DamageError as error:
                raise self._damaged(error) from None
            if self._array.decoder.filtered:
                undo_image(self._decoded[: len(self._held)])
        chunk_rows: np.ndarray = self._decoded[self._held.index(number)]
        return chunk_rows


class StoredObjects:
    """The stored objects that a shard takes rows of, each opened once for all fields."""

    def __init__(self, assembly: Assembly) -> None:
        self._arrays = assembly.rows.arrays
        self._planned: dict[ObjectId, list[np.ndarray]] = {}
        self._opened: dict[ObjectId, StoredObject] = {}
        for held in assembly.rows.fields.values():
            for number, rows in taken_rows(held).items():
                array = self._arrays[number]
                for shard in np.unique(rows // array.rows_per_shard).tolist():
                    within = (
                        rows[rows // array.rows_per_shard == shard] - array.rows_of(shard).start
                    )
                    self._planned.setdefault((array.place, shard), []).append(within)

    def object(self, array: StoredArray, shard: int) -> StoredObject:
        """Return an object.

        Raises
        ------
        DamagedObjectError
            It is not there, or of another size.
        """
        key = array.place, shard
        if key not in self._opened:
            planned = np.unique(
                np.concatenate([*self._planned.get(key, ()), np.zeros(0, np.int64)])
            )
            self._opened[key] = StoredObject(array, shard, planned)
        return self._opened[key]

    def check(self, links: Mapping[str, tuple[StoredArray, int]]) -> None:
        """Check the objects that would be linked unread."""
        for array, shard in links.values():
            self.object(array, shard).open()

    def open_all(self) -> int:
        """Read and check all objects of which rows are taken; returns their bytes."""
        nbytes = 0
        for place, shard in self._planned:
            [array, *_] = [array for array in self._arrays if array.place == place]
            stored = self.object(array, shard)
            stored.open()
            nbytes += stored.leaf.size
        return nbytes
