"""Read objects by ranges: from blob storage without a cache, or from local files by `pread`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from precache.errors import DamageError, StorageError
from precache.reading.shard_files import MappedShardFiles, ShardFiles, StoredObject
from precache.storage.base import Range
from precache.storage.coalesce import coalesce
from precache.store.version import Version

MAX_GAP = 32 << 10
"""Chunks this many bytes apart or fewer are read by one request."""

MAX_REQUEST = 8 << 20
"""Bytes of one request, unless a single chunk is longer."""

Key = tuple[int, tuple[int, ...], int]
"""Number of an object, its tail, number of a chunk in it."""


class RangedShardFiles(ShardFiles):
    """Reads the index of each object once, and only those chunks that hold wanted rows.

    Nothing is mapped, so that a file cut short while it is read raises an error and does not kill
    the process.
    """

    mapped = False

    def __init__(self, version: Version, name: str) -> None:
        super().__init__(version, name)
        self._local = threading.local()

    @contextlib.contextmanager
    def gathered(self, rows: np.ndarray) -> Iterator[None]:
        self._local.chunks = self._fetch(self._wanted(rows))
        try:
            yield
        finally:
            self._local.chunks = {}

    def chunk(self, number: int, tail: tuple[int, ...], chunk: int, row: int) -> memoryview | None:
        key = (number, tail, chunk)
        chunks: dict[Key, memoryview | None] = getattr(self._local, "chunks", {})
        return chunks[key] if key in chunks else self._fetch({key: row})[key]

    def _wanted(self, rows: np.ndarray) -> dict[Key, int]:
        """Return the chunks that hold rows, with one row of each."""
        numbers, inside = np.divmod(rows, self.array.object_shape[0])
        chunks_across = int(np.prod(self.array.chunks_per_object[1:], dtype=np.int64))
        first = inside // self.array.chunk_shape[0] * chunks_across
        return {
            (number, piece.object_tail, chunk + piece.chunk_tail): row
            for number, chunk, row in zip(
                numbers.tolist(), first.tolist(), rows.tolist(), strict=True
            )
            for piece in self.pieces
        }

    def _fetch(self, wanted: dict[Key, int]) -> dict[Key, memoryview | None]:
        self._open_all({(number, tail): row for (number, tail, _), row in wanted.items()})
        chunks: dict[Key, memoryview | None] = dict.fromkeys(wanted)
        keys: list[Key] = []
        extents: list[Range] = []
        for key, row in wanted.items():
            number, tail, chunk = key
            stored = self.get(number, tail, row)
            extent = None if stored is None else self.extent(stored, number, tail, chunk, row)
            if extent is not None:
                keys.append(key)
                extents.append((self.name(number, tail), *extent))
        ranges = coalesce(extents, MAX_GAP, MAX_REQUEST)
        read = self._read([joint for joint, _ in ranges])
        for ((_, first, _), parts), result in zip(ranges, read, strict=True):
            for part in parts:
                number, tail, _ = key = keys[part]
                row, (_, start, length) = wanted[key], extents[part]
                data = memoryview(self._require(result, number, tail, row))[start - first :]
                if len(data) < length:
                    raise self.damage(number, tail, row, "it is shorter than its index says")
                chunks[key] = data[:length]
        return chunks

    def _read(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        return self.version.folder.read_ranges(ranges)

    def _require(
        self, result: bytes | StorageError, number: int, tail: tuple[int, ...], row: int
    ) -> bytes:
        """Return the bytes read; raise their error, or damage if the object is another."""
        if isinstance(result, bytes):
            return result
        raise self.unread(result, number, tail, row)

    def _open(self, number: int, tail: tuple[int, ...], row: int) -> StoredObject | None:
        self._open_all({(number, tail): row})
        return self._kept[(number, *tail)]

    def _open_all(self, objects: dict[tuple[int, tuple[int, ...]], int]) -> None:
        """Read the indexes of objects that are not open yet, all at once."""
        new = {}
        for (number, tail), row in objects.items():
            if (number, *tail) in self._kept:
                continue
            size = self._size(number, tail)
            if size is None:
                self._kept[(number, *tail)] = None
                continue
            try:
                new[number, tail] = (row, size, *self.index_extent(size))
            except DamageError as error:
                raise self.damage(number, tail, row, str(error)) from None
        ranges = [(self.name(*key), start, length) for key, (_, _, start, length) in new.items()]
        for (key, (row, size, *_)), range_, result in zip(
            new.items(), ranges, self._read(ranges) if ranges else [], strict=True
        ):
            stored = self._require(result, *key, row)
            try:
                index = self.index(stored, size)
            except DamageError:  # perhaps damaged on the way: read it once more
                stored = self._require(self._read([range_])[0], *key, row)
                try:
                    index = self.index(stored, size)
                except DamageError as error:
                    raise self.damage(*key, row, str(error)) from None
            self._kept[(key[0], *key[1])] = StoredObject(size, index)

    def _size(self, number: int, tail: tuple[int, ...]) -> int | None:
        if self.expected is not None:
            return self.expected[number].size
        return self.version.folder.size(self.name(number, tail))


def shard_files(version: Version, name: str, *, mapped: bool | None = None) -> ShardFiles:
    """Return an array's objects: mapped by default on a local disk, else read by ranges."""
    if mapped is None:
        mapped = version.folder.local("") is not None
    return (MappedShardFiles if mapped else RangedShardFiles)(version, name)
