"""A version of a store: its metadata, and the small arrays of every row.

An object that is missing or damaged may be of a version that was removed since it was opened, and
perhaps built or pulled again. So every such error first checks whether the version is still the one
that was opened (`Version.is_gone`).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import xxhash
from pydantic import TypeAdapter, ValidationError

from precache.errors import (
    DamageError,
    GoneError,
    NewerFormatError,
    StorageError,
    StoreError,
    UsageError,
)
from precache.recipe.recipe import Recipe
from precache.recipe.variants import field_of, number_of, pooled, variant_at, variants_of
from precache.runtime.integers import whole
from precache.storage.base import Folder, is_missing, required
from precache.storage.batch_get import Readable
from precache.store import zarr_metadata
from precache.store.array_metadata import SUMS, label_layout
from precache.store.attributes import FORMAT, Attributes, FieldAttributes, refuse
from precache.store.commit_log import ROOT
from precache.store.layout import RowShape
from precache.store.small_arrays import KEYS_PER_CHUNK, decode_strings, read_small, small_layout

ROW_TABLE = "rows/c/0"
HOLES = "holes/c/0"
MENDS = "run the same precache build command again, which mends it"
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

    Parameters
    ----------
    stamp
        The `stamp_of` its folder before its document was read.
    """

    def __init__(
        self,
        folder: Folder,
        version_id: str,
        attributes: Attributes | None,
        arrays: Mapping[str, tuple[str, zarr_metadata.Array]],
        rows: int,
        ahead: Readable | None = None,
        stamp: int | None = None,
    ) -> None:
        self.folder = folder
        self._ahead = ahead or folder
        self._stamp = stamp
        self.id = version_id
        self.path = str(folder)
        self.attributes = attributes
        self.arrays = dict(arrays)
        self.rows = rows
        self._prefetched: dict[str, np.ndarray] = {}

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
        """What the recipe declared, by name."""
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
    def recipe(self) -> Recipe:
        """Recipe that the version was built from; also under the name `pipeline`."""
        if self.attributes is None:
            raise StoreError(f"{self.path} was written by other software and has no recipe")
        return Recipe.from_dict(self.attributes.pipeline, self.path)

    pipeline = recipe

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """(rows,) bool: False for holes."""
        if self.foreign:
            raise StoreError(f"{self.path} was written by other software and has no holes")
        return self._small("valid")

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """(rows,) integers, -1 for none."""
        if self.foreign:
            raise StoreError(f"{self.path} was written by other software; name its labels as field")
        return self._small("label")

    @property
    def keys(self) -> Sequence[str]:
        """Keys by row."""
        return Keys(self)

    @functools.cached_property
    def holes(self) -> dict[int, tuple[str, str]]:
        """Row -> (key, why it is a hole)."""
        if self.foreign:
            return {}
        return parse_holes(self.read_checked(HOLES), f"{self.path}/{HOLES}")

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
        if not isinstance(name, str):
            return whole("class", name)
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
        from precache.loading.selection import rows_where

        return rows_where(self, predicate)

    def shard_table(self, array: str) -> np.ndarray | None:
        """(shards, 2) uint64 sizes and XXH3-64 of an array's objects; None for a foreign one."""
        if self.foreign:
            return None
        return self._small(f"shards/{array}")

    def shard_sums(self, array: str) -> np.ndarray | None:
        """(shards, 1 + 2 C) float64 count, totals and squares of an array of images.

        None where they are not kept, or not those of its mean and standard deviation: they only
        spare work.
        """
        try:
            sums = self.stored_sums(array)
            return None if sums_differ(self, array, sums) else sums
        except (DamageError, StorageError, StoreError):
            return None

    def stored_sums(self, array: str) -> np.ndarray:
        """As `shard_sums`, whatever they are."""
        return self._small(f"{SUMS}/{array}")

    @functools.lru_cache(maxsize=16)  # noqa: B019 - versions are few and live long
    def key_chunk(self, number: int) -> np.ndarray:
        """Keys of rows ``number * 65536`` and on."""
        if self.foreign:
            raise StoreError(f"{self.path} was written by other software and has no keys")
        name, count = f"key/c/{number}", min(self.rows, KEYS_PER_CHUNK)
        with self._reading():
            return decode_strings(self.small_object(name), f"{self.path}/{name}", count)

    def read_checked(self, name: str) -> bytes:
        """The bytes of `ROW_TABLE` or `HOLES`.

        Raises
        ------
        DamageError
            They are not those that were written.
        """
        with self._reading():
            return self.checked(name, self.small_object(name))

    def small_object(self, name: str) -> bytes:
        """The bytes of an object that is no shard."""
        return required(*self.folder.read_many([name], [-1]))

    def checked(self, name: str, data: bytes) -> bytes:
        """The same bytes; a `DamageError` where they are not those that were written."""
        digests = self.attributes.digests if self.attributes else {}
        if xxhash.xxh3_64_hexdigest(data) != digests.get(name):
            where = self.folder.path(name)
            raise DamageError(f"{where} is damaged: its checksum does not hold")
        return data

    def lost_objects(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(array, shard) -> size and XXH3-64 of objects that are not there, or of another size."""
        lost = {}
        with self.unless_gone():
            for name in self.stored:
                table, there = self.shard_table(name), self.folder.sizes(name)
                tail = "/0" * len(self.arrays[name][1].row_shape)
                for shard, (nbytes, digest) in enumerate([] if table is None else table.tolist()):
                    if there.get(f"{name}/c/{shard}{tail}") != nbytes:
                        lost[name, shard] = (nbytes, digest)
        if lost and self.is_gone():
            raise gone(self.path)
        return lost

    def is_gone(self) -> bool:
        """Whether the version was removed since it was opened, made or pulled again or not."""
        if self.attributes is None:
            return not self.folder.exists()
        return is_gone(self.folder, self._stamp, self.attributes)

    @contextlib.contextmanager
    def unless_gone(self) -> Iterator[None]:
        """Raise a `GoneError` instead of what is raised within, where the version is gone."""
        try:
            yield
        except (DamageError, StorageError, StoreError):
            if self.is_gone():
                raise gone(self.path) from None
            raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self.unless_gone():
            try:
                yield
            except StorageError as error:
                if is_missing(error):
                    raise DamageError(f"{error}; {MENDS}") from None
                raise
            except DamageError as error:
                raise DamageError(f"{error}; {MENDS}") from None

    def describe(self, row: int) -> str:
        """A row's key for an error text, or its number where keys cannot be read."""
        try:
            return f"key {self.keys[row]!r}"
        except Exception:  # an error text must not fail for want of a key
            return f"row {row}"

    def prefetch(self, arrays: Iterable[str]) -> None:
        """Read the small arrays that reading `arrays` takes, together: of use far away."""
        if self.foreign:
            return
        names = ["valid", "label", *(f"shards/{name}" for name in arrays)]
        self._prefetched = self._read(names)
        self._ahead = self.folder  # what is left there is not wanted

    def _small(self, name: str) -> np.ndarray:
        prefetched = self._prefetched.get(name)
        return self._read([name])[name] if prefetched is None else prefetched

    def _read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        with self._reading():
            layouts = {name: self._layout(name) for name in names}
            return read_small(self._ahead, layouts)

    def _layout(self, name: str) -> zarr_metadata.Array:
        """How a small array is laid out, by the length that the version has."""
        if name == "label":
            known = self.arrays.get(name)
            return known[1] if known else label_layout(self.rows, self.small_object("label/c/0"))
        if name == "valid":
            return small_layout((self.rows,), "bool", False)
        kind, _, array = name.partition("/")
        if kind == SUMS:
            return self.sums_layout(array)
        return small_layout((self.arrays[array][1].objects, 2), "uint64")

    def sums_layout(self, array: str) -> zarr_metadata.Array:
        """How the sums of an array of images are laid out."""
        layout = self.arrays[array][1]
        if len(layout.row_shape) != 3:
            raise StoreError(f"{self.path} has no sums of {array}: its rows are no images")
        return small_layout((layout.objects, 1 + 2 * layout.row_shape[0]), "float64")


def parse_holes(data: bytes, where: str) -> dict[int, tuple[str, str]]:
    """Row -> (key, why it is a hole), from a list of holes; a `StoreError` where it is none."""
    try:
        return _HOLES.validate_json(data)
    except ValidationError as error:
        raise refuse(error, where) from None


def sums_differ(version: Version, array: str, sums: np.ndarray) -> str:
    """What sums by channel do not fit of their version, in words; empty where they fit.

    They must count the pixels of the valid rows shard by shard, and give the mean and the standard
    deviation that the version has.
    """
    assert version.attributes is not None
    layout, rows = version.arrays[array][1], version.rows
    starts = np.arange(0, rows, layout.object_shape[0])
    pixels = float(math.prod(layout.row_shape[1:]))
    if not np.array_equal(sums[:, 0], np.add.reduceat(version.valid, starts, dtype=float) * pixels):
        return "they do not count the pixels of its valid rows"
    mean, std = statistics_of(sums)
    known = [each.get(array) for each in (version.attributes.mean, version.attributes.std)]
    fit = known == [None, None] if mean is None else _are_close(known, (mean, std))
    if not fit:
        return "they are not those of its mean and standard deviation"
    return ""


def statistics_of(sums: np.ndarray) -> tuple[list[float], list[float]] | tuple[None, None]:
    """Mean and standard deviation of each channel from (parts, 1 + 2 C) sums; None of no pixel."""
    channels = sums.shape[1] // 2
    count, total = sums[:, 0].sum(), sums[:, 1 : 1 + channels].sum(0)
    squares = sums[:, 1 + channels :].sum(0)
    if not count or not np.isfinite(squares).all():  # JSON knows no NaN
        return None, None
    average = total / count
    return average.tolist(), np.sqrt(np.maximum(squares / count - average**2, 0)).tolist()


def _are_close(known: Sequence[list[float] | None], given: Sequence[Any]) -> bool:
    """Whether two (mean, standard deviation) are the same but for the order of additions."""
    if any(one is None or len(one) != len(given[0]) for one in known):
        return False
    (mean, std), (other, deviation) = np.array(known, float), np.array(given, float)
    scale = np.abs(other) + deviation
    near: np.ndarray = np.abs(mean - other) <= 1e-9 * scale
    with np.errstate(over="ignore"):  # of what is forged
        # Of the squares, as the deviation is the small difference of large ones.
        near &= np.abs((std - deviation) * (std + deviation)) <= 1e-9 * scale**2
    return bool(near.all() and (std >= 0).all())


def read_attributes(data: bytes, where: str) -> Attributes:
    """`attributes.precache` of a version's `zarr.json`.

    Raises
    ------
    StoreError
        The group is not of this software, is of a newer format, or is damaged.
    """
    attributes = zarr_metadata.parse_json(data, where).get("attributes")
    own = attributes.get("precache") if isinstance(attributes, dict) else None
    if not isinstance(own, dict):
        raise StoreError(
            f"{where} is of a Zarr group that precache did not write; "
            "name its arrays, for example fields={'image': 'path/in/group'}"
        )
    if own.get("format", 1) not in range(1, FORMAT + 1):
        raise NewerFormatError(
            f"{where} has store format {own.get('format')}, and this release of precache reads "
            f"formats up to {FORMAT}; update precache"
        )
    return Attributes.read(json.dumps(own).encode(), where)


def stamp_of(folder: Folder) -> int | None:
    """Time of the last change of a version's document on a local disk, 0 of none; None elsewhere.

    The document is written once, so a version that is made or pulled again has another. In a bucket
    `Attributes.created` has to do: to ask for the time takes a request each time one is opened.
    """
    path = folder.local(ROOT)
    try:
        return None if path is None else path.stat().st_mtime_ns
    except OSError:
        return 0


def is_gone(folder: Folder, stamp: int | None, attributes: Attributes) -> bool:
    """Whether a version was removed since it was opened, made or pulled again or not.

    Parameters
    ----------
    stamp
        The `stamp_of` its folder before its document was read.
    """
    if stamp is not None:
        return stamp_of(folder) != stamp
    try:
        document = folder.get(ROOT)
        return document is None or read_attributes(document, "").created != attributes.created
    except (StorageError, StoreError):  # it is there, and damaged or out of reach
        return False


def gone(where: str) -> GoneError:
    """The error that says so of a version."""
    return GoneError(
        f"the version at {where} is gone: it was removed while it was read; open the store's "
        f"current version, or, if this is the one and its {ROOT} was lost, run the same precache "
        "build command again"
    )


def _field(name: str, made: Sequence[FieldAttributes], arrays: Sequence[str]) -> FieldInfo:
    """A field of `arrays`; of another shape, dtype or numbering than `_require_alike` allows, it is
    refused when a version is opened."""
    first, raw, stored = made[0], sum(each.raw for each in made), sum(each.stored for each in made)
    return FieldInfo(
        first.shape, first.dtype, first.codec, raw, stored, len(arrays), number_of(arrays[0])
    )


def _foreign_field(array: zarr_metadata.Array) -> FieldInfo:
    raw = array.row_nbytes * array.shape[0]
    codec = "+".join(array.decoder.codecs) or "raw"
    return FieldInfo(array.row_shape, array.dtype, codec, raw, 0)


def read_array_documents(folder: Readable, names: Sequence[str]) -> dict[str, zarr_metadata.Array]:
    """The metadata of arrays, read together."""
    paths = [f"{name}/{ROOT}" for name in names]
    arrays = {}
    for name, data in zip(names, folder.read_many(paths, [-1] * len(paths)), strict=True):
        where = f"{folder.path(name)}/{ROOT}"
        if isinstance(data, StorageError):
            if is_missing(data):
                raise StoreError(f"there is no Zarr v3 array at {folder.path(name)}") from data
            raise data
        arrays[name] = zarr_metadata.parse_array(zarr_metadata.parse_json(data, where), where)
    return arrays
