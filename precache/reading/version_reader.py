"""Read chosen fields of a version by row: large ones from shards, small ones from memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.errors import UsageError
from precache.reading.array_reader import ArrayReader
from precache.reading.disk_cache import DiskCache
from precache.reading.foreign import ForeignGroup, ForeignReader
from precache.reading.ragged_reader import RaggedReader
from precache.reading.shard_files import ShardFiles, shard_files
from precache.reading.shard_prefetch import CachedShards
from precache.recipe.variants import field_of
from precache.sampling.order import ValidRows
from precache.storage.open import StorageOptions
from precache.store.labels import are_classes
from precache.store.open import open_version
from precache.store.version import SMALL_ROW_NBYTES, Version

FieldNames = Sequence[str] | Mapping[str, str] | None

BATCH_FIELDS = ("row", "repeated")
"""Fields of a batch that no array has."""


class VersionReader:
    """Reads batches of chosen fields, by row.

    Parameters
    ----------
    access
        ``map``, or ``pread`` to read ranges of a local disk's files.
    cache
        Disk cache for whole shards of a remote version; without one, ranges are read remotely.

    Attributes
    ----------
    version
        The version that is read.
    arrays
        Name -> the array that is read; for a field with variants, that of the epoch.
    variant_period
        Epochs after which the same arrays are read again.
    shapes
        Name -> (row shape, dtype), `row` (int64) last; without `ragged` and `sequences`.
    ragged
        Name -> reader, of images that have shapes of their own, and are not cropped.
    sequences
        Name -> reader, of fields whose rows differ in length, such as texts.
    cached
        The large fields' shards in a disk cache, if there is one.
    """

    def __init__(
        self,
        uri: str | Version,
        fields: FieldNames = None,
        storage_options: StorageOptions = None,
        access: str = "map",
        cache: DiskCache | None = None,
    ) -> None:
        mapping = fields if isinstance(fields, Mapping) else None
        for name in BATCH_FIELDS:
            if mapping and name in mapping:
                raise UsageError(
                    f"fields names an array {name!r}, and batches have a field {name!r} of their "
                    "own; give the array another name"
                )
        if isinstance(uri, Version) and mapping is None:
            self.version = uri
        elif mapping is None:
            self.version = open_version(uri, storage_options)
        else:
            self.version = ForeignGroup(uri, mapping, storage_options)
        local = self.version.folder.local("") is not None
        self._mapped = local and access == "map"
        own = self.version.arrays
        known = list(dict.fromkeys(own if self.version.foreign else map(field_of, own)))
        names = [fields] if isinstance(fields, str) else fields
        self._names = known if names is None else [*names]
        for name in self._names:
            if name not in known:
                raise UsageError(
                    f"{self.version.path} has no field {name!r}; it has {', '.join(known)}"
                )
        variants = {name: self.version.variants(name) for name in self._names}
        self.variant_period = math.lcm(*map(len, variants.values()))
        arrays = [array for names in variants.values() for array in names]
        if not self.version.foreign:
            self.version.prefetch(array for array in arrays if array in self.version.stored)
        large = [array for array in arrays if not self._is_small(array)]
        self.cached = CachedShards(self.version, cache, large) if cache and not local else None
        self.valid = ValidRows(self.version.rows, self.version.hole_rows)
        self._opened: dict[str, ArrayReader | np.ndarray] = {}
        self._by_epoch: dict[int, VersionReader] = {}
        self._windows: Any = None
        self._open_at(0)

    def at_epoch(self, epoch: int) -> VersionReader:
        """Return this reader with the variants that an epoch reads."""
        epoch %= self.variant_period
        if epoch == self._epoch:
            return self
        if epoch not in self._by_epoch:
            other = copy.copy(self)
            other._open_at(epoch)
            self._by_epoch[epoch] = other
        return self._by_epoch[epoch]

    def _open_at(self, epoch: int) -> None:
        self._epoch = epoch
        self.arrays = {name: self.version.array_at(name, epoch) for name in self._names}
        self.readers: dict[str, ArrayReader] = {}
        self.ragged: dict[str, RaggedReader] = {}
        self.sequences: dict[str, RaggedReader] = {}
        self.small: dict[str, np.ndarray] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, array in self.arrays.items():
            opened = self._opened.get(array)
            if opened is None:
                opened = self._opened[array] = self._open(array)
            if isinstance(opened, RaggedReader) and opened.kind is not None:
                self.sequences[name] = opened
            elif isinstance(opened, RaggedReader) and self._windows is None:
                self.ragged[name] = opened
            elif isinstance(opened, RaggedReader):
                self.readers[name] = opened
                self.shapes[name] = ((opened.channels, *self._windows.size), opened.array.dtype)
            elif isinstance(opened, ArrayReader):
                self.readers[name] = opened
                self.shapes[name] = (opened.array.row_shape, opened.array.dtype)
            else:
                self.small[name] = opened
                self.shapes[name] = (opened.shape[1:], opened.dtype.name)
        if self._windows is not None:
            if self._windows.places:
                self.shapes[self._windows.places] = ((6,), "float32")
            self._sizes(slice(None))
        self.shapes["row"] = ((), "int64")

    def crop(self, windows: Any) -> None:
        """Read ragged fields through windows from now on, as rows of one height and width.

        Parameters
        ----------
        windows
            `precache.transforms.WindowSteps`; ``read`` fills its `places`, if it names them, too.

        Raises
        ------
        UsageError
            They differ in height or width, so that no window fits all fields of a row.
        """
        self._windows = windows
        self._by_epoch.clear()
        self._open_at(self._epoch)

    def _sizes(self, rows: np.ndarray | slice) -> np.ndarray:
        """Return height and width of the ragged fields of rows: (n, 2)."""
        ragged = {n: r for n, r in self.readers.items() if isinstance(r, RaggedReader)}
        (first, sizes), *others = [(name, reader.sizes(rows)) for name, reader in ragged.items()]
        for name, own in others:
            unlike = np.flatnonzero((own != sizes).any(axis=1))
            if len(unlike):
                row = int(np.arange(self.version.rows)[rows][unlike[0]])
                (height, width), (high, wide) = own[unlike[0]], sizes[unlike[0]]
                raise UsageError(
                    f"{name} and {first} of {self.version.path} differ in size in {len(unlike):,} "
                    f"of {len(own):,} rows, so that no crop fits both: of {self.version.keys[row]} "
                    f"they are {width} x {height} and {wide} x {high}. Build them with one height "
                    f"and width, or read one without the other, as fields=({first!r}, …)"
                )
        return sizes

    @property
    def columns(self) -> dict[str, tuple[Any, ...]]:
        """Name -> (row shape, dtype) as in `shapes`, and (kind, shape behind the first axis, dtype)
        of `sequences`."""
        sequences = {n: (r.kind, r.fixed, r.array.dtype) for n, r in self.sequences.items()}
        return {**sequences, **self.shapes}

    def _open(self, array: str) -> ArrayReader | np.ndarray:
        """Open a large array, or read a small one whole."""
        if self._is_small(array):
            return read_small_field(self.version, array, self._mapped)
        objects = self.cached.arrays[array] if self.cached else None
        return open_reader(self.version, array, objects, mapped=self._mapped)

    def _is_small(self, array: str) -> bool:
        if array == "label" and not self.version.foreign:
            return True
        return self.version.committed and self.version.arrays[array].row_nbytes <= SMALL_ROW_NBYTES

    @property
    def mapped(self) -> bool:
        """True if every large field is mapped, so that reading some rows makes no request."""
        return self._mapped or self.cached is not None

    def read_from_memory(self, values: Mapping[str, np.ndarray]) -> None:
        """Read every field from memory from now on: name -> (rows, ...), by row number.

        This holds for the epochs that read the same arrays as this reader.
        """
        self.readers.clear()
        self.small = {name: column for name, column in values.items() if name != "row"}

    def read_whole(self, rows: np.ndarray) -> dict[str, Any]:
        """Read rows into memory of their own: name -> (n, ...), of ragged fields a list of rows:
        str, bytes, or arrays."""
        out = {
            name: np.empty((len(rows), *shape), dtype)
            for name, (shape, dtype) in self.shapes.items()
        }
        self.read(rows, out)
        ragged = {n: r.values(rows) for n, r in (self.ragged | self.sequences).items()}
        values: dict[str, Any] = out | ragged
        return {name: values[name] for name in [*self.arrays, "row"]}

    def read(
        self,
        rows: np.ndarray,
        out: Mapping[str, np.ndarray],
        *,
        undo: bool = True,
        draw: Any = None,
    ) -> None:
        """Fill ``out[name]`` (n, ...) with rows: all small fields, and the large ones in `out`.

        Parameters
        ----------
        draw
            Random numbers of these rows, for the windows that `crop` was given.
        """
        view: Any = None
        windows: Any = None
        for name, reader in self.readers.items():
            if isinstance(reader, RaggedReader):
                if view is None:
                    view = self._windows(self._sizes(rows), draw)
                    windows = view.windows()
                reader.crop(rows, windows, out[name], nearest=name in self._windows.nearest)
            elif name in out:
                reader.read(rows, out[name], undo=undo)
        for name, values in self.small.items():
            kernels.take(values, rows, out[name])
        if view is not None and self._windows.places:
            out[self._windows.places][:] = view.places()
        out["row"][:] = rows


def read_small_field(version: Version, name: str, mapped: bool | None = None) -> np.ndarray:
    """Read all (rows, ...) of a small field; class numbers as int64.

    Parameters
    ----------
    mapped
        As `shard_files` takes it.
    """
    if name == "label" and not version.foreign:
        labels = version.labels  # a live version's labels grow
        return labels.astype(np.int64, copy=False) if are_classes(labels) else labels
    reader = open_reader(version, name, mapped=mapped)
    array = reader.array
    reader.require_memory(version.rows * (array.row_nbytes + 8))  # and its rows' numbers
    values = np.empty((version.rows, *array.row_shape), array.dtype)
    reader.read(np.arange(version.rows), values)
    integers = name == "label" and values.dtype.kind in "iu"
    return values.astype(np.int64) if integers else values


def open_reader(
    version: Version, name: str, objects: ShardFiles | None = None, *, mapped: bool | None = None
) -> ArrayReader:
    """Return the reader of an array: of rows of one shape, of ragged ones, or of other software.

    Parameters
    ----------
    objects
        The array's stored objects; by default those that `shard_files` returns for `mapped`.
    """
    if isinstance(version, ForeignGroup):
        return ForeignReader(version, name)
    kind = RaggedReader if version.arrays[name].decoder.ragged else ArrayReader
    return kind(version, name, objects or shard_files(version, name, mapped=mapped))
