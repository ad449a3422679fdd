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
from precache_workers.planning.base_shard import BaseShard
from precache_workers.planning.shard_actions import Action, Compute, reuse_action
from precache_workers.profiling.estimate import TimeCost, UnitTimes
from precache_workers.runtime.time_limit import DECODING, notes, run_in_time
from precache_workers.shards.base_rows import BaseRows, open_base
from precache_workers.shards.field_writer import FieldWriter
from precache_workers.shards.samples import (
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
    base
        A shard of the base version, of which rows are reused.
    places
        Places of these rows.
    """

    job: Job
    shapes: Mapping[str, RowShape]
    rows_per_shard: int
    keys: Sequence[str] = ()
    sizes: Sequence[int] = ()
    base: BaseShard | None = None
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
        opening, taken = _reuse(task, recipes)
    return UnitTimes(
        fetch,
        nbytes,
        {name: cost for name, (cost, _) in computed.items()},
        {name: cost for name, (cost, _) in taken.items()},
        {name: stored for name, (_, stored) in computed.items()},
        {name: stored for name, (_, stored) in taken.items()},
        opening,
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
    costs: dict[str, tuple[TimeCost, float]] = {}
    for arrays in variants_of(recipes).values():
        writers = [_writer(task, recipes[array], None) for array in arrays]
        clock, at = _Clock(), notes()
        for place, (key, sample) in enumerate(samples):
            at.begin(DECODING, key)
            for writer in writers:
                try:
                    Compute().make_row(writer, place, key, sample)
                    writer.keep(place)
                except Exception as error:  # whatever a decoder raises on a hostile file
                    reason = str(error) if isinstance(error, SampleError) else repr(error)
                    failed.setdefault(key, reason)
                    writer.leave_hole(place)
        at.end()
        stored = [_stored(writer, len(samples)) for writer in writers]
        cost = clock.lap().over(max(1, len(samples)) * len(arrays))
        costs |= {array: (cost, nbytes) for array, nbytes in zip(arrays, stored, strict=True)}
    return costs


def _reuse(
    task: RatesTask, recipes: Mapping[str, FieldRecipe]
) -> tuple[TimeCost, dict[str, tuple[TimeCost, float]]]:
    """Time opening the base version's objects, by byte, and reusing each array's rows.

    Variants that resume the same object share what they have in common, as in `_compute`.
    """
    base, clock = task.base, _Clock()
    if base is None:
        return TimeCost(), {}
    opened = open_base(base, check=True)
    opening = clock.lap().over(max(1, base.nbytes_of(opened)))
    finished = [[name] for name, rows in opened.items() if rows.field.match.finished]
    begun = variants_of(name for name, rows in opened.items() if not rows.field.match.finished)
    costs: dict[str, tuple[TimeCost, float]] = {}
    for arrays in [*finished, *begun.values()]:
        writers = [_writer(task, recipes[array], opened[array]) for array in arrays]
        for writer in writers:
            writer.start_writing()
        clock = _Clock()
        match = opened[arrays[0]].field.match
        step = opened[arrays[0]].chunk_rows if match.finished else 1
        for run, reused in _runs(np.array(task.places), step):
            _reuse_run(writers, run, reuse_action(match) if reused else None)
        stored = [_stored(writer, len(task.places)) for writer in writers]
        cost = clock.lap().over(max(1, len(task.places)) * len(arrays))
        costs |= {array: (cost, nbytes) for array, nbytes in zip(arrays, stored, strict=True)}
    return opening, costs


def _runs(places: np.ndarray, step: int) -> Iterator[tuple[range, bool]]:
    """Yield the rows of the chunks that hold these places, in runs, and whether they are these."""
    rows = (np.unique(places // step)[:, None] * step + np.arange(step)).ravel()
    reused = np.isin(rows, places)
    breaks = np.flatnonzero((np.diff(rows) != 1) | (reused[1:] != reused[:-1])) + 1
    for part, among in zip(np.split(rows, breaks), np.split(reused, breaks), strict=True):
        yield range(int(part[0]), int(part[-1]) + 1), bool(among[0])


def _reuse_run(writers: Sequence[FieldWriter], run: range, action: Action | None) -> None:
    """Reuse rows; without an action, fill up chunks that are encoded with them."""
    if action is not None and all(writer.copies_runs for writer in writers):
        for writer in writers:
            writer.copy(run)
        return
    for place in run:
        key = str(place)
        for writer in writers:
            if action is None:
                writer.leave_hole(place)
                continue
            try:
                action.make_row(writer, place, key, None)
                writer.keep(place)
            except SampleError:  # the build leaves a hole, too
                writer.leave_hole(place)


def _writer(task: RatesTask, ops: FieldRecipe, base: BaseRows | None) -> FieldWriter:
    """Create a writer for as many rows as are timed, in chunks as large as the build's."""
    shape = task.shapes[ops.name]
    step = shape.chunk_rows(task.rows_per_shard)
    chunks = max(-(-len(task.keys) // step), len({place // step for place in task.places}))
    rows = step * (chunks | 1)  # a power of two times an odd number
    declared = task.job.recipe.fields[ops.name]
    return FieldWriter(ops.name, declared, shape, rows, ops=ops, base=base, reused=task.places)


def _stored(writer: FieldWriter, rows: int) -> float:
    """Finish a shard; returns its stored bytes per row."""
    parts = writer.finish().parts
    stored = sum(map(len, parts[:-1])) + INDEX_ENTRY * (len(parts) - 1)
    return stored / max(1, rows)
