"""The columns of a version that a consumer reads: large ones from shards, small ones in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from precache.diskcache import DiskCache
from precache.errors import UsageError
from precache.feed import CachedShards
from precache.growing import GrowingVersion
from precache.objects import MappedObjects, Objects
from precache.ranges import RangedObjects
from precache.sampler import ValidRows
from precache.shards import ArrayReader
from precache.storage import StorageOptions
from precache.store import SMALL_ROW_NBYTES, Version, open_version

FieldNames = Sequence[str] | Mapping[str, str] | None


class Columns:
    """Batches of chosen fields, by row.

    Parameters
    ----------
    access
        ``map``, or ``pread`` to read ranges of a local disk's files.
    cache
        Where whole shards of a remote version go; without one, ranges are read from afar.

    Attributes
    ----------
    version
        Whose rows they are.
    shapes
        Name -> (row shape, dtype), `row` (int64) last.
    local
        Whether the version lies on a local disk.
    cached
        The large fields' shards in a disk cache, where there is one.
    """

    def __init__(
        self,
        uri: str | Version,
        fields: FieldNames = None,
        verify: str = "first",
        storage_options: StorageOptions = None,
        access: str = "map",
        cache: DiskCache | None = None,
    ) -> None:
        mapping = fields if isinstance(fields, Mapping) else None
        if isinstance(uri, Version) and mapping is None:
            self.version = uri
        else:
            self.version = open_version(uri, mapping, storage_options)
        self.local = self.version.folder.local("") is not None
        self.cached = CachedShards(self.version, cache) if cache and not self.local else None
        self._mapped = self.local and access == "map"
        names = self._choose(fields)
        self.version.bring(name for name in names if name in self.version.fields)
        self.valid = ValidRows(self.version.rows, self.version.hole_rows)
        self.readers: dict[str, ArrayReader] = {}
        self.small: dict[str, np.ndarray] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        for name in names:
            _, array = self.version.arrays[name]
            there = name == "label" or not isinstance(self.version, GrowingVersion)
            if array.row_nbytes <= SMALL_ROW_NBYTES and there:
                self.small[name] = read_whole(self.version, name, self._objects(name), verify)
            else:
                objects = self.cached.objects(name) if self.cached else self._objects(name)
                self.readers[name] = ArrayReader(self.version, name, verify, objects)
            dtype = self.small[name].dtype.name if name in self.small else array.dtype
            self.shapes[name] = (array.row_shape, dtype)
        self.shapes["row"] = ((), "int64")

    def _objects(self, name: str) -> Objects:
        return (MappedObjects if self._mapped else RangedObjects)(self.version, name)

    def _choose(self, fields: FieldNames) -> list[str]:
        known = list(self.version.arrays)
        names = known if fields is None else list(fields)
        for name in names:
            if name not in self.version.arrays:
                raise UsageError(
                    f"{self.version.path} has no field {name!r}; it has {', '.join(known)}"
                )
        return names

    @property
    def plain(self) -> bool:
        """Whether every large field is mapped as it is, so that reading is copying."""
        return all(reader.plain for reader in self.readers.values())

    def adopt(self, held: Mapping[str, np.ndarray]) -> None:
        """Read every field from memory from here on: name -> (rows, ...), by row number."""
        self.readers.clear()
        self.small = {name: values for name, values in held.items() if name != "row"}

    def read(self, rows: np.ndarray, out: Mapping[str, np.ndarray], *, undo: bool = True) -> None:
        """Fill ``out[name]`` (n, ...) with the given rows, for the large fields that are in it and
        all small ones."""
        for name, reader in self.readers.items():
            if name in out:
                reader.read(rows, out[name], undo=undo)
        for name, values in self.small.items():
            np.take(values, rows, axis=0, out=out[name], mode="clip")
        out["row"][:] = rows


def read_whole(
    version: Version, name: str, objects: Objects | None = None, verify: str = "first"
) -> np.ndarray:
    """(rows, ...) of a small field; labels as int64.

    Parameters
    ----------
    objects
        Of the field; by default mapped on a local disk, else read from afar.
    """
    if name == "label" and not version.foreign:
        return version.labels.astype(np.int64, copy=False)  # those of a growing version grow
    if objects is None:
        local = version.folder.local("") is not None
        objects = (MappedObjects if local else RangedObjects)(version, name)
    reader = ArrayReader(version, name, verify, objects)
    values = np.empty((version.rows, *reader.array.row_shape), reader.array.dtype)
    reader.read(np.arange(version.rows), values)
    whole = name == "label" and values.dtype.kind in "iu"
    return values.astype(np.int64) if whole else values
