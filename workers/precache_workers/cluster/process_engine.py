"""Engine of `dispatch` on this machine: worker processes, started as tasks need them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from precache.errors import HangError
from precache_workers.cluster.dispatch import Done, Hung, Lost
from precache_workers.cluster.worker import take_report
from precache_workers.runtime.watchdog import explain

START = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from precache_workers.cluster.worker import run_worker; run_worker(*map(int, sys.argv[1:3]))"
)

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # every core runs a task of its own
    # glibc gives freed image buffers back to the kernel, only to fault them in again.
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
"""Of workers, unless the user has set these variables."""

MEMORY_SECONDS = 0.25
"""Time between two checks of the available memory."""

LEAST_FREE = 0.05
"""Share of the machine's memory; with less available, the largest worker is ended."""

MOST_MEMORY = 1 << 30
"""Bytes that a worker always keeps."""


class _Worker:
    """A worker process: idle, or busy with one task.

    It is a process of its own interpreter, not a fork of this one, whose threads would not be
    there, and does not import this one's main module.
    """

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self.out_of_memory = False
        self._job: Any = None
        # The current folder may be a store, or full of samples, with files named like modules.
        path = [str(Path(entry).absolute()) for entry in sys.path if entry]
        numbers = str(theirs.fileno()), str(os.getpid())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, *numbers, *path],
                env=ENVIRONMENT | os.environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                process_group=0,  # Ctrl-C is not for it
            )

    def begin(self, function: Callable[[Any], Any], items: Sequence[Any], report: str) -> None:
        """Send a task."""
        job = items[0].job
        bare = [replace(item, job=None) for item in items]
        with contextlib.suppress(OSError):  # it has ended, as is found where its answer is awaited
            self.connection.send((function, None if job is self._job else job, bare, report))
        self._job = job

    def memory(self) -> int:
        """Return the bytes of memory that the process holds."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.errors.close()

    def why_ended(self) -> str:
        """Return why the process ended by itself."""
        status = self.process.wait()
        if self.out_of_memory:
            return "it ran out of memory"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        because = f" ({last.strip()[:200]})" if last and status == 1 else ""
        return f"its process ended by itself, or was killed{because}"


class ProcessEngine:
    """Tasks in worker processes on this machine.

    Parameters
    ----------
    processes
        That run at a time, at most.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._reports = tempfile.TemporaryDirectory(prefix="precache-", ignore_cleanup_errors=True)
        self._numbers = itertools.count()
        self._waiting: deque[tuple[int, Callable[[Any], Any], Sequence[Any]]] = deque()
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}

    def slots(self) -> int:
        return self._processes

    def submit(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Hashable:
        copy = next(self._numbers)
        self._waiting.append((copy, function, items))
        self._begin()
        return copy

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Hung | Lost]]:
        connections = [worker.connection for worker in self._busy.values()]
        until = time.monotonic() + seconds
        while not (ready := wait(connections, min(seconds, MEMORY_SECONDS))):
            if time.monotonic() >= until:
                return []
            self._relieve_memory()
        copies = [copy for copy, worker in self._busy.items() if worker.connection in ready]
        ended = [(copy, self._end(copy, self._busy.pop(copy))) for copy in copies]
        self._begin()
        return list(ended)

    def cancel(self, copy: Hashable) -> None:
        for task in self._waiting:
            if task[0] == copy:
                self._waiting.remove(task)
                return
        for busy in self._busy.keys() & {copy}:
            self._busy.pop(busy).end()
        self._begin()

    def close(self) -> None:
        """End all processes."""
        self._waiting.clear()
        for worker in (*self._idle, *self._busy.values()):
            worker.end()
        self._idle.clear()
        self._busy.clear()
        self._reports.cleanup()

    def _begin(self) -> None:
        """Give waiting tasks to idle workers, and to new ones up to the limit."""
        while self._waiting and len(self._busy) < self._processes:
            copy, function, items = self._waiting.popleft()
            worker = self._busy[copy] = self._idle.pop() if self._idle else _Worker()
            worker.begin(function, items, self._report(copy))

    def _relieve_memory(self) -> None:
        """End the largest worker if memory runs out: the kernel would do so after minutes."""
        memory = psutil.virtual_memory()
        if memory.available >= LEAST_FREE * memory.total:
            return
        worker = max(self._busy.values(), key=_Worker.memory)
        if worker.memory() > MOST_MEMORY:
            worker.process.kill()
            worker.out_of_memory = True

    def _report(self, copy: int) -> str:
        return str(Path(self._reports.name) / str(copy))

    def _end(self, copy: int, worker: _Worker) -> Done | Hung | Lost:
        """Return how a task ended."""
        try:
            values, seconds = worker.connection.recv()
        except (EOFError, OSError):
            why = worker.why_ended()
            worker.end()
            if late := take_report(self._report(copy)):
                return Hung(HangError(explain(late), late=late))
            return Lost(why, crashed=True)
        self._idle.append(worker)
        return Done(values, seconds)
