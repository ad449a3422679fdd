"""Order the rows of a listing, and choose shards and samples of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from precache.sampling.order import Permutation
from precache.store.receipts import Receipt
from precache.store.row_table import RowTable, unit_of

ROW_ORDER_SEED = 0

GROUP_BYTES, LEAST_GROUPS = 4 << 20, 128
"""Bytes of samples among which rows of containers are shuffled, at most, and the least number of
such groups. A group that a shard ends in is read twice, so groups are small beside shards: these
hold a sixteenth of the rows at most, and mostly more than 16 MiB of samples."""

UNKNOWN_BYTES = 128 << 10
"""Bytes that a sample counts as if nothing is known of its size."""

MOST_EXPECTED = 1 << 30
"""Most bytes that a sample counts as, even if a file claims more."""

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
    if keep_order:
        return listing
    places = Permutation(len(listing), "rows", ROW_ORDER_SEED)(np.arange(len(listing)))
    if not listing.has_units:
        return listing.take(places)
    order, groups = _groups(listing)
    return listing.take(order[np.lexsort((places[order], groups))])


def _groups(listing: RowTable) -> tuple[np.ndarray, np.ndarray]:
    """Order samples by their units, in a fixed shuffle, and number the group of each by bytes.

    Those of a unit keep their order, so that of a large unit each group is one part.
    """
    names, numbers = _units(listing.locations)
    expected = np.array([expected_bytes(name) for name in names])
    nbytes = np.where(listing.sizes < 0, expected[numbers], listing.sizes).clip(max=MOST_EXPECTED)
    places = Permutation(len(names), "units", ROW_ORDER_SEED)(np.arange(len(names)))
    order = np.argsort(places[numbers], kind="stable")
    ends = np.cumsum(nbytes[order])
    most = max(1, min(GROUP_BYTES, ends[-1] // LEAST_GROUPS))
    return order, (ends - nbytes[order]) // most


def expected_bytes(unit: str) -> int:
    """Return the assumed bytes of a sample of unknown size in a unit."""
    nbytes = unit.rpartition("#")[2].partition("~")[2]
    return min(int(nbytes), MOST_EXPECTED) if nbytes.isdecimal() else UNKNOWN_BYTES


def _units(locations: Sequence[str]) -> tuple[Sequence[str], np.ndarray]:
    """Return the distinct units, and the number of each sample's unit."""
    numbers: dict[str, int] = {}
    of = [numbers.setdefault(unit_of(location), len(numbers)) for location in locations]
    return list(numbers), np.array(of, np.int64)


def samples_read(table: RowTable, fetches: Sequence[np.ndarray]) -> list[int]:
    """Count the samples that each fetch of rows reads.

    A unit that is read from its beginning is read up to the last of them. Its rows are taken to be
    in its order, as almost all are.
    """
    if not table.has_units:
        return [len(rows) for rows in fetches]
    names, units = _units(table.locations)
    order = np.argsort(units, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) - np.searchsorted(units[order], units[order])
    forward = np.array([name.rpartition("#")[2].startswith(">") for name in names])
    counts = []
    for rows in fetches:
        read = np.zeros(len(names), np.int64)
        np.maximum.at(read, units[rows], places[rows] + 1)
        counts.append(int(read[forward].sum() + np.count_nonzero(~forward[units[rows]])))
    return counts


def shards_to_do(
    shards: int, receipts: Mapping[int, Receipt], sizes: Mapping[tuple[str, int], int | None]
) -> list[int]:
    """List the shards without a receipt, or with objects of another size than it records.

    Parameters
    ----------
    sizes
        (field, shard) -> bytes of the stored object, None where there is none.
    """
    todo = []
    for shard in range(shards):
        receipt = receipts.get(shard)
        if receipt is None or any(
            sizes.get((name, shard)) != stored.size for name, stored in receipt.objects.items()
        ):
            todo.append(shard)
    return todo


def default_max_failures(rows: int) -> int:
    """Samples that may fail before a build stops: 1%, and at least 5."""
    return max(5, rows // 100)


def sample_for_probe(table: RowTable, count: int) -> list[int]:
    """Choose rows to measure shapes and sizes of: the first by key, then an even spread."""
    rows = [row for row in range(len(table)) if row not in table.removed]
    first = min(rows, key=table.keys.__getitem__)
    rows = in_few_units(table, rows, count)
    spread = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int).tolist()
    return list(dict.fromkeys([first, *(rows[number] for number in spread)]))


def in_few_units(table: RowTable, rows: list[int], count: int) -> list[int]:
    """Restrict rows to a few units of containers, spread over the table; returns all rows if those
    units have fewer than `count`."""
    if not table.has_units:
        return rows
    by_unit: dict[str, list[int]] = {}
    for row in rows:
        by_unit.setdefault(unit_of(table.locations[row]), []).append(row)
    units = list(by_unit.values())
    few = np.linspace(0, len(units) - 1, min(PROBED_UNITS, len(units))).astype(int)
    chosen = sorted(row for number in set(few.tolist()) for row in units[number])
    return chosen if len(chosen) >= min(count, len(rows)) else rows
