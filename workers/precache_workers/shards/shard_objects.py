"""Objects of a shard are created once, whichever build of the version comes first.

Of a version that is not committed, several builds may make the same shard at once, with other
releases of a codec, or with other samples that could not be fetched. Whatever comes second is
dropped: the first receipt of a shard is the shard's, and an object without a receipt is taken as
it is where its rows are the same. So what one build has seen done stays as it is, and what was
committed is never overwritten, unless it is lost: then an object of the same rows takes its place.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from precache.codecs.chunk import codec_metadata, decoder
from precache.errors import BuildError, DamageError
from precache.recipe.ops import Function
from precache.storage.base import Buffer
from precache.store.layout import MISSING, decode_index
from precache.store.lease import ALIVE_SECONDS, deciding, live_leases
from precache.store.receipts import ChannelSums, Receipt, ShardObject
from precache_workers.planning.target_version import SCRATCH, receipt_name
from precache_workers.shards.rows import Object

if TYPE_CHECKING:
    from precache_workers.shards.shard_task import ShardTask

OWN_SECONDS, OTHER_SECONDS = 5.0, ALIVE_SECONDS + 20
"""For the receipt of another task that follows its object: of this build, and of another."""


@dataclass(frozen=True)
class Recorded:
    """What a committed version records of a shard of which objects are lost.

    Attributes
    ----------
    objects
        Field -> size and XXH3-64 of the lost object.
    content
        XXH3-128 (hex) of each raw sample, empty where it could not be fetched.
    holes
        Rows of the version that are holes.
    encoded
        Field -> its sums by channel, None where it has none; of fields whose bytes depend on the
        release of the library that encodes them.
    """

    objects: Mapping[str, tuple[int, int]]
    content: Sequence[str]
    holes: frozenset[int]
    encoded: Mapping[str, Sequence[float] | None]


class DoneElsewhere(Exception):
    """Another task finished the shard first, with this receipt."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(f"shard {receipt.shard} is done")
        self.receipt = receipt


def require_lease(task: ShardTask) -> None:
    """Raise `BuildError` where the build's lease is not to be seen."""
    if task.lease is not None and task.folder.size(task.lease) is None:
        raise BuildError(
            f"{socket.gethostname()} does not see {task.folder.path(task.lease)}: the build has "
            "ended, another build of this version ended and took the leases of all (run the same "
            "command again), or the store is on a disk that this node does not share (give it as a "
            "URL, or on a disk that all nodes mount at the same path)"
        )


def finished(task: ShardTask) -> Receipt | None:
    """The receipt of a shard whose objects are all there."""
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


def create_objects(task: ShardTask, objects: Mapping[str, Object]) -> dict[str, ShardObject]:
    """Create the objects of a shard, or take those that are there; field -> what is there now.

    Raises
    ------
    DoneElsewhere
        Another task was first.
    StorageError
        An object cannot be written or read.
    """
    return {
        field: own.made if own.create(task.folder, task.objects[field]) else _take(task, field, own)
        for field, own in objects.items()
    }


def replace_lost(
    task: ShardTask, lost: Recorded, objects: Mapping[str, Object], made: Receipt
) -> None:
    """Put objects of a committed version in place of lost ones, if their rows are the same.

    They are where the bytes are. Encoded by another release of a library they are if the samples,
    the holes and the sums by channel are those recorded, and so are all rows that can still be read
    in the object that is replaced; at least one, if a function of the user's own makes them, as its
    code may depend on what nobody sees.

    Raises
    ------
    BuildError
        The rows are others; nothing was put.
    """
    for field, recorded in lost.objects.items():
        if (made.objects[field].size, made.objects[field].xxh3) != recorded and not (
            field in lost.encoded
            and made.content == lost.content
            and made.holes.keys() == lost.holes
            and _are_recorded(made.sums.get(field), lost.encoded[field])
            and _agrees_with_lost(task, field, objects[field])
        ):
            raise BuildError(
                f"shard {task.shard} of version {task.folder.name[:8]} came out different "
                "from what it was: the source, a library or precache itself changed; remove "
                f"{task.folder} and build again"
            )
    for field in lost.objects:
        objects[field].put(task.folder, task.objects[field])


def _take(task: ShardTask, field: str, own: Object) -> ShardObject:
    """The object that another task created, once it is known to have the same rows."""
    name = task.objects[field]
    data = task.folder.get(name)
    if data is None:
        raise BuildError(f"{task.folder.path(name)} was removed at this moment; run the same again")
    found = replace(own.made, size=len(data), xxh3=xxhash.xxh3_64_intdigest(data))
    if found == own.made or _compared(task, field, data, own).all_same:
        return found
    began = time.monotonic()
    while (receipt := finished(task)) is None:
        waited, others = time.monotonic() - began, live_leases(task.folder, but=task.lease)
        if not others and waited > OWN_SECONDS and _replace(task, name, own):
            return own.made
        if others and waited > OTHER_SECONDS:
            raise BuildError(
                f"shard {task.shard} comes out different in another build of the same version "
                f"({next(iter(others.values())).holder}): end one of them, and run the same again"
            )
        time.sleep(0.1)
    raise DoneElsewhere(receipt)


def _replace(task: ShardTask, name: str, own: Object) -> bool:
    """Put an object in place of one that a build left which has ended; False where one goes on."""
    store, version = task.store, task.folder.name
    with deciding(store, version) if store else contextlib.nullcontext():
        require_lease(task)
        if finished(task) or live_leases(task.folder, but=task.lease):
            return False
        own.put(task.folder, name)
    return True


def create_receipt(task: ShardTask, receipt: Receipt) -> Receipt:
    """Create the receipt of a shard; returns the one that was first."""
    name = receipt_name(task.shard)
    if task.folder.create(name, [receipt.to_json()], scratch=SCRATCH):
        return receipt
    first = finished(task)
    if first is None:  # it is damaged, or was of objects that are no more
        task.folder.put(name, [receipt.to_json()], scratch=SCRATCH)
        return receipt
    return first


class _Compared(NamedTuple):
    """Numbers of chunks of an object: with the same rows as another, with others, unreadable."""

    same: int
    other: int
    unreadable: int

    @property
    def all_same(self) -> bool:
        return not (self.other or self.unreadable)


def _compared(task: ShardTask, field: str, data: Buffer, own: Object) -> _Compared:
    """Compare the rows of an object that is there with those of one that was made."""
    shape = task.shapes[field]
    codecs = codec_metadata(task.job.recipe.fields[field].stored_as, shape.dtype)
    decode = decoder(codecs, np.dtype(shape.dtype).itemsize, field).decode
    per_chunk = shape.chunk_rows(task.rows_per_shard)
    chunks = task.rows_per_shard // per_chunk
    decoded = np.empty((2, per_chunk, *shape.shape), shape.dtype)
    both = memoryview(data), memoryview(b"".join(own.parts()))
    counts = [0, 0, 0]
    try:
        indexes = [decode_index(each[-16 * chunks - 4 :], chunks).tolist() for each in both]
    except DamageError:
        return _Compared(0, 0, chunks)
    for places in zip(*indexes, strict=True):
        if places[0] == places[1] == [int(MISSING)] * 2:
            continue
        try:
            for part, (offset, length), rows in zip(both, places, decoded, strict=True):
                decode(part[offset : offset + length], rows)
            counts[decoded[0].tobytes() != decoded[1].tobytes()] += 1
        except DamageError:
            counts[2] += 1
    return _Compared(*counts)


def _agrees_with_lost(task: ShardTask, field: str, own: Object) -> bool:
    """Whether an object has the rows that can still be read in the one it is to replace."""
    left = task.folder.get(task.objects[field])
    found = _Compared(0, 0, 0) if left is None else _compared(task, field, left, own)
    ops = task.job.recipe.fields[field].ops
    return not found.other and bool(found.same or not any(isinstance(o, Function) for o in ops))


def _are_recorded(sums: ChannelSums | None, recorded: Sequence[float] | None) -> bool:
    if sums is None or recorded is None:
        return sums is None and recorded is None
    return np.allclose(sums.flat(), recorded, rtol=1e-9, atol=0, equal_nan=True)
