"""Tasks that read shards and samples again, to restore the small objects of a version."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import xxhash

from precache.codecs.image import undo_image
from precache.errors import DamageError, FetchError, SampleError
from precache.storage.base import Folder
from precache.store.layout import MISSING, decode_index
from precache.store.zarr_metadata import Array
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.field_writer import Sums
from precache_workers.shards.samples import BASE_MEMORY, FetchAllTask
from precache_workers.sources.base import Sample


@dataclass(frozen=True)
class SampleFacts:
    """Content hash (XXH3-128, hex) and label of a sample, -1 for none; or why it has neither."""

    content: str
    label: int
    error: FetchError | SampleError | None = None


@dataclass(frozen=True)
class FetchTask(FetchAllTask):
    """Fetch the samples of a shard without decoding them."""

    shard: int = field(kw_only=True)


def fetch_samples(task: FetchTask) -> list[SampleFacts]:
    """Fetch the samples of a task.

    Raises
    ------
    HangError
        A sample takes too long.
    """
    return run_in_time(functools.partial(_fetch, task), task.job.sample_seconds)


def _fetch(task: FetchTask) -> list[SampleFacts]:
    return [
        SampleFacts(sample.content, -1 if sample.label is None else sample.label)
        if isinstance(sample, Sample)
        else SampleFacts("", -1, sample)
        for _, sample in task.fetch()
    ]


@dataclass(frozen=True)
class Surveyed:
    """Bytes and XXH3-64 of a shard, and the sums by channel of its rows."""

    size: int
    xxh3: int
    sums: list[float] | None


@dataclass(frozen=True)
class SurveyTask:
    """Read and decode one shard.

    Attributes
    ----------
    job
        Layout of its array.
    name
        Name of the object, below the folder.
    valid
        (rows,) bool: False for holes.
    """

    job: Array
    folder: Folder
    name: str
    shard: int
    valid: np.ndarray
    summed: bool

    @property
    def memory(self) -> int:
        """Bytes its process may need."""
        return BASE_MEMORY + math.prod(self.job.object_shape) * np.dtype(self.job.dtype).itemsize

    def retried(self) -> Self:
        return self


def survey_shard(task: SurveyTask) -> Surveyed:
    """Compute what the version's small objects record of a shard.

    Raises
    ------
    DamageError
        It is not whole by its own checksums.
    StorageError
        It cannot be read.
    """
    layout, data = task.job, task.folder.read(task.name)
    sums = Sums(layout.row_shape) if task.summed else None
    for start, chunk in _chunks(layout, data, len(task.valid)):
        for place in range(min(len(chunk), len(task.valid) - start)):
            if sums is not None and task.valid[start + place]:
                sums.add(chunk[place])
    flat = None if sums is None else sums.result().flat()
    return Surveyed(len(data), xxhash.xxh3_64_intdigest(data), flat)


def _chunks(layout: Array, data: bytes, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """First row and decoded rows of each chunk of a shard; valid until the next."""
    entries, step = math.prod(layout.chunks_per_object), layout.chunk_shape[0]
    index = decode_index(data[-entries * 16 - 4 :], entries)
    count = -(-rows // step)
    ends = np.cumsum(index[:count, 1], dtype=np.uint64)
    begins = ends - index[:count, 1]
    regular = np.array_equal(begins, index[:count, 0]) and (index[count:] == MISSING).all()
    if not regular or int(ends[-1]) + entries * 16 + 4 != len(data):
        raise DamageError("its chunks do not lie one after another")
    out = np.empty(layout.chunk_shape, layout.dtype)
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        layout.decoder.decode(memoryview(data)[begin:end], out)
        if layout.decoder.filtered:
            undo_image(out)
        yield number * step, out
