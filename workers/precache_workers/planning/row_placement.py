"""Give the samples of a listing their rows: those that they have in the current version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precache.errors import DamageError, StorageError, StoreError
from precache.storage.base import Folder
from precache.store.labels import no_labels
from precache.store.layout import RowShape
from precache.store.open import open_own_unchecked
from precache.store.row_table import REMOVED, RowTable, read_contents
from precache.store.version import ROW_TABLE, Version
from precache_workers.planning.diff import source_changes
from precache_workers.planning.rows import order_rows
from precache_workers.planning.stored_versions import committed_versions

Contents = Callable[[Sequence[str], Sequence[int], Sequence[str]], Sequence[str]]
"""Content hashes of samples, by their keys, sizes and locations."""

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
    """

    table: RowTable
    rows_per_shard: int | None = None
    changed: str = ""
    compactable: bool = False


def place_rows(
    store: Folder,
    listing: RowTable,
    keep_order: bool,
    compact: bool,
    may_have: Callable[[int, Mapping[str, RowShape]], bool],
    contents: Contents | None,
) -> Placed:
    """Place the samples of a listing in rows: those of the current version, where it has them.

    A few samples that differ from those of that version by their time or etag alone are read: if
    their content is the same, they keep their identity.

    Parameters
    ----------
    compact
        Lay rows down anew, without holes of removed samples.
    may_have
        Whether rows of these shapes may come in shards of so many.
    contents
        Computes XXH3-128 (hex) of samples, empty where one cannot be read; None where identity
        does not follow from content.
    """
    fresh = order_rows(listing, keep_order)
    current = None if compact else next(committed_versions(store), None)
    if current is None:
        return Placed(fresh)
    folder, attributes = current
    shapes = {name: RowShape(field.shape, field.dtype) for name, field in attributes.fields.items()}
    if not may_have(attributes.rows_per_shard, shapes):
        return Placed(fresh)
    if attributes.rows_digest == fresh.digest:
        return Placed(fresh, attributes.rows_per_shard)
    try:
        parent = _read_rows(open_own_unchecked(folder))
    except (DamageError, StorageError, StoreError):
        return Placed(fresh)
    placed = keep_rows(parent, listing, keep_order)
    if placed is None or (keep_order and list(placed.present_keys()) != list(listing.keys)):
        return Placed(fresh)
    if contents is not None and (touched := _touched(parent, placed)):
        placed = _restore_identities(parent, placed, touched, folder, contents)
    if placed.digest == attributes.rows_digest:
        parent = placed
    changed = f"Since version {folder.name[:8]}: {source_changes(parent, placed)}"
    compactable = placed.digest != fresh.digest
    return Placed(placed, attributes.rows_per_shard, changed, compactable)


def _touched(before: RowTable, now: RowTable) -> list[int]:
    """Find rows whose samples have another time or etag but the same size; none if they are too
    many to be read here."""
    first = slice(len(before))
    sizes = now.sizes[first]
    touched = (before.sizes == sizes) & ~before.listed_alike(now, first, first)
    rows = np.flatnonzero(touched & (sizes >= 0))
    few = len(rows) <= MOST_TOUCHED and sizes[rows].sum() <= MOST_TOUCHED_BYTES
    return [row for row in rows.tolist() if row not in before.removed] if few else []


def _restore_identities(
    before: RowTable, now: RowTable, touched: Sequence[int], folder: Folder, contents: Contents
) -> RowTable:
    """Give touched samples of the same content the identity that they had before."""
    data = open_own_unchecked(folder).read_checked(ROW_TABLE)
    kept = read_contents(data, folder.path(ROW_TABLE))
    some = now.take(touched)
    read = contents(some.keys, some.sizes.tolist(), some.locations)
    same = [row for row, own in zip(touched, read, strict=True) if own and own == kept[row]]
    mtimes, etags = now.mtimes.copy(), list(now.etags)
    mtimes[same] = before.mtimes[same]
    for row in same:
        etags[row] = before.etags[row]
    return replace(now, mtimes=mtimes, etags=etags)


def _read_rows(version: Version) -> RowTable:
    """Read the row table of a version.

    If it is lost, return one with its keys and removed rows alone: samples keep their rows by it.
    """
    where = version.folder.path(ROW_TABLE)
    try:
        return RowTable.from_parquet(version.read_checked(ROW_TABLE), where)
    except (DamageError, StorageError, StoreError):
        removed = frozenset(row for row, (_, why) in version.holes.items() if why == REMOVED)
        return RowTable.of_keys(list(version.keys), classes=version.classes, removed=removed)


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
    new = {key: number for number, key in enumerate(listing.keys)}
    numbers = np.array([new.pop(key, -1) for key in parent.keys], np.int64)
    blank = numbers < 0
    kept = len(parent) - blank.sum()
    if kept < LEAST_KEPT * (len(parent) - len(parent.removed)) or not kept:
        return None
    # A removed row gets the identity of some other sample here, and loses it below.
    placed = listing.take(np.where(blank, numbers.max(), numbers))
    removed = frozenset(np.flatnonzero(blank).tolist())
    added = order_rows(listing.take(np.fromiter(new.values(), np.int64, len(new))), keep_order)
    keys = list(parent.keys)
    etags = ["" if row in removed else etag for row, etag in enumerate(placed.etags)]
    labels = placed.labels.copy()
    labels[blank] = no_labels(int(blank.sum()), labels)
    return RowTable(
        keys=keys + list(added.keys),
        sizes=np.concatenate([np.where(blank, -1, placed.sizes), added.sizes]),
        mtimes=np.concatenate([np.where(blank, -1, placed.mtimes), added.mtimes]),
        etags=etags + list(added.etags),
        labels=np.concatenate([labels, added.labels]),
        classes=listing.classes,
        removed=removed,
        locations=[*placed.locations, *added.locations],
        labels_override=listing.labels_override,
    )
