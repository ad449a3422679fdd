"""Fetch samples and load the ops of a recipe: shared by all tasks that work on samples."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from precache.errors import HangError, SampleError
from precache.recipe.recipe import Recipe
from precache.recipe.variants import field_of
from precache.runtime.ordered_map import prefetch
from precache_workers.ops.behaviour import Outputs
from precache_workers.ops.field_recipe import Common, FieldRecipe
from precache_workers.ops.identity import behaviours, named_ops, require_same_outputs
from precache_workers.runtime.time_limit import FETCHING, SAMPLE_SECONDS, notes
from precache_workers.sources.base import Fetched, Source

if TYPE_CHECKING:  # the driver alone needs them
    from precache_workers.planning.listing import ListedSource
    from precache_workers.planning.request import Request

FETCH_BYTES = 4 << 20
FETCH_SAMPLES = 16
"""A fetch is a run of samples up to either limit; three are under way at a time."""
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
    pinned
        Whether samples must be those of which the base version was made.
    sample_seconds
        Limit for fetching or decoding one sample.
    """

    source: Source
    recipe: Recipe
    import_path: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    behaviours: Mapping[str, Outputs] = field(default_factory=dict)
    fetch_labels: bool = False
    pinned: bool = False
    sample_seconds: float = SAMPLE_SECONDS

    @classmethod
    def of(cls, request: Request, source: Source, listed: ListedSource) -> Job:
        """Return the settings of the build that a request describes."""
        recipe = listed.spec.recipe
        return cls(
            source,
            recipe,
            request.import_path,
            listed.digests,
            behaviours(recipe),
            listed.fetches_labels,
            listed.pinned,
            request.sample_timeout,
        )


@dataclass(frozen=True, kw_only=True)
class SampleTask:
    """A task that fetches and decodes samples.

    Attributes
    ----------
    barred
        Key -> reason, of samples that must not be decoded: they become holes. Those that took too
        long to fetch are not fetched again.
    alone
        Samples that may hang: each is fetched and decoded with nothing beside it.
    """

    barred: Mapping[str, str] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()

    @property
    def memory(self) -> int:
        """Bytes that its process may need."""
        return BASE_MEMORY

    def retried(self) -> Self:
        return self

    def after(self, hang: HangError) -> Self:
        if len(hang.late) > 1 and not hang.late.keys() <= self.alone:
            return replace(self, alone=self.alone | hang.late.keys())
        return replace(self, barred={**self.barred, **hang.late})


def _runs(
    keys: Sequence[str], sizes: Sequence[int], alone: Collection[str]
) -> Iterator[list[tuple[str, int]]]:
    """Group samples that are fetched together; each key of `alone` is a group of its own."""
    run: list[tuple[str, int]] = []
    nbytes = 0
    for key, size in zip(keys, sizes, strict=True):
        apart = alone and (key in alone or (run[-1:] and run[-1][0] in alone))
        if run and (apart or nbytes + size > FETCH_BYTES or len(run) == FETCH_SAMPLES):
            yield run
            run, nbytes = [], 0
        run.append((key, size))
        nbytes += max(0, size)
    if run:
        yield run


def fetch_ahead(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    barred: Mapping[str, str] = MappingProxyType({}),
    alone: Collection[str] = (),
) -> Generator[tuple[str, Fetched], None, None]:
    """Yield samples in order, fetching the next ones while the caller works.

    Parameters
    ----------
    barred, alone
        As in `SampleTask`.
    """
    own_notes = notes()
    hung = {key for key, reason in barred.items() if reason.startswith(FETCHING)}

    def fetch_run(run: list[tuple[str, int]]) -> list[tuple[str, Fetched]]:
        names, expected = zip(*run, strict=True)
        if run[0][0] in hung:
            return [(key, SampleError(barred[key])) for key in names]
        with own_notes.kept():
            return list(zip(names, source.fetch(names, expected), strict=True))

    groups = _runs(keys, sizes, hung.union(alone))
    threads = source.fetch_threads
    runs = (
        (fetch_run(run) for run in groups)
        if alone
        else prefetch(fetch_run, groups, threads, threads + 1)
    )
    with contextlib.closing(runs):
        for run in runs:
            yield from run


def recipes_of(job: Job) -> dict[str, FieldRecipe]:
    """Load the ops of every field, with all libraries that they need."""
    if loads_torch(job.recipe):
        import torch  # noqa: F401 - here, so that it does not count as the work of its first user

    for path in job.import_path:
        if path not in sys.path:
            sys.path.append(path)
    require_same_outputs(job.recipe, job.behaviours)
    fields, seed = job.recipe.fields, job.recipe.seed
    variants = Counter(map(field_of, fields))
    common = {name: Common() for name, count in variants.items() if count > 1}
    return {
        name: FieldRecipe(name, declared, seed, job.code, common.get(field_of(name)))
        for name, declared in fields.items()
    }


def loads_torch(recipe: Recipe) -> bool:
    """Return True if an op is computed by torch, or may be, as a function."""
    return any(step is None or "torch" in step.libraries for _, _, step in named_ops(recipe))


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
