"""What there is of a version already: committed, lost, or made and not committed yet."""

from __future__ import annotations

import contextlib

from precache.commits import BUILD, ROOT
from precache.errors import DamageError, StorageError, StoreError
from precache.receipts import Receipt
from precache.store import open_own
from workers.goal import Goal

RECEIPTS = 64
"""Receipts read at a time."""


def is_readable(goal: Goal) -> bool:
    """Whether the version was committed, and all that tells of its shards can be read."""
    if goal.folder.size(ROOT) is None:
        return False
    try:
        for check in open_own(goal.folder).small_checks().values():
            check()
    except (DamageError, StorageError, StoreError):
        return False
    return True


def is_whole(goal: Goal) -> bool:
    """Whether the version was committed and every object is there."""
    return is_readable(goal) and not lost_objects(goal)


def lost_objects(goal: Goal) -> dict[tuple[str, int], tuple[int, int]]:
    """(field, shard) -> size and XXH3-64 of objects of a committed version that are not there."""
    return open_own(goal.folder).lost_objects()


def read_receipts(goal: Goal) -> dict[int, Receipt]:
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
                    receipts[receipt.shard] = receipt
    return receipts
