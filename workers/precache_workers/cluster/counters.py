"""Two counters of builds at Ray's own metrics endpoints, one on each node."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from precache.runtime.process_id import node_name
from precache.store.receipts import Receipt


def count_receipts(values: Iterable[Any], began: float) -> None:
    """Count the rows and the written bytes of the receipts that a task created.

    Its values also have those of other tasks, which were first: of shards begun elsewhere, or
    before the time at which this task began.
    """
    receipts = [
        value
        for value in values
        if isinstance(value, Receipt) and value.host == node_name() and value.began >= began
    ]
    rows = sum(len(receipt.content) for receipt in receipts)
    objects = [stored for made in receipts if not made.reused for stored in made.objects.values()]
    for counter, amount in zip(_counters(), (rows, sum(o.size for o in objects)), strict=True):
        if amount:  # Ray refuses to add nothing
            counter.inc(amount)


@functools.cache
def _counters() -> tuple[Any, Any]:
    from ray.util.metrics import Counter

    rows = Counter("precache_rows", "Rows of finished shards, holes included")
    return rows, Counter("precache_written_bytes", "Bytes of objects put")
