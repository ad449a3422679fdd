"""Locks between processes: nothing stays locked, whatever breaks in."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from precache.storage.file_lock import LockedFile, remove_if_free

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_one_at_a_time(tmp_path: Path) -> None:
    inside = list[int]()

    def work(number: int) -> None:
        for _ in range(50):
            with LockedFile(tmp_path / "lock"):
                inside.append(number)
                assert inside == [number]
                inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_only_what_nobody_has_locked_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert remove_if_free(tmp_path / "lock")
    with LockedFile(tmp_path / "lock") as file:
        assert not remove_if_free(tmp_path / "lock")
        assert file.is_there
        path.unlink()
        assert not file.is_there
        path.touch()
        assert not file.is_there
    assert remove_if_free(tmp_path / "lock")
    assert not path.exists()


def test_what_came_in_the_place_of_a_free_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner removes it and another one comes, between the look at it and its lock."""
    path, lock = tmp_path / "lock", fcntl.flock
    path.touch()

    def overtaken(file: Any, how: int) -> None:
        path.unlink()
        path.write_bytes(b"another's")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    assert remove_if_free(tmp_path / "lock")
    assert path.read_bytes() == b"another's"


_INTERRUPT = """
import contextlib, random, signal, sys
from pathlib import Path
from precache.reading.disk_cache import OVERHEAD, DiskCache
from precache.storage.file_lock import LockedFile, remove_if_free

def interrupt(*arguments):
    if armed:
        raise KeyboardInterrupt

folder, dice, kept = Path(sys.argv[1]), random.Random(3), None
cache = DiskCache(folder / "cache", OVERHEAD + 10**6)
signal.signal(signal.SIGALRM, interrupt)

def alone():
    with LockedFile(folder / "alone"):
        pass

def use():
    with contextlib.closing(cache.join("a")):
        pass

for work, times in ((alone, 300), (use, 150)):
    for _ in range(times):
        armed = True
        try:
            # Again after a while: some callbacks of Python's swallow what breaks into them.
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 4e-4), 0.1)
            while True:
                work()
        except KeyboardInterrupt as error:
            armed = False  # a signal may still come during the call below
            signal.setitimer(signal.ITIMER_REAL, 0)
            kept = error  # with its traceback, as a notebook does
        assert remove_if_free(folder / "alone")
        assert remove_if_free(cache.folder / "lock")
        kept = None  # a file that was not closed yet goes with it
        assert remove_if_free(cache.versions / "a")
"""


@pytest.mark.heavy
def test_an_interrupt_leaves_nothing_locked(run_python: Run, tmp_path: Path) -> None:
    run_python(_INTERRUPT, tmp_path)


def test_a_forked_child_has_none_of_them(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with LockedFile(tmp_path / "lock") as file:
        child = os.fork()
        if not child:
            os.write(writer, b"closed" if file.closed else b"locked")
            signal.pause()
            os._exit(0)
        assert os.read(reader, 6) == b"closed"
    try:
        assert remove_if_free(tmp_path / "lock")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
