"""The probe: row shapes, stored bytes and readings of pixels from a few samples, before a build."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence

import numpy as np

from precache.codecs.chunk import encoder
from precache.errors import PrecacheError, RecipeError, SampleError, SourceError
from precache.messages import SHOWN, shown
from precache.recipe.ops import DTYPES
from precache.recipe.recipe import Field, ImageCodec, Recipe
from precache.recipe.variants import variants_of
from precache.store.layout import RowShape, rows_per_chunk
from precache.store.row_table import RowTable
from precache_workers.planning.rows import sample_for_probe
from precache_workers.planning.work_plan import MeasuredRows
from precache_workers.profiling.harness import SampleRun, run_samples
from precache_workers.profiling.pixel_readings import PixelReadings
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.samples import FetchAllTask, Job, recipes_of
from precache_workers.sources.base import Sample
from precache_workers.sources.dataset_items import Part, described, in_words

PROBE_SAMPLES = 24


def probe_task(job: Job, table: RowTable) -> FetchAllTask:
    """Return the task for samples from all over a table."""
    return FetchAllTask.of(job, table, sample_for_probe(table, PROBE_SAMPLES))


def run_probe(task: FetchAllTask) -> MeasuredRows:
    """Measure row shapes by the first sample that has a row, and stored bytes by all.

    Raises
    ------
    SampleError
        None of them has a row.
    RecipeError
        They suggest another reading of pixels than one that the recipe leaves open.
    """
    return run_in_time(functools.partial(_probe, task), task.job.sample_seconds)


def probed_rows(outcome: MeasuredRows | PrecacheError, source: str) -> MeasuredRows:
    """Return the outcome of `run_probe`, or raise it if it is an error."""
    if isinstance(outcome, SampleError):
        raise SourceError(f"{shown(source)}: {outcome}") from None
    if isinstance(outcome, PrecacheError):
        raise outcome
    return outcome


def _probe(task: FetchAllTask) -> MeasuredRows:
    job, recipes = task.job, recipes_of(task.job)
    arrays = {name: variants[0] for name, variants in variants_of(recipes).items()}
    fields = {name: job.recipe.fields[array] for name, array in arrays.items()}
    readings = PixelReadings(
        fields,
        {name: recipes[array] for name, array in arrays.items()},
    )
    shapes: dict[str, RowShape] = {}
    stored: list[float] = []
    reasons = []
    parts = _Parts(job.fetch_labels)

    def rows_of(run: SampleRun, sample: Sample) -> dict[str, np.ndarray]:
        parts.add(run.key, sample)
        readings.look(sample, run.key)
        return {name: recipe(sample, run.key) for name, recipe in recipes.items()}

    with contextlib.closing(run_samples(task.fetch(), rows_of, barred=task.barred)) as runs:
        for run, rows in runs:
            if isinstance(rows, Exception):  # the build itself decides which samples are holes
                reasons.append(f"{run.key}: {rows}")
                continue
            if not shapes:
                _check_dtypes(rows)
                shapes = {n: RowShape(r.shape, r.dtype.name) for n, r in rows.items()}
                _check_declared(job.recipe, shapes)
            stored.append(sum(_stored_nbytes(job, name, row) for name, row in rows.items()))
    for inputs in parts.inputs:
        _require_inputs(fields, inputs)
    if not shapes:
        raise SampleError(f"none of the {len(reasons)} samples tried has a row: {reasons[0]}")
    readings.require_clear()
    return MeasuredRows(shapes, float(np.mean(stored)), parts.notes(), readings.notes())


class _Parts:
    """The parts of samples that have labels, and those that nobody reads."""

    def __init__(self, bring_labels: bool) -> None:
        self.inputs: set[tuple[Part, ...]] = set()
        self._bring_labels = bring_labels
        self._labels: dict[str, str] = {}
        self._unread: dict[str, str] = {}

    def add(self, key: str, sample: Sample) -> None:
        self.inputs.add(tuple(sample.inputs))
        if sample.label_part:
            of = "none" if sample.label is None else str(sample.label)
            self._labels.setdefault(sample.label_part, f"{of} of sample {key}")
        for part, value in sample.unread.items():
            self._unread.setdefault(in_words(part), described(value))

    def notes(self) -> tuple[str, ...]:
        """Return lines for the user."""
        lines = []
        if self._bring_labels:
            named = [f"{part} of the samples, such as {of}" for part, of in self._labels.items()]
            lines.append(
                f"Labels are {' and '.join(named)}"
                if named
                else "Samples bring no label: a dict has one as 'label', a tuple as its item 1, or "
                "the dataset as its attribute `targets`"
            )
        if self._unread:
            named = [f"{part} ({value})" for part, value in self._unread.items()]
            more = f" and {len(named) - SHOWN} more parts" if len(named) > SHOWN else ""
            lines.append(f"No field reads {', '.join(named[:SHOWN])}{more} of the samples")
        return tuple(lines)


def _require_inputs(fields: Mapping[str, Field], inputs: Sequence[Part]) -> None:
    """Raise `RecipeError` if several fields would start from a sample's first part by default."""
    first, *others = inputs
    named = {name if field.input is None else field.input for name, field in fields.items()}
    unnamed = [n for n, field in fields.items() if field.input is None and n not in inputs]
    if others and unnamed and (len(unnamed) > 1 or first in named):
        raise RecipeError(
            f"field {unnamed[-1]} names no input, and would start from {in_words(first)}, as "
            f"another field does; samples have {', '.join(map(in_words, inputs))}: name one, "
            f"as input = {json.dumps(others[0])} in [fields.{unnamed[-1]}]"
        )


def _check_dtypes(rows: Mapping[str, np.ndarray]) -> None:
    for name, row in rows.items():
        if row.dtype.name not in DTYPES:
            if row.dtype.kind == "S":
                raise RecipeError(
                    f"the ops of {name} return the bytes of a file; begin them with decode, as "
                    'ops = [{ op = "decode" }]'
                )
            kind = "str" if row.dtype.kind == "U" else row.dtype.name
            raise RecipeError(
                f"the ops of {name} make values of type {kind}; a store holds {', '.join(DTYPES)}"
            )


def _check_declared(recipe: Recipe, shapes: Mapping[str, RowShape]) -> None:
    """Raise for rows that differ from what the recipe declares, or that its codec cannot store."""
    for name, row in shapes.items():
        field = recipe.fields[name]
        declared = RowShape(field.shape or row.shape, field.dtype or row.dtype)
        if declared != row:
            raise RecipeError(
                f"the ops of {name} make rows of {row}, and the recipe declares {declared}; "
                "declare the dtype and shape of the function's result in its op"
            )
        image = row.dtype == "uint8" and len(row.shape) == 3
        if isinstance(field.stored_as, ImageCodec) and not image:
            raise RecipeError(
                f"the ops of {name} make rows of {row}, and codec image stores uint8 (C, H, W); "
                'return (H, W, C) from the function, or give the field codec = "zstd" or "raw"'
            )


def _stored_nbytes(job: Job, name: str, row: np.ndarray) -> float:
    codec = job.recipe.fields[name].stored_as
    rows = rows_per_chunk(row.nbytes)
    chunk = np.repeat(np.ascontiguousarray(row)[None], rows, axis=0)
    if isinstance(codec, ImageCodec) or rows == 1:
        return len(encoder(codec, row.dtype.name)(chunk[:1])) + 16.0
    return float(row.nbytes + 16)
