"""Builds with one worker and with two, against the serial build; and what their driver takes."""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import precache
from precache.recipe.recipe import Recipe
from precache_workers.cluster import executor as cluster
from tests.bench.common import CROP, in_clean_process, log
from tests.bench.scaling.watch import Watch
from tests.support.raycluster import Cluster

RESIZE = 256
EMPTY_TASKS = 1000


@dataclass(frozen=True)
class Loop:
    """What running all shard tasks took: wall time, and CPU time of the driver."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Build:
    """One build.

    Attributes
    ----------
    task_seconds
        CPU time of the tasks, as they tell it themselves.
    import_seconds
        CPU time of workers before their first task, as they tell it.
    worker_seconds, all_seconds
        CPU time of the workers' processes and of all processes, as seen from outside.
    driver_seconds
        CPU time of the driver from beginning to end.
    """

    samples: int
    shards: int
    task_seconds: float
    import_seconds: float
    driver_seconds: float
    loop: Loop
    worker_seconds: float = 0.0
    all_seconds: float = 0.0
    worker_peak_bytes: int = 0
    holes: tuple[str, ...] = ()

    @property
    def task_ms(self) -> float:
        return self.task_seconds / self.samples * 1e3


@dataclass(frozen=True)
class Way:
    """A kind of build, with the variables of its driver."""

    title: str
    options: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)


def recipe(codec: str = "image") -> Recipe:
    """What every build of this benchmark does."""
    return Recipe.image(resize=RESIZE, crop=CROP, codec=codec)


@contextlib.contextmanager
def measured_loop() -> Iterator[list[Loop]]:
    """Have builds say what running their shard tasks took."""
    found: list[Loop] = []

    @contextlib.contextmanager
    def executor(*given: Any) -> Iterator[cluster.Run]:
        with cluster.executor(*given) as run:

            def measured(function: Callable[[Any], Any], items: Iterable[Any], *more: Any) -> Any:
                wall, cpu = time.perf_counter(), time.process_time()
                yield from run(function, items, *more)
                found.append(Loop(time.perf_counter() - wall, time.process_time() - cpu))

            yield measured

    with mock.patch("precache_workers.driver.build.executor", executor):
        yield found


def _build(source: Path, store: Path, way: Way, more: Mapping[str, Any]) -> Build:
    """To be called in a clean process."""
    os.environ.update(way.variables)
    began = time.process_time()
    with measured_loop() as loops:
        result = precache.build(source, store, recipe(), **way.options, **more)
    return Build(
        result.samples,
        result.shards,
        result.cpu_seconds,
        result.timings["imports"],
        time.process_time() - began,
        loops[-1],
        holes=tuple(f"{key}: {why}" for key, why in result.holes),
    )


def build(source: Path, folder: Path, way: Way, **more: Any) -> Build:
    """Build in a process of its own, watched; the store is removed."""
    store = folder / "watched.store"
    try:
        with Watch() as watch:
            made = in_clean_process(_build, source, store, way, more)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    seen = watch.worker_seconds, watch.cpu_seconds, watch.worker_peak_bytes
    return Build(**{**vars(made), **dict(zip(_SEEN, seen, strict=True))})


_SEEN = ("worker_seconds", "all_seconds", "worker_peak_bytes")
SERIAL = Way("serial", {"address": "serial"})


def local(cpus: int) -> Way:
    """In so many worker processes on this machine."""
    return Way(f"local, {_workers(cpus)}", {"address": "local", "cpus": cpus})


@contextlib.contextmanager
def joined(folder: Path) -> Iterator[list[Way]]:
    """A cluster of two nodes with a CPU each; builds on one of them, and on both."""
    running = Cluster(folder)
    try:
        running.add(1, resources={"first": 1, "any": 1})
        running.add(1, resources={"any": 1})
        yield [
            Way(
                f"cluster, {_workers(cpus)}",
                {"address": "auto", "node_resources": {resource: 1}},
                running.env,
            )
            for cpus, resource in ((1, "first"), (2, "any"))
        ]
    finally:
        running.close()


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def in_turns(source: Path, folder: Path, rounds: int) -> dict[str, list[Build]]:
    """Builds of each way, by title, one of each in every round; each round begins with another."""
    with joined(folder / "cluster") as others:
        ways = (SERIAL, local(1), local(2), *others)
        found: dict[str, list[Build]] = {way.title: [] for way in ways}
        for number, place in itertools.product(range(rounds), range(len(ways))):
            way = ways[(number + place) % len(ways)]
            log.print(f"round {number + 1} of {rounds}: {way.title}")
            found[way.title].append(build(source, folder, way))
    return found


# --- the driver ---------------------------------------------------------------------------------


def _empty(item: Any) -> None:
    """What a task of no work does."""


def _ray_alone() -> float:
    """CPU-ms of a driver for each empty task under the same number at a time."""
    import ray

    with ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False):
        remote: Any = ray.remote(_empty)
        ray.get([remote.remote(None) for _ in range(8)])
        began = time.process_time()
        under_way = [remote.remote(None) for _ in range(4)]
        for _ in range(EMPTY_TASKS):
            ready, under_way = ray.wait(under_way, num_returns=1)
            ray.get(ready)
            under_way.append(remote.remote(None))
        burnt = time.process_time() - began
        ray.get(under_way)
    return burnt / EMPTY_TASKS * 1e3


def ray_alone() -> float:
    """The same, in a process of its own."""
    return in_clean_process(_ray_alone)
