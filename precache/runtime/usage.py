"""CPU and I/O usage of this process and its descendants; the cores and memory that they may use."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from precache.errors import UsageError
from precache.runtime.operating_system import usable_cores

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second, in which /proc counts CPU time."""

LARGE_NBYTES = 256 << 20
"""Bytes from which requests are compared with the memory that is available, which takes half a
millisecond to read."""

MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files of a control group's limit and usage, and the prefix of its subtree's counters."""

Stat = dict[int, list[str]]
"""Process id -> fields of ``/proc/[pid]/stat``, from the state (the third in proc(5)) on."""


@dataclass(frozen=True)
class Usage:
    """Counters, or their increase between two readings; None for what the kernel does not report.

    Attributes
    ----------
    wall, cpu
        Seconds of wall time, and of CPU time of the process and its descendants, ended ones
        included.
    delay
        Seconds that their threads were ready to run but had no core.
    read_bytes
        Bytes read from a disk or a network file system.
    called_bytes
        Bytes returned by read(2) and similar calls, from the page cache and from pipes too.
    io_wait
        Seconds in which some task of the machine waited for I/O; if the kernel does not count them
        (``/proc/pressure/io``), those of all cores idle for it, over the number of cores.
    """

    wall: float
    cpu: float | None = None
    delay: float | None = None
    read_bytes: float | None = None
    called_bytes: float | None = None
    io_wait: float | None = None

    def __sub__(self, before: Usage) -> Usage:
        """Return the increase since an earlier reading; counters of ended processes are lost."""
        gained: dict[str, float | None] = {}
        for counter in fields(Usage):
            now, then = getattr(self, counter.name), getattr(before, counter.name)
            gained[counter.name] = None if now is None or then is None else max(0.0, now - then)
        return Usage(**gained)  # type: ignore[arg-type]  # wall is never None


@dataclass(frozen=True)
class Counters(Usage):
    """Counters at one moment.

    Attributes
    ----------
    threads
        Process -> seconds that its threads have run, and were ready to run but had no core.
    """

    threads: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def __sub__(self, before: Usage) -> Usage:
        """Return the increase since an earlier reading.

        The kernel forgets how long a process that has ended was ready: it counts as long for its
        CPU time as the others were.
        """
        gained = super().__sub__(before)
        if not isinstance(before, Counters) or gained.delay is None:
            return gained
        ran = delay = 0.0
        for process, now in self.threads.items():
            then = before.threads.get(process, (0.0, 0.0))
            ran += max(0.0, now[0] - then[0])
            delay += max(0.0, now[1] - then[1])
        if before.threads.keys() - self.threads.keys() and ran and gained.cpu:
            delay *= max(1.0, gained.cpu / ran)
        return replace(gained, delay=delay)


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of the machine, or of a control group with a limit."""

    total: int
    available: int


def read_usage() -> Counters:
    """Read all counters."""
    stats = _tree()
    transfers = [_io(process) for process in stats]
    reads, calls = zip(*transfers, strict=True) if transfers else ((), ())
    threads = {process: times for process in stats if (times := _threads(process))}
    return Counters(
        time.perf_counter(),
        _cpu(stats) if stats else None,
        _sum([delay for _, delay in threads.values()]),
        _sum(reads),
        _sum(calls),
        _io_wait(),
        threads,
    )


def cores() -> int:
    """Return the number of cores that this process may use.

    The limits are its affinity, if the system has one, and the CPU quotas of its control groups,
    rounded up (cgroups(7), versions 1 and 2).
    """
    return max(1, math.ceil(min([usable_cores(), *map(_quota, _control_groups("cpu"))])))


def available_bytes() -> int:
    """Return the bytes of memory that this process can still take; see `read_memory`."""
    return read_memory().available


def shortage(nbytes: int) -> int | None:
    """Return the bytes that are available if these are fewer than `nbytes`; None if they are not,
    or if `nbytes` are fewer than `LARGE_NBYTES`."""
    available = available_bytes() if nbytes >= LARGE_NBYTES else nbytes
    return available if available < nbytes else None


def require_memory(what: str, nbytes: int, way: str = "give a smaller batch_size") -> None:
    """Raise `UsageError` if `nbytes` are not available, with what takes them, and a way out."""
    if (free := shortage(nbytes)) is not None:
        raise UsageError(f"{what} {nbytes} bytes, and {free} are free; {way}")


def read_memory() -> Memory:
    """Return the memory of the machine, or of the control group that leaves least available.

    In a group, the file cache counts as available: the kernel gives it up before it kills.
    """
    groups = (_group_memory(group) for group in _control_groups("memory"))
    limits = [memory for memory in groups if memory is not None]
    return min([_machine_memory(), *limits], key=lambda memory: memory.available)


def _machine_memory() -> Memory:
    """Return the machine's memory; all of it is available where the kernel has no estimate."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        kilobytes = _counters(PROC / "meminfo")
        return Memory(kilobytes["MemTotal:"] * 1024, kilobytes["MemAvailable:"] * 1024)
    except (OSError, KeyError):
        return Memory(total, total)


def _group_memory(group: Path) -> Memory | None:
    """Return the memory of a control group, or None if it has no limit."""
    for limit_file, usage_file, prefix in MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such file, or "max"
            limit = int((group / limit_file).read_text("ascii"))
            used = int((group / usage_file).read_text("ascii"))
            counters = _counters(group / "memory.stat")
            cache = counters[f"{prefix}active_file"] + counters[f"{prefix}inactive_file"]
            return Memory(limit, min(limit, max(0, limit - used + cache)))
    return None


def _counters(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    rows = (line.split() for line in path.read_text("ascii").splitlines())
    return {row[0]: int(row[1]) for row in rows}


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of the control groups, of either version, that limit this process."""
    groups: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (PROC / "self/cgroup").read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root, group = CGROUPS / (controller if controllers else ""), Path(path.lstrip("/"))
                # A container may see the whole path of its group, but only the group's own files.
                groups += [root / folder for folder in (group, *group.parents)]
    return groups


def _quota(group: Path) -> float:
    """Return the CPU quota of a control group, in cores."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            text = " ".join((group / name).read_text("ascii") for name in files)
            quota, period = map(int, text.split())
            if quota > 0:
                return quota / period
    return math.inf


def _tree() -> Stat:
    """Read the status of this process and its descendants."""
    stats: Stat = {}
    for process in _processes():
        try:
            text = (PROC / str(process) / "stat").read_text("utf-8", errors="replace")
        except OSError:  # it ended
            continue
        stats[process] = text.rpartition(")")[2].split()
    tree = [os.getpid()] if os.getpid() in stats else []
    for process in tree:  # which grows in the loop
        tree += [child for child, fields in stats.items() if int(fields[1]) == process]
    return {process: stats[process] for process in tree}


def _processes() -> Iterator[int]:
    try:
        yield from (int(path.name) for path in PROC.iterdir() if path.name.isdigit())
    except OSError:
        return


def _cpu(stats: Stat) -> float:
    return sum(sum(map(int, fields[11:15])) for fields in stats.values()) / CLOCK_TICKS


def _threads(process: int) -> tuple[float, float] | None:
    """Return the seconds that a process's threads have run, and waited in a run queue.

    Source: ``schedstat``, sched-stats.rst.
    """
    try:
        tasks = list((PROC / str(process) / "task").iterdir())
    except OSError:
        return None
    ran = delay = 0.0
    for task in tasks:
        try:
            counts = (task / "schedstat").read_text("ascii").split()
            ran, delay = ran + int(counts[0]) / 1e9, delay + int(counts[1]) / 1e9
        except (OSError, IndexError):  # it ended, or the kernel does not count
            continue
    return ran, delay


def _io(process: int) -> tuple[float | None, float | None]:
    try:
        lines = (PROC / str(process) / "io").read_text("ascii").splitlines()
        counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        return counts["read_bytes"], counts["rchar"]
    except (OSError, ValueError, KeyError):
        return None, None


def _io_wait() -> float | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        some = (PROC / "pressure/io").read_text("ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = (PROC / "stat").read_text("ascii").splitlines()[0].split()
        return int(ticks[5]) / CLOCK_TICKS / (os.cpu_count() or 1)
    return None


def _sum(values: list[float | None] | tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
