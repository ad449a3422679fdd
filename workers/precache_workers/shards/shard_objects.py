"""Create the objects of a shard and its receipt once, whichever copy of its task is first.

Copies of a task may write the same shard of an uncommitted version at once, with other releases of
a codec, or with other samples that could not be fetched. The first receipt of a shard counts, and
an object without a receipt is kept if its rows are the same, or its receipt follows. Else the shard
stays undone, and the next run of the build removes what lies there. So what is done stays as it is,
and what was committed is never overwritten, unless it is lost: then the same bytes replace it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from precache.errors import BuildError, CrashError, StorageError
from precache.storage.base import Buffer, Folder
from precache.store.arrays import field_array
from precache.store.commit_log import short
from precache.store.lease import ALIVE_SECONDS, is_highest
from precache.store.receipts import ChannelSums, Receipt, ShardObject, receipt_name
from precache.store.shard_writer import of_same_rows
from precache_workers.planning.assembly import ObjectId
from precache_workers.planning.catalogue import StoredArray
from precache_workers.planning.target_version import SCRATCH

if TYPE_CHECKING:
    from precache_workers.shards.shard_task import ShardTask
    from precache_workers.shards.stored_rows import StoredObject

RECEIPT_SECONDS = ALIVE_SECONDS + 20
"""Seconds to wait for the receipt that follows an object of another task."""


class DamagedObjectError(StorageError):
    """A stored object turns out to be missing or damaged.

    Attributes
    ----------
    object_id, name
        The object; its version and name as one text.
    """

    def __init__(self, array: StoredArray, shard: int, why: Exception | str) -> None:
        super().__init__(str(why))
        self.object_id: ObjectId = array.place, shard
        self.name = f"{array.folder.name}/{array.name}/{array.shape.object_name(shard)}"


@dataclass(frozen=True)
class FinishedObject:
    """The finished object of one field of a shard.

    Attributes
    ----------
    parts
        Its bytes, one buffer after another; empty where it is only linked.
    stored
        What the receipt says of it.
    other
        The same object of another version, if there is one.
    sums
        Sums by channel of all rows that are no holes; None for other fields than images.
    shapes
        Shapes of its rows, if they are ragged.
    """

    parts: Sequence[Buffer]
    stored: ShardObject
    other: StoredObject | None = None
    sums: ChannelSums | None = None
    shapes: list[list[int]] | None = None

    def create(self, folder: Folder, name: str) -> bool:
        """Create the object, as a link where there is another one; False where one exists.

        Raises
        ------
        DamagedObjectError
            The other object is gone, and was not read before.
        """
        if (other := self.other) is not None:
            try:
                origin = other.folder, other.leaf.name
                return folder.copy(name, *origin, scratch=SCRATCH, create=True)
            except StorageError as error:
                if not self.parts:
                    raise DamagedObjectError(other.array, other.shard, error) from None
        return folder.create(name, self.parts, scratch=SCRATCH)

    def put(self, folder: Folder, name: str) -> None:
        """Put the object in place of what lies there, as a link where there is another one.

        Raises
        ------
        DamagedObjectError
            It is only linked, and the other one is gone or not what it was.
        """
        if (other := self.other) is None:
            folder.put(name, self.parts, scratch=SCRATCH)
            return
        if not self.parts:
            other.open()
        folder.copy(name, other.folder, other.leaf.name, scratch=SCRATCH)


def require_lease(task: ShardTask) -> None:
    """Raise `BuildError` where this node does not see that the build holds its lease."""
    if task.lease is not None and not is_highest(task.folder, task.lease):
        raise BuildError(
            f"{socket.gethostname()} does not see {task.folder.path(task.lease)}, or sees one of a "
            "higher number: the build has ended, another build of this version took over (run the "
            "same command again), or the store is on a disk that this node does not share (give it "
            "as a URL, or on a disk that all nodes mount at the same path)"
        )


def finished(task: ShardTask) -> Receipt | None:
    """Return the receipt of a shard whose objects are all there, else None."""
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


def create_objects(
    task: ShardTask, objects: Mapping[str, FinishedObject]
) -> Mapping[str, FinishedObject] | Receipt:
    """Create the objects of a shard, unless some with the same rows exist; returns them as they lie
    there. If others exist, returns the receipt of their copy, once it has put that.

    Raises
    ------
    StorageError
        An object cannot be written or read.
    CrashError
        Other objects exist, whose copy does not finish the shard.
    """
    kept = dict[str, FinishedObject]()
    for field, own in objects.items():
        created = own.create(task.folder, task.objects[field])
        stored = own if created else _existing(task, field, own)
        if stored is None:
            return _awaited(task)
        kept[field] = stored
    return kept


class OtherBytesError(BuildError):
    """An object that is made again came out with other bytes than it had."""


def replace_lost(task: ShardTask, objects: Mapping[str, FinishedObject], receipt: Receipt) -> None:
    """Put objects of a committed version in place of lost ones, if their bytes are those recorded.

    Raises
    ------
    OtherBytesError
        The bytes differ; nothing was put.
    """
    lost = task.lost or {}
    for field, leaf in lost.items():
        own = receipt.objects[field]
        if (own.size, own.xxh3) != (leaf.size, leaf.xxh3):
            raise OtherBytesError(
                f"shard {task.shard} of version {short(task.folder.name)} came out different from "
                "what it was: the source, a library or precache itself changed; nothing was "
                "replaced. The same command with --recompute makes a new version of what the "
                "source is now, and trusts nothing of this one"
            )
    for field in lost:
        require_lease(task)
        objects[field].put(task.folder, task.objects[field])


def _existing(task: ShardTask, field: str, own: FinishedObject) -> FinishedObject | None:
    """Return the object that exists in place of a finished one; None if its rows are others."""
    name = task.objects[field]
    data = task.folder.get(name)
    if data is None:
        where = task.folder.path(name)
        raise BuildError(f"{where} was removed at this moment; run the same again")
    if not own.stored.leaf(name).fault(data):
        return own
    made = b"".join(own.parts) if own.other is None or own.parts else own.other.open()
    codec = task.job.recipe.fields[field].stored_as
    array = field_array(codec, task.shapes[field], len(task.keys), task.rows_per_shard)
    stored = of_same_rows(array, memoryview(data), memoryview(made), own.shapes)
    if stored is None:
        return None
    stored = replace(stored, raw_nbytes=own.stored.raw_nbytes)
    return replace(own, parts=[data], stored=stored, other=None)


def _awaited(task: ShardTask) -> Receipt:
    """Wait for the receipt of another copy, which tells of the objects that lie there.

    Raises
    ------
    CrashError
        There is none after a while, as of a copy that ended.
    """
    until = time.monotonic() + RECEIPT_SECONDS
    while (receipt := finished(task)) is None and time.monotonic() < until:
        time.sleep(0.1)
    if receipt is None or not _is_stored(task, receipt):
        raise CrashError(
            f"shard {task.shard} of {task.folder} is by another copy of its task, which made other "
            "bytes and has not finished it"
        )
    return receipt


def create_receipt(task: ShardTask, receipt: Receipt) -> Receipt:
    """Create the receipt of a shard; returns the one that was created first."""
    name = receipt_name(task.shard)
    if task.folder.create(name, [receipt.to_json()], scratch=SCRATCH):
        return receipt
    return _awaited(task)


def _is_stored(task: ShardTask, receipt: Receipt) -> bool:
    """Return whether the objects of a shard have the bytes that a receipt tells of."""
    objects = task.objects.items()
    leaves = (receipt.objects[field].leaf(name) for field, name in objects)
    return not any(leaf.fault_in(task.folder) for leaf in leaves)
