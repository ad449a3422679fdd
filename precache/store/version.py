"""A version of a store: its metadata, and its small arrays.

All bytes that are read are compared with the version's tree of digests. A missing or damaged object
may belong to a version that was removed since it was opened. So before any such error is raised,
`Version.is_gone` checks whether its root is still there.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from pydantic import TypeAdapter, ValidationError

from precache.codecs.chunk import MOST_RAGGED_NBYTES
from precache.errors import (
    DamageError,
    FormatError,
    GoneError,
    Hole,
    StorageError,
    StoreError,
    UsageError,
)
from precache.recipe.recipe import FieldKind, Recipe
from precache.recipe.variants import number_of, pool_statistics, variant_at, variants_of
from precache.runtime.integers import whole
from precache.storage.base import Folder, required
from precache.store.arrays import (
    CHECKS,
    SHAPES,
    SHARDS,
    SUMS,
    Array,
    checks_array,
    parse_json,
    row_array,
    shapes_name,
    small,
)
from precache.store.commit_log import ROOT, VERSION, id_of, short
from precache.store.json_documents import FORMAT, Attributes, document_error
from precache.store.layout import RowShape
from precache.store.row_table import REMOVED, ROWS, RowTable, read_table
from precache.store.small_arrays import (
    KEYS_PER_CHUNK,
    decode_chunk,
    decode_strings,
    read_small,
    read_strings,
)
from precache.store.tree import (
    CHECKSUM,
    Leaf,
    fault_of,
    seal_of,
    spare_flaws,
    spare_of,
    spare_root,
)

HOLES = "holes/c/0"
_OF_A_COPY = "or the pull or push that copied it here"
REPAIR_HINT = f"run the same precache build command again, which repairs it, {_OF_A_COPY}"
VERIFY_HINT = (
    f"run the same precache build command again with --verify, which repairs it, {_OF_A_COPY}"
)
"""Advice on damaged shards: only where a build reads their bytes does it find the damage."""
ANEW_HINT = (
    "the object has the bytes that were written: if it fails again, they were wrong from the "
    "start, and the same precache build command with --recompute makes a new version"
)
SMALL_ROW_NBYTES = 64
"""Arrays with rows up to this size are held in memory."""

_HOLES: TypeAdapter[dict[int, tuple[str, Hole]]] = TypeAdapter(dict[int, tuple[str, Hole]])


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One field of a version: row shape, dtype, codec, and bytes of all rows.

    Attributes
    ----------
    raw_nbytes, stored_nbytes
        Bytes of all variants together.
    variants, first_variant
        Number of random realisations of each row, and the number of the first one.
    ragged
        Rows differ in shape: `shape` is the one by which shards are sized.
    kind
        What rows that differ in length are, such as ``text``; None for images and arrays.
    """

    shape: tuple[int, ...]
    dtype: str
    codec: str
    raw_nbytes: int
    stored_nbytes: int
    variants: int = 1
    first_variant: int = 0
    ragged: bool = False
    kind: FieldKind | None = None

    @property
    def row(self) -> RowShape:
        """Shape and dtype of a row."""
        return RowShape(self.shape, self.dtype, self.ragged)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a decoded row of one variant."""
        return self.row.nbytes


class RowKeys(Sequence[str]):
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
    """One immutable version of a store.

    Attributes
    ----------
    id
        The version's id.
    path
        Path or URL of its folder.
    rows
        Number of rows, holes included.
    arrays
        Name -> layout of every array that a loader can read, labels included; a field with variants
        has one for each.
    foreign
        True if other software wrote it: it has no keys, holes or statistics.
    followed
        True if `ensure` opened it with ``follow=True``: the first epoch of a `Loader` takes its
        shards in their order.

    Parameters
    ----------
    mends
        Take small objects that are damaged from the spare copy.
    """

    followed = False
    foreign = False

    def __init__(
        self,
        folder: Folder,
        *,
        version_id: str,
        attributes: Attributes,
        arrays: Mapping[str, Array],
        mends: bool = False,
    ) -> None:
        self.folder = folder
        self._ahead = dict[str, bytes | StorageError]()
        self._mends = mends
        self.id = version_id
        self.path = str(folder)
        self.attributes = attributes
        self.arrays = dict(arrays)
        self.rows = attributes.rows
        self._shards: dict[str, list[Leaf]] = {}
        self._checks: dict[str, np.ndarray] = {}
        self._shapes: dict[str, np.ndarray] = {}

    @property
    def committed(self) -> bool:
        """False while it is being built: its objects appear one by one."""
        return True

    def __repr__(self) -> str:
        return f"<precache version {short(self.id)} at {self.path}: {self.rows} rows>"

    def __fspath__(self) -> str:
        return self.path

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """Field name -> description."""
        variants = variants_of(self.attributes.fields)
        return {name: self._field(arrays) for name, arrays in variants.items()}

    def _field(self, arrays: Sequence[str]) -> FieldInfo:
        """Describe the field whose variants are stored in `arrays`, all of one shape and dtype."""
        stored = [self.attributes.fields[array] for array in arrays]
        return FieldInfo(
            shape=stored[0].shape,
            dtype=stored[0].dtype,
            codec=stored[0].codec,
            raw_nbytes=sum(array.raw for array in stored),
            stored_nbytes=sum(array.stored for array in stored),
            variants=len(arrays),
            first_variant=number_of(arrays[0]),
            ragged=stored[0].ragged,
            kind=self.kind(arrays[0]),
        )

    @property
    def stored(self) -> list[str]:
        """Names of the fields' arrays, one for each variant."""
        return list(self.attributes.fields)

    def variants(self, name: str) -> list[str]:
        """Names of the arrays of a field, or of the labels: one for each variant, by number."""
        return [name] if name in self.arrays else variants_of(self.stored)[name]

    def array_at(self, name: str, epoch: int) -> str:
        """Name of the array of a field, or of the labels, that an epoch reads."""
        arrays = self.variants(name)
        if len(arrays) == 1:
            return name
        return f"{name}.{variant_at(epoch, number_of(arrays[0]), len(arrays))}"

    def kind(self, array: str) -> FieldKind | None:
        """Kind of the rows of an array that differ in length; None for images and arrays."""
        field = self.attributes.declared.get(array)
        return None if field is None else field.kind

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by number; empty if there are none."""
        return self.attributes.classes

    @property
    def mean(self) -> dict[str, list[float]]:
        """Image field -> mean of each channel over all valid rows and variants, in stored units."""
        return {name: mean for name, (mean, _) in self._statistics.items()}

    @property
    def std(self) -> dict[str, list[float]]:
        """Image field -> standard deviation of each channel, over the same pixels as `mean`."""
        return {name: std for name, (_, std) in self._statistics.items()}

    @property
    def _statistics(self) -> dict[str, tuple[list[float], list[float]]]:
        """Mean and standard deviation by field, over its variants, which have equal weight."""
        return pool_statistics(self.attributes.mean, self.attributes.std)

    @property
    def recipe(self) -> Recipe:
        """Recipe that the version was built from."""
        return self.attributes.recipe.of_store(self.path)

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """(rows,) bool: False for holes."""
        return self._small("valid")

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """Labels of the rows, of one of three kinds.

        (rows,) integers are class numbers, -1 for none; (rows,) float32 are numbers, NaN for none;
        (rows, classes) uint8 has a 1 for each class of a row.
        """
        labels = self._small("label")
        labels.setflags(write=False)  # rows would keep theirs
        return labels

    @property
    def keys(self) -> Sequence[str]:
        """Keys by row."""
        return RowKeys(self)

    def row_table(self) -> RowTable:
        """Read the row table."""
        return read_table(self.attributes, self.leaves, self.small_objects, f"{self.path}/")

    def row_column(self, name: str) -> np.ndarray:
        """Read a column of numbers of the row table, by its name in the store."""
        return self._small(f"{ROWS}/{name}")

    def row_texts(self, name: str) -> Iterator[np.ndarray]:
        """Yield the parts of a column of texts of the row table, as `read_strings` does."""
        return read_strings(self.rows, name, self.small_objects, f"{self.path}/")

    def contents(self) -> np.ndarray:
        """Return XXH3-128s of raw samples: (rows, 2) uint64, halves, zeros if it is unknown."""
        return self.row_column("content")

    def part_contents(self) -> list[np.ndarray]:
        """Return the contents of the parts of samples, if any has another than the sample."""
        names = (f"part.{number}" for number in itertools.count())
        stored = itertools.takewhile(lambda name: f"{ROWS}/{name}/c/0/0" in self.leaves, names)
        return [self.row_column(name) for name in stored]

    @functools.cached_property
    def holes(self) -> dict[int, tuple[str, Hole]]:
        """Row -> (key, kind and reason of the hole)."""
        where = f"{self.path}/{HOLES}"
        try:
            holes = _HOLES.validate_json(self.read_checked(HOLES))
        except ValidationError as error:
            raise document_error(error, where) from None
        if wrong := [row for row in holes if row not in range(self.rows)]:
            raise StoreError(f"{where} is damaged or forged: {self} has no row {wrong[0]}")
        return holes

    @property
    def failures(self) -> dict[int, tuple[str, Hole]]:
        """The holes whose samples failed, in row order; others were removed from the source."""
        return {row: hole for row, hole in sorted(self.holes.items()) if hole[1] != REMOVED}

    @property
    def hole_rows(self) -> np.ndarray:
        """Row numbers of the holes, ascending, int64."""
        return np.flatnonzero(~self.valid)

    def rows_of_classes(self, *classes: str | int) -> np.ndarray:
        """Row numbers (int64) of some classes, by name or number, holes included.

        Of multi-hot labels, a row is one that has any of the classes. A number that no row has
        gives no rows; -1 gives the rows without a label.

        Raises
        ------
        UsageError
            There is no class of such a name, or labels are numbers.
        """
        numbers, labels = [self._class_number(name) for name in classes], self.labels
        if labels.ndim == 2:
            known = [number for number in numbers if 0 <= number < labels.shape[1]]
            return np.flatnonzero(labels[:, known].any(axis=1))
        if labels.dtype.kind == "f":
            raise UsageError(
                f"the labels of {self.path} are numbers, and no classes; choose rows by "
                "a condition, such as np.flatnonzero(version.labels > 0)"
            )
        return np.flatnonzero(np.isin(labels, numbers))

    def _class_number(self, name: str | int) -> int:
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
        if not isinstance(keys, Iterable):
            raise UsageError(f"keys is {keys!r}; give keys, such as those of `Loader.keys`")
        wanted: Iterable[Any] = [keys] if isinstance(keys, str) else keys
        row_of = {key: row for row, key in enumerate(self.keys)}
        rows = []
        for key in wanted:
            if not isinstance(key, str) or key not in row_of:
                raise UsageError(f"{self.path} has no key {key!r}")
            rows.append(row_of[key])
        return np.array(rows, np.int64)

    @functools.cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Name -> every object but the root, the shards and the spare copy."""
        objects = self.attributes.objects.items()
        return {name: Leaf(name, size, int(xxh3, 16)) for name, (size, xxh3) in objects}

    def shard_leaves(self, array: str) -> Sequence[Leaf]:
        """Return the objects of an array of a field, by number."""
        if array not in self._shards:
            table, name_of = self._small(f"{SHARDS}/{array}"), self.arrays[array].object_name
            self._shards[array] = [
                Leaf(f"{array}/{name_of(number)}", size, high << 64 | low)
                for number, (size, high, low) in enumerate(table.tolist())
            ]
        return self._shards[array]

    def checks(self, array: str, shard: int) -> np.ndarray:
        """Return the last bytes of each chunk of a shard: (chunks,) uint32."""
        layout = checks_array(self.arrays[array])
        part, number = divmod(shard, layout.chunk_rows)
        name = f"{CHECKS}/{array}/{layout.object_name(part)}"
        if name not in self._checks:
            data = self.read_checked(name)
            self._checks[name] = decode_chunk(layout, data, self.folder.path(name))
        checks: np.ndarray = self._checks[name][number]
        return checks

    def row_shapes(self, array: str) -> np.ndarray:
        """Return the shapes of an array of ragged rows: (rows, axes) int64, zeros for holes.

        Raises
        ------
        DamageError
            No row can have such a shape.
        """
        if array not in self._shapes:
            shapes = self._small(shapes_name(array)).astype(np.int64)
            self.require_shapes(array, shapes)
            self._shapes[array] = shapes
        return self._shapes[array]

    def require_shapes(self, array: str, shapes: np.ndarray) -> None:
        """Raise `DamageError` if rows of an array cannot have such shapes: (n, axes) int64."""
        field = self.attributes.fields[array]
        fixed = None if self.kind(array) is None else field.shape[1:]
        require_row_shapes(shapes, field.dtype, f"{self.path}/{array}", fixed)

    def shard_sums(self, array: str) -> np.ndarray | None:
        """Return (shards, 1 + 2 C) float64 count, totals and squares of an array of images.

        None if they are not stored, or damaged: they only save work.
        """
        if len(self.arrays[array].row_shape) != 3:
            return None
        try:
            return self._small(f"{SUMS}/{array}")
        except (DamageError, StorageError, StoreError):
            return None

    @functools.lru_cache(maxsize=16)  # noqa: B019 - versions are few and live long
    def key_chunk(self, number: int) -> np.ndarray:
        """Keys of the rows from ``number * 65536`` on, 65,536 at most."""
        name, count = f"key/c/{number}", min(self.rows, KEYS_PER_CHUNK)
        return decode_strings(self.read_checked(name), f"{self.path}/{name}", count)

    def read_checked(self, name: str) -> bytes:
        """Read an object other than a shard, as `small_objects` does."""
        return self.small_objects([name])[name]

    def small_objects(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read objects other than shards: name -> bytes.

        Raises
        ------
        DamageError
            One is missing, or has other bytes than were written.
        """
        with self.unless_gone():
            leaves = [self._leaf(name) for name in names]
            read = read_ahead(self.folder, self._ahead, names)
            pairs = zip(leaves, read, strict=True)
            return {leaf.name: self._checked(leaf, data) for leaf, data in pairs}

    def _leaf(self, name: str) -> Leaf:
        try:
            return self.leaves[name]
        except KeyError:
            raise StoreError(f"{self.path}/{ROOT} is damaged or forged: it lacks {name}") from None

    def _checked(self, leaf: Leaf, data: bytes | StorageError) -> bytes:
        if not fault_of(leaf, data):
            return required(data)
        try:
            return leaf.read(self.folder, REPAIR_HINT)  # a transfer can corrupt bytes
        except DamageError:
            spare = spare_of(self.folder, self.leaves.values(), leaf) if self._mends else None
            if spare is None:
                raise
            return spare

    def flaws(self) -> dict[str, str]:
        """Find the small objects that are not those that were written: name -> what is wrong.

        Raises
        ------
        GoneError
            The version was removed since it was opened.
        """
        flaws, leaves = dict[str, str](), list(self.leaves.values())
        with self.unless_gone():
            root = self.folder.get(ROOT)
            if root is None or seal_of(root) != self.digest:
                flaws[ROOT] = CHECKSUM
                root = spare_root(self.folder)
            read = self.folder.read_small(list(self.leaves))
            for leaf, data in zip(leaves, read, strict=True):
                if fault := fault_of(leaf, data):
                    flaws[leaf.name] = fault
            if root is not None:
                flaws.update(spare_flaws(self.folder, root, leaves))
        if flaws:
            self.require_there()
        return flaws

    def lost_objects(self) -> dict[tuple[str, int], Leaf]:
        """Find shards that are missing or of another size: (array, number) -> what was written."""
        lost = {}
        with self.unless_gone():
            for name in self.stored:
                sizes = self.folder.sizes(name)
                for number, leaf in enumerate(self.shard_leaves(name)):
                    if sizes.get(leaf.name) != leaf.size:
                        lost[name, number] = leaf
        if lost:
            self.require_there()
        return lost

    @property
    def digest(self) -> str:
        """Digest of the root."""
        return self.attributes.digest

    def is_gone(self) -> bool:
        """Return whether the version was removed since it was opened: its root goes first."""
        try:
            return self.folder.size(ROOT) is None
        except StorageError:  # it is unreachable
            return False

    def require_there(self) -> None:
        """Raise `GoneError` if the version was removed since it was opened."""
        if self.is_gone():
            raise gone_error(self.path) from None

    @contextlib.contextmanager
    def unless_gone(self) -> Iterator[None]:
        """Raise a `GoneError` in place of errors in the block if the version is gone."""
        try:
            yield
        except (DamageError, StorageError, StoreError):
            self.require_there()
            raise

    def describe(self, row: int) -> str:
        """A row's key for an error message, or its number if keys cannot be read."""
        try:
            return f"key {self.keys[row]!r}"
        except Exception:  # no message must fail for lack of a key
            return f"row {row}"

    def prefetch(self, arrays: Iterable[str]) -> None:
        """Read the small objects that are needed to read `arrays` together, to save requests."""
        whole, names = ["valid", "label"], list[str]()
        for array in arrays:
            whole.append(f"{SHARDS}/{array}")
            if self.arrays[array].row.ragged:
                whole.append(shapes_name(array))
            names.append(f"{CHECKS}/{array}/{checks_array(self.arrays[array]).object_name(0)}")
        for name in whole:
            layout = self._layout(name)
            names += (f"{name}/{layout.object_name(number)}" for number in range(layout.objects))
        self._ahead = dict(zip(names, read_ahead(self.folder, self._ahead, names), strict=True))

    def _small(self, name: str) -> np.ndarray:
        return read_small(self._layout(name), name, self.small_objects, f"{self.path}/")

    def _layout(self, name: str) -> Array:
        """Return the layout of a small array, from the version's rows and shards."""
        if name in ("label", "valid") or name.startswith(f"{ROWS}/"):
            return row_array(self.attributes, name)
        if name.endswith(SHAPES):
            field = self.attributes.fields[name.removesuffix(SHAPES)]
            return small((self.rows, len(field.shape)), "int32")
        kind, _, array = name.partition("/")
        layout = self.arrays[array]
        if kind == SHARDS:
            return small((layout.objects, 3), "uint64")
        return small((layout.objects, 1 + 2 * layout.row_shape[0]), "float64")


def read_ahead(
    folder: Folder, ahead: dict[str, bytes | StorageError], names: Sequence[str]
) -> list[bytes | StorageError]:
    """Read small objects; what was read ahead is taken from there, once."""
    read = {name: data for name in names if (data := ahead.pop(name, None)) is not None}
    rest = [name for name in names if name not in read]
    read.update(zip(rest, folder.read_small(rest), strict=True))
    return [read[name] for name in names]


def require_row_shapes(
    shapes: np.ndarray, dtype: str, where: str, fixed: tuple[int, ...] | None = None
) -> None:
    """Raise `DamageError` if ragged rows have shapes that no row may have.

    Parameters
    ----------
    shapes
        (rows, axes) int64.
    fixed
        Lengths of all axes but the first, where rows differ in that alone; None for images.
    """
    wrong = (shapes < 0).any(axis=1)
    if fixed is not None:
        wrong |= (shapes[:, 1:] != fixed).any(axis=1) & shapes.any(axis=1)
    wrong |= shapes.prod(axis=1, dtype=np.float64) * np.dtype(dtype).itemsize > MOST_RAGGED_NBYTES
    if wrong.any():
        row = int(wrong.argmax())
        raise DamageError(
            f"{where} is damaged or forged: row {row} has the shape {tuple(shapes[row].tolist())}; "
            f"{REPAIR_HINT}"
        )


def mean_and_std(sums: np.ndarray) -> tuple[list[float], list[float]] | tuple[None, None]:
    """Mean and standard deviation of each channel from (parts, 1 + 2 C) sums; None if no pixels."""
    channels = sums.shape[1] // 2
    count, total = sums[:, 0].sum(), sums[:, 1 : 1 + channels].sum(0)
    squares = sums[:, 1 + channels :].sum(0)
    if not count or not np.isfinite(squares).all():  # JSON knows no NaN
        return None, None
    average = total / count
    return average.tolist(), np.sqrt(np.maximum(squares / count - average**2, 0)).tolist()


def read_attributes(data: bytes, folder: Folder) -> Attributes:
    """Parse `attributes.precache` of the `zarr.json` of a version's folder.

    Raises
    ------
    StoreError
        precache did not write the group, it has another format, it is damaged, or it is that of
        another version.
    """
    where = folder.path(ROOT)
    try:
        attributes = parse_json(data, where).get("attributes")
    except StoreError as error:
        raise StoreError(f"{error}; {REPAIR_HINT}") from None
    own = attributes.get("precache") if isinstance(attributes, dict) else None
    if not isinstance(own, dict):
        raise StoreError(
            f"{where} is of a Zarr group that precache did not write; "
            "name its arrays, for example fields={'image': 'path/in/group'}"
        )
    is_ours = own.get("format") == FORMAT
    if not is_ours and spare_root(folder) in (None, data):  # else the copy tells
        raise FormatError(
            f"{where} has store format {own.get('format')!r}, and this release of precache reads "
            f"format {FORMAT} alone; read it with the release that wrote it, or, if it is damaged, "
            f"remove {where} and run the same precache build command again"
        )
    if not is_ours or not seal_of(data):
        raise StoreError(f"{where} is damaged: {CHECKSUM}; {REPAIR_HINT}")
    try:
        parsed = Attributes.read(json.dumps(own).encode(), where)
    except StoreError as error:
        raise StoreError(f"{error}; {REPAIR_HINT}") from None
    if VERSION.fullmatch(folder.name) and parsed.version != id_of(folder.name):
        raise StoreError(
            f"{where} is damaged: it is that of version {parsed.version}; {REPAIR_HINT}"
        )
    return parsed


def gone_error(where: str) -> GoneError:
    """Make the error for a version that was removed."""
    return GoneError(
        f"the version at {where} is gone: it was removed; open the store's current version, or, if "
        f"this is the one and its {ROOT} was lost, run the same precache build command again"
    )
