"""Locks that hold between processes: `flock`, which the kernel drops however a process dies."""

from __future__ import annotations

import fcntl
import functools
import io
import os
import threading
import weakref
from typing import Self

from precache.storage.private_folder import ForeignFile, OwnFolder


class LockedFile(io.FileIO):
    """A file, made if missing, that this process alone has locked while the block runs.

    The block ends by `FileIO`'s own ``__exit__``, into which no signal can break; so Ctrl-C leaves
    nothing locked, even where its traceback is kept.

    Raises
    ------
    ForeignFile
        As `OwnFolder.file`.
    """

    def __init__(self, folder: OwnFolder, name: str) -> None:
        self._folder = folder
        _watch_forks()
        with _opening:
            super().__init__(name, "r+", opener=self._create)
            _open.add(self)

    def _create(self, name: str, flags: int) -> int:
        return self._folder.descriptor_of(name, flags | os.O_CREAT)

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
        return _is_at(self, self._folder)


def _is_at(file: io.FileIO, folder: OwnFolder) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), folder.status(str(file.name)))
    except FileNotFoundError:
        return False


def remove_if_free(folder: OwnFolder, name: str) -> bool:
    """Remove a file that is not locked, or is foreign; returns whether it is gone."""
    try:
        file = folder.file(name, "r+")
    except FileNotFoundError:
        return True
    except ForeignFile:
        folder.remove(name)
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _is_at(file, folder):  # its owner may have removed it, and another one have come
            folder.remove(name)
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
