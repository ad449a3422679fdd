"""Objects of remote stores on a local disk, within a byte limit, shared by all loaders of a node.

::

    CACHE/lock             locked for the milliseconds that a decision takes; says how many bytes
                           all objects take at most
    CACHE/users/ID         what one running loader may hold at most, and a line for each object
                           that it holds; locked while it runs
    CACHE/objects/NAME     whole objects, checked
    CACHE/parts/NAME       objects on their way, as long as they will be; locked by who fetches them

All locks are `flock`: the kernel drops those of a process that dies, however it dies, and what it
held is then free to go. What is held is never evicted. Every loader says beforehand how much it
will hold at most, and is refused where the sum would exceed the limit; so no two can wait for each
other.

The number in ``lock`` is raised before an object takes its bytes, and lowered after others let go
of theirs: who dies in between leaves one that is too high. Files are counted anew when a loader
joins, and where that number would pass the limit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import ByteSize, TypeAdapter, ValidationError

from precache.errors import StorageError, UsageError
from precache.locks import LockedFile, remove_if_free

OVERHEAD = 64 << 10
"""Bytes of the limit that are set aside for the lock and empty folders."""

SHARE = 0.9
"""Of the space that a cache could take, where no limit is given."""

SPARE = 0.01
"""Of the limit, freed at once where some must go, so that files are seldom looked at: while that
is whole objects."""

BLOCK = 4096
"""Bytes that a file's size is rounded up to, as disks do."""

ENTRY = 512
"""Bytes that a file's name takes in its folder, which may be half empty."""

HEAD = 256
"""Bytes of the first line of what a user says, at most."""


def on_disk(size: int) -> int:
    """Bytes that a file of `size` takes, its name included, from its first byte on."""
    return -(-size // BLOCK) * BLOCK + ENTRY if size else 0


def said(objects: int) -> int:
    """Bytes of what a loader says of itself that holds so many objects at most."""
    return on_disk(HEAD + len(_FREE) * objects)


_FREE = b" " * 16 + b"\n"
"""The line of an object that is not held; else its digest stands there."""


def _line(name: str) -> bytes:
    # Should two have the same, one of them is held for nothing.
    return f"{xxhash.xxh3_64_hexdigest(os.fsencode(name))}\n".encode()


@dataclass(frozen=True)
class _User:
    """What a running loader says: its limit, what it takes at most and what that is for.

    Attributes
    ----------
    claim
        Bytes, those of `path` included.
    """

    path: Path
    limit: int
    claim: int
    family: str

    @property
    def nbytes(self) -> int:
        """Of what it says."""
        return on_disk(self.path.stat().st_size)

    @property
    def held(self) -> set[bytes]:
        """Lines of the objects that it holds."""
        return set(self.path.read_bytes().splitlines(keepends=True)[1:])


class DiskCache:
    """A folder of objects, and the rules for those who share it.

    Parameters
    ----------
    folder
        Made if missing. On a disk of this node: locks must hold between its processes.
    limit
        Bytes that it never exceeds. Of loaders with different limits, the lowest holds.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder.expanduser().absolute()
        self.limit = limit
        with self._translated("make"):
            for name in ("users", "objects", "parts"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)

    @classmethod
    def at(cls, folder: str | os.PathLike[str], limit: int | str | None = None) -> DiskCache:
        """As a user asks for it.

        Parameters
        ----------
        limit
            Bytes, or text such as ``200GB`` or ``1.5TiB``; by default nine tenths of what is free
            on the disk or already taken by the cache.

        Raises
        ------
        UsageError
            The limit is no number of bytes.
        """
        if limit is None:
            cache = cls(Path(folder), 0)
            with cache._translated("use"):
                taken = sum(512 * status.st_blocks for _, status in cache._files())
                limit = int(SHARE * (shutil.disk_usage(cache.folder).free + taken))
        try:
            return cls(Path(folder), int(TypeAdapter(ByteSize).validate_python(limit)))
        except ValidationError:
            raise UsageError(
                f"cache_limit is {limit!r}; give bytes, or a size such as '200GB'"
            ) from None

    def join(self, claim: int, objects: int, family: str) -> Lease:
        """Take part in the cache.

        Parameters
        ----------
        claim, objects
            Bytes that it will hold at most at a time, and objects.
        family
            What the names of the objects begin with that this loader will want again; what nobody
            wants again is evicted first.

        Raises
        ------
        UsageError
            The limit leaves no room for it.
        """
        claim += said(objects)
        with self._translated("use"), self._lock() as lock:
            users = self._users()
            others = sum(user.claim for user in users)
            limit = self._lowest(users)
            if OVERHEAD + others + claim > limit:
                raise UsageError(self._refusal(limit, claim, others, len(users)))
            room = self._room(users) - said(objects)
            _say_taken(lock, self._evict(users, room))
            return Lease(self, claim, objects, family)

    def _refusal(self, limit: int, claim: int, others: int, users: int) -> str:
        lower = f" (set by another loader; here {self.limit})" if limit < self.limit else ""
        who = "another one that shares it holds" if users == 1 else f"{users} that share it hold"
        shared = f", and {who} up to {others}" if users else ""
        return (
            f"cache_limit is {limit} bytes{lower} for {self.folder}; this loader holds up to "
            f"{claim} bytes of shards at a time{shared}; give at least {OVERHEAD + others + claim}"
        )

    # --- for leases -----------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Where an object lies once it is there."""
        return self.folder / "objects" / name

    def part(self, name: str) -> Path:
        """Where it lies on its way."""
        return self.folder / "parts" / name

    def has(self, name: str, size: int) -> bool:
        """Whether an object is there whole."""
        try:
            return self.path(name).stat().st_size == size
        except FileNotFoundError:
            return False

    def _lock(self) -> LockedFile:
        """To decide alone among all processes that share the cache."""
        return LockedFile(self.folder / "lock")

    def reserve(self, part: LockedFile, size: int) -> None:
        """Make room for an object on its way, and take it."""
        with self._translated("use"), self._lock() as lock:
            os.ftruncate(part.fileno(), 0)
            users = self._users()
            room = self._room(users)
            taken = _taken(lock)
            if taken is None or taken + on_disk(size) > room:
                taken = self._evict(users, room - on_disk(size))
            if taken + on_disk(size) > room:
                raise StorageError(
                    f"{self.folder} has no room for {size} bytes below its limit of "
                    f"{self._lowest(users)}; are there files in it that precache did not put there?"
                )
            _say_taken(lock, taken + on_disk(size))
            os.ftruncate(part.fileno(), size)

    def finish(self, name: str) -> None:
        """Make an object that is on its way one that is there."""
        with self._translated("use"), self._lock():  # who counts must see it in one place
            self.part(name).replace(self.path(name))

    def _users(self) -> list[_User]:
        """The loaders that run; what is left of others is removed."""
        users = []
        for path in (self.folder / "users").iterdir():
            with contextlib.suppress(FileNotFoundError):  # one that ends
                if not remove_if_free(path):
                    with path.open("rb") as file:
                        users.append(_User(path, **json.loads(file.readline())))
        return users

    def _lowest(self, users: list[_User]) -> int:
        """The limit that holds."""
        return min([self.limit, *(user.limit for user in users)])

    def _room(self, users: list[_User]) -> int:
        """Bytes that objects may take."""
        room = self._lowest(users) - OVERHEAD
        for user in users:
            with contextlib.suppress(FileNotFoundError):  # it ends
                room -= user.nbytes
        return room

    def _evict(self, users: list[_User], room: int) -> int:
        """Remove objects until all take no more than `room` bytes; how many they take then."""
        held = set[bytes]()
        for user in users:
            with contextlib.suppress(FileNotFoundError):  # it ends
                held |= user.held
        families = tuple({user.family for user in users})
        total, candidates = 0, []
        for path, status in self._files():
            size = on_disk(status.st_size)
            total += size
            if path.parent.name == "parts":
                candidates.append((0, 0, size, path))
            elif _line(path.name) not in held:
                # An epoch reads every shard once: the one read last is wanted again last.
                wanted = bool(families) and path.name.startswith(families)
                age = -status.st_mtime_ns if wanted else status.st_mtime_ns
                candidates.append((1 + wanted, age, size, path))
        if total <= room:
            return total
        least = room - int(SPARE * self.limit)
        for kind, _, size, path in sorted(candidates):
            if total <= room and total - size < least:
                break
            if kind == 0 and not remove_if_free(path):
                continue
            path.unlink(missing_ok=True)
            total -= size
        return total

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for place in ("objects", "parts"):
            for entry in os.scandir(self.folder / place):
                with contextlib.suppress(FileNotFoundError):  # a fetch that failed
                    yield Path(entry.path), entry.stat()

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = {
                errno.ENOSPC: "; the disk is full: free some space, or lower cache_limit",
                errno.EACCES: "; check its owner and mode, or choose another cache_dir",
                errno.EROFS: "; choose a cache_dir that can be written",
                errno.ENOLCK: "; choose a cache_dir on a disk of this machine",
            }.get(error.errno or 0, "")
            reason = error.strerror or str(error)
            told = f"cannot {doing} the cache {self.folder}: {reason}{hint}"
            raise StorageError(told) from error


_TAKEN = 21
"""Bytes that say how many objects take: digits and a line's end."""


def _taken(lock: LockedFile) -> int | None:
    """Bytes that objects take at most, as who decided last says; None where nobody does."""
    found = os.pread(lock.fileno(), _TAKEN, 0)
    return int(found) if len(found) == _TAKEN and found[:-1].isdigit() else None


def _say_taken(lock: LockedFile, nbytes: int) -> None:
    os.pwrite(lock.fileno(), f"{nbytes:0{_TAKEN - 1}d}\n".encode(), 0)


class Lease:
    """One loader's part in a cache. Safe to use from several threads; gone with its process.

    Made while nobody else decides.
    """

    def __init__(self, cache: DiskCache, claim: int, objects: int, family: str) -> None:
        self._cache = cache
        self._places: dict[str, int] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        path = cache.folder / "users" / uuid.uuid4().hex
        self._file = LockedFile(path)
        self._end = weakref.finalize(self, _leave, self._file, path, self._process)
        try:
            self._file.lock()
            head = {"limit": cache.limit, "claim": claim, "family": family}
            data = f"{json.dumps(head)}\n".encode()
            self._start = len(data)
            self._free = list(range(objects))
            # Here, and nowhere later, a disk may turn out to be full.
            os.posix_fallocate(self._file.fileno(), 0, len(data) + objects * len(_FREE))
            os.pwrite(self._file.fileno(), data + objects * _FREE, 0)
        except BaseException:
            self.close()
            raise

    def obtain(self, name: str, size: int, fetch: Callable[[int], None]) -> bool:
        """Hold an object until `give_back`, and have it there; False where it was there already.

        Parameters
        ----------
        size
            Bytes of it.
        fetch
            Writes it, whole and checked, to a descriptor. Of all that want it, one calls this.
        """
        self._hold(name)
        return not self._was_there(name, size) and self._bring(name, size, fetch)

    def _hold(self, name: str) -> None:
        cache = self._cache
        with self._lock, cache._translated("use"), cache._lock():  # no one evicts it meanwhile
            if name not in self._places:
                self._places[name] = self._free.pop()
                self._write(self._places[name], _line(name))

    def _was_there(self, name: str, size: int) -> bool:
        if not self._cache.has(name, size):
            return False
        os.utime(self._cache.path(name))
        return True

    def _bring(self, name: str, size: int, fetch: Callable[[int], None]) -> bool:
        path = self._cache.part(name)
        while True:
            # Waits while another one is fetching it.
            with self._cache._translated("write to"), LockedFile(path) as part:
                if not part.is_at(path):  # another finished it, or cleaned up, meanwhile
                    continue
                try:
                    if self._was_there(name, size):
                        return False
                    self._cache.reserve(part, size)
                    fetch(part.fileno())
                    os.fdatasync(part.fileno())
                    self._cache.finish(name)
                    return True
                finally:
                    path.unlink(missing_ok=True)

    def give_back(self, name: str) -> None:
        """Let an object be evicted; its memory maps must be gone."""
        with self._lock, self._cache._translated("use"):
            if name in self._places:
                self._write(self._places[name], _FREE)
                self._free.append(self._places.pop(name))

    def give_back_all(self) -> None:
        """Let all of them be evicted."""
        for name in list(self._places):
            self.give_back(name)

    def _write(self, place: int, line: bytes) -> None:
        os.pwrite(self._file.fileno(), line, self._start + place * len(_FREE))

    @property
    def usable(self) -> bool:
        """Whether it is this process's, and open."""
        return self._end.alive and self._process == os.getpid()

    def close(self) -> None:
        """Let go of everything."""
        try:
            self._end()
        finally:  # where Ctrl-C broke in
            self._file.close()


def _leave(file: LockedFile, path: Path, process: int) -> None:
    """The end of a lease, however it comes; in a forked child it is still the parent's."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)
        file.close()
