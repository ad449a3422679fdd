"""The row table: the sample of each row, frozen before the first task of a build runs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from precache.codecs.chunk import require_plausible
from precache.errors import DamageError, StoreError
from precache.store.labels import MOST_CLASSES, MOST_LABEL_NBYTES, are_classes

REMOVED = "removed from the source"
"""Reason for a hole whose sample is no longer in the source."""

COLUMN_TYPES = {
    "key": "string",
    "size": "int64",
    "mtime_ns": "int64",
    "etag": "string",
    "label": "int64",
    "hole": "string",
    "content": "string",
    "removed": "bool",
}
"""Columns of a stored table and their types, in the order in which they are written."""

LABEL_TYPES = ("float", "list<element: int32>", "list<item: int32>")
"""Other types of the column of labels: numbers, and lists of the class numbers of multi-hot
labels."""

_CLASS_COUNT = b"label_classes"
"""Key of the schema's metadata that has the number of classes of multi-hot labels."""

_LABELS_OVERRIDE = b"labels_override"
"""Key of the schema's metadata of a table whose labels override those of the samples."""

_SOURCE = b"source"
"""Key of the schema's metadata that has the digest of the source's place."""

IDENTITY_COLUMNS = ("key", "size", "mtime_ns", "etag", "label")
"""Columns that identify samples; so does `removed`, if a table has it."""

LISTINGS_FOLDER = "_listings"
"""Folder of a store for indexes of its sources' containers, one object for each source, and records
of their samples' contents. Without them, the next listing takes longer, and goes by size and time
alone."""


def listing_prefix(source: str | None) -> str:
    """Return the beginning of the names of a source's indexes; `gc` knows by it whose they are.

    Parameters
    ----------
    source
        As the commit log records it.
    """
    return place_digest(source or "")[:16] + "-"


def record_name(source: str) -> str:
    """Return the name in a store of the record of a source's contents.

    Parameters
    ----------
    source
        As in `RowTable`.
    """
    return f"{LISTINGS_FOLDER}/{record_prefix(source)}contents.parquet"


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
        Stable names of the samples.
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
        Texts by which a source finds its samples, as `unit_of` describes them; empty if it needs
        none. They come from a listing and are never stored.
    labels_override
        Whether labels that come with the samples are ignored, as the request gave others.
    source
        Digest of the place that the samples were listed from: equal names, sizes and times of two
        sources say nothing. Empty if it is unknown.
    """

    keys: Sequence[str]
    sizes: np.ndarray
    mtimes: np.ndarray
    etags: Sequence[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    removed: frozenset[int] = frozenset()
    locations: Sequence[str] = ()
    labels_override: bool = False
    source: str = ""

    @classmethod
    def of_keys(cls, keys: Sequence[str], **known: Any) -> RowTable:
        """Return the table of samples of which only the keys are known, and what else is given."""
        unknown = np.full(len(keys), -1, np.int64)
        columns = {"sizes": unknown, "mtimes": unknown, "etags": [""] * len(keys)}
        return cls(keys=keys, **{**columns, "labels": unknown, "classes": (), **known})

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def samples(self) -> int:
        """Number of rows whose samples are in the source."""
        return len(self) - len(self.removed)

    def present_keys(self) -> Iterator[str]:
        """Yield the keys of the samples that are in the source."""
        return (key for row, key in enumerate(self.keys) if row not in self.removed)

    def take(self, rows: np.ndarray | Sequence[int]) -> RowTable:
        """Return the table of the given rows, in that order."""
        rows = np.asarray(rows, np.int64)
        removed = frozenset(np.flatnonzero(np.isin(rows, list(self.removed))).tolist())
        return RowTable(
            keys=[self.keys[i] for i in rows.tolist()],
            sizes=self.sizes[rows],
            mtimes=self.mtimes[rows],
            etags=[self.etags[i] for i in rows.tolist()],
            labels=self.labels[rows],
            classes=self.classes,
            removed=removed,
            locations=self.locations_of(rows.tolist()),
            labels_override=self.labels_override,
            source=self.source,
        )

    def listed_alike(self, other: RowTable, rows: Rows, other_rows: Rows) -> np.ndarray:
        """Compare samples by size, time and etag: bool, True where they are the same.

        Samples of two sources never are.

        Parameters
        ----------
        rows, other_rows
            Rows of the one table and of the other, pair by pair.
        """
        etags = np.array(self.etags, object)[rows] == np.array(other.etags, object)[other_rows]
        alike: np.ndarray = self.sizes[rows] == other.sizes[other_rows]
        alike &= etags & (self.mtimes[rows] == other.mtimes[other_rows])
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
        same &= (self.mtimes[rows] >= 0) | (np.array(self.etags, object)[rows] != "")
        for table, of_table in ((self, rows), (other, other_rows)):
            is_removed = np.zeros(len(table), np.bool_)
            is_removed[list(table.removed)] = True
            same &= ~is_removed[of_table]
        return same

    @property
    def has_units(self) -> bool:
        """Return True if samples lie in containers, of which parts are read at once."""
        return bool(self.locations) and unit_of(self.locations[0]) != ""

    def locations_of(self, rows: Iterable[int]) -> list[str]:
        """Return the locations of some samples; none if the source needs none."""
        return [self.locations[row] for row in rows] if self.locations else []

    @functools.cached_property
    def location_by_key(self) -> Mapping[str, str]:
        """Key -> location of each sample."""
        return dict(zip(self.keys, self.locations, strict=True))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over all attributes but the locations."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        columns = [self.sizes, self.mtimes]
        if are_classes(self.labels):
            columns.append(self.labels)
        for start in range(0, len(self), 4096):
            part = slice(start, start + 4096)
            numbers = (column[part].tolist() for column in columns)
            rows = zip(self.keys[part], self.etags[part], *numbers, strict=True)
            digest.update(json.dumps(list(rows)).encode())
        if self.removed:
            digest.update(json.dumps(sorted(self.removed)).encode())
        if not are_classes(self.labels):
            digest.update(json.dumps([self.labels.dtype.name, self.labels.shape]).encode())
            digest.update(self.labels.astype(self.labels.dtype.newbyteorder("<")).data)
        if self.labels_override:
            digest.update(_LABELS_OVERRIDE)
        if self.source:
            digest.update(_SOURCE + self.source.encode())
        return digest.hexdigest()

    def to_parquet(
        self,
        reasons: Sequence[str] | None = None,
        content: Sequence[str] | None = None,
    ) -> bytes:
        """Serialise to a Parquet file.

        Parameters
        ----------
        reasons
            Reason why each row is a hole, empty for others; None while building.
        content
            XXH3-128 (hex) of each raw sample, empty if it could not be fetched.
        """
        import pyarrow as pa  # only nodes that build have it
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {
            "key": self.keys,
            "size": self.sizes,
            "mtime_ns": self.mtimes,
            "etag": self.etags,
            "label": self.labels,
        }
        if reasons is not None and content is not None:
            columns |= {"hole": reasons, "content": content}
        if self.removed:
            columns["removed"] = np.isin(np.arange(len(self)), list(self.removed))
        types = {n: pa.type_for_alias(t) for n, t in COLUMN_TYPES.items() if n in columns}
        metadata = {b"classes": json.dumps(self.classes).encode()}
        if self.labels.ndim == 2:
            types["label"] = pa.list_(pa.int32())
            metadata[_CLASS_COUNT] = str(self.labels.shape[1]).encode()
        elif not are_classes(self.labels):
            types["label"] = pa.float32()
        if self.labels_override:
            metadata[_LABELS_OVERRIDE] = b"true"
        if self.source:
            metadata[_SOURCE] = self.source.encode()
        schema = pa.schema(types, metadata)
        sink = io.BytesIO()
        with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for start in range(0, len(self), ROWS_PER_GROUP):
                part = slice(start, start + ROWS_PER_GROUP)
                arrays = [_to_arrow(columns[name][part], type_) for name, type_ in types.items()]
                writer.write_table(pa.table(arrays, schema=schema))
        pa.default_memory_pool().release_unused()  # or it keeps 100 MB for a million rows
        return sink.getvalue()

    @classmethod
    def from_parquet(cls, data: bytes, where: str) -> RowTable:
        """Parse the output of `to_parquet`."""
        with _reading(where):
            table = _read(data, IDENTITY_COLUMNS)
            return cls(
                keys=table["key"].to_pylist(),
                sizes=table["size"].to_numpy(),
                mtimes=table["mtime_ns"].to_numpy(),
                etags=table["etag"].to_pylist(),
                labels=_labels(table),
                classes=_CLASSES.validate_json(table.schema.metadata[b"classes"]),
                removed=_removed(table),
                labels_override=_LABELS_OVERRIDE in table.schema.metadata,
                source=table.schema.metadata.get(_SOURCE, b"").decode(),
            )


def unit_of(location: str) -> str:
    """Return the part of a container that a sample is read with: the text before the last tab.

    It is empty for a sample that is read alone. The text after its last ``#`` starts with ``>`` if
    the part is read from its start to the last sample wanted. A suffix ``~N`` is the mean size of
    its samples in bytes, where their sizes are unknown.
    """
    return location.rpartition("\t")[0]


def read_contents(data: bytes, where: str) -> list[str]:
    """Read the content hashes of a committed version's table, by row."""
    return _read_column(data, where, "content")


def read_etags(data: bytes, where: str) -> list[str]:
    """Read the etags of a table, by row."""
    return _read_column(data, where, "etag")


def read_reasons(data: bytes, where: str) -> list[str]:
    """Read the reason why each row of a committed version is a hole; empty for others."""
    return _read_column(data, where, "hole")


def _read_column(data: bytes, where: str, column: str) -> list[str]:
    with _reading(where):
        values: list[str] = _read(data, [column])[column].to_pylist()
        return values


def _to_arrow(values: Any, type_: Any) -> Any:
    import pyarrow as pa

    if getattr(values, "ndim", 1) == 1:
        return pa.array(values, type_)
    rows, numbers = np.nonzero(values)
    ends = np.searchsorted(rows, np.arange(len(values) + 1))
    return pa.ListArray.from_arrays(ends.astype(np.int32), numbers.astype(np.int32), type_)


def _labels(table: Any) -> np.ndarray:
    """Return the labels of a table: of a column of lists, which are class numbers, multi-hot."""
    column = table["label"]
    if str(column.type) in ("int64", "float"):
        return np.asarray(column.to_numpy())
    count = int(table.schema.metadata[_CLASS_COUNT])
    if not (0 < count <= MOST_CLASSES and len(table) * count <= MOST_LABEL_NBYTES):
        raise ValueError(f"it claims labels of {count} classes")
    lists = column.combine_chunks()
    numbers = np.asarray(lists.flatten().to_numpy(zero_copy_only=True))
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise ValueError(f"it has class numbers that are not from 0 to {count - 1}")
    labels = np.zeros((len(table), count), np.uint8)
    labels[np.repeat(np.arange(len(table)), np.diff(lists.offsets.to_numpy())), numbers] = 1
    return labels


def _removed(table: Any) -> frozenset[int]:
    if "removed" not in table.column_names:
        return frozenset()
    return frozenset(np.flatnonzero(table["removed"].to_numpy()).tolist())


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
    """Read columns of a table, check their types, and that no value is missing.

    With `IDENTITY_COLUMNS`, the column `removed` is read too, if there is one.
    """
    import pyarrow.parquet as pq

    file = pq.ParquetFile(io.BytesIO(data))
    groups = range(file.num_row_groups)
    nbytes = sum(file.metadata.row_group(number).total_byte_size for number in groups)
    # Encoded as runs, any number of rows takes no bytes; in memory each takes at least these.
    require_plausible(len(data), max(nbytes, MIN_ROW_NBYTES * file.metadata.num_rows))
    removed = columns is IDENTITY_COLUMNS and "removed" in file.schema_arrow.names
    table = file.read([*columns, *(["removed"] if removed else [])])
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
