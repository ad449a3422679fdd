"""The job, the samples and the ops of a task: shared by all tasks that work on samples."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from precache.errors import Hole
from precache.recipe.recipe import Recipe
from precache.recipe.variants import field_of
from precache.store.locations import Locations
from precache.store.row_table import RowTable
from precache_workers.ops.behaviour import Outputs
from precache_workers.ops.field_recipe import Common, FieldRecipe
from precache_workers.ops.identity import require_same_outputs
from precache_workers.runtime.time_limit import SAMPLE_SECONDS, key_digest
from precache_workers.sources.base import Source
from precache_workers.sources.fetching import FetchedSamples, fetch_ahead

BASE_MEMORY = 1 << 30
"""Bytes of a worker's process: 350 MB of libraries, the rest for photos of 90 million pixels."""


@dataclass(frozen=True)
class Job:
    """Settings that all shards of a build share.

    Attributes
    ----------
    recipe
        Has a field for each stored array.
    code
        Digests of the code of the recipe's functions.
    behaviours
        Outputs that the ops must have for their probes.
    sample_seconds
        Limit for fetching or decoding one sample.
    refreshes
        Whether the samples were read by this recipe before, so that nothing about it is asked.
    """

    source: Source
    recipe: Recipe
    import_path: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    behaviours: Mapping[str, Outputs] = field(default_factory=dict)
    fetch_labels: bool = False
    sample_seconds: float = SAMPLE_SECONDS
    refreshes: bool = False


@dataclass(frozen=True)
class FetchAllTask:
    """A task that works on samples, all of which it fetches.

    Attributes
    ----------
    keys, sizes, locations
        Of the samples, as a row table has them.
    barred
        Key -> hole, of samples that must not be decoded: they become holes. Those that took too
        long to fetch, or killed the worker meanwhile, are not fetched again.
    alone
        Samples at which a worker ended: each is fetched and decoded with nothing beside it.
    """

    job: Job
    keys: Sequence[str] = ()
    sizes: Sequence[int] = ()
    locations: Locations | None = None
    barred: Mapping[str, Hole] = field(default_factory=dict, kw_only=True)
    alone: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def memory(self) -> int:
        """Bytes that its process may need."""
        return BASE_MEMORY

    @property
    def seconds(self) -> float:
        """Time limit of a sample."""
        return self.job.sample_seconds

    def retried(self) -> Self:
        return self

    def after(self, suspects: Mapping[str, Hole]) -> Self:
        digests = {key: key_digest(key) for key in self.keys}
        own = {key: suspects[digest] for key, digest in digests.items() if digest in suspects}
        if len(suspects) == 1 and own.keys() <= self.alone:
            return replace(self, barred={**self.barred, **own})
        return replace(self, alone=self.alone | own.keys())

    @classmethod
    def of(cls, job: Job, table: RowTable, rows: Sequence[int] | np.ndarray, **more: Any) -> Self:
        """Return the task for the samples of some rows."""
        rows = np.asarray(rows, np.int64)
        keys, sizes = list(table.keys.take(rows)), table.sizes[rows].tolist()
        return cls(job, keys, sizes, table.locations_of(rows), **more)

    def fetch(self, places: Sequence[int] | None = None) -> FetchedSamples:
        """Yield the samples in order, or those of some places, fetched ahead."""
        keys, sizes, locations = self.keys, self.sizes, self.locations
        if places is not None:
            keys, sizes = [keys[place] for place in places], [sizes[place] for place in places]
            locations = None if locations is None else locations.take(places)
        return fetch_ahead(self.job.source, keys, sizes, self.barred, self.alone, locations)

    def require_unchanged(self, places: Sequence[int]) -> None:
        """Raise `FetchError` if a container changed while the samples of some places were read."""
        if self.locations is not None and places:
            self.job.source.require_unchanged(self.locations.take(places))


def recipes_of(job: Job) -> dict[str, FieldRecipe]:
    """Load the ops of every field, with all libraries that they need."""
    fields = job.recipe.fields
    if any("torch" in op.libraries for f in fields.values() for op in f.ops):
        import torch  # noqa: F401 - here, so that it does not count as the work of its first user

    for path in job.import_path:
        if path not in sys.path:
            sys.path.append(path)
    require_same_outputs(job.recipe, job.behaviours)
    variants = Counter(map(field_of, fields))
    common = {name: Common() for name, count in variants.items() if count > 1}
    return {
        name: FieldRecipe(name, declared, job.recipe.seed, job.code, common.get(field_of(name)))
        for name, declared in fields.items()
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch, if it is loaded, to one thread, as every core runs a task of its own."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
