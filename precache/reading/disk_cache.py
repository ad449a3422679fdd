"""Cache of remote objects on a local disk, within a byte limit, for all loaders of a user.

::

    CACHE/lock             locked for the milliseconds that a decision takes; holds an upper bound
                           of the bytes of all objects
    CACHE/versions/ID      empty; locked by the loaders of a version, as long as they live
    CACHE/objects/NAME     whole objects, checked; modified when a loader last read it, or in the
                           future while one is about to
    CACHE/parts/NAME       objects being fetched, at full length; locked by the fetching thread

A loader maps an object as it arrives, and eviction only unlinks: what is mapped stays readable, and
its bytes are free once it is unmapped. So no object is locked. What a loader is about to read is
not evicted while it lives, or for `KEPT_SECONDS` if others of its version do.

Nothing waits for room: what is fetched ahead of need is refused where there is none, and what a
loader needs at once is fetched even beyond the limit.

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
import itertools
import logging
import os
import pwd
import re
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from precache.errors import StorageError, UsageError
from precache.runtime.integers import whole
from precache.storage.file_lock import LockedFile, open_private, remove_if_free
from precache.storage.local import Translated, local_path

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

KEPT_SECONDS = 3600
"""Time for which an object that a loader is about to read is not evicted."""

ENTRIES = ("objects", "parts", "versions", "lock")
"""Names in the folder of a cache; the last one is a file."""

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


class DiskCache:
    """A folder of objects that the loaders of a user on a node share.

    Parameters
    ----------
    folder
        Created if missing. On a disk of this node, whose locks hold between its processes.
    limit
        Bytes, or text such as ``200GB`` or ``1.5TiB``, that the cache exceeds only for what is
        needed at once; by default nine tenths of what is free on the disk or already taken by the
        cache. Each loader keeps to its own limit when it comes, and when it fetches.

    Raises
    ------
    UsageError
        The limit is not a number of bytes; others than this user can write to the folder, or it
        has other files in it.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | str | None = None) -> None:
        try:
            given = limit if isinstance(limit, str | None) else whole("limit", limit)
            self.limit = int(TypeAdapter(ByteSize).validate_python(0 if given is None else given))
        except (UsageError, ValidationError):
            raise UsageError(
                f"the limit of a cache is {limit!r}; give bytes, or a size such as '200GB'"
            ) from None
        # Links in the path to the folder are the user's own; below it, none is followed.
        self.folder = Path(os.path.realpath(local_path(folder)))
        self._warned = False
        with self.translated("make"):
            if not self.folder.parent.exists():
                self.folder.parent.mkdir(parents=True, exist_ok=True)
            _make_private(self.folder, names=(*ENTRIES, "lost+found"))
            self.objects, self.parts, self.versions = (self.folder / n for n in ENTRIES[:-1])
            for place in (self.objects, self.parts, self.versions):
                _make_private(place)
        if limit is None:
            with self.translated("use"):
                files = itertools.chain(_files(self.objects), _files(self.parts))
                used = sum(512 * status.st_blocks for _, status in files)
                space = shutil.disk_usage(self.folder).free + used
                self.limit = int(DEFAULT_LIMIT_SHARE * space)

    @property
    def room(self) -> int:
        """Bytes that objects may take."""
        return self.limit - OVERHEAD

    def join(self, version: str) -> LockedFile:
        """Evict what takes the cache beyond its limit, and keep objects of a version.

        Between epochs as well, they are evicted after those of versions that no loader reads.

        Returns
        -------
        LockedFile
            To be closed by a loader that leaves the cache.
        """
        path = self.versions / _checked(version)
        with self.translated("use"), self.lock() as lock:
            _write_total(lock, self._evict(self.room))
            if remove_if_free(path):  # loaders that died were about to read some
                for name, status in _files(self.objects):
                    if _version_of(name) == version and _is_kept(status):
                        self.release(name)
            file = LockedFile(path)
            fcntl.flock(file, fcntl.LOCK_SH)
            return file

    def obtain(
        self,
        name: str,
        size: int,
        fetch: Callable[[int], None],
        use: Callable[[int], bool] = lambda descriptor: True,
        *,
        at_once: bool = True,
    ) -> bool | None:
        """Fetch an object unless it is cached, and keep it until it is released.

        Parameters
        ----------
        size
            Bytes of the object.
        fetch
            Writes the object, whole and checked, to a descriptor. Of all loaders that want it, one
            calls this.
        use
            Maps a cached object of that size, given its descriptor; returns False for a damaged
            one, which is removed and fetched again.
        at_once
            Fetch it even if there is no room.

        Returns
        -------
        bool | None
            True if it was fetched, False if it was cached already, None if there is no room for it.
        """
        _checked(name)
        fetched = False
        while True:
            with self.translated("use"):
                if self._is_cached(name, size, use):
                    return fetched
            # The lock waits while another loader fetches the object.
            with self.translated("write to"), self._part(name) as part:
                try:
                    if not part.is_there or self.path(name).exists():
                        continue  # another loader finished or removed it meanwhile
                    if not self._reserve(part, size, at_once):
                        return None
                    fetch(part.fileno())
                    os.fsync(part.fileno())
                    with self.translated("use"), self.lock():  # so that it is counted once
                        _keep(part.fileno())
                        (self.parts / name).replace(self.path(name))
                    fetched = True
                finally:
                    if part.is_there:
                        (self.parts / name).unlink(missing_ok=True)

    def release(self, name: str) -> None:
        """Let an object be evicted, as it was read."""
        with contextlib.suppress(OSError):  # such as of one that was evicted
            os.utime(self.path(name), follow_symlinks=False)

    def _is_cached(self, name: str, size: int, use: Callable[[int], bool]) -> bool:
        """Check and keep a cached object; remove it if it is damaged."""
        try:
            with io.FileIO(self.path(name), opener=open_private) as file:
                status = os.fstat(file.fileno())
                if status.st_size == size and use(file.fileno()):
                    _keep(file.fileno())
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
        read = {path.name for path in self.versions.iterdir() if not remove_if_free(path)}
        for name, status in _files(self.parts):
            candidates.append((0, 0, on_disk(status.st_size), name))
        for name, status in _files(self.objects):
            # An epoch reads every shard once: the one read last is needed again last.
            is_read = _version_of(name) in read
            age = -status.st_mtime_ns if is_read else status.st_mtime_ns
            size = on_disk(status.st_size)
            if is_read and _is_kept(status):
                total += size
            else:
                candidates.append((1 + is_read, age, size, name))
        total += sum(size for _, _, size, _ in candidates)
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

    def translated(self, doing: str) -> Translated:
        """Translate errors of the file system in the block; they name what it was doing."""
        return Translated(self.folder, f"{doing} the cache", _HINTS)


def _checked(name: str) -> str:
    """Return a name that cannot lead into another folder."""
    if not OBJECT_NAME.fullmatch(name):
        raise StorageError(f"no object in a cache can be called {name!r}")
    return name


def _version_of(name: str) -> str:
    """Return the part of an object's name that those of a version have in common."""
    return name.partition("-")[0]


def _keep(descriptor: int) -> None:
    """Keep an object from being evicted for `KEPT_SECONDS`."""
    until = time.time_ns() + KEPT_SECONDS * 10**9
    os.utime(descriptor, ns=(until, until))


def _is_kept(status: os.stat_result) -> bool:
    left = status.st_mtime_ns - time.time_ns()
    return 0 < left <= KEPT_SECONDS * 10**9  # later ones are of a clock that was set back


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                yield entry.name, entry.stat(follow_symlinks=False)


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
