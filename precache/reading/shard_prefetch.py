"""Prefetch the shards of coming batches from a bucket into the disk cache.

Shards are fetched in the order in which batches need them, while there is room. The first batch
that is not read yet waits for no room: its shards are fetched even beyond the limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from precache.errors import DamageError, StorageError, StoreError
from precache.reading.disk_cache import DiskCache, on_disk
from precache.reading.shard_files import MappedShardFiles
from precache.recipe.variants import variants_of
from precache.runtime.step_clock import FetchedObjects
from precache.runtime.threads import Threads, fail
from precache.storage.local_files import will_need
from precache.store.tree import CHECKSUM
from precache.store.version import Version

log = logging.getLogger(__name__)

CONCURRENT_FETCHES = 4
"""Shards fetched at a time."""

REQUEST_NBYTES = 32 << 20
"""Bytes of one request: if a shard's fetch breaks off, only this much is fetched again."""

LOOKAHEAD_ROWS, LOOKAHEAD_SHARDS, LOOKAHEAD_SHARE = 1 << 20, 1024, 0.5
"""Rows looked ahead for shards, shards taken ahead, and their share of the cache limit, at most, so
that two loaders fit into a cache."""

FETCH_TRIES = 3
"""Times that a shard is fetched if its bytes arrive damaged."""

READ_AHEAD_NBYTES = 2 << 20
"""Bytes of one request to read ahead."""

STALL_SECONDS = 60.0
"""Seconds without progress after which the log names the shard that a batch waits for."""


@dataclass(eq=False)
class _Shard:
    """A shard that coming batches read.

    Attributes
    ----------
    batches
        Those that still read it.
    fetched
        Its fetch, once there is one, until there is no room for it.
    """

    batches: int = 0
    fetched: Future[bool] | None = None


class _CachedShardFiles(MappedShardFiles):
    """Objects in a disk cache, mapped as they arrive, or once they are verified.

    Each is checked once: when it is fetched, or else when it is first used here.

    Attributes
    ----------
    sound
        Number of an object -> device and inode of the file that holds it as it was written.
    """

    def __init__(self, version: Version, name: str, cache: DiskCache) -> None:
        super().__init__(version, name)
        self.cache = cache
        self.sound: dict[int, tuple[int, int]] = {}
        self._readers: dict[int, set[int]] = {}

    def path(self, number: int) -> Path:
        return self.cache.path(self.cached_name(number))

    def descriptor(self, number: int) -> int:
        raise DamageError("its copy is closed")  # and `renew` maps it again

    def begin(self, number: int, reader: int) -> None:
        """Leave an object open, once it is, until this reader ends."""
        self._readers.setdefault(number, set()).add(reader)

    def end(self, number: int, reader: int) -> None:
        """Close an object after its last reader, and let it be evicted."""
        # No lock: the garbage collector may end an iterator anywhere.
        readers = self._readers.setdefault(number, set())
        readers.discard(reader)
        if not readers:
            self.forget(number)
            self.cache.release(self.cached_name(number))

    def use(self, number: int, descriptor: int) -> bool:
        """Map a file of the right size, unless it does not hold the object as it was written."""
        if self.sound.get(number) != _identity(descriptor):
            try:
                if _xxh3(descriptor) != self.expected[number].xxh3:
                    return False
            except OSError:  # the disk has lost some of it
                return False
            self.sound[number] = _identity(descriptor)
        data: Any = self.map(number, self.array.rows_of(number)[0], descriptor).obj
        # All of its rows are needed soon.
        starts = range(0, len(data), READ_AHEAD_NBYTES)
        will_need(data, ((start, min(READ_AHEAD_NBYTES, len(data) - start)) for start in starts))
        return True

    def cached_name(self, number: int) -> str:
        """Name of an object in the cache, by version and contents: a repaired shard has another."""
        return f"{self.version.id}-{self.field}-{number}-{self.expected[number].xxh3:032x}"


class CachedShards:
    """The shards of a version's large fields, read through a disk cache.

    Parameters
    ----------
    arrays
        All arrays that prefetchers may read; each reads one variant of a field.

    Attributes
    ----------
    fetched
        What was fetched since this was made.

    Raises
    ------
    StoreError
        Other software wrote the version, so that there are no checksums of its shards.
    """

    def __init__(self, version: Version, cache: DiskCache, arrays: Iterable[str]) -> None:
        if version.foreign:
            raise StoreError(
                f"{version.path} was written by other software and has no checksums, which a cache "
                "needs; leave cache out, or copy it to a local disk"
            )
        self.cache, self.version = cache, version
        self.arrays = {array: _CachedShardFiles(version, array, cache) for array in arrays}
        self._fields = list(variants_of(self.arrays).values())
        self._leave: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self.fetched = FetchedObjects()

    def nbytes(self, number: int) -> int:
        """Bytes that a shard takes in the cache: all fields, the largest variant of each."""
        return sum(
            max(on_disk(self.arrays[array].expected[number].size) for array in variants)
            for variants in self._fields
        )

    def window(self, widest: int) -> int:
        """Shards to mix at a time: up to `widest`, so that two loaders fit the cache limit."""
        count = -(-self.version.rows // self.version.attributes.rows_per_shard)
        sizes = sorted(map(self.nbytes, range(count)), reverse=True)
        room = self.cache.room // 2
        return max((n for n in range(1, widest + 1) if sum(sizes[: 2 * n]) <= room), default=1)

    def join(self) -> None:
        """Join the cache: between epochs as well, what this loader reads again is evicted last."""
        self._leave = weakref.finalize(self, self.cache.join(self.version.id).close)

    def count(self, nbytes: int) -> None:
        """Count an object that was fetched."""
        with self._lock:
            before = self.fetched
            self.fetched = FetchedObjects(before.objects + 1, before.nbytes + nbytes)

    def close(self) -> None:
        """Leave the cache."""
        self._leave()


class ShardPrefetcher:
    """Fetches the shards of coming batches, and holds them until the batches are read.

    Parameters
    ----------
    arrays
        Names of the arrays whose objects make up a shard; others are left out.
    """

    def __init__(self, shards: CachedShards, arrays: Iterable[str]) -> None:
        self._arrays = [shards.arrays[array] for array in arrays if array in shards.arrays]
        self._shards, self._rows = shards, shards.version.attributes.rows_per_shard
        self._room = int(LOOKAHEAD_SHARE * shards.cache.room)
        self._open: dict[int, _Shard] = {}
        self._nbytes = 0  # of shards that were asked for
        self._queued: deque[int] = deque()  # shards to be fetched, in order
        self._unread: dict[int, Future[None]] = {}  # by identity of a batch's rows, in order
        self._lock = threading.Lock()
        self._progress = time.monotonic()
        self._stopped = False
        self._pool = Threads(CONCURRENT_FETCHES, "precache-fetch")

    def around(self, batches: Iterable[np.ndarray]) -> Generator[np.ndarray, None, None]:
        """Yield the batches, whose shards are fetched from some time before on.

        For each, `wait` is called before it is read, and `release` once after.
        """
        waiting: deque[np.ndarray] = deque()
        rows_waiting = 0
        for rows in batches:
            while waiting and (self._queued or rows_waiting > LOOKAHEAD_ROWS):
                rows_waiting -= len(waiting[0])
                yield waiting.popleft()
            waiting.append(rows)
            rows_waiting += len(rows)
            with self._lock:
                self._unread[id(rows)] = Future()
                for number in self._numbers(rows):
                    if number not in self._open:
                        self._open[number] = _Shard()
                        self._queued.append(number)
                        for objects in self._arrays:
                            objects.begin(number, id(self))
                    self._open[number].batches += 1
                self._advance()
        while waiting:
            yield waiting.popleft()

    def _numbers(self, rows: np.ndarray) -> list[int]:
        numbers: list[int] = np.unique(rows // self._rows).tolist()
        return numbers

    def _advance(self) -> None:
        """Ask for queued shards while there is room."""
        while self._queued and not self._stopped:
            shard = self._open.get(self._queued[0])
            if shard and shard.fetched is None:
                more = self._nbytes + self._shards.nbytes(self._queued[0])
                if more > self._room or len(self._open) - len(self._queued) >= LOOKAHEAD_SHARDS:
                    return
                self._ask(self._queued[0])
            self._queued.popleft()

    def _ask(self, number: int, *, at_once: bool = False) -> Future[bool]:
        """Return the fetch of an open shard; begin one if there is none."""
        shard = self._open[number]
        if shard.fetched is None:
            self._nbytes += self._shards.nbytes(number)
            shard.fetched = self._pool.submit(self._obtain, shard, number, at_once)
        return shard.fetched

    def wait(self, rows: np.ndarray) -> None:
        """Wait for the shards of a batch; where they have no room, until it is the first unread."""
        numbers = self._numbers(rows)
        with self._lock:
            for number in numbers:
                self._ask(number, at_once=id(rows) == next(iter(self._unread)))
        for number in numbers:
            self._await(number, rows)

    def release(self, rows: np.ndarray) -> None:
        """Record that a batch was read, or failed; close shards after their last batch."""
        with self._lock:
            with contextlib.suppress(InvalidStateError):  # as `stop` released who waits for it
                self._unread.pop(id(rows)).set_result(None)
            for number in self._numbers(rows):
                shard = self._open[number]
                shard.batches -= 1
                if not shard.batches:
                    if shard.fetched is not None:
                        self._nbytes -= self._shards.nbytes(number)
                    self._close(number)
            self._advance()
            self._progress = time.monotonic()

    def _await(self, number: int, rows: np.ndarray) -> None:
        """Wait until a shard that a batch reads is in the cache."""
        there = False
        while not there:
            with self._lock:
                first, read = next(iter(self._unread.items()))
                fetched = self._ask(number, at_once=first == id(rows))
            while not (self._stopped or wait([fetched], STALL_SECONDS).done):
                self._report(number)
            if self._stopped:  # checked after the wait, which `stop` may have ended
                raise StorageError("stopped")
            there = fetched.result()
            if not there and first != id(rows):
                read.result()  # waits for room

    def _report(self, number: int) -> None:
        """Log what a batch waits for, unless there was progress, or a report, a short time ago."""
        with self._lock:
            if time.monotonic() - self._progress < STALL_SECONDS:
                return
            self._progress = time.monotonic()
        names = ", ".join(objects.name(number) for objects in self._arrays)
        log.warning(
            "%s: nothing was read for %.0f s, as shard %d (%s) is being fetched",
            self._shards.version.path,
            STALL_SECONDS,
            number,
            names,
        )

    def _close(self, number: int) -> None:
        self._open.pop(number, None)
        for objects in self._arrays:
            objects.end(number, id(self))

    def _obtain(self, shard: _Shard, number: int, at_once: bool) -> bool:
        """Fetch a shard into the cache unless it is there; return False if there is no room.

        Runs on a fetch thread.
        """
        is_there = True
        for objects in self._arrays:
            name, size = objects.cached_name(number), objects.expected[number].size
            fetch, use = partial(self._fetch, objects, number), partial(self._use, objects, number)
            fetched = self._shards.cache.obtain(name, size, fetch, use, at_once=at_once)
            if fetched:
                self._shards.count(size)
            if fetched is None:
                is_there = False
                with self._lock:  # after `_ask` has kept this fetch, which would be asked for ever
                    if shard.batches:
                        shard.fetched = None
                        self._nbytes -= self._shards.nbytes(number)
                break
        if number not in self._open:  # the batches that needed it failed meanwhile
            self._close(number)
        if is_there:
            self._progress = time.monotonic()
        return is_there

    def _use(self, objects: _CachedShardFiles, number: int, descriptor: int) -> bool:
        if not objects.use(number, descriptor):
            log.warning("%s is damaged; it is fetched again", objects.path(number))
            return False
        return True

    def renew(self, rows: np.ndarray) -> None:
        """Check the cached shards of a batch being read, and fetch damaged ones again."""
        for number in self._numbers(rows):
            with self._lock:
                shard = self._open[number]
                if shard.fetched is None or shard.fetched.done():
                    for objects in self._arrays:
                        objects.sound.pop(number, None)
                        objects.checked[number] = False
                    shard.fetched = self._pool.submit(self._obtain, shard, number, True)
            self._await(number, rows)

    def _fetch(self, objects: _CachedShardFiles, number: int, target: int) -> None:
        """Fetch an object, write it to a descriptor and check it."""
        for _ in range(FETCH_TRIES):
            digest = xxhash.xxh3_128()
            for start in range(0, objects.expected[number].size, REQUEST_NBYTES):
                data = self._piece(objects, number, start)
                digest.update(data)
                _write(target, data, start)
            if digest.intdigest() == objects.expected[number].xxh3:
                objects.sound[number] = _identity(target)
                return
        raise objects.damage(number, number * self._rows, CHECKSUM)

    def _piece(self, objects: _CachedShardFiles, number: int, start: int) -> bytes:
        if self._stopped:
            raise StorageError("stopped")  # nothing waits for it any more
        name, size = objects.name(number), objects.expected[number].size
        length = min(REQUEST_NBYTES, size - start)
        [data] = objects.version.folder.read_ranges([(name, start, length)])
        if isinstance(data, StorageError):
            raise objects.unread(data, number, number * self._rows)
        if len(data) != length:
            ends = f"it ends at byte {start + len(data)}"
            raise objects.damage(number, number * self._rows, ends)
        return data

    def stop(self) -> None:
        """End fetches early, and release the threads that wait for them."""
        self._stopped = True
        for shard in list(self._open.values()):
            if shard.fetched is not None:
                fail(shard.fetched, StorageError("stopped"))
        for read in list(self._unread.values()):
            fail(read, StorageError("stopped"))

    def close(self) -> None:
        """End all fetches and close all shards, which nothing may be reading any more."""
        self.stop()
        self._pool.close(self._shards.version.path)
        for number in list(self._open):
            self._close(number)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _xxh3(descriptor: int) -> int:
    """XXH3-128 of a whole file; read, not mapped, since a failing disk would kill the process."""
    digest = xxhash.xxh3_128()
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        hashlib.file_digest(file, lambda: digest)
    return digest.intdigest()


def _write(target: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, start)
        view, start = view[written:], start + written
