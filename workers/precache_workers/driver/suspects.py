"""Which samples kill the process that decodes them, found by halving and trying."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from precache.errors import CrashError, PrecacheError
from precache.units import size
from precache_workers.cluster.dispatch import Patience
from precache_workers.cluster.executor import Run
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

PARTS = 8
"""A run of samples that kills is split into so many, which are tried side by side."""

PATIENCE = Patience(crashes=2)
"""A worker may be killed from outside once; that it happens twice to the same few is no chance."""


@dataclass(frozen=True)
class Trial(SampleTask):
    """Samples to be decoded for nothing but to see who survives it."""

    job: Job
    keys: Sequence[str]
    sizes: Sequence[int]
    memory: int = BASE_MEMORY

    def run(self) -> bool:
        """Whether memory did not suffice for one of them."""
        return run_in_time(self._run, self.job.sample_seconds)

    def is_heavy(self) -> bool:
        """Whether decoding them asks for more than `memory`, of which they are given no more."""
        with limited_memory(self.memory):
            return self.run()

    def _run(self) -> bool:
        recipes, at, refused = recipes_of(self.job), notes(), False
        fetched = fetch_ahead(self.job.source, self.keys, self.sizes, self.barred, self.alone)
        with one_thread(), contextlib.closing(fetched) as samples:
            for key, sample in samples:
                if isinstance(sample, Sample) and key not in self.barred:
                    at.begin(DECODING, key)
                    try:
                        for recipe in recipes.values():
                            recipe(sample, key)
                    except MemoryError:
                        refused = True
                    except Exception:  # the build itself will say why it is a hole
                        continue
                    finally:
                        at.end()
        return refused

    def parts(self) -> list[Trial]:
        """The same samples in several trials, or in none where there is but one."""
        step = -(-len(self.keys) // PARTS)
        starts = range(0, len(self.keys) if len(self.keys) > 1 else 0, step)
        return [
            replace(self, keys=self.keys[at : at + step], sizes=self.sizes[at : at + step])
            for at in starts
        ]


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Have this process refused more than it has and `nbytes` (RLIMIT_DATA of setrlimit(2))."""
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text("utf-8")
    has = int(status.partition("VmData:")[2].split()[0]) << 10
    if before == resource.RLIM_INFINITY or has + nbytes < before:
        resource.setrlimit(resource.RLIMIT_DATA, (has + nbytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


KILLS = "decoding it kills the worker"
"""How a reason begins that a sample like these is a hole for."""


def find_killers(run: Run, trials: Iterable[Trial]) -> dict[str, str]:
    """Key -> why, of the samples that kill their worker even when decoded alone.

    Parameters
    ----------
    run
        Where to try them: on a cluster, whose workers may die.
    trials
        Of what killed its worker.
    """
    killers: dict[str, str] = {}
    alone: list[Trial] = []
    suspects = [part for trial in trials for part in trial.parts() or [trial]]
    while suspects:
        found: list[Trial] = []
        for trial, outcome in run(Trial.run, suspects, PATIENCE):
            if isinstance(outcome, CrashError):
                found += trial.parts()
                if len(trial.keys) == 1:
                    alone.append(trial)
                    killers[trial.keys[0]] = f"{KILLS}: {outcome}"
            elif isinstance(outcome, PrecacheError):
                raise outcome
        suspects = found
    for trial, outcome in run(Trial.is_heavy, alone, Patience(crashes=1)):
        if outcome is True:
            killers[trial.keys[0]] += f"; it asks for more than {size(trial.memory)} of memory"
    return killers
