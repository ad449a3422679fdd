"""Check that the small objects of a version agree with each other, its row table and its id.

The id is a digest over the row table, so keys, labels and classes have one right value. The rows
that are holes, the sizes of shards and the channel sums are each stored twice. What is stored only
once, such as the reasons for holes, has a checksum.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.storage.base import is_missing
from precache.storage.prefetched_folder import PrefetchedFolder
from precache.store import zarr_metadata
from precache.store.array_metadata import (
    SUMS,
    array_documents,
    is_summed,
    label_layout,
    label_layouts,
)
from precache.store.commit_log import ROOT, VERSION
from precache.store.json_documents import version_id
from precache.store.labels import are_classes, differ, has_label, narrow
from precache.store.layout import RowShape
from precache.store.object_names import ObjectNames
from precache.store.row_table import RowTable
from precache.store.small_arrays import (
    KEYS_PER_CHUNK,
    decode_chunk,
    decode_strings,
    join_chunks,
    small_layout,
)
from precache.store.version import HOLES, ROW_TABLE, Version, gone_error, parse_holes, sums_mismatch
from precache.store.zarr_metadata import Array, Json

_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Flaw:
    """An object that is not as its version promises.

    Attributes
    ----------
    name
        Name below the version's folder.
    reason
        Description of the fault.
    """

    name: str
    reason: str


def inspect(version: Version, table: RowTable | None = None) -> list[Flaw]:
    """Find the faults of a version's small objects and documents; reads no shard.

    If the version's own document is invalid, nothing is compared with it.

    Parameters
    ----------
    version
        An open version, or one that `open_own_unchecked` returned.
    table
        The version's row table, if known, to compare keys and labels with. Its digest must be
        that of the version.

    Raises
    ------
    GoneError
        The version was removed since it was opened.
    """
    return _Inspection(version, table).run()


class _CheckAborted(Exception):
    """A check cannot go on, because an object that it needs is flawed; the flaw was noted."""


class _Inspection:
    """One inspection of a version's small objects.

    Attributes
    ----------
    flaws
        Name of an object -> the first fault found in it.
    """

    def __init__(self, version: Version, table: RowTable | None) -> None:
        assert version.attributes is not None  # precache wrote it
        self.version = version
        self.attributes = version.attributes
        self.table = table
        self.flaws: dict[str, str] = {}
        self.contents = ObjectNames.of(version.attributes)
        self.ahead = PrefetchedFolder(version.folder)

    def run(self) -> list[Flaw]:
        if self.version.folder.local("") is None:
            names = self.contents.small
            self.ahead.prefetch(name for name in names if not name.startswith("key/c/"))
        with self.version.unless_gone(), contextlib.suppress(_CheckAborted):
            self._root()
            self._recipe()
            for check in self._checks():
                with contextlib.suppress(_CheckAborted):
                    check()
        if self.flaws and self.version.is_gone():
            raise gone_error(self.version.path)
        return [Flaw(name, reason) for name, reason in self.flaws.items()]

    def _checks(self) -> Iterator[Callable[[], object]]:
        yield from (self._row_table, self._holes, self._valid, self._keys, self._labels)
        for name in self.attributes.fields:
            yield functools.partial(self._shard_table, name)
            yield functools.partial(self._sums, name)
        yield self._documents

    def _flaw(self, name: str, reason: str) -> _CheckAborted:
        self.flaws.setdefault(name, reason)
        return _CheckAborted()

    def _require(self, condition: bool, name: str, reason: str) -> None:
        if not condition:
            raise self._flaw(name, reason)

    # --- reading --------------------------------------------------------------------------------

    def _read(self, name: str) -> bytes:
        [data] = self.ahead.read_many([name], [-1])
        if not isinstance(data, StorageError):
            return data
        raise self._flaw(name, "it is missing" if is_missing(data) else str(data))

    def _small(self, array: str, layout: Array) -> np.ndarray:
        """Read a small array; note every chunk that cannot be read."""
        chunks = []
        for number in range(layout.objects):
            name = f"{array}/{layout.object_name(number)}"
            with contextlib.suppress(_CheckAborted):
                try:
                    chunks.append(decode_chunk(layout, self._read(name), "it"))
                except DamageError as error:
                    self._flaw(name, str(error))
        if len(chunks) < layout.objects:
            raise _CheckAborted
        return join_chunks(layout, chunks)

    def _json(self, name: str) -> Json:
        try:
            return zarr_metadata.parse_json(self._read(name), "it")
        except StoreError as error:
            raise self._flaw(name, str(error)) from None

    # --- the version's own document -------------------------------------------------------------

    def _root(self) -> None:
        own, name = self.attributes, self.version.folder.name
        document = self._json(ROOT)
        document.pop("attributes", None)
        group = zarr_metadata.group_document({})
        group.pop("attributes")
        self._require(_same(document, group), ROOT, "it is not the document of a Zarr v3 group")
        right_id = version_id(own.fingerprint, own.rows_digest, own.rows_per_shard, own.retries)
        reason = f"its version is {own.version}, and not {right_id}"
        self._require(own.version == right_id, ROOT, reason)
        same = own.version == name or not VERSION.fullmatch(name)
        self._require(same, ROOT, f"it is that of version {own.version}")
        for summed in (ROW_TABLE, HOLES):
            checksum = _DIGEST.fullmatch(own.digests.get(summed, ""))
            self._require(bool(checksum), ROOT, f"it has no checksum of {summed}")
        for array, field in own.fields.items():
            row = RowShape(field.shape, field.dtype)
            full, rest = divmod(own.rows, own.rows_per_shard)
            raw = full * row.padded_nbytes(own.rows_per_shard, own.rows_per_shard)
            raw += row.padded_nbytes(rest, own.rows_per_shard)
            self._require(
                field.raw == raw, ROOT, f"{array} has {field.raw} bytes raw, and not {raw}"
            )
        if self.table is not None:
            rows, classes = len(self.table), self.table.classes
            self._require(own.rows == rows, ROOT, f"it has {own.rows} rows, and not {rows}")
            self._require(
                own.classes == classes, ROOT, "its classes are not those of its row table"
            )
            labels = self.table.labels
            stored = (labels.shape[1:], labels.dtype.name) if not are_classes(labels) else None
            same = stored == (own.label and (own.label.shape, own.label.dtype))
            self._require(same, ROOT, "its labels are of another kind than its row table's")

    def _recipe(self) -> None:
        for name, field in self.attributes.fields.items():
            codec = self.attributes.declared[name].stored_as.name
            reason = f"{name} has codec {field.codec}, and {codec} in its recipe"
            self._require(field.codec == codec, ROOT, reason)
        summed = set(filter(self._is_summed, self.attributes.fields))
        described = self.attributes.mean.keys() | self.attributes.std.keys()
        self._require(described <= summed, ROOT, "it has the mean of a field without images")

    def _is_summed(self, name: str) -> bool:
        field = self.attributes.fields[name]
        return is_summed(self.attributes.declared[name], RowShape(field.shape, field.dtype))

    # --- rows -----------------------------------------------------------------------------------

    def _checked(self, name: str) -> bytes:
        try:
            return self.version.verify(name, self._read(name))
        except DamageError:
            raise self._flaw(name, "its checksum does not hold") from None

    def _row_table(self) -> bytes:
        return self._checked(ROW_TABLE)

    @functools.cached_property
    def _hole_keys(self) -> Mapping[int, str]:
        """Row -> key of every hole."""
        data = self._checked(HOLES)
        try:
            holes = parse_holes(data, "it")
        except StoreError as error:
            raise self._flaw(HOLES, str(error)) from None
        inside = all(0 <= row < self.attributes.rows for row in holes)
        self._require(inside, HOLES, "it names rows that do not exist")
        return {row: key for row, (key, _) in holes.items()}

    def _holes(self) -> None:
        holes = len(self._hole_keys)
        reason = f"it has {self.attributes.holes} holes, and {HOLES} has {holes}"
        self._require(self.attributes.holes == holes, ROOT, reason)
        if self.table is not None:
            named = self.table.removed <= self._hole_keys.keys()
            self._require(named, HOLES, "it lacks removed samples")

    def _valid(self) -> None:
        valid = self._small("valid", small_layout((self.attributes.rows,), "bool", False))
        same = np.flatnonzero(~valid).tolist() == sorted(self._hole_keys)
        self._require(same, "valid/c/0", "it marks other holes than the list of them")

    def _keys(self) -> None:
        """Check keys chunk by chunk, since millions of them need not be in memory at once."""
        for number, start in enumerate(range(0, self.attributes.rows, KEYS_PER_CHUNK)):
            with contextlib.suppress(_CheckAborted):
                self._key_chunk(
                    number, range(start, min(start + KEYS_PER_CHUNK, self.attributes.rows))
                )

    def _key_chunk(self, number: int, rows: range) -> None:
        name, count = f"key/c/{number}", min(self.attributes.rows, KEYS_PER_CHUNK)
        try:
            keys = decode_strings(self._read(name), "it", count)[: len(rows)].tolist()
        except DamageError as error:
            raise self._flaw(name, str(error)) from None
        if self.table is not None:
            same = keys == list(self.table.keys[rows.start : rows.stop])
            self._require(same, name, "its keys are not those of the row table")
        holes = ((row - rows.start, key) for row, key in self._hole_keys.items() if row in rows)
        same = all(keys[place] == key for place, key in holes)
        self._require(same, name, "its keys are not those of the list of holes")

    @functools.cached_property
    def _label_values(self) -> np.ndarray:
        """Labels, decoded with the dtype that fits their bytes: their document may be wrong."""
        first = f"label/{label_layouts(self.attributes)[0].object_name(0)}"
        try:
            layout = label_layout(self.attributes, self._read(first))
        except DamageError as error:
            raise self._flaw(first, str(error)) from None
        return self._small("label", layout)

    def _labels(self) -> None:
        labels, layout = self._label_values, label_layouts(self.attributes)[0]
        first = f"label/{layout.object_name(0)}"
        known = not are_classes(labels) or bool(labels.min() >= -1)
        self._require(known, first, "it has labels below -1")
        if self.table is None:
            return
        wrong = differ(labels, self.table.labels)
        if has_labels_with_samples(self.table):
            wrong = np.zeros_like(wrong)
        removed = list(self.table.removed)
        wrong[removed] = has_label(labels[removed])
        for number in dict.fromkeys((np.flatnonzero(wrong) // layout.chunk_shape[0]).tolist()):
            name = f"label/{layout.object_name(number)}"
            self._flaw(name, "its labels are not those of the row table")

    # --- shards ---------------------------------------------------------------------------------

    def _shard_table(self, array: str) -> None:
        layout = self.version.arrays[array][1]
        table = self._small(f"shards/{array}", small_layout((layout.objects, 2), "uint64"))
        total, stored = sum(table[:, 0].tolist()), self.attributes.fields[array].stored
        if total != stored:
            sizes = self.version.folder.sizes(array)
            listed = sum(sizes.get(name, 0) for name in self.contents.shards[array])
            name = ROOT if listed == total else f"shards/{array}/c/0/0"
            raise self._flaw(
                name, f"{array} has {stored} bytes by {ROOT}, and {total} by its table"
            )

    def _sums(self, array: str) -> None:
        if not self._is_summed(array) or any(name.startswith("valid/") for name in self.flaws):
            return
        sums = self._small(f"{SUMS}/{array}", self.version.sums_layout(array))
        try:
            mismatch = sums_mismatch(self.version, array, sums)
        except PrecacheError:
            return  # an object that they are compared with is flawed
        self._require(not mismatch, f"{SUMS}/{array}/c/0/0", mismatch)

    # --- documents ------------------------------------------------------------------------------

    def _documents(self) -> None:
        expected = array_documents(
            self.attributes,
            self._label_dtype(),
            *map(self._nbytes, (ROW_TABLE, HOLES)),
        )
        for array, document in expected.items():
            name = f"{array}/{ROOT}"
            with contextlib.suppress(_CheckAborted):
                same = _same(self._json(name), document)
                self._require(same, name, "it does not agree with its version's document")

    def _label_dtype(self) -> str:
        with contextlib.suppress(_CheckAborted):
            return self._label_values.dtype.name
        if self.table is not None:
            return narrow(self.table.labels).dtype.name
        dtype = self._json(f"label/{ROOT}").get("data_type")
        dtypes = [layout.dtype for layout in label_layouts(self.attributes)]
        return dtype if dtype in dtypes else dtypes[0]

    def _nbytes(self, name: str) -> int:
        """Size of an object; if it is flawed, the size that its document has."""
        if name not in self.flaws:
            return self.version.folder.size(name) or 0
        with contextlib.suppress(_CheckAborted, KeyError, IndexError, TypeError):
            return int(self._json(f"{name.partition('/')[0]}/{ROOT}")["shape"][0])
        return 0


def _same(one: Json, other: Json) -> bool:
    """Compare two documents as JSON, since Python takes false for 0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def has_labels_with_samples(table: RowTable) -> bool:
    """Return whether labels may have come with the samples, as from a Python dataset.

    The table says if a request gave others, and has no labels if they come with samples, which can
    only be class numbers. Samples of a Python dataset have no size and no time. Rows of a Parquet
    file can look the same, but their etag is an XXH3-64.
    """
    if table.labels_override or not are_classes(table.labels):
        return False
    if (table.sizes >= 0).any() or (table.mtimes >= 0).any():
        return False
    if has_label(table.labels).any():
        return False
    etags = {etag for row, etag in enumerate(table.etags) if row not in table.removed}
    return all(etag and not _DIGEST.fullmatch(etag) for etag in etags)
