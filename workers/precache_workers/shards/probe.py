"""A few samples decoded before a build begins: row shapes, and how much will be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precache.codecs.chunk import encoder
from precache.errors import PrecacheError, RecipeError, SampleError, SourceError
from precache.messages import shown
from precache.recipe.ops import DTYPES
from precache.recipe.recipe import ImageCodec, Recipe
from precache.store.layout import RowShape, rows_per_chunk
from precache.store.row_table import RowTable
from precache_workers.planning.rows import sample_for_probe
from precache_workers.planning.work import MeasuredRows
from precache_workers.runtime.time_limit import DECODING, notes, run_in_time
from precache_workers.shards.samples import (
    BASE_MEMORY,
    Job,
    SampleTask,
    fetch_ahead,
    one_thread,
    recipes_of,
)
from precache_workers.sources.base import Sample

PROBE_SAMPLES = 24


@dataclass(frozen=True)
class ProbeTask(SampleTask):
    """A few samples to learn row shapes and compressed sizes from."""

    job: Job
    keys: Sequence[str]
    sizes: Sequence[int]
    memory: int = BASE_MEMORY


def probe_task(job: Job, table: RowTable) -> ProbeTask:
    """For samples from all over a table."""
    rows = sample_for_probe(table, PROBE_SAMPLES)
    return ProbeTask(job, [table.keys[row] for row in rows], table.sizes[rows].tolist())


def run_probe(task: ProbeTask) -> MeasuredRows:
    """Learn row shapes from the first sample that decodes, and stored bytes from all given.

    Raises
    ------
    SampleError
        None of them decodes.
    """
    return run_in_time(lambda: _probe(task), task.job.sample_seconds)


def measured(outcome: MeasuredRows | PrecacheError, source: str) -> MeasuredRows:
    """What `run_probe` returned; raises the error that came in place of it."""
    if isinstance(outcome, SampleError):
        raise SourceError(f"{shown(source)}: {outcome}") from None
    if isinstance(outcome, PrecacheError):
        raise outcome
    return outcome


def _probe(task: ProbeTask) -> MeasuredRows:
    recipes = recipes_of(task.job)
    shapes: dict[str, RowShape] = {}
    stored = np.zeros(0)
    reasons = []
    at = notes()
    with one_thread():
        for key, sample in fetch_ahead(
            task.job.source, task.keys, task.sizes, task.barred, task.alone
        ):
            at.begin(DECODING, key)
            try:
                if not isinstance(sample, Sample):
                    raise sample
                if key in task.barred:
                    raise SampleError(task.barred[key])
                rows = {name: recipe(sample, key) for name, recipe in recipes.items()}
            except Exception as error:  # the build itself will say which samples are holes
                reasons.append(f"{key}: {error}")
                continue
            finally:
                at.end()
            if not shapes:
                _check_dtypes(rows)
                shapes = {n: RowShape(r.shape, r.dtype.name) for n, r in rows.items()}
                _check_declared(task.job.recipe, shapes)
            stored = np.append(stored, sum(_stored_nbytes(task.job, n, r) for n, r in rows.items()))
    if not shapes:
        why = reasons[0] if reasons else "each kills the worker that decodes it"
        tried = f"first {len(task.keys)} samples" if task.keys else "samples that were tried"
        raise SampleError(f"none of the {tried} has a row: {why}")
    return MeasuredRows(shapes, float(stored.mean()))


def _check_dtypes(rows: Mapping[str, np.ndarray]) -> None:
    for name, row in rows.items():
        if row.dtype.name not in DTYPES:
            kind = "str" if row.dtype.kind == "U" else row.dtype.name
            raise RecipeError(
                f"the ops of {name} make values of type {kind}; a store holds {', '.join(DTYPES)}"
            )


def _check_declared(recipe: Recipe, shapes: Mapping[str, RowShape]) -> None:
    """Refuse rows that are not what the recipe declares, or that its codec cannot store."""
    for name, row in shapes.items():
        field = recipe.fields[name]
        declared = (field.dtype or row.dtype, field.shape or row.shape)
        image = row.dtype == "uint8" and len(row.shape) == 3
        storable = image or not isinstance(field.stored_as, ImageCodec)
        if declared != (row.dtype, row.shape) or not storable:
            raise RecipeError(
                f"the ops of {name} make {row.dtype} {row.shape}, and it is declared as "
                f"{declared[0]} {declared[1]} with codec {field.stored_as.name}; declare the "
                "function's dtype and shape, and a codec that stores them: zstd or raw"
            )


def _stored_nbytes(job: Job, name: str, row: np.ndarray) -> float:
    codec = job.recipe.fields[name].stored_as
    rows = rows_per_chunk(row.nbytes)
    chunk = np.repeat(np.ascontiguousarray(row)[None], rows, axis=0)
    if isinstance(codec, ImageCodec) or rows == 1:
        return len(encoder(codec, row.dtype.name)(chunk[:1])) + 16.0
    return float(row.nbytes + 16)
