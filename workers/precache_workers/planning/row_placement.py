"""Give the samples of a listing their rows: those that they have in the current version."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.commit_log import short
from precache.store.labels import no_labels
from precache.store.layout import rows_per_shard
from precache.store.row_table import RowTable
from precache_workers.planning.catalogue import names_of
from precache_workers.planning.rows import order_rows, row_order
from precache_workers.planning.stored_versions import UNREADABLE, StoredVersion, stored_versions

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
    shard_samples: int | None,
) -> Placed:
    """Place the samples of a listing in rows: those of an earlier version, where it has them.

    It is the version that was built of just these samples, if there is one; else the latest version
    of this source, or of any, that has enough of them.

    Parameters
    ----------
    compact
        Lay rows down anew, without holes of removed samples.
    shard_samples
        Rows of a shard that are requested, if any are.
    """
    fresh = order_rows(listing, keep_order)
    if compact:
        return Placed(fresh)
    placed = None
    versions = list(stored_versions(store))
    of_source = [stored for stored in versions if stored.attributes.source == listing.source]
    for stored in of_source or versions[:1]:
        attributes = stored.attributes
        nbytes = [field.row.nbytes for field in attributes.fields.values()]
        most = rows_per_shard(0, nbytes, shard_samples)
        if shard_samples and not shard_samples <= attributes.rows_per_shard <= most:
            continue
        if attributes.rows_digest == fresh.digest:
            return Placed(fresh, attributes.rows_per_shard)
        # Of several versions, only the one with just these samples is of interest.
        fewest = attributes.rows - attributes.holes
        if placed is not None and not fewest <= len(listing) <= attributes.rows:
            continue
        own = _placed_as_in(stored, listing, fresh, keep_order)
        if own is not None and own.table.digest == attributes.rows_digest:
            return own
        placed = placed or own
    return placed or Placed(fresh)


def _placed_as_in(
    stored: StoredVersion, listing: RowTable, fresh: RowTable, keep_order: bool
) -> Placed | None:
    """Place samples in the rows that they have in a version; None if it has too few of them."""
    try:
        parent, *_ = stored.read_rows()
    except UNREADABLE:
        return None
    table = keep_rows(parent, listing, keep_order)
    if table is None or (keep_order and table.present_keys != listing.keys):
        return None
    attributes = stored.attributes
    if table.digest == attributes.rows_digest:
        parent = table
    from precache_workers.planning.diff import source_changes

    changed = f"Since version {short(stored.folder.name)}: {source_changes(parent, table)}"
    return Placed(table, attributes.rows_per_shard, changed, table.digest != fresh.digest)


def keep_rows(parent: RowTable, listing: RowTable, keep_order: bool) -> RowTable | None:
    """Place samples in the rows that they have in `parent`, and append new ones.

    A removed sample leaves a hole; if it returns, it gets the same row. A file that was moved to
    another folder, and is listed as it was, takes its row along.

    Parameters
    ----------
    keep_order
        Whether new samples keep the order of the listing.

    Returns
    -------
    RowTable | None
        None where too few samples of the parent are listed.
    """
    numbers = _with_moved(parent, listing, listing.keys.find(parent.keys))
    blank = numbers < 0
    kept = len(parent) - blank.sum()
    if kept < LEAST_KEPT * (len(parent) - len(parent.removed)) or not kept:
        return None
    is_new = np.ones(len(listing), np.bool_)
    is_new[numbers[~blank]] = False
    new = np.flatnonzero(is_new)
    added = new if keep_order else new[row_order(listing.take(new))]
    # A removed row gets the identity of some other sample here, and loses it below.
    table = listing.take(np.concatenate([np.where(blank, numbers.max(), numbers), added]))
    removed = np.flatnonzero(blank)
    places = np.arange(len(table))
    places[removed] = len(table) + removed
    blank = np.append(blank, np.zeros(len(added), np.bool_))
    labels = table.labels.copy()
    labels[removed] = no_labels(len(removed), labels)
    return replace(
        table,
        keys=Texts.joined([table.keys, parent.keys]).take(places),
        sizes=np.where(blank, -1, table.sizes),
        mtimes=np.where(blank, -1, table.mtimes),
        etags=table.etags.blanked(blank),
        labels=labels,
        removed=frozenset(removed.tolist()),
    )


def _with_moved(parent: RowTable, listing: RowTable, numbers: np.ndarray) -> np.ndarray:
    """Add the listed samples that have the name, size, time and etag of one that is gone.

    Parameters
    ----------
    numbers
        Listed sample of each row of the parent; -1 for none.
    """
    is_new = listing.is_known.copy()
    is_new[numbers[numbers >= 0]] = False
    gone = (numbers < 0) & parent.is_known & (listing.source == parent.source)
    if not (is_new.any() and gone.any()):
        return numbers
    new, rows = np.flatnonzero(is_new), np.flatnonzero(gone)
    at = names_of(listing, new).find(names_of(parent, rows))
    rows, new = rows[at >= 0], new[at[at >= 0]]
    same = listing.listed_alike(parent, new, rows)
    new, first = np.unique(new[same], return_index=True)
    numbers = numbers.copy()
    numbers[rows[same][first]] = new
    return numbers
