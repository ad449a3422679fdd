"""One peer in a process of its own, that does as it is told.

``python -m tests.bench.peers.child PEER STORE ROWS``, started by `measure` with the interpreter of
the peer's environment: nothing is imported but NumPy, torch and the peer. Each line on standard
input is a request, the name of one of `Child`'s methods; each is answered by a line of JSON.
"""

import ctypes
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch  # noqa: F401 - training has it in memory, so no peer is charged with it

BATCH = 256
ROW_SHAPE = (224, 224, 3)
TICKS = os.sysconf("SC_CLK_TCK")
MADV_DONTNEED = 4
LOSSY_MEAN = 8.0  # levels that a lossy peer may be off on average

Batch = tuple[Any, Any]
"""Images, (n, H, W, C) or (n, C, H, W) uint8, and row numbers: anything that NumPy reads."""


class Peer(Protocol):
    """What a peer's module offers.

    Attributes
    ----------
    exact
        Whether pixels come back as they went in.
    shuffled
        Whether every epoch has an order of its own.
    """

    exact: bool
    shuffled: bool

    def write(self, rows: Path, store: Path) -> None:
        """Write the rows of ``rows/rows.npy`` with their numbers; `store` does not exist yet."""

    def epochs(self, rows: Path, store: Path) -> Iterator[Iterable[Batch]]:
        """Open a store, and yield epoch after epoch."""


def read_rows(rows: Path) -> np.memmap:
    """All rows, mapped: (count, H, W, C) uint8."""
    mapped: np.memmap = np.load(rows / "rows.npy", mmap_mode="r")
    return mapped


# --- what processes use -------------------------------------------------------------------------


def _descendants(pid: int) -> Iterator[int]:
    for task in _children_files(pid):
        for child in map(int, task.split()):
            yield child
            yield from _descendants(child)


def _children_files(pid: int) -> list[str]:
    try:
        return [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it ended meanwhile
        return []


def _cpu_seconds() -> float:
    """Of this process, its threads, and its children, alive or ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(each.ru_utime + each.ru_stime for each in used)
    for pid in _descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICKS  # utime, stime, cutime, cstime: proc(5)
    return total


def _busy_seconds() -> float:
    """CPU time that all processes of this machine have had, and what its host took away."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - sum(ticks[3:5])) / TICKS  # but idle and iowait: proc(5)


def _sum_of(file: str, *names: str) -> int:
    """Sum of numbers in a file of ``/proc/PID`` over this process and its descendants."""
    total = 0
    for pid in (os.getpid(), *_descendants(os.getpid())):
        try:
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(value.split()[0]) for name, value in _pairs(lines) if name in names)
    return total


def _pairs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        yield name, value


def _unmap_pages(store: Path) -> None:
    """Let go of the pages of a store that are mapped here, so that the page cache can."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).is_relative_to(store):
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            address, length = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            libc.madvise(address, length, MADV_DONTNEED)


# --- requests -----------------------------------------------------------------------------------


class Child:
    """Answers requests; CPU time and disk reads count from one answer to the next."""

    def __init__(self, peer: str, store: Path, rows: Path) -> None:
        module, _, name = peer.partition(":")
        self._peer: Peer = getattr(importlib.import_module(module), name)
        self._store = store
        self._rows = rows
        self._epochs = self._peer.epochs(rows, store)
        self._count = len(read_rows(rows))
        self._last_order = np.empty(0, np.int64)
        self._mark()

    def _mark(self) -> None:
        self._cpu, self._disk = _cpu_seconds(), _sum_of("io", "read_bytes")

    def _cost_of(self, work: Callable[[], None]) -> dict[str, float]:
        """The fields of `common.Cost`."""
        busy, cpu, wall = _busy_seconds(), _cpu_seconds(), time.perf_counter()
        work()
        wall_seconds, now = time.perf_counter() - wall, _cpu_seconds()
        return {
            "samples": self._count,
            "cpu_seconds": now - self._cpu,
            "wall_seconds": wall_seconds,
            "others_seconds": max(0.0, _busy_seconds() - busy - (now - cpu)),
            "disk_bytes": _sum_of("io", "read_bytes") - self._disk,
        }

    def write(self) -> dict[str, float]:
        """Have the store written."""
        return self._cost_of(lambda: self._peer.write(self._rows, self._store))

    def epoch(self) -> dict[str, float]:
        """Run an epoch."""
        seen: list[np.ndarray] = []

        def run() -> None:
            for batch in next(self._epochs):
                seen.append(np.array(batch[1], np.int64))
                del batch

        cost = self._cost_of(run)
        self._check_order(np.concatenate(seen))
        self._mark()
        return cost

    def evict(self) -> dict[str, float]:
        """Get ready for the store's pages to leave the page cache."""
        _unmap_pages(self._store)
        return {}

    def check(self) -> dict[str, int]:
        """Run an epoch, compare pixels, and say how much memory was held at most."""
        anonymous, seen = 0, []
        for images, numbers in next(self._epochs):
            anonymous = max(anonymous, _sum_of("status", "RssAnon", "RssShmem"))
            seen.append(np.array(numbers, np.int64))
            for position in (0, len(numbers) // 2, len(numbers) - 1):
                self._check_pixels(np.asarray(images[position]), int(numbers[position]))
        self._check_order(np.concatenate(seen))
        resident = _sum_of("status", "VmHWM")
        return {"resident_bytes": resident * 1024, "anonymous_bytes": anonymous * 1024}

    def _check_order(self, order: np.ndarray) -> None:
        if not np.array_equal(np.sort(order), np.arange(self._count)):
            raise ValueError(f"{len(order)} rows came, {len(np.unique(order))} of {self._count}")
        if self._peer.shuffled and np.array_equal(order, self._last_order):
            raise ValueError("two epochs had the same order")
        self._last_order = order

    def _check_pixels(self, image: np.ndarray, number: int) -> None:
        # Read, not mapped: pages mapped here would count as the peer's.
        expected = self._expected(number)
        if image.dtype != np.uint8:
            raise ValueError(f"images are {image.dtype}")
        if image.shape != expected.shape:
            image = image.transpose(1, 2, 0)
        error = np.abs(image.astype(int) - expected).mean()
        if error > (0 if self._peer.exact else LOSSY_MEAN):
            raise ValueError(f"row {number} is off by {error:.2f} levels on average")

    def _expected(self, number: int) -> np.ndarray:
        rows = read_rows(self._rows)
        with (self._rows / "rows.npy").open("rb") as file:
            file.seek(rows.offset + number * rows[0].nbytes)
            return np.fromfile(file, np.uint8, rows[0].size).reshape(rows.shape[1:])


def main() -> None:
    """Answer until standard input ends."""
    # Libraries print, too: answers go where standard output went, and prints to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer, store, rows = sys.argv[1:]
    child = Child(peer, Path(store), Path(rows))
    for request in sys.stdin:
        answer = getattr(child, request.strip())()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
