"""Read arrays of a Zarr group that other software wrote, by zarr-python."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from precache.errors import Hole, StorageError, StoreError, needs
from precache.reading.array_reader import ArrayReader
from precache.recipe.ops import DTYPES
from precache.recipe.recipe import RawCodec
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.arrays import Array
from precache.store.json_documents import Attributes
from precache.store.layout import RowShape
from precache.store.version import FieldInfo, Version

if TYPE_CHECKING:
    import zarr


log = logging.getLogger(__name__)

DOCUMENTS = ("zarr.json", ".zarray", ".zattrs")
"""Files beside the objects of an array."""

COMPARED = 4096
"""Bytes of rows at the beginning, in the middle and at the end of an array that identify it."""


class ForeignGroup(Version):
    """Arrays of a Zarr group that other software wrote: rows, and nothing that describes them.

    Attributes
    ----------
    id
        A hash of names, shapes, dtypes and chunks, and of a few rows: equal for a copy.
    opened
        Name -> the array of zarr-python.

    Raises
    ------
    StoreError
        An array has rows that precache does not read, or the arrays differ in rows.
    """

    foreign = True
    classes = ()
    holes: dict[int, tuple[str, Hole]] = {}  # noqa: RUF012 - as of a version
    hole_rows = np.empty(0, np.int64)

    def __init__(self, folder: Folder, opened: Mapping[str, zarr.Array[Any]]) -> None:
        self.folder, self.path, self.opened = folder, str(folder), opened
        self.arrays = {name: _layout(array, self.path) for name, array in opened.items()}
        self.rows, *others = {array.rows for array in self.arrays.values()}
        if others:
            lengths = ", ".join(f"{name}: {array.rows}" for name, array in self.arrays.items())
            raise StoreError(f"the arrays of {folder} differ in rows: {lengths}")

    @functools.cached_property
    def id(self) -> str:  # type: ignore[override]
        digest = hashlib.sha256()
        for name, array in sorted(self.opened.items()):
            layout = self.arrays[name]
            count = min(self.rows, 1 + COMPARED // max(1, layout.row_nbytes))
            starts = np.array([[0], [(self.rows - count) // 2], [self.rows - count]])
            values = np.empty((3 * count, *layout.row_shape), layout.dtype)
            ForeignReader(self, name).read((starts + np.arange(count)).ravel(), values)
            digest.update(f"{name} {array.path} {layout}".encode() + values.tobytes())
        return digest.hexdigest()[:32]

    @property
    def attributes(self) -> Attributes:  # type: ignore[override]
        raise StoreError(
            f"{self.path} was written by other software, and has no keys, labels, holes, recipe or "
            "statistics; read labels as a field"
        )

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """Field name -> description."""
        return {
            name: FieldInfo(
                shape=array.row_shape,
                dtype=array.dtype,
                codec="zarr",
                raw_nbytes=array.rows * array.row_nbytes,
                stored_nbytes=0,
            )
            for name, array in self.arrays.items()
        }

    def field_of(self, array: str) -> str:
        return array

    def prefetch(self, arrays: Iterable[str]) -> None:
        """Do nothing: there are no small objects."""

    def is_gone(self) -> bool:
        """Return False: nothing says that a group was removed."""
        return False


def open_group(
    uri: str | os.PathLike[str], fields: Mapping[str, str], storage_options: StorageOptions = None
) -> ForeignGroup:
    """Open arrays of a Zarr group.

    Parameters
    ----------
    fields
        Name -> path of an array in the group.

    Raises
    ------
    StoreError
        There is no such array, or precache does not read it.
    UsageError
        zarr-python is not installed.
    """
    if not fields or "row" in fields:
        raise StoreError(f"fields is {dict(fields)}; name at least one array, and none of them row")
    with needs("an array of other Zarr software", "zarr"):
        import zarr
    folder, opened = open_folder(uri, storage_options), {}
    local = folder.local("")
    where, options = (local, None) if local else (os.fspath(uri), dict(storage_options or {}))
    for name, path in fields.items():
        try:
            opened[name] = zarr.open_array(where, path=path, mode="r", storage_options=options)
        except Exception as error:  # of the storage, of its library, or of the document
            raise StoreError(f"zarr-python opens no array {path!r} in {folder}: {error}") from error
        if local:
            _warn_of_missing(folder.folder(opened[name].path), opened[name])
    return ForeignGroup(folder, opened)


def _warn_of_missing(folder: Folder, array: zarr.Array[Any]) -> None:
    """Log how many objects of an array are missing: zarr-python reads them as its fill value."""
    sides = zip(array.shape, array.shards or array.chunks, strict=True)
    objects = math.prod(-(-length // side) for length, side in sides)
    written = sum(file.size > 0 and file.name not in DOCUMENTS for file in folder.walk())
    if written < objects:
        log.warning(
            "%s of %s objects of %s are missing, or empty, and their rows are read as its fill "
            "value %s: copy it again unless these were never written",
            f"{objects - written:,}", f"{objects:,}", folder, array.fill_value,
        )  # fmt: skip


def _layout(array: zarr.Array[Any], group: str) -> Array:
    where, dtype = f"{group}/{array.path}", array.dtype.name
    if dtype not in DTYPES:
        raise StoreError(f"{where} has data type {dtype!r}; precache reads {', '.join(DTYPES)}")
    if not array.shape:
        raise StoreError(f"{where} is a single value; precache reads rows along the first axis")
    row, objects = RowShape(array.shape[1:], dtype), array.shards or array.chunks
    return Array(row, array.shape[0], objects[0], array.chunks[0], RawCodec())


class ForeignReader(ArrayReader):
    """Reads rows of one array of a `ForeignGroup`. Safe to use from several threads."""

    copying = plain = filtered = framed = False

    def __init__(self, version: ForeignGroup, name: str) -> None:
        self.name, self.array = name, version.arrays[name]
        self._stored = version.opened[name]
        self._where = f"{version.path}/{self._stored.path}"
        chunk = math.prod(self._stored.chunks) * self._stored.dtype.itemsize
        self.require_memory(max(self.array.row_nbytes, chunk))

    def read(self, rows: np.ndarray, out: np.ndarray, *, undo: bool = True) -> None:
        """Read rows in the given order; raise a `StorageError` if zarr-python does not."""
        try:
            if len(rows):
                out[...] = self._stored.oindex[rows]
        except Exception as error:  # of any codec or storage
            raise StorageError(f"zarr-python cannot read {self._where}: {error}") from error

    def extents(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return nothing: zarr-python opens the files."""
        return {}
