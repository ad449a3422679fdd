"""What there is of a version already: committed, lost, or made and not committed yet."""

from __future__ import annotations

import contextlib

from precache.errors import GoneError, StoreError
from precache.store.commit_log import BUILD, ROOT
from precache.store.consistency import Flaw, inspect
from precache.store.open import open_own_unchecked
from precache.store.receipts import Receipt
from precache_workers.planning.target_version import TargetVersion

RECEIPTS = 64
"""Receipts read at a time."""


def is_committed(goal: TargetVersion) -> bool:
    """Whether the version was committed, as far as its document can be read."""
    if goal.folder.size(ROOT) is None:
        return False
    try:
        return open_own_unchecked(goal.folder).id == goal.version
    except StoreError:
        return False


def flaws_of(goal: TargetVersion, listed: bool = True) -> list[Flaw]:
    """What is wrong with the small objects and the documents of a committed version.

    Parameters
    ----------
    listed
        Whether the goal has its row table, and not its length alone.
    """
    return inspect(open_own_unchecked(goal.folder), goal.table if listed else None)


def is_whole(goal: TargetVersion, listed: bool = True) -> bool:
    """Whether the version was committed and every object is there; `flaws_of` explains `listed`."""
    with contextlib.suppress(GoneError):
        return is_committed(goal) and not flaws_of(goal, listed) and not lost_objects(goal)
    return False


def lost_objects(goal: TargetVersion) -> dict[tuple[str, int], tuple[int, int]]:
    """(field, shard) -> size and XXH3-64 of objects of a committed version that are not there."""
    return open_own_unchecked(goal.folder).lost_objects()


def read_receipts(goal: TargetVersion) -> dict[int, Receipt]:
    """The receipts of a version begun, by shard."""
    names = [f"{BUILD}/receipts/{name}" for name in goal.folder.names(f"{BUILD}/receipts")]
    receipts = {}
    for start in range(0, len(names), RECEIPTS):
        part = names[start : start + RECEIPTS]
        for data in goal.folder.read_many(part, [-1] * len(part)):
            # Damaged, or swept by another build's commit: then its shard is made again.
            if isinstance(data, bytes):
                with contextlib.suppress(ValueError):
                    receipt = Receipt.from_json(data)
                    if _fits(goal, receipt):
                        receipts[receipt.shard] = receipt
    return receipts


def _fits(goal: TargetVersion, receipt: Receipt) -> bool:
    """Whether a receipt can be of the version: else its shard is made again."""
    if not 0 <= receipt.shard < goal.shards:
        return False
    rows = goal.rows_of(receipt.shard)
    sums = [each.flat() for each in receipt.sums.values()]
    channels = [
        1 + 2 * (*goal.shapes[name].shape, 0)[0] for name in receipt.sums if name in goal.shapes
    ]
    return (
        receipt.objects.keys() == goal.shapes.keys()
        and all(0 <= n < 2**64 for each in receipt.objects.values() for n in (each.size, each.xxh3))
        and all(row in rows for row in receipt.holes)
        and len(receipt.content) == len(rows)
        and len(receipt.labels or receipt.content) == len(rows)
        and all(-(2**63) <= label < 2**63 for label in receipt.labels or ())
        and list(map(len, sums)) == channels
    )
