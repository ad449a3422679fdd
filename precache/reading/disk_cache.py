"""Cache of remote objects on a local disk, within a byte limit, for all loaders of a user.

::

    CACHE/lock             locked for the milliseconds that a decision takes; holds an upper bound
                           of the bytes of all objects
    CACHE/uses             empty; a loader locks a byte of it for each object that it has in use
    CACHE/objects/NAME     whole objects, checked
    CACHE/parts/NAME       objects being fetched, at full length; locked by the fetching thread

The kernel drops the locks of a process that dies, however it dies, and its objects can then be
evicted. An object in use is not evicted. Nothing is claimed beforehand, and nothing waits for room:
what is fetched ahead of need is refused where there is none, and what a loader needs at once is
fetched even beyond the limit.

The number in ``lock`` is raised before an object takes its bytes, and lowered after others were
removed: a process that dies in between leaves it too high. Files are counted again when a loader
comes, and when that number would pass the limit.

The folder belongs to one user and has mode 0700, so that nobody else puts files there; no link in
it is followed. A damaged object is removed and fetched again by the loader that detects it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import pwd
import re
import shlex
import shutil
import stat
import struct
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import xxhash
from pydantic import ByteSize, TypeAdapter, ValidationError

from precache.errors import StorageError, UsageError
from precache.storage.file_lock import LockedFile, open_private, remove_if_free
from precache.storage.local import Translated

log = logging.getLogger(__name__)

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

ENTRIES = ("objects", "parts", "lock", "uses")
"""Names in the folder of a cache."""

_LOCK = struct.Struct("@hhqqi")
"""``struct flock`` of 64-bit Linux, see fcntl(2)."""

OBJECT_NAME = re.compile(r"\w[\w.-]*")
"""Names that cannot lead into another folder."""


_HINTS = {
    errno.ENOSPC: "the disk is full: free some space, or lower the limit of the cache",
    errno.EACCES: "check its owner and mode, or choose another folder for the cache",
    errno.EPERM: "check its owner and mode, or choose another folder for the cache",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOLCK: "choose a folder on a disk of this machine",
}


def on_disk(size: int) -> int:
    """Bytes that a file of `size` bytes takes, its name included; 0 for an empty file."""
    return -(-size // DISK_BLOCK) * DISK_BLOCK + NAME_BYTES if size else 0


def family_of(name: str) -> str:
    """Return the part of an object's name that those of a version have in common."""
    return name.partition("-")[0]


class Uses:
    """The objects and families that a loader uses, as all processes see them.

    Each is a byte of a file, at a digest of its name, with a read lock that belongs to this open
    file (see "Open file description locks" in fcntl(2)). Where there are no such locks, an object
    in use may be evicted; its maps stay.
    """

    def __init__(self, folder: Path) -> None:
        self._file = LockedFile(folder / "uses")
        # Not `close` of this object: the garbage collector may come at any time.
        self._end = weakref.finalize(self, self._file.close)

    def begin(self, name: str) -> None:
        """Keep an object, or all of a family, from being evicted."""
        self._call("F_OFD_SETLK", fcntl.F_RDLCK, name)

    def end(self, name: str) -> None:
        """Allow an object to be evicted; its memory maps must be closed."""
        self._call("F_OFD_SETLK", fcntl.F_UNLCK, name)

    def has_others(self, name: str) -> bool:
        """Return whether another user of the cache uses an object or family."""
        return self._call("F_OFD_GETLK", fcntl.F_WRLCK, name) not in (None, fcntl.F_UNLCK)

    def _call(self, command: str, kind: int, name: str) -> int | None:
        # If two names had one digest, one of the objects would be kept without need.
        place = xxhash.xxh3_64_intdigest(os.fsencode(name)) >> 2
        number = getattr(fcntl, command, None)
        # A forked process has closed the file.
        if number is None or self._file.closed:
            return None
        with contextlib.suppress(OSError):  # such as of a sandbox's kernel
            lock = _LOCK.pack(kind, os.SEEK_SET, place, 1, 0)
            answer: int = _LOCK.unpack(fcntl.fcntl(self._file, number, lock))[0]
            return answer
        return None

    def close(self) -> None:
        """End all uses."""
        self._end()


class DiskCache:
    """A folder of objects that the loaders of a user on a node share.

    Parameters
    ----------
    folder
        Created if missing. On a disk of this node, whose locks hold between its processes.
    limit
        Bytes that the cache exceeds only for what is needed at once. Each loader keeps to its own
        limit when it comes, and when it fetches.

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
            _make_private(self.folder, names=(*ENTRIES, "lost+found"))
            self.objects, self.parts = (self.folder / name for name in ENTRIES[:2])
            _make_private(self.objects)
            _make_private(self.parts)
        self._warned = False

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
                f"the limit of a cache is {limit!r}; give bytes, or a size such as '200GB'"
            ) from None
        cache = cls(Path(folder), nbytes)
        if limit is None:
            with cache.translated("use"):
                used = sum(512 * status.st_blocks for *_, status in cache._files())
                space = shutil.disk_usage(cache.folder).free + used
                cache.limit = int(DEFAULT_LIMIT_SHARE * space)
        return cache

    @property
    def room(self) -> int:
        """Bytes that objects may take."""
        return self.limit - OVERHEAD

    def uses(self) -> Uses:
        """Return a new set of uses."""
        with self.translated("use"):
            return Uses(self.folder)

    def trim(self) -> None:
        """Evict what takes the cache beyond its limit."""
        with self.translated("use"), self.lock() as lock:
            _write_total(lock, self._evict(self.room))

    def obtain(
        self,
        uses: Uses,
        name: str,
        size: int,
        fetch: Callable[[int], None],
        is_sound: Callable[[int], bool] = lambda descriptor: True,
        *,
        at_once: bool = True,
    ) -> bool | None:
        """Fetch an object unless it is cached, and have it kept.

        Parameters
        ----------
        uses
            Gets the object.
        size
            Bytes of the object.
        fetch
            Writes the object, whole and checked, to a descriptor. Of all loaders that want it, one
            calls this.
        is_sound
            Checks an object of that size, given its descriptor; a damaged one is removed and
            fetched again.
        at_once
            Fetch it even if there is no room.

        Returns
        -------
        bool | None
            True if it was fetched, False if it was cached already; None, and no use of it, if there
            is no room for it.
        """
        if not OBJECT_NAME.fullmatch(name):
            raise StorageError(f"no object in a cache can be called {name!r}")
        fetched: bool | None = None
        try:
            with self.translated("use"):
                with self.lock():  # so that it is not being evicted
                    uses.begin(name)
                fetched = False if self._is_cached(name, size, is_sound) else None
            if fetched is None:
                fetched = self._fetch(name, size, fetch, is_sound, at_once)
            return fetched
        finally:
            if fetched is None:
                uses.end(name)

    def _fetch(
        self,
        name: str,
        size: int,
        fetch: Callable[[int], None],
        is_sound: Callable[[int], bool],
        at_once: bool,
    ) -> bool | None:
        while True:
            # The lock waits while another loader fetches the object.
            with self.translated("write to"), self._part(name) as part:
                if not part.is_there:  # another loader finished or removed it meanwhile
                    continue
                try:
                    if self._is_cached(name, size, is_sound):
                        return False
                    if not self._reserve(part, size, at_once):
                        return None
                    fetch(part.fileno())
                    os.fsync(part.fileno())
                    with self.translated("use"), self.lock():  # so that it is counted once
                        (self.parts / name).replace(self.path(name))
                    return True
                finally:
                    if part.is_there:
                        (self.parts / name).unlink(missing_ok=True)

    def _is_cached(self, name: str, size: int, is_sound: Callable[[int], bool]) -> bool:
        """Check a cached object; remove it if it is damaged."""
        try:
            with io.FileIO(self.path(name), opener=open_private) as file:
                status = os.fstat(file.fileno())
                if status.st_size == size and is_sound(file.fileno()):
                    os.utime(file.fileno())
                    return True
        except FileNotFoundError:
            return False
        with self.lock(), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path(name).lstat(), status):  # no other has taken its place
                self.path(name).unlink()
        return False

    def path(self, name: str) -> Path:
        """Path of an object once it is in the cache."""
        return self.objects / name

    def _part(self, name: str) -> LockedFile:
        """Open the file of an object to be fetched, not locked yet."""
        with self.translated("write to"), self.lock():  # or another may see it half made
            return LockedFile(self.parts / name)

    def lock(self) -> LockedFile:
        """Lock the cache, to decide alone among all processes that share it."""
        return LockedFile(self.folder / "lock")

    def _reserve(self, part: LockedFile, size: int, at_once: bool) -> bool:
        """Make room for an object to be fetched, and take it; return False if there is none."""
        with self.translated("use"), self.lock() as lock:
            os.ftruncate(part.fileno(), 0)
            total = _read_total(lock)
            if total is None or total + on_disk(size) > self.room:
                total = self._evict(self.room - on_disk(size))
            beyond = total + on_disk(size) - self.room
            if beyond > 0 and not at_once:
                _write_total(lock, total)
                return False
            if beyond > 0 and not self._warned:
                self._warned = True
                log.warning(
                    "%s exceeds its limit of %d bytes by %d, as what is read at once takes so "
                    "much, and is fetched again and again: raise it, or read less at "
                    "once, by shuffle='block' or a smaller batch_size",
                    self.folder, self.limit, beyond,
                )  # fmt: skip
            _write_total(lock, total + on_disk(size))
            os.ftruncate(part.fileno(), size)
            return True

    def _evict(self, room: int) -> int:
        """Remove objects until all take `room` bytes at most; return the bytes they then take."""
        total, candidates = 0, []
        with contextlib.closing(self.uses()) as own:
            for folder, name, status in self._files():
                size = on_disk(status.st_size)
                total += size
                if folder is self.parts:
                    candidates.append((0, 0, size, name))
                elif not own.has_others(name):
                    # An epoch reads every shard once: the one read last is needed again last.
                    wanted = own.has_others(family_of(name))
                    age = -status.st_mtime_ns if wanted else status.st_mtime_ns
                    candidates.append((1 + wanted, age, size, name))
        if total <= room:
            return total
        least = room - int(EVICTION_SHARE * self.limit)
        for kind, _, size, name in sorted(candidates):
            if total <= room and total - size < least:
                break
            if kind == 0 and not remove_if_free(self.parts / name):
                continue
            if kind:
                self.path(name).unlink(missing_ok=True)
            total -= size
        return total

    def _files(self) -> Iterator[tuple[Path, str, os.stat_result]]:
        for folder in (self.objects, self.parts):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        yield folder, entry.name, entry.stat(follow_symlinks=False)

    def translated(self, doing: str) -> Translated:
        """Translate errors of the file system in the block; they name what it was doing."""
        return Translated(self.folder, f"{doing} the cache", _HINTS)


def _make_private(folder: Path, *, names: Collection[str] = ()) -> None:
    """Make a folder that only this user can enter, or require that it is such a one.

    Parameters
    ----------
    names
        Names that it may contain; by default any.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
        folder.chmod(0o700)  # the umask took some of it
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(
            f"{folder} is a link or a file, where a folder belongs; remove it, or choose "
            "another folder for the cache"
        )
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{folder} belongs to {_user(status.st_uid)}, and this process runs as "
            f"{_user(os.geteuid())}; choose a folder of your own"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{folder} has mode {mode:04o}, so that others can put files there, and a cache "
            f"belongs to one user; run chmod 700 {shlex.quote(str(folder))}, or choose another "
            "folder for the cache"
        )
    others = sorted({path.name for path in folder.iterdir()}.difference(names)) if names else []
    if others:
        raise UsageError(
            f"{folder} has other files in it ({', '.join(map(repr, others[:3]))}), and a "
            "cache needs a folder of its own; choose another folder for the cache"
        )
    if mode != 0o700:
        folder.chmod(0o700)


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


_TOTAL_NBYTES = 21
"""Bytes of the total in the lock file: digits and a line's end."""


def _read_total(lock: LockedFile) -> int | None:
    """Upper bound of the bytes of all objects, as last written by any process; None if unset."""
    text = os.pread(lock.fileno(), _TOTAL_NBYTES, 0)
    return int(text) if len(text) == _TOTAL_NBYTES and text[:-1].isdigit() else None


def _write_total(lock: LockedFile, nbytes: int) -> None:
    os.pwrite(lock.fileno(), f"{nbytes:0{_TOTAL_NBYTES - 1}d}\n".encode(), 0)
