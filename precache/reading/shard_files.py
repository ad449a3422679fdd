"""The stored objects of one array, opened when first needed; their indexes make one table."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import most_stored
from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.storage.base import Range, is_missing
from precache.storage.coalesce import coalesce
from precache.storage.local_files import map_file
from precache.store.layout import (
    INDEX_CHECKSUM_NBYTES,
    INDEX_ENTRY_NBYTES,
    decode_index,
)
from precache.store.tree import MISSING, damage_error
from precache.store.version import ANEW_HINT, VERIFY_HINT, Version, gone_error

MAX_GAP = 32 << 10
"""Chunks this many bytes apart or fewer are read by one request."""

MAX_REQUEST = 8 << 20
"""Bytes of one request, unless a single chunk is longer."""

MAX_REMEMBERED = 65_536
"""Objects whose checks are remembered after their reader is closed: as many as can be mapped."""

WRONG = -1
"""Length of a chunk of which the index of its object tells no extent that it can have."""

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
        Bytes in the object.
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
        What was written, by number of the object.
    sources
        Bytes of mapped objects by their number; empty unless they are open.
    checked
        (objects, chunks) bool: the chunks whose checksum this process has checked, as callers
        record. Shared with other readers that map the same unchanged file.
    """

    mapped = True
    """All of an object is in memory once it is open."""

    def __init__(self, version: Version, name: str) -> None:
        self.array = version.arrays[name]
        self.field = name
        self.version = version
        self.expected = version.shard_leaves(name)
        shape = self.array.objects, self.array.object_chunks
        try:
            decoder = self.array.decoder
            copied = self.mapped and (decoder.plain or decoder.ragged)
            self.sources: Any = [_NOTHING] * self.array.objects if copied else {}
            # Zeros take no memory until they are written.
            self.checked = np.zeros(shape, bool)
            self._starts, self._lengths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            self._checks = np.zeros(shape, np.uint32)
            self._is_open = np.zeros(self.array.objects, bool)
            self._has_checks = np.zeros(self.array.objects, bool)
        except (MemoryError, OverflowError, ValueError):
            raise StoreError(
                f"there is no memory for {version.path}/{name}, which has "
                f"{shape[0]} x {shape[1]} chunks"
            ) from None
        self._has_wrong = False

    def locate(self, rows: np.ndarray) -> Places:
        """Return where rows are stored; opens their objects.

        Parameters
        ----------
        rows
            (n,) int64 row numbers.

        Raises
        ------
        DamageError
            An object is missing or of another size, or its index is wrong; names it and the key.
        """
        objects, chunks = rows // self.array.object_rows, rows // self.array.chunk_rows
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
        for at in np.flatnonzero(places.lengths == WRONG)[:1].tolist():
            number, row = int(places.objects[at]), int(places.rows[at])
            raise self.damage(number, row, "its index leaves a chunk out, or points beside it")

    @abstractmethod
    def open(self, objects: Mapping[int, int]) -> None:
        """Open objects, given with a row of each, and enter them into the table."""

    @abstractmethod
    def read(self, places: Places) -> list[memoryview]:
        """Return the stored bytes of chunks."""

    def _enter(self, number: int, size: int, index: np.ndarray) -> None:
        """Enter an open object of `size` bytes by its (chunks, 2) index."""
        starts, lengths = index.astype(np.int64).T
        wrong = (starts < 0) | (lengths < 0) | (starts > size - lengths)
        wrong |= lengths > most_stored(self.array.chunk_nbytes)
        self._starts[number], self._lengths[number] = starts, np.where(wrong, WRONG, lengths)
        written = -(-len(self.array.rows_of(number)) // self.array.chunk_rows)
        self._has_wrong = self._has_wrong or bool(wrong[:written].any())
        self._is_open[number] = True  # last, as other threads look at it

    def checks(self, places: Places) -> np.ndarray:
        """Return how chunks are checked, as `kernels.decode_frames` takes it: (n,) int64."""
        checked = self.checked.take(places.chunks)
        checks = np.where(checked, kernels.UNCHECKED, kernels.OWN)
        if checked.all():
            return checks
        for number in set(places.objects[~self._has_checks[places.objects]].tolist()):
            self._checks[number] = self.version.checks(self.field, number)
            self._has_checks[number] = True
        return np.where(checked, checks, self._checks.take(places.chunks))

    def forget(self, number: int) -> None:
        """Close an object; it is opened and checked again when needed."""
        self.checked[number] = self._is_open[number] = False
        self.sources[number] = _NOTHING

    def name(self, number: int) -> str:
        """An object's name below the version's folder."""
        return f"{self.field}/{self.array.object_name(number)}"

    def index_extent(self, size: int) -> tuple[int, int]:
        """Offset and length of the index of an object of `size` bytes."""
        length = self.array.object_chunks * INDEX_ENTRY_NBYTES + INDEX_CHECKSUM_NBYTES
        if size < length:
            raise DamageError("it is shorter than its index")
        return size - length, length

    def index(self, stored: bytes | memoryview) -> np.ndarray:
        """Parse the bytes of an index into (chunks, 2) offsets and lengths.

        Raises
        ------
        DamageError
            Its checksum does not match.
        """
        return decode_index(stored, self.array.object_chunks)

    def unread(self, error: StorageError, number: int, row: int) -> PrecacheError:
        """Make the error for a part that cannot be read: damage if its object has another size."""
        fault = self.expected[number].fault_of_size(self.version.folder.size(self.name(number)))
        return self.damage(number, row, fault) if fault else error

    def damage(self, number: int, row: int, reason: str) -> PrecacheError:
        """Make the error for an object damaged at a row, or for a version that was removed."""
        if self.version.is_gone():
            return gone_error(self.version.path)
        where = f"shard {self.version.folder.path(self.name(number))}"
        as_written = self.expected[number].is_in(self.version.folder)
        place = f" at row {row} ({self.version.describe(row)})"
        way_out = ANEW_HINT if as_written else VERIFY_HINT
        return damage_error(where, place, reason, way_out)


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

    def open(self, objects: Mapping[int, int]) -> None:
        for number, row in objects.items():
            self.map(number, row)

    def read(self, places: Places) -> list[memoryview]:
        pieces: list[memoryview] = []
        columns = places.objects, places.starts, places.lengths, places.rows
        for number, start, length, row in zip(*(c.tolist() for c in columns), strict=True):
            # Another iterator may have closed an object that was open. The array is sliced: without
            # an interpreter lock, threads that slice one memoryview lose count, and release it.
            whole: Any = (self.sources[number] or self.map(number, row)).obj
            pieces.append(whole[start : start + length].data)
        return pieces

    def map(self, number: int, row: int, descriptor: int | None = None) -> memoryview:
        """Map an object, whose file may be open, and enter it into the table."""
        try:
            with contextlib.ExitStack() as ends:
                if descriptor is None:
                    descriptor = self.descriptor(number)
                    ends.callback(os.close, descriptor)
                status = os.fstat(descriptor)
                size = status.st_size
                if fault := self.expected[number].fault_of_size(size):
                    raise DamageError(fault)
                data = map_file(descriptor).data
                start, length = self.index_extent(size)
                # A page fault on the map would read megabytes around it.
                index = self.index(os.pread(descriptor, length, start))
        except FileNotFoundError:
            raise self.damage(number, row, MISSING) from None
        except OSError as error:
            raise StorageError(f"cannot map {self.path(number)}: {error}") from None
        except StorageError as error:
            if not is_missing(error):
                raise
            raise self.damage(number, row, MISSING) from None
        except DamageError as error:
            raise self.damage(number, row, str(error)) from None
        self._remember(number, status)
        self.sources[number] = data
        self._enter(number, size, index)
        return data

    def _remember(self, number: int, status: os.stat_result) -> None:
        """Share the record of checked chunks with later readers of the same file."""
        times = status.st_mtime_ns, status.st_ctime_ns
        written = self.expected[number].xxh3
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

    def read(self, places: Places) -> list[memoryview]:
        wanted: dict[int, tuple[int, int, Range]] = {}
        columns = [column.tolist() for column in places]
        for row, number, chunk, start, length in zip(*columns, strict=True):
            if chunk not in wanted:
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
        return [found[chunk] for chunk in columns[2]]

    def _read_ranges(self, ranges: list[Range]) -> list[bytes | StorageError]:
        return self.version.folder.read_ranges(ranges) if ranges else []

    def _required(self, result: bytes | StorageError, number: int, row: int) -> bytes:
        """Return the bytes read; raise their error, or damage if the object is another."""
        if isinstance(result, bytes):
            return result
        raise self.unread(result, number, row)

    def open(self, objects: Mapping[int, int]) -> None:
        """Read the indexes of objects, all at once."""
        ranges = list[Range]()
        for number, row in objects.items():
            try:
                extent = self.index_extent(self.expected[number].size)
            except DamageError as error:
                raise self.damage(number, row, str(error)) from None
            ranges.append((self.name(number), *extent))
        results = self._read_ranges(ranges)
        for (number, row), range_, first in zip(objects.items(), ranges, results, strict=True):
            try:
                index = self.index(self._required(first, number, row))
            except DamageError:  # perhaps damaged on the way: read it once more
                [again] = self._read_ranges([range_])
                try:
                    index = self.index(self._required(again, number, row))
                except DamageError as error:
                    raise self.damage(number, row, str(error)) from None
            self._enter(number, self.expected[number].size, index)


def shard_files(version: Version, name: str, *, mapped: bool | None = None) -> ShardFiles:
    """Return an array's objects: mapped by default on a local disk, else read by ranges."""
    if mapped is None:
        mapped = version.folder.local("") is not None
    return (MappedShardFiles if mapped else RangedShardFiles)(version, name)
