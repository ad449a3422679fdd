"""The disk cache: what is held stays, the limit holds, and no crash is in anybody's way."""

import contextlib
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import StorageError, UsageError
from precache.reading import disk_cache
from precache.reading.disk_cache import KEPT_SECONDS, OVERHEAD, DiskCache, on_disk
from precache.storage.file_lock import LockedFile
from tests.support.building import poll

SIZE = 10_000
ROOM = on_disk(SIZE)


def contents(name: str) -> bytes:
    return name.encode() * (SIZE // len(name)) + b"." * (SIZE % len(name))


def writer(name: str, calls: list[str] | None = None) -> Callable[[int], None]:
    """Fetches an object: writes what its name says."""

    def fetch(descriptor: int) -> None:
        if calls is not None:
            calls.append(name)
        os.pwrite(descriptor, contents(name), 0)

    return fetch


def limit_for(objects: int) -> int:
    return OVERHEAD + objects * ROOM


class Reader:
    """Reads objects of a cache, as a loader does."""

    def __init__(self, folder: Path, limit: int, version: str = "a") -> None:
        self.cache = DiskCache(folder, limit)
        self.end = weakref.finalize(self, self.cache.join(version).close)

    def obtain(self, name: str, fetch: Any = None, **options: Any) -> bool | None:
        return self.cache.obtain(name, SIZE, fetch or writer(name), **options)

    def read(self, *names: str) -> None:
        """Obtain each object, and release it."""
        for name in names:
            self.obtain(name)
            self.cache.release(name)


def reader(folder: Path, objects: int) -> Reader:
    return Reader(folder, limit_for(objects))


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "objects").iterdir())


def nbytes(folder: Path, *, locked: bool = True) -> int:
    """Bytes of a cache, all that is set aside for its lock and folders included, while nobody
    decides.

    A look takes its time: without the lock it may see what is gone already beside what came in its
    place, under the very inode of a third.
    """
    total = OVERHEAD
    with LockedFile(folder / "lock") if locked else contextlib.nullcontext():
        for path in folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # fetches that fail do not ask
                total += on_disk(path.stat().st_size)
    return total


# --- one loader ---------------------------------------------------------------------------------


def test_an_object_is_fetched_once(tmp_path: Path) -> None:
    one, calls = reader(tmp_path, 4), list[str]()
    assert one.obtain("a-1", writer("a-1", calls))
    assert one.obtain("a-1", writer("a-1", calls)) is False
    one.end()
    assert reader(tmp_path, 4).obtain("a-1", writer("a-1", calls)) is False
    assert calls == ["a-1"]
    assert list((tmp_path / "parts").iterdir()) == []
    one.cache.path("a-1").write_bytes(b"cut short")
    assert reader(tmp_path, 4).obtain("a-1")
    assert one.cache.path("a-1").read_bytes() == contents("a-1")


def test_a_fetch_that_fails_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    one = reader(tmp_path, 1)

    def fail(descriptor: int) -> None:
        os.pwrite(descriptor, b"some of it", 0)
        raise StorageError("the network is down")

    with pytest.raises(StorageError, match="the network is down"):
        one.obtain("a-1", fail)
    assert [path.name for path in tmp_path.glob("*/*")] == ["a"]  # of the version
    assert one.obtain("a-2", at_once=False)


@settings(max_examples=40)
@given(data=st.data())
def test_any_history_keeps_what_is_about_to_be_read_and_the_limit(data: st.DataObject) -> None:
    """Of loaders of two versions that come, read and leave, whatever the lock's file says."""
    with tempfile.TemporaryDirectory() as name:
        folder, readers, held, room = Path(name), list[tuple[str, Reader]](), set[str](), 3
        steps = st.sampled_from(["come", "leave", "ahead", "ahead", "at once", "release", "spoil"])
        for step in data.draw(st.lists(steps, min_size=5, max_size=30)):
            if step == "come" or not readers:
                version = data.draw(st.sampled_from("ab"))
                readers.append((version, Reader(folder, limit_for(room), version)))
            elif step == "leave":
                version, one = readers.pop(data.draw(st.integers(0, len(readers) - 1)))
                one.end()
                if all(other != version for other, _ in readers):
                    held = {name for name in held if name[0] != version}
            elif step == "spoil":
                texts = ["", "nonsense", "9" * 20 + "\n", "1"]
                (folder / "lock").write_text(data.draw(st.sampled_from(texts)))
            elif step == "release" and held:
                held.discard(released := data.draw(st.sampled_from(sorted(held))))
                readers[0][1].cache.release(released)
            elif step in ("ahead", "at once"):
                version, one = data.draw(st.sampled_from(readers))
                wanted, calls = f"{version}-{data.draw(st.integers(0, 4))}", list[str]()
                cached, full = wanted in there(folder), len(held) >= room
                found = one.obtain(wanted, writer(wanted, calls), at_once=step == "at once")
                assert found is (False if cached else None if full and step == "ahead" else True)
                assert calls == [wanted] * (found is True)
                if found is not None:
                    held.add(wanted)
                    assert one.cache.path(wanted).read_bytes() == contents(wanted)
                    assert not found or nbytes(folder) <= limit_for(max(room, len(held)))
            assert held <= set(there(folder))


def test_no_room_refuses_what_is_fetched_ahead_and_not_what_is_needed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, calls = reader(tmp_path, 2), list[str]()
    one.obtain("a-1")
    one.obtain("a-2")
    assert one.obtain("a-3", writer("a-3", calls), at_once=False) is None
    assert (calls, there(tmp_path), caplog.messages) == ([], ["a-1", "a-2"], [])
    for name in ("a-3", "a-4"):
        assert one.obtain(name, at_once=True)
    [message] = caplog.messages
    limit = one.cache.limit
    assert message.startswith(f"{tmp_path} exceeds its limit of {limit} bytes by {ROOM}, as")
    assert "raise it, or read less at once, by shuffle='block' or a smaller" in message
    for name in ("a-2", "a-3", "a-4"):
        one.cache.release(name)
    assert one.obtain("a-5", at_once=False)
    assert there(tmp_path) == ["a-1", "a-5"]


def test_room_is_made_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a decision, where nobody else looks."""
    seen, grow = [], os.ftruncate
    reader(tmp_path, 6).read(*(f"a-{number}" for number in range(6)))

    def watched(descriptor: int, size: int) -> None:
        grow(descriptor, size)
        seen.append(nbytes(tmp_path, locked=False))

    one = reader(tmp_path, 3)
    assert len(there(tmp_path)) == 3, "a lower limit shrinks it"
    monkeypatch.setattr(os, "ftruncate", watched)
    one.read(*(f"a-{number}" for number in range(8)))
    assert max(seen) == one.cache.limit


def test_what_no_loader_reads_again_goes_first_and_then_what_was_read_last(tmp_path: Path) -> None:
    one, _between_epochs = reader(tmp_path, 4), Reader(tmp_path, limit_for(4), "new")
    for age, name in enumerate(["old-1", "new-1", "old-2", "new-2"]):
        one.read(name)
        os.utime(one.cache.path(name), (1e9 + age, 1e9 + age))
    left = []
    for name in ("new-3", "new-4", "new-5"):
        one.read(name)
        left.append(there(tmp_path))
    assert left == [
        ["new-1", "new-2", "new-3", "old-2"],
        ["new-1", "new-2", "new-3", "new-4"],
        ["new-1", "new-2", "new-3", "new-5"],
    ]


def test_maps_of_what_is_evicted_stay(tmp_path: Path) -> None:
    one, maps = reader(tmp_path, 2), list[mmap.mmap]()

    def use(descriptor: int) -> bool:
        maps.append(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        return True

    for _ in range(2):
        one.cache.obtain("a-1", SIZE, writer("a-1"), use)
    one.cache.release("a-1")
    for name in ("a-2", "a-3"):
        one.obtain(name)
    assert there(tmp_path) == ["a-2", "a-3"]
    assert [bytes(mapped) for mapped in maps] == [contents("a-1")] * 2


def test_nothing_is_kept_for_more_than_an_hour_by_whatever_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a loader that stands still, or after a clock was set back."""
    now = time.time_ns()
    for ahead in (0, 86_400):
        one = reader(tmp_path, 2)
        with monkeypatch.context() as other_time:
            other_time.setattr(time, "time_ns", lambda ahead=ahead: now + ahead * 10**9)
            one.read(f"a-{ahead}", f"a-{ahead + 1}")
            for name in there(tmp_path):
                one.obtain(name)
            assert one.obtain("a-new", at_once=False) is None
        if not ahead:
            monkeypatch.setattr(time, "time_ns", lambda: now + (KEPT_SECONDS + 60) * 10**9)
        assert one.obtain("a-new", at_once=False)
        assert len(there(tmp_path)) <= 2
        monkeypatch.undo()
        one.end()
        one.cache.path("a-new").unlink()


def test_many_small_objects_are_used_within_the_limit_with_few_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are looked at only where the limit would be passed."""
    looks, look = [0], disk_cache._files

    def counted(folder: Path) -> Any:
        looks[0] += folder.name == "objects"
        return look(folder)

    monkeypatch.setattr(disk_cache, "_files", counted)
    limit = OVERHEAD + 300 * on_disk(1)
    one, seen = Reader(tmp_path, limit), list[int]()
    looks[0] = 1  # as the loader comes

    def obtain(name: str) -> None:
        assert one.cache.obtain(name, 1, lambda descriptor: None, at_once=False)

    for number in range(400):
        obtain(f"a-{number}")
        if number % 50 == 49:
            files = (tmp_path, *tmp_path.rglob("*"))
            assert sum(512 * path.lstat().st_blocks for path in files) <= limit
        if number == 299:
            assert len(there(tmp_path)) == 300
            for released in range(300):
                one.cache.release(f"a-{released}")
        seen.append(looks[0])
    assert seen[299] == 1
    assert 10 < seen[399] <= 1 + 100 // 3  # three go at a time, a hundredth
    assert 297 <= len(there(tmp_path)) <= 300
    assert {f"a-{number}" for number in range(300, 400)} <= {*there(tmp_path)}


def test_limits_are_given_as_people_say_them_and_by_default_leave_some_of_the_disk(
    tmp_path: Path,
) -> None:
    for text, limit in (("200GB", 200 * 10**9), ("1.5 KiB", 1536), ("12", 12), (10**12, 10**12)):
        assert DiskCache(tmp_path, text).limit == limit
    said = r"the limit of a cache is .*; give bytes, or a size such as '200GB'"
    for wrong in ("20 elephants", "", -5, "GB", True, False, 1.5):
        with pytest.raises(UsageError, match=said):
            DiskCache(tmp_path, wrong)
    (tmp_path / "objects" / "gone").symlink_to(tmp_path / "nowhere")  # gone while it is reckoned
    stat = os.statvfs(tmp_path)
    assert 0 < DiskCache(tmp_path).limit <= stat.f_bavail * stat.f_frsize
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot make the cache .*file/cache: Not a directory"):
        DiskCache(tmp_path / "file" / "cache", 10**9)


# --- several ------------------------------------------------------------------------------------


def test_many_that_want_an_object_fetch_it_once(tmp_path: Path) -> None:
    readers, calls = [reader(tmp_path, 8) for _ in range(8)], list[str]()
    start = threading.Barrier(8)

    def slow(descriptor: int) -> None:
        writer("a-1", calls)(descriptor)
        time.sleep(0.05)  # long enough for the others to come by

    def want(one: Reader) -> None:
        start.wait()
        one.obtain("a-1", slow)
        assert one.cache.path("a-1").read_bytes() == contents("a-1")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(want, readers))
    assert calls == ["a-1"]


spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def processes() -> Iterator[list[BaseProcess]]:
    """Processes to be ended with the test."""
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def _hang_while_fetching(folder: Path, begun: Any) -> None:
    def fetch(descriptor: int) -> None:
        os.pwrite(descriptor, b"some of it", 0)
        begun.set()
        time.sleep(1000)

    reader(folder, 2).obtain("a-1", fetch)


def test_what_a_killed_process_was_fetching_is_fetched_by_another(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    begun = spawn.Event()
    process = spawn.Process(target=_hang_while_fetching, args=[tmp_path, begun])
    processes.append(process)
    process.start()
    assert begun.wait(60)
    one = reader(tmp_path, 1)
    assert one.obtain("a-2", at_once=False) is None
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert one.obtain("a-2", at_once=False), "what it had begun makes room"
    one.cache.release("a-2")
    assert one.obtain("a-1", at_once=False)
    assert one.cache.path("a-1").read_bytes() == contents("a-1")


_FORK = """
import os, sys, time
from pathlib import Path
from precache.reading.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), int(sys.argv[2]))
joined = cache.join("a")
cache.obtain("a-1", 1, lambda descriptor: None)
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(1000)
"""


def test_a_forked_child_keeps_nothing_locked(tmp_path: Path) -> None:
    one = Reader(tmp_path, limit_for(1), "b")
    command = [sys.executable, "-c", _FORK, str(tmp_path), str(one.cache.limit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert one.obtain("b-1", at_once=False) is None
            process.kill()
            process.wait()
            assert one.obtain("b-1", at_once=False)
        finally:
            os.kill(child, signal.SIGKILL)


def _work(folder: Path, limit: int, seed: int, rounds: int) -> None:
    """Use, check and give back random objects, several threads at a time."""
    one = Reader(folder, limit)

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(rounds):
            name = f"a-{seed % 3}-{order.randrange(8)}"  # names of a thread are its own
            if one.obtain(name, at_once=False) is not None:
                assert (folder / "objects" / name).read_bytes() == contents(name)
                one.cache.release(name)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3 * seed, 3 * seed + 3)))


@pytest.mark.heavy
def test_the_limit_holds_at_every_moment_whoever_is_killed(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    limit = limit_for(12)  # of 36 objects
    for seed in range(4):
        rounds = 10**6 if seed == 0 else 60
        processes.append(spawn.Process(target=_work, args=[tmp_path, limit, seed, rounds]))
        processes[-1].start()
    most, killed = 0, False
    while any(process.is_alive() for process in processes[1:]):
        most = max(most, nbytes(tmp_path))
        if not killed and most > limit // 2:
            os.kill(processes[0].pid or 0, signal.SIGKILL)
            killed = True
    assert killed
    assert [process.exitcode for process in processes[1:]] == [0, 0, 0]
    assert limit // 2 < most <= limit
    last = Reader(tmp_path, limit)
    for number in range(12):
        assert last.obtain(f"a-new-{number}", at_once=False)
    assert poll(lambda: list((tmp_path / "parts").iterdir()) == [], "parts are removed")
