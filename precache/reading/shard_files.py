"""The stored objects of one array: open and map them, check their indexes, report damage."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from precache.codecs import kernels
from precache.codecs.chunk import bounds
from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.storage.base import is_missing
from precache.storage.local_files import map_file
from precache.store.layout import (
    INDEX_CHECKSUM_NBYTES,
    INDEX_ENTRY_NBYTES,
    MISSING,
    decode_index,
)
from precache.store.version import ANEW_HINT, VERIFY_HINT, Version, gone_error

MAX_CHUNKS = 1 << 30
"""Chunks of an array, for each of which a byte records whether it was checked."""

_NOTHING = memoryview(b"")

MAX_REMEMBERED = 65_536
"""Objects whose checks are remembered after their reader is closed: as many as can be mapped."""

_remembered: dict[tuple[int, ...], np.ndarray] = {}
"""Device, inode, size and times of a file, and the digest that was written -> (chunks,) bool: the
chunks that were checked."""


@dataclass(frozen=True)
class StoredObject:
    """One open object.

    Attributes
    ----------
    size
        Bytes.
    index
        (chunks, 2) offsets and lengths.
    data
        All its bytes, if it is mapped.
    begin
        Offset of its first row, if all chunks of its rows are plain and follow each other.
    """

    size: int
    index: np.ndarray
    data: memoryview = _NOTHING
    begin: int | None = None


class ShardFiles(ABC):
    """The objects of one array, opened when first needed. Safe to use from several threads.

    Attributes
    ----------
    expected
        What was written, by number of the object; None for a foreign array.
    sources, begins
        Bytes and `StoredObject.begin` by object number, filled in by `begin`; empty and -1 until
        then. Of length 0 for arrays that are not plain or not mapped.
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
        own = name in version.stored and not version.foreign
        self.expected = version.shard_leaves(name) if own else None
        chunks = math.prod(self.array.chunks_per_object)
        if self.array.objects * chunks > MAX_CHUNKS:
            raise StoreError(
                f"{version.path}/{self.folder} has {self.array.objects} x {chunks} chunks; "
                f"precache reads up to {MAX_CHUNKS}: rewrite the array with larger ones"
            )
        count = self.array.objects if self.mapped and self.array.decoder.plain else 0
        try:
            self.sources = [_NOTHING] * count
            self.begins = np.full(count, -1, np.int64)
            self.checked = np.zeros((self.array.objects, chunks), bool)
            self._checks = np.zeros((self.array.objects if own else 0, chunks), np.uint32)
            self._has_checks = np.zeros(self.array.objects, bool)
        except (MemoryError, OverflowError, ValueError):
            raise StoreError(
                f"there is no memory for {version.path}/{self.folder}, which has "
                f"{self.array.objects} x {chunks} chunks"
            ) from None
        self._kept: dict[tuple[int, ...], StoredObject | None] = {}
        self._longest = bounds(self.array.decoder.codecs, self.array.chunk_nbytes)[-1]

    def get(self, number: int, tail: tuple[int, ...], row: int) -> StoredObject | None:
        """Open an object; None if it is missing, which only foreign ones may be."""
        key = (number, *tail)
        try:
            return self._kept[key]
        except KeyError:
            return self._kept.setdefault(key, self._open(number, tail, row))

    def checks(self, numbers: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """Return how chunks are checked, as `kernels.decode_frames` takes it: (n,) int64.

        Parameters
        ----------
        numbers, chunks
            (n,) number of each chunk's object, and its number in there.
        """
        checks = np.where(self.checked[numbers, chunks], kernels.UNCHECKED, kernels.OWN)
        if self.expected is None or (checks == kernels.UNCHECKED).all():
            return checks
        for number in set(numbers[~self._has_checks[numbers]].tolist()):
            self._checks[number] = self.version.checks(self.field, number)
            self._has_checks[number] = True
        return np.where(checks == kernels.OWN, self._checks[numbers, chunks], checks)

    def begin(self, number: int, tail: tuple[int, ...], row: int) -> int | None:
        """Return the `StoredObject.begin` of an object, and enter it into `sources`."""
        stored = self.get(number, tail, row)
        if stored is None or stored.begin is None:
            return None
        self.sources[number] = stored.data  # before `begins`, which other threads look at
        self.begins[number] = stored.begin
        return stored.begin

    def forget(self, number: int) -> None:
        """Close an object that precache wrote; it is opened and checked again when needed."""
        self.checked[number] = False
        if len(self.begins):
            self.begins[number] = -1
            self.sources[number] = _NOTHING
        self._kept.pop((number, *self.pieces[0].object_tail), None)

    def gathered(self, rows: np.ndarray) -> AbstractContextManager[None]:
        """Fetch the chunks of rows together, for this thread to use in the block."""
        return nullcontext()

    def path(self, number: int, tail: tuple[int, ...]) -> Path | None:
        """Path of an object on a local disk; None elsewhere."""
        return None

    def name(self, number: int, tail: tuple[int, ...] = ()) -> str:
        """An object's name below the version's folder."""
        return f"{self.folder}/{self.array.object_name(number, tail)}"

    @abstractmethod
    def chunk(self, number: int, tail: tuple[int, ...], chunk: int, row: int) -> memoryview | None:
        """Stored bytes of a chunk; None if it is missing, which only foreign ones may be."""

    @abstractmethod
    def _open(self, number: int, tail: tuple[int, ...], row: int) -> StoredObject | None: ...

    def extent(
        self, stored: StoredObject, number: int, tail: tuple[int, ...], chunk: int, row: int
    ) -> tuple[int, int] | None:
        """Offset and length of a chunk; None if it is missing, which only foreign ones may be."""
        offset, length = stored.index[chunk].tolist()
        if offset == length == MISSING and self.expected is None:
            return None
        if offset + length > stored.size:
            raise self.damage(number, tail, row, "its index points outside of it")
        if length > self._longest:
            reason = f"it has {length} bytes for a chunk that takes {self._longest} at most"
            raise self.damage(number, tail, row, reason)
        return offset, length

    def index_extent(self, size: int) -> tuple[int, int]:
        """Offset and length of the index of an object of `size` bytes."""
        if self.array.index_at_start is None:
            return 0, 0
        chunks = math.prod(self.array.chunks_per_object)
        length = chunks * INDEX_ENTRY_NBYTES + INDEX_CHECKSUM_NBYTES * self.array.index_checksum
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
        chunks = math.prod(self.array.chunks_per_object)
        if not self.array.index_checksum:
            return np.frombuffer(bytes(stored), "<u8").reshape(chunks, 2)
        return decode_index(stored, chunks)

    def unread(
        self, error: StorageError, number: int, tail: tuple[int, ...], row: int
    ) -> PrecacheError:
        """Make the error for a part that cannot be read: damage if its object has another size."""
        size = self.version.folder.size(self.name(number, tail))
        if fault := "it is missing" if size is None else self.fault_of_size(size, number):
            return self.damage(number, tail, row, fault)
        return error

    def fault_of_size(self, size: int, number: int) -> str:
        """Describe how the size of an object differs from what was written; empty if not known."""
        return "" if self.expected is None else self.expected[number].fault_of_size(size)

    def damage(self, number: int, tail: tuple[int, ...], row: int, reason: str) -> PrecacheError:
        """Make the error for an object damaged at a row, or for a version that was removed."""
        if self.version.is_gone():
            return gone_error(self.version.path)
        path = self.version.folder.path(self.name(number, tail))
        way_out = VERIFY_HINT
        if self.version.foreign:
            way_out = "other software wrote it: restore the file from where it came from"
        elif self.expected is not None and self.expected[number].is_in(self.version.folder):
            way_out = ANEW_HINT
        place = f"at row {row} ({self.version.describe(row)})"
        return DamageError(f"shard {path} is damaged {place}: {reason}; {way_out}")


class MappedShardFiles(ShardFiles):
    """Objects on a local disk, mapped into memory."""

    def path(self, number: int, tail: tuple[int, ...]) -> Path | None:
        return self.version.folder.local(self.name(number, tail))

    def open(self, number: int, tail: tuple[int, ...]) -> int:
        """Open an object's file and return its descriptor.

        Raises
        ------
        StorageError
            It is missing, or is not a regular file of the version.
        """
        name = self.name(number, tail)
        descriptor = self.version.folder.open(name)
        if descriptor is None:
            where = self.version.folder.path(name)
            raise StorageError(f"cannot map {where}: it is not on a local disk")
        return descriptor

    def chunk(self, number: int, tail: tuple[int, ...], chunk: int, row: int) -> memoryview | None:
        stored = self.get(number, tail, row)
        extent = None if stored is None else self.extent(stored, number, tail, chunk, row)
        if stored is None or extent is None:
            return None
        offset, length = extent
        return stored.data[offset : offset + length]

    def _open(self, number: int, tail: tuple[int, ...], row: int) -> StoredObject | None:
        try:
            descriptor = self.open(number, tail)
            try:
                status = os.fstat(descriptor)
                size = status.st_size
                if fault := self.fault_of_size(size, number):
                    raise DamageError(fault)
                data = self.map(number, tail, descriptor)
                start, length = self.index_extent(size)
                # A page fault on the map would read megabytes around it.
                index = self.index(os.pread(descriptor, length, start), size)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise self.damage(number, tail, row, "it is missing") from None
        except OSError as error:
            raise StorageError(f"cannot map {self.path(number, tail)}: {error}") from None
        except StorageError as error:
            if not is_missing(error):
                raise
            if self.expected is None and self.version.folder.exists():
                return None
            raise self.damage(number, tail, row, "it is missing") from None
        except DamageError as error:
            raise self.damage(number, tail, row, str(error)) from None
        if len(self.pieces) == 1:
            self._remember(number, status)
        return StoredObject(len(data), index, data.data, self._begin(number, len(data), index))

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

    def map(self, number: int, tail: tuple[int, ...], descriptor: int) -> np.ndarray:
        """Map the bytes of an object whose file is open."""
        return map_file(descriptor)

    def _begin(self, number: int, size: int, index: np.ndarray) -> int | None:
        """Compute `StoredObject.begin`."""
        several_across = math.prod(self.array.chunks_per_object[1:]) > 1
        if not self.array.decoder.plain or not self.array.whole_rows or several_across:
            return None
        rows = len(self.array.rows_of(number))
        extents = index[: -(-rows // self.array.chunk_shape[0])].astype(np.int64)
        start = int(extents[0, 0])
        pitch = self.array.pitch
        offsets = start + np.arange(len(extents)) * pitch
        regular = np.array_equal(extents[:, 0], offsets) and (extents[:, 1] == pitch).all()
        return start if regular and 0 <= start <= size - len(extents) * pitch else None
