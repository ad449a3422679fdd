"""The row table: the sample of each row, frozen before the first task of a build runs."""

from __future__ import annotations

import bisect
import functools
import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from precache.codecs.chunk import require_plausible
from precache.errors import DamageError, Hole, StoreError
from precache.store.arrays import as_json, group_document, label_form, parse_json, row_array
from precache.store.columns import GrowingTexts, Texts
from precache.store.commit_log import ROOT
from precache.store.json_documents import TableAttributes
from precache.store.labels import are_classes, narrow
from precache.store.locations import Locations, expected_bytes
from precache.store.small_arrays import read_small, read_strings, small_array, string_array

REMOVED = Hole("removed", "removed from the source")
"""Of a hole whose sample is no longer in the source."""

ROWS = "rows"
"""Folder of a version with columns of its row table; others are `key`, and most often `label`."""

LISTED_LABEL = f"{ROWS}/label"
"""Labels of the row table, where they are not those of the version."""

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


DIGESTED_ROWS = 1 << 16
"""Texts whose bytes, and where each ends, are digested together."""

MIN_ROW_NBYTES = 8
"""Bytes of memory that a row takes at least, however few are stored."""

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
        located = self.locations
        return located.unit_numbers if located is not None and located.containers else None

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
        known = [self.classes, sorted(self.removed), self.labels_with_samples, self.source]
        kind = [self.labels.dtype.name, self.labels.shape]
        digest = hashlib.sha256(json.dumps([*known, *kind]).encode())
        for numbers in (self.sizes, self.mtimes, self.labels):
            little = numbers.dtype.newbyteorder("<")
            digest.update(numbers.astype(little, order="C", copy=False).data)
        for texts in (self.keys, self.etags):
            for start in range(0, len(self), DIGESTED_ROWS):
                data, ends = texts[start : start + DIGESTED_ROWS].data
                digest.update(ends.astype("<i8").data)
                digest.update(data.data)
        return digest.hexdigest()


# --- stored tables ------------------------------------------------------------------------------


def table_objects(table: RowTable) -> dict[str, bytes]:
    """Make the arrays of a table but those of its labels: name below a version -> bytes."""
    arrays = {
        "key": string_array(table.keys, "row"),
        f"{ROWS}/size": small_array(table.sizes, ["row"], -1),
        f"{ROWS}/mtime_ns": small_array(table.mtimes, ["row"], -1),
        f"{ROWS}/etag": string_array(table.etags, "row"),
        f"{ROWS}/removed": small_array(table.is_removed, ["row"], fill_value=False),
    }
    return {f"{ROWS}/{ROOT}": as_json(group_document({})), **below(arrays)}


def label_objects(labels: np.ndarray) -> dict[str, bytes]:
    """Make the array of labels as a version has it: name below its folder -> bytes."""
    stored = narrow(labels)
    files = small_array(stored, *label_form(stored.shape[1:], stored.dtype.name))
    return below({"label": files})


def below(arrays: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """Name the files of arrays, given by folder, by their paths."""
    return {f"{folder}/{n}": data for folder, files in arrays.items() for n, data in files.items()}


def read_table(
    described: TableAttributes,
    names: Container[str],
    read: Callable[[Sequence[str]], Mapping[str, bytes]],
    place: str,
) -> RowTable:
    """Read a stored table.

    Parameters
    ----------
    names
        Names of the stored objects.
    read
        Reads objects: name -> bytes.
    place
        Start of their paths, for messages.

    Raises
    ------
    DamageError
        An object is damaged; names it.
    """

    def numbers(name: str) -> np.ndarray:
        return read_small(row_array(described, name), name, read, place)

    def texts(name: str) -> Texts:
        growing = GrowingTexts()
        for part in read_strings(described.rows, name, read, place):
            growing.extend(part.tolist())
        return growing.texts()

    labels = numbers(LISTED_LABEL if f"{LISTED_LABEL}/c/0" in names else "label")
    return RowTable(
        keys=texts("key"),
        sizes=numbers(f"{ROWS}/size"),
        mtimes=numbers(f"{ROWS}/mtime_ns"),
        etags=texts(f"{ROWS}/etag"),
        labels=labels.astype(np.int64) if are_classes(labels) else labels,
        classes=described.classes,
        removed=frozenset(np.flatnonzero(numbers(f"{ROWS}/removed")).tolist()),
        labels_with_samples=described.label.with_samples,
        source=described.source,
    )


def freeze(table: RowTable) -> bytes:
    """Serialise a table to one file: a zip archive, without compression, of a Zarr group."""
    own = {"rows": len(table), "classes": table.classes, "source": table.source}
    document = group_document({"precache": {**own, "label": label_attributes(table)}})
    files = {ROOT: as_json(document), **table_objects(table), **label_objects(table.labels)}
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return sink.getvalue()


def thaw(data: bytes, where: str) -> RowTable:
    """Parse the output of `freeze`.

    Raises
    ------
    StoreError
        It is damaged, or claims more rows than it can hold.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(file.compress_type != zipfile.ZIP_STORED for file in archive.infolist()):
                raise ValueError("its files are compressed")
            own = parse_json(archive.read(ROOT), ROOT)["attributes"]["precache"]
            described = TableAttributes.read(json.dumps(own).encode(), ROOT)
            require_plausible(len(data), MIN_ROW_NBYTES * described.rows)
            names = {*archive.namelist()}
            return read_table(
                described, names, lambda wanted: {n: archive.read(n) for n in wanted}, ""
            )
    except (
        DamageError, EOFError, LookupError, MemoryError, OSError, RuntimeError, StoreError,
        TypeError, ValueError, struct.error, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        reason = str(error) or "it does not fit into memory"
        raise StoreError(f"{where} is no row table: {reason}") from None


def label_attributes(table: RowTable, labels: np.ndarray | None = None) -> dict[str, Any]:
    """Return what a version's attributes say of its labels, by default those of its table."""
    stored = narrow(table.labels if labels is None else labels)
    own = {"shape": list(stored.shape[1:]), "dtype": stored.dtype.name}
    return own | ({"with_samples": True} if table.labels_with_samples else {})


# --- digests of samples -------------------------------------------------------------------------


def halves_of(digests: Iterable[str], count: int = 1) -> np.ndarray:
    """Return XXH3-128s in hex as halves: (len, 2 count) uint64, zeros where there is none.

    Parameters
    ----------
    count
        Digests in each text, one after the other; a text may be empty.

    Raises
    ------
    ValueError
        A text is something else.
    """
    digits = [digest or "0" * 32 * count for digest in digests]
    if {*map(len, digits)} - {32 * count}:
        raise ValueError(f"these are not {count} digests each")
    halves = np.frombuffer(bytes.fromhex("".join(digits)), ">u8").reshape(-1, 2 * count)
    return halves.astype(np.uint64)


def contents_of(
    contents: Iterable[str], parts: Sequence[str]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the halves of contents, and of those of the parts of samples.

    Parameters
    ----------
    contents, parts
        As in `Receipt`, by row; a text of `parts` is empty where each is the sample's content.

    Returns
    -------
    tuple
        (rows, 2) uint64, and as many for each part; none if all texts of `parts` are empty.
    """
    halves, count = halves_of(contents), max(map(len, parts), default=0) // 32
    if not count:
        return halves, []
    of_parts, blank = halves_of(parts, count), np.array([not text for text in parts])
    return halves, [
        np.where(blank[:, np.newaxis], halves, of_parts[:, start : start + 2])
        for start in range(0, 2 * count, 2)
    ]


def digests_of(halves: np.ndarray) -> list[str]:
    """Return XXH3-128s in hex, empty for zeros, of their halves: (len, 2) uint64."""
    digits, none = halves.astype(">u8").tobytes().hex(), "0" * 32
    texts = (digits[start : start + 32] for start in range(0, len(digits), 32))
    return ["" if text == none else text for text in texts]
