"""Read arrays of a Zarr group that other software wrote, by zarr-python."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from precache.errors import StorageError, StoreError, needs
from precache.reading.array_reader import ArrayReader
from precache.recipe.ops import DTYPES
from precache.recipe.recipe import RawCodec
from precache.storage.open import StorageOptions, open_folder
from precache.store.arrays import Array
from precache.store.layout import RowShape
from precache.store.version import FieldInfo, Version

log = logging.getLogger(__name__)

COMPARED = 4096
"""Bytes of rows at the beginning, in the middle and at the end of an array that identify it."""


class ForeignGroup(Version):
    """Arrays of a Zarr group that other software wrote: rows, and nothing that describes them.

    Parameters
    ----------
    fields
        Name -> path of an array in the group.

    Attributes
    ----------
    id
        A hash of names, shapes, dtypes and chunks, and of a few rows: equal for a copy.
    opened
        Name -> the array of zarr-python.

    Raises
    ------
    StoreError
        There is no such array, precache does not read its rows, or the arrays differ in rows.
    UsageError
        zarr-python is not installed.
    """

    foreign, classes = True, ()
    hole_rows = np.empty(0, np.int64)

    def __init__(
        self, uri: str | os.PathLike[str], fields: Mapping[str, str], options: StorageOptions = None
    ) -> None:
        if not fields:
            raise StoreError("fields is empty; name at least one array")
        with needs("an array of other Zarr software", "zarr"):
            import zarr
        self.folder = open_folder(uri, options)
        self.path, local = str(self.folder), self.folder.local("")
        where, given = (local, None) if local else (os.fspath(uri), dict(options or {}))
        self.opened, self.arrays, self.holes = dict[str, Any](), {}, {}
        for name, path in fields.items():
            try:
                array = zarr.open_array(where, path=path, mode="r", storage_options=given)
            except Exception as error:  # of the storage, of its library, or of the document
                refusal = f"zarr-python opens no array {path!r} in {self.path}: {error}"
                raise StoreError(refusal) from error
            if array.dtype.name not in DTYPES or not array.shape:
                raise StoreError(
                    f"{self.path}/{array.path} has shape {array.shape} and data type "
                    f"{array.dtype.name!r}; precache reads rows, along a first axis, of "
                    f"{', '.join(DTYPES)}"
                )
            self.opened[name] = array
            row, objects = RowShape(array.shape[1:], array.dtype.name), array.shards or array.chunks
            self.arrays[name] = Array(row, array.shape[0], objects[0], array.chunks[0], RawCodec())
            if local:
                self._warn_of_missing(array)
        self.rows, *others = {array.rows for array in self.arrays.values()}
        if others:
            lengths = ", ".join(f"{name}: {array.rows}" for name, array in self.arrays.items())
            raise StoreError(f"the arrays of {self.path} differ in rows: {lengths}")

    def _warn_of_missing(self, array: Any) -> None:
        """Log how many objects are missing: zarr-python reads them as the array's fill value."""
        sides = zip(array.shape, array.shards or array.chunks, strict=True)
        objects = math.prod(-(-length // side) for length, side in sides)
        folder = self.folder.folder(array.path)
        lost = objects - sum(file.size > 0 and file.name[-1].isdigit() for file in folder.walk())
        if lost > 0:
            log.warning(
                "%s of %s objects of %s are missing, or empty, and their rows are read as its fill "
                "value %s: copy it again unless these were never written",
                f"{lost:,}", f"{objects:,}", folder, array.fill_value,
            )  # fmt: skip

    @functools.cached_property
    def id(self) -> str:  # type: ignore[override]
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            count = min(self.rows, 1 + COMPARED // max(1, array.row_nbytes))
            starts = np.array([[0], [(self.rows - count) // 2], [self.rows - count]])
            values = np.empty((3 * count, *array.row_shape), array.dtype)
            ForeignReader(self, name).read((starts + np.arange(count)).ravel(), values)
            digest.update(f"{name} {self.opened[name].path} {array}".encode() + values.tobytes())
        return digest.hexdigest()[:32]

    @property
    def attributes(self) -> Any:  # type: ignore[override]
        raise StoreError(
            f"{self.path} was written by other software, and has no keys, labels, holes, recipe or "
            "statistics; read labels as a field"
        )

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """Field name -> description."""
        unknown: dict[str, Any] = {"codec": "zarr", "stored_nbytes": 0}
        return {
            name: FieldInfo(shape=a.shape[1:], dtype=a.dtype.name, raw_nbytes=a.nbytes, **unknown)
            for name, a in self.opened.items()
        }


class ForeignReader(ArrayReader):
    """Reads rows of one array of a `ForeignGroup`. Safe to use from several threads."""

    copying = plain = filtered = framed = False

    def __init__(self, version: ForeignGroup, name: str) -> None:
        self.name, self.array, self._stored = name, version.arrays[name], version.opened[name]
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

    def will_need(self, rows: np.ndarray) -> None:
        """Do nothing: zarr-python opens the files."""
