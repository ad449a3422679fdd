"""Engine of `dispatch` on this machine: worker processes, started as tasks need them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from precache.errors import UsageError
from precache.runtime.usage import available_bytes
from precache.units import size
from precache_workers.cluster.dispatch import FIRST_LATE, Done, Lost
from precache_workers.runtime.time_limit import take_suspects

START = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from precache_workers.cluster.worker import run_worker; run_worker(*sys.argv[1:4])"
)

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # every core runs a task of its own
    # glibc gives freed image buffers back to the kernel, only to fault them in again.
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
"""Environment of workers; variables that the user has set take precedence."""

CHECK_SECONDS = 0.25
"""Time between two checks of the workers and the available memory."""

STOPPED_CHECKS = 240
"""Checks at which a worker was stopped each time, by SIGSTOP, after which it is ended. Checks are
counted, as time goes on while this process is stopped with its workers."""

LEAST_FREE = 512 << 20
"""Bytes of memory; with less available, the largest worker is ended."""

LEAST_ENDED = 1 << 30
"""Only a worker that holds more bytes is ended for them."""

LATE_SECONDS = FIRST_LATE
"""Age from which a task does not count towards the number of tasks that run at a time."""

SHUTDOWN_SECONDS = 1.0
"""Time for a process that has closed its connection to end, and for its last output to arrive."""

STDERR_TAIL_BYTES = 4096
"""Bytes of a worker's standard error that are kept."""


class _Worker:
    """A worker process: idle, or busy with one task.

    It is a process of its own interpreter, not a fork of this one, whose threads would not be
    there, and does not import this one's main module.

    Parameters
    ----------
    folder
        Of jobs and notes; removed by the worker if this process is gone.

    Raises
    ------
    UsageError
        The interpreter cannot be started.
    """

    def __init__(self, folder: str) -> None:
        self.began = time.monotonic()
        self.out_of_memory = False
        self._stopped = 0
        self._stderr_tail = b""
        self.connection, theirs = multiprocessing.Pipe()
        # The current folder may be a store, or full of samples, with files named like modules.
        path = [str(Path(entry).absolute()) for entry in sys.path if entry]
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), folder, *path]
            try:
                self._process = subprocess.Popen(
                    [sys.executable or "", "-P", "-c", START, *arguments],
                    env=ENVIRONMENT | os.environ,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    process_group=0,  # Ctrl-C is not for it
                )
            except OSError as error:
                self.connection.close()
                raise UsageError(
                    f"cannot start another Python ({error}): sys.executable is "
                    f"{sys.executable!r}; build with the address serial instead"
                ) from None
        # A child of the worker may hold the connection open when the worker is gone.
        self.ended = os.pidfd_open(self._process.pid)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Keep the end of what the process writes on standard error."""
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            while said := os.read(pipe.fileno(), 1 << 16):
                self._stderr_tail = (self._stderr_tail + said)[-STDERR_TAIL_BYTES:]

    def begin(
        self, function: Callable[[Any], Any], job: str, items: Sequence[Any], at_work: str
    ) -> None:
        """Send a task; `job` is the file of the pickled job, `at_work` that of its samples."""
        self.began = time.monotonic()
        bare = [replace(item, job=None) for item in items]
        with contextlib.suppress(OSError):  # it has ended, which the wait for its answer reports
            self.connection.send((function, job, bare, at_work))

    def memory(self) -> int:
        """Return the bytes of memory that the process holds."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def end_if_stopped(self) -> None:
        """Kill the process if it was stopped at each of the last checks: nothing else ends it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped = psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
            self._stopped = self._stopped + 1 if stopped else 0
            if self._stopped == STOPPED_CHECKS:
                self.kill()

    def kill(self) -> None:
        """Kill the process, and whatever it has started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        self._process.wait()
        os.close(self.ended)
        self.connection.close()

    def why_ended(self) -> str:
        """Return why the process ended by itself."""
        wait([self.ended], SHUTDOWN_SECONDS)
        self.kill()
        try:
            _, status, usage = os.wait4(self._process.pid, 0)
        except ChildProcessError:  # the kernel keeps no status where SIGCHLD is ignored
            return "its process ended"
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._listener.join(SHUTDOWN_SECONDS)
        if self.out_of_memory:
            return "it ran out of memory"
        if self._stopped >= STOPPED_CHECKS:
            return f"its process was stopped for {STOPPED_CHECKS * CHECK_SECONDS:g} s (SIGSTOP)"
        how = f"ended with status {self._process.returncode}"
        if os.WIFSIGNALED(status):
            how = f"was killed ({signal.Signals(os.WTERMSIG(status)).name})"
            if os.WTERMSIG(status) == signal.SIGKILL:  # as the kernel does if memory runs out
                how += f" with up to {size(usage.ru_maxrss << 10)} of memory"
        lines = self._stderr_tail.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process {how}{f': {last.strip()[:200]}' if last else ''}"


class ProcessEngine:
    """Tasks in worker processes on this machine.

    Parameters
    ----------
    processes
        That run at a time, at most.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._folder = tempfile.TemporaryDirectory(prefix="precache-", ignore_cleanup_errors=True)
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Callable[[Any], Any], Sequence[Any]]] = {}
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}
        self._jobs: list[tuple[Any, str]] = []
        self._checked = time.monotonic()
        self._available_before = available_bytes()

    def slots(self) -> int:
        return self._processes

    def submit(
        self, function: Callable[[Any], Any], items: Sequence[Any], next_one: bool = False
    ) -> Hashable:
        copy = next(self._numbers)
        task = {copy: (function, items)}
        self._waiting = task | self._waiting if next_one else self._waiting | task
        self._begin()
        return copy

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Lost]]:
        self._begin()
        signs = [
            sign for worker in self._busy.values() for sign in (worker.connection, worker.ended)
        ]
        until = time.monotonic() + seconds
        self._check_workers()
        while not (ready := wait(signs, min(seconds, CHECK_SECONDS))):
            if time.monotonic() >= until:
                return []
            self._check_workers()
        ended: list[tuple[Hashable, Done | Lost]] = []
        for copy, worker in list(self._busy.items()):
            if worker.connection in ready or worker.ended in ready:
                ended.append((copy, self._end(copy, self._busy.pop(copy))))
        self._begin()
        return ended

    def cancel(self, copy: Any) -> None:
        self._waiting.pop(copy, None)
        worker = self._busy.pop(copy, None)
        if worker is not None:
            worker.end()

    def close(self) -> None:
        """End all processes."""
        self._waiting.clear()
        for worker in (*self._idle, *self._busy.values()):
            worker.end()
        self._idle.clear()
        self._busy.clear()
        self._folder.cleanup()

    def _begin(self) -> None:
        """Give waiting tasks to idle workers, and to new ones up to the limit."""
        since = time.monotonic() - LATE_SECONDS
        free = self._processes - sum(worker.began > since for worker in self._busy.values())
        for copy in list(itertools.islice(self._waiting, max(0, free))):
            function, items = self._waiting.pop(copy)
            worker = self._idle.pop() if self._idle else _Worker(self._folder.name)
            self._busy[copy] = worker
            worker.begin(function, self._job(items[0].job), items, self._at_work(copy))

    def _job(self, job: Any) -> str:
        """Return the file of a pickled job; a pipe would block while a worker starts."""
        for known, path in self._jobs:
            if known is job:
                return path
        path = str(Path(self._folder.name) / f"job-{len(self._jobs)}")
        Path(path).write_bytes(pickle.dumps(job))
        self._jobs.append((job, path))
        return path

    def _check_workers(self) -> None:
        """End workers that are stopped, and the largest one if workers use up the memory: the
        kernel takes minutes to."""
        if time.monotonic() < self._checked + CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        for worker in self._busy.values():
            worker.end_if_stopped()
        available = available_bytes()
        if available >= LEAST_FREE:
            return
        held = {worker: worker.memory() for worker in self._busy.values()}
        largest = max(held, key=held.__getitem__, default=None)
        gone = self._available_before - available
        if largest and held[largest] > LEAST_ENDED and 2 * sum(held.values()) > gone:
            largest.out_of_memory = True
            largest.kill()

    def _at_work(self, copy: int) -> str:
        return str(Path(self._folder.name) / str(copy))

    def _end(self, copy: int, worker: _Worker) -> Done | Lost:
        """Return how a task ended."""
        try:
            if not worker.connection.poll():
                raise EOFError
            values, seconds = worker.connection.recv()
        except (EOFError, OSError):
            why = worker.why_ended()
            worker.end()
            suspects = take_suspects(self._at_work(copy), why)
            return Lost(why, crashed=suspects is not None, suspects=suspects or {})
        self._idle.append(worker)
        return Done(values, seconds)
