"""Files of a local disk: opened without blocking, mapped, created, linked and made durable.

A path may be whatever a stranger laid there. Only regular files are opened, and who opens one
learns where it truly lies, links resolved. Files are mapped to be read only and shared, so that a
map counts neither as committed memory nor as data of the process, however long the file is.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precache.runtime.operating_system import has_lasting_inodes
from precache.storage.base import Buffer

PARTS_A_WRITE = 1024
"""As many as Linux takes at once (IOV_MAX)."""

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_LOOK = getattr(os, "O_PATH", 0) | os.O_CLOEXEC
"""Flags to inspect a path without opening it: O_PATH, which Linux alone has."""

_SPREAD, _INT63 = 0x9E3779B97F4A7C15, (1 << 63) - 1
"""Factor that sets neighbouring inode numbers far apart: 2**64 over the golden ratio."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_NO_LINKS = frozenset(
    (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL,
     errno.EMLINK, errno.EXDEV)
)  # fmt: skip
"""Errors of a file system without hard links; EXDEV if it links only within a folder."""

_NO_SYNC = frozenset(
    (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EISDIR)
)
"""Errors of a file system that cannot sync folders."""


# --- looking and reading ------------------------------------------------------------------------


def open_regular(path: str | os.PathLike[str]) -> tuple[int, int]:
    """A descriptor of a regular file, and its size; nothing else is waited for or read.

    Raises
    ------
    OSError
        It is a folder, a FIFO, a socket or a device.
    """
    descriptor = os.open(path, _OPEN)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are read; remove it")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def look(path: str | os.PathLike[str]) -> tuple[os.stat_result, str]:
    """Return status and real path of a path, links followed; nothing is opened."""
    if not _LOOK & getattr(os, "O_PATH", 0):
        return Path(path).stat(), os.path.realpath(path)
    descriptor = os.open(path, _LOOK)
    try:
        return os.fstat(descriptor), true_path(descriptor, path)
    finally:
        os.close(descriptor)


def state_of(status: os.stat_result) -> int:
    """Return a digest (int63) that is another if a file was changed, or took another's place."""
    inode = status.st_ino if has_lasting_inodes(status.st_dev) else 0
    return (status.st_ctime_ns + inode * _SPREAD) & _INT63


def numbers_of(
    statuses: Sequence[os.stat_result | None],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sizes, times of change in nanoseconds, and states as by `state_of`: (len,) int64 each,
    -1 for None."""
    rows = [
        (-1, -1, -1) if status is None else (status.st_size, status.st_mtime_ns, state_of(status))
        for status in statuses
    ]
    sizes, mtimes, states = np.array(rows, np.int64).reshape(-1, 3).T
    return sizes, mtimes, states


def true_path(descriptor: int, path: str | os.PathLike[str]) -> str:
    """Return the real path of an open file that `path` led to."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - a Path takes as long
    except OSError:  # a system without
        return os.path.realpath(path)


def read_whole(descriptor: int, size: int, most: int | None = None) -> bytes:
    """Read an open file, releasing the interpreter's lock half as often as a file object.

    Parameters
    ----------
    most
        Bytes that are read of it.
    """
    try:
        data = os.read(descriptor, size + 1 if most is None else min(size + 1, most))
        if len(data) in (size, most):
            return data
        with open(descriptor, "rb", closefd=False) as file:
            return data + file.read(-1 if most is None else most - len(data))
    except (MemoryError, OverflowError):
        if most is not None:
            raise
        raise OSError(errno.ENOMEM, f"its {size} bytes do not fit into memory") from None


# --- mapping ------------------------------------------------------------------------------------


@functools.cache
def _libc() -> Any:
    """The C library, with the types of what maps memory."""
    library = ctypes.CDLL(None, use_errno=True)
    number, size = ctypes.c_int, ctypes.c_size_t
    library.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_long)
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = (ctypes.c_void_p, size)
    library.madvise.argtypes = (ctypes.c_void_p, size, number)
    return library


def map_memory(nbytes: int, flags: int, descriptor: int) -> int:
    """Address of a new map to read: mmap(2), which unlike Python's own holds no descriptor."""
    mapped = _libc().mmap(None, nbytes, mmap.PROT_READ, flags, descriptor, 0)
    if mapped in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number) + (_map_limit() * (number == errno.ENOMEM)))
    return int(mapped)


def _map_limit() -> str:
    """Name the kernel's limit of maps if this process has reached it."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            maps = sum(1 for _ in lines)
    except (OSError, ValueError):  # a system without
        return ""
    if maps < limit:
        return ""
    return (
        f", as this process has {maps:,} maps and vm.max_map_count allows {limit:,}; raise it: "
        f"sudo sysctl -w vm.max_map_count={4 * limit}"
    )


class _Map:
    """Memory of a map, which NumPy takes for a read-only array's own; unmapped with the last."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        # Not at exit, when other threads may still be reading.
        weakref.finalize(self, _libc().munmap, address, nbytes).atexit = False


def map_file(descriptor: int, flags: int = 0) -> np.ndarray:
    """The bytes of an open file as a read-only memory map that holds no descriptor (uint8).

    Parameters
    ----------
    flags
        Of mmap(2), beside `MAP_SHARED`.
    """
    size = os.fstat(descriptor).st_size
    if size == 0:
        return np.empty(0, np.uint8)
    try:
        address = map_memory(size, mmap.MAP_SHARED | flags, descriptor)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        # Some of FUSE share no maps; one that cannot be written to is not counted either.
        address = map_memory(size, mmap.MAP_PRIVATE | flags, descriptor)
    return np.asarray(_Map(address, size))


def will_need(data: np.ndarray, extents: Iterable[tuple[int, int]]) -> None:
    """Start reading (offset, length) ranges of a map from its disk; releases the interpreter lock.

    Of a range that is longer than the kernel reads ahead at once, it leaves out the rest.
    """
    address = data.__array_interface__["data"][0]
    for offset, length in extents:
        before = offset % mmap.PAGESIZE
        _libc().madvise(address + offset - before, length + before, mmap.MADV_WILLNEED)


# --- writing ------------------------------------------------------------------------------------


def write_durably(path: Path, parts: Iterable[Buffer]) -> None:
    """Write a file that must not exist yet."""
    with path.open("xb", buffering=0) as file:
        # Long writes leave large pages in the page cache, which readers map with few faults.
        waiting = deque(memoryview(part) for part in parts)
        while waiting:
            written = os.writev(file.fileno(), list(itertools.islice(waiting, PARTS_A_WRITE)))
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.popleft())
            if written:
                waiting[0] = waiting[0][written:]
        os.fsync(file.fileno())


def link_or_copy(descriptor: int, path: str, temporary: Path) -> None:
    """Hard-link a file that was opened at `path` to another name, or copy it if that fails."""
    try:
        os.link(true_path(descriptor, path), temporary)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one that knows no links
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_durably(temporary, [read_whole(descriptor, os.fstat(descriptor).st_size)])


def replace(temporary: Path, target: Path) -> bool:
    """Give a file its name, in place of another file of that name."""
    temporary.replace(target)
    return True


def publish(temporary: Path, target: Path) -> bool:
    """Give a file a name that is free; returns False if it is taken.

    By a hard link; on a disk without them (FAT, SMB, some of FUSE), by an empty file that takes the
    name and is then replaced. A kill between the two leaves the empty file.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            return False
        temporary.replace(target)
    return True


def make_folder(path: Path) -> None:
    """Make a folder and those above it, each synced into its parent."""
    missing: list[Path] = []
    while not path.is_dir():
        missing.insert(0, path)
        path = path.parent
    for folder in missing:
        try:
            folder.mkdir(exist_ok=True)  # by another process meanwhile
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    for folder in missing:  # after all are made, so that a journal is written once
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's names to the disk, if its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)
