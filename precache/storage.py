"""The one boundary to where bytes live: a path or URL -> its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import split_protocol

from precache.blobs import RemoteFolder
from precache.folder import Folder
from precache.localdisk import LocalFolder

StorageOptions = Mapping[str, Any] | None


def open_folder(uri: str | os.PathLike[str], options: StorageOptions = None) -> Folder:
    """The folder that a path or URL names; it need not exist.

    Parameters
    ----------
    options
        Of the remote file system, as its fsspec class takes them; a local disk has none.
    """
    protocol, path = split_protocol(os.fspath(uri))
    if protocol in (None, "file", "local"):
        return LocalFolder(Path(path).expanduser().absolute())
    whole = os.fspath(uri) if protocol in ("http", "https") else path
    return RemoteFolder(protocol, whole.rstrip("/"), dict(options or {}))
