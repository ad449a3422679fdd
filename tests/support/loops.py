"""Training loops whose bottleneck is known by construction, with drawn parameters."""

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from precache.diagnosis.judgement import Remedy

CHUNK = 1 << 16


class Samples(Dataset[torch.Tensor]):
    """Samples that `work` is done for."""

    def __init__(self, work: Callable[[int], Any], count: int = 100_000) -> None:
        self.work, self.count = work, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.work(index)
        return torch.zeros(3, 32, 32)


def nothing(_: Any) -> None:
    """A step, or the work of a sample."""


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@dataclass
class DrawnLoop:
    """A loop of one kind; `options` are those of its `DataLoader`.

    Attributes
    ----------
    cycle
        Batches after which the times of loads repeat, where these differ much.
    resources
        Closed with the loop.
    """

    kind: str
    verdict: str
    work: Callable[[int], Any]
    step_s: float
    options: dict[str, Any]
    count: int = 100_000
    cycle: int = 1
    wait: Callable[[], Any] = lambda: None
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def loader(self, **changes: Any) -> DataLoader[torch.Tensor]:
        options = {"batch_size": 1, **self.options, **changes}
        if not options["num_workers"]:
            options = {k: v for k, v in options.items() if k != "worker_init_fn"}
        context = "fork" if options["num_workers"] else None  # others cannot pickle a lambda
        return DataLoader(
            Samples(self.work, self.count), multiprocessing_context=context, **options
        )

    def step(self, batch: Any) -> None:
        time.sleep(self.step_s)
        self.wait()


def measured_gain(loop: DrawnLoop, remedy: Remedy, seconds: float) -> float:
    """The speed with a remedy in place, as a multiple of that without."""
    return rate(loop, remedied(loop, remedy), seconds) / rate(loop, loop.loader(), seconds)


def rate(loop: DrawnLoop, loader: DataLoader[Any], seconds: float) -> float:
    """Batches/s over whole epochs, or over whole cycles of a long one, after a lead."""
    epoch = len(loader)
    lead, cycle = (max(10, loop.cycle), loop.cycle) if epoch >= 1000 else (epoch, epoch)
    started, count = time.perf_counter(), -lead
    while True:
        for batch in loader:
            loop.step(batch)
            count += 1
            if count == 0:
                started = time.perf_counter()
            elif count > 0 and count % cycle == 0 and time.perf_counter() - started > seconds:
                return count / (time.perf_counter() - started)


def draw_loop(kind: str, chance: np.random.Generator) -> DrawnLoop:
    """Draw the parameters of a loop of one kind; the ranges stand in its function."""
    step = chance.uniform(0.02, 0.05)
    return KINDS[kind](chance, step)


def _network(chance: np.random.Generator, step: float) -> DrawnLoop:
    """Sleeps of 1.6 to 4 steps for each worker's share, with a cv of 0.3; 0 to 3 workers."""
    workers = int(chance.integers(0, 4))
    times = step * max(1, workers) * chance.uniform(1.6, 4) * chance.gamma(11, 1 / 11, 997)
    return DrawnLoop(
        "network",
        "storage-bound",
        lambda i: time.sleep(times[i % 997]),
        step,
        {"num_workers": workers},
    )


def _disk(chance: np.random.Generator, step: float) -> DrawnLoop:
    """A pipe that is fed 64 KB at a time, a batch in 1.6 to 4 steps; 0 to 2 workers."""
    chunks, resources = int(chance.integers(2, 5)), contextlib.ExitStack()
    path = Path(resources.enter_context(tempfile.TemporaryDirectory())) / "slow"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    stop, pause = threading.Event(), step * chance.uniform(1.6, 4) / chunks

    def feed() -> None:
        while not stop.wait(pause):
            with contextlib.suppress(BlockingIOError):  # nobody reads
                os.write(keep, bytes(CHUNK))

    def read(_: int) -> None:
        left = chunks * CHUNK
        with path.open("rb", buffering=0) as file:
            while left > 0:
                left -= len(file.read(left) or b"")

    thread = threading.Thread(target=feed)
    thread.start()
    resources.callback(os.close, keep)
    resources.callback(thread.join)
    resources.callback(stop.set)
    workers = int(chance.integers(0, 3))
    options = {"num_workers": workers}
    return DrawnLoop("disk", "storage-bound", read, step, options, resources=resources)


def _cpu(chance: np.random.Generator, step: float) -> DrawnLoop:
    """CPU time of 1.5 to 3 steps for each worker's share; 0 to 2 workers."""
    workers = int(chance.integers(0, 3))
    cost = step * max(1, workers) * chance.uniform(1.5, 3)
    return DrawnLoop("CPU", "CPU-bound", lambda i: burn(cost), step, {"num_workers": workers})


def _lock(chance: np.random.Generator, step: float) -> DrawnLoop:
    """2 to 4 workers that hold one lock for 1.5 to 3 steps."""
    lock, held = multiprocessing.get_context("fork").Lock(), step * chance.uniform(1.5, 3)

    def work(_: int) -> None:
        with lock:
            time.sleep(held)

    options = {"num_workers": int(chance.integers(2, 5))}
    return DrawnLoop("lock", "contention-bound", work, step, options)


def _slow(chance: np.random.Generator, step: float) -> DrawnLoop:
    """One sample in 50 takes as long as 0.6 to 1.5 times the steps between; 0 to 2 workers."""
    size = int(chance.integers(2, 5))
    late = step * 50 / size * chance.uniform(0.6, 1.5)
    options = {"num_workers": int(chance.integers(0, 3)), "batch_size": size}

    def work(index: int) -> None:
        time.sleep(late if index % 50 == 20 else 0.001)

    return DrawnLoop(
        "slow sample", "variance-bound", work, step, options, cycle=math.lcm(50, size) // size
    )


def _device(chance: np.random.Generator, step: float) -> DrawnLoop:
    """Loads of 5 to 50% of the step for each worker's share; 1 to 3 workers."""
    workers = int(chance.integers(1, 4))
    load = step * workers * chance.uniform(0.05, 0.5)
    return DrawnLoop(
        "device", "compute-bound", lambda i: time.sleep(load), step, {"num_workers": workers}
    )


def _startup(chance: np.random.Generator, step: float) -> DrawnLoop:
    """Epochs of 15 to 40 steps; 1 to 3 workers that start in 0.4 to 1.5 times as long."""
    count = int(chance.integers(15, 41))
    seconds = count * step * chance.uniform(0.4, 1.5)
    options = {
        "num_workers": int(chance.integers(1, 4)), "worker_init_fn": lambda _: time.sleep(seconds)
    }  # fmt: skip
    return DrawnLoop(
        "start-up", "startup-bound", lambda i: time.sleep(0.1 * step), step, options, count
    )


def _rank(chance: np.random.Generator, step: float) -> DrawnLoop:
    """A rank of four in lockstep: its own loads take 1.6 to 4 steps, or those of another."""
    own, resources = bool(chance.integers(0, 2)), contextlib.ExitStack()
    slow, barrier = step * chance.uniform(1.6, 4), threading.Barrier(4)

    def peer(load: float) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            while True:
                time.sleep(load + step)
                barrier.wait()

    loads = [0.0, 0.0, 0.0 if own else slow]
    peers = [threading.Thread(target=peer, args=(load,)) for load in loads]
    for thread in peers:
        thread.start()
        resources.callback(thread.join)
    resources.callback(barrier.abort)
    return DrawnLoop(
        "rank of four", "storage-bound" if own else "compute-bound",
        lambda i: time.sleep(slow if own else 0.05 * step), step, {"num_workers": 0},
        wait=barrier.wait, resources=resources,
    )  # fmt: skip


KINDS: dict[str, Callable[[np.random.Generator, float], DrawnLoop]] = {
    "network": _network, "disk": _disk, "CPU": _cpu, "lock": _lock, "slow sample": _slow,
    "device": _device, "start-up": _startup, "rank of four": _rank,
}  # fmt: skip


REMEDIES: dict[str, tuple[str, ...]] = {
    "network": ("workers",), "CPU": ("workers", "precache"), "lock": ("precache",),
    "slow sample": ("any order", "prefetch", "precache"), "start-up": ("persistent workers",),
    "disk": ("precache",),
}  # fmt: skip
"""Kind of a loop -> remedies that can be put in place."""


def best_remedy(loop: DrawnLoop, remedies: Iterable[Remedy]) -> Remedy:
    """The remedy with the largest predicted gain of those that can be put in place."""
    fitting = [remedy for remedy in remedies if remedy.name in REMEDIES[loop.kind]]
    return max(fitting, key=lambda remedy: remedy.gain)


def remedied(loop: DrawnLoop, remedy: Remedy) -> DataLoader[torch.Tensor]:
    """The loader with a remedy in place; a store is one whose samples take no time."""
    if remedy.name == "precache":
        fast = Samples(lambda index: None)
        return DataLoader(fast, loop.options.get("batch_size", 1), num_workers=1)
    name, value = remedy.what.split("=")
    changes: dict[str, Any] = {name: value == "True" if value.isalpha() else int(value)}
    return loop.loader(**changes)


BURN = """
import os, sys
parent = os.getppid()
for _ in range(int(sys.argv[1])):
    if not (child := os.fork()):
        os.close(1)
        while os.path.exists(f"/proc/{parent}"):
            sum(range(100_000))
        os._exit(0)
    print(child)
"""
"""Program that starts processes which compute until this one ends, and leaves them behind."""


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many other processes at work; none is a descendant, whose usage would count."""
    command = [sys.executable, "-c", BURN, str(processes)]
    started = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    try:
        yield
    finally:
        for process in started.stdout.split():
            os.kill(int(process), signal.SIGKILL)
