"""Unit times of a build on this machine, from shards of a few rows that are built and dropped."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from precache.errors import PrecacheError, SampleError
from precache.recipe.variants import variants_of
from precache.storage.base import Buffer, Folder
from precache.storage.local import LocalFolder
from precache.store.layout import INDEX_ENTRY_NBYTES
from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED, RowTable
from precache_workers.cluster.executor import RunTasks
from precache_workers.planning.assembly import assemble, count_rows
from precache_workers.planning.catalogue import has_row
from precache_workers.planning.rows import in_few_units, samples_read
from precache_workers.profiling.estimate import RowCost, UnitTimes
from precache_workers.profiling.harness import SampleRun, hole_reason
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.samples import FetchAllTask, Job, one_thread, recipes_of
from precache_workers.shards.shard_task import ShardTask, run_shard
from precache_workers.shards.timing import TimeCost
from precache_workers.sources.base import Fetched, Sample
from precache_workers.sources.fetching import FetchedSamples

TIMED, LEAST_TIMED = 128, 8
"""Rows of each kind that are measured; samples of `TIMED_BYTES` and more are fewer."""
TIMED_BYTES = 128 << 20


class _Nowhere(LocalFolder):
    """A folder that keeps nothing."""

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        return True

    def copy(self, *_: object, **__: object) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class RatesTask(ShardTask):
    """Rows to be measured, by shards that are built and dropped.

    Attributes
    ----------
    stored
        What is stored of the rows of one shard; None if none is reused.
    samples_read
        Samples that are read to fetch these, as `planning.rows.samples_read` counts them.
    samples
        The samples, once they were fetched.
    """

    folder: Folder = field(default_factory=lambda: _Nowhere(Path(os.devnull)))
    shard: int = 0
    accept_missing: bool = True
    samples_read: int
    samples: Sequence[Fetched] | None = None

    @classmethod
    def some_of(cls, job: Job, table: RowTable, rows: np.ndarray, **more: Any) -> Self:
        """Return the task for some of the rows (n,), of small and of large samples."""
        chosen = rows_to_time(table, rows)
        [read] = samples_read(table, [chosen])
        return cls.of(job, table, chosen, samples_read=read, **more)

    def fetch(self, places: Sequence[int] | None = None) -> FetchedSamples:
        if self.samples is None:
            return super().fetch(places)
        samples = self.samples
        return ((self.keys[at], samples[at]) for at in places or ())


def start_worker(run: RunTasks, job: Job) -> None:
    """Make a worker load the ops of a recipe, with their libraries."""
    list(run(_load, [FetchAllTask(job)]))


def _load(task: FetchAllTask) -> None:
    recipes_of(task.job)


def rows_to_time(table: RowTable, rows: np.ndarray) -> np.ndarray:
    """Choose some of the rows (n,), of small and of large samples.

    Few samples are most of the work if sizes vary: the middles of so many equal parts, by size,
    are nearer to the mean than as many at random.
    """
    rows = np.array(in_few_units(table, rows.tolist(), TIMED), np.int64)
    sizes = table.sizes[rows]
    by_size = rows[np.argsort(sizes, kind="stable")]
    affordable = TIMED_BYTES // max(1, int(sizes.mean())) if len(rows) else 0
    count = min(TIMED, max(LEAST_TIMED, affordable), len(rows))
    middles = (np.arange(count) + 0.5) * len(rows) / max(1, count)
    chosen: np.ndarray = np.sort(by_size[middles.astype(int)])
    return chosen


def time_rows(run: RunTasks, task: RatesTask) -> UnitTimes:
    """Measure rows where the tasks of the build will run; raises the error of its worker."""
    [(_, outcome)] = run(measure_rates, [task])
    if isinstance(outcome, PrecacheError):
        raise outcome
    times: UnitTimes = outcome
    return times


def measure_rates(task: RatesTask) -> UnitTimes:
    """Build shards of the rows and drop them."""

    reading = SampleRun()

    def fetch() -> list[tuple[str, Fetched]]:
        with one_thread():
            return reading.time("fetch", lambda: list(task.fetch()), time.process_time)

    fetched = run_in_time(fetch, task.seconds)
    keys, samples = [key for key, _ in fetched], [sample for _, sample in fetched]
    rows = max(1, sum(isinstance(sample, Sample) for sample in samples))
    computed, failed = dict[str, RowCost](), dict[str, str]()
    for arrays in variants_of(task.job.recipe.fields).values() if keys else ():

        def build(part: slice, arrays: Sequence[str] = arrays) -> Receipt:
            receipt = run_shard(_shard_of(task, arrays, keys[part], samples[part]))
            failed.update({keys[part][row]: hole.reason for row, hole in receipt.holes.items()})
            return receipt

        build(slice(1))  # the first row of a process is slower
        firsts = range(0, len(keys), task.rows_per_shard)
        receipts = [build(slice(first, first + task.rows_per_shard)) for first in firsts]
        # Each of several variants, which have ops in common, costs its share of all of them.
        time_of_row = sum(map(_time, receipts), TimeCost()) / (rows * len(arrays))
        for array in arrays:
            step = task.shapes[array].chunk_rows(task.rows_per_shard)
            index = INDEX_ENTRY_NBYTES * (task.rows_per_shard // step)
            data = sum(receipt.objects[array].size - index for receipt in receipts)
            computed[array] = RowCost(time_of_row, data / rows + INDEX_ENTRY_NBYTES / step)
    failed |= {key: hole_reason(why) for key, why in fetched if isinstance(why, Exception)}
    return UnitTimes(
        fetch=reading.times["fetch"] / max(1, task.samples_read),
        nbytes=sum(sample.nbytes for sample in samples if isinstance(sample, Sample)) / rows,
        computed=computed,
        reused=_reuse(task),
        samples=len(keys),
        failed=tuple(failed.items()),
    )


def _reuse(task: RatesTask) -> RowCost:
    """Return the cost of a row of one array that is reused, by all such rows of a shard."""
    stored = task.stored
    if stored is None:
        return RowCost()
    assembly = assemble(task.job.recipe, stored)
    fields = {n: held for n, held in stored.fields.items() if count_rows(n, assembly).reused}
    taken = np.logical_and.reduce([stored.known, *map(has_row, fields.values())])
    others = dict.fromkeys(np.flatnonzero(~taken).tolist(), REMOVED)
    keys = [*map(str, range(len(taken)))]
    receipt = run_shard(
        replace(
            _shard_of(task, fields, keys, [SampleError("")] * len(keys)),
            stored=replace(stored, fields=fields, known=np.ones_like(taken), holes=others),
        )
    )
    nbytes = sum(receipt.objects[name].size for name in fields)
    rows = max(1, len(fields) * int(taken.sum()))
    return RowCost(_time(receipt) / rows, nbytes / rows)


def _shard_of(
    task: RatesTask, arrays: Collection[str], keys: Sequence[str], samples: Sequence[Fetched]
) -> RatesTask:
    """Return a shard of some arrays, of samples that were fetched."""
    recipe = task.job.recipe
    own = recipe.model_copy(update={"fields": {name: recipe.fields[name] for name in arrays}})
    return replace(
        task,
        job=replace(task.job, recipe=own),
        keys=keys,
        sizes=[0] * len(keys),
        locations=None,
        shapes={name: task.shapes[name] for name in arrays},
        stored=None,
        samples=samples,
    )


def _time(receipt: Receipt) -> TimeCost:
    """Return the time of a shard's rows, without that of their fetching."""
    wall, cpu = receipt.seconds["ops"] + receipt.seconds["encode"], receipt.cpu_seconds
    return TimeCost(max(wall, cpu), cpu)
