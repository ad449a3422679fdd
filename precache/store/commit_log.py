"""The log of a store's commits: which version is current, and which were before."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from precache.errors import BuildError, StorageError, StoreError
from precache.messages import shown
from precache.storage.base import Folder
from precache.store.json_documents import CommitEntry
from precache.store.tree import seal_of

ROOT = "zarr.json"
"""Document of a version's group: written last and removed first, so only whole versions have it."""

BUILD = "_build"
"""Folder of a version for scratch objects, which are removed after its commit."""

VERSION = re.compile("[0-9a-f]{32}")
"""Names of versions' folders; a folder of such a name need not be a version."""

NUMBERED = re.compile(r"[0-9]{6,}\.json")
"""Names of objects that are created under the next number: commits, leases, log entries."""


@dataclass(frozen=True)
class Commit:
    """One entry of the log; the one with the highest number is current.

    Attributes
    ----------
    root
        Digest of the version's root.
    """

    number: int
    version: str
    parent: str | None
    time: float
    source: str | None = None
    root: str | None = None


EMPTY_SECONDS = 2.0
"""Longest wait for an entry that is being created."""

CREATE_TRIES = 3
"""Attempts to create an object twice: another build's commit may remove it in between."""


def require_create_only(folder: Folder, scratch: str) -> None:
    """Refuse a store in which an object can be created twice: one of two commits would be lost.

    Parameters
    ----------
    scratch
        Folder in the store for an object that is created and removed.

    Raises
    ------
    StorageError
        It cannot be written to, or a second create overwrites the first.
    """
    if folder.local("") is not None:  # files are published there by link, which replaces none
        return
    for _ in range(CREATE_TRIES):
        name = f"{scratch}/{uuid.uuid4().hex}"
        try:
            folder.create(name, [b"first"], scratch)
            if not folder.create(name, [b"the second"], scratch):
                return
        finally:
            with contextlib.suppress(
                StorageError
            ):  # removed later with the build's scratch objects
                folder.remove(name)
    raise StorageError(
        f"{folder} lets a create-only write overwrite an existing object, so that one of two "
        "concurrent commits would be lost: its service ignores If-None-Match; give a store on a "
        "local disk, gs://, az://, or an s3:// that has conditional writes"
    )


def read_commits(store: Folder, *, newest: bool = False) -> list[Commit]:
    """Read the log, oldest entry first; versions that it names may have been removed.

    Parameters
    ----------
    newest
        Read only the last entry.

    Raises
    ------
    StoreError
        An entry is damaged: no other says what it made current.
    """
    names = [name for name in store.names("commits") if NUMBERED.fullmatch(name)]
    names.sort(key=lambda name: int(name[:-5]))
    paths = [f"commits/{name}" for name in (names[-1:] if newest else names)]
    log: list[Commit] = []
    for path, data in zip(paths, store.read_many(paths, [-1] * len(paths)), strict=True):
        if isinstance(data, StorageError):
            raise data
        log.append(_commit(data or _once_written(store, path), store.path(path)))
    return log


def _once_written(store: Folder, path: str) -> bytes:
    """Read an entry that was found empty: on a disk without links it may be being created."""
    until = time.monotonic() + EMPTY_SECONDS
    while not (data := store.read(path)) and time.monotonic() < until:
        time.sleep(0.01)
    return data


def _commit(data: bytes, where: str) -> Commit:
    try:
        entry = CommitEntry.read(data, where)
    except StoreError as error:
        why = str(error).removeprefix(f"{where} is damaged or forged: ") if data else "it is empty"
        raise StoreError(
            f"{where} is damaged or forged: {why}; it alone "
            "says which version was made current. Versions are still read by name "
            "(STORE@VERSION). Remove that file, and before any gc run again what wrote it, "
            "precache build or precache use: a build finds its version whole, computes nothing and "
            "makes it current"
        ) from None
    number = int(where.rpartition("/")[2].removesuffix(".json"))
    return Commit(number, entry.version, entry.parent, entry.time, entry.source, entry.root)


def recordable_source(source: str) -> str | None:
    """Return the source as the log records it; None for a URL that may hold credentials."""
    if source.startswith("python:"):
        return source
    if "://" not in source:
        return str(Path(source).absolute())
    return source if shown(source) == source else None


def recorded_root(log: Sequence[Commit], version: str) -> str | None:
    """Return the digest of the root that a version was last committed with, if the log has it."""
    return next((entry.root for entry in reversed(log) if entry.version == version), None)


def recorded_source(log: Sequence[Commit], version: str) -> str | None:
    """Return the source that a version was last built from, as far as the log has it."""
    sources = (entry.source for entry in reversed(log) if entry.version == version)
    return next(filter(None, sources), None)


class ReplacedError(BuildError):
    """The version whose place another was to take is not current any more."""


def append_entry(
    store: Folder,
    version: str,
    source: str | None = None,
    replaces: str | None = None,
    since: int | None = None,
) -> Commit:
    """Append the next entry; of two concurrent committers, one gets the number after the other's.

    A version that is current already gets another entry only if it was built from another source,
    or has another root; that entry differs from the last in nothing else.

    Parameters
    ----------
    replaces
        The version that must be current at that moment; by default any.
    since
        The number of an entry. If `version` was current at it or later, and has been replaced,
        nothing is appended.

    Raises
    ------
    ReplacedError
        Neither `replaces` nor `version` itself is current.
    """
    number = 0
    while True:
        root = seal_of(store.get(f"{version}/{ROOT}") or b"")
        log = read_commits(store)
        last = log[-1] if log else None
        was_current = since is not None and any(
            entry.version == version and entry.number >= since for entry in log
        )
        if last is not None and last.version != version and was_current:
            return last
        if last is not None and last.version == version:
            same_root = root in (None, last.root)
            if same_root and source in (None, recorded_source(log, version)):
                return last
            parent, began = last.parent, last.time
        elif replaces is not None and (last is None or last.version != replaces):
            now = f"version {last.version[:12]}" if last else "no version"
            raise ReplacedError(
                f"{now} of {store} is current, and no longer {replaces[:12]}, of which a child was "
                "built; refresh it again"
            )
        else:
            parent, began = last.version if last else None, time.time()
        entry = CommitEntry(version=version, root=root, parent=parent, time=began, source=source)
        number = max(number, last.number if last else 0) + 1
        name, data = f"commits/{number:06d}.json", entry.to_json()
        scratch = f"{version}/{BUILD}/tmp"
        try:
            require_create_only(store, scratch)
            created = store.create(name, [data], scratch=scratch)
        except StorageError:
            if last is None or last.version != version:
                raise
            return last  # a store that cannot be written to is current as it is
        if created:
            return Commit(number, version, parent, began, source, root)


def append_commit(
    store: Folder,
    version: str,
    source: str | None = None,
    replaces: str | None = None,
    since: int | None = None,
) -> Commit:
    """Make a complete version the current one.

    A version may be removed until the log names it as current. A process that removes one reads
    the log again after removing its `zarr.json`, so that one of the two processes sees the other.

    Parameters
    ----------
    source
        The source that it was built from, as `recordable_source` returns it.
    replaces, since
        As in `append_entry`.

    Raises
    ------
    ReplacedError
        As by `append_entry`.
    StorageError
        The version was removed meanwhile; the version that was current before is current again.
    """
    commit = append_entry(store, version, source, replaces, since)
    if commit.version != version or store.exists(f"{version}/{ROOT}"):
        return commit
    if commit.parent is not None and store.exists(f"{commit.parent}/{ROOT}"):
        with contextlib.suppress(ReplacedError):
            append_entry(store, commit.parent, replaces=version)
    raise StorageError(
        f"version {version} of {store} was removed while it was made current; run the same "
        "command again"
    )
