"""Unit times of a build on this machine, from a few rows that are built in memory and dropped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from precache.errors import SampleError
from precache.recipe.variants import variants_of
from precache.store.layout import RowShape
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.base_shard import BaseShardRows
from precache_workers.planning.reuse import BaseShard
from precache_workers.profiling.estimate import UnitTimes
from precache_workers.profiling.harness import (
    SampleRun,
    Samples,
    reason_of,
    run_samples,
    timed,
)
from precache_workers.profiling.measurements import TimeCost
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.outputs import FieldOutput
from precache_workers.shards.rows import field_output, open_offered
from precache_workers.shards.shard_task import (
    BASE_MEMORY,
    Job,
    SampleTask,
    fetch_ahead,
    one_thread,
    recipes_of,
)
from precache_workers.sources.base import Fetched, Sample

INDEX_ENTRY = 16
"""Bytes of a shard's index for each chunk."""


@dataclass(frozen=True)
class RatesTask(SampleTask):
    """Rows to be measured.

    Attributes
    ----------
    keys, sizes
        Of samples to be fetched and computed.
    offer
        A base shard whose rows are reused.
    places
        Places of these rows in the shard.
    """

    job: Job
    shapes: Mapping[str, RowShape]
    rows_per_shard: int
    keys: Sequence[str] = ()
    sizes: Sequence[int] = ()
    offer: BaseShard | None = None
    places: Sequence[int] = ()
    memory: int = field(default=BASE_MEMORY, kw_only=True)


def measure_rates(task: RatesTask) -> UnitTimes:
    """Build the rows, in memory alone."""
    return run_in_time(lambda: _measure(task), task.job.sample_seconds)


def _measure(task: RatesTask) -> UnitTimes:
    recipes, count = recipes_of(task.job), max(1, len(task.keys))
    with one_thread():
        samples, fetch = timed(lambda: _fetch(task), time.process_time)
        computed, nbytes, failed = _compute(task, recipes, samples)
        opened, taken = _take(task, recipes)
    return UnitTimes(
        fetch / count,
        nbytes,
        {name: cost for name, (cost, _) in computed.items()},
        {name: cost for name, (cost, _) in taken.items()},
        {name: stored for name, (_, stored) in computed.items()},
        {name: stored for name, (_, stored) in taken.items()},
        opened,
        len(task.keys),
        failed,
    )


def _fetch(task: RatesTask) -> list[tuple[str, Fetched]]:
    job = task.job
    return list(fetch_ahead(job.source, task.keys, task.sizes, task.barred, task.alone))


def _compute(
    task: RatesTask, recipes: Mapping[str, FieldRecipe], samples: Sequence[tuple[str, Fetched]]
) -> tuple[dict[str, tuple[TimeCost, float]], float, tuple[tuple[str, str], ...]]:
    """Return the cost and stored bytes of a row of each array, bytes of a sample, and failures.

    Each of several variants, which have ops in common, costs its share of all of them.
    """
    outputs = {name: _output(task, recipe, None) for name, recipe in recipes.items()}

    def compute_rows(run: SampleRun, sample: Sample) -> None:
        def compute(name: str) -> None:
            outputs[name].compute(sample, run.key)
            outputs[name].keep(0, False)

        for name in outputs:
            run.time(name, partial(compute, name), time.process_time)

    fetched: Samples = (pair for pair in samples)
    runs = list(run_samples(fetched, compute_rows, barred=task.barred, warm_up=recipes))
    rows = max(1, sum(isinstance(sample, Sample) for _, sample in samples))
    computed: dict[str, tuple[TimeCost, float]] = {}
    for arrays in variants_of(recipes).values():
        times = [run.times.get(name, TimeCost()) for run, _ in runs for name in arrays]
        finish = partial(_stored, [outputs[name] for name in arrays], rows)
        stored, finishing = timed(finish, time.process_time)
        cost = sum(times, finishing) / (rows * len(arrays))
        computed |= {name: (cost, nbytes) for name, nbytes in zip(arrays, stored, strict=True)}
    nbytes = sum(run.nbytes for run, _ in runs) / rows
    failed = [(run.key, reason_of(error)) for run, error in runs if isinstance(error, Exception)]
    return computed, nbytes, tuple(failed)


def _take(
    task: RatesTask, recipes: Mapping[str, FieldRecipe]
) -> tuple[TimeCost, dict[str, tuple[TimeCost, float]]]:
    """Return the cost of opening a byte of the base shard, and of reusing a row of each array.

    Variants that resume from one array of the base share what they have in common.
    """
    offer = task.offer
    if offer is None:
        return TimeCost(), {}
    old, opening = timed(lambda: open_offered(offer, check=True), time.process_time)
    finished = [[name] for name, rows in old.items() if rows.offered.made.finished]
    begun = variants_of(name for name, rows in old.items() if not rows.offered.made.finished)
    costs: dict[str, tuple[TimeCost, float]] = {}
    for arrays in [*finished, *begun.values()]:
        outputs = [_output(task, recipes[array], old[array]) for array in arrays]
        for output in outputs:
            output.expect(np.isin(np.arange(len(offer.same)), task.places))
            output.touch()
        step = old[arrays[0]].chunk_rows if arrays in finished else 1
        stored, cost = timed(partial(_take_rows, task, outputs, step), time.process_time)
        cost /= max(1, len(task.places)) * len(arrays)
        costs |= {array: (cost, nbytes) for array, nbytes in zip(arrays, stored, strict=True)}
    return opening / max(1, offer.nbytes_of(old)), costs


def _take_rows(task: RatesTask, outputs: Sequence[FieldOutput], step: int) -> list[float]:
    """Reuse the rows; returns the stored bytes of a row of each output."""
    for run, taken in _runs(np.array(task.places), step):
        _take_run(outputs, run, taken)
    return _stored(outputs, len(task.places))


def _runs(places: np.ndarray, step: int) -> Iterator[tuple[range, bool]]:
    """Yield runs of rows of the chunks that hold any of the places; True for runs of places."""
    rows = (np.unique(places // step)[:, None] * step + np.arange(step)).ravel()
    taken = np.isin(rows, places)
    breaks = np.flatnonzero((np.diff(rows) != 1) | (taken[1:] != taken[:-1])) + 1
    for part, among in zip(np.split(rows, breaks), np.split(taken, breaks), strict=True):
        yield range(int(part[0]), int(part[-1]) + 1), bool(among[0])


def _take_run(outputs: Sequence[FieldOutput], run: range, taken: bool) -> None:
    """Reuse a run of rows, or leave holes for other rows of the same chunks."""
    if taken and all(output.carries for output in outputs):
        for output in outputs:
            output.carry(run)
        return
    for place in run:
        key = str(place)
        for output in outputs:
            if not taken:
                output.leave_hole(place)
                continue
            try:
                output.take(place, key)
                output.keep(place, output.unchanged)
            except SampleError:  # a hole in the build, too
                output.leave_hole(place)


def _output(task: RatesTask, recipe: FieldRecipe, old: BaseShardRows | None) -> FieldOutput:
    """Return an output for the measured rows, in chunks as large as the build's."""
    shape = task.shapes[recipe.name]
    step = shape.chunk_rows(task.rows_per_shard)
    chunks = max(-(-len(task.keys) // step), len({place // step for place in task.places}))
    rows = step * (chunks | 1)  # a power of two times an odd number
    counted = np.ones(task.rows_per_shard, np.bool_)
    return field_output(task.job.recipe, recipe, shape, rows, old, counted)


def _stored(outputs: Sequence[FieldOutput], rows: int) -> list[float]:
    """Finish shards; returns the stored bytes per row of each."""
    finished = [output.finish()[0] for output in outputs]
    return [
        (sum(map(len, parts[:-1])) + INDEX_ENTRY * (len(parts) - 1)) / max(1, rows)
        for parts in finished
    ]
