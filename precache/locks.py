"""Locks that hold between processes: `flock`, which the kernel drops however a process dies."""

from __future__ import annotations

import fcntl
import io
import os
import threading
import weakref
from pathlib import Path
from typing import Self


class LockedFile(io.FileIO):
    """A file, made if missing, that nobody else has locked while the block runs.

    The block ends by `FileIO`'s own ``__exit__``, into which no signal can break; so Ctrl-C leaves
    nothing locked, even where its traceback is kept.
    """

    def __init__(self, path: Path) -> None:
        with _opening:
            super().__init__(path, "r+", opener=_create)
            _open.add(self)

    def lock(self) -> Self:
        """Wait until nobody else has it locked, and lock it until it is closed."""
        try:
            fcntl.flock(self, fcntl.LOCK_EX)
        except BaseException:
            self.close()
            raise
        return self

    __enter__ = lock

    def is_at(self, path: Path) -> bool:
        """Whether it is still the file at a path."""
        return _is_at(self, path)


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def remove_if_free(path: Path) -> bool:
    """Remove a file that nobody has locked; whether it is gone."""
    try:
        file = path.open("r+b", buffering=0)
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _is_at(file, path):  # its owner may have removed it, and another one have come
            path.unlink(missing_ok=True)
        return True


# --- forks --------------------------------------------------------------------------------------

_open: weakref.WeakSet[LockedFile] = weakref.WeakSet()
"""Those of this process, which a forked child must not keep locked."""

_opening = threading.RLock()
"""Held from before one is open until it is among them, and by who forks."""


def _let_go() -> None:
    _opening.release()
    for file in list(_open):
        file.close()


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go
)
