"""The harness that runs samples through ops and measures CPU and wall time by stage.

The probe and the doctor run samples here; the rates of a plan come from shard tasks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from precache.errors import Hole, PrecacheError, SampleError
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.runtime.time_limit import DECODING, samples_at_work
from precache_workers.shards.samples import one_thread
from precache_workers.shards.timing import TimeCost
from precache_workers.sources.base import Sample
from precache_workers.sources.fetching import FetchedSamples

Result = TypeVar("Result")
LEAST = 8
"""Samples that are run even beyond the time limit."""


@dataclass
class SampleRun:
    """One sample.

    Attributes
    ----------
    nbytes
        Bytes as fetched.
    times
        By stage, ``fetch`` first.
    rows
        The finished row of each field, where they are kept.
    """

    key: str = ""
    nbytes: int = 0
    times: dict[str, TimeCost] = field(default_factory=dict)
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)

    def time(
        self, stage: str, work: Callable[[], Result], clock: Callable[[], float] = time.thread_time
    ) -> Result:
        """Return the result of some work, and add its time to a stage, even if it fails.

        Parameters
        ----------
        clock
            Of CPU time: of this thread, or of the process, for work on several threads.
        """
        wall, cpu = time.perf_counter(), clock()
        try:
            return work()
        finally:
            cost = TimeCost(time.perf_counter() - wall, clock() - cpu)
            self.times[stage] = self.times.get(stage, TimeCost()) + cost


def run_samples(
    samples: FetchedSamples,
    work: Callable[[SampleRun, Sample], Result],
    *,
    barred: Mapping[str, Hole] = MappingProxyType({}),
    warm_up: Mapping[str, FieldRecipe] = MappingProxyType({}),
    seconds: float = math.inf,
) -> Generator[tuple[SampleRun, Result | Exception], None, None]:
    """Run samples one after another on this thread.

    Parameters
    ----------
    work
        Does all that is to be measured of a sample, by `SampleRun.time`.
    barred
        Key -> hole, of samples that must not be decoded.
    warm_up
        Recipes that are applied to the first sample once, before it is measured: the first row of
        a process is slower than the others.
    seconds
        Time after which no further sample is begun, once `LEAST` are done.

    Yields
    ------
    tuple
        The times of a sample, and the result of `work`, or the error that makes it a hole.
    """
    until = time.monotonic() + seconds
    current = samples_at_work()
    with one_thread(), contextlib.closing(samples):
        for number in itertools.count():
            if number >= LEAST and time.monotonic() > until:
                return
            run = SampleRun()
            fetched = run.time("fetch", lambda: next(samples, None), time.process_time)
            if fetched is None:
                return
            run.key, sample = fetched
            outcome: Result | Exception
            try:
                if run.key in barred:
                    raise SampleError(barred[run.key].reason)
                if not isinstance(sample, Sample):
                    raise sample
                run.nbytes = sample.nbytes
                if warm_up:
                    current.work(DECODING, run.key, _warm_up, warm_up, run.key, sample)
                    warm_up = {}
                outcome = current.work(DECODING, run.key, work, run, sample)
            except Exception as error:  # as in a build: whatever an op raises on a hostile file
                outcome = error.with_traceback(None)  # whose frames hold the sample's memory
            finally:
                current.end()
            yield run, outcome


def _warm_up(recipes: Mapping[str, FieldRecipe], key: str, sample: Sample) -> None:
    for recipe in recipes.values():
        with contextlib.suppress(Exception):  # raised again when the sample is measured
            recipe(replace(sample), key)  # another object, of which variants remember nothing


def hole_reason(error: Exception) -> str:
    """Reason for a hole, as a build records it."""
    return str(error) if isinstance(error, PrecacheError) else f"{type(error).__name__}: {error}"
