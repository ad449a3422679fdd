"""Read the rows of a base shard, as their chunks are stored or decoded."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import xxhash

from precache.codecs.image import undo_image
from precache.errors import DamageError, StorageError, StoreError
from precache.storage.base import Folder
from precache.storage.local_files import map_file
from precache.store.layout import decode_index
from precache.store.open import open_own
from precache.store.zarr_metadata import Array
from precache_workers.planning.base_shard import BaseField, BaseShard

Built = TypeVar("Built")

DECODE_BYTES = 4 << 20
"""Bytes of rows that are decoded at a time."""


class SpoiledBaseError(StorageError):
    """An object of the base version turns out to be missing or damaged."""

    def __init__(self, field: str, why: Exception | str) -> None:
        super().__init__(str(why))
        self.field = field


class BaseRows:
    """Rows of one object of a base version; it is read, and checked as a whole, when first needed.

    Until then only its size is compared.

    Attributes
    ----------
    count
        Number of rows.
    chunk_rows, row_shape
        Rows of a chunk; shape of a row.

    Raises
    ------
    StorageError
        The object is not there, or of another size.
    SpoiledBaseError
        It cannot be read, or is not what it was.
    """

    def __init__(self, name: str, field: BaseField, count: int) -> None:
        self.field = field
        self.count = count
        self._name, self._folder = name, field.folder
        if self._folder.size(field.object_name) != field.stored.size:
            raise StorageError(f"{self._folder.path(field.object_name)} is not what it was")
        self._held: Sequence[int] = ()
        self._announced: np.ndarray | None = None

    @functools.cached_property
    def _array(self) -> Array:
        try:
            return open_own(self._folder).arrays[self.field.match.array][1]
        except (DamageError, StorageError, StoreError) as error:
            raise SpoiledBaseError(self._name, error) from None

    @functools.cached_property
    def chunk_rows(self) -> int:
        return self._array.chunk_shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._array.chunk_shape[1:]

    def announce(self, rows: np.ndarray) -> None:
        """Announce rows that will be decoded: their chunks are decoded several at a time."""
        self._announced = rows

    @functools.cached_property
    def _together(self) -> np.ndarray:
        """Numbers of the chunks that are decoded several at a time."""
        if self._announced is None:
            return np.arange(-(-self.count // self.chunk_rows))
        return np.unique(self._announced // self.chunk_rows)

    @functools.cached_property
    def _object(self) -> tuple[memoryview, np.ndarray]:
        """The object's bytes; the start of each of its chunks, and the end of the last one."""
        array, stored = self._array, self.field.stored
        try:
            data = _mapped(self._folder, self.field.object_name)
            if (len(data), xxhash.xxh3_128_intdigest(data)) != (stored.size, stored.xxh3):
                raise DamageError(f"{self._folder.path(self.field.object_name)} is damaged")
            entries = math.prod(array.chunks_per_object)
            chunks = -(-self.count // self.chunk_rows)
            index = decode_index(data[-entries * 16 - 4 :], entries)[:chunks]
        except (DamageError, OSError, StorageError) as error:
            raise SpoiledBaseError(self._name, error) from None
        bounds = np.concatenate([[0], np.cumsum(index[:, 1], dtype=np.uint64)])
        if not np.array_equal(bounds[:-1], index[:, 0]):
            raise SpoiledBaseError(self._name, "its chunks do not lie one after another")
        return data, bounds.astype(np.int64)

    def open(self) -> None:
        """Read and check the object."""
        self._object  # noqa: B018 - a property that does it once

    def chunks(self, first: int, count: int) -> tuple[memoryview, np.ndarray]:
        """Bytes of consecutive chunks, and the length of each."""
        data, bounds = self._object
        part = bounds[first : first + count + 1]
        return data[part[0] : part[-1]], np.diff(part)

    def row(self, place: int) -> np.ndarray:
        """Decode a row by its place in the shard; valid until the next call."""
        if self.field.row_shapes is not None:
            return self._ragged(place, self.field.row_shapes)
        number, offset = divmod(place, self.chunk_rows)
        row: np.ndarray = self.decoded(number)[offset]
        return row

    def _ragged(self, place: int, shapes: np.ndarray) -> np.ndarray:
        data, bounds = self._object
        chunk, shape = data[bounds[place] : bounds[place + 1]], tuple(shapes[place].tolist())
        try:
            return self._array.decoder.decode_ragged(chunk, shape, self._array.dtype)
        except DamageError as error:
            raise SpoiledBaseError(self._name, error) from None

    def decoded(self, number: int) -> np.ndarray:
        """Decode a chunk; valid until the next call."""
        if number not in self._held:
            self._decode(number)
        chunk: np.ndarray = self._decoded[self._held.index(number)]
        return chunk

    def blocks(self, rows: range) -> Iterator[np.ndarray]:
        """Decode consecutive rows, some at a time; each block is valid until the next."""
        if self.field.row_shapes is not None:
            yield from (self.row(place)[np.newaxis] for place in rows)
            return
        while rows:
            number, offset = divmod(rows.start, self.chunk_rows)
            self.decoded(number)
            at = self._held.index(number)
            count = 1
            while self._held[at + count : at + count + 1] == [number + count]:
                count += 1
            block = self._decoded[at : at + count].reshape(-1, *self.row_shape)
            block = block[offset : offset + len(rows)]
            yield block
            rows = rows[len(block) :]

    @functools.cached_property
    def _decoded(self) -> np.ndarray:
        chunk_nbytes = math.prod(self._array.chunk_shape) * np.dtype(self._array.dtype).itemsize
        chunks = max(1, DECODE_BYTES // max(1, chunk_nbytes))
        chunks = max(1, min(chunks, len(self._together)))
        return np.empty((chunks, *self._array.chunk_shape), self._array.dtype)

    def _decode(self, number: int) -> None:
        """Decode chunks from one on; undoing the filter of all of them at once costs less."""
        at = int(np.searchsorted(self._together, number))
        run = self._together[at : at + len(self._decoded)].tolist()
        self._held = held = run if run[:1] == [number] else [number]
        data, bounds = self._object
        try:
            for chunk, out in zip(held, self._decoded, strict=False):
                self._array.decoder.decode(data[bounds[chunk] : bounds[chunk + 1]], out)
        except DamageError as error:
            raise SpoiledBaseError(self._name, error) from None
        if self._array.decoder.filtered:
            undo_image(self._decoded[: len(held)])


def open_base(base: BaseShard, check: bool) -> dict[str, BaseRows]:
    """Open the fields of a base shard whose objects are there, as large as they were.

    Parameters
    ----------
    check
        Read the objects at once, rather than when they are needed.
    """
    opened: dict[str, BaseRows] = {}
    shared: dict[tuple[str, str], BaseRows] = {}
    for name, field in base.fields.items():
        with contextlib.suppress(DamageError, StorageError, StoreError):
            # Variants that resume the same object have each of its rows read and decoded once.
            rows = shared.get(field.object_id) or BaseRows(name, field, len(base.same))
            if check:
                rows.open()
            if not field.match.encoded:
                shared[field.object_id] = rows
            opened[name] = rows
    return opened


def with_base(
    base: BaseShard | None,
    build: Callable[[BaseShard, Mapping[str, BaseRows]], Built],
    check: bool = False,
) -> Built:
    """Build with what a base shard has; again without an object that turns out to be damaged.

    Parameters
    ----------
    build
        Gets the base shard with the fields whose objects are there, and their rows.
    check
        Check all objects first, also those that are only linked.
    """
    base = base or BaseShard.empty()
    while True:
        opened = open_base(base, check)
        try:
            return build(base.only(opened), opened)
        except SpoiledBaseError as spoiled:
            base = base.without_object_of(spoiled.field)


def _mapped(folder: Folder, name: str) -> memoryview:
    """Map an object's bytes where that is possible: it costs a tenth of reading them."""
    descriptor = folder.open(name)
    if descriptor is None:
        return memoryview(folder.read(name))
    try:
        return map_file(descriptor, getattr(mmap, "MAP_POPULATE", 0)).data  # Linux alone has it
    finally:
        os.close(descriptor)
