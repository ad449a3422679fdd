"""Engine of `dispatch` on Ray: submits tasks, and returns how each of them ended."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.errors import BuildError, Hole, MismatchError
from precache.runtime.process_id import node_name
from precache.store.receipts import Receipt
from precache.units import size
from precache_workers.cluster.dispatch import Done, Lost
from precache_workers.cluster.nodes import node_id, nodes, on_every_node, prepare_worker
from precache_workers.cluster.placement import Placement
from precache_workers.cluster.worker import run_items
from precache_workers.runtime.time_limit import take_suspects

NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node."""

SLOTS_SECONDS = 1.0
"""Time between two requests for the nodes of the cluster."""

NOTICE_SECONDS = 15.0
"""Time without a node that can take a task, after which a notice is given."""

MANY = 64
"""Tasks under way, above which all that have ended are collected at once."""

MEMORY_STEP = 64 << 20
"""A task's memory is rounded up to a multiple, as Ray reuses a worker only for equal requests."""

RESULT_SECONDS = 60.0
"""Limit for fetching a result, whose node may just be lost."""

AT_WORK = "precache-at-work-"
"""Prefix of a folder's name in the temporary one of a node: the samples at which a task works."""

STALE_SECONDS = 86400.0
"""Age of folders of notes that are removed: those of tasks that were cancelled."""


class RayEngine:
    """Tasks on the Ray that this process is connected to.

    Parameters
    ----------
    notice
        Called with a message for the user.
    excluded
        Nodes that run no more tasks: id -> why. It grows, and runs of one build share it.
    """

    def __init__(
        self, placement: Placement, notice: Callable[[str], None], excluded: dict[str, str]
    ) -> None:
        import ray

        self._ray = ray
        self._placement = placement
        self._notice = notice
        self._excluded = excluded
        self._remotes: dict[tuple[Callable[[Any], Any], int, int, int], Any] = {}
        self._memory = 0
        self._under_way: dict[Any, str] = {}
        """Task -> the name of its folder of notes."""
        self._slots, self._slots_counted = 0, float("-inf")
        self._waiting_since = time.monotonic()

    def slots(self) -> int:
        now = time.monotonic()
        if now - self._slots_counted >= SLOTS_SECONDS:
            self._slots_counted, self._slots = now, self._count_slots()
            if self._slots:
                self._waiting_since = now
            elif now - self._waiting_since > NOTICE_SECONDS:
                self._waiting_since = float("inf")
                self._notice(
                    f"No node of the cluster can take a task ({self._placement.needs_in_words}, "
                    f"{size(self._memory)} of memory): waiting for one"
                )
        return self._slots

    def _count_slots(self) -> int:
        usable = [node for node in nodes() if node["NodeID"] not in self._excluded]
        return self._placement.slots(usable, self._memory)

    def submit(
        self, function: Callable[[Any], Any], items: Sequence[Any], next_one: bool = False
    ) -> Hashable:
        job, memory = items[0].job, self._placement.memory_per_task
        if memory is None:
            most = max(item.memory for item in items)
            memory = -(-most // MEMORY_STEP) * MEMORY_STEP
        self._memory = memory
        key = function, id(job), memory, len(self._excluded)
        if key not in self._remotes:
            self._remotes[key] = self._remote_function(function, job, memory)
        at_work = f"{AT_WORK}{os.urandom(16).hex()}"
        argument = pickle.dumps(([replace(item, job=None) for item in items], at_work))
        task: Hashable = self._remotes[key].remote(argument)
        self._under_way[task] = at_work
        return task

    def _remote_function(self, function: Callable[[Any], Any], job: Any, memory: int) -> Any:
        """Return the function that Ray calls on a worker: it holds the job, which is sent once.

        Its argument is the pickled items and the name of their notes, its result the pickled
        values and seconds of `Done`.
        """
        placement = self._placement
        nice = placement.nice

        def on_worker(items_and_name: bytes) -> bytes:
            items, name = pickle.loads(items_and_name)
            _remove_stale_notes()
            prepare_worker(nice)
            began = time.time()
            values, seconds = run_items(function, job, items, _at_work_path(name))
            with contextlib.suppress(Exception):  # metrics fail no task
                _count_receipts(values, began)
            if isinstance(values[-1], MismatchError):
                values[-1].node = node_id()
            return pickle.dumps((values, seconds))

        labels = dict(placement.node_labels)
        if self._excluded:
            labels[NODE_ID] = f"!in({','.join(self._excluded)})"
        remote: Any = self._ray.remote(on_worker)
        return remote.options(
            name=function.__name__,
            num_cpus=placement.cpus_per_task,
            memory=memory or None,
            max_retries=0,  # `dispatch` counts the deaths, and decides on what to try again
            resources=dict(placement.node_resources) or None,
            label_selector=labels or None,
        )

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Lost]]:
        tasks = list(self._under_way)
        ended, _ = self._ray.wait(tasks, num_returns=1, timeout=seconds)
        if ended and len(tasks) > MANY:
            ended, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)
        return [(task, self._end(task, self._under_way.pop(task))) for task in ended]

    def cancel(self, copy: Any) -> None:
        if copy in self._under_way:
            del self._under_way[copy]
            self._ray.cancel(copy, force=True)

    def _end(self, task: Any, at_work: str) -> Done | Lost:
        """Return how a task ended; `at_work` is the name of a folder on its node."""
        errors = self._ray.exceptions
        try:
            values, seconds = pickle.loads(self._ray.get(task, timeout=RESULT_SECONDS))
            if isinstance(values[-1], MismatchError):
                return self._exclude(values[-1])
            return Done(values, seconds)
        except errors.RayTaskError as error:
            return Done([BuildError(f"a task failed: {error.cause!r}")], 0.0)
        except errors.OutOfMemoryError:
            return self._crashed("it ran out of memory", at_work)
        except errors.WorkerCrashedError:
            return self._crashed("its process ended by itself, or was killed", at_work)
        except (errors.RuntimeEnvSetupError, errors.TaskUnschedulableError) as error:
            return Done([BuildError(f"a task cannot be run: {error}")], 0.0)
        except errors.RayError as error:
            return Lost(str(error).partition("\n")[0], crashed=False)

    def _crashed(self, why: str, at_work: str) -> Lost:
        """Return the loss of a task, with the notes of the node that has them."""
        suspects: dict[str, Hole] | None = {}
        answers = on_every_node(self._placement, _take_suspects, (at_work, why))
        with contextlib.closing(answers):
            suspects = next((taken for _, answer in answers for taken in answer), suspects)
        return Lost(why, crashed=suspects is not None, suspects=suspects or {})

    def _exclude(self, error: MismatchError) -> Done | Lost:
        """Run no more tasks on the error's node; return the error if no other node is left."""
        if error.node not in self._excluded:
            self._excluded[error.node] = str(error)
            self._notice(f"A node is left out: {error}")
        self._slots = self._count_slots()
        if not self._slots:
            return Done([error], 0.0)
        return Lost(str(error), crashed=False)


def _count_receipts(values: Iterable[Any], began: float) -> None:
    """Count the rows and the written bytes of the receipts that a task created, for Ray's metrics.

    Its values also have those of other tasks, which were first: of shards begun elsewhere, or
    before the time at which this task began.
    """
    made = [value for value in values if isinstance(value, Receipt)]
    made = [own for own in made if own.host == node_name() and own.began >= began]
    written = [one.size for own in made if not own.reused for one in own.objects.values()]
    amounts = sum(len(own.content) for own in made), sum(written)
    for counter, amount in zip(_counters(), amounts, strict=True):
        if amount:  # Ray refuses to add nothing
            counter.inc(amount)


@functools.cache
def _counters() -> tuple[Any, Any]:
    from ray.util.metrics import Counter

    rows = Counter("precache_rows", "Rows of finished shards, holes included")
    return rows, Counter("precache_written_bytes", "Bytes of objects put")


def _at_work_path(name: str) -> str:
    return str(Path(tempfile.gettempdir()) / name)


def _take_suspects(name_and_why: tuple[str, str]) -> list[dict[str, Hole] | None]:
    """Do as `take_suspects` with a folder of this node; nothing if it is not here."""
    name, why = name_and_why
    path = _at_work_path(name)
    return [take_suspects(path, why)] if Path(path).exists() else []


@functools.cache
def _remove_stale_notes() -> None:
    """Remove notes that nobody took from this node, once a process."""
    for path in Path(tempfile.gettempdir()).glob(f"{AT_WORK}*"):
        with contextlib.suppress(OSError):  # another user's
            if path.stat().st_mtime < time.time() - STALE_SECONDS:
                shutil.rmtree(path)
