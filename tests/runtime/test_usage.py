"""The cores that a process may use: its affinity and its control groups, of either version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def _threads(store: BuiltStore, allowed: set[int], *within: str) -> int:
    names = ",".join(map(str, allowed))
    line = [*within, sys.executable, "-c", THREADS, str(store.path), names]
    return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


@pytest.mark.heavy
def test_a_loader_starts_no_more_threads_than_its_process_may_run(
    stores: dict[str, BuiltStore],
) -> None:
    allowed = os.sched_getaffinity(0)
    assert _threads(stores["image"], {min(allowed)}) == 1
    assert _threads(stores["image"], allowed) == min(4, usage.cores())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.heavy
def test_a_loader_starts_no_more_threads_than_its_quota_allows(
    stores: dict[str, BuiltStore],
) -> None:
    try:
        with cgroups.group("cpu") as folder:
            first = folder / "cpu.cfs_quota_us"
            if first.exists():
                first.write_text("100000")
            else:
                (folder / "cpu.max").write_text("100000 100000")
            within = cgroups.entering(folder)
            assert _threads(stores["image"], os.sched_getaffinity(0), *within) == 1
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
