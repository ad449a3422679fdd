"""What the machine did, where it can be read; the cores, the memory and the end of a process."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from precache.runtime import usage
from precache.runtime.machine import Machine, MachineReader
from precache.runtime.process_id import has_ended, process_of
from tests.conftest import BuiltStore
from tests.support import cgroups
from tests.support.building import poll, write

_BURN = "import time\nuntil = time.process_time() + {}\nwhile time.process_time() < until: pass"


def _burn(seconds: float) -> list[str]:
    return [sys.executable, "-c", _BURN.format(seconds)]


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in the place of /proc, with control groups below it."""
    monkeypatch.setattr(usage, "PROC", tmp_path)
    monkeypatch.setattr(usage, "CGROUPS", tmp_path / "groups")
    return tmp_path


# --- load ---------------------------------------------------------------------------------------


def test_cpu_time_is_that_of_the_whole_tree() -> None:
    reader = MachineReader()
    assert reader.read().cpu_cores is None
    started = time.monotonic()
    subprocess.run(_burn(0.2), check=True)  # gone by the time of reading
    with subprocess.Popen(_burn(60)) as child:
        process = psutil.Process(child.pid)
        while process.cpu_times().user < 0.2:
            time.sleep(0.01)  # until the child has had so much
        found = reader.read().cpu_cores
        wall = time.monotonic() - started
        child.kill()
    assert found is not None
    assert found * wall >= 0.36


@pytest.mark.parametrize("text", [None, "", "some avg10=0.00", "some avg10=0 total=x"])
def test_what_cannot_be_read_is_none(text: str | None, proc: Path) -> None:
    if text is not None:
        write(proc / "pressure/io", text.encode())
    reader = MachineReader()
    reader.read()
    assert reader.read() == Machine(None, None, None)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("pressure/io", "some avg10=0 total=9000\nfull total=7\n", "some avg10=9 total=15000"),
        ("stat", "cpu 1 2 3 4 0 6 7 8", "cpu 1 2 3 4 5000 6 7 8"),
    ],
)
def test_io_wait_is_what_its_counter_gained(name: str, before: str, after: str, proc: Path) -> None:
    reader = MachineReader()
    write(proc / name, before.encode())
    reader.read()
    write(proc / name, after.encode())
    found = reader.read().io_wait
    assert found is not None
    assert found > 0
    assert reader.read().io_wait == 0


def test_differences_of_readings_never_fall_below_zero() -> None:
    readings = usage.Usage(1.0, 5.0, None, 10.0), usage.Usage(2.0, 3.0)
    for before, after in itertools.permutations(readings):
        gained = after - before
        assert gained.read_bytes is None
        assert gained.cpu is not None
        assert gained.cpu >= 0


def test_a_worker_that_ended_was_as_long_ready_for_its_cpu_time_as_the_one_after_it(
    proc: Path,
) -> None:
    """Both ran 2 s; of the one that ended the kernel knows only this, as CPU time of a child."""
    own, tick = os.getpid(), usage.CLOCK_TICKS

    def counted(process: int, parent: int, ran: int, ready: int, of_children: int = 0) -> None:
        times = f"{ran * tick} 0 {of_children * tick} 0"
        write(proc / f"{process}/stat", f"{process} (x) S {parent} {'0 ' * 9}{times} 0".encode())
        counts = f"{ran}000000000 {ready}000000000 7"
        write(proc / f"{process}/task/{process}/schedstat", counts.encode())

    counted(own, 1, 0, 0)
    counted(own + 1, own, 9, 50)
    before = usage.read_usage()
    shutil.rmtree(proc / str(own + 1))
    counted(own, 1, 0, 0, of_children=11)
    counted(own + 2, own, 2, 3)
    gained = usage.read_usage() - before
    assert (gained.cpu, gained.delay) == (4, pytest.approx(6))


# --- cores --------------------------------------------------------------------------------------


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
    proc: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    write(proc / "self/cgroup", b"5:memory:/m:x\n3:cpu,cpuacct:/a\n0::/own\n")
    for name, text in files.items():
        write(proc / "groups" / name, f"{text}\n".encode())
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert usage.cores() == cores


THREADS = """
import os, sys, threading
import precache
os.sched_setaffinity(0, {int(core) for core in sys.argv[2].split(",")})
with precache.Loader(sys.argv[1], 2) as loader:
    batches = iter(loader)
    next(batches)
    print(sum(thread.name.startswith("precache_") for thread in threading.enumerate()))
"""


def _threads(store: BuiltStore, allowed: set[int], *within: str) -> int:
    names = ",".join(map(str, allowed))
    line = [*within, sys.executable, "-c", THREADS, str(store.path), names]
    return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


@pytest.mark.heavy
def test_a_loader_starts_no_more_threads_than_its_process_and_its_quota_allow(
    image_store: BuiltStore,
) -> None:
    allowed = os.sched_getaffinity(0)
    assert _threads(image_store, {min(allowed)}) == 1
    assert _threads(image_store, allowed) == min(4, usage.cores())
    if len(allowed) < 2:
        pytest.skip("there is one core")
    try:
        with cgroups.group("cpu") as folder:
            first = folder / "cpu.cfs_quota_us"
            if first.exists():
                first.write_text("100000")
            else:
                (folder / "cpu.max").write_text("100000 100000")
            assert _threads(image_store, allowed, *cgroups.entering(folder)) == 1
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")


# --- memory -------------------------------------------------------------------------------------

V2 = "memory.max", "memory.current", "active_file {}\ninactive_file {}"
V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "active_file 0\ninactive_file 0\ntotal_active_file {}\ntotal_inactive_file {}",
)
MACHINE = usage.Memory(9000 << 10, 4000 << 10)


def _limited(
    folder: Path, limit: object, used: object, cache: tuple[int, int], names: tuple[str, ...] = V2
) -> None:
    write(folder / names[0], f"{limit}\n".encode())
    write(folder / names[1], f"{used}\n".encode())
    write(folder / "memory.stat", f"anon 7\n{names[2].format(*cache)}\nslab 5\n".encode())


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
    proc: Path, groups: dict[str, Any], memory: usage.Memory
) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usage.read_memory() == usage.Memory(total, total), "without an estimate of the kernel"
    write(proc / "meminfo", b"MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\nHuge: 0\n")
    write(proc / "self/cgroup", b"5:cpu,memory:/a/b\n3:cpuset:/x\n0::/own\n")
    for name, files in groups.items():
        _limited(proc / "groups" / name, *files)
    assert usage.read_memory() == memory
    assert usage.available_bytes() == memory.available


# --- processes ----------------------------------------------------------------------------------


def test_a_process_ends_and_a_number_is_not_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = process_of(child.pid)
        assert not has_ended(process)
        assert str(child.pid) in str(process)
        child.kill()
        poll(lambda: has_ended(process), "a zombie has ended")
    assert has_ended(process)
    here = process_of(os.getpid())
    assert not has_ended(here)
    assert has_ended(here.model_copy(update={"started": here.started - 1}))
    elsewhere = here.model_copy(update={"node": "another boot", "started": 0})
    assert not has_ended(elsewhere), "nothing is known of it"
