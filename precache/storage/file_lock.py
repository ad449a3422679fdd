"""Locks that hold between processes: `flock`, which the kernel drops however a process dies."""

from __future__ import annotations

import fcntl
import functools
import io
import os
import threading
import weakref
from pathlib import Path
from typing import Self


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, made for this user alone, and return its descriptor; a link is an error."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class LockedFile(io.FileIO):
    """A file, made if missing, that this process alone has locked while the block runs.

    The block ends by `FileIO`'s own ``__exit__``, into which no signal can break; so Ctrl-C leaves
    nothing locked, even where its traceback is kept.
    """

    def __init__(self, path: Path) -> None:
        _watch_forks()
        with _opening:
            super().__init__(path, "r+", opener=_create)
            _open.add(self)

    def lock(self) -> Self:
        """Wait for the lock of the file, and hold it until the file is closed."""
        try:
            fcntl.flock(self, fcntl.LOCK_EX)
        except BaseException:
            self.close()
            raise
        return self

    __enter__ = lock

    @property
    def is_there(self) -> bool:
        """Return True if the locked file still has its name."""
        return _is_there(self)


def _create(path: str, flags: int) -> int:
    return open_private(path, flags | os.O_CREAT)


def _is_there(file: io.FileIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(file.name))
    except FileNotFoundError:
        return False


def remove_if_free(path: Path) -> bool:
    """Remove a file that is not locked; returns whether it is gone."""
    try:
        file = io.FileIO(path, "r+", opener=open_private)
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _is_there(file):  # its owner may have removed it, and another one have come
            path.unlink()
        return True


# --- forks --------------------------------------------------------------------------------------

_open: weakref.WeakSet[LockedFile] = weakref.WeakSet()
"""Open locked files of this process, which a forked child closes."""

_opening = threading.RLock()
"""Held while a file is opened and added to `_open`, and during a fork."""


def _let_go() -> None:
    _opening.release()
    for file in list(_open):
        file.close()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(
        before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go
    )
