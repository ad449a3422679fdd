"""One shard taken over from an earlier version, where its samples are what they were."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
import xxhash

from precache.codecs import undo_image
from precache.errors import FetchError, StorageError
from precache.layout import decode_index
from precache.metadata import Array
from precache.receipts import ChannelSums, Receipt, ShardObject
from precache.store import read_array_documents
from workers.goal import SCRATCH
from workers.reuse import Offer
from workers.shard_task import (
    ShardTask,
    Sums,
    fetch_ahead,
    has_sums,
    one_thread,
    receipt_name,
    require_permit,
    run_shard,
)
from workers.timing import Timing, node_name


def make_shard(task: ShardTask) -> Receipt:
    """Take a shard over where an earlier version has it, and make it where none does.

    Where another copy of the task was first, its receipt is the shard's.
    """
    require_permit(task)
    receipt = _finished(task) if task.again else None
    if receipt is None and task.offer is not None:
        receipt = _take_over(task, task.offer)
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


def _take_over(task: ShardTask, offer: Offer) -> Receipt | None:
    """None, and no receipt put, where a sample differs or an object is not what it was."""
    timing = Timing()
    if not _samples_are(task, offer, timing):
        return None
    timing.charge("fetch")
    objects: dict[str, ShardObject] = {}
    sums: dict[str, ChannelSums] = {}
    for name, object_name in task.objects.items():
        data = _object(offer, name, object_name)
        if data is None:
            return None
        require_permit(task)
        array = read_array_documents(offer.folder, [name])[name]
        rows = len(task.keys)
        chunks = -(-rows // array.chunk_shape[0])
        raw_nbytes = chunks * array.chunk_shape[0] * array.row_nbytes
        objects[name] = ShardObject(*offer.objects[name], raw_nbytes)
        if has_sums(task, name):
            sums[name] = _sums(task, array, data, offer.holes)
        task.folder.put(object_name, [data], scratch=SCRATCH)
    timing.charge("put")
    receipt = Receipt(
        task.shard,
        objects,
        dict(offer.holes),
        list(offer.content),
        sums,
        timing.seconds,
        timing.cpu_seconds,
        reused=True,
        host=node_name(),
        began=timing.began,
        fetched=timing.nbytes,
    )
    task.folder.put(receipt_name(task.shard), [receipt.to_json()], scratch=SCRATCH)
    return receipt


def _samples_are(task: ShardTask, offer: Offer, timing: Timing) -> bool:
    """Whether every sample has the content hash that it had."""
    with contextlib.closing(fetch_ahead(task.job.source, task.keys, task.sizes)) as samples:
        for (_, sample), content in zip(samples, offer.content, strict=True):
            if isinstance(sample, FetchError) or not sample.content == content != "":
                return False
            timing.count(sample)
    return True


def _object(offer: Offer, name: str, object_name: str) -> bytes | None:
    try:
        data = offer.folder.read(object_name)
    except StorageError:
        return None
    whole = (len(data), xxhash.xxh3_64_intdigest(data)) == offer.objects[name]
    return data if whole else None


def _sums(task: ShardTask, array: Array, data: bytes, holes: Mapping[int, str]) -> ChannelSums:
    """What the earlier build added up: the sums of single shards are not kept."""
    sums = Sums(array.row_shape)
    numbers = range(task.first_row, task.first_row + len(task.keys))
    with one_thread():
        for number, row in zip(numbers, _rows(array, data), strict=False):
            if number not in holes:
                sums.add(row)
    return sums.result()


def _rows(array: Array, data: bytes) -> Iterator[np.ndarray]:
    """The rows of a whole object, in memory that the next one uses again."""
    chunks = math.prod(array.chunks_per_object)
    view = memoryview(data)
    index = decode_index(view[-chunks * 16 - 4 :], chunks)
    chunk = np.empty(array.chunk_shape, array.dtype)
    for offset, length in index.tolist():
        array.decoder.decode(view[offset : offset + length], chunk)
        if array.decoder.filtered:
            undo_image(chunk)
        yield from chunk
