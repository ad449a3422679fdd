"""The row table: the sample of each row, frozen before the first task of a build runs."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from precache.codecs.chunk import require_plausible
from precache.errors import DamageError, StoreError
from precache.store.columns import Texts, arrow_of, numbers_of, system_memory
from precache.store.labels import MOST_CLASSES, MOST_LABEL_NBYTES, are_classes
from precache.store.locations import Locations, expected_bytes

REMOVED = "removed from the source"
"""Reason for a hole whose sample is no longer in the source."""

COLUMN_TYPES = {
    "key": "string",
    "size": "int64",
    "mtime_ns": "int64",
    "etag": "string",
    "label": "int64",
    "content": "string",
    "parts": "string",
    "removed": "bool",
}
"""Columns of a stored table and their types, in the order in which they are written."""

LABEL_TYPES = ("float", "list<element: int32>", "list<item: int32>")
"""Other types of the column of labels: numbers, and lists of the class numbers of multi-hot
labels."""

_CLASS_COUNT = b"label_classes"
"""Key of the schema's metadata that has the number of classes of multi-hot labels."""

_LABELS_WITH_SAMPLES = b"labels_with_samples"
"""Key of the schema's metadata that has `RowTable.labels_with_samples`: true or false."""

_SOURCE = b"source"
"""Key of the schema's metadata that has the digest of the source's place."""

IDENTITY_COLUMNS = ("key", "size", "mtime_ns", "etag", "label", "removed")
"""Columns that identify samples."""

LISTINGS_FOLDER = "_listings"
"""Folder of a store for indexes of its sources' containers, one object for each source, and records
of their samples. Without them, the next listing takes longer, and goes by size and time
alone."""


def listing_prefix(source: str | None) -> str:
    """Return the beginning of the names of a source's indexes; `gc` knows by it whose they are.

    Parameters
    ----------
    source
        As the commit log records it.
    """
    return place_digest(source or "")[:16] + "-"


def record_name(source: str, inputs: str = "") -> str:
    """Return the name in a store of the record of a source's samples.

    Parameters
    ----------
    source
        As in `RowTable`.
    inputs
        Parts of a sample that its content is of, where recipes choose them.
    """
    of = f"{place_digest(inputs)[:16]}-" if inputs else ""
    return f"{LISTINGS_FOLDER}/{record_prefix(source)}{of}samples.parquet"


def record_prefix(source: str) -> str:
    """Return the beginning of the name of a source's record below its folder."""
    return f"{source[:16]}-"


def place_digest(place: str) -> str:
    """Return the digest of a place, as in `RowTable.source`."""
    return hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:32]


_CLASSES = TypeAdapter(tuple[str, ...])

MIN_ROW_NBYTES = 8
"""Bytes of memory that a row takes at least, however few are stored."""

ROWS_PER_GROUP = 1 << 16
"""Rows that are copied in memory at a time while a table is written."""


Rows = np.ndarray | slice
"""Row numbers, or a range of them."""


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """Row number -> sample, stored by column.

    Attributes
    ----------
    keys
        Stable names of the samples; any texts are made a `Texts`, as are etags.
    sizes, mtimes
        Bytes, and modification time in nanoseconds; -1 if the source has none; int64.
    etags
        Identifier of the content if the source has one, else empty.
    labels
        Class numbers, -1 for none; int64. Or numbers or multi-hot labels, as in
        `precache.store.labels`.
    classes
        Class names by number.
    removed
        Rows whose sample is no longer in the source: holes, which keep their keys.
    locations
        Where a source finds its samples; None if it needs none. They come from a listing and are
        never stored.
    labels_with_samples
        True if labels come with the samples, as of a Python dataset, and the table has none.
    source
        Digest of the place that the samples were listed from: equal names, sizes and times of two
        sources say nothing. Empty if it is unknown.
    """

    keys: Texts
    sizes: np.ndarray
    mtimes: np.ndarray
    etags: Texts
    labels: np.ndarray
    classes: tuple[str, ...]
    removed: frozenset[int] = frozenset()
    locations: Locations | None = None
    labels_with_samples: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("keys", "etags"):
            object.__setattr__(self, name, Texts(getattr(self, name)))

    @classmethod
    def of_keys(cls, keys: Sequence[str], **known: Any) -> RowTable:
        """Return the table of samples of which only the keys are known, and what else is given."""
        unknown = np.full(len(keys), -1, np.int64)
        etags = Texts.repeated([""], [len(keys)])
        columns = {"sizes": unknown, "mtimes": unknown, "etags": etags}
        return cls(keys=Texts(keys), **{**columns, "labels": unknown, "classes": (), **known})

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def samples(self) -> int:
        """Number of rows whose samples are in the source."""
        return len(self) - len(self.removed)

    @property
    def is_removed(self) -> np.ndarray:
        """Rows whose samples are no longer in the source: (rows,) bool."""
        removed = np.zeros(len(self), np.bool_)
        removed[list(self.removed)] = True
        return removed

    @property
    def is_known(self) -> np.ndarray:
        """Rows whose samples have a time or an etag: (rows,) bool."""
        return np.asarray((self.mtimes >= 0) | ~self.etags.is_blank)

    @property
    def present_keys(self) -> Texts:
        """Keys of the samples that are in the source."""
        return self.keys.take(np.flatnonzero(~self.is_removed)) if self.removed else self.keys

    def take(self, rows: np.ndarray | Sequence[int]) -> RowTable:
        """Return the table of the given rows, in that order."""
        rows = np.asarray(rows, np.int64)
        return replace(
            self,
            keys=self.keys.take(rows),
            sizes=self.sizes[rows],
            mtimes=self.mtimes[rows],
            etags=self.etags.take(rows),
            labels=self.labels[rows],
            removed=frozenset(np.flatnonzero(self.is_removed[rows]).tolist()),
            locations=self.locations_of(rows),
        )

    def listed_alike(self, other: RowTable, rows: Rows, other_rows: Rows) -> np.ndarray:
        """Compare samples by size, time and etag: bool, True where they are the same.

        Samples of two sources never are.

        Parameters
        ----------
        rows, other_rows
            Rows of the one table and of the other, pair by pair.
        """
        alike: np.ndarray = self.sizes[rows] == other.sizes[other_rows]
        alike &= self.mtimes[rows] == other.mtimes[other_rows]
        alike &= self.etags.take(rows).same(other.etags.take(other_rows))
        return alike & (self.source == other.source)

    def unchanged(self, other: RowTable, rows: Rows, other_rows: Rows) -> np.ndarray:
        """Compare the identity of samples: bool, True where it is the same.

        A removed sample is never the same, nor is one for which the source gives neither an etag
        nor a time, as for web pages.

        Parameters
        ----------
        rows, other_rows
            As in `listed_alike`.
        """
        same = self.listed_alike(other, rows, other_rows)
        same &= self.is_known[rows]
        same &= ~self.is_removed[rows] & ~other.is_removed[other_rows]
        return same

    @property
    def units(self) -> np.ndarray | None:
        """Number of each row's unit, a part of a container that is read at once; None for none."""
        located = self.locations is not None and self.locations.containers
        return self.locations.unit_numbers if self.locations is not None and located else None

    def locations_of(self, rows: Sequence[int] | np.ndarray) -> Locations | None:
        """Return the locations of some samples; None if the source needs none."""
        return None if self.locations is None else self.locations.take(rows)

    def expected_sizes(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the sizes of some samples, those that are unknown as expected: int64."""
        sizes: np.ndarray = self.sizes[np.asarray(rows, np.int64)]
        return sizes if (sizes >= 0).all() else expected_bytes(sizes, self.locations_of(rows))

    @functools.cached_property
    def _by_key(self) -> np.ndarray:
        return self.keys.order()

    def rows_of(self, keys: Sequence[str]) -> np.ndarray:
        """Return the rows of a few keys: (len,) int64, -1 for those that are not in the table.

        The first look-up sorts all keys. For many keys at once, `Texts.find` takes less time.
        """
        rows = np.full(len(keys), -1, np.int64)
        for number, key in enumerate(keys):
            place = bisect.bisect_left(self._by_key, key, key=self.keys.__getitem__)
            if place < len(self) and self.keys[row := self._by_key[place]] == key:
                rows[number] = row
        return rows

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over all attributes but the locations."""
        whole = [self.classes, sorted(self.removed), self.labels_with_samples, self.source]
        digest = hashlib.sha256(json.dumps(whole).encode())
        columns = [self.sizes, self.mtimes]
        if are_classes(self.labels):
            columns.append(self.labels)
        for start in range(0, len(self), 4096):
            part = slice(start, start + 4096)
            numbers = (column[part].tolist() for column in columns)
            rows = zip(self.keys[part], self.etags[part], *numbers, strict=True)
            digest.update(json.dumps(list(rows)).encode())
        if not are_classes(self.labels):
            digest.update(json.dumps([self.labels.dtype.name, self.labels.shape]).encode())
            digest.update(self.labels.astype(self.labels.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    @system_memory()
    def to_parquet(
        self, content: Sequence[str] | None = None, parts: Sequence[str] | None = None
    ) -> bytes:
        """Serialise to a Parquet file.

        Parameters
        ----------
        content
            XXH3-128 (hex) of each raw sample, empty if it could not be fetched; None while
            building.
        parts
            As in `Receipt`; None for a table without.
        """
        import pyarrow as pa  # only nodes that build have it
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {
            "key": self.keys,
            "size": self.sizes,
            "mtime_ns": self.mtimes,
            "etag": self.etags,
            "label": self.labels,
            "removed": self.is_removed,
        }
        if content is not None:
            columns["content"] = content
        if parts is not None:
            columns["parts"] = parts
        types = {n: pa.type_for_alias(t) for n, t in COLUMN_TYPES.items() if n in columns}
        metadata = {
            b"classes": json.dumps(self.classes).encode(),
            _LABELS_WITH_SAMPLES: json.dumps(self.labels_with_samples).encode(),
            _SOURCE: self.source.encode(),
        }
        if self.labels.ndim == 2:
            types["label"] = pa.list_(pa.int32())
            metadata[_CLASS_COUNT] = str(self.labels.shape[1]).encode()
        elif not are_classes(self.labels):
            types["label"] = pa.float32()
        schema = pa.schema(types, metadata)
        sink = io.BytesIO()
        with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for start in range(0, len(self), ROWS_PER_GROUP):
                part = slice(start, start + ROWS_PER_GROUP)
                arrays = [_to_arrow(columns[name][part], type_) for name, type_ in types.items()]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        return sink.getvalue()

    @classmethod
    def from_parquet(cls, data: bytes, where: str) -> RowTable:
        """Parse the output of `to_parquet`."""
        with _reading(where):
            table = _read(data, IDENTITY_COLUMNS)
            metadata = table.schema.metadata
            return cls(
                keys=Texts(table["key"]),
                sizes=numbers_of(table["size"]),
                mtimes=numbers_of(table["mtime_ns"]),
                etags=Texts(table["etag"]),
                labels=_labels(table),
                classes=_CLASSES.validate_json(metadata[b"classes"]),
                removed=frozenset(np.flatnonzero(numbers_of(table["removed"])).tolist()),
                labels_with_samples=metadata[_LABELS_WITH_SAMPLES] == b"true",
                source=metadata[_SOURCE].decode(),
            )


def read_contents(data: bytes, where: str) -> Texts:
    """Read the content hashes of a committed version's table, by row."""
    with _reading(where):
        return Texts(_read(data, ["content"])["content"])


def read_parts(data: bytes, where: str) -> Texts:
    """Read the contents of the parts of samples, by row; none where the table has none."""
    import pyarrow.parquet as pq

    with _reading(where):
        has_parts = "parts" in pq.read_schema(io.BytesIO(data)).names
        return Texts(_read(data, ["parts"])["parts"] if has_parts else [])


def _to_arrow(values: Any, type_: Any) -> Any:
    import pyarrow as pa

    if not isinstance(values, np.ndarray):
        return Texts(values).arrow.cast(type_)
    if values.ndim == 1:
        return arrow_of(values).cast(type_)
    rows, numbers = np.nonzero(values)
    ends = np.searchsorted(rows, np.arange(len(values) + 1))
    ends, numbers = arrow_of(ends.astype(np.int32)), arrow_of(numbers.astype(np.int32))
    return pa.ListArray.from_arrays(ends, numbers, type_)


def _labels(table: Any) -> np.ndarray:
    """Return the labels of a table: of a column of lists, which are class numbers, multi-hot."""
    column = table["label"]
    if str(column.type) in ("int64", "float"):
        return numbers_of(column)
    count = int(table.schema.metadata[_CLASS_COUNT])
    if not (0 < count <= MOST_CLASSES and len(table) * count <= MOST_LABEL_NBYTES):
        raise ValueError(f"it claims labels of {count} classes")
    lists = column.combine_chunks()
    numbers = numbers_of(lists.flatten())
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise ValueError(f"it has class numbers that are not from 0 to {count - 1}")
    labels = np.zeros((len(table), count), np.uint8)
    labels[np.repeat(np.arange(len(table)), np.diff(numbers_of(lists.offsets))), numbers] = 1
    return labels


def read_columns(data: bytes, types: Mapping[str, str], where: str) -> Any:
    """Read the columns of a small Parquet file that a store has, with no value missing.

    Raises
    ------
    StoreError
        It has not these columns, is damaged, or claims more values than it can hold.
    """
    with _reading(where):
        return _read(data, list(types), types)


def _read(data: bytes, columns: Sequence[str], types: Mapping[str, str] = COLUMN_TYPES) -> Any:
    """Read columns of a table, check their types, and that no value is missing."""
    import pyarrow.parquet as pq

    # A thread of Arrow that lets go of Python's bytes while the process ends would abort it.
    file = pq.ParquetFile(io.BytesIO(data), pre_buffer=False)
    groups = range(file.num_row_groups)
    nbytes = sum(file.metadata.row_group(number).total_byte_size for number in groups)
    # Encoded as runs, any number of rows takes no bytes; in memory each takes at least these.
    require_plausible(len(data), max(nbytes, MIN_ROW_NBYTES * file.metadata.num_rows))
    table = file.read(list(columns), use_threads=False)
    for name in (*columns, *table.column_names):
        column, expected = table[name], types[name]
        also = LABEL_TYPES if name == "label" and types is COLUMN_TYPES else ()
        if str(column.type) not in (expected, *also) or column.null_count:
            missing = f", {column.null_count} of them missing" if column.null_count else ""
            raise ValueError(
                f"its column {name} has values of type {column.type}{missing}, and not {expected}"
            )
    return table


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (
        pa.ArrowException, DamageError, MemoryError, OSError, KeyError, TypeError, ValueError
    ) as error:  # fmt: skip
        reason = str(error) or "it does not fit into memory"
        raise StoreError(f"{where} is no row table: {reason}") from None
