"""Check the place where a store is to be written: it must hold a store, or nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from precache.errors import UsageError
from precache.messages import shown
from precache.storage.backends import EXTRAS, WEB
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, address_of, open_folder
from precache.storage.remote import RemoteFolder
from precache.store.commit_log import BUILD, ROOT, read_log
from precache.store.lease import LEASES_FOLDER
from precache.store.open import possible_versions, split_uri
from precache.store.row_table import LISTINGS_FOLDER

_OWN_FOLDERS = {LEASES_FOLDER, LISTINGS_FOLDER}
_NAMED = 3
"""Foreign files that an error names."""


def require_apart(
    store: str | os.PathLike[str], source: str | os.PathLike[str], options: StorageOptions = None
) -> None:
    """Raise `UsageError` if a store cannot be written there; neither place is looked at.

    Parameters
    ----------
    source
        Place of the samples, or of the store that is copied; empty if it is unknown.
    """
    named = shown(address_of("store", store))
    if named.partition("://")[0].lower() in WEB:
        raise UsageError(
            f"{named} is on a web server, which is read only; write the store to a local folder, "
            "s3://, gs:// or az://"
        )
    if not source or os.fspath(source).startswith("python:"):
        return
    # A pattern with ** stands for all files of a folder.
    whole = re.split(r"(?:^|(?<=/))\*\*", os.fspath(source), maxsplit=1)[0] or "."
    own, other = (_parts(open_folder(uri, options)) for uri in (store, whole))
    if own != other and own[: len(other)] == other:
        raise UsageError(
            f"the store {named} lies inside of the source {shown(source)}; choose a folder outside "
            "of it"
        )
    if own != other and other[: len(own)] == own:
        raise UsageError(
            f"the source {shown(source)} lies inside of the store {named}; choose a folder for the "
            "store that holds nothing else"
        )


def open_for_writing(
    store: str | os.PathLike[str],
    source: str | os.PathLike[str],
    options: StorageOptions,
) -> Folder:
    """Open the folder of a store, to write to it; nothing is written yet.

    Parameters
    ----------
    source
        As in `require_apart`.

    Raises
    ------
    UsageError
        The folder holds something else than a store, or the source, or lies inside of that.
    """
    require_apart(store, source, options)
    named = shown(store)
    if split_uri(store, options)[1] is not None:
        raise UsageError(f"{named} names a version; give the store alone")
    folder = open_folder(store, options)
    if folder.get(ROOT) is not None:
        raise UsageError(f"{named} is a Zarr group, not a store; choose another folder")
    if folder.kind() == "file":
        raise UsageError(f"{named} is a file; choose a folder for the store")
    if read_log(folder, newest=True, appends=True).number:
        return folder
    # In a bucket those of the first objects: if they are not a store's, none is.
    listed = set(folder.names(first=True)) - {"lost+found"}
    names = sorted(name for name in listed if not name.startswith("."))
    if names and not _is_begun(folder, names):
        more = ", …" if len(names) > _NAMED else ""
        raise UsageError(
            f"{named} is not a store, and holds other files ({', '.join(names[:_NAMED])}{more}); "
            "choose a new or an empty folder"
        )
    return folder


def _parts(folder: Folder) -> tuple[str, ...]:
    """Return the parts of a folder's place, those of a local one without links."""
    if isinstance(folder, RemoteFolder):
        return EXTRAS.get(folder.protocol, folder.protocol), *folder.root.strip("/").split("/")
    return "file", *Path(os.path.realpath(str(folder))).parts


def _is_begun(folder: Folder, names: Sequence[str]) -> bool:
    """Return True if only a store has some of these names, as after a build that was cut off."""
    return not _OWN_FOLDERS.isdisjoint(names) or any(
        folder.exists(f"{name}/{part}")
        for name in possible_versions(names)
        for part in (BUILD, ROOT)
    )
