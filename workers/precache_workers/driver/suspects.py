"""Search for samples that kill the process that decodes them, by trying parts of a shard."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precache.errors import CrashError, PrecacheError
from precache.units import size
from precache_workers.cluster.dispatch import TaskLimits
from precache_workers.cluster.executor import RunTasks
from precache_workers.profiling.harness import SampleRun, run_samples
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.shards.samples import BASE_MEMORY, FetchAllTask, recipes_of
from precache_workers.sources.base import Sample

PARTS = 8
"""Number of parts that a run of samples is split into; they are tried side by side."""

SUSPECT_LIMITS = TaskLimits(crashes=2)
"""A worker may be killed from outside once; twice with the same few samples is no accident."""


@dataclass(frozen=True)
class SuspectTask(FetchAllTask):
    """Samples that are decoded only to see if their worker survives."""

    memory: int = BASE_MEMORY

    def run(self) -> bool:
        """Decode them; returns True if one of them ran out of memory."""
        return run_in_time(self._run, self.job.sample_seconds)

    def is_heavy(self) -> bool:
        """Decode them within `memory`; returns True if one of them needs more."""
        with limited_memory(self.memory):
            return self.run()

    def _run(self) -> bool:
        recipes = recipes_of(self.job)

        def decode(run: SampleRun, sample: Sample) -> None:
            for recipe in recipes.values():
                recipe(sample, run.key)

        refused = False
        for _, outcome in run_samples(self.fetch(), decode, barred=self.barred):
            refused |= isinstance(outcome, MemoryError)  # the build itself reports other errors
        return refused

    def parts(self) -> list[SuspectTask]:
        """Split the samples into several tasks; a single sample gives none."""
        step = -(-len(self.keys) // PARTS)
        starts = range(0, len(self.keys) if len(self.keys) > 1 else 0, step)
        parts = [slice(at, at + step) for at in starts]
        return [
            replace(
                self,
                keys=self.keys[part],
                sizes=self.sizes[part],
                locations=self.locations[part],
            )
            for part in parts
        ]


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Limit this process to its present memory and `nbytes` more (RLIMIT_DATA of setrlimit(2))."""
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
"""Beginning of the reason for a hole whose sample kills the worker."""


def run_without_killers(
    run: RunTasks, function: Callable[[Any], Any], task: FetchAllTask, say: Callable[[str], None]
) -> tuple[FetchAllTask, Any]:
    """Run one task; if it kills its worker, run it again without the samples that do so.

    Returns
    -------
    tuple
        The task as it ran last, with the samples that it left out as `barred`; and its outcome.
    """
    [(task, outcome)] = run(function, [task])
    if isinstance(outcome, CrashError):
        killers = find_killers(run, [task], say)
        [(task, outcome)] = run(function, [replace(task, barred={**task.barred, **killers})])
    return task, outcome


def find_killers(
    run: RunTasks, tasks: Iterable[FetchAllTask], say: Callable[[str], None]
) -> dict[str, str]:
    """Return key -> reason of the samples that kill their worker even when decoded alone.

    Parameters
    ----------
    run
        Executor of a cluster, whose workers may die.
    tasks
        Those that killed their workers.
    say
        Called with a line when the search begins.
    """
    say("Workers died: looking for samples that kill them")
    suspects = [SuspectTask(task.job, task.keys, task.sizes, task.locations) for task in tasks]
    killers: dict[str, str] = {}
    alone: list[SuspectTask] = []
    suspects = [part for suspect in suspects for part in suspect.parts() or [suspect]]
    while suspects:
        smaller: list[SuspectTask] = []
        for suspect, outcome in run(SuspectTask.run, suspects, SUSPECT_LIMITS):
            if isinstance(outcome, CrashError):
                smaller += suspect.parts()
                if len(suspect.keys) == 1:
                    alone.append(suspect)
                    killers[suspect.keys[0]] = f"{KILLS}: {outcome}"
            elif isinstance(outcome, PrecacheError):
                raise outcome
        suspects = smaller
    for suspect, outcome in run(SuspectTask.is_heavy, alone, TaskLimits(crashes=1)):
        if outcome is True:
            killers[suspect.keys[0]] += f"; it asks for more than {size(suspect.memory)} of memory"
    return killers
