"""Cache of remote objects on a local disk, within a byte limit, for all loaders of a user.

::

    CACHE/lock             locked for the milliseconds that a decision takes; holds an upper bound
                           of the bytes of all objects
    CACHE/users/ID         claim of a running loader, and a line for each object that it holds;
                           locked while it runs
    CACHE/objects/NAME     whole objects, checked
    CACHE/parts/NAME       objects being fetched, at full length; locked by the fetching thread

All locks are `flock`: the kernel drops those of a process that dies, however it dies, and its
objects can then be evicted. An object that is held is never evicted. Every loader claims beforehand
the most that it will hold, and is refused if the sum would exceed the limit; so no two loaders can
wait for each other.

The number in ``lock`` is raised before an object takes its bytes, and lowered after others were
removed: a process that dies in between leaves it too high. Files are counted again when a loader
joins, and when that number would pass the limit.

The folder belongs to one user, and nothing in it is reached through links (`OwnFolder`). A damaged
object is removed and fetched again by the loader that detects it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import BaseModel, ByteSize, ConfigDict, TypeAdapter, ValidationError

from precache.errors import StorageError, UsageError
from precache.runtime.operating_system import allocate
from precache.storage.file_lock import LockedFile, remove_if_free
from precache.storage.local import Translated
from precache.storage.private_folder import ForeignFile, OwnFolder

OVERHEAD = 64 << 10
"""Bytes of the limit that are set aside for the lock and empty folders."""

DEFAULT_LIMIT_SHARE = 0.9
"""Default limit, as a share of the space that the cache could take."""

EVICTION_SHARE = 0.01
"""Share of the limit freed by one eviction, in whole objects, so that files are listed seldom."""

DISK_BLOCK = 4096
"""Bytes that a file's size is rounded up to, as file systems do."""

NAME_BYTES = 512
"""Bytes that a file's name takes in its folder, which may be half empty."""

FIRST_LINE_BYTES = 256
"""Most bytes of the first line of a user's file."""

ENTRIES = ("users", "objects", "parts", "lock")
"""Names in the folder of a cache."""

OBJECT_NAME = re.compile(r"\w[\w.-]*")
"""Names that cannot lead into another folder."""


_HINTS = {
    errno.ENOSPC: "the disk is full: free some space, or lower cache_limit",
    errno.EACCES: "check its owner and mode, or choose another cache_dir",
    errno.EPERM: "check its owner and mode, or choose another cache_dir",
    errno.EROFS: "choose a cache_dir that can be written",
    errno.ENOLCK: "choose a cache_dir on a disk of this machine",
}


def on_disk(size: int) -> int:
    """Bytes that a file of `size` bytes takes, its name included; 0 for an empty file."""
    return -(-size // DISK_BLOCK) * DISK_BLOCK + NAME_BYTES if size else 0


def share_nbytes(objects: int) -> int:
    """Bytes that the file of a loader takes which holds up to `objects` objects."""
    return on_disk(FIRST_LINE_BYTES + len(_FREE) * objects)


_FREE = b" " * 16 + b"\n"
"""The line of an object that is not held; otherwise it has the digest of the object's name."""


def _line(name: str) -> bytes:
    # If two names had one digest, one of the objects would be held without need.
    return f"{xxhash.xxh3_64_hexdigest(os.fsencode(name))}\n".encode()


class _Claim(BaseModel):
    """First line of a running loader's file: the cache limit that it was given, and its claim.

    Attributes
    ----------
    claim
        Bytes that it holds at most, its own file included.
    family
        Prefix of the names of the objects that it reads.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    limit: int
    claim: int
    family: str


@dataclass(frozen=True)
class _User:
    """A running loader.

    Attributes
    ----------
    name, nbytes
        Name and size of its file below ``users/``.
    """

    name: str
    nbytes: int
    claim: _Claim


class DiskCache:
    """A folder of objects that the loaders of a user on a node share.

    Parameters
    ----------
    folder
        Created if missing. On a disk of this node, whose locks hold between its processes.
    limit
        Bytes that the cache never exceeds. If loaders have different limits, the lowest holds.

    Raises
    ------
    UsageError
        Others than this user can write to the folder, or it has other files in it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        # Links in the path to the folder are the user's own; below it, none is followed.
        self.folder = Path(os.path.realpath(folder.expanduser()))
        self.limit = limit
        with self.translated("make"):
            if not self.folder.parent.exists():
                self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._root = OwnFolder(self.folder, names=(*ENTRIES, "lost+found"))
            self.users, self.objects, self.parts = map(self._root.folder, ENTRIES[:3])

    @classmethod
    def at(cls, folder: str | os.PathLike[str], limit: int | str | None = None) -> DiskCache:
        """Make a cache from the folder and limit that a user gives.

        Parameters
        ----------
        limit
            Bytes, or text such as ``200GB`` or ``1.5TiB``; by default nine tenths of what is free
            on the disk or already taken by the cache.

        Raises
        ------
        UsageError
            The limit is not a number of bytes; or as for the class.
        """
        try:
            nbytes = int(TypeAdapter(ByteSize).validate_python(0 if limit is None else limit))
        except ValidationError:
            raise UsageError(
                f"cache_limit is {limit!r}; give bytes, or a size such as '200GB'"
            ) from None
        cache = cls(Path(folder), nbytes)
        if limit is None:
            with cache.translated("use"):
                used = sum(512 * status.st_blocks for *_, status in cache._files())
                space = shutil.disk_usage(cache.folder).free + used
                cache.limit = int(DEFAULT_LIMIT_SHARE * space)
        return cache

    def join(self, claim: int, objects: int, family: str) -> CacheShare:
        """Join the cache with a claim.

        Parameters
        ----------
        claim, objects
            Bytes and number of objects that the loader holds at most at a time.
        family
            Prefix of the names of the objects that the loader will read again; objects that no
            loader will read again are evicted first.

        Raises
        ------
        UsageError
            The limit leaves too little room for the claim.
        """
        claim += share_nbytes(objects)
        with self.translated("use"), self.lock() as lock:
            users = self._users()
            others = sum(user.claim.claim for user in users)
            limit = self._effective_limit(users)
            if OVERHEAD + others + claim > limit:
                raise UsageError(self._refusal(limit, claim, others, len(users)))
            room = self._room(users) - share_nbytes(objects)
            _write_total(lock, self._evict(users, room))
            return CacheShare(self, claim, objects, family)

    def _refusal(self, limit: int, claim: int, others: int, users: int) -> str:
        lower = f" (set by another loader; here {self.limit})" if limit < self.limit else ""
        sharers = "another loader holds" if users == 1 else f"{users} other loaders hold"
        shared = f", and {sharers} up to {others}" if users else ""
        return (
            f"cache_limit is {limit} bytes{lower} for {self.folder}; this loader holds up to "
            f"{claim} bytes of shards at a time{shared}; give at least {OVERHEAD + others + claim}"
        )

    # --- for shares -----------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Path of an object once it is in the cache."""
        return self.objects.path / name

    def drop(self, name: str, status: os.stat_result) -> None:
        """Remove an object, unless another file has taken its place."""
        with self.translated("use"), self.lock(), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.objects.status(name), status):
                self.objects.remove(name)

    def part(self, name: str) -> LockedFile:
        """Open the file of an object to be fetched, not locked yet."""
        with self.translated("write to"), self.lock():  # or another may see it half made
            try:
                return LockedFile(self.parts, name)
            except ForeignFile:
                self.parts.remove(name)
                return LockedFile(self.parts, name)

    def lock(self) -> LockedFile:
        """Lock the cache, to decide alone among all processes that share it."""
        return LockedFile(self._root, "lock")

    def reserve(self, part: LockedFile, size: int) -> None:
        """Make room for an object to be fetched, and take it."""
        with self.translated("use"), self.lock() as lock:
            os.ftruncate(part.fileno(), 0)
            users = self._users()
            room = self._room(users)
            total = _read_total(lock)
            if total is None or total + on_disk(size) > room:
                total = self._evict(users, room - on_disk(size))
            if total + on_disk(size) > room:
                raise StorageError(
                    f"{self.folder} has no room for {size} bytes below its limit of "
                    f"{self._effective_limit(users)}; are there files in it that precache did not "
                    "put there?"
                )
            _write_total(lock, total + on_disk(size))
            os.ftruncate(part.fileno(), size)

    def finish(self, name: str) -> None:
        """Move a fetched object to its place."""
        with self.translated("use"), self.lock():  # so that it is counted once
            self.parts.move(name, self.objects)

    def _users(self) -> list[_User]:
        """Return the running loaders; files left by others are removed."""
        users = []
        for name in self.users.names():
            with contextlib.suppress(FileNotFoundError):  # its loader just ended
                if not remove_if_free(self.users, name):
                    users.append(self._user(name))
        return users

    def _user(self, name: str) -> _User:
        with self.users.file(name) as file:
            nbytes = os.fstat(file.fileno()).st_size
            head, end, _ = os.pread(file.fileno(), FIRST_LINE_BYTES, 0).partition(b"\n")
        try:
            claim = _Claim.model_validate_json(head if end else b"")
        except ValidationError:
            raise StorageError(
                f"{self.users.path / name} is locked by a running process and is not what a loader "
                "writes; end that process, or remove the file"
            ) from None
        return _User(name, on_disk(nbytes), claim)

    def _held(self, users: list[_User]) -> set[bytes]:
        """Return the lines of the objects that loaders hold."""
        held = set[bytes]()
        for user in users:
            with contextlib.suppress(FileNotFoundError), self.users.file(user.name) as file:
                held.update(file.read(user.nbytes).splitlines(keepends=True)[1:])
        return held

    def _effective_limit(self, users: list[_User]) -> int:
        """Lowest limit of all loaders."""
        return min([self.limit, *(user.claim.limit for user in users)])

    def _room(self, users: list[_User]) -> int:
        """Bytes that objects may take."""
        return self._effective_limit(users) - OVERHEAD - sum(user.nbytes for user in users)

    def _evict(self, users: list[_User], room: int) -> int:
        """Remove objects until all take `room` bytes at most; return the bytes they then take."""
        held = self._held(users)
        families = tuple({user.claim.family for user in users})
        total, candidates = 0, []
        for folder, name, status in self._files():
            size = on_disk(status.st_size)
            total += size
            if folder is self.parts:
                candidates.append((0, 0, size, name))
            elif _line(name) not in held:
                # An epoch reads every shard once: the one read last is needed again last.
                wanted = bool(families) and name.startswith(families)
                age = -status.st_mtime_ns if wanted else status.st_mtime_ns
                candidates.append((1 + wanted, age, size, name))
        if total <= room:
            return total
        least = room - int(EVICTION_SHARE * self.limit)
        for kind, _, size, name in sorted(candidates):
            if total <= room and total - size < least:
                break
            if kind == 0 and not remove_if_free(self.parts, name):
                continue
            if kind:
                self.objects.remove(name)
            total -= size
        return total

    def _files(self) -> Iterator[tuple[OwnFolder, str, os.stat_result]]:
        for folder in (self.objects, self.parts):
            for name, status in folder.files():
                yield folder, name, status

    def translated(self, doing: str) -> Translated:
        """Translate errors of the file system in the block; they name what it was doing."""
        return Translated(self.folder, f"{doing} the cache", _HINTS)


_TOTAL_NBYTES = 21
"""Bytes of the total in the lock file: digits and a line's end."""


def _read_total(lock: LockedFile) -> int | None:
    """Upper bound of the bytes of all objects, as last written by any process; None if unset."""
    text = os.pread(lock.fileno(), _TOTAL_NBYTES, 0)
    return int(text) if len(text) == _TOTAL_NBYTES and text[:-1].isdigit() else None


def _write_total(lock: LockedFile, nbytes: int) -> None:
    os.pwrite(lock.fileno(), f"{nbytes:0{_TOTAL_NBYTES - 1}d}\n".encode(), 0)


class CacheShare:
    """A loader's share of a cache. Safe to use from several threads; ends with its process.

    Created while this process holds the cache's lock.
    """

    def __init__(self, cache: DiskCache, claim: int, objects: int, family: str) -> None:
        self._cache = cache
        self._places: dict[str, int] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        name = uuid.uuid4().hex
        self._file = LockedFile(cache.users, name)
        self._end = weakref.finalize(self, _leave, self._file, cache.users, name, self._process)
        try:
            self._file.lock()
            head = _Claim(limit=cache.limit, claim=claim, family=family)
            data = f"{head.model_dump_json()}\n".encode()
            self._start = len(data)
            self._free = list(range(objects))
            # Reserved now, so that a full disk shows here and not later.
            allocate(self._file.fileno(), len(data) + objects * len(_FREE))
            os.pwrite(self._file.fileno(), data + objects * _FREE, 0)
        except BaseException:
            self.close()
            raise

    def obtain(
        self,
        name: str,
        size: int,
        fetch: Callable[[int], None],
        is_sound: Callable[[int], bool] = lambda descriptor: True,
    ) -> bool:
        """Fetch an object unless it is cached, and hold it until `release`.

        Parameters
        ----------
        size
            Bytes of the object.
        fetch
            Writes the object, whole and checked, to a descriptor. Of all loaders that want it, one
            calls this.
        is_sound
            Checks an object of that size, given its descriptor; a damaged one is removed and
            fetched again.

        Returns
        -------
        bool
            True if it was fetched, False if it was cached already.
        """
        if not OBJECT_NAME.fullmatch(name):
            raise StorageError(f"no object in a cache can be called {name!r}")
        self._hold(name)
        with self._cache.translated("use"):
            if self._is_cached(name, size, is_sound):
                return False
            return self._fetch(name, size, fetch, is_sound)

    def _hold(self, name: str) -> None:
        # Locked, so that none evicts it meanwhile.
        with self._lock, self._cache.translated("use"), self._cache.lock():
            if name not in self._places:
                self._places[name] = self._free.pop()
                self._write(self._places[name], _line(name))

    def _is_cached(self, name: str, size: int, is_sound: Callable[[int], bool]) -> bool:
        """Check a cached object; remove it if it is damaged."""
        cache = self._cache
        try:
            with cache.objects.file(name) as file:
                status = os.fstat(file.fileno())
                if status.st_size == size and is_sound(file.fileno()):
                    os.utime(file.fileno())
                    return True
        except FileNotFoundError:
            return False
        except ForeignFile as foreign:
            status = foreign.status
        cache.drop(name, status)
        return False

    def _fetch(
        self, name: str, size: int, fetch: Callable[[int], None], is_sound: Callable[[int], bool]
    ) -> bool:
        """Fetch an object; return False if another loader fetched it meanwhile."""
        while True:
            # The lock waits while another loader fetches the object.
            with self._cache.translated("write to"), self._cache.part(name) as part:
                if not part.is_there:  # another loader finished or removed it meanwhile
                    continue
                try:
                    if self._is_cached(name, size, is_sound):
                        return False
                    self._cache.reserve(part, size)
                    fetch(part.fileno())
                    os.fsync(part.fileno())
                    self._cache.finish(name)
                    return True
                finally:
                    if part.is_there:
                        self._cache.parts.remove(name)

    def release(self, name: str) -> None:
        """Allow an object to be evicted; its memory maps must be closed."""
        with self._lock, self._cache.translated("use"):
            if name in self._places:
                self._write(self._places[name], _FREE)
                self._free.append(self._places.pop(name))

    def release_all(self) -> None:
        """Allow all objects to be evicted."""
        for name in list(self._places):
            self.release(name)

    def _write(self, place: int, line: bytes) -> None:
        os.pwrite(self._file.fileno(), line, self._start + place * len(_FREE))

    @property
    def usable(self) -> bool:
        """True if the share is open and belongs to this process."""
        return self._end.alive and self._process == os.getpid()

    def close(self) -> None:
        """End the share: all its objects may be evicted."""
        try:
            self._end()
        finally:  # even if Ctrl-C interrupts
            self._file.close()


def _leave(file: LockedFile, users: OwnFolder, name: str, process: int) -> None:
    """End a share, on close or at exit; a forked child leaves it to its parent."""
    if os.getpid() == process:
        users.remove(name)
        file.close()
