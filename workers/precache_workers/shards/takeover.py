"""One shard: found done, linked from an earlier version, or made."""

from __future__ import annotations

from precache.errors import StorageError
from precache.store.receipts import Receipt, ShardObject
from precache_workers.planning.reusable_rows import is_linked
from precache_workers.planning.reuse import BaseShard
from precache_workers.planning.target_version import SCRATCH
from precache_workers.runtime.node import node_name
from precache_workers.shards.shard_objects import create_receipt, finished, require_lease
from precache_workers.shards.shard_task import ShardTask, run_shard
from precache_workers.shards.timing import Timing


def make_shard(task: ShardTask) -> Receipt:
    """Link a shard that an earlier version has whole, and make any other.

    Where another task was first, its receipt is the shard's.
    """
    receipt = finished(task) if task.again else None
    if receipt is None and task.offer is not None:
        receipt = _link(task, task.offer)
    return receipt or run_shard(task)


def _link(task: ShardTask, offer: BaseShard) -> Receipt | None:
    """The whole shard as a link, nothing of it being read; None where that cannot be.

    The earlier version may be removed at any moment.
    """
    fields, recipe = offer.fields, task.job.recipe
    linked = is_linked(recipe, task.shapes, len(task.keys), offer, task.removed)
    if (
        task.barred
        or not linked
        or any(offer.folder.size(each.object_name) != each.size for each in fields.values())
    ):
        return None
    timing = Timing()
    require_lease(task)
    objects: dict[str, ShardObject] = {}
    for name, at in task.objects.items():
        each = fields[name]
        try:
            source = each.object_name
            if not task.folder.copy(at, offer.folder, source, scratch=SCRATCH, create=True):
                return None  # another task came first, with an object that has to be looked at
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
    return create_receipt(task, receipt)
