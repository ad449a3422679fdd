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

The folder belongs to one user, or with `shared` to a group whose members trust each other; nothing
in it is reached through links (`OwnFolder`). An object that is not what its name says is removed
and fetched again by whoever finds that out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from precache.errors import StorageError, UsageError
from precache.storage.file_lock import LockedFile, remove_if_free
from precache.storage.private_folder import ForeignFile, OwnFolder

log = logging.getLogger(__name__)

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

MOST_SAID = 64 << 20
"""Bytes of all that a user says, at most: lines for four million objects."""

NAMES = ("users", "objects", "parts", "lock")
"""In the folder of a cache."""

OBJECT_NAME = re.compile(r"\w[\w.-]*")
"""Such names lead to no other folder."""


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


Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Claim(BaseModel):
    """First line of what a running loader says: its limit, and what it takes at most for what.

    Attributes
    ----------
    claim
        Bytes, those of the loader's own file included.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    limit: Bytes
    claim: Bytes
    family: str


@dataclass(frozen=True)
class _User:
    """A running loader.

    Attributes
    ----------
    name, nbytes
        Of its file below ``users/``.
    """

    name: str
    nbytes: int
    claim: _Claim


class DiskCache:
    """A folder of objects, and the rules for those who share it.

    Parameters
    ----------
    folder
        Made if missing. On a disk of this node: locks must hold between its processes.
    limit
        Bytes that it never exceeds. Of loaders with different limits, the lowest holds.
    shared
        With the members of the folder's group.

    Raises
    ------
    UsageError
        The folder is not this user's or group's alone, or has other files in it.
    """

    def __init__(self, folder: Path, limit: int, *, shared: bool = False) -> None:
        # Links on the way to it are the user's own. Below it, none is followed.
        self.folder = Path(os.path.realpath(folder.expanduser()))
        self.limit = limit
        with self._translated("make"):
            if not self.folder.parent.exists():
                self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._root = OwnFolder(self.folder, shared=shared, names=(*NAMES, "lost+found"))
            self.users, self.objects, self.parts = map(self._root.folder, NAMES[:3])
            self._warn_of_parents()

    def _warn_of_parents(self) -> None:
        for parent in self.folder.parents:
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                log.warning(
                    "%s can be written by everybody, who may so replace the cache %s: chmod +t it, "
                    "or choose another cache_dir",
                    parent,
                    self.folder,
                )
                return

    @classmethod
    def at(
        cls,
        folder: str | os.PathLike[str],
        limit: int | str | None = None,
        *,
        shared: bool = False,
    ) -> DiskCache:
        """As a user asks for it.

        Parameters
        ----------
        limit
            Bytes, or text such as ``200GB`` or ``1.5TiB``; by default nine tenths of what is free
            on the disk or already taken by the cache.

        Raises
        ------
        UsageError
            The limit is no number of bytes; or as of the class.
        """
        try:
            nbytes = int(TypeAdapter(ByteSize).validate_python(0 if limit is None else limit))
        except ValidationError:
            raise UsageError(
                f"cache_limit is {limit!r}; give bytes, or a size such as '200GB'"
            ) from None
        cache = cls(Path(folder), nbytes, shared=shared)
        if limit is None:
            with cache._translated("use"):
                taken = sum(512 * status.st_blocks for *_, status in cache._files())
                cache.limit = int(SHARE * (shutil.disk_usage(cache.folder).free + taken))
        return cache

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
            others = sum(user.claim.claim for user in users)
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
        return self.objects.path / name

    def drop(self, name: str, status: os.stat_result) -> None:
        """Remove an object, unless another one has come in its place."""
        with self._translated("use"), self._lock(), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.objects.status(name), status):
                self.objects.remove(name)

    def part(self, name: str) -> LockedFile:
        """The file of an object on its way, not locked yet."""
        with self._translated("write to"), self._lock():  # else another may see it half made
            try:
                return LockedFile(self.parts, name)
            except ForeignFile:
                self.parts.remove(name)
                return LockedFile(self.parts, name)

    def _lock(self) -> LockedFile:
        """To decide alone among all processes that share the cache."""
        return LockedFile(self._root, "lock")

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
            self.parts.move(name, self.objects)

    def _users(self) -> list[_User]:
        """The loaders that run; what is left of others is removed."""
        users = []
        for name in self.users.names():
            with contextlib.suppress(FileNotFoundError):  # one that ends
                if not remove_if_free(self.users, name):
                    users.append(self._user(name))
        return users

    def _user(self, name: str) -> _User:
        with self.users.file(name) as file:
            nbytes = os.fstat(file.fileno()).st_size
            head, end, _ = os.pread(file.fileno(), HEAD, 0).partition(b"\n")
        try:
            claim = _Claim.model_validate_json(head if end else b"")
        except ValidationError:
            claim = None
        if claim is None or nbytes > MOST_SAID:
            raise StorageError(
                f"{self.users.path / name} is locked by a running process and is not what a loader "
                "writes; end that process, or remove the file"
            )
        return _User(name, on_disk(nbytes), claim)

    def _held(self, users: list[_User]) -> set[bytes]:
        """Lines of the objects that loaders hold."""
        held = set[bytes]()
        for user in users:
            with contextlib.suppress(FileNotFoundError), self.users.file(user.name) as file:
                held.update(file.read(user.nbytes).splitlines(keepends=True)[1:])
        return held

    def _lowest(self, users: list[_User]) -> int:
        """The limit that holds."""
        return min([self.limit, *(user.claim.limit for user in users)])

    def _room(self, users: list[_User]) -> int:
        """Bytes that objects may take."""
        return self._lowest(users) - OVERHEAD - sum(user.nbytes for user in users)

    def _evict(self, users: list[_User], room: int) -> int:
        """Remove objects until all take no more than `room` bytes; how many they take then."""
        held = self._held(users)
        families = tuple({user.claim.family for user in users})
        total, candidates = 0, []
        for folder, name, status in self._files():
            size = on_disk(status.st_size)
            total += size
            if folder is self.parts:
                candidates.append((0, 0, size, name))
            elif _line(name) not in held:
                # An epoch reads every shard once: the one read last is wanted again last.
                wanted = bool(families) and name.startswith(families)
                age = -status.st_mtime_ns if wanted else status.st_mtime_ns
                candidates.append((1 + wanted, age, size, name))
        if total <= room:
            return total
        least = room - int(SPARE * self.limit)
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

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = {
                errno.ENOSPC: "; the disk is full: free some space, or lower cache_limit",
                errno.EACCES: "; check its owner and mode, or choose another cache_dir",
                errno.EPERM: "; check its owner and mode, or choose another cache_dir",
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
        name = uuid.uuid4().hex
        self._file = LockedFile(cache.users, name)
        self._end = weakref.finalize(self, _leave, self._file, cache.users, name, self._process)
        try:
            self._file.lock()
            head = _Claim(limit=cache.limit, claim=claim, family=family)
            data = f"{head.model_dump_json()}\n".encode()
            self._start = len(data)
            self._free = list(range(objects))
            # Here, and nowhere later, a disk may turn out to be full.
            os.posix_fallocate(self._file.fileno(), 0, len(data) + objects * len(_FREE))
            os.pwrite(self._file.fileno(), data + objects * _FREE, 0)
        except BaseException:
            self.close()
            raise

    def obtain(
        self,
        name: str,
        size: int,
        fetch: Callable[[int], None],
        sound: Callable[[int], bool] = lambda descriptor: True,
    ) -> bool:
        """Hold an object until `give_back`, and have it there; False where it was there already.

        Parameters
        ----------
        size
            Bytes of it.
        fetch
            Writes it, whole and checked, to a descriptor. Of all that want it, one calls this.
        sound
            Whether an object of that size, given by its descriptor, is what was written; another
            is removed and fetched again.
        """
        if not OBJECT_NAME.fullmatch(name):
            raise StorageError(f"no object in a cache can be called {name!r}")
        self._hold(name)
        with self._cache._translated("use"):
            return not self._was_there(name, size, sound) and self._bring(name, size, fetch, sound)

    def _hold(self, name: str) -> None:
        cache = self._cache
        with self._lock, cache._translated("use"), cache._lock():  # no one evicts it meanwhile
            if name not in self._places:
                self._places[name] = self._free.pop()
                self._write(self._places[name], _line(name))

    def _was_there(self, name: str, size: int, sound: Callable[[int], bool]) -> bool:
        cache = self._cache
        try:
            with cache.objects.file(name) as file:
                status = os.fstat(file.fileno())
                if status.st_size == size and sound(file.fileno()):
                    os.utime(file.fileno())
                    return True
        except FileNotFoundError:
            return False
        except ForeignFile as foreign:
            status = foreign.status
        cache.drop(name, status)
        return False

    def _bring(
        self, name: str, size: int, fetch: Callable[[int], None], sound: Callable[[int], bool]
    ) -> bool:
        while True:
            # Waits while another one is fetching it.
            with self._cache._translated("write to"), self._cache.part(name) as part:
                if not part.is_there:  # another finished it, or cleaned up, meanwhile
                    continue
                try:
                    if self._was_there(name, size, sound):
                        return False
                    self._cache.reserve(part, size)
                    fetch(part.fileno())
                    os.fdatasync(part.fileno())
                    self._cache.finish(name)
                    return True
                finally:
                    if part.is_there:
                        self._cache.parts.remove(name)

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


def _leave(file: LockedFile, users: OwnFolder, name: str, process: int) -> None:
    """The end of a lease, however it comes; in a forked child it is still the parent's."""
    if os.getpid() == process:
        users.remove(name)
        file.close()
