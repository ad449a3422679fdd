"""Tasks in worker processes of this machine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from precache.errors import BuildError, CrashError, FetchError, UsageError
from precache_workers.cluster import process_engine
from precache_workers.cluster.dispatch import Done, Lost
from precache_workers.cluster.executor import executor
from precache_workers.cluster.process_engine import ProcessEngine
from tests.support.building import gone, poll


@dataclass(frozen=True)
class Deed:
    """What a worker is to do."""

    how: str
    data: bytes = field(default=b"", repr=False)
    job: Any = None
    memory: int = 0
    seconds: float = 0.0

    def retried(self) -> Self:
        return self

    def after(self, hang: object) -> Self:
        raise AssertionError("nothing hangs here")


def do(deed: Deed) -> Any:
    match deed.how:
        case "pid":
            return os.getpid()
        case "echo":
            return deed.data, deed.job
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fork and die":
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        case "start another":
            return subprocess.Popen(["sleep", "1000"]).pid
        case "leave":
            sys.exit(3)
        case "refuse":
            raise FetchError("refused")
        case "fail":
            raise ZeroDivisionError("by zero")
        case "hoard":
            held = b"m" * (300 << 20)
            signal.pause()
            return len(held)
        case "wait":
            signal.pause()
        case "talk":
            os.write(1, b"out" * 100_000)
            os.write(2, b"err" * 100_000)
    return deed.how


def started() -> list[psutil.Process]:
    """Return the workers of this process."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # another test's, that has just ended
            found += [child] * any("run_worker" in part for part in child.cmdline())
    return found


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    with contextlib.closing(ProcessEngine(2)) as engine:
        yield engine


def answer(engine: ProcessEngine, *deeds: Deed) -> Any:
    """Run one task; return how it ended."""
    copy = engine.submit(do, deeds)
    ended: list[Any] = []
    poll(lambda: ended.extend(engine.wait(1.0)) or ended, "the task has ended")
    assert ended[0][0] == copy
    return ended[0][1]


def test_errors_of_ours_are_values_others_are_errors_of_the_build(engine: ProcessEngine) -> None:
    """Megabytes go both ways, and the job goes once."""
    first = answer(engine, Deed("pid"), Deed("refuse"), Deed("talk"))
    assert isinstance(first, Done)
    assert isinstance(first.values[1], FetchError)
    assert first.values[2] == "talk"
    failed = answer(engine, Deed("fail"))
    assert isinstance(failed.values[0], BuildError)
    assert "ZeroDivisionError('by zero')" in str(failed.values[0])
    job, data = {"large": b"j" * (8 << 20)}, b"d" * (8 << 20)
    for _ in range(2):
        assert answer(engine, Deed("echo", data, job)).values == [(data, job)]
    other = {"large": b"k"}
    assert answer(engine, Deed("echo", b"", other)).values == [(b"", other)]
    assert answer(engine, Deed("pid")).values == first.values[:1], "the same process goes on"


def test_a_process_that_dies_is_replaced(engine: ProcessEngine) -> None:
    """It is noticed beside a child that holds its connection, too."""
    [before] = answer(engine, Deed("pid")).values
    killed = r"its process was killed \(SIGKILL\) with up to .+ [MG]B of memory"
    for how in ("die", "leave", "fork and die"):
        end = answer(engine, Deed(how))
        assert isinstance(end, Lost)
        assert end.crashed
        assert how == "leave" or re.fullmatch(killed, end.why)
    [after] = answer(engine, Deed("pid")).values
    assert before != after


def test_a_task_that_kills_every_process_is_an_error() -> None:
    with executor("local", 1) as run:
        [(_, outcome)] = run(do, [Deed("die")])
    assert isinstance(outcome, CrashError)


def test_a_process_that_cannot_begin_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ProcessEngine
) -> None:
    (tmp_path / "precache_workers").mkdir()
    (tmp_path / "precache_workers/__init__.py").write_text("raise ImportError('of no use')\n")
    monkeypatch.syspath_prepend(tmp_path)
    end = answer(engine, Deed("pid"))
    assert isinstance(end, Lost)
    assert end.why == "its process ended with status 1: ImportError: of no use"


def test_cancelled_tasks_end_and_nothing_stays_of_an_engine_that_is_closed() -> None:
    with contextlib.closing(ProcessEngine(2)) as engine:
        copies = [engine.submit(do, [Deed("wait")]) for _ in range(3)]
        workers = started()
        for copy in copies:
            engine.cancel(copy)
        for worker in workers:
            assert gone(worker)
        assert isinstance(answer(engine, Deed("pid")), Done)
        engine.submit(do, [Deed("wait")])
        reports, workers = Path(engine._folder.name), started()
        assert workers
        assert reports.is_dir()
    assert not reports.exists()
    for worker in workers:
        poll(lambda worker=worker: gone(worker), f"{worker} has ended")


def test_what_a_task_started_ends_with_its_process() -> None:
    with contextlib.closing(ProcessEngine(1)) as engine:
        [child] = answer(engine, Deed("start another")).values
        assert not gone(psutil.Process(child))
    poll(lambda: not psutil.pid_exists(child), "the child has ended")


def test_a_process_that_does_not_begin_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with a job of megabytes."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, time\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "try:\n"
        "    first.touch(exist_ok=False)\n"
        "except FileExistsError:\n"
        "    pass\n"
        "else:\n"
        "    time.sleep(1000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(ProcessEngine(2)) as engine:
        engine.submit(do, [Deed("pid", job=b"j" * (8 << 20))])
        poll((tmp_path / "first").exists, "the first process has begun")
        end = answer(engine, Deed("pid", job=b"k" * (8 << 20)))
        assert isinstance(end, Done)


def test_an_interpreter_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with (
        pytest.raises(UsageError, match=r"sys.executable is '/nonexistent/python'; build with"),
        contextlib.closing(ProcessEngine(1)) as engine,
    ):
        engine.submit(do, [Deed("pid")])


def test_memory_is_checked_while_short_tasks_end_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If there is too little, the worker that holds most is ended."""
    monkeypatch.setattr(process_engine, "LEAST_ENDED", 0)
    with contextlib.closing(ProcessEngine(2)) as engine:
        hoarding = engine.submit(do, [Deed("hoard")])
        monkeypatch.setattr(process_engine, "LEAST_FREE", engine._available_before + (1 << 60))
        ended: dict[Hashable, Any] = {}

        def hoarding_ended() -> bool:
            engine.submit(do, [Deed("pid")])
            ended.update(engine.wait(9.0))
            return hoarding in ended

        poll(hoarding_ended, "the worker is ended")
    assert ended[hoarding] == Lost("it ran out of memory", crashed=True)


def test_a_task_that_is_late_leaves_its_place_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precache_workers.cluster.process_engine.LATE_SECONDS", 0.5)
    with contextlib.closing(ProcessEngine(1)) as engine:
        engine.submit(do, [Deed("wait")])
        assert isinstance(answer(engine, Deed("pid")), Done)
