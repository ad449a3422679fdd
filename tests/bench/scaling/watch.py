"""What processes use, seen from outside."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from tests.support.cgroups import cpu_seconds, entering, group

INTERVAL = 0.2


@dataclass
class Seen:
    """One process: CPU seconds since the watch began, and most memory that was its own."""

    worker: bool
    before: float
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


class Watch:
    """Looks at all descendants of this process while it is open.

    A worker is a process of Ray's that has had a task. What a process uses after the last look
    at it is missed.
    """

    def __init__(self) -> None:
        self._seen: dict[psutil.Process, Seen] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._look()
        for each in self._seen.values():
            each.before, each.cpu_seconds = each.cpu_seconds, 0.0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def cpu_seconds(self) -> float:
        """Of all processes."""
        return sum(each.cpu_seconds for each in self._seen.values())

    @property
    def worker_seconds(self) -> float:
        """Of the workers, imports and all."""
        return sum(each.cpu_seconds for each in self._seen.values() if each.worker)

    @property
    def worker_peak_bytes(self) -> int:
        """The most that a worker was seen to hold at a time."""
        return max((each.peak_bytes for each in self._seen.values() if each.worker), default=0)

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                seen = self._seen.setdefault(process, Seen(False, 0.0))
                title = process.name()
                seen.worker |= title.startswith("ray::") and "Agent" not in title
                times = process.cpu_times()
                seen.cpu_seconds = times.user + times.system - seen.before
                seen.peak_bytes = max(seen.peak_bytes, _peak_bytes(process.pid))


@contextlib.contextmanager
def counted() -> Iterator[tuple[tuple[str, ...], Callable[[], float]]]:
    """What a command line is to begin with, and the CPU seconds of all its processes until then.

    They are the kernel's where a group of processes can be made, else what a `Watch` sees.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(group("cpuacct"))
        except OSError:
            watch = stack.enter_context(Watch())
            yield (), lambda: watch.cpu_seconds
        else:
            yield entering(folder), lambda: cpu_seconds(folder)


def _peak_bytes(pid: int) -> int:
    """VmHWM of ``/proc/PID/status``, 0 of a process that has ended: proc(5)."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return max(
        (int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), default=0
    )


def load_average() -> float:
    """Processes that wanted a core in the last minute, on average."""
    return os.getloadavg()[0]
