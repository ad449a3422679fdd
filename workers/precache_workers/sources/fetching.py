"""Fetch samples ahead of their use, those that lie together at once."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from precache.errors import Hole, SampleError
from precache.runtime.threads import prefetch
from precache.store.locations import Locations, expected_bytes
from precache_workers.runtime.time_limit import samples_at_work
from precache_workers.sources.base import Fetched, Source

FetchedSamples = Generator[tuple[str, Fetched], None, None]
"""Keys and samples, as `fetch_ahead` yields them."""

FETCH_BYTES = 4 << 20
FETCH_SAMPLES = 16
"""A fetch is a run of samples up to either limit."""
MAX_HELD_NBYTES = 128 << 20
"""Bytes of samples of containers that are fetched before the first of them is used, at most."""
UNITS_AHEAD = 16
"""Units of containers that are fetched ahead."""


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
    barred: Mapping[str, Hole] = MappingProxyType({}),
    alone: Collection[str] = (),
    locations: Locations | None = None,
) -> FetchedSamples:
    """Yield samples in order, fetching the next ones while the caller works.

    Parameters
    ----------
    barred
        Key -> hole, of samples that must not be decoded. Those that took too long to fetch, or
        killed the worker meanwhile, are not fetched again.
    alone
        Samples that are fetched with nothing beside them.
    locations
        As listed; samples of one unit are fetched together. None if there are none.
    """
    at_work = samples_at_work()
    alone = set(keys).intersection(alone)
    unfetched = {key for key, hole in barred.items() if hole.in_fetch}

    def fetch_run(run: list[int]) -> list[tuple[int, Fetched]]:
        names = [keys[place] for place in run]
        if names[0] in unfetched:
            return [(place, SampleError(barred[keys[place]].reason)) for place in run]
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
