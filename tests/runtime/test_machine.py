"""What the machine did, where it can be read."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from precache.runtime import usage
from precache.runtime.machine import MachineReader
from tests.support.building import write

_BURN = "import time\nuntil = time.process_time() + {}\nwhile time.process_time() < until: pass"


def _burn(seconds: float) -> list[str]:
    return [sys.executable, "-c", _BURN.format(seconds)]


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
def test_what_cannot_be_read_is_none(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(usage, "PROC", tmp_path)
    if text is not None:
        write(tmp_path / "pressure/io", text.encode())
    reader = MachineReader()
    reader.read()
    found = reader.read()
    assert (found.cpu_cores, found.gpu_utilization, found.io_wait) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("pressure/io", "some avg10=0 total=9000\nfull total=7\n", "some avg10=9 total=15000"),
        ("stat", "cpu 1 2 3 4 0 6 7 8", "cpu 1 2 3 4 5000 6 7 8"),
    ],
)
def test_io_wait_is_what_its_counter_gained(
    name: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(usage, "PROC", tmp_path)
    reader = MachineReader()
    write(tmp_path / name, before.encode())
    reader.read()
    write(tmp_path / name, after.encode())
    found = reader.read().io_wait
    assert found is not None
    assert found > 0
    assert reader.read().io_wait == 0
