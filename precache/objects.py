"""The stored objects of one array: mapped into memory, their indexes checked, damage named."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from precache.errors import DamageError, StorageError, StoreError
from precache.layout import MISSING, decode_index
from precache.store import Version

Locate = Callable[[str], Path | None]
"""Name of an object below its version's folder -> where it lies on a local disk."""


@dataclass(frozen=True)
class StoredObject:
    """One object that can be read.

    Attributes
    ----------
    data
        All its bytes.
    index
        (chunks, 2) offsets and lengths.
    rows
        (chunks, rows, bytes of a row) view of plain chunks that lie at equal distances, or None.
    """

    data: memoryview
    index: np.ndarray
    rows: np.ndarray | None


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file as a memory map that holds no descriptor (uint8)."""
    size = path.stat().st_size
    if size == 0:
        return np.empty(0, np.uint8)
    try:
        return _mapped(path, size)
    except RuntimeError as error:
        raise OSError(f"it cannot be mapped: {error}") from None


def _mapped(path: Path, size: int) -> np.ndarray:
    mapped: np.ndarray = torch.from_file(str(path), False, size, dtype=torch.uint8).numpy()
    return mapped


class MappedObjects:
    """Maps each object of an array when it is first asked for. Safe to use from several threads.

    Parameters
    ----------
    locate
        Where objects lie; by default in the version's own folder.
    """

    def __init__(self, version: Version, name: str, locate: Locate | None = None) -> None:
        self.folder, self.array = version.arrays[name]
        self._version = version
        self._locate = locate or version.folder.local
        self._kept: dict[tuple[int, ...], StoredObject | None] = {}
        self._pieces = len(self.array.pieces())
        self.expected = version.shard_table(name) if name in version.fields else None

    def get(self, number: int, tail: tuple[int, ...], row: int) -> StoredObject | None:
        """An object; None where it is missing, as only foreign ones may be."""
        key = (number, *tail)
        try:
            return self._kept[key]
        except KeyError:
            return self._kept.setdefault(key, self._open(number, tail, row))

    def chunk(self, number: int, tail: tuple[int, ...], chunk: int, row: int) -> memoryview | None:
        """Stored bytes of a chunk; None where it is missing, as only foreign ones may be."""
        found = self.get(number, tail, row)
        if found is None:
            return None
        offset, length = found.index[chunk].tolist()
        if offset == length == MISSING and self.expected is None:
            return None
        if offset + length > len(found.data):
            raise self.damage(number, tail, row, "its index points outside of it")
        return found.data[offset : offset + length]

    def path(self, number: int, tail: tuple[int, ...]) -> Path | None:
        """Where an object lies on a local disk."""
        return self._locate(self.name(number, tail))

    def name(self, number: int, tail: tuple[int, ...] = ()) -> str:
        """An object's name below the version's folder."""
        return f"{self.folder}/{self.array.object_name(number, tail)}"

    def _open(self, number: int, tail: tuple[int, ...], row: int) -> StoredObject | None:
        url = self._version.folder.path(self.name(number, tail))
        try:
            path = self.path(number, tail)
            if path is None:
                raise StorageError(f"{url} is not on a local disk")
            data = map_file(path)
            self._read_index(path, len(data))
        except FileNotFoundError:
            if self.expected is None and self._version.folder.exists():
                return None
            raise self.missing(number, tail, row) from None
        except OSError as error:
            raise StorageError(f"cannot map {url}: {error}") from None
        if self.expected is not None and len(data) != int(self.expected[number, 0]):
            sizes = f"{len(data)} bytes where {int(self.expected[number, 0])} were written"
            raise self.damage(number, tail, row, f"it has {sizes}")
        try:
            index = self._index(data)
        except DamageError as error:
            raise self.damage(number, tail, row, str(error)) from None
        return StoredObject(data.data, index, self._plain_rows(data, index))

    def _read_index(self, path: Path, size: int) -> None:
        """Bring the index into memory alone: a page fault would bring in megabytes around it."""
        length = math.prod(self.array.chunks_per_object) * 16 + 4
        start = 0 if self.array.index_at_start else max(0, size - length)
        with path.open("rb", buffering=0) as file:
            os.pread(file.fileno(), length, start)

    def _index(self, data: np.ndarray) -> np.ndarray:
        if self.array.index_at_start is None:
            return np.array([[0, len(data)]], np.uint64)
        chunks = math.prod(self.array.chunks_per_object)
        size = chunks * 16 + 4 * self.array.index_checksum
        if len(data) < size:
            raise DamageError("it is shorter than its index")
        tail = data[:size] if self.array.index_at_start else data[-size:]
        if not self.array.index_checksum:
            return np.frombuffer(tail.tobytes(), "<u8").reshape(chunks, 2)
        return decode_index(tail.data, chunks)

    def _plain_rows(self, data: np.ndarray, index: np.ndarray) -> np.ndarray | None:
        if not self.array.decoder.plain or self._pieces > 1:
            return None
        chunk_rows, row_nbytes = self.array.chunk_shape[0], self.array.row_nbytes
        pitch = chunk_rows * row_nbytes + 4 * len(self.array.decoder.codecs)
        written = index[index[:, 0] != MISSING]
        expected = np.arange(len(written), dtype=np.uint64) * np.uint64(pitch) + index[0, 0]
        regular = np.array_equal(written[:, 0], expected) and (written[:, 1] == pitch).all()
        if not len(written) or not regular or (index[: len(written)] != written).any():
            return None
        if len(written) < len(index) and self.expected is None:
            return None  # the others are fill values
        start = int(index[0, 0])
        if start + len(written) * pitch > len(data):
            return None
        shape = (len(written), chunk_rows, row_nbytes)
        return np.lib.stride_tricks.as_strided(data[start:], shape, (pitch, row_nbytes, 1))

    def missing(self, number: int, tail: tuple[int, ...], row: int) -> Exception:
        """The error that says so of an object, or of the whole version."""
        if not self._version.folder.exists():
            return StoreError(
                f"the version at {self._version.path} was removed while it was read; "
                "open the store's current version"
            )
        return self.damage(number, tail, row, "it is missing")

    def damage(self, number: int, tail: tuple[int, ...], row: int, reason: str) -> DamageError:
        """The error that says so of an object at a row, and what to do."""
        path = self._version.folder.path(self.name(number, tail))
        return DamageError(
            f"shard {path} is damaged at row {row} ({self._version.describe(row)}): {reason}; "
            "delete the file and run the same precache build command again to repair it"
        )
