"""The record of a source: its samples as they were listed last, and their contents as read last.

A file may be rewritten without another size and time. Its ctime shows that, but `chmod`, links and
copies change it, too. So a sample of another ctime is read, and its content decides: if it is what
it was, the sample keeps its identity; if not, the sample gets an identity of its own, the hash of
its content. The record maps that to what is listed, so that the next listing reads nothing. It lies
beside the indexes of sources in a store and is not trusted for more: without it, or if it is
damaged, samples that a version has are read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from precache.errors import StoreError
from precache.storage.base import Folder
from precache.store.columns import Texts, arrow_of, numbers_of
from precache.store.row_table import RowTable, read_columns, record_name
from precache.units import size as in_units
from precache_workers.planning.content_reader import ContentReader
from precache_workers.planning.row_placement import OWN, Identity, are_few, with_identities

_COLUMNS = {
    "key": "string", "size": "int64", "mtime_ns": "int64", "etag": "string", "ctime_ns": "int64",
    "content": "string", "known_mtime_ns": "int64", "known_etag": "string",
}  # fmt: skip
"""Columns of a record: samples as listed, their contents (empty if they were not read), and their
identities in row tables."""

FEW = 5
"""Samples that may differ by their ctimes alone without a line about them."""


def read_record(store: Folder, source: str, inputs: str = "") -> Any:
    """Read the record of a source as an Arrow table; None if there is none, or it is damaged."""
    name = record_name(source, inputs)
    data = store.get(name) or b""
    if xxhash.xxh3_128_digest(data[16:]) != data[:16]:
        return None
    try:
        record = read_columns(data[16:], _COLUMNS, store.path(name)).combine_chunks()
        record.validate(full=True)
    except (StoreError, ValueError):
        return None
    return record if len(record) else None


Stored = Callable[[RowTable, np.ndarray], Mapping[int, Collection[str]]]
"""Contents that versions have of rows of a listing, by row."""


@dataclass(frozen=True)
class RecalledListing:
    """A listing whose samples have the identities by which row tables know them.

    Attributes
    ----------
    table
        The listing with these identities.
    listed
        As it was listed.
    ctimes
        Ctimes for which the identities hold.
    contents
        Row -> content, of samples that were read.
    record
        The record before.
    places
        Row -> place in that record, -1 where it has not the sample as it is now.
    inputs
        As in `record_name`.
    """

    table: RowTable
    listed: RowTable
    ctimes: np.ndarray
    contents: Mapping[int, str] = field(default_factory=dict)
    record: Any = None
    places: np.ndarray | None = None
    inputs: str = ""

    def with_identities(self, restored: Mapping[str, tuple[Identity, str]]) -> RecalledListing:
        """Give samples other identities and contents, by their keys."""
        if not restored:
            return self
        found = self.table.keys.find(Texts(restored)).tolist()
        rows = {
            row: of_key for row, of_key in zip(found, restored.values(), strict=True) if row >= 0
        }
        contents = {**self.contents, **{row: content for row, (_, content) in rows.items()}}
        identities = {row: identity for row, (identity, _) in rows.items()}
        table = with_identities(self.table, identities)
        return replace(self, table=table, contents=contents)

    @property
    def record_name(self) -> str:
        """Name of the record in the store."""
        return record_name(self.listed.source, self.inputs)

    def new_record(self, content_of: Callable[[], Mapping[str, str]] | None) -> bytes | None:
        """Return the record of this listing; None if the earlier one says the same.

        Parameters
        ----------
        content_of
            Returns contents of samples by key, called if some are still unknown.
        """
        import pyarrow as pa

        listed, table = self.listed, self.table
        other = ~listed.etags.same(table.etags) | (listed.mtimes != table.mtimes)
        kept = (self.ctimes >= 0) | other  # of others, the listing alone says all
        places = self._places()
        contents = self._contents(places)
        fresh = bool(self.contents) or bool((kept & (places < 0)).any())
        unknown = np.flatnonzero(kept & contents.is_blank)
        if content_of is not None and len(unknown):
            of_key = content_of()
            keys = zip(unknown.tolist(), table.keys.take(unknown), strict=True)
            found = {row: content for row, key in keys if (content := of_key.get(key))}
            contents, fresh = contents.replaced(found), fresh or bool(found)
        if not fresh:
            return None
        arrays = (
            listed.keys.plain, arrow_of(listed.sizes), arrow_of(listed.mtimes), listed.etags.plain,
            arrow_of(self.ctimes), contents.plain, arrow_of(table.mtimes), table.etags.plain,
        )  # fmt: skip
        new = pa.Table.from_arrays(arrays, names=list(_COLUMNS))
        new = new if kept.all() else new.filter(arrow_of(kept))
        return _serialised([new, *self._absent(arrays[0])])

    def _places(self) -> np.ndarray:
        return np.full(len(self.table), -1) if self.places is None else self.places

    def _contents(self, places: np.ndarray) -> Texts:
        """Return the known content of each sample; empty where it is unknown."""
        if self.record is None:
            contents = Texts.repeated([""], [len(places)])
        else:
            known = Texts(self.record["content"])
            contents = known.take(np.maximum(places, 0)).blanked(places < 0)
        return contents.replaced(self.contents)

    def _absent(self, keys: Any) -> list[Any]:
        """Return the samples of the earlier record that are not listed, as they may come back."""
        import pyarrow.compute as pc

        if self.record is None:
            return []
        rows = self.record.filter(
            pc.invert(pc.is_in(self.record["key"].cast(keys.type), value_set=keys))
        )
        return [rows] if len(rows) <= len(keys) else []


def recall(
    record: Any,
    listing: RowTable,
    ctimes: np.ndarray | None,
    read: ContentReader,
    stored: Stored,
    earlier: Stored,
    *,
    most_bytes: int,
    ignore_ctime: bool,
) -> RecalledListing:
    """Give the samples of a listing the identities by which the record knows them.

    Samples of which it knows another ctime are read, unless no version has anything of them; so are
    samples of the same size but another time or etag, unless they are many, and those that it does
    not know as they are, if an earlier version has one of the same key, size, time and etag: old
    times that return need not bring the old content.

    Parameters
    ----------
    ctimes
        As in `Listing`.
    stored
        Finds contents that the latest version has, or one that was begun.
    earlier
        Finds contents that committed versions have.
    most_bytes
        Size limit of a sample that is fetched.
    ignore_ctime
        Take samples for unchanged that differ by their ctimes alone.
    """
    ctimes = np.full(len(listing), -1) if ctimes is None else ctimes
    is_lost, known_before = record is None, record
    record = _of_nothing() if is_lost else record
    places = Texts(record["key"]).find(listing.keys)
    has = places >= 0
    at = np.where(has, places, 0)

    def numbers(name: str) -> np.ndarray:
        return numbers_of(record[name])[at]

    same_size = has & (numbers("size") == listing.sizes)
    same_etag = _taken(record, "etag", at).same(listing.etags)
    alike = same_size & same_etag & (numbers("mtime_ns") == listing.mtimes)
    before = numbers("ctime_ns")
    current = alike & ((before == ctimes) | (before < 0) | (ctimes < 0))
    stale = alike & ~current
    # The limit still refuses what is too large: nothing of it was stored.
    settled = stale & (ignore_ctime | (listing.sizes > most_bytes))
    stale &= ~settled
    known_mtimes, known_etags = numbers("known_mtime_ns"), _taken(record, "known_etag", at)
    other = (known_mtimes != listing.mtimes) | ~known_etags.same(listing.etags)

    def known(rows: np.ndarray) -> dict[int, Identity]:
        return {row: (int(known_mtimes[row]), known_etags[row]) for row in rows.tolist()}

    # Of an interrupted build the record has no contents.
    unknown = np.flatnonzero(stale & _taken(record, "content", at).is_blank)
    of_versions = stored(with_identities(listing, known(unknown)), unknown) if len(unknown) else {}
    unused = np.setdiff1d(unknown, list(of_versions))
    current[unused], stale[unused] = True, False
    touched = np.flatnonzero(same_size & ~alike)
    if not are_few(listing.expected_sizes(touched)):  # the build reads them
        touched = touched[:0]
    new = np.flatnonzero(~alike & (ctimes >= 0) & (listing.sizes <= most_bytes))
    new = new[:0] if is_lost and ignore_ctime else new
    of_earlier = earlier(listing, new) if len(new) else {}
    unsure = np.array(list(of_earlier), np.int64) if is_lost else np.flatnonzero(stale)
    to_read = int(listing.expected_sizes(unsure).sum())
    _announce(listing, unsure, read.say, to_read, is_lost=is_lost)
    rows = np.union1d(np.flatnonzero(stale), touched)
    rows = np.union1d(rows, np.array(list(of_earlier), np.int64))
    contents = dict(zip(rows.tolist(), read(listing, rows.tolist()), strict=True))
    recorded = _taken(record, "content", at[rows])
    keeps = current | settled
    for (row, content), was in zip(contents.items(), recorded, strict=True):
        known_content = same_size[row] and of_versions.get(row, {was}) == {content}
        keeps[row] = bool(content) and known_content
    identities = known(np.flatnonzero(keeps & other))
    returned = [row for row, known_by in of_earlier.items() if {contents[row]} != set(known_by)]
    for row in sorted({*np.flatnonzero(stale).tolist(), *returned}):
        if keeps[row]:
            continue
        own = contents[row] or f"ctime {ctimes[row]}"
        identities[row] = int(listing.mtimes[row]), f"{OWN}{own}"
    exact = (current & (before == ctimes)) | settled
    contents = {row: content for row, content in contents.items() if content}
    return RecalledListing(
        with_identities(listing, identities),
        listing,
        np.where(settled, before, ctimes),
        contents,
        known_before,
        np.where(exact, places, -1),
    )


def _of_nothing() -> Any:
    """Return a record that knows no sample: its one row has an empty key."""
    import pyarrow as pa

    nothing = {"string": Texts([""]).arrow, "int64": arrow_of(np.array([-1]))}
    arrays = [nothing[kind] for kind in _COLUMNS.values()]
    return pa.Table.from_arrays(arrays, names=list(_COLUMNS))


def recall_compared(
    record: Any,
    listing: RowTable,
    kept: RowTable,
    ctimes: np.ndarray,
    compare: Callable[[RowTable, Sequence[int]], RowTable],
    say: Callable[[str], None],
    *,
    ignore_ctime: bool,
    inputs: str,
) -> RecalledListing:
    """Do as `recall` for a Python dataset, whose samples may have other labels as well.

    Parameters
    ----------
    kept
        The listing with the identities by which earlier builds compared the samples.
    compare
        Reads samples, and gives them the identity that their content and label have.
    inputs
        As in `record_name`.
    """
    recalled = RecalledListing(kept, listing, ctimes, inputs=inputs)
    if record is None:
        return recalled
    places = Texts(record["key"]).find(listing.keys)
    at = np.where(places >= 0, places, 0)
    alike = (places >= 0) & _taken(record, "etag", at).same(listing.etags)
    before, known = numbers_of(record["ctime_ns"])[at], _taken(record, "known_etag", at)
    stale = alike & (before != ctimes)
    other = np.flatnonzero(alike & ~known.same(listing.etags)).tolist()
    table = with_identities(kept, {row: (-1, known[row]) for row in other})
    if not ignore_ctime and stale.any():
        rows = np.flatnonzero(stale)
        _announce(listing, rows, say, None)
        table = compare(table, rows.tolist())
    settled = stale & ignore_ctime
    exact = (alike & ~stale) | settled
    return replace(
        recalled,
        table=table,
        ctimes=np.where(settled, before, ctimes),
        record=record,
        places=np.where(exact, places, -1),
    )


def _announce(
    listing: RowTable,
    stale: np.ndarray,
    say: Callable[[str], None],
    nbytes: int | None,
    *,
    is_lost: bool = False,
) -> None:
    """Print that samples are read whose size and time are known, if they are many."""
    count = len(stale)
    size = "" if nbytes is None else f" ({in_units(nbytes)})"
    why = (
        "and the store has lost its record of their ctimes"
        if is_lost
        else "but another ctime, as after chmod, links or copies"
    )
    if count > max(FEW, 0.01 * len(listing)):
        say(
            f"{count:,} of {len(listing):,} samples have the size and time that they had, {why}: "
            f"they are read{size}, and their content decides; --ignore-ctime takes them as "
            "unchanged"
        )


def _taken(record: Any, column: str, places: np.ndarray) -> Texts:
    return Texts(record[column]).take(places)


def _serialised(parts: Sequence[Any]) -> bytes:
    """Serialise tables as a record: a Parquet file after its XXH3-128 digest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in _COLUMNS.items()])
    table = pa.concat_tables([part.cast(schema) for part in parts])
    sink = io.BytesIO()
    few = ["etag", "known_etag", "ctime_ns"]
    pq.write_table(table, sink, compression="zstd", use_dictionary=few, write_statistics=False)
    data = sink.getvalue()
    return xxhash.xxh3_128_digest(data) + data
