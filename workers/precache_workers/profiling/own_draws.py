"""Own draws: random numbers that a Python dataset or a function of the user draws by itself.

A store would keep one draw for all epochs. Draws are seen by their effect: a few samples are made
a second time, and another row or label refuses the build. States of global generators are no
evidence: a draw may come from a generator of the dataset or from the system, and may change nothing
that is stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from precache.errors import RecipeError
from precache.recipe.ops import Function
from precache.recipe.recipe import Field
from precache.recipe.variants import field_of
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.profiling.harness import SampleRun, run_samples
from precache_workers.profiling.questions import Question
from precache_workers.shards.samples import FetchAllTask
from precache_workers.sources.base import Sample
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.fetching import FetchedSamples

MADE_TWICE = 8
"""Samples that are made twice: a flip of half of all images is missed once in 256 builds."""


class OwnDraws(Question):
    """Rows and labels of a few samples, to be compared with those of a second time.

    Fields that state ``variants = 1`` are left out. Several variants are no consent to one draw of
    what they share: the dataset's items, and what functions return that are not declared random.
    """

    def __init__(self, task: FetchAllTask, recipes: Mapping[str, FieldRecipe]) -> None:
        fields = task.job.recipe.fields
        self._task = task
        self._dataset = task.job.source if isinstance(task.job.source, DatasetSource) else None
        self._functions = {name: _functions(field) for name, field in fields.items()}
        self._recipes = {
            name: recipe
            for name, recipe in recipes.items()
            if not fields[name].states_one_draw
            and (self._dataset is not None or self._functions[name])
        }
        self._first: dict[str, tuple[Sample, Mapping[str, np.ndarray]]] = {}

    def look(self, key: str, sample: Sample) -> None:
        """Make the rows of a sample and keep them, if more are to be made twice."""
        if self._recipes and len(self._first) < MADE_TWICE:
            rows = {name: np.array(recipe(sample, key)) for name, recipe in self._recipes.items()}
            inputs = sample.inputs if self._dataset is None else {}
            self._first[key] = replace(sample, inputs=inputs, unread={}), rows

    def findings(self) -> Iterable[str]:
        """Make the samples again, and raise `RecipeError` if one has another row or label."""
        with contextlib.closing(run_samples(self._again(), self._drawn)) as runs:
            for _, drawn in runs:
                if isinstance(drawn, str):
                    raise RecipeError(drawn, ways=[("--variants", "1")] * self._is_image_alone)
        return ()

    @property
    def _is_image_alone(self) -> bool:
        """True if there is only the field that flags describe."""
        return {*map(field_of, self._recipes)} == {"image"} and not any(self._functions.values())

    def _again(self) -> FetchedSamples:
        if self._dataset is None:  # files do not draw
            return ((key, sample) for key, (sample, _) in self._first.items())
        places = [place for place, key in enumerate(self._task.keys) if key in self._first]
        return self._task.fetch(places)

    def _drawn(self, run: SampleRun, sample: Sample) -> str | None:
        """Return the error for a sample that differs from the first time."""
        before, rows = self._first[run.key]
        if sample.label != before.label:
            return self._of_dataset(f"{run.key} gave the labels {before.label} and {sample.label}")
        for name, recipe in self._recipes.items():
            if _alike(rows[name], recipe(sample, run.key)):
                continue
            if sample.content != before.content:
                return self._of_dataset(f"{run.key} gave two rows of field {field_of(name)}")
            if functions := self._functions[name]:
                return _of_functions(field_of(name), functions, run.key)
        return None

    def _of_dataset(self, difference: str) -> str:
        assert self._dataset is not None  # samples of other sources are not fetched again
        places = " and ".join(
            f"[fields.{name}]" for name in dict.fromkeys(map(field_of, self._recipes))
        )
        return (
            f"python:{self._dataset.factory} draws random numbers, or depends on earlier reads: "
            f"two reads of sample {difference}, and all epochs would read the one that is stored. "
            "Take what is random out of the dataset, and draw anew in every epoch by "
            "precache.transforms, or let random ops of the recipe draw (random_resized_crop, "
            "horizontal_flip). To keep one draw of each sample: "
            f"{'--variants 1, or ' * self._is_image_alone}variants = 1 in {places}"
        )


def _of_functions(name: str, functions: Sequence[str], key: str) -> str:
    return (
        f"field {name}: {' or '.join(functions)} draws random numbers, or depends on earlier "
        f"calls: two calls for sample {key} gave two rows, and all epochs would read the one that "
        "is stored. Give the op random = true, and draw from its argument `random`, a seeded "
        f"generator; variants = 4 in [fields.{name}] then stores four draws. Or leave the op out, "
        "and draw anew in every epoch by precache.transforms. To keep one draw of each sample: "
        f"variants = 1 in [fields.{name}]"
    )


def _functions(field: Field) -> list[str]:
    """List the functions that are not declared to draw."""
    return [op.function for op in field.ops if isinstance(op, Function) and not op.random]


def _alike(row: np.ndarray, again: np.ndarray) -> bool:
    """Compare rows; threads may add numbers in another order."""
    if row.shape != again.shape or row.dtype != again.dtype:
        return False
    if row.dtype.kind in "fc":
        return bool(np.allclose(row, again, rtol=1e-3, atol=1e-5, equal_nan=True))
    return bool(np.array_equal(row, again))
