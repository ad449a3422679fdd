"""Prefetch the shards of coming batches from a bucket into the disk cache.

A prefetcher never deadlocks, in any order of rows, because batches take their shards in
order: a batch takes none before all earlier batches have taken theirs. Once those are read, all the
room is free for the next batch, and there is always room for the shards of one batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import xxhash

from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.reading.disk_cache import OVERHEAD, CacheShare, DiskCache, on_disk, share_nbytes
from precache.reading.shard_files import MappedShardFiles
from precache.recipe.variants import variants_of
from precache.runtime.io_pool import Fetchers
from precache.runtime.operating_system import read_ahead
from precache.runtime.ordered_map import fail
from precache.runtime.step_clock import FetchedObjects
from precache.storage.local_files import map_file
from precache.storage.private_folder import ForeignFile
from precache.store.tree import CHECKSUM, Leaf
from precache.store.version import Version

log = logging.getLogger(__name__)

CONCURRENT_FETCHES = 4
"""Shards fetched at a time."""

REQUEST_NBYTES = 32 << 20
"""Bytes of one request: if a shard's fetch breaks off, only this much is fetched again."""

LOOKAHEAD_ROWS = 1 << 20
"""Rows looked ahead for shards; these may need less than the cache holds."""

FETCH_TRIES = 3
"""Times that a shard is fetched if its bytes arrive damaged."""

READ_AHEAD_NBYTES = 2 << 20
"""Bytes of one request to read ahead."""

STALL_SECONDS = 60.0
"""Seconds without progress after which the log names the shard that a batch waits for."""

MAX_NAMED = 20
"""Shards that a log message lists at most."""


class HasRows(Protocol):
    """A batch, or a part of one: rows that are read together."""

    @property
    def rows(self) -> np.ndarray: ...


_Rows = TypeVar("_Rows", bound=HasRows)


@dataclass
class _FetchedShard:
    """A shard that takes up space: its fetch, and the number of batches that will still read it."""

    fetched: Future[None]
    batches: int = 0


@dataclass
class _ComingBatch:
    """A coming batch: its shards, those it has not taken yet, and a future for the last one."""

    shards: list[int]
    left: set[int]
    complete: Future[None]

    def proceed(self) -> None:
        with contextlib.suppress(InvalidStateError):  # two threads may call this
            self.complete.set_result(None)


class _CachedShardFiles(MappedShardFiles):
    """Objects in a disk cache, mapped once their XXH3 was verified.

    Each is checked once: when it is fetched, or else when it is first used here.
    """

    def __init__(self, version: Version, name: str, cache: DiskCache) -> None:
        super().__init__(version, name)
        self.cache = cache
        self._sound: dict[int, tuple[int, int]] = {}

    def path(self, number: int, tail: tuple[int, ...]) -> Path:
        return self.cache.path(self.cached_name(number))

    def open(self, number: int, tail: tuple[int, ...]) -> int:
        try:
            return self.cache.objects.descriptor_of(self.cached_name(number), os.O_RDONLY)
        except ForeignFile as error:
            raise DamageError(str(error)) from None

    def map(self, number: int, tail: tuple[int, ...], descriptor: int) -> np.ndarray:
        if not self.is_sound(number, descriptor):
            raise DamageError(CHECKSUM)
        return map_file(descriptor)

    def is_sound(self, number: int, descriptor: int) -> bool:
        """Check that a file of the right size holds an object as it was written."""
        if self._sound.get(number) == _identity(descriptor):
            return True
        try:
            if _xxh3(descriptor) != self.leaf(number).xxh3:
                return False
        except OSError:  # the disk has lost some of it
            return False
        self.mark_verified(number, descriptor)
        return True

    def mark_verified(self, number: int, descriptor: int) -> None:
        """Record that a file holds an object as it was written."""
        self._sound[number] = _identity(descriptor)

    def mark_unverified(self, number: int) -> None:
        """Close an object, and check it when it is opened again."""
        self._sound.pop(number, None)
        self.forget(number)

    def cached_name(self, number: int) -> str:
        """Name of an object in the cache, by version and contents: a repaired shard has another."""
        return f"{self.version.id}-{self.field}-{number}-{self.leaf(number).xxh3:032x}"

    def leaf(self, number: int) -> Leaf:
        assert self.expected is not None  # only versions that precache wrote are cached
        return self.expected[number]

    def nbytes(self, number: int) -> int:
        return self.leaf(number).size


class CachedShards:
    """The shards of a version's large fields, read through a disk cache.

    Raises
    ------
    StoreError
        Other software wrote the version, so that there are no checksums of its shards.
    """

    def __init__(self, version: Version, cache: DiskCache) -> None:
        if version.attributes is None:
            raise StoreError(
                f"{version.path} was written by other software and has no checksums, which a cache "
                "needs; leave cache_dir out, or copy it to a local disk"
            )
        self.rows_per_shard = version.attributes.rows_per_shard
        self.cache = cache
        self.arrays: dict[str, _CachedShardFiles] = {}
        self._fields: list[list[str]] = []
        self._version = version
        self._shards_at_once = 0
        self._idle: list[CacheShare] = []
        self._closed = False
        self._lock = threading.Lock()
        self._fetched = FetchedObjects()

    @property
    def where(self) -> str:
        """Path or URL of the version."""
        return self._version.path

    def add(self, arrays: Iterable[str]) -> None:
        """Add all arrays that prefetchers may read; each reads one variant of a field."""
        for array in arrays:
            self.arrays[array] = _CachedShardFiles(self._version, array, self.cache)
        self._fields = list(variants_of(self.arrays).values())

    def objects(self, array: str) -> MappedShardFiles:
        """Return the objects of an array, which can be mapped once a prefetcher holds them."""
        return self.arrays[array]

    def nbytes(self, number: int) -> int:
        """Bytes that a shard takes in the cache: all fields, the largest variant of each."""
        return sum(
            max(on_disk(self.arrays[array].nbytes(number)) for array in variants)
            for variants in self._fields
        )

    def _max_nbytes(self, shards: int) -> int:
        """Upper bound of the bytes that `shards` shards take in the cache."""
        count = -(-self._version.rows // self.rows_per_shard)
        sizes = sorted(map(self.nbytes, range(count)), reverse=True)
        return sum(sizes[:shards])

    def window(self, widest: int) -> int:
        """Shards to mix at a time: up to `widest`, so that two loaders fit the cache limit."""
        room = (self.cache.limit - OVERHEAD) // 2
        sizes = [
            self._max_nbytes(2 * n) + share_nbytes(self._objects(2 * n))
            for n in range(1, widest + 1)
        ]
        return max((n for n, nbytes in enumerate(sizes, 1) if nbytes <= room), default=1)

    def _objects(self, shards: int) -> int:
        return shards * len(self._fields)

    def claim(self, shards: int) -> None:
        """Join the cache, to hold up to `shards` shards at a time.

        Raises
        ------
        UsageError
            The cache limit leaves too little room.
        """
        self._shards_at_once = shards
        self._idle.append(self._join())

    def _join(self) -> CacheShare:
        shards, family = self._shards_at_once, f"{self._version.id}-"
        return self.cache.join(self._max_nbytes(shards), self._objects(shards), family)

    @contextlib.contextmanager
    def feed(self, arrays: Iterable[str]) -> Iterator[ShardPrefetcher]:
        """Prefetch shards of some arrays for one iterator; a concurrent one has its own share."""
        with self._lock:
            share = self._idle.pop() if self._idle else None
        if share is None or not share.usable:  # in use, or of a process that forked
            share = self._join()
        held = [self.arrays[array] for array in arrays if array in self.arrays]
        feed = ShardPrefetcher(self, share, self._shards_at_once, held)
        try:
            yield feed
        finally:
            if feed.close():  # else the share ends with the feed's threads
                self._take_back(share)

    def _take_back(self, share: CacheShare) -> None:
        with self._lock:
            keep = not self._idle and not self._closed
            if keep:
                self._idle.append(share)
        if not keep:
            share.close()

    def count(self, nbytes: int) -> None:
        """Count an object that was fetched."""
        with self._lock:
            before = self._fetched
            self._fetched = FetchedObjects(before.objects + 1, before.nbytes + nbytes)

    def take(self) -> FetchedObjects:
        """Return, and reset, the count of what was fetched since the last call."""
        with self._lock:
            fetched, self._fetched = self._fetched, FetchedObjects()
        return fetched

    def close(self) -> None:
        """Leave the cache."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for share in idle:
            share.close()


class ShardPrefetcher:
    """Fetches the shards of coming batches, and holds them until the batches are read.

    Parameters
    ----------
    room
        Shards held at a time: at least those of any one batch. With more, the shards of later
        batches are fetched meanwhile.
    arrays
        The arrays whose objects make up a shard.
    """

    def __init__(
        self,
        shards: CachedShards,
        share: CacheShare,
        room: int,
        arrays: Sequence[_CachedShardFiles],
    ) -> None:
        self._arrays = arrays
        self._shards = shards
        self._share = share
        self._room = room
        self._open: dict[int, _FetchedShard] = {}
        self._queued: deque[_ComingBatch] = deque()
        self._lock = threading.Lock()
        self._progress = time.monotonic()
        self._stopped = False
        self._fetchers = Fetchers(CONCURRENT_FETCHES, shards.where)

    def around(
        self, parts: Iterable[_Rows]
    ) -> Generator[tuple[_Rows, AbstractContextManager[None]], None, None]:
        """Yield the parts, each with a context that waits for its shards and holds them."""
        waiting: deque[tuple[_Rows, _ComingBatch]] = deque()
        rows_waiting = 0
        for part in parts:
            while waiting and (self._queued or rows_waiting > LOOKAHEAD_ROWS):
                rows_waiting -= len(waiting[0][0].rows)
                yield self._with_shards(*waiting.popleft())
            waiting.append((part, self._announce(part.rows)))
            rows_waiting += len(part.rows)
        while waiting:
            yield self._with_shards(*waiting.popleft())

    def _with_shards(
        self, part: _Rows, coming: _ComingBatch
    ) -> tuple[_Rows, AbstractContextManager[None]]:
        return part, self._present(coming)

    def _numbers(self, rows: np.ndarray) -> list[int]:
        numbers: list[int] = np.unique(rows // self._shards.rows_per_shard).tolist()
        return numbers

    def _announce(self, rows: np.ndarray) -> _ComingBatch:
        """Queue the shards of a batch to be fetched once there is room."""
        numbers = self._numbers(rows)
        batch = _ComingBatch(numbers, set(numbers), Future())
        with self._lock:
            self._queued.append(batch)
            self._take()
        return batch

    def _take(self) -> None:
        """Let batches take their shards, in order, while there is room."""
        while self._queued and not self._stopped:
            batch = self._queued[0]
            # Open shards first: after this batch nothing else may hold them.
            for number in sorted(batch.left, key=lambda n: (n not in self._open, n)):
                if number not in self._open:
                    if len(self._open) == self._room:
                        return
                    shard = self._open[number] = _FetchedShard(Future())
                    self._fetchers.submit(partial(self._obtain, number), shard.fetched)
                self._open[number].batches += 1
                batch.left.remove(number)
            self._queued.popleft()
            batch.proceed()

    @contextlib.contextmanager
    def _present(self, batch: _ComingBatch) -> Iterator[None]:
        """Wait for the shards of a batch, and hold them while the block reads them."""
        try:
            self._await(batch.complete, batch.shards)
            for number in batch.shards:
                self._await(self._open[number].fetched, batch.shards)
                self._open[number].fetched.result()
            yield
        finally:
            # Even if the cache cannot be written, batches that wait for room must reach the error.
            with self._lock, contextlib.ExitStack() as ends:
                ends.callback(self._take)
                for number in batch.shards:
                    if number not in batch.left:
                        ends.callback(self._release, number)
                self._progress = time.monotonic()

    def _await(self, done: Future[None], numbers: Sequence[int]) -> None:
        """Wait for a future that a batch needs before it can read some shards."""
        while not (self._stopped or done.done() or wait([done], STALL_SECONDS).done):
            self._report(numbers)
        if self._stopped:  # checked after the wait, which `stop` may have ended
            raise StorageError("stopped")

    def _report(self, numbers: Sequence[int]) -> None:
        """Log what a batch waits for, unless there was progress, or a report, a short time ago."""
        with self._lock:
            fetched = {number: shard.fetched.done() for number, shard in self._open.items()}
            missing = [number for number in numbers if not fetched.get(number)]
            if not missing or time.monotonic() - self._progress < STALL_SECONDS:
                return
            self._progress = time.monotonic()
        number = missing[0]
        held = [f"{n} ({'fetched' if done else 'under way'})" for n, done in fetched.items()]
        if len(held) > MAX_NAMED:
            held[MAX_NAMED:] = ["..."]
        log.warning(
            "%s: nothing was read for %.0f s, as shard %d (%s) %s; it holds %d shards of at most "
            "%d: %s",
            self._shards.where,
            STALL_SECONDS,
            number,
            ", ".join(objects.name(number) for objects in self._arrays),
            "is being fetched" if number in fetched else "waits for room",
            len(fetched),
            self._room,
            ", ".join(held),
        )

    def _release(self, number: int) -> None:
        """Record that a batch has read a shard; close the shard after its last batch."""
        self._open[number].batches -= 1
        if not self._open[number].batches:
            self._close_shard(number)

    def _close_shard(self, number: int) -> None:
        del self._open[number]
        with contextlib.ExitStack() as ends:
            for objects in self._arrays:
                objects.forget(number)
                ends.callback(self._share.release, objects.cached_name(number))

    def _obtain(self, number: int) -> None:
        """Fetch a shard into the cache unless it is there, and hold it; runs on a fetch thread."""
        for objects in self._arrays:
            size, fetch = objects.nbytes(number), partial(self._fetch, objects, number)
            is_sound = partial(self._is_sound, objects, number)
            if self._share.obtain(objects.cached_name(number), size, fetch, is_sound):
                self._shards.count(size)
        self._progress = time.monotonic()

    def _is_sound(self, objects: _CachedShardFiles, number: int, descriptor: int) -> bool:
        # All of its rows are needed soon.
        starts = range(0, objects.nbytes(number), READ_AHEAD_NBYTES)
        read_ahead(descriptor, ((start, READ_AHEAD_NBYTES) for start in starts))
        sound = objects.is_sound(number, descriptor)
        if not sound:
            log.warning("%s is damaged; it is fetched again", objects.path(number, ()))
        return sound

    def renew(self, rows: np.ndarray) -> None:
        """Check the cached shards of a batch being read, and fetch damaged ones again."""
        for number in self._numbers(rows):
            with self._lock:
                shard = self._open[number]
                if shard.fetched.done():
                    shard.fetched = Future()
                    self._fetchers.submit(partial(self._renew, number), shard.fetched)
            self._await(shard.fetched, [number])
            shard.fetched.result()

    def _renew(self, number: int) -> None:
        for objects in self._arrays:
            objects.mark_unverified(number)
        self._obtain(number)

    def _fetch(self, objects: _CachedShardFiles, number: int, target: int) -> None:
        """Fetch an object, write it to a descriptor and check it."""
        for _ in range(FETCH_TRIES):
            digest = xxhash.xxh3_128()
            for start in range(0, objects.nbytes(number), REQUEST_NBYTES):
                data = self._piece(objects, number, start)
                digest.update(data)
                _write(target, data, start)
            if digest.intdigest() == objects.leaf(number).xxh3:
                objects.mark_verified(number, target)
                return
        raise self._damage(objects, number, CHECKSUM)

    def _piece(self, objects: _CachedShardFiles, number: int, start: int) -> bytes:
        if self._stopped:
            raise StorageError("stopped")  # nothing waits for it any more
        name, length = objects.name(number), min(REQUEST_NBYTES, objects.nbytes(number) - start)
        [data] = objects.version.folder.read_ranges([(name, start, length)])
        if isinstance(data, StorageError):
            raise objects.unread(data, number, (), number * self._shards.rows_per_shard)
        if len(data) != length:
            raise self._damage(objects, number, f"it ends at byte {start + len(data)}")
        return data

    def _damage(self, objects: _CachedShardFiles, number: int, reason: str) -> PrecacheError:
        return objects.damage(number, (), number * self._shards.rows_per_shard, reason)

    def stop(self) -> None:
        """End fetches early, and release the threads that wait for them."""
        self._stopped = True
        self._fetchers.stop()
        for shard in list(self._open.values()):
            fail(shard.fetched, StorageError("stopped"))
        for batch in list(self._queued):
            batch.proceed()

    def close(self) -> bool:
        """End all fetches and close all shards, which nothing may be reading any more.

        Returns False if the share must be left to the fetch threads, because a request of theirs
        does not return, or this process must not wait for them.
        """
        self.stop()
        if not self._fetchers.join():
            for number in list(self._open):
                for objects in self._arrays:
                    objects.forget(number)
            return False
        if not self._share.usable:  # it belongs to the process that this one was forked from
            return False
        with contextlib.ExitStack() as ends:
            ends.callback(self._share.release_all)  # shards that came after their batch failed
            for number in list(self._open):
                ends.callback(self._close_shard, number)
        return True


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
