"""Open the folder at a path or URL: the only place that chooses where bytes live."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from precache.errors import UsageError
from precache.messages import shown, url_parts
from precache.storage.base import Folder
from precache.storage.local import ANYWHERE, LocalFolder, local_path

StorageOptions = Mapping[str, Any] | None


def address_of(name: str, value: Any) -> str:
    """Return a path or URL as text.

    Raises
    ------
    UsageError
        It is neither, or has a zero byte.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"{name} is {value!r}; give a path or URL as text")
    return text


def open_folder(
    uri: str | os.PathLike[str], options: StorageOptions = None, *, follow_links: bool = False
) -> Folder:
    """The folder that a path or URL names; it need not exist.

    Parameters
    ----------
    options
        Storage options: of S3 and Azure those of `service_options`, of others those that the
        fsspec class takes; a local disk has none.
    follow_links
        Follow what leads out of the folder: links on a local disk, redirects of a web server.

    Raises
    ------
    UsageError
        No path or URL, or an empty one; a URL that names no bucket, or one of an object store
        that holds credentials.
    """
    protocol, mark, path = address_of("the address", uri).partition("://")
    if not mark or protocol in ("file", "local"):
        path = path if mark else protocol
        if not path:  # as of a shell's variable that is not set: not the current folder
            raise UsageError(f"the address is {uri!r}; give a path, such as . for this folder")
        return LocalFolder(local_path(path).absolute(), ANYWHERE if follow_links else None)
    # A local folder needs none of the libraries that these import.
    from precache.storage.backends import EXTRAS, WEB
    from precache.storage.remote import RemoteFolder

    if protocol in {*EXTRAS, *WEB} and not path.partition("/")[0]:
        place = "SERVER" if protocol in WEB else "BUCKET"
        raise UsageError(
            f"{protocol}:// names no {place.lower()}; give {protocol}://{place}/FOLDER"
        )
    if protocol in EXTRAS and ":" in url_parts(uri)[0]:
        raise UsageError(
            f"{shown(uri)} was given with credentials, which have no place in {protocol}:// URLs; "
            "give them as storage options, or as the library of this service finds them"
        )
    if protocol in WEB:
        whole = os.fspath(uri).rstrip("/")
        within = "" if follow_links else whole
        return RemoteFolder(protocol, whole, dict(options or {}), within)
    return RemoteFolder(protocol, path.rstrip("/"), dict(options or {}))
