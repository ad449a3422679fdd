"""The stored objects of one array, opened when first needed; their indexes make one table.

Objects are numbered along axis 0; where foreign ones divide rows, those of the same rows follow
each other.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import bounds
from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.storage.base import Range, is_missing
from precache.storage.coalesce import coalesce
from precache.storage.local_files import map_file
from precache.store.layout import (
    INDEX_CHECKSUM_NBYTES,
    INDEX_ENTRY_NBYTES,
    decode_index,
)
from precache.store.version import ANEW_HINT, VERIFY_HINT, Version, gone_error

MAX_CHUNKS = 1 << 30
"""Chunks of an array, for each of which a byte records whether it was checked."""

MAX_GAP = 32 << 10
"""Chunks this many bytes apart or fewer are read by one request."""

MAX_REQUEST = 8 << 20
"""Bytes of one request, unless a single chunk is longer."""

MAX_REMEMBERED = 65_536
"""Objects whose checks are remembered after their reader is closed: as many as can be mapped."""

MISSING, OUTSIDE = -1, -2
"""In place of the length of a chunk: foreign software left it out; its index is wrong."""

_NOTHING = memoryview(b"")

_remembered: dict[tuple[int, ...], np.ndarray] = {}
"""Device, inode, size and times of a file, and the digest that was written -> (chunks,) bool: the
chunks that were checked."""


class Places(NamedTuple):
    """The chunks that hold some rows: a column (n,) int64 for each attribute.

    Attributes
    ----------
    rows
        Row numbers, for messages.
    objects, chunks
        Number of each chunk's object, and its number in the whole array.
    starts, lengths
        Bytes in the object; the length is `MISSING` if foreign software left the chunk out.
    """

    rows: np.ndarray
    objects: np.ndarray
    chunks: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def part(self, selected: Any) -> Places:
        """Return some of the places."""
        return Places(*(column[selected] for column in self))


class ShardFiles(ABC):
    """The objects of one array, opened when first needed. Safe to use from several threads.

    Attributes
    ----------
    expected
        What was written, by number of the object; None for a foreign array.
    sources
        Bytes of mapped objects by their number; empty unless they are open.
    checked
        (objects, chunks) bool: the chunks whose checksum this process has checked, as callers
        record. Shared with other readers that map the same unchanged file.
    """

    mapped = True
    """All of an object is in memory once it is open."""

    def __init__(self, version: Version, name: str) -> None:
        self.folder, self.array = version.arrays[name]
        self.field = name
        self.version = version
        self.pieces = self.array.pieces()
        self._tails = list(dict.fromkeys(piece.object_tail for piece in self.pieces))
        own = name in version.stored and not version.foreign
        self.expected = version.shard_leaves(name) if own else None
        count = self.array.objects * len(self._tails)
        shape = count, math.prod(self.array.chunks_per_object)
        if math.prod(shape) > MAX_CHUNKS:
            raise StoreError(
                f"{version.path}/{self.folder} has {shape[0]} x {shape[1]} chunks; "
                f"precache reads up to {MAX_CHUNKS}: rewrite the array with larger ones"
            )
        try:
            decoder = self.array.decoder
            copied = self.mapped and (decoder.plain or decoder.ragged)
            self.sources: Any = [_NOTHING] * count if copied else {}
            # Zeros take no memory until they are written.
            self.checked = np.zeros(shape, bool)
            self._starts, self._lengths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            self._checks = np.zeros(shape if own else (0, 0), np.uint32)
            self._is_open, self._has_checks = np.zeros(count, bool), np.zeros(count, bool)
        except (MemoryError, OverflowError, ValueError):
            raise StoreError(
                f"there is no memory for {version.path}/{self.folder}, which has "
                f"{shape[0]} x {shape[1]} chunks"
            ) from None
        self._longest = bounds(self.array.decoder.codecs, self.array.chunk_nbytes)[-1]
        self._has_wrong = False
        numbers = {tail: number for number, tail in enumerate(self._tails)}
        self._tail_of = np.array([numbers[piece.object_tail] for piece in self.pieces])
        self._chunk_of = np.array([piece.chunk_tail for piece in self.pieces])

    def locate(self, rows: np.ndarray, pieces: Any = 0) -> Places:
        """Return where rows are stored; opens their objects.

        Parameters
        ----------
        rows
            (n,) int64 row numbers.
        pieces
            Of rows that are spread over several chunks: which part of each, (n,) or one number.

        Raises
        ------
        DamageError
            An object is missing or of another size, or its index is wrong; names it and the key.
        """
        objects = rows // self.array.object_shape[0]
        chunks = rows // self.array.chunk_shape[0]
        if self.checked.size > self.array.objects * self.array.chunks_per_object[0]:
            within = chunks % self.array.chunks_per_object[0]
            objects = objects * len(self._tails) + self._tail_of[pieces]
            within = within * math.prod(self.array.chunks_per_object[1:]) + self._chunk_of[pieces]
            chunks = objects * self.checked.shape[1] + within
        are_open = self._is_open.take(objects)
        if not are_open.all():
            closed = np.flatnonzero(~are_open)
            new, first = np.unique(objects[closed], return_index=True)
            self.open(dict(zip(new.tolist(), rows[closed[first]].tolist(), strict=True)))
        places = Places(
            rows, objects, chunks, self._starts.take(chunks), self._lengths.take(chunks)
        )
        if self._has_wrong:
            self._require_right(places)
        return places

    def _require_right(self, places: Places) -> None:
        """Raise for the first chunk whose entry in its index is wrong."""
        wrong = np.flatnonzero((places.lengths == OUTSIDE) | (places.lengths > self._longest))
        for at in wrong[:1].tolist():
            reason, length = "its index points outside of it", int(places.lengths[at])
            if length != OUTSIDE:
                most = f"a chunk that takes {self._longest} at most"
                reason = f"it has {length} bytes for {most}"
            raise self.damage(int(places.objects[at]), int(places.rows[at]), reason)

    @abstractmethod
    def open(self, objects: Mapping[int, int]) -> None:
        """Open objects, given with a row of each, and enter them into the table."""

    def read(self, places: Places) -> list[memoryview | None]:
        """Return the stored bytes of chunks; None for those that foreign software left out."""
        if self.expected is not None:
            for at in np.flatnonzero(places.lengths == MISSING).tolist():
                number, row = int(places.objects[at]), int(places.rows[at])
                raise self.damage(number, row, "a chunk is missing in its index")
        return self._read(places)

    @abstractmethod
    def _read(self, places: Places) -> list[memoryview | None]: ...

    def _enter(self, number: int, size: int, index: np.ndarray | None) -> None:
        """Enter an open object of `size` bytes by its (chunks, 2) index; None if it is missing."""
        if index is None:
            self._lengths[number] = MISSING
        else:
            starts, lengths = index.astype(np.int64).T
            missing = (starts == -1) & (lengths == -1)
            outside = (starts < 0) | (lengths < 0) | (starts > size - lengths)
            lengths = np.select([missing, outside], [MISSING, OUTSIDE], lengths)
            self._starts[number], self._lengths[number] = starts, lengths
            wrong = (lengths == OUTSIDE) | (lengths > self._longest)
            self._has_wrong = self._has_wrong or bool(wrong.any())
        self._is_open[number] = True  # last, as other threads look at it

    def checks(self, places: Places) -> np.ndarray:
        """Return how chunks are checked, as `kernels.decode_frames` takes it: (n,) int64."""
        checked = self.checked.take(places.chunks)
        checks = np.where(checked, kernels.UNCHECKED, kernels.OWN)
        if self.expected is None or checked.all():
            return checks
        for number in set(places.objects[~self._has_checks[places.objects]].tolist()):
            self._checks[number] = self.version.checks(self.field, number)
            self._has_checks[number] = True
        return np.where(checked, checks, self._checks.take(places.chunks))

    def forget(self, number: int) -> None:
        """Close an object; it is opened and checked again when needed."""
        self.checked[number] = self._is_open[number] = False
        self.sources[number] = _NOTHING

    def path(self, number: int) -> Path | None:
        """Path of an object on a local disk; None elsewhere."""
        return None

    def name(self, number: int) -> str:
        """An object's name below the version's folder."""
        along, tail = divmod(number, len(self._tails))
        return f"{self.folder}/{self.array.object_name(along, self._tails[tail])}"

    def index_extent(self, size: int) -> tuple[int, int]:
        """Offset and length of the index of an object of `size` bytes."""
        if self.array.index_at_start is None:
            return 0, 0
        length = self.checked.shape[1] * INDEX_ENTRY_NBYTES
        length += INDEX_CHECKSUM_NBYTES * self.array.index_checksum
        if size < length:
            raise DamageError("it is shorter than its index")
        return (0, length) if self.array.index_at_start else (size - length, length)

    def index(self, stored: bytes | memoryview, size: int) -> np.ndarray:
        """Parse the bytes of an index into (chunks, 2) offsets and lengths.

        Raises
        ------
        DamageError
            Its checksum does not match.
        """
        if self.array.index_at_start is None:
            return np.array([[0, size]], np.uint64)
        chunks = self.checked.shape[1]
        if not self.array.index_checksum:
            return np.frombuffer(stored, "<u8").reshape(chunks, 2)
        return decode_index(stored, chunks)

    def fault_of_size(self, size: int, number: int) -> str:
        """Describe how the size of an object differs from what was written; empty if not known."""
        return "" if self.expected is None else self.expected[number].fault_of_size(size)

    def unread(self, error: StorageError, number: int, row: int) -> PrecacheError:
        """Make the error for a part that cannot be read: damage if its object has another size."""
        size = self.version.folder.size(self.name(number))
        if fault := "it is missing" if size is None else self.fault_of_size(size, number):
            return self.damage(number, row, fault)
        return error

    def damage(self, number: int, row: int, reason: str) -> PrecacheError:
        """Make the error for an object damaged at a row, or for a version that was removed."""
        if self.version.is_gone():
            return gone_error(self.version.path)
        path = self.version.folder.path(self.name(number))
        way_out = VERIFY_HINT
        if self.version.foreign:
            way_out = "other software wrote it: restore the file from where it came from"
        elif self.expected is not None and self.expected[number].is_in(self.version.folder):
            way_out = ANEW_HINT
        place = f"at row {row} ({self.version.describe(row)})"
        return DamageError(f"shard {path} is damaged {place}: {reason}; {way_out}")


class MappedShardFiles(ShardFiles):
    """Objects on a local disk, mapped into memory."""

    def path(self, number: int) -> Path | None:
        return self.version.folder.local(self.name(number))

    def descriptor(self, number: int) -> int:
        """Open an object's file and return its descriptor.

        Raises
        ------
        StorageError
            It is missing, or is not a regular file of the version.
        """
        name = self.name(number)
        descriptor = self.version.folder.open(name)
        if descriptor is None:
            where = self.version.folder.path(name)
            raise StorageError(f"cannot map {where}: it is not on a local disk")
        return descriptor

    def map(self, number: int, descriptor: int) -> np.ndarray:
        """Map the bytes of an object whose file is open."""
        return map_file(descriptor)

    def open(self, objects: Mapping[int, int]) -> None:
        for number, row in objects.items():
            self._map(number, row)

    def _read(self, places: Places) -> list[memoryview | None]:
        columns = places.objects, places.starts, places.lengths, places.rows
        return [
            None
            if length == MISSING  # another iterator may have closed an object that was open
            else (self.sources[number] or self._map(number, row))[start : start + length]
            for number, start, length, row in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def _map(self, number: int, row: int) -> memoryview:
        """Map an object, and enter it into the table; nothing for a missing one of others."""
        try:
            descriptor = self.descriptor(number)
            try:
                status = os.fstat(descriptor)
                size = status.st_size
                if fault := self.fault_of_size(size, number):
                    raise DamageError(fault)
                data = self.map(number, descriptor).data
                start, length = self.index_extent(size)
                # A page fault on the map would read megabytes around it.
                index = self.index(os.pread(descriptor, length, start), size)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise self.damage(number, row, "it is missing") from None
        except OSError as error:
            raise StorageError(f"cannot map {self.path(number)}: {error}") from None
        except StorageError as error:
            if not is_missing(error):
                raise
            if self.expected is not None or not self.version.folder.exists():
                raise self.damage(number, row, "it is missing") from None
            self._enter(number, 0, None)
            return _NOTHING
        except DamageError as error:
            raise self.damage(number, row, str(error)) from None
        self._remember(number, status)
        self.sources[number] = data
        self._enter(number, size, index)
        return data

    def _remember(self, number: int, status: os.stat_result) -> None:
        """Share the record of checked chunks with later readers of the same file."""
        times = status.st_mtime_ns, status.st_ctime_ns
        written = self.expected[number].xxh3 if self.expected else 0
        identity = (status.st_dev, status.st_ino, status.st_size, *times, written)
        checked = self.checked[number]
        before = _remembered.pop(identity, checked)
        if before.shape == checked.shape:
            checked |= before
        _remembered[identity] = checked
        if len(_remembered) > MAX_REMEMBERED:
            # In one step, as other threads add to it; and many at once, as the copy takes time.
            for old in list(_remembered)[: max(1, MAX_REMEMBERED // 16)]:
                _remembered.pop(old, None)


class RangedShardFiles(ShardFiles):
    """Objects read by ranges, from blob storage without a cache, or from local files by `pread`.

    The index of each is read once, and only those chunks that hold wanted rows. Nothing is mapped,
    so that a file cut short while it is read raises an error and does not kill the process.
    """

    mapped = False

    def _read(self, places: Places) -> list[memoryview | None]:
        wanted: dict[int, tuple[int, int, Range]] = {}
        columns = [column.tolist() for column in places]
        for row, number, chunk, start, length in zip(*columns, strict=True):
            if length != MISSING and chunk not in wanted:
                wanted[chunk] = row, number, (self.name(number), start, length)
        joint = coalesce([range_ for *_, range_ in wanted.values()], MAX_GAP, MAX_REQUEST)
        results = self._read_ranges([range_ for range_, _ in joint])
        found, names = dict[int, memoryview](), list(wanted)
        for ((_, first, _), parts), result in zip(joint, results, strict=True):
            for chunk in (names[part] for part in parts):
                row, number, (_, start, length) = wanted[chunk]
                data = memoryview(self._required(result, number, row))[start - first :]
                if len(data) < length:
                    raise self.damage(number, row, "it is shorter than its index says")
                found[chunk] = data[:length]
        return [found.get(chunk) for chunk in columns[2]]

    def _read_ranges(self, ranges: list[Range]) -> list[bytes | StorageError]:
        return self.version.folder.read_ranges(ranges) if ranges else []

    def _required(self, result: bytes | StorageError, number: int, row: int) -> bytes:
        """Return the bytes read; raise their error, or damage if the object is another."""
        if isinstance(result, bytes):
            return result
        raise self.unread(result, number, row)

    def open(self, objects: Mapping[int, int]) -> None:
        """Read the indexes of objects, all at once."""
        sizes, ranges = dict[int, int](), list[Range]()
        for number, row in objects.items():
            if self.expected is not None:
                size: int | None = self.expected[number].size
            else:
                size = self.version.folder.size(self.name(number))
            if size is None:
                self._enter(number, 0, None)
                continue
            try:
                ranges.append((self.name(number), *self.index_extent(size)))
            except DamageError as error:
                raise self.damage(number, row, str(error)) from None
            sizes[number] = size
        results = self._read_ranges(ranges)
        for (number, size), range_, first in zip(sizes.items(), ranges, results, strict=True):
            try:
                index = self.index(self._required(first, number, objects[number]), size)
            except DamageError:  # perhaps damaged on the way: read it once more
                [again] = self._read_ranges([range_])
                try:
                    index = self.index(self._required(again, number, objects[number]), size)
                except DamageError as error:
                    raise self.damage(number, objects[number], str(error)) from None
            self._enter(number, size, index)


def shard_files(version: Version, name: str, *, mapped: bool | None = None) -> ShardFiles:
    """Return an array's objects: mapped by default on a local disk, else read by ranges."""
    if mapped is None:
        mapped = version.folder.local("") is not None
    return (MappedShardFiles if mapped else RangedShardFiles)(version, name)
