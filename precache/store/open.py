"""Open a store: find the version that a URI names, and check its documents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from itertools import islice

from precache.errors import GoneError, StoreError
from precache.messages import shown
from precache.runtime.threads import Threads
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, address_of, open_folder
from precache.store.arrays import (
    ROWS_PER_CHUNK,
    SHARDS,
    shapes_name,
    version_arrays,
)
from precache.store.commit_log import (
    BUILD,
    ROOT,
    VERSION,
    Log,
    read_log,
    short,
)
from precache.store.json_documents import Attributes, LogEntry
from precache.store.tree import spare_root
from precache.store.version import (
    REPAIR_HINT,
    Version,
    gone_error,
    read_attributes,
)

OPEN_TRIES = 5
"""Times that opening is tried if the current version is removed meanwhile."""

LOOKED_AT = 3
"""Folders that are looked at to see if they are versions: others may have such names, too."""


def split_uri(
    uri: str | os.PathLike[str], storage_options: StorageOptions = None
) -> tuple[str, str | None]:
    """Split ``STORE@3f2a`` into (``STORE``, ``3f2a``); an existing path is not split."""
    text = address_of("the store", uri)
    base, at, prefix = text.rpartition("@")
    if not at or not base or "/" in prefix or open_folder(text, storage_options).exists():
        return text, None
    return base, prefix


def open(uri: str | os.PathLike[str], storage_options: StorageOptions = None) -> Version:
    """Open the current version of a store, or the one that ``STORE@prefix`` names.

    Parameters
    ----------
    uri
        A store, or one of its versions' folders.
    storage_options
        Options of a remote file system, such as ``{"endpoint_url": "http://host:9000"}``, as its
        fsspec class takes them.

    Raises
    ------
    StoreError
        There is no store or no such version, or it has another format, or its root is damaged.
    """
    return open_version(uri, storage_options)


def open_version(
    uri: str | os.PathLike[str], storage_options: StorageOptions = None, *, mends: bool = False
) -> Version:
    """Open a version as `open` does, whose name hides Python's own.

    Parameters
    ----------
    mends
        As in `open_own`: to verify a version.
    """
    base, prefix = split_uri(uri, storage_options)
    store = open_folder(base, storage_options)
    folder, document, commit = _find(store, base, prefix)
    for _ in range(OPEN_TRIES):
        try:
            return open_own(folder, document, commit, mends=mends)
        except GoneError:
            if prefix is not None or folder is store:
                raise
            folder, document, commit = _find(store, base, prefix)
    return open_own(folder, document, commit)


def _find(
    store: Folder, base: str, prefix: str | None
) -> tuple[Folder, bytes | None, LogEntry | None]:
    """Find the folder of a version; also its root if that was read, and its entry in the log.

    Parameters
    ----------
    store
        The store, or one of its versions' folders.
    """
    read = partial(read_log, store, newest=prefix is None)
    with closing(Threads(1, "precache-open")) as pool:  # remote requests run in parallel
        request = pool.submit(read) if store.local("") is None else None
        document = store.get(ROOT)
    if document is not None and prefix is not None:
        raise StoreError(f"{shown(base)} is one version, and no store; leave out @{prefix}")
    if document is not None:
        return store, document, None
    log = request.result() if request else read()
    commit = _pick(log, store, base, prefix)
    return store.folder(commit.version), None, commit


def fits(version: str, prefix: str) -> bool:
    """Return whether a version is one that `prefix` names: digits of its id, or ``ID.G`` so."""
    digits, dot, generation = prefix.partition(".")
    own, _, of_version = version.partition(".")
    return digits != "" and own.startswith(digits) and (not dot or generation == of_version)


def _pick(log: Log, store: Folder, base: str, prefix: str | None) -> LogEntry:
    base = shown(base)
    if log.current is None:
        if not store.exists():
            raise StoreError(
                f"there is no store at {base}; build one: precache build SOURCE {base}"
            )
        raise StoreError(f"{base} is not a store: it has no commits; {_hint(store)}")
    if prefix is None:
        return log.current
    known = [*log.versions]
    matches = [v for v in known if fits(v, prefix)]
    if len(matches) != 1:  # some may have been removed
        existing = set(store.names())
        known = [v for v in known if v in existing and v not in log.removed]
        matches = [v for v in known if fits(v, prefix)]
    if len(matches) != 1:
        what = "fits more than one version" if matches else "fits no version"
        names = ", ".join(short(version, 12) for version in known)
        raise StoreError(f"'{prefix}' {what} of {base}; it has {names}")
    return log.versions[matches[0]]


def _hint(store: Folder) -> str:
    if any(store.exists(f"{name}/{BUILD}") for name in possible_versions(store.names(first=True))):
        return "a build was started here: run the same precache build command to finish it"
    return "give the folder that precache build wrote"


def possible_versions(names: Iterable[str]) -> list[str]:
    """Return the first names that are those of versions' folders, at most `LOOKED_AT`."""
    return list(islice(filter(VERSION.fullmatch, names), LOOKED_AT))


def open_own(
    folder: Folder,
    document: bytes | None = None,
    commit: LogEntry | None = None,
    *,
    mends: bool = False,
) -> Version:
    """Open a version's folder by its root alone.

    Parameters
    ----------
    document
        Its root, if that was read already.
    commit
        Its entry in the log, if that was read.
    mends
        Take a damaged root, and damaged small objects, from the spare copy.

    Raises
    ------
    GoneError
        The version was removed.
    StoreError
        The root is invalid or damaged, or is not the one that was committed.
    """
    root = document or folder.get(ROOT)
    if root is None:
        raise gone_error(str(folder))
    try:
        attributes = _attributes(folder, root, commit)
    except StoreError as error:
        spare = spare_root(folder) if mends else None
        if spare is None:
            raise
        try:
            attributes = _attributes(folder, spare, commit)
        except StoreError:
            raise error from None
    return Version(
        folder,
        version_id=folder.name if VERSION.fullmatch(folder.name) else attributes.version,
        attributes=attributes,
        arrays=version_arrays(attributes, folder.path(ROOT)),
        mends=mends,
    )


def _attributes(folder: Folder, root: bytes, commit: LogEntry | None) -> Attributes:
    """Parse a root, and check that it is that of this folder's version, as it was committed."""
    where, attributes = folder.path(ROOT), read_attributes(root, folder)
    if commit is not None and commit.root not in (None, attributes.digest):
        raise StoreError(f"{where} is damaged: it is not the one that was committed; {REPAIR_HINT}")
    _require_small_objects(where, attributes)
    return attributes


def _require_small_objects(where: str, attributes: Attributes) -> None:
    """Refuse a version that claims more rows or shards than its small arrays have objects for.

    Later code takes memory for each row and shard. One object of a small array holds a million.
    """
    shards = -(-attributes.rows // attributes.rows_per_shard)
    counts = Counter(name.partition("/c/")[0] for name in attributes.objects if "/c/" in name)
    shapes = [shapes_name(name) for name, field in attributes.fields.items() if field.ragged]
    for what, count, arrays in (
        ("rows", attributes.rows, ["label", "valid", *shapes]),
        ("shards", shards, [f"{SHARDS}/{field}" for field in attributes.fields]),
    ):
        needed = -(-count // ROWS_PER_CHUNK)
        for array in arrays:
            if counts[array] < needed:
                raise StoreError(
                    f"{where} is damaged or forged: it claims {count} {what}, for which "
                    f"{array} takes {needed} objects, and has {counts[array]}"
                )
