"""Atomic rename and exchange of folders of a local store.

Links are never followed: the link itself is moved or removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from precache.errors import StorageError
from precache.storage import local_files
from precache.storage.base import Folder
from precache.storage.local import Translated

_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOENT)


def is_link(store: Folder, name: str) -> bool:
    """Return True if a name of a local store is a symbolic link; False in a bucket."""
    path = store.local(name)
    return path is not None and path.is_symlink()


def refuse_link(store: Folder, name: str) -> None:
    """Raise `StorageError` if a folder of precache's own is a link to another place."""
    if is_link(store, name):
        raise StorageError(
            f"{store.path(name)} is a link, and precache writes and removes nothing through "
            "links; remove the link"
        )


def move(store: Folder, name: str, to: str) -> bool:
    """Move a folder; False where it is gone, or where `to` is a folder that has something in it.

    The parent of `to` is made if missing, even if another process removes it meanwhile.
    """
    source, target = _paths(store, name, to)
    with _translated(source, target):
        while True:
            target.parent.mkdir(exist_ok=True)
            try:
                source.rename(target)
            except FileNotFoundError:
                if not os.path.lexists(source):
                    return False
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                return False
            else:
                _sync(source.parent, target.parent)
                return True


def exchange(store: Folder, one: str, other: str) -> bool:
    """Exchange two folders at once; False where the file system cannot, or where one is gone."""
    first, second = _paths(store, one, other)
    with _translated(first, second):
        try:
            local_files.rename(first, second, local_files.EXCHANGE)
        except OSError as error:
            if error.errno in _UNABLE:
                return False
            raise
        _sync(first.parent, second.parent)
    return True


def remove_if_empty(store: Folder, name: str) -> None:
    """Remove a folder if it is empty; a bucket has no folders."""
    path = store.local(name)
    if path is not None:
        with contextlib.suppress(OSError):  # there is none, or something is in it
            path.rmdir()


def _paths(store: Folder, one: str, other: str) -> tuple[Path, Path]:
    first, second = store.local(one), store.local(other)
    if first is None or second is None:
        raise ValueError(f"{store} is not on a local disk")
    return first, second


def _translated(source: Path, target: Path) -> Translated:
    return Translated(f"{source} to {target}", "move", {})


def _sync(*folders: Path) -> None:
    for folder in set(folders):
        with contextlib.suppress(OSError):  # others remove it meanwhile
            local_files.sync_folder(folder)
