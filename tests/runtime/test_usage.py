"""The cores and the memory that a process may use: its machine's and its control groups'."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from precache.runtime import usage
from tests.conftest import BuiltStore
from tests.support import cgroups
from tests.support.building import write

THREADS = """
import os, sys, threading
import precache
os.sched_setaffinity(0, {int(core) for core in sys.argv[2].split(",")})
with precache.Loader(sys.argv[1], 2) as loader:
    batches = iter(loader)
    next(batches)
    print(sum(thread.name.startswith("precache_") for thread in threading.enumerate()))
"""


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"own/cpu.max": "max 100000"}, 3),
        ({"own/cpu.max": "150000 100000"}, 2),
        ({"own/cpu.max": "900000 100000"}, 3),
        ({"cpu.max": "100000 100000", "own/cpu.max": "200000 100000"}, 1),
        ({"cpu.max": "1000 100000"}, 1),
        ({"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
        ({}, 3),
    ],
)
def test_quotas_of_all_groups_above_a_process_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    write(tmp_path / "self/cgroup", b"5:memory:/m:x\n3:cpu,cpuacct:/a\n0::/own\n")
    for name, text in files.items():
        write(tmp_path / name, f"{text}\n".encode())
    monkeypatch.setattr(usage, "PROC", tmp_path)
    monkeypatch.setattr(usage, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert usage.cores() == cores


V2 = "memory.max", "memory.current", "active_file {}\ninactive_file {}"
V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "active_file 0\ninactive_file 0\ntotal_active_file {}\ntotal_inactive_file {}",
)


def _limited(
    folder: Path, limit: object, used: object, cache: tuple[int, int], names: tuple[str, ...] = V2
) -> None:
    write(folder / names[0], f"{limit}\n".encode())
    write(folder / names[1], f"{used}\n".encode())
    write(folder / "memory.stat", f"anon 7\n{names[2].format(*cache)}\nslab 5\n".encode())


def _machine(folder: Path) -> None:
    """Of 9,000 kB, 4,000 of them available, and a process in a group of each version."""
    write(folder / "meminfo", b"MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\nHuge: 0\n")
    write(folder / "self/cgroup", b"5:cpu,memory:/a/b\n3:cpuset:/x\n0::/own\n")


MACHINE = usage.Memory(9000 << 10, 4000 << 10)


@pytest.mark.parametrize(
    ("groups", "memory"),
    [
        ({}, MACHINE),
        ({"own": ("max", 10, (0, 0))}, MACHINE),
        ({"own": (1 << 40, 1 << 30, (0, 0))}, MACHINE),
        ({"own": (100_000, 90_000, (0, 0))}, usage.Memory(100_000, 10_000)),
        ({"own": (100_000, 90_000, (7_000, 30_000))}, usage.Memory(100_000, 47_000)),
        ({"own": (100_000, 100_500, (0, 0))}, usage.Memory(100_000, 0)),
        ({"own": (100_000, 50_000, (0, 60_000))}, usage.Memory(100_000, 100_000)),
        ({"own": (100_000, "lost", (0, 0))}, MACHINE),
        (
            {"own": (100_000, 20_000, (0, 0)), "": (150_000, 145_000, (0, 0))},
            usage.Memory(150_000, 5_000),
        ),
        ({"memory/a/b": (100_000, 70_000, (4, 5), V1)}, usage.Memory(100_000, 30_009)),
        ({"memory": (100_000, 70_000, (0, 0), V1)}, usage.Memory(100_000, 30_000)),
        ({"memory/a/b": (0x7FFFFFFFFFFFF000, 70_000, (0, 0), V1)}, MACHINE),
        ({"cpuset/x": (100, 70, (0, 0), V1), "other": (100, 70, (0, 0))}, MACHINE),
    ],
)
def test_available_memory_is_the_least_of_the_machine_and_all_groups_above_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, Any], memory: usage.Memory
) -> None:
    monkeypatch.setattr(usage, "PROC", tmp_path)
    monkeypatch.setattr(usage, "CGROUPS", tmp_path / "groups")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usage.read_memory() == usage.Memory(total, total), "without an estimate of the kernel"
    _machine(tmp_path)
    for name, files in groups.items():
        _limited(tmp_path / "groups" / name, *files)
    assert usage.read_memory() == memory
    assert usage.available_bytes() == memory.available


def _threads(store: BuiltStore, allowed: set[int], *within: str) -> int:
    names = ",".join(map(str, allowed))
    line = [*within, sys.executable, "-c", THREADS, str(store.path), names]
    return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


@pytest.mark.heavy
def test_a_loader_starts_no_more_threads_than_its_process_and_its_quota_allow(
    stores: dict[str, BuiltStore],
) -> None:
    allowed = os.sched_getaffinity(0)
    assert _threads(stores["image"], {min(allowed)}) == 1
    assert _threads(stores["image"], allowed) == min(4, usage.cores())
    if len(allowed) < 2:
        pytest.skip("there is one core")
    try:
        with cgroups.group("cpu") as folder:
            first = folder / "cpu.cfs_quota_us"
            if first.exists():
                first.write_text("100000")
            else:
                (folder / "cpu.max").write_text("100000 100000")
            within = cgroups.entering(folder)
            assert _threads(stores["image"], allowed, *within) == 1
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")


def test_differences_of_readings_never_fall_below_zero() -> None:
    readings = usage.Usage(1.0, 5.0, None, 10.0), usage.Usage(2.0, 3.0)
    for before, after in itertools.permutations(readings):
        gained = after - before
        assert gained.read_bytes is None
        assert gained.cpu is not None
        assert gained.cpu >= 0
