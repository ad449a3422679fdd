"""Unit times of a build on this machine, from a few rows that are built and dropped."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from precache.errors import PrecacheError
from precache.recipe.recipe import Field
from precache.recipe.variants import variants_of
from precache.runtime.spread import Spread
from precache.storage.local import LocalFolder
from precache.store.layout import INDEX_ENTRY_NBYTES, RowShape
from precache.store.row_table import RowTable
from precache_workers.cluster.executor import RunTasks
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.assembly import Assembly, Compute, Take, Zeros, assemble
from precache_workers.planning.catalogue import StoredRows
from precache_workers.planning.rows import in_few_units
from precache_workers.profiling.estimate import RowCost, TimeCost, UnitTimes
from precache_workers.profiling.harness import (
    SampleRun,
    hole_reason,
    run_samples,
    timed,
)
from precache_workers.runtime.time_limit import FETCHING, run_in_time
from precache_workers.shards.field_writer import FieldWriter, keep_rows, stage_rows
from precache_workers.shards.samples import (
    FetchAllTask,
    FetchedSamples,
    Job,
    SampleTask,
    one_thread,
    recipes_of,
)
from precache_workers.shards.shard_task import ShardTask, run_shard
from precache_workers.shards.stored_rows import DamagedObjectError, StoredObjects
from precache_workers.sources.base import Fetched, Sample

TIMED, LEAST_TIMED = 128, 8
"""Rows of each kind that are measured; samples of `TIMED_BYTES` and more are fewer."""
TIMED_BYTES = 128 << 20
EMPTY_SHARDS = 5
"""Shards without a sample by which the cost of a shard is measured."""


@dataclass(frozen=True, kw_only=True)
class RatesTask(FetchAllTask):
    """Rows to be measured: some are computed of samples, others reused.

    Attributes
    ----------
    samples_read
        Samples that are read to fetch these, as `planning.rows.samples_read` counts them.
    stored
        Stored rows of a shard that are reused.
    places
        Places of these rows in the shard.
    """

    shapes: Mapping[str, RowShape]
    rows_per_shard: int
    samples_read: int
    stored: StoredRows | None = None
    places: Sequence[int] = ()


@dataclass(frozen=True)
class StartTask(SampleTask):
    """A task that makes a worker load what tasks of its job need."""

    job: Job
    keys: Sequence[str] = ()


def start_worker(task: StartTask) -> None:
    """Load the ops of the recipe, with their libraries."""
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
    """Build the rows in memory, and a few shards without a sample in a temporary folder."""
    times = run_in_time(partial(_measure, task), task.job.sample_seconds)
    return replace(times, shard_cpu=_shard_cpu(task))


def _shard_cpu(task: RatesTask) -> float:
    seconds = []
    with tempfile.TemporaryDirectory(prefix="precache-plan-") as name:
        for number in range(EMPTY_SHARDS):
            shard = ShardTask(
                task.job,
                [""],
                [0],
                barred={"": FETCHING},
                folder=LocalFolder(Path(name)),
                shapes=task.shapes,
                rows_per_shard=1,
                shard=number,
            )
            seconds.append(run_shard(shard).cpu_seconds)
    return Spread.of(seconds).median


def _measure(task: RatesTask) -> UnitTimes:
    recipes = recipes_of(task.job)
    with one_thread():
        samples, fetch = timed(lambda: list(task.fetch()), time.process_time)
        computed, nbytes, failed = _compute(task, recipes, samples)
        try:
            opened, taken = _reuse(task, recipes)
        except DamagedObjectError:  # the build makes its rows again
            opened, taken = TimeCost(), {}
    return UnitTimes(
        fetch=fetch / max(1, task.samples_read),
        nbytes=nbytes,
        computed=computed,
        taken=taken,
        opened=opened,
        samples=len(task.keys),
        failed=failed,
    )


def _compute(
    task: RatesTask, recipes: Mapping[str, FieldRecipe], samples: Sequence[tuple[str, Fetched]]
) -> tuple[dict[str, RowCost], float, tuple[tuple[str, str], ...]]:
    """Return the cost of a row of each array, bytes of a sample, and failures.

    Each of several variants, which have ops in common, costs its share of all of them.
    """
    writers = {
        name: FieldWriter(*_written(task, recipe), ops=recipe) for name, recipe in recipes.items()
    }

    def compute(name: str, key: str, sample: Sample) -> None:
        writers[name].stage(Compute(), 0, key, sample)
        writers[name].keep(range(1))

    def compute_rows(run: SampleRun, sample: Sample) -> None:
        for name in writers:
            run.time(name, partial(compute, name, run.key, sample), time.process_time)

    fetched: FetchedSamples = (pair for pair in samples)
    runs = list(run_samples(fetched, compute_rows, barred=task.barred, warm_up=recipes))
    rows = max(1, sum(isinstance(sample, Sample) for _, sample in samples))
    computed: dict[str, RowCost] = {}
    for arrays in variants_of(recipes).values():
        times = [run.times.get(name, TimeCost()) for run, _ in runs for name in arrays]
        finish = partial(_stored, [writers[name] for name in arrays], rows)
        stored, finishing = timed(finish, time.process_time)
        cost = sum(times, finishing) / (rows * len(arrays))
        computed |= {n: RowCost(cost, nbytes) for n, nbytes in zip(arrays, stored, strict=True)}
    failed = [(run.key, hole_reason(error)) for run, error in runs if isinstance(error, Exception)]
    return computed, sum(run.nbytes for run, _ in runs) / rows, tuple(failed)


def _reuse(
    task: RatesTask, recipes: Mapping[str, FieldRecipe]
) -> tuple[TimeCost, dict[str, RowCost]]:
    """Return the cost of opening a byte of stored objects, and of reusing a row of each array.

    Arrays are reused together, as variants share what they have in common; each costs the mean.
    """
    if task.stored is None or not task.places:
        return TimeCost(), {}
    assembly = assemble(task.job.recipe, task.stored)
    objects = StoredObjects(assembly)
    nbytes, opening = timed(objects.open_all, time.process_time)
    first = task.places[0]
    actions = assembly.with_sample(first, task.stored.contents[first]).fields
    arrays = task.stored.arrays
    writers = {
        name: FieldWriter(
            *_written(task, recipes[name]), ops=recipes[name], arrays=arrays, objects=objects
        )
        for name, action in actions.items()
        if isinstance(action, Take)
    }
    stored, cost = timed(partial(_reuse_rows, task, assembly, writers), time.process_time)
    cost /= max(1, len(task.places) * len(writers))
    taken = {name: RowCost(cost, each) for name, each in zip(writers, stored, strict=True)}
    return opening / max(1, nbytes), taken


def _reuse_rows(
    task: RatesTask, assembly: Assembly, writers: Mapping[str, FieldWriter]
) -> list[float]:
    """Reuse the rows as a shard task does; returns the stored bytes of a row of each writer.

    Rows between them are left as holes.
    """
    places, rows = {*task.places}, assembly.rows
    hole = dict.fromkeys(writers, Zeros())
    for place in range(max(places) + 1):
        actions = assembly.with_sample(place, rows.contents[place]).fields
        actions = {name: actions[name] for name in writers}
        if place not in places or stage_rows(actions, writers, place, str(place)):
            stage_rows(hole, writers, place)
        keep_rows(writers, range(place, place + 1))
    return _stored(writers.values(), len(places))


def _written(task: RatesTask, ops: FieldRecipe) -> tuple[str, Field, RowShape, int]:
    """Return what a writer of the measured rows writes, in chunks as large as the build's."""
    shape = task.shapes[ops.name]
    step = shape.chunk_rows(task.rows_per_shard)
    most = max(len(task.keys), max(task.places, default=-1) + 1)
    chunks = -(-most // step)
    rows = step * (chunks | 1)  # a power of two times an odd number
    return ops.name, task.job.recipe.fields[ops.name], shape, rows


def _stored(writers: Iterable[FieldWriter], rows: int) -> list[float]:
    """Finish shards; returns the stored bytes per row of each."""
    finished = [writer.finish().parts or [b""] for writer in writers]
    return [
        (sum(map(len, parts[:-1])) + INDEX_ENTRY_NBYTES * (len(parts) - 1)) / max(1, rows)
        for parts in finished
    ]
