"""From the row table of a version to that of the next: rows keep their places. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from precache.store.row_table import RowTable
from precache_workers.planning.rows import order_rows

LEAST_KEPT = 0.5
"""Share of a version's samples that a listing must still have, to be the same source grown."""


@dataclass(frozen=True)
class Changes:
    """What a source did since a version was made of it, in samples.

    Attributes
    ----------
    same, changed
        Those it still has, with the same identity or another.
    added, removed
        Those that it did not have before, or has no more.
    """

    same: int
    changed: int
    added: int
    removed: int

    def __str__(self) -> str:
        parts = [
            f"{count:,} {what}"
            for what in ("same", "changed", "added", "removed")
            if (count := getattr(self, what)) or what == "same"
        ]
        return ", ".join(parts)


def same_identity(before: RowTable, now: RowTable) -> np.ndarray:
    """(rows,) bool: whether rows of both tables, in the same places, are of the same sample.

    Where a source tells neither an etag nor a time, as web pages do not, nothing says so.

    Parameters
    ----------
    before
        The shorter table, or one as long.
    now
        With the keys of `before` in its first rows.
    """
    count = len(before)
    same: np.ndarray = (before.sizes == now.sizes[:count]) & (before.mtimes == now.mtimes[:count])
    same &= np.fromiter(map(str.__eq__, before.etags, now.etags), np.bool_, count)
    same &= (before.mtimes >= 0) | np.fromiter(map(bool, before.etags), np.bool_, count)
    same[[*before.removed, *(row for row in now.removed if row < count)]] = False
    return same


def descend(parent: RowTable, listing: RowTable, keep_order: bool) -> RowTable | None:
    """The listing in the places that its samples have in `parent`; what is new comes after.

    A sample that is listed no more leaves a removed row behind, which it takes again should it come
    back.

    Parameters
    ----------
    keep_order
        Whether what is new keeps the order of the listing, too.

    Returns
    -------
    RowTable | None
        None where the listing has too little of the parent to be its descendant.
    """
    at = {key: number for number, key in enumerate(listing.keys)}
    numbers = np.array([at.pop(key, -1) for key in parent.keys], np.int64)
    there = numbers >= 0
    if there.sum() < LEAST_KEPT * (len(parent) - len(parent.removed)) or not there.any():
        return None
    # A row that is gone takes some other's identity first, and loses it below.
    placed = listing.take(np.where(there, numbers, numbers.max()))
    gone = frozenset(np.flatnonzero(~there).tolist())
    added = order_rows(listing.take(np.fromiter(at.values(), np.int64, len(at))), keep_order)
    blank = ~there
    keys = list(parent.keys)
    etags = ["" if row in gone else etag for row, etag in enumerate(placed.etags)]
    return RowTable(
        keys + list(added.keys),
        np.concatenate([np.where(blank, -1, placed.sizes), added.sizes]),
        np.concatenate([np.where(blank, -1, placed.mtimes), added.mtimes]),
        etags + list(added.etags),
        np.concatenate([np.where(blank, -1, placed.labels), added.labels]),
        listing.classes,
        gone,
    )


def changes(parent: RowTable, table: RowTable) -> Changes:
    """What became of the samples of a table that descends from `parent`."""
    count = len(parent)
    same = int(same_identity(parent, table).sum())
    new = sum(row < count for row in parent.removed - table.removed)
    removed = sum(row < count for row in table.removed - parent.removed)
    lasting = count - len(parent.removed | {row for row in table.removed if row < count})
    return Changes(same, lasting - same, len(table) - count + new, removed)
