"""Give the samples of a listing their rows: those that they have in the current version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from precache.errors import DamageError, StorageError, StoreError
from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.commit_log import short
from precache.store.labels import no_labels
from precache.store.layout import RowShape
from precache.store.locations import Locations
from precache.store.open import open_own
from precache.store.row_table import REMOVED, RowTable
from precache.store.version import ROW_TABLE, Version
from precache_workers.planning.diff import source_changes
from precache_workers.planning.rows import order_rows
from precache_workers.planning.stored_versions import committed_versions, latest_of

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
) -> Placed:
    """Place the samples of a listing in rows: those of an earlier version, where it has them.

    It is the latest version of this source, or else the current one.

    Parameters
    ----------
    compact
        Lay rows down anew, without holes of removed samples.
    may_have
        Whether rows of these shapes may come in shards of so many.
    """
    fresh = order_rows(listing, keep_order)
    earlier = latest_of(store, listing.source) or next(committed_versions(store), None)
    if compact or earlier is None:
        return Placed(fresh)
    folder, attributes = earlier
    shapes = {name: field.row for name, field in attributes.fields.items()}
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
    if placed.digest == attributes.rows_digest:
        parent = placed
    changed = f"Since version {short(folder.name)}: {source_changes(parent, placed)}"
    compactable = placed.digest != fresh.digest
    return Placed(placed, attributes.rows_per_shard, changed, compactable)


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
        labels_with_samples=listing.labels_with_samples,
        source=listing.source,
    )
