"""One shard: found done, linked from an earlier version, or made."""

from __future__ import annotations

import contextlib

from precache.errors import StorageError
from precache.receipts import Receipt, ShardObject
from workers.goal import SCRATCH
from workers.reuse import Offer
from workers.shard_task import (
    ShardTask,
    receipt_name,
    require_permit,
    run_shard,
)
from workers.spared import is_linked
from workers.timing import Timing, node_name


def make_shard(task: ShardTask) -> Receipt:
    """Link a shard that an earlier version has whole, and make any other.

    Where another copy of the task was first, its receipt is the shard's.
    """
    require_permit(task)
    receipt = _finished(task) if task.again else None
    if receipt is None and task.offer is not None:
        receipt = _link(task, task.offer)
    return receipt or run_shard(task)


def _finished(task: ShardTask) -> Receipt | None:
    """The receipt of a shard that is there whole."""
    data = task.folder.get(receipt_name(task.shard))
    if data is None:
        return None
    with contextlib.suppress(ValueError):
        receipt = Receipt.from_json(data)
        if all(
            task.folder.size(name) == receipt.objects[field].size
            for field, name in task.objects.items()
        ):
            return receipt
    return None


def _link(task: ShardTask, offer: Offer) -> Receipt | None:
    """The whole shard as a link, nothing of it being read; None where that cannot be.

    The earlier version may be removed at any moment.
    """
    fields, pipeline = offer.fields, task.job.pipeline
    linked = is_linked(pipeline, task.shapes, len(task.keys), offer, task.removed)
    if (
        task.barred
        or not linked
        or any(offer.folder.size(each.object_name) != each.size for each in fields.values())
    ):
        return None
    timing = Timing()
    require_permit(task)
    objects: dict[str, ShardObject] = {}
    for name, at in task.objects.items():
        each = fields[name]
        try:
            task.folder.copy(at, offer.folder, each.object_name, scratch=SCRATCH)
        except StorageError:
            return None
        objects[name] = each.stored
    timing.charge("put")
    receipt = Receipt(
        task.shard,
        objects,
        dict(offer.holes),
        list(offer.content),
        {name: each.sums for name, each in fields.items() if each.sums is not None},
        timing.seconds,
        timing.cpu_seconds,
        reused=True,
        rows_reused=len(task.keys) - len(task.removed),
        host=node_name(),
        began=timing.began,
    )
    task.folder.put(receipt_name(task.shard), [receipt.to_json()], scratch=SCRATCH)
    return receipt
