"""Folders of a store on a local disk: which are links, and which are empty."""

from __future__ import annotations

import contextlib

from precache.storage.base import Folder


def is_link(store: Folder, name: str) -> bool:
    """Return True if a name of a local store is a symbolic link; False in a bucket."""
    path = store.local(name)
    return path is not None and path.is_symlink()


def remove_if_empty(store: Folder, name: str) -> None:
    """Remove a folder if it is empty; a bucket has no folders."""
    path = store.local(name)
    if path is not None:
        with contextlib.suppress(OSError):  # there is none, or something is in it
            path.rmdir()
