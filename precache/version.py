"""A version of a store: its metadata, and the small arrays of every row."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

import numpy as np
import xxhash
from pydantic import TypeAdapter, ValidationError

from precache import metadata
from precache.ahead import Readable
from precache.attributes import Attributes, FieldAttributes, refuse
from precache.errors import DamageError, StorageError, StoreError, UsageError
from precache.folder import Folder, is_missing
from precache.layout import RowShape
from precache.pipeline import Pipeline
from precache.smallarrays import KEYS_PER_CHUNK, decode_strings, read_small
from precache.variants import field_of, number_of, pooled, variant_at, variants_of

ROW_TABLE = "rows/c/0"
HOLES = "holes/c/0"
SUMS = "_sums"
SMALL_ROW_NBYTES = 64
"""Arrays with rows up to this size are held in memory whole."""

_HOLES: TypeAdapter[dict[int, tuple[str, str]]] = TypeAdapter(dict[int, tuple[str, str]])


@dataclass(frozen=True)
class FieldInfo:
    """One field of a version: row shape, dtype and codec, with bytes of all rows.

    Attributes
    ----------
    raw_nbytes, stored_nbytes
        Of all variants together.
    variants, first_variant
        Random realisations of each row, and the number of the first of them.
    """

    shape: tuple[int, ...]
    dtype: str
    codec: str
    raw_nbytes: int
    stored_nbytes: int
    variants: int = 1
    first_variant: int = 0

    @property
    def row_nbytes(self) -> int:
        """Of one decoded row of one variant."""
        return RowShape(self.shape, self.dtype).nbytes


class Keys(Sequence[str]):
    """The keys of a version's rows, read a chunk at a time."""

    def __init__(self, version: Version, rows: np.ndarray | None = None) -> None:
        self._version = version
        self._rows = rows

    def __len__(self) -> int:
        return self._version.rows if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        row = position if self._rows is None else int(self._rows[position])
        chunk = self._version.key_chunk(row // KEYS_PER_CHUNK)
        return str(chunk[row % KEYS_PER_CHUNK])

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


class Version:
    """One immutable version of a store, or arrays of a Zarr group that other software wrote.

    Attributes
    ----------
    id
        The version's id, or for a foreign group a hash of its arrays' metadata.
    path
        Of its folder.
    rows
        Rows, holes included.
    arrays
        Name -> (path below the folder, array) of what a loader can read, labels included; of a
        field with variants, one for each.
    """

    def __init__(
        self,
        folder: Folder,
        version_id: str,
        attributes: Attributes | None,
        arrays: Mapping[str, tuple[str, metadata.Array]],
        rows: int,
        ahead: Readable | None = None,
    ) -> None:
        self.folder = folder
        self._ahead = ahead or folder
        self.id = version_id
        self.path = str(folder)
        self.attributes = attributes
        self.arrays = dict(arrays)
        self.rows = rows
        self._brought: dict[str, np.ndarray] = {}

    def __repr__(self) -> str:
        return f"<precache version {self.id[:8]} at {self.path}: {self.rows} rows>"

    def __fspath__(self) -> str:
        return self.path

    @property
    def foreign(self) -> bool:
        """Whether other software wrote it: no keys, no holes, no statistics."""
        return self.attributes is None

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """What the pipeline declared, by name."""
        if self.attributes is None:
            return {name: _foreign_field(array) for name, (_, array) in self.arrays.items()}
        return {
            name: _field(name, [self.attributes.fields[array] for array in arrays], arrays)
            for name, arrays in variants_of(self.attributes.fields).items()
        }

    @property
    def stored(self) -> list[str]:
        """Names of the fields' arrays: one for each variant."""
        return list(self.arrays if self.attributes is None else self.attributes.fields)

    def variants(self, name: str) -> list[str]:
        """Names of the arrays of a field, or of the labels: one for each variant, by number."""
        return [name] if name in self.arrays else variants_of(self.stored)[name]

    def array_at(self, name: str, epoch: int) -> str:
        """Name of the array of a field, or of the labels, that an epoch reads."""
        arrays = self.variants(name)
        if len(arrays) == 1:
            return name
        return f"{name}.{variant_at(epoch, number_of(arrays[0]), len(arrays))}"

    def field_of(self, array: str) -> str:
        """The field that an array is a variant of; the array itself where there are none."""
        return array if self.foreign else field_of(array)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.attributes.classes if self.attributes else ()

    @property
    def mean(self) -> dict[str, list[float]]:
        """Image field -> mean of each channel over all valid rows and variants, in stored units."""
        return {name: mean for name, (mean, _) in self._statistics.items()}

    @property
    def std(self) -> dict[str, list[float]]:
        """Image field -> standard deviation of each channel over all pixels of the same."""
        return {name: std for name, (_, std) in self._statistics.items()}

    @property
    def _statistics(self) -> dict[str, tuple[list[float], list[float]]]:
        """Mean and standard deviation by field: all its variants have as many pixels."""
        if self.attributes is None:
            return {}
        return pooled(self.attributes.mean, self.attributes.std)

    @property
    def pipeline(self) -> Pipeline:
        if self.attributes is None:
            raise StoreError(f"{self.path} was written by other software and has no pipeline")
        return Pipeline.from_dict(self.attributes.pipeline, self.path)

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """(rows,) bool: False for holes."""
        if self.foreign:
            raise StoreError(f"{self.path} was written by other software and has no holes")
        return self._small("valid", (self.rows,))

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """(rows,) integers, -1 for none."""
        if self.foreign:
            raise StoreError(f"{self.path} was written by other software; name its labels as field")
        return self._small("label", (self.rows,))

    @property
    def keys(self) -> Sequence[str]:
        """Keys by row."""
        return Keys(self)

    @functools.cached_property
    def holes(self) -> dict[int, tuple[str, str]]:
        """Row -> (key, why it is a hole)."""
        if self.foreign:
            return {}
        try:
            return _HOLES.validate_json(self.folder.read(HOLES))
        except ValidationError as error:
            raise refuse(error, f"{self.path}/{HOLES}") from None

    @property
    def hole_rows(self) -> np.ndarray:
        """Row numbers of the holes, ascending, int64."""
        return np.empty(0, np.int64) if self.foreign else np.flatnonzero(~self.valid)

    def rows_of_classes(self, *classes: str | int) -> np.ndarray:
        """Row numbers (int64) of some classes, by name or number, holes included.

        Raises
        ------
        UsageError
            There is no such class.
        """
        numbers = [self._classnumber_of(each) for each in classes]
        return np.flatnonzero(np.isin(self.labels, numbers))

    def _classnumber_of(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        try:
            return self.classes.index(name)
        except ValueError:
            close = difflib.get_close_matches(name, self.classes)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UsageError(f"{self.path} has no class {name!r}{hint}") from None

    def rows_of_keys(self, keys: Iterable[str]) -> np.ndarray:
        """Row numbers (int64) of samples by their keys, in that order.

        Raises
        ------
        UsageError
            There is no such key.
        """
        rows = {key: row for row, key in enumerate(self.keys)}
        found = []
        for key in keys:
            if key not in rows:
                raise UsageError(f"{self.path} has no key {key!r}")
            found.append(rows[key])
        return np.array(found, np.int64)

    def rows_where(self, predicate: Callable[..., np.ndarray]) -> np.ndarray:
        """Row numbers (int64) where a function of small fields is true, holes included.

        Parameters
        ----------
        predicate
            Called once. Its parameters name what it takes: fields of at most 64 bytes a row
            (``label`` as int64), each as (rows, ...), and ``key`` as (rows,) str. It gives (rows,)
            bool.

        Raises
        ------
        UsageError
            There is no such field, or it is a large one; or what came back is not (rows,) bool.

        Examples
        --------
        >>> version.rows_where(lambda label: label % 10 == 3)  # doctest: +SKIP
        """
        from precache.selection import rows_where

        return rows_where(self, predicate)

    def shard_table(self, array: str) -> np.ndarray | None:
        """(shards, 2) uint64 sizes and XXH3-64 of an array's objects; None for a foreign one."""
        if self.foreign:
            return None
        return self._small(f"shards/{array}", self._table_shape(array))

    def shard_sums(self, array: str) -> np.ndarray | None:
        """(shards, 1 + 2 C) float64 count, totals and squares of an array; None where not kept."""
        try:
            name = f"{SUMS}/{array}"
            document = read_array_documents(self.folder, [name])[name]
            return read_small(self.folder, {name: document})[name]
        except (DamageError, StorageError, StoreError):
            return None  # they only spare work

    @functools.lru_cache(maxsize=16)  # noqa: B019 - versions are few and live long
    def key_chunk(self, number: int) -> np.ndarray:
        """Keys of rows ``number * 65536`` and on."""
        if self.foreign:
            raise StoreError(f"{self.path} was written by other software and has no keys")
        return decode_strings(self.folder.read(f"key/c/{number}"), f"{self.path}/key/c/{number}")

    def lost_objects(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(array, shard) -> size and XXH3-64 of objects that are not there, or of another size."""
        lost = {}
        for name in self.stored:
            table, there = self.shard_table(name), self.folder.sizes(name)
            tail = "/0" * len(self.arrays[name][1].row_shape)
            for shard, (nbytes, digest) in enumerate([] if table is None else table.tolist()):
                if there.get(f"{name}/c/{shard}{tail}") != nbytes:
                    lost[name, shard] = (nbytes, digest)
        return lost

    def small_checks(self) -> dict[str, Callable[[], object]]:
        """Name -> a function that reads all of it and raises where it is damaged."""
        chunks = range(0, self.rows, KEYS_PER_CHUNK)
        return {
            "label/c/0": lambda: self.labels,
            "valid/c/0": lambda: self.valid,
            "key": lambda: [self.key_chunk(start // KEYS_PER_CHUNK) for start in chunks],
            HOLES: lambda: self._check_digest(HOLES) and self.holes,
            ROW_TABLE: lambda: self._check_digest(ROW_TABLE),
            **{f"shards/{name}/c/0/0": partial(self.shard_table, name) for name in self.stored},
        }

    def _check_digest(self, name: str) -> bool:
        digests = self.attributes.digests if self.attributes else {}
        if xxhash.xxh3_64_hexdigest(self.folder.read(name)) != digests.get(name):
            raise DamageError(f"{self.folder.path(name)} is damaged: its checksum does not hold")
        return True

    def describe(self, row: int) -> str:
        """A row's key for an error text, or its number where keys cannot be read."""
        try:
            return f"key {self.keys[row]!r}"
        except Exception:  # an error text must not fail for want of a key
            return f"row {row}"

    def bring(self, arrays: Iterable[str]) -> None:
        """Read the small arrays that reading `arrays` takes, together: of use far away."""
        if self.foreign:
            return
        shards = {f"shards/{name}": self._table_shape(name) for name in arrays}
        self._brought = self._read({"valid": (self.rows,), "label": (self.rows,), **shards})
        self._ahead = self.folder  # what is left there is not wanted

    def _table_shape(self, array: str) -> tuple[int, int]:
        return self.arrays[array][1].objects, 2

    def _small(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        brought = self._brought.get(name)
        return self._read({name: shape})[name] if brought is None else brought

    def _read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        known = {name: self.arrays[name][1] for name in shapes.keys() & self.arrays.keys()}
        unknown = [name for name in shapes if name not in known]
        arrays = known | read_array_documents(self._ahead, unknown)
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise StoreError(
                    f"{self.folder.path(name)} has shape {arrays[name].shape}, and its version "
                    f"needs {shape}"
                )
        return read_small(self._ahead, {name: arrays[name] for name in shapes})


def _field(name: str, made: Sequence[FieldAttributes], arrays: Sequence[str]) -> FieldInfo:
    """A field of `arrays`; of another shape, dtype or numbering than `_require_alike` allows, it is
    refused when a version is opened."""
    first, raw, stored = made[0], sum(each.raw for each in made), sum(each.stored for each in made)
    return FieldInfo(
        first.shape, first.dtype, first.codec, raw, stored, len(arrays), number_of(arrays[0])
    )


def _foreign_field(array: metadata.Array) -> FieldInfo:
    raw = array.row_nbytes * array.shape[0]
    codec = "+".join(array.decoder.codecs) or "raw"
    return FieldInfo(array.row_shape, array.dtype, codec, raw, 0)


def read_array_documents(folder: Readable, names: Sequence[str]) -> dict[str, metadata.Array]:
    """The metadata of arrays, read together."""
    paths = [f"{name}/zarr.json" for name in names]
    arrays = {}
    for name, data in zip(names, folder.read_many(paths, [-1] * len(paths)), strict=True):
        where = f"{folder.path(name)}/zarr.json"
        if isinstance(data, StorageError):
            if is_missing(data):
                raise StoreError(f"there is no Zarr v3 array at {folder.path(name)}")
            raise data
        arrays[name] = metadata.parse_array(metadata.parse_json(data, where), where)
    return arrays
