"""Contents of a source's samples: recognise samples of a listing that a store knows.

A listing identifies a sample by size, time and etag. None of them need change with its content, or
its content with them: files are rewritten in place, touched, linked, copied. So content decides
where it is in doubt, and a sample keeps the identity under which a store knows its content. If its
listed identity stands for another content, it gets one of its own, which names its content.

A store knows contents by its versions, finished or begun. A record of the source, which lies beside
the indexes of sources, has the identity that each listed sample got, and the state of its file, a
digest of ctime and inode number: a sample of the same state is not read. The record is not trusted
for more: without it, samples that a version has are read.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from precache.errors import ChoiceError
from precache.storage.base import Folder
from precache.store.columns import AT_ONCE, Texts, arrow_of, numbers_of
from precache.store.commit_log import short
from precache.store.row_table import RowTable, digests_of, record_name
from precache.units import size as in_units
from precache_workers.planning.content_reader import ContentReader, DatasetReader, with_label
from precache_workers.planning.stored_versions import UNREADABLE, stored_versions
from precache_workers.sources.containers import read_columns
from precache_workers.sources.dataset import DatasetSource

_COLUMNS = {
    "key": "string", "size": "int64", "mtime_ns": "int64", "etag": "string", "file_state": "int64",
    "known_mtime_ns": "int64", "known_etag": "string",
}  # fmt: skip
"""Columns of a record: samples as listed, and their identities in row tables."""

OWN = " with content "
"""Between an etag as listed and a content, in the etag of a sample that has its own identity."""

FEW = 5
"""Samples that may differ by the states of their files alone without a line about them."""

SPOTS = 4
"""Samples that are read although they count as unchanged."""

MOST_TOUCHED, MOST_TOUCHED_BYTES = 4096, 256 << 20
"""Limits, in number and bytes, of samples of another time that are read while listing; more are
left to the build."""


@dataclass(frozen=True)
class RecalledListing:
    """A listing whose samples have the identities by which a store knows them.

    Attributes
    ----------
    table
        The listing with these identities.
    listed
        As it was listed.
    file_states
        States of files for which the identities hold.
    record
        The record before.
    places
        Row -> place in that record, -1 where it has not the sample as it is now.
    inputs
        As in `record_name`.
    """

    table: RowTable
    listed: RowTable
    file_states: np.ndarray
    record: Any
    places: np.ndarray
    inputs: str = ""

    def new_record(self) -> tuple[str, bytes] | None:
        """Return the record of this listing, its name and a Parquet file after its XXH3-128 digest;
        None if the earlier one says the same."""
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        listed, table = self.listed, self.table
        other = ~listed.etags.same(table.etags) | (listed.mtimes != table.mtimes)
        kept = (self.file_states >= 0) | other  # of others, the listing alone says all
        if not (kept & (self.places < 0)).any():
            return None
        absent = self.record
        if len(absent):
            there = pc.is_in(absent["key"].cast(pa.large_string()), value_set=listed.keys.plain)
            absent = absent.filter(pc.invert(there))  # which may come back
        columns = (
            listed.keys, listed.sizes, listed.mtimes, listed.etags, self.file_states, table.mtimes,
            table.etags,
        )  # fmt: skip
        few, sink = ["etag", "known_etag", "file_state"], io.BytesIO()
        with pq.ParquetWriter(
            sink, absent.schema, compression="zstd", use_dictionary=few, write_statistics=False
        ) as writer:
            for start in range(0, len(kept), AT_ONCE):  # no column is copied as a whole
                some = slice(start, start + AT_ONCE)
                part = _table(column[some] for column in columns)
                writer.write_table(part if kept[some].all() else part.filter(arrow_of(kept[some])))
            if len(absent) <= len(kept):
                writer.write_table(absent)
        data = sink.getvalue()
        return record_name(listed.source, self.inputs), xxhash.xxh3_128_digest(data) + data


def read_record(store: Folder, source: str, inputs: str = "") -> Any:
    """Read the record of a source as an Arrow table, empty if there is none, or it is damaged."""
    data = store.get(record_name(source, inputs)) or b""
    if xxhash.xxh3_128_digest(data[16:]) == data[:16]:
        with contextlib.suppress(LookupError, ValueError):
            record = read_columns(data[16:], _COLUMNS).combine_chunks()
            record.validate(full=True)
            return record
    return _table([Texts([])] * len(_COLUMNS))


def recall(
    store: Folder,
    listing: RowTable,
    file_states: np.ndarray | None,
    read: ContentReader,
    *,
    most_bytes: int,
    ignore_ctime: bool = False,
    read_all: bool = False,
    read_touched: bool = True,
    inputs: str = "",
) -> RecalledListing:
    """Give the samples of a listing the identities by which a store knows them.

    Read are those of which it has a content for the same size, time and etag, but another state.

    Parameters
    ----------
    file_states
        As in `Listing`.
    most_bytes
        Size limit of a sample that is fetched: nothing of a larger one was stored.
    ignore_ctime
        Take samples for unchanged that differ by the states of their files alone.
    read_all, read_touched
        Read all samples; those of another time or etag, too, unless they are many.
    inputs
        As in `record_name`.
    """
    record = read_record(store, listing.source, inputs)
    file_states = np.full(len(listing), -1) if file_states is None else file_states
    places = Texts(record["key"]).find(listing.keys)
    before = np.append(numbers_of(record["file_state"]), -1)[places]
    recorded = _known_of(record, None, listing, np.flatnonzero(places >= 0))
    same = np.zeros(len(listing), np.bool_)
    same[recorded.rows[recorded.alike]] = True
    exact = same & ((before == file_states) | (before < 0) | (file_states < 0))
    stale = same & ~exact
    settled = stale & (ignore_ctime | (listing.sizes > most_bytes))
    wanted = np.flatnonzero((~exact & ~settled) | read_all)
    # Of another state, an identity by the record alone may stand for another content.
    known = [replace(recorded, alike=recorded.alike & (exact | settled)[recorded.rows])]
    is_damaged = False
    if len(wanted):
        deep = read_all or bool((file_states[wanted] >= 0).any())
        as_recorded = _with_identities(listing, [recorded], {}, exact, file_states, exact)
        for stored in stored_tables(store, listing.source, read.brings_labels, deep):
            if stored is None:
                is_damaged = True
                continue
            part = _known_of(*stored, listing, wanted)
            known.append(part.alike_by(as_recorded))
    alike, touched = _with_content(known, listing)
    alike &= ~exact & ~settled & (file_states >= 0) & (listing.sizes <= most_bytes)
    alike &= (not ignore_ctime) | (len(record) > 0)
    touched &= ~exact & read_touched
    sizes = listing.expected_sizes(np.flatnonzero(touched))
    few = len(sizes) <= MOST_TOUCHED and sizes.sum() <= MOST_TOUCHED_BYTES
    unknown = stale & ~settled & ~alike & (listing.sizes <= most_bytes) & is_damaged
    unsure = alike & (stale | (len(record) == 0))
    if unsure.sum() > max(FEW, 0.01 * len(listing)):
        _announce(listing, np.flatnonzero(unsure), read.say, is_lost=not len(record))
    rows = np.flatnonzero(alike | unknown | (touched & few) | read_all).tolist()
    found = dict(zip(rows, read(listing, rows), strict=True)) if rows else {}
    return RecalledListing(
        _with_identities(listing, known, found, alike, file_states, unknown),
        listing,
        np.where(settled, before, file_states),
        record,
        np.where(exact | settled, places, -1),
        inputs,
    )


# --- what is known ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """Samples of a listing that a record or version has, of the same keys and sizes.

    Attributes
    ----------
    rows
        Rows of the listing.
    alike
        Whether they were listed with the same time and etag.
    contents, mtimes, etags
        Their contents, empty if unknown, and the identities by which row tables have them.
    """

    rows: np.ndarray
    alike: np.ndarray
    contents: Texts
    mtimes: np.ndarray
    etags: Texts

    def alike_by(self, as_recorded: RowTable) -> _Known:
        """Return these samples, also alike where a record has these identities."""
        same = self.mtimes == as_recorded.mtimes[self.rows]
        same &= self.etags.same(as_recorded.etags.take(self.rows))
        return replace(self, alike=self.alike | same)


def _known_of(table: Any, contents: Texts | None, listing: RowTable, rows: np.ndarray) -> _Known:
    """Find samples of a listing in a table with the columns of a record, and their contents."""
    places = Texts(table["key"]).find(listing.keys.take(rows))
    rows, places = rows[places >= 0], places[places >= 0]
    same = numbers_of(table["size"])[places] == listing.sizes[rows]
    rows, places = rows[same], places[same]
    table = table.take(arrow_of(places))
    alike = numbers_of(table["mtime_ns"]) == listing.mtimes[rows]
    alike &= Texts(table["etag"]).same(listing.etags.take(rows))
    own = Texts.repeated([""], [len(rows)]) if contents is None else contents.take(places)
    return _Known(rows, alike, own, numbers_of(table["known_mtime_ns"]), Texts(table["known_etag"]))


def stored_tables(
    store: Folder, source: str, brings: bool, deep: bool
) -> Iterator[tuple[Any, Texts] | None]:
    """Yield tables with the columns of a record of the versions of a source, and the contents of
    their samples, the latest first; None for one that cannot be read.

    Parameters
    ----------
    deep
        Also those that were begun, and earlier ones.
    """
    versions = [*stored_versions(store, source, begun=deep)]
    committed = [stored for stored in versions if stored.begun is None]
    begun = versions[len(committed) :]
    for stored in (*committed[:1], *begun, *committed[1:]) if deep else committed[:1]:
        try:
            table, halves, *_ = stored.read_rows()
            contents = Texts(digests_of(halves))
            if brings and table.labels_with_samples:
                contents = _labelled(contents, stored.version.labels)
        except UNREADABLE:
            yield None
            continue
        if brings and not table.labels_with_samples:
            contents = Texts.repeated([""], [len(table)])
        yield as_record(table), contents


def as_record(table: RowTable) -> Any:
    """Return a row table with the columns of a record."""
    import pyarrow.compute as pc

    listed = Texts(pc.replace_substring_regex(table.etags.plain, f"{OWN}.*", ""))
    mtimes, file_states = table.mtimes, np.full(len(table), -1)
    return _table((table.keys, table.sizes, mtimes, listed, file_states, mtimes, table.etags))


def _labelled(contents: Texts, labels: np.ndarray) -> Texts:
    pairs = zip(contents, labels.tolist(), strict=True)
    return Texts([content and with_label(content, label) for content, label in pairs])


# --- identities ---------------------------------------------------------------------------------


def _with_content(known: Sequence[_Known], listing: RowTable) -> tuple[np.ndarray, np.ndarray]:
    """Find samples of which a content is known as they are listed; and of another time or etag."""
    alike, touched, settled = (np.zeros(len(listing), np.bool_) for _ in range(3))
    for part in known:
        full = ~part.contents.is_blank
        alike[part.rows[part.alike & full]] = True
        touched[part.rows[~part.alike & full]] = True
        settled[part.rows[part.alike]] = True
    return alike, touched & ~settled


def _with_identities(
    listing: RowTable,
    known: Sequence[_Known],
    found: Mapping[int, str],
    alike: np.ndarray,
    file_states: np.ndarray,
    unknown: np.ndarray,
) -> RowTable:
    """Give samples the times and etags by which row tables know them.

    Those that were read have the ones of their content, others the newest ones of a sample that was
    listed as they are.

    Parameters
    ----------
    found
        Row -> content.
    alike
        Rows of which a content was known as they are listed, so that one that cannot be read is
        another.
    unknown
        Rows whose listed identity stands for a content that is not known any more.
    """
    as_listed, by_content = dict[int, tuple[int, str]](), dict[int, tuple[int, str]]()
    others = {*np.flatnonzero(unknown).tolist()}
    left = np.ones(len(listing), np.bool_)
    for part in known:
        new = part.alike & left[part.rows]
        left[part.rows[new]] = False
        other = part.mtimes != listing.mtimes[part.rows]
        other |= ~part.etags.same(listing.etags.take(part.rows))
        for place in np.flatnonzero(new & other).tolist():
            as_listed[int(part.rows[place])] = int(part.mtimes[place]), part.etags[place]
        read = np.isin(part.rows, list(found)) & ~part.contents.is_blank
        for place in np.flatnonzero(read).tolist():
            row = int(part.rows[place])
            if part.contents[place] == found[row]:
                by_content.setdefault(row, (int(part.mtimes[place]), part.etags[place]))
            elif part.alike[place]:
                others.add(row)
    for row, content in found.items():
        if row not in by_content and (content or alike[row] or row in others):
            etag = listing.etags[row]
            own = f"{etag}{OWN}{content or f'of state {file_states[row]}'}"
            by_content[row] = int(listing.mtimes[row]), own if row in others else etag
    identities = as_listed | by_content
    if not identities:
        return listing
    mtimes = listing.mtimes.copy()
    mtimes[list(identities)] = [mtime for mtime, _ in identities.values()]
    etags = listing.etags.replaced({row: etag for row, (_, etag) in identities.items()})
    return replace(listing, mtimes=mtimes, etags=etags)


def _announce(
    listing: RowTable, rows: np.ndarray, say: Callable[[str], None], *, is_lost: bool
) -> None:
    """Print that samples are read whose size and time are known."""
    sizes = listing.sizes[rows]
    size = f" ({in_units(int(sizes.sum()))})" if (sizes >= 0).all() else ""
    why = (
        "and the store has lost its record of their ctimes"
        if is_lost
        else "but another ctime or inode, as after chmod, links or copies"
    )
    say(
        f"{len(rows):,} of {len(listing):,} samples have the size and time that they had, "
        f"{why}: they are read{size}, and their content decides; --ignore-ctime takes them as "
        "unchanged"
    )


# --- Python datasets ----------------------------------------------------------------------------


def note_of_held_data(store: Folder, source: DatasetSource, table: RowTable) -> tuple[str, ...]:
    """Return a line if what a dataset holds changed since the latest version, so that all samples
    are read."""
    latest = next(stored_versions(store, table.source), None)
    if latest is None or not table.etags[0].startswith(source.etag):
        return ()
    try:
        stored, *_ = latest.read_rows()
    except UNREADABLE:
        return ()
    before, now = ({etag.partition(OWN)[0] for etag in of.etags} for of in (stored, table))
    if now <= before or not any(etag.startswith(source.etag) for etag in before):
        return ()
    line = (
        f"{source.factory}: what its attributes hold, or a file that they name, changed since "
        f"version {short(latest.folder.name)}: all {len(table):,} samples are read and compared by "
        "content, and those that are the same are not decoded again. A method fingerprint(i) of "
        "the dataset spares reading them"
    )
    return (line,)


def require_spots(store: Folder, read: DatasetReader, table: RowTable) -> None:
    """Read a few samples that count as unchanged.

    So data of another folder are seen, which the same code reads by relative paths. A sample of
    which two reads differ says nothing.

    Raises
    ------
    SourceError
        One differs from the latest version that reads the same parts of samples.
    """
    latest = next(stored_versions(store, table.source), None)
    inputs = () if latest is None else latest.attributes.recipe.fields.items()
    if latest is None or tuple((n, field.input) for n, field in inputs) != read.source.fields:
        return
    stored = next(stored_tables(store, table.source, read.brings_labels, deep=False), None)
    if stored is None:
        return
    record, contents = stored
    rows = np.unique(np.linspace(0, len(table) - 1, SPOTS).astype(int)).tolist()
    places = Texts(record["key"]).find(table.keys.take(np.array(rows)))
    etags = Texts(record["known_etag"])
    for row, place in zip(rows, places.tolist(), strict=True):
        if place < 0 or not contents[place] or etags[place] != table.etags[row]:
            continue
        first, second = (read(table, [row]) for _ in range(2))
        if first != second:
            return
        if first[0] not in ("", contents[place]):
            raise ChoiceError(
                f"sample {table.keys[row]} of {read.source.factory} is not what version "
                f"{short(latest.folder.name)} has of it, although the code is the same: its data "
                "changed, or it reads by relative paths in another folder. Build with --compare, "
                "which reads all samples, or give the dataset a method fingerprint(i)",
                ways=[("--compare",)],
            )


# --- files --------------------------------------------------------------------------------------


def _table(columns: Iterable[np.ndarray | Texts]) -> Any:
    """Return the columns of a record as an Arrow table."""
    import pyarrow as pa

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in _COLUMNS.items()])
    arrays = [arrow_of(c) if isinstance(c, np.ndarray) else c.plain for c in columns]
    pairs = zip(arrays, schema, strict=True)
    return pa.Table.from_arrays([array.cast(field.type) for array, field in pairs], schema=schema)
