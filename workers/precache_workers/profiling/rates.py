"""A few rows made, timed and thrown away: what a row of each kind costs here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from precache.errors import SampleError
from precache.recipe.variants import variants_of
from precache.store.layout import RowShape
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.base_shard import BaseShardRows
from precache_workers.planning.reuse import BaseShard
from precache_workers.profiling.estimate import TimeCost, UnitTimes
from precache_workers.runtime.time_limit import DECODING, notes, run_in_time
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
from precache_workers.shards.timing import Timing
from precache_workers.sources.base import Sample

INDEX_ENTRY = 16
"""Bytes of a shard's index for each chunk."""


@dataclass(frozen=True)
class RatesTask(SampleTask):
    """Rows to be timed.

    Attributes
    ----------
    keys, sizes
        Of samples to be fetched and computed.
    offer
        A shard of an earlier version, of which rows are taken over.
    places
        Of these rows.
    """

    job: Job
    shapes: Mapping[str, RowShape]
    rows_per_shard: int
    keys: Sequence[str] = ()
    sizes: Sequence[int] = ()
    offer: BaseShard | None = None
    places: Sequence[int] = ()
    memory: int = field(default=BASE_MEMORY, kw_only=True)


class _Clock:
    def __init__(self) -> None:
        self.lap()

    def lap(self) -> TimeCost:
        """Seconds since the last lap."""
        now = time.perf_counter(), time.process_time()
        since = getattr(self, "_since", now)
        self._since = now
        return TimeCost(now[0] - since[0], now[1] - since[1])


def measure_rates(task: RatesTask) -> UnitTimes:
    """Make the rows, in memory alone."""
    return run_in_time(lambda: _measure(task), task.job.sample_seconds)


def _measure(task: RatesTask) -> UnitTimes:
    recipes = recipes_of(task.job)
    with one_thread():
        samples, fetch, nbytes, failed = _fetch(task)
        if samples:
            _warm(recipes, *samples[0])
        computed = _compute(task, recipes, samples, failed)
        opened, taken = _take(task, recipes)
    return UnitTimes(
        fetch,
        nbytes,
        {name: cost for name, (cost, _) in computed.items()},
        {name: cost for name, (cost, _) in taken.items()},
        {name: stored for name, (_, stored) in computed.items()},
        {name: stored for name, (_, stored) in taken.items()},
        opened,
        len(task.keys),
        tuple(failed.items()),
    )


def _fetch(task: RatesTask) -> tuple[list[tuple[str, Sample]], TimeCost, float, dict[str, str]]:
    """Samples, what each cost, its bytes, and those that cannot be fetched."""
    clock, timing = _Clock(), Timing()
    found: list[tuple[str, Sample]] = []
    failed = {}
    for key, sample in fetch_ahead(task.job.source, task.keys, task.sizes, task.barred, task.alone):
        if not isinstance(sample, Sample):
            failed[key] = str(sample)
        elif key in task.barred:
            failed[key] = task.barred[key]
        else:
            found.append((key, sample))
    cost = clock.lap().over(max(1, len(task.keys)))
    for _, sample in found:
        timing.count(sample)
    return found, cost, timing.nbytes / max(1, len(found)), failed


def _warm(recipes: Mapping[str, FieldRecipe], key: str, sample: Sample) -> None:
    """The first row of a process is dearer than the others."""
    notes().begin(DECODING, key)
    for recipe in recipes.values():
        try:
            recipe(sample, key)
        except Exception:  # it will be told of when it is timed
            continue
    notes().end()


def _compute(
    task: RatesTask,
    recipes: Mapping[str, FieldRecipe],
    samples: Sequence[tuple[str, Sample]],
    failed: dict[str, str],
) -> dict[str, tuple[TimeCost, float]]:
    """What a row of each array costs, and its stored bytes; adds to `failed`.

    Of variants, which have ops in common, each costs its share of what all of them do.
    """
    found: dict[str, tuple[TimeCost, float]] = {}
    for arrays in variants_of(recipes).values():
        outputs = [_output(task, recipes[array], None) for array in arrays]
        clock, at = _Clock(), notes()
        for place, (key, sample) in enumerate(samples):
            at.begin(DECODING, key)
            for output in outputs:
                try:
                    output.compute(sample, key)
                    output.keep(place, False)
                except Exception as error:  # whatever a decoder raises on a hostile file
                    reason = str(error) if isinstance(error, SampleError) else repr(error)
                    failed.setdefault(key, reason)
                    output.leave_hole(place)
        at.end()
        stored = [_stored(output, len(samples)) for output in outputs]
        cost = clock.lap().over(max(1, len(samples)) * len(arrays))
        found |= {array: (cost, nbytes) for array, nbytes in zip(arrays, stored, strict=True)}
    return found


def _take(
    task: RatesTask, recipes: Mapping[str, FieldRecipe]
) -> tuple[TimeCost, dict[str, tuple[TimeCost, float]]]:
    """What a byte of the earlier version's objects costs to open, and each array's row.

    Variants that go on from one base share what they have in common, as in `_compute`.
    """
    offer, clock = task.offer, _Clock()
    if offer is None:
        return TimeCost(), {}
    old = open_offered(offer, check=True)
    opened = clock.lap().over(max(1, offer.nbytes_of(old)))
    finished = [[name] for name, rows in old.items() if rows.offered.made.finished]
    begun = variants_of(name for name, rows in old.items() if not rows.offered.made.finished)
    costs: dict[str, tuple[TimeCost, float]] = {}
    for arrays in [*finished, *begun.values()]:
        outputs = [_output(task, recipes[array], old[array]) for array in arrays]
        for output in outputs:
            output.expect(np.isin(np.arange(len(offer.same)), task.places))
            output.touch()
        clock = _Clock()
        step = old[arrays[0]].chunk_rows if arrays in finished else 1
        for run, taken in _runs(np.array(task.places), step):
            _take_run(outputs, run, taken)
        stored = [_stored(output, len(task.places)) for output in outputs]
        cost = clock.lap().over(max(1, len(task.places)) * len(arrays))
        costs |= {array: (cost, nbytes) for array, nbytes in zip(arrays, stored, strict=True)}
    return opened, costs


def _runs(places: np.ndarray, step: int) -> Iterator[tuple[range, bool]]:
    """Rows of the chunks that hold any of these places, in runs; whether they are among them."""
    rows = (np.unique(places // step)[:, None] * step + np.arange(step)).ravel()
    taken = np.isin(rows, places)
    breaks = np.flatnonzero((np.diff(rows) != 1) | (taken[1:] != taken[:-1])) + 1
    for part, among in zip(np.split(rows, breaks), np.split(taken, breaks), strict=True):
        yield range(int(part[0]), int(part[-1]) + 1), bool(among[0])


def _take_run(outputs: Sequence[FieldOutput], run: range, taken: bool) -> None:
    """Rows that are taken over, or others of their chunks, which are encoded with them."""
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
            except SampleError:  # a hole of the build's
                output.leave_hole(place)


def _output(task: RatesTask, recipe: FieldRecipe, old: BaseShardRows | None) -> FieldOutput:
    """For as many rows as are timed, in chunks as large as the build's."""
    shape = task.shapes[recipe.name]
    step = shape.chunk_rows(task.rows_per_shard)
    chunks = max(-(-len(task.keys) // step), len({place // step for place in task.places}))
    rows = step * (chunks | 1)  # a power of two times an odd number
    counted = np.ones(task.rows_per_shard, np.bool_)
    return field_output(task.job.recipe, recipe, shape, rows, old, counted)


def _stored(output: FieldOutput, rows: int) -> float:
    """Bytes of a row in a shard that is finished herewith."""
    parts, _ = output.finish()
    stored = sum(map(len, parts[:-1])) + INDEX_ENTRY * (len(parts) - 1)
    return stored / max(1, rows)
