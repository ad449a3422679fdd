"""The one boundary to where bytes live: a path or URL -> its folder."""

from __future__ import annotations

import os
from pathlib import Path

from fsspec.core import split_protocol

from precache.errors import UsageError
from precache.folder import Folder
from precache.localdisk import LocalFolder


def local_path(uri: str | os.PathLike[str]) -> Path:
    """The path that a path or ``file://`` URI names.

    Raises
    ------
    UsageError
        For another protocol.
    """
    protocol, path = split_protocol(os.fspath(uri))
    if protocol not in (None, "file", "local"):
        raise UsageError(f"{uri}: {protocol}:// is not supported; give a local path or file://")
    return Path(path).expanduser().absolute()


def open_folder(uri: str | os.PathLike[str]) -> Folder:
    """The folder that a path or URI names; it need not exist."""
    return LocalFolder(local_path(uri))
