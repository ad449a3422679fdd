"""The record of a source: its samples as they were listed last, and their contents as read last.

A file may be rewritten without another size and time. Its ctime shows that, but `chmod`, links and
copies change it, too. So a sample of another ctime is read, and its content decides: if it is what
it was, the sample keeps its identity; if not, the sample gets an identity of its own, the hash of
its content. The record maps that to what is listed, so that the next listing reads nothing. It lies
beside the indexes of sources in a store and is not trusted for more: without it, or if it is
damaged, samples go by size and time.
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
from precache.store.row_table import RowTable, read_columns, record_name
from precache.units import size as in_units
from precache_workers.planning.content_reader import ContentReader, expected_sizes
from precache_workers.planning.row_placement import OWN, Identity, are_few, with_identities

_COLUMNS = {
    "key": "string", "size": "int64", "mtime_ns": "int64", "etag": "string", "ctime_ns": "int64",
    "content": "string", "known_mtime_ns": "int64", "known_etag": "string",
}  # fmt: skip
"""Columns of a record: samples as listed, their contents (empty if they were not read), and their
identities in row tables."""

FEW = 5
"""Samples that may differ by their ctimes alone without a line about them."""


def read_record(store: Folder, source: str) -> Any:
    """Read the record of a source as an Arrow table; None if there is none, or it is damaged."""
    name = record_name(source)
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
    """

    table: RowTable
    listed: RowTable
    ctimes: np.ndarray
    contents: Mapping[int, str] = field(default_factory=dict)
    record: Any = None
    places: np.ndarray | None = None

    def with_identities(self, restored: Mapping[str, tuple[Identity, str]]) -> RecalledListing:
        """Give samples other identities and contents, by their keys."""
        if not restored:
            return self
        row_of = {key: row for row, key in enumerate(self.table.keys) if key in restored}
        rows = {row: restored[key] for key, row in row_of.items()}
        contents = {**self.contents, **{row: content for row, (_, content) in rows.items()}}
        identities = {row: identity for row, (identity, _) in rows.items()}
        table = with_identities(self.table, identities)
        return replace(self, table=table, contents=contents)

    @property
    def record_name(self) -> str:
        """Name of the record in the store."""
        return record_name(self.listed.source)

    def new_record(self, content_of: Callable[[], Mapping[str, str]] | None = None) -> bytes | None:
        """Return the record of this listing; None if the earlier one says the same.

        Parameters
        ----------
        content_of
            Returns contents of samples by key, called if some are still unknown.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        listed, table = self.listed, self.table
        etags, known_etags = (pa.array(t.etags, pa.string()) for t in (listed, table))
        other = _bools(pc.not_equal(etags, known_etags)) | (listed.mtimes != table.mtimes)
        kept = (self.ctimes >= 0) | other  # of others, the listing alone says all
        places = self._places()
        contents = self._contents(places)
        fresh = bool(self.contents) or bool((kept & (places < 0)).any())
        unknown = kept & _bools(pc.equal(contents, ""))
        if content_of is not None and unknown.any():
            of_key = content_of()
            values = contents.to_pylist()
            for row in np.flatnonzero(unknown).tolist():
                values[row] = of_key.get(table.keys[row], "")
                fresh = fresh or values[row] != ""
            contents = pa.array(values, pa.string())
        if not fresh:
            return None
        arrays = (
            pa.array(listed.keys, pa.string()), pa.array(listed.sizes), pa.array(listed.mtimes),
            etags, pa.array(self.ctimes), contents, pa.array(table.mtimes), known_etags,
        )  # fmt: skip
        new = pa.table(dict(zip(_COLUMNS, arrays, strict=True)))
        new = new if kept.all() else new.filter(pa.array(kept))
        return _serialised(pa.concat_tables([new, *self._absent(arrays[0])]))

    def _places(self) -> np.ndarray:
        return np.full(len(self.table), -1) if self.places is None else self.places

    def _contents(self, places: np.ndarray) -> Any:
        """Return the known content of each sample, as an Arrow array; empty where it is unknown."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.record is None:
            contents = pa.array([""] * len(places), pa.string())
        else:
            at = pa.array(places, mask=places < 0)
            contents = pc.fill_null(_chunk(self.record["content"].take(at)), "")
        if not self.contents:
            return contents
        values = contents.to_pylist()
        for row, content in self.contents.items():
            values[row] = content
        return pa.array(values, pa.string())

    def _absent(self, keys: Any) -> list[Any]:
        """Return the samples of the earlier record that are not listed, as they may come back."""
        import pyarrow.compute as pc

        if self.record is None:
            return []
        rows = self.record.filter(pc.invert(pc.is_in(self.record["key"], value_set=keys)))
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
    import pyarrow as pa
    import pyarrow.compute as pc

    ctimes = np.full(len(listing), -1) if ctimes is None else ctimes
    if record is None:
        return RecalledListing(listing, listing, ctimes)
    places = _find(record["key"], listing.keys)
    has = places >= 0
    at = np.where(has, places, 0)

    def numbers(name: str) -> np.ndarray:
        values: np.ndarray = record[name].to_numpy()[at]
        return values

    etags = pa.array(listing.etags, pa.string())
    same_size = has & (numbers("size") == listing.sizes)
    same_etag = _bools(pc.equal(_taken(record, "etag", at), etags))
    alike = same_size & same_etag & (numbers("mtime_ns") == listing.mtimes)
    before = numbers("ctime_ns")
    current = alike & ((before == ctimes) | (before < 0) | (ctimes < 0))
    stale = alike & ~current
    # The limit still refuses what is too large: nothing of it was stored.
    settled = stale & (ignore_ctime | (listing.sizes > most_bytes))
    stale &= ~settled
    known_mtimes, known_etags = numbers("known_mtime_ns"), _taken(record, "known_etag", at)
    other = (known_mtimes != listing.mtimes) | ~_bools(pc.equal(known_etags, etags))

    def known(rows: np.ndarray) -> dict[int, Identity]:
        return {int(row): (int(known_mtimes[row]), known_etags[int(row)].as_py()) for row in rows}

    # Of an interrupted build the record has no contents.
    unknown = np.flatnonzero(stale & _bools(pc.equal(_taken(record, "content", at), "")))
    of_versions = stored(with_identities(listing, known(unknown)), unknown) if len(unknown) else {}
    unused = np.setdiff1d(unknown, list(of_versions))
    current[unused], stale[unused] = True, False
    touched = np.flatnonzero(same_size & ~alike)
    if not are_few(expected_sizes(listing, touched)):  # the build reads them
        touched = touched[:0]
    new = np.flatnonzero(~alike & (ctimes >= 0) & (listing.sizes <= most_bytes))
    of_earlier = earlier(listing, new) if len(new) else {}
    _announce(listing, np.flatnonzero(stale), read.say)
    rows = np.union1d(np.flatnonzero(stale), touched)
    rows = np.union1d(rows, np.array(list(of_earlier), np.int64))
    contents = dict(zip(rows.tolist(), read(listing, rows.tolist()), strict=True))
    recorded = _taken(record, "content", at[rows]).to_pylist()
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
        record,
        np.where(exact, places, -1),
    )


def _announce(listing: RowTable, stale: np.ndarray, say: Callable[[str], None]) -> None:
    count = len(stale)
    if count > max(FEW, 0.01 * len(listing)):
        nbytes = in_units(int(expected_sizes(listing, stale).sum()))
        say(
            f"{count:,} of {len(listing):,} samples have the size and time that they had, but "
            f"another ctime, as after chmod, links or copies: they are read ({nbytes}), and their "
            "content decides; --ignore-ctime takes them as unchanged"
        )


def _find(known: Any, keys: Sequence[str]) -> np.ndarray:
    """Return the place of each key among the known ones, -1 where it has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted, count = pa.array(keys, pa.string()), len(keys)
    known = _chunk(known)
    if len(known) >= count and known[:count].equals(wanted):
        return np.arange(count)
    places: np.ndarray = pc.fill_null(pc.index_in(wanted, value_set=known), -1).to_numpy()
    return places.astype(np.int64)


def _taken(record: Any, column: str, places: np.ndarray) -> Any:
    import pyarrow as pa

    return _chunk(record[column].take(pa.array(places)))


def _chunk(column: Any) -> Any:
    """Return a column as one Arrow array."""
    import pyarrow as pa

    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _bools(array: Any) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.astype(np.bool_)


def _serialised(table: Any) -> bytes:
    """Serialise a record: a Parquet file after its XXH3-128 digest."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    few = ["etag", "known_etag", "ctime_ns"]
    pq.write_table(table, sink, compression="zstd", use_dictionary=few, write_statistics=False)
    data = sink.getvalue()
    return xxhash.xxh3_128_digest(data) + data
