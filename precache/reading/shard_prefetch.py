"""From a bucket to the disk cache, ahead of need: the shards that coming batches read.

A feed never gets stuck, whatever the order of rows, because batches take their shards in order: a
batch takes none before all batches before it have taken all of theirs. Once these are read, all the
room is free for the next batch, and there is always room for the shards of one.
"""

from __future__ import annotations

import contextlib
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
from precache.reading.disk_cache import OVERHEAD, DiskCache, Lease, on_disk, said
from precache.reading.shard_files import MappedObjects
from precache.recipe.variants import variants_of
from precache.runtime.io_pool import Fetchers, fail
from precache.runtime.step_clock import FetchedObjects
from precache.storage.local_files import map_file
from precache.storage.private_folder import ForeignFile
from precache.store.version import Version

log = logging.getLogger(__name__)

FETCHES = 4
"""Shards under way at a time."""

PIECE = 32 << 20
"""Bytes of one request: of a shard that breaks off, only so much is fetched again."""

LOOKAHEAD = 1 << 20
"""Rows whose shards are looked for; what they need may be less than the cache holds."""

TRIES = 3
"""Times that a shard is fetched whose bytes do not arrive as they were written."""

BLOCK = 256 << 10
"""Bytes that are read at a time where only their checksum counts: they stay in the caches."""

PATIENCE = 60.0
"""Seconds without progress after which the log says what a batch waits for."""

NAMED = 20
"""Shards that a message names at most."""


class HasRows(Protocol):
    """Rows that are read at a time: a batch, or a part of one."""

    @property
    def rows(self) -> np.ndarray: ...


Part = TypeVar("Part", bound=HasRows)


@dataclass
class _Shard:
    """A shard that takes room: when it is there, and how many batches that took it are left."""

    there: Future[None]
    batches: int = 0


@dataclass
class _Coming:
    """The shards of a batch: all, those that it has not taken yet, and when it need not wait to
    take any more."""

    shards: list[int]
    left: set[int]
    complete: Future[None]

    def proceed(self) -> None:
        with contextlib.suppress(InvalidStateError):  # two threads may say so
            self.complete.set_result(None)


class _CachedObjects(MappedObjects):
    """Objects in a disk cache, mapped once their XXH3 is known to be that of what was written.

    Each is checked once, by whichever of the two comes first: its fetch, or its first use here.
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
            raise DamageError("its checksum does not hold")
        return map_file(descriptor)

    def is_sound(self, number: int, descriptor: int) -> bool:
        """Whether a file of its size holds an object as it was written."""
        if self._sound.get(number) == _identity(descriptor):
            return True
        try:
            if _xxh3(descriptor) != self.xxh3(number):
                return False
        except OSError:  # the disk has lost some of it
            return False
        self.trust(number, descriptor)
        return True

    def trust(self, number: int, descriptor: int) -> None:
        """Take a file to hold an object as it was written."""
        self._sound[number] = _identity(descriptor)

    def doubt(self, number: int) -> None:
        """Close an object, and check it when it is opened again."""
        self._sound.pop(number, None)
        self.forget(number)

    def cached_name(self, number: int) -> str:
        """By version and contents: a shard that was repaired is another object."""
        return f"{self.version.id}-{self.field}-{number}-{self.xxh3(number):016x}"

    def xxh3(self, number: int) -> int:
        assert self.expected is not None  # only versions of ours are cached
        return int(self.expected[number, 1])

    def nbytes(self, number: int) -> int:
        assert self.expected is not None
        return int(self.expected[number, 0])


class CachedShards:
    """The shards of a version's large fields, by way of a disk cache.

    Raises
    ------
    StoreError
        Other software wrote it, so that nothing says what the bytes must be.
    """

    def __init__(self, version: Version, cache: DiskCache) -> None:
        if version.attributes is None:
            raise StoreError(
                f"{version.path} was written by other software and has no checksums, which a cache "
                "needs; leave cache_dir out, or copy it to a local disk"
            )
        self.rows_per_shard = version.attributes.rows_per_shard
        self.cache = cache
        self.arrays: dict[str, _CachedObjects] = {}
        self._fields: list[list[str]] = []
        self._version = version
        self._shards_at_once = 0
        self._idle: list[Lease] = []
        self._closed = False
        self._lock = threading.Lock()
        self._fetched = FetchedObjects()

    @property
    def where(self) -> str:
        """Path or URL of the version."""
        return self._version.path

    def hold(self, arrays: Iterable[str]) -> None:
        """Take in all arrays that feeds may read; each feed reads one variant of a field."""
        for array in arrays:
            self.arrays[array] = _CachedObjects(self._version, array, self.cache)
        self._fields = list(variants_of(self.arrays).values())

    def objects(self, array: str) -> MappedObjects:
        """The objects of an array, to be mapped where a feed has them."""
        return self.arrays[array]

    def nbytes(self, number: int) -> int:
        """Bytes of a shard in the cache, all fields, of each the largest variant."""
        return sum(
            max(on_disk(self.arrays[array].nbytes(number)) for array in variants)
            for variants in self._fields
        )

    def _most(self, shards: int) -> int:
        """Bytes in the cache of so many shards, at most."""
        count = -(-self._version.rows // self.rows_per_shard)
        sizes = sorted(map(self.nbytes, range(count)), reverse=True)
        return sum(sizes[:shards])

    def window(self, widest: int) -> int:
        """Shards to mix at a time: as many as `widest`, where two loaders then fit the limit."""
        room = (self.cache.limit - OVERHEAD) // 2
        takes = [self._most(2 * n) + said(self._objects(2 * n)) for n in range(1, widest + 1)]
        return max((n for n, nbytes in enumerate(takes, 1) if nbytes <= room), default=1)

    def _objects(self, shards: int) -> int:
        return shards * len(self._fields)

    def claim(self, shards: int) -> None:
        """Take part in the cache, holding up to so many shards at a time.

        Raises
        ------
        UsageError
            There is no room for so much.
        """
        self._shards_at_once = shards
        self._idle.append(self._join())

    def _join(self) -> Lease:
        shards, family = self._shards_at_once, f"{self._version.id}-"
        return self.cache.join(self._most(shards), self._objects(shards), family)

    @contextlib.contextmanager
    def feed(self, arrays: Iterable[str]) -> Iterator[ShardFeed]:
        """Fetch shards of some arrays for one iterator; another one beside it takes part in the
        cache by itself."""
        with self._lock:
            lease = self._idle.pop() if self._idle else None
        if lease is None or not lease.usable:  # in use, or of a process that forked
            lease = self._join()
        held = [self.arrays[array] for array in arrays if array in self.arrays]
        feed = ShardFeed(self, lease, self._shards_at_once, held)
        try:
            yield feed
        finally:
            if feed.close():  # else the lease goes with the threads of the feed
                self._take_back(lease)

    def _take_back(self, lease: Lease) -> None:
        with self._lock:
            keep = not self._idle and not self._closed
            if keep:
                self._idle.append(lease)
        if not keep:
            lease.close()

    def count(self, nbytes: int) -> None:
        """Add an object that was fetched."""
        with self._lock:
            before = self._fetched
            self._fetched = FetchedObjects(before.objects + 1, before.nbytes + nbytes)

    def take(self) -> FetchedObjects:
        """What was fetched since the last call."""
        with self._lock:
            fetched, self._fetched = self._fetched, FetchedObjects()
        return fetched

    def close(self) -> None:
        """Leave the cache."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for lease in idle:
            lease.close()


class ShardFeed:
    """Fetches the shards of coming batches, and holds them until these are read.

    Parameters
    ----------
    room
        Shards that it holds at most; enough for those of any one batch. More let the shards of
        later batches be fetched meanwhile.
    arrays
        Whose objects make up a shard.
    """

    def __init__(
        self, shards: CachedShards, lease: Lease, room: int, arrays: Sequence[_CachedObjects]
    ) -> None:
        self._arrays = arrays
        self._shards = shards
        self._lease = lease
        self._room = room
        self._open: dict[int, _Shard] = {}
        self._queued: deque[_Coming] = deque()
        self._lock = threading.Lock()
        self._progress = time.monotonic()
        self._stopped = False
        self._fetchers = Fetchers(FETCHES, shards.where)

    def around(
        self, parts: Iterable[Part]
    ) -> Generator[tuple[Part, AbstractContextManager[None]], None, None]:
        """The same parts, each with a context that waits for its shards and holds them."""
        waiting: deque[tuple[Part, _Coming]] = deque()
        rows_waiting = 0
        for part in parts:
            while waiting and (self._queued or rows_waiting > LOOKAHEAD):
                rows_waiting -= len(waiting[0][0].rows)
                yield self._with_shards(*waiting.popleft())
            waiting.append((part, self._announce(part.rows)))
            rows_waiting += len(part.rows)
        while waiting:
            yield self._with_shards(*waiting.popleft())

    def _with_shards(
        self, part: Part, coming: _Coming
    ) -> tuple[Part, AbstractContextManager[None]]:
        return part, self._present(coming)

    def _numbers(self, rows: np.ndarray) -> list[int]:
        numbers: list[int] = np.unique(rows // self._shards.rows_per_shard).tolist()
        return numbers

    def _announce(self, rows: np.ndarray) -> _Coming:
        """Have the shards of a batch fetched, once there is room."""
        numbers = self._numbers(rows)
        batch = _Coming(numbers, set(numbers), Future())
        with self._lock:
            self._queued.append(batch)
            self._take()
        return batch

    def _take(self) -> None:
        """Let batches take their shards, in order, while there is room."""
        while self._queued and not self._stopped:
            batch = self._queued[0]
            # Those at hand first: nobody else may hold them any longer.
            for number in sorted(batch.left, key=lambda n: (n not in self._open, n)):
                if number not in self._open:
                    if len(self._open) == self._room:
                        return
                    shard = self._open[number] = _Shard(Future())
                    self._fetchers.submit(partial(self._bring, number), shard.there)
                self._open[number].batches += 1
                batch.left.remove(number)
            self._queued.popleft()
            batch.proceed()

    @contextlib.contextmanager
    def _present(self, batch: _Coming) -> Iterator[None]:
        """Wait for the shards of a batch; the block reads them."""
        try:
            self._await(batch.complete, batch.shards)
            for number in batch.shards:
                self._await(self._open[number].there, batch.shards)
                self._open[number].there.result()
            yield
        finally:
            # What waits for room must go on to the error, where the cache cannot be written.
            with self._lock, contextlib.ExitStack() as ends:
                ends.callback(self._take)
                for number in batch.shards:
                    if number not in batch.left:
                        ends.callback(self._read, number)
                self._progress = time.monotonic()

    def _await(self, done: Future[None], numbers: Sequence[int]) -> None:
        """Wait for what a batch needs before it can read some shards."""
        while not (self._stopped or done.done() or wait([done], PATIENCE).done):
            self._report(numbers)
        if self._stopped:  # looked at when `stop` may find it among those that wait
            raise StorageError("stopped")

    def _report(self, numbers: Sequence[int]) -> None:
        """Log what a batch waits for, unless a shard came, or was read, or is named in the log."""
        with self._lock:
            there = {number: shard.there.done() for number, shard in self._open.items()}
            missing = [number for number in numbers if not there.get(number)]
            if not missing or time.monotonic() - self._progress < PATIENCE:
                return
            self._progress = time.monotonic()
        number = missing[0]
        held = [f"{n} ({'there' if come else 'coming'})" for n, come in there.items()]
        if len(held) > NAMED:
            held[NAMED:] = ["..."]
        log.warning(
            "%s: nothing was read for %.0f s, as shard %d (%s) %s; it holds %d shards of at most "
            "%d: %s",
            self._shards.where,
            PATIENCE,
            number,
            ", ".join(each.name(number) for each in self._arrays),
            "is being fetched" if number in there else "waits for room",
            len(there),
            self._room,
            ", ".join(held),
        )

    def _read(self, number: int) -> None:
        """A batch has read a shard."""
        self._open[number].batches -= 1
        if not self._open[number].batches:
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        del self._open[number]
        with contextlib.ExitStack() as ends:
            for each in self._arrays:
                each.forget(number)
                ends.callback(self._lease.give_back, each.cached_name(number))

    def _bring(self, number: int) -> None:
        """Have a shard in the cache and hold it; runs on the fetching threads."""
        for each in self._arrays:
            size, fetch = each.nbytes(number), partial(self._fetch, each, number)
            sound = partial(self._is_sound, each, number)
            if self._lease.obtain(each.cached_name(number), size, fetch, sound):
                self._shards.count(size)
        self._progress = time.monotonic()

    def _is_sound(self, objects: _CachedObjects, number: int, descriptor: int) -> bool:
        _read_ahead(descriptor, objects.nbytes(number))
        sound = objects.is_sound(number, descriptor)
        if not sound:
            log.warning("%s is damaged; it is fetched again", objects.path(number, ()))
        return sound

    def renew(self, rows: np.ndarray) -> None:
        """Check the shards of a batch that is being read, and fetch again those whose copies are
        damaged."""
        for number in self._numbers(rows):
            with self._lock:
                shard = self._open[number]
                if shard.there.done():
                    shard.there = Future()
                    self._fetchers.submit(partial(self._renew, number), shard.there)
            self._await(shard.there, [number])
            shard.there.result()

    def _renew(self, number: int) -> None:
        for each in self._arrays:
            each.doubt(number)
        self._bring(number)

    def _fetch(self, objects: _CachedObjects, number: int, target: int) -> None:
        """Write an object to a descriptor, checked."""
        for _ in range(TRIES):
            digest = xxhash.xxh3_64()
            for start in range(0, objects.nbytes(number), PIECE):
                data = self._piece(objects, number, start)
                digest.update(data)
                _write(target, data, start)
            if digest.intdigest() == objects.xxh3(number):
                objects.trust(number, target)
                return
        raise self._damage(objects, number, "its checksum does not hold")

    def _piece(self, objects: _CachedObjects, number: int, start: int) -> bytes:
        if self._stopped:
            raise StorageError("stopped")  # nobody waits for it any more
        name, length = objects.name(number), min(PIECE, objects.nbytes(number) - start)
        [data] = objects.version.folder.read_ranges([(name, start, length)])
        if isinstance(data, StorageError):
            if objects.version.folder.exists(name):
                raise data
            raise self._damage(objects, number, "it is missing")
        if len(data) != length:
            raise self._damage(objects, number, f"it ends at byte {start + len(data)}")
        return data

    def _damage(self, objects: _CachedObjects, number: int, reason: str) -> PrecacheError:
        return objects.damage(number, (), number * self._shards.rows_per_shard, reason)

    def stop(self) -> None:
        """Let fetches end early, and whoever waits for one: nobody wants them any more."""
        self._stopped = True
        self._fetchers.stop()
        for shard in list(self._open.values()):
            fail(shard.there, StorageError("stopped"))
        for batch in list(self._queued):
            batch.proceed()

    def close(self) -> bool:
        """End all fetches, and let go of all shards; nobody may be reading them.

        False where the lease must be left to the threads: a request of theirs does not come back,
        or nobody may wait for them here.
        """
        self.stop()
        if not self._fetchers.join():
            for number in list(self._open):
                for each in self._arrays:
                    each.forget(number)
            return False
        if not self._lease.usable:  # of the process that this one was forked from
            return False
        with contextlib.ExitStack() as ends:
            ends.callback(self._lease.give_back_all)  # what came after the error of its batch
            for number in list(self._open):
                ends.callback(self._let_go, number)
        return True


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _xxh3(descriptor: int) -> int:
    """Of a whole file. Not by a map, which would end the process where the disk cannot read."""
    digest, block, start = xxhash.xxh3_64(), bytearray(BLOCK), 0
    while length := os.preadv(descriptor, [block], start):
        digest.update(memoryview(block)[:length])
        start += length
    return digest.intdigest()


def _read_ahead(descriptor: int, size: int) -> None:
    """Have the kernel read a whole object: its rows are needed soon, all of them."""
    for start in range(0, size, 2 << 20):
        os.posix_fadvise(descriptor, start, 2 << 20, os.POSIX_FADV_WILLNEED)


def _write(target: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, start)
        view, start = view[written:], start + written
