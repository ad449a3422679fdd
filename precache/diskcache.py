"""Objects of remote stores on a local disk, within a byte limit, shared by all loaders of a node.

::

    CACHE/lock             locked for the milliseconds that a decision takes
    CACHE/users/ID         what one running loader may hold and holds; locked while it runs
    CACHE/objects/NAME     whole objects, checked
    CACHE/parts/NAME       objects on their way, as long as they will be; locked by who fetches them

All locks are `flock`: the kernel drops those of a process that dies, however it dies, and what it
held is then free to go. What is held is never evicted. Every loader says beforehand how much it
will hold at most, and is refused where the sum would exceed the limit; so no two can wait for each
other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from precache.errors import StorageError, UsageError

OVERHEAD = 64 << 10
"""Bytes of the limit that are set aside for folders, locks and what users say of themselves."""

SHARE = 0.9
"""Of the space that a cache could take, where no limit is given."""

BLOCK = 4096
"""Bytes that a file's size is rounded up to, as disks do."""


def on_disk(size: int) -> int:
    """Bytes that a file of `size` takes."""
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True)
class _User:
    """What a running loader says: its limit, what it may hold at most, what it holds."""

    limit: int
    claim: int
    family: str
    held: frozenset[str]


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
        with _translated(self.folder, "make"):
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
            with _translated(cache.folder, "use"):
                taken = sum(512 * status.st_blocks for _, status in cache._files())
                limit = int(SHARE * (shutil.disk_usage(cache.folder).free + taken))
        try:
            return cls(Path(folder), int(TypeAdapter(ByteSize).validate_python(limit)))
        except ValidationError:
            raise UsageError(
                f"cache_limit is {limit!r}; give bytes, or a size such as '200GB'"
            ) from None

    def join(self, claim: int, family: str) -> Lease:
        """Take part in the cache, holding at most `claim` bytes at a time.

        Parameters
        ----------
        family
            What the names of the objects begin with that this loader will want again; what nobody
            wants again is evicted first.

        Raises
        ------
        UsageError
            The limit leaves no room for it.
        """
        with self._decision():
            users = self._users()
            others = sum(user.claim for user in users)
            limit = min([self.limit, *(user.limit for user in users)])
            if OVERHEAD + others + claim > limit:
                raise UsageError(self._refusal(limit, claim, others, len(users)))
            lease = Lease(self, claim, family)
            self._evict(limit - OVERHEAD)
            return lease

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

    def has(self, name: str, size: int) -> bool:
        """Whether an object is there whole."""
        try:
            return self.path(name).stat().st_size == size
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _decision(self) -> Iterator[None]:
        """Alone among all processes that share the cache."""
        with _translated(self.folder, "use"), _locked(self.folder / "lock"):
            yield

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[int]:
        """The only open descriptor of an object on its way; waits while another one is fetching."""
        path = self.folder / "parts" / name
        while True:
            with _locked(path) as descriptor:
                if not _is_at(descriptor, path):  # another finished it, or cleaned up, meanwhile
                    continue
                try:
                    yield descriptor
                finally:
                    path.unlink(missing_ok=True)
                return

    def reserve(self, descriptor: int, size: int) -> None:
        """Make room for an object on its way, and take it."""
        with self._decision():
            os.ftruncate(descriptor, 0)
            limit = min([self.limit, *(user.limit for user in self._users())])
            if self._evict(limit - OVERHEAD - on_disk(size)) > 0:
                raise StorageError(
                    f"{self.folder} has no room for {size} bytes below its limit of {limit}; "
                    "are there files in it that precache did not put there?"
                )
            os.ftruncate(descriptor, size)

    def finish(self, name: str) -> None:
        """Make an object that is on its way one that is there."""
        with self._decision():  # who counts must see it in one place
            (self.folder / "parts" / name).replace(self.path(name))

    def _users(self) -> list[_User]:
        """The loaders that run; what is left of others is removed."""
        users = []
        for path in (self.folder / "users").iterdir():
            with contextlib.suppress(FileNotFoundError):  # one that ends
                if not _remove_if_free(path):
                    said: dict[str, Any] = json.loads(path.read_bytes())
                    held = frozenset(said["held"])
                    users.append(_User(said["limit"], said["claim"], said["family"], held))
        return users

    def _evict(self, room: int) -> int:
        """Remove objects until all take no more than `room` bytes; how many bytes are too many."""
        users = self._users()
        held = {name for user in users for name in user.held}
        families = tuple({user.family for user in users})
        total, candidates = 0, []
        for path, status in self._files():
            size = on_disk(status.st_size)
            total += size
            if path.parent.name == "parts":
                candidates.append((0, 0, size, path))
            elif path.name not in held:
                # An epoch reads every shard once: the one read last is wanted again last.
                wanted = bool(families) and path.name.startswith(families)
                age = -status.st_mtime_ns if wanted else status.st_mtime_ns
                candidates.append((1 + wanted, age, size, path))
        for kind, _, size, path in sorted(candidates):
            if total <= room:
                break
            if kind == 0 and not _remove_if_free(path):
                continue
            path.unlink(missing_ok=True)
            total -= size
        return max(0, total - room)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for place in ("objects", "parts"):
            for entry in os.scandir(self.folder / place):
                with contextlib.suppress(FileNotFoundError):  # a fetch that failed
                    yield Path(entry.path), entry.stat()


class Lease:
    """One loader's part in a cache. Safe to use from several threads; gone with its process."""

    def __init__(self, cache: DiskCache, claim: int, family: str) -> None:
        self._cache = cache
        self._said = {"limit": cache.limit, "claim": claim, "family": family}
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._path = cache.folder / "users" / uuid.uuid4().hex
        self._descriptor = _lock(self._path)
        self._process = os.getpid()
        self._end = weakref.finalize(self, _leave, self._descriptor, self._path, self._process)
        try:
            self._say()
        except OSError:
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
        with self._changes():
            self._held.add(name)
        if self._was_there(name, size):
            return False
        with _translated(self._cache.folder, "write to"), self._cache.part(name) as part:
            if self._was_there(name, size):
                return False
            self._cache.reserve(part, size)
            fetch(part)
            os.fdatasync(part)
            self._cache.finish(name)
            return True

    def _was_there(self, name: str, size: int) -> bool:
        if not self._cache.has(name, size):
            return False
        os.utime(self._cache.path(name))
        return True

    def give_back(self, name: str) -> None:
        """Let an object be evicted; its memory maps must be gone."""
        with self._changes():
            self._held.discard(name)

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        with self._lock, self._cache._decision():
            yield
            self._say()

    def _say(self) -> None:
        data = json.dumps({**self._said, "held": sorted(self._held)}).encode()
        os.posix_fallocate(self._descriptor, 0, len(data))  # all or nothing, where a disk is full
        os.ftruncate(self._descriptor, os.pwrite(self._descriptor, data, 0))

    @property
    def usable(self) -> bool:
        """Whether it is this process's, and open."""
        return self._end.alive and self._process == os.getpid()

    def close(self) -> None:
        """Let go of everything."""
        self._end()


# --- locks --------------------------------------------------------------------------------------

_locks: set[int] = set()
"""Locked descriptors of this process, which a forked child must not keep locked."""


def _let_go() -> None:
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_let_go)


def _lock(path: Path) -> int:
    """A descriptor of the file, which is made if missing, with a lock that nobody else has."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    _locks.add(descriptor)
    return descriptor


def _unlock(descriptor: int) -> None:
    if descriptor in _locks:  # a forked child has none of them
        _locks.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # though a child may have inherited it
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = _lock(path)
    try:
        yield descriptor
    finally:
        _unlock(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_if_free(path: Path) -> bool:
    """Remove a file that nobody has locked; whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _leave(descriptor: int, path: Path, process: int) -> None:
    """The end of a lease, however it comes; in a forked child it is still the parent's."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)
        _unlock(descriptor)


@contextlib.contextmanager
def _translated(folder: Path, doing: str) -> Iterator[None]:
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
        raise StorageError(f"cannot {doing} the cache {folder}: {reason}{hint}") from error
