"""Order the rows of a listing, and choose shards and samples of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from precache.sampling.order import Permutation
from precache.store.receipts import Receipt
from precache.store.row_table import RowTable

ROW_ORDER_SEED = 0


def order_rows(listing: RowTable, keep_order: bool) -> RowTable:
    """Order a listing as its rows: by a fixed shuffle, so that any run of rows mixes classes.

    Parameters
    ----------
    keep_order
        Keep the order of the listing instead.
    """
    if keep_order:
        return listing
    return listing.take(Permutation(len(listing), "rows", ROW_ORDER_SEED)(np.arange(len(listing))))


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
    spread = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int).tolist()
    return list(dict.fromkeys([first, *(rows[number] for number in spread)]))
