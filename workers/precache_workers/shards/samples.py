"""Fetch samples and load the ops of a recipe: shared by all tasks that work on samples."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from precache.errors import SampleError
from precache.recipe.recipe import Recipe
from precache.recipe.variants import field_of
from precache.runtime.ordered_map import prefetch
from precache.store.locations import Locations, expected_bytes
from precache.store.row_table import RowTable
from precache_workers.ops.behaviour import Outputs
from precache_workers.ops.field_recipe import Common, FieldRecipe
from precache_workers.ops.identity import behaviours, require_same_outputs
from precache_workers.runtime.time_limit import (
    FETCHING,
    SAMPLE_SECONDS,
    key_digest,
    samples_at_work,
)
from precache_workers.sources.base import Fetched, Source

if TYPE_CHECKING:  # the driver alone needs them
    from precache_workers.planning.listing import ListedSource
    from precache_workers.planning.request import Request

FetchedSamples = Generator[tuple[str, Fetched], None, None]
"""Keys and samples, as `fetch_ahead` yields them."""

FETCH_BYTES = 4 << 20
FETCH_SAMPLES = 16
"""A fetch is a run of samples up to either limit."""
MAX_HELD_NBYTES = 128 << 20
"""Bytes of samples of containers that are fetched before the first of them is used, at most."""
UNITS_AHEAD = 16
"""Units of containers that are fetched ahead."""
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

    @classmethod
    def of(cls, request: Request, source: Source, listed: ListedSource) -> Job:
        """Return the settings of the build that a request describes."""
        recipe = listed.spec.recipe
        return cls(
            source,
            recipe,
            request.import_path,
            listed.code,
            behaviours(recipe),
            listed.fetches_labels,
            request.sample_timeout,
            listed.pinned,
        )


@dataclass(frozen=True, kw_only=True)
class SampleTask:
    """A task that fetches and decodes samples.

    Attributes
    ----------
    barred
        Key -> reason, of samples that must not be decoded: they become holes. Those that took too
        long to fetch, or killed the worker meanwhile, are not fetched again.
    alone
        Samples at which a worker ended: each is fetched and decoded with nothing beside it.
    """

    barred: Mapping[str, str] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()

    if TYPE_CHECKING:  # a field of each kind of task

        @property
        def keys(self) -> Sequence[str]: ...

    @property
    def memory(self) -> int:
        """Bytes that its process may need."""
        return BASE_MEMORY

    @property
    def seconds(self) -> float:
        """Time limit of a sample."""
        return 0.0

    def retried(self) -> Self:
        return self

    def after(self, suspects: Mapping[str, str]) -> Self:
        digests = {key: key_digest(key) for key in self.keys}
        own = {key: suspects[digest] for key, digest in digests.items() if digest in suspects}
        if len(suspects) == 1 and own.keys() <= self.alone:
            return replace(self, barred={**self.barred, **own})
        return replace(self, alone=self.alone | own.keys())


@dataclass(frozen=True)
class FetchAllTask(SampleTask):
    """A task that fetches all of its samples.

    Attributes
    ----------
    keys, sizes, locations
        Of the samples, as a row table has them.
    """

    job: Job
    keys: Sequence[str]
    sizes: Sequence[int]
    locations: Locations | None = None

    @property
    def seconds(self) -> float:
        return self.job.sample_seconds

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


def _runs(keys: Sequence[str], sizes: Sequence[int], alone: Collection[str]) -> Iterator[list[int]]:
    """Group samples that are fetched together; each key of `alone` is a group of its own."""
    run: list[int] = []
    nbytes = 0
    for place, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        apart = alone and (key in alone or (run and keys[run[-1]] in alone))
        if run and (apart or nbytes + size > FETCH_BYTES or len(run) == FETCH_SAMPLES):
            yield run
            run, nbytes = [], 0
        run.append(place)
        nbytes += max(0, size)
    if run:
        yield run


def _runs_of_units(sizes: Sequence[int], locations: Locations) -> Iterator[list[int]]:
    """Group samples by their units, so that each unit is read once.

    All samples up to the last one of a unit are held until those before it are yielded. Where that
    would take more than `MAX_HELD_NBYTES`, a unit is read again later.
    """
    units = locations.unit_numbers.tolist()
    expected = expected_bytes(np.asarray(sizes), locations).tolist()
    last = {unit: place for place, unit in enumerate(units)}
    start = held = end = 0
    cut = 0  # the last place up to which no unit reaches beyond
    place = 0
    while place < len(units):
        if held + expected[place] > MAX_HELD_NBYTES and place > start:
            place = cut if cut > start else place
            yield from _by_unit(units, range(start, place))
            start, held, end = place, 0, place
            continue
        held += expected[place]
        end = max(end, last[units[place]] + 1)
        place += 1
        if end == place:
            cut = place
    yield from _by_unit(units, range(start, len(units)))


def _by_unit(units: Sequence[int], places: range) -> Iterator[list[int]]:
    runs: dict[int, list[int]] = {}
    for place in places:
        runs.setdefault(units[place], []).append(place)
    yield from runs.values()


def fetch_ahead(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    barred: Mapping[str, str] = MappingProxyType({}),
    alone: Collection[str] = (),
    locations: Locations | None = None,
) -> FetchedSamples:
    """Yield samples in order, fetching the next ones while the caller works.

    Parameters
    ----------
    barred, alone
        As in `SampleTask`.
    locations
        As listed; samples of one unit are fetched together. None if there are none.
    """
    at_work = samples_at_work()
    alone = set(keys).intersection(alone)
    unfetched = {key for key, reason in barred.items() if reason.startswith(FETCHING)}

    def fetch_run(run: list[int]) -> list[tuple[int, Fetched]]:
        names = [keys[place] for place in run]
        if names[0] in unfetched:
            return [(place, SampleError(barred[keys[place]])) for place in run]
        expected = [sizes[place] for place in run]
        where = None if locations is None else locations.take(run)
        with at_work.kept():
            return list(zip(run, source.fetch(names, expected, where), strict=True))

    apart = alone | unfetched
    by_unit = not apart and locations is not None and bool(locations.containers)
    groups = (
        _runs_of_units(sizes, locations)
        if by_unit and locations is not None
        else _runs(keys, sizes, apart)
    )
    threads = source.fetch_threads
    ahead = UNITS_AHEAD if by_unit else threads + 1
    runs = (fetch_run(r) for r in groups) if alone else prefetch(fetch_run, groups, threads, ahead)
    held: dict[int, Fetched] = {}
    place = 0
    with contextlib.closing(runs):
        for run in runs:
            held.update(run)
            while place in held:
                yield keys[place], held.pop(place)
                place += 1


def recipes_of(job: Job) -> dict[str, FieldRecipe]:
    """Load the ops of every field, with all libraries that they need."""
    fields, functions = job.recipe.fields, job.recipe.functions
    if functions or any("torch" in op.libraries for f in fields.values() for op in f.ops):
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
