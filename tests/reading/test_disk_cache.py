"""The disk cache: what is held stays, the limit holds, and no crash is in anybody's way."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from precache.errors import StorageError, UsageError
from precache.reading.disk_cache import OVERHEAD, CacheShare, DiskCache, on_disk, share_nbytes
from precache.storage.file_lock import LockedFile
from precache.storage.private_folder import OwnFolder
from tests.support.building import poll

SIZE = 10_000
ROOM = on_disk(SIZE)
OBJECTS = 20
"""That each loader holds at most."""


def contents(name: str) -> bytes:
    return name.encode() * (SIZE // len(name)) + b"." * (SIZE % len(name))


def writer(name: str, calls: list[str] | None = None) -> Callable[[int], None]:
    """Fetches an object: writes what its name says."""

    def fetch(descriptor: int) -> None:
        if calls is not None:
            calls.append(name)
        os.pwrite(descriptor, contents(name), 0)

    return fetch


def limit_for(objects: int, loaders: int = 1) -> int:
    return OVERHEAD + objects * ROOM + loaders * share_nbytes(OBJECTS)


def cache_for(folder: Path, objects: int, loaders: int = 1) -> DiskCache:
    return DiskCache(folder, limit_for(objects, loaders))


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "objects").iterdir())


def nbytes(folder: Path) -> int:
    """Bytes of a cache, all that is set aside for its lock and folders included, while nobody
    decides.

    A look takes its time: without the lock it may see what is gone already beside what came in its
    place, under the very inode of a third.
    """
    with LockedFile(OwnFolder(folder), "lock"):
        return _nbytes(folder)


def _nbytes(folder: Path) -> int:
    total = OVERHEAD
    for path in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # who ends, and fetches that fail, do not ask
            total += on_disk(path.stat().st_size)
    return total


# --- one loader ---------------------------------------------------------------------------------


def test_an_object_is_fetched_once(tmp_path: Path) -> None:
    cache, calls = cache_for(tmp_path, 4), list[str]()
    lease = cache.join(2 * ROOM, OBJECTS, "a-")
    assert lease.obtain("a-1", SIZE, writer("a-1", calls))
    assert not lease.obtain("a-1", SIZE, writer("a-1", calls))
    lease.release("a-1")
    lease.close()
    with_another = cache.join(2 * ROOM, OBJECTS, "a-")
    assert not with_another.obtain("a-1", SIZE, writer("a-1", calls))
    assert calls == ["a-1"]
    assert cache.path("a-1").read_bytes() == contents("a-1")
    assert list((tmp_path / "parts").iterdir()) == []


def test_an_object_of_another_size_is_not_the_object(tmp_path: Path) -> None:
    cache = cache_for(tmp_path, 4)
    lease = cache.join(2 * ROOM, OBJECTS, "a-")
    cache.path("a-1").write_bytes(b"cut short")
    assert lease.obtain("a-1", SIZE, writer("a-1"))
    assert cache.path("a-1").read_bytes() == contents("a-1")


def test_a_fetch_that_fails_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    cache = cache_for(tmp_path, 2)
    lease = cache.join(ROOM, OBJECTS, "a-")

    def fail(descriptor: int) -> None:
        os.pwrite(descriptor, b"some of it", 0)
        raise StorageError("the network is down")

    with pytest.raises(StorageError, match="the network is down"):
        lease.obtain("a-1", SIZE, fail)
    assert there(tmp_path) == list((tmp_path / "parts").iterdir()) == []
    assert lease.obtain("a-1", SIZE, writer("a-1"))


def test_what_is_held_is_not_evicted(tmp_path: Path) -> None:
    cache = cache_for(tmp_path, 3)
    lease = cache.join(2 * ROOM, OBJECTS, "a-")
    lease.obtain("a-held", SIZE, writer("a-held"))
    for number in range(8):
        lease.obtain(f"a-{number}", SIZE, writer(f"a-{number}"))
        lease.release(f"a-{number}")
        assert "a-held" in there(tmp_path)
        assert nbytes(tmp_path) <= cache.limit
    assert len(there(tmp_path)) == 3


def test_room_is_made_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a decision, where nobody else looks."""
    seen, grow = [], os.ftruncate

    def watched(descriptor: int, size: int) -> None:
        grow(descriptor, size)
        seen.append(_nbytes(tmp_path))

    cache = cache_for(tmp_path, 3)
    lease = cache.join(2 * ROOM, OBJECTS, "a-")
    monkeypatch.setattr(os, "ftruncate", watched)
    for number in range(8):
        lease.obtain(f"a-{number}", SIZE, writer(f"a-{number}"))
        lease.release(f"a-{number}")
    assert max(seen) == cache.limit


def test_what_nobody_reads_goes_first_and_then_what_was_read_last(tmp_path: Path) -> None:
    cache = cache_for(tmp_path, 4)
    lease = cache.join(ROOM, OBJECTS, "new-")
    for age, name in enumerate(["old-1", "new-1", "old-2", "new-2"]):
        lease.obtain(name, SIZE, writer(name))
        lease.release(name)
        os.utime(cache.path(name), (1e9 + age, 1e9 + age))
    left = []
    for name in ("new-3", "new-4", "new-5"):
        lease.obtain(name, SIZE, writer(name))
        lease.release(name)
        left.append(there(tmp_path))
    assert left == [
        ["new-1", "new-2", "new-3", "old-2"],
        ["new-1", "new-2", "new-3", "new-4"],
        ["new-1", "new-2", "new-3", "new-5"],
    ]


def test_a_limit_that_is_too_low_is_refused_with_one_that_would_do(tmp_path: Path) -> None:
    cache = cache_for(tmp_path, 3, 2)
    first = cache.join(2 * ROOM, OBJECTS, "a-")
    with pytest.raises(UsageError, match=rf"give at least {limit_for(4, 2)}$"):
        cache.join(2 * ROOM, OBJECTS, "a-")
    with pytest.raises(
        UsageError, match=r"cache_limit is \d+ bytes \(set by another loader; here \d+\) for"
    ):
        cache_for(tmp_path, 9).join(2 * ROOM, OBJECTS, "a-")
    DiskCache(tmp_path, cache.limit).join(ROOM, OBJECTS, "a-").close()
    first.close()
    cache.join(3 * ROOM, OBJECTS, "a-")
    with pytest.raises(UsageError, match=rf"give at least {limit_for(4)}$"):
        cache_for(tmp_path / "other", 1).join(4 * ROOM, OBJECTS, "a-")


def test_all_that_is_held_may_be_given_back_at_once(tmp_path: Path) -> None:
    lease = cache_for(tmp_path, 2).join(2 * ROOM, 2, "a-")
    for number in range(0, 6, 2):
        for name in (f"a-{number}", f"a-{number + 1}"):
            lease.obtain(name, SIZE, writer(name))
        lease.release_all()
    assert there(tmp_path) == ["a-4", "a-5"]


def test_many_small_objects_are_held_within_the_limit(tmp_path: Path) -> None:
    limit = OVERHEAD + 400 * on_disk(1) + share_nbytes(400)
    lease = DiskCache(tmp_path, limit).join(400 * on_disk(1), 400, "a-")
    for number in range(400):
        lease.obtain(f"a-{number}", 1, lambda descriptor: None)
        if number % 50 == 49:
            assert _disk_usage(tmp_path) <= limit
    assert len(there(tmp_path)) == 400
    for number in range(400):
        lease.release(f"a-{number}")
        lease.obtain(f"b-{number}", 1, lambda descriptor: None)
    assert there(tmp_path) == sorted(f"b-{number}" for number in range(400))


def _disk_usage(folder: Path) -> int:
    return sum(512 * path.lstat().st_blocks for path in (folder, *folder.rglob("*")))


def test_files_are_looked_at_only_where_the_limit_would_be_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = DiskCache._files

    def counted(self: DiskCache) -> Any:
        nonlocal looks
        looks += 1
        return look(self)

    monkeypatch.setattr(DiskCache, "_files", counted)
    limit = OVERHEAD + 300 * on_disk(1) + share_nbytes(2)
    lease = DiskCache(tmp_path, limit).join(2 * on_disk(1), 2, "a-")
    seen = []
    for number in range(400):
        lease.obtain(f"a-{number}", 1, lambda descriptor: None)
        lease.release(f"a-{number}")
        seen.append(looks)
    assert seen[299] == 1  # as the loader joined
    assert 10 < seen[399] <= 1 + 100 // 3  # three go at a time, a hundredth
    assert 297 <= len(there(tmp_path)) <= 300


@pytest.mark.parametrize("text", ["", "nonsense", "9" * 20 + "\n", "1"])
def test_whatever_the_lock_says_more_than_there_is_or_nothing_keeps_nobody_out(
    text: str, tmp_path: Path
) -> None:
    cache = cache_for(tmp_path, 3)
    lease = cache.join(3 * ROOM, OBJECTS, "a-")
    for number in range(6):
        (tmp_path / "lock").write_text(text)
        lease.obtain(f"a-{number}", SIZE, writer(f"a-{number}"))
        assert nbytes(tmp_path) <= cache.limit
        if number != 4:
            lease.release(f"a-{number}")
    assert "a-4" in there(tmp_path)
    assert len(there(tmp_path)) == 3


def test_a_lower_limit_shrinks_the_cache(tmp_path: Path) -> None:
    lease = cache_for(tmp_path, 6).join(ROOM, OBJECTS, "a-")
    for number in range(6):
        lease.obtain(f"a-{number}", SIZE, writer(f"a-{number}"))
        lease.release(f"a-{number}")
    lower = cache_for(tmp_path, 2, 2)
    other = lower.join(ROOM, OBJECTS, "a-")
    assert len(there(tmp_path)) == 2
    lease.obtain("a-9", SIZE, writer("a-9"))
    assert nbytes(tmp_path) <= lower.limit
    other.close()


@pytest.mark.parametrize(
    ("given", "limit"), [("200GB", 200 * 10**9), ("1.5 KiB", 1536), ("12", 12), (10**12, 10**12)]
)
def test_limits_are_said_as_people_say_them(given: int | str, limit: int, tmp_path: Path) -> None:
    assert DiskCache.at(tmp_path, given).limit == limit


@pytest.mark.parametrize("given", ["20 elephants", "", -5, "GB"])
def test_what_is_no_limit_is_named(given: int | str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cache_limit is .*; give bytes, or a size such as '200GB'"
    ):
        DiskCache.at(tmp_path, given)


def test_by_default_a_cache_leaves_some_of_the_disk(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    free = stat.f_bavail * stat.f_frsize
    assert 0 < DiskCache.at(tmp_path).limit <= free


def test_a_cache_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot make the cache .*file/cache: Not a directory"):
        DiskCache(tmp_path / "file" / "cache", 10**9)


def test_a_full_disk_is_in_nobodys_way_once_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = cache_for(tmp_path, 4, 2)
    lease = cache.join(ROOM, OBJECTS, "a-")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="the disk is full") as kept:
        cache.join(2 * ROOM, OBJECTS, "a-")
    assert len(list((tmp_path / "users").iterdir())) == 1
    assert lease.obtain("a-1", SIZE, writer("a-1"))
    monkeypatch.undo()
    lease.release("a-1")
    cache.join(3 * ROOM, OBJECTS, "a-")
    del kept


def test_objects_may_go_while_the_default_limit_is_reckoned(
    tmp_path: Path,
) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "gone").symlink_to(tmp_path / "nowhere")
    assert DiskCache.at(tmp_path).limit > 0


def test_a_lease_that_is_forgotten_ends(tmp_path: Path) -> None:
    cache = cache_for(tmp_path, 2)
    lease = cache.join(2 * ROOM, OBJECTS, "a-")
    assert lease.usable
    del lease
    cache.join(2 * ROOM, OBJECTS, "a-")


# --- several ------------------------------------------------------------------------------------


def test_many_that_want_an_object_fetch_it_once(tmp_path: Path) -> None:
    cache, calls = cache_for(tmp_path, 8, 8), list[str]()
    leases = [cache.join(ROOM, OBJECTS, "a-") for _ in range(8)]
    start = threading.Barrier(8)

    def slow(descriptor: int) -> None:
        writer("a-1", calls)(descriptor)
        time.sleep(0.05)  # long enough for the others to come by

    def want(lease: CacheShare) -> None:
        start.wait()
        lease.obtain("a-1", SIZE, slow)
        assert cache.path("a-1").read_bytes() == contents("a-1")

    threads = [threading.Thread(target=want, args=[lease]) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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

    cache_for(folder, 2).join(2 * ROOM, OBJECTS, "a-").obtain("a-1", SIZE, fetch)


def test_what_a_killed_process_was_fetching_is_fetched_by_another(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    begun = spawn.Event()
    process = spawn.Process(target=_hang_while_fetching, args=[tmp_path, begun])
    processes.append(process)
    process.start()
    assert begun.wait(60)
    cache = cache_for(tmp_path, 2)
    with pytest.raises(UsageError, match="and another loader holds up to"):
        cache.join(ROOM, OBJECTS, "a-")
    assert nbytes(tmp_path) <= cache.limit
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    lease = cache.join(2 * ROOM, OBJECTS, "a-")
    assert lease.obtain("a-1", SIZE, writer("a-1"))
    assert cache.path("a-1").read_bytes() == contents("a-1")
    assert len(list((tmp_path / "users").iterdir())) == 1


_FORK = """
import os, sys, time
from pathlib import Path
from precache.reading.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), int(sys.argv[2]))
lease = cache.join(int(sys.argv[3]), 2, "a-")
if not os.fork():
    assert not lease.usable
    print(os.getpid(), flush=True)
time.sleep(1000)
"""


def test_a_forked_child_keeps_nothing_locked(tmp_path: Path) -> None:
    cache = cache_for(tmp_path, 2)
    command = [sys.executable, "-c", _FORK, str(tmp_path), str(cache.limit), str(2 * ROOM)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        with pytest.raises(UsageError):
            cache.join(ROOM, OBJECTS, "a-")
        process.kill()
        process.wait()
        try:
            cache.join(2 * ROOM, OBJECTS, "a-")
        finally:
            os.kill(child, signal.SIGKILL)


def _work(folder: Path, limit: int, seed: int, rounds: int) -> None:
    """Hold, check and give back random objects, several threads at a time."""
    lease = DiskCache(folder, limit).join(3 * ROOM, OBJECTS, "a-")

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(rounds):
            name = f"a-{seed % 3}-{order.randrange(8)}"  # names of a thread are its own
            lease.obtain(name, SIZE, writer(name))
            assert (folder / "objects" / name).read_bytes() == contents(name)
            lease.release(name)

    threads = [threading.Thread(target=work, args=[3 * seed + n]) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.heavy
def test_the_limit_holds_at_every_moment_whoever_is_killed(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    limit = limit_for(12, 4)  # of 36 objects
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
    last = DiskCache(tmp_path, limit).join(12 * ROOM, OBJECTS, "a-")
    assert len(list((tmp_path / "users").iterdir())) == 1
    for number in range(12):
        last.obtain(f"a-new-{number}", SIZE, writer(f"a-new-{number}"))
    assert poll(lambda: list((tmp_path / "parts").iterdir()) == [], "parts are removed")
