"""Times of each stage and op of a recipe, sample by sample."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from precache.codecs.chunk import encoder
from precache.errors import SampleError
from precache.recipe.ops import Function
from precache.recipe.recipe import Codec, ImageCodec, Recipe, ZstdCodec
from precache.store.layout import RowShape
from precache_workers.doctor.report import Stage
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.profiling.harness import LEAST, SampleRun, hole_reason, run_samples
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.samples import FetchAllTask, recipes_of
from precache_workers.shards.timing import TimeCost
from precache_workers.sources.base import Sample

KEPT_NBYTES = 256 << 20
"""Bytes of rows that are kept in memory for the trials that follow."""
NO_OP = "no op"
"""Name of the only step of a recipe without ops."""


@dataclass(frozen=True)
class StageTimes:
    """Measurements of all samples.

    Attributes
    ----------
    steps
        Names of the steps, and whether one has a random op.
    samples
        Those that have rows.
    failures
        (key, reason) of the others.
    """

    steps: Mapping[str, bool]
    samples: Sequence[SampleRun]
    failures: Sequence[tuple[str, str]]

    @property
    def rows(self) -> list[Mapping[str, np.ndarray]]:
        """Rows of the most common shapes: a store holds no others."""
        return [sample.rows for sample in self.samples if _shapes(sample) == self.shapes]

    def misfits(self) -> list[tuple[str, str]]:
        """Return (key, reason) of all other samples."""
        usual = _shown(self.shapes)
        return [
            (sample.key, f"its row is {_shown(shapes)}, most are {usual}")
            for sample in self.samples
            if (shapes := _shapes(sample)) != self.shapes
        ]

    @functools.cached_property
    def shapes(self) -> dict[str, RowShape]:
        """Shapes of the rows that a store would hold, by field."""
        [(shapes, _)] = Counter(tuple(_shapes(s).items()) for s in self.samples).most_common(1)
        return dict(shapes)

    def stage(self, name: str) -> Stage:
        """Return the times of one stage."""
        return Stage.of(name, [sample.times.get(name, TimeCost()) for sample in self.samples])


def _shapes(sample: SampleRun) -> dict[str, RowShape]:
    return {name: RowShape(row.shape, row.dtype.name) for name, row in sample.rows.items()}


def _shown(shapes: Mapping[str, RowShape]) -> str:
    return ", ".join(f"{row.dtype} {row.shape}" for row in shapes.values())


def steps_of(recipe: Recipe) -> dict[str, bool]:
    """Return unique names of the steps, ops of several fields joined, and whether one is random."""
    steps, seen = dict[str, bool](), Counter[str]()
    for column in itertools.zip_longest(*(spec.ops for spec in recipe.fields.values())):
        ops = [op for op in column if op]
        names = (op.function if isinstance(op, Function) else op.op for op in ops)
        name = "+".join(dict.fromkeys(names))
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name} {seen[name]}"
        steps[unique] = any(op.is_random for op in ops)
    return steps or {NO_OP: False}


def codec_for(codec: Codec, row: RowShape) -> Codec:
    """Return the codec, or plain zstd if it cannot hold such rows."""
    image = row.dtype == "uint8" and len(row.shape) == 3
    return codec if image or not isinstance(codec, ImageCodec) else ZstdCodec()


def measure_stages(
    task: FetchAllTask, *, seconds: float, tick: Callable[[int], None] = lambda done: None
) -> StageTimes:
    """Measure every stage of samples, one after another.

    Parameters
    ----------
    seconds
        Time after which no further sample is begun, once there are a few.
    tick
        Called with the number of samples that are done.

    Raises
    ------
    SampleError
        None of them has a row.
    HangError
        A sample takes too long.
    """
    return run_in_time(lambda: _measure(task, seconds, tick), task.job.sample_seconds)


def _measure(task: FetchAllTask, seconds: float, tick: Callable[[int], None]) -> StageTimes:
    """Measure all samples, or as many as there is time and memory for."""
    recipe, recipes = task.job.recipe, recipes_of(task.job)
    steps, encoder_of = steps_of(recipe), functools.lru_cache(16)(_encoder)

    def measure(run: SampleRun, sample: Sample) -> None:
        values: dict[str, np.ndarray] = {}
        running = {name: _steps(ops, sample, run.key) for name, ops in recipes.items()}
        for step in steps:
            for name, outputs in running.items():
                value = run.time(step, partial(next, outputs, None))
                if value is not None:
                    values[name] = recipes[name].row(value)
        run.rows = {name: value.copy() for name, value in values.items()}
        for name, shape in _shapes(run).items():
            encode = encoder_of(codec_for(recipe.fields[name].stored_as, shape), shape)
            run.time("encode", partial(encode, run.rows[name]))

    # Each alone, so that the time of each is measured.
    samples_in_turn, barred = replace(task, alone=frozenset(task.keys)).fetch(), task.barred
    runs = run_samples(samples_in_turn, measure, barred=barred, warm_up=recipes, seconds=seconds)
    samples, failures, held = list[SampleRun](), list[tuple[str, str]](), 0
    with contextlib.closing(runs):
        for number, (run, error) in enumerate(runs, 1):
            if error is not None:
                failures.append((run.key, hole_reason(error)))
            else:
                samples.append(run)
                held += sum(row.nbytes for row in run.rows.values())
            tick(number)
            if number >= LEAST and held > KEPT_NBYTES:
                break
    if not samples:
        raise SampleError(
            f"none of {len(failures)} samples has a row: {failures[0][0]}: {failures[0][1]}"
        )
    return StageTimes(steps, samples, failures)


def _encoder(codec: Codec, shape: RowShape) -> Callable[[np.ndarray], None]:
    """Return a function that encodes a row from reused memory, as builds do."""
    encode_chunk, chunk = encoder(codec, shape.dtype), np.zeros((1, *shape.shape), shape.dtype)

    def encode(row: np.ndarray) -> None:
        np.copyto(chunk[0], row)
        encode_chunk(chunk)

    encode(chunk[0])  # the first call is slower
    return encode


def _steps(recipe: FieldRecipe, sample: Sample, key: str) -> Iterator[np.ndarray]:
    """Yield the value after each op of a recipe, or its input if it has no ops."""
    for op, value in recipe.steps(sample, key):
        if op is not None:
            yield np.asarray(value)
    if op is None:
        yield np.asarray(value)
