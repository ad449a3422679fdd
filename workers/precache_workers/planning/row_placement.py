"""Give the samples of a listing their rows: those that they have in the current version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from precache.errors import DamageError, StorageError, StoreError
from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.labels import no_labels
from precache.store.layout import RowShape
from precache.store.locations import Locations
from precache.store.open import open_own
from precache.store.row_table import REMOVED, RowTable, read_contents
from precache.store.version import ROW_TABLE, Version
from precache_workers.planning.content_reader import ContentReader
from precache_workers.planning.diff import source_changes
from precache_workers.planning.rows import order_rows
from precache_workers.planning.stored_versions import committed_versions, latest_of

Identity = tuple[int, str]
"""Time and etag by which a row table knows a sample."""

OWN = "own:"
"""Beginning of the etag of a sample whose size and time do not tell it from another."""

MOST_TOUCHED, MOST_TOUCHED_BYTES = 4096, 256 << 20
"""Limits, in number and bytes, of samples read while listing; more are left to the build."""

LEAST_KEPT = 0.5
"""Share of a version's samples that a listing must have, or all rows are laid down anew."""


@dataclass(frozen=True)
class Placed:
    """A listing in rows.

    Attributes
    ----------
    rows_per_shard
        Of the version whose rows are kept; None where rows are laid down anew.
    changed
        Changes since that version, in words.
    compactable
        Whether laying rows down anew would place them differently.
    restored
        Key -> identity that a touched sample keeps, and its content.
    """

    table: RowTable
    rows_per_shard: int | None = None
    changed: str = ""
    compactable: bool = False
    restored: Mapping[str, tuple[Identity, str]] = field(default_factory=dict)


def place_rows(
    store: Folder,
    listing: RowTable,
    keep_order: bool,
    compact: bool,
    may_have: Callable[[int, Mapping[str, RowShape]], bool],
    read: ContentReader | None,
) -> Placed:
    """Place the samples of a listing in rows: those of an earlier version, where it has them.

    It is the latest version of this source, or else the current one. A few samples that differ from
    those of that version by their time or etag alone are read: if their content is the same, they
    keep their identity.

    Parameters
    ----------
    compact
        Lay rows down anew, without holes of removed samples.
    may_have
        Whether rows of these shapes may come in shards of so many.
    read
        None for a Python dataset.
    """
    fresh = order_rows(listing, keep_order)
    earlier = latest_of(store, listing.source) or next(committed_versions(store), None)
    if compact or earlier is None:
        return Placed(fresh)
    folder, attributes = earlier
    shapes = {name: RowShape(field.shape, field.dtype) for name, field in attributes.fields.items()}
    if not may_have(attributes.rows_per_shard, shapes):
        return Placed(fresh)
    if attributes.rows_digest == fresh.digest:
        return Placed(fresh, attributes.rows_per_shard)
    try:
        parent = _read_rows(open_own(folder), attributes.source)
    except (DamageError, StorageError, StoreError):
        return Placed(fresh)
    placed = keep_rows(parent, listing, keep_order)
    if placed is None or (keep_order and placed.present_keys != listing.keys):
        return Placed(fresh)
    restored = {}
    if read is not None and (touched := _touched(parent, placed, read.contents)):
        restored = _restored(parent, placed, touched, folder, read)
        placed = with_identities(placed, {row: own for row, (own, _) in restored.items()})
    if placed.digest == attributes.rows_digest:
        parent = placed
    changed = f"Since version {folder.name[:8]}: {source_changes(parent, placed)}"
    compactable = placed.digest != fresh.digest
    of_key = {placed.keys[row]: own for row, own in restored.items()}
    return Placed(placed, attributes.rows_per_shard, changed, compactable, of_key)


def _touched(before: RowTable, now: RowTable, known: Mapping[str, str]) -> list[int]:
    """Find rows whose samples have another time or etag but the same size.

    If they are too many to be read here, these are only those whose content is known, and those
    that had an identity of their own: listed anew, size and time do not tell them from another.
    """
    if before.source != now.source:
        return []
    first = slice(len(before))
    touched = (before.sizes == now.sizes[first]) & ~before.listed_alike(now, first, first)
    rows = np.flatnonzero(touched & before.is_known & ~before.is_removed).tolist()
    needed = [row for row in rows if now.keys[row] in known or before.etags[row].startswith(OWN)]
    others = np.setdiff1d(rows, needed)
    return rows if are_few(now.expected_sizes(others)) else needed


def are_few(sizes: np.ndarray) -> bool:
    """Return whether samples are few enough to be read while listing, by their sizes."""
    return len(sizes) <= MOST_TOUCHED and sizes.sum() <= MOST_TOUCHED_BYTES


def _restored(
    before: RowTable, now: RowTable, touched: Sequence[int], folder: Folder, read: ContentReader
) -> dict[int, tuple[Identity, str]]:
    """Return the identity that touched samples of the same content had before, and the content."""
    data = open_own(folder).read_checked(ROW_TABLE)
    kept = read_contents(data, folder.path(ROW_TABLE))
    return {
        row: ((int(before.mtimes[row]), before.etags[row]), content)
        for row, content in zip(touched, read(now, touched), strict=True)
        if content and content == kept[row]
    }


def with_identities(table: RowTable, identities: Mapping[int, Identity]) -> RowTable:
    """Give some rows of a table other times and etags."""
    if not identities:
        return table
    mtimes = table.mtimes.copy()
    mtimes[list(identities)] = [mtime for mtime, _ in identities.values()]
    etags = table.etags.replaced({row: etag for row, (_, etag) in identities.items()})
    return replace(table, mtimes=mtimes, etags=etags)


def _read_rows(version: Version, source: str) -> RowTable:
    """Read the row table of a version.

    If it is lost, return one with its keys and removed rows alone: samples keep their rows by it.

    Parameters
    ----------
    source
        Of the version, as its attributes have it.
    """
    where = version.folder.path(ROW_TABLE)
    try:
        return RowTable.from_parquet(version.read_checked(ROW_TABLE), where)
    except (DamageError, StorageError, StoreError):
        removed = frozenset(row for row, (_, why) in version.holes.items() if why == REMOVED)
        keys = list(version.keys)
        return RowTable.of_keys(keys, classes=version.classes, removed=removed, source=source)


def keep_rows(parent: RowTable, listing: RowTable, keep_order: bool) -> RowTable | None:
    """Place samples in the rows that they have in `parent`, and append new ones.

    A removed sample leaves a hole; if it returns, it gets the same row.

    Parameters
    ----------
    keep_order
        Whether new samples keep the order of the listing.

    Returns
    -------
    RowTable | None
        None where too few samples of the parent are listed.
    """
    numbers = listing.keys.find(parent.keys)
    blank = numbers < 0
    kept = len(parent) - blank.sum()
    if kept < LEAST_KEPT * (len(parent) - len(parent.removed)) or not kept:
        return None
    # A removed row gets the identity of some other sample here, and loses it below.
    placed = listing.take(np.where(blank, numbers.max(), numbers))
    is_new = np.ones(len(listing), np.bool_)
    is_new[numbers[~blank]] = False
    added = order_rows(listing.take(np.flatnonzero(is_new)), keep_order)
    labels = placed.labels.copy()
    labels[blank] = no_labels(int(blank.sum()), labels)
    return RowTable(
        keys=Texts.joined([parent.keys, added.keys]),
        sizes=np.concatenate([np.where(blank, -1, placed.sizes), added.sizes]),
        mtimes=np.concatenate([np.where(blank, -1, placed.mtimes), added.mtimes]),
        etags=Texts.joined([placed.etags.blanked(blank), added.etags]),
        labels=np.concatenate([labels, added.labels]),
        classes=listing.classes,
        removed=frozenset(np.flatnonzero(blank).tolist()),
        locations=None
        if placed.locations is None or added.locations is None
        else Locations.joined([placed.locations, added.locations]),
        labels_override=listing.labels_override,
        source=listing.source,
    )
