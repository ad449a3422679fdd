"""Order the rows of a listing, and choose samples of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precache.sampling.order import Permutation
from precache.store.locations import MOST_EXPECTED, expected_bytes
from precache.store.row_table import RowTable

ROW_ORDER_SEED = 0

GROUP_BYTES, LEAST_GROUPS = 4 << 20, 128
"""Bytes of samples among which rows of containers are shuffled, at most, and the least number of
such groups. A group that a shard ends in is read twice, so groups are small beside shards: these
hold a sixteenth of the rows at most, and mostly more than 16 MiB of samples."""

PROBED_UNITS = 4
"""Units of containers that samples of a probe lie in: each may have to be read whole."""


def order_rows(listing: RowTable, keep_order: bool) -> RowTable:
    """Order a listing as its rows: by a fixed shuffle, so that any run of rows mixes classes.

    Samples of containers are shuffled in two steps: units, which are read at once, among all, and
    rows within groups of neighbours in that order. So a shard has whole units, but for those at its
    ends, and each unit is read about once.

    Parameters
    ----------
    keep_order
        Keep the order of the listing instead.
    """
    return listing if keep_order else listing.take(row_order(listing))


def row_order(listing: RowTable) -> np.ndarray:
    """Return the places of a listing in the order of its rows: int64."""
    places: np.ndarray = Permutation(len(listing), "rows", ROW_ORDER_SEED)(np.arange(len(listing)))
    if listing.units is None:
        return places
    order, groups = _groups(listing, listing.units)
    shuffled: np.ndarray = order[np.lexsort((places[order], groups))]
    return shuffled


def _groups(listing: RowTable, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order samples by their units, in a fixed shuffle, and number the group of each by bytes.

    Those of a unit keep their order, so that of a large unit each group is one part.
    """
    nbytes = expected_bytes(listing.sizes, listing.locations).clip(max=MOST_EXPECTED)
    count = int(units.max()) + 1
    places = Permutation(count, "units", ROW_ORDER_SEED)(np.arange(count))
    order = np.argsort(places[units], kind="stable")
    ends = np.cumsum(nbytes[order])
    most = max(1, min(GROUP_BYTES, ends[-1] // LEAST_GROUPS))
    return order, (ends - nbytes[order]) // most


def samples_read(table: RowTable, fetches: Sequence[np.ndarray]) -> list[int]:
    """Count the samples that each fetch of rows reads.

    A unit that is read from its beginning is read up to the last of them. Its rows are taken to be
    in its order, as almost all are.
    """
    units, locations = table.units, table.locations
    if units is None or locations is None:
        return [len(rows) for rows in fetches]
    order = np.argsort(units, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) - np.searchsorted(units[order], units[order])
    forward, counts = locations.forward, []
    for rows in fetches:
        read = np.zeros(int(units.max()) + 1, np.int64)
        some = rows[forward[rows]]
        np.maximum.at(read, units[some], places[some] + 1)
        counts.append(int(read.sum()) + len(rows) - len(some))
    return counts


def default_max_failures(rows: int) -> int:
    """Samples that may fail before a build stops: 1%, and at least 5."""
    return max(5, rows // 100)


def sample_for_probe(table: RowTable, count: int, rows: list[int] | None = None) -> list[int]:
    """Choose rows to try samples of: the first by key, then an even spread.

    Parameters
    ----------
    rows
        Rows to choose among; None for all that have a sample.
    """
    if rows is None:
        rows = np.flatnonzero(~table.is_removed).tolist()
    first = rows[table.keys.take(np.asarray(rows, np.int64)).first()]
    rows = in_few_units(table, rows, count)
    spread = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int).tolist()
    return list(dict.fromkeys([first, *(rows[number] for number in spread)]))


def in_few_units(table: RowTable, rows: list[int], count: int) -> list[int]:
    """Restrict rows to a few units of containers, spread over the table; returns all rows if those
    units have fewer than `count`."""
    if table.units is None:
        return rows
    of_rows = table.units[rows]
    units = np.unique(of_rows)
    few = units[np.linspace(0, len(units) - 1, min(PROBED_UNITS, len(units))).astype(int)]
    chosen: list[int] = np.sort(np.array(rows)[np.isin(of_rows, few)]).tolist()
    return chosen if len(chosen) >= min(count, len(rows)) else rows
