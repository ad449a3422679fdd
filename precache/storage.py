"""The one boundary to where bytes live: a path or URL -> its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import split_protocol

from precache.blobs import RemoteFolder
from precache.errors import UsageError
from precache.filesystems import EXTRAS, WEB
from precache.folder import Folder
from precache.localdisk import ANYWHERE, LocalFolder

StorageOptions = Mapping[str, Any] | None


def open_folder(
    uri: str | os.PathLike[str], options: StorageOptions = None, *, follow_links: bool = False
) -> Folder:
    """The folder that a path or URL names; it need not exist.

    Parameters
    ----------
    options
        Of the remote file system, as its fsspec class takes them; a local disk has none.
    follow_links
        Follow links on a local disk that lead out of the folder.

    Raises
    ------
    UsageError
        A URL that names no bucket.
    """
    protocol, path = split_protocol(os.fspath(uri))
    if protocol in (None, "file", "local"):
        return LocalFolder(Path(path).expanduser().absolute(), ANYWHERE if follow_links else None)
    if protocol in EXTRAS and not path.strip("/"):
        raise UsageError(f"{protocol}:// names no bucket; give {protocol}://BUCKET/FOLDER")
    whole = os.fspath(uri) if protocol in WEB else path
    return RemoteFolder(protocol, whole.rstrip("/"), dict(options or {}))


def shown(uri: str | os.PathLike[str]) -> str:
    """A path or URL without user, password, query and fragment, any of which may be a secret."""
    scheme, mark, rest = os.fspath(uri).partition("://")
    if not mark:
        return scheme
    # Not by urlsplit, which refuses some of what a user may have mistyped.
    host, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
