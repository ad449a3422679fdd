"""Costs of work on this machine, and its page cache.

Nothing but NumPy is imported: other loaders are measured by this in environments of their own.
"""

import contextlib
import ctypes
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Cost of going through some samples, for this process and all its threads.

    Attributes
    ----------
    others_seconds
        CPU time that the machine spent on other processes meanwhile.
    disk_bytes
        Bytes read from the disk by this process; 0 where all was in the page cache.
    """

    samples: int
    cpu_seconds: float
    wall_seconds: float
    others_seconds: float
    disk_bytes: int

    @property
    def cpu_ms_per_1000(self) -> float:
        return self.cpu_seconds * 1e6 / self.samples

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_seconds


def cost_of(work: Callable[[], int], *, children: bool = False) -> Cost:
    """Run `work`, which returns how many samples it went through.

    Parameters
    ----------
    children
        Count the processes that this one has started, too.
    """
    read_cpu = cpu_seconds if children else time.process_time
    disk, busy = disk_bytes(children), busy_seconds()
    wall, cpu = time.perf_counter(), read_cpu()
    samples = work()
    cpu, wall = read_cpu() - cpu, time.perf_counter() - wall
    others = max(0.0, busy_seconds() - busy - cpu)
    return Cost(samples, cpu, wall, others, disk_bytes(children) - disk)


def cpu_seconds() -> float:
    """CPU time of this process, its threads, and its descendants, alive or ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(one.ru_utime + one.ru_stime for one in used)
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / TICKS  # utime, stime, cutime, cstime: proc(5)
    return total


def busy_seconds() -> float:
    """CPU time that all processes of this machine have had, and that its host took away."""
    ticks = [
        int(field) for field in Path("/proc/stat").read_text("utf-8").split("\n")[0].split()[1:9]
    ]
    return (sum(ticks) - sum(ticks[3:5])) / TICKS  # but idle and iowait: proc(5)


def disk_bytes(children: bool = False) -> int:
    """Bytes that this process, or its descendants too, have read from disks."""
    pids = (os.getpid(), *(_descendants(os.getpid()) if children else ()))
    return sum(_number(pid, "io", "read_bytes") for pid in pids)


def peak_bytes(pid: int | None = None) -> int:
    """Most memory that a process, by default this one, has had at a time."""
    return _number(pid or os.getpid(), "status", "VmHWM") * 1024


def _number(pid: int, file: str, name: str) -> int:
    """A number in ``/proc/PID/file``, 0 of a process that has ended: proc(5)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text("utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text("utf-8").split()):
                yield child
                yield from _descendants(child)


# --- the page cache -----------------------------------------------------------------------------


def files_of(store: Path) -> list[Path]:
    """All files of a folder, or the file itself."""
    return [store] if store.is_file() else [path for path in store.rglob("*") if path.is_file()]


def touch(files: Iterable[Path]) -> None:
    """Read files, so that the page cache holds them."""
    buffer = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(files: Iterable[Path]) -> None:
    """Have the page cache drop files, but for pages that some process still has mapped."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(files: Iterable[Path]) -> float:
    """Share of the files' pages that the page cache holds, after mincore(2)."""
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = held = 0
    for path in filter(lambda path: path.stat().st_size, files):
        data = np.memmap(path, np.uint8, "r")
        states = np.empty(-(-len(data) // page), np.uint8)
        if libc.mincore(data.ctypes.data, len(data), states.ctypes.data):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages, held = pages + len(states), held + int((states & 1).sum())
    return held / max(1, pages)
