"""Status of a store: its current version, and builds that have begun and not committed."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass

from precache.errors import StorageError, StoreError
from precache.messages import aligned, as_text
from precache.runtime.ordered_map import prefetch
from precache.storage.base import FileInfo, Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.commit_log import BUILD, ROOT, VERSION, read_log, short
from precache.store.json_documents import Identity
from precache.store.lease import is_built, latest
from precache.store.receipts import RECEIPTS
from precache.units import duration, local_time

DESCRIPTION = f"{BUILD}/build.json"
"""Object of a version that was begun and not committed."""

FROZEN_ROWS = f"{BUILD}/rows.parquet"
"""The row table of such a version."""

COPY = f"{BUILD}/copy.json"
"""Root of the version of which a folder is an unfinished copy."""

REMOVALS = 16
"""Objects of a bucket that are removed at the same time."""


@dataclass(frozen=True)
class BuildStatus:
    """A version that is being built, or was left unfinished.

    Attributes
    ----------
    rows, shards
        Of the whole version.
    done
        Shards that have a receipt.
    idle_seconds
        Since the last receipt or heartbeat, or the beginning.
    """

    version: str
    rows: int
    shards: int
    done: int
    idle_seconds: float


@dataclass(frozen=True)
class StoreStatus:
    """The current version, seconds since 1970 of its commit, and builds that have begun."""

    store: str
    version: str | None
    committed: float | None
    building: tuple[BuildStatus, ...]

    def __str__(self) -> str:
        current = "none yet"
        if self.version is not None and self.committed is not None:
            current = f"{self.version}, committed {local_time(self.committed)}"
        rows = [("store", self.store), ("current version", current)]
        for build in self.building:
            done = f"{build.done:,} of {build.shards:,} shards, {build.rows:,} rows in all"
            idle = f"idle for {duration(build.idle_seconds)}"
            rows.append((f"building {short(build.version)}", f"{done}; {idle}"))
        return as_text(aligned(rows))


def status(store: str | os.PathLike[str], *, storage_options: StorageOptions = None) -> StoreStatus:
    """Return the current version of a store and its unfinished builds, wherever they run.

    Parameters
    ----------
    store
        Path or URL.
    storage_options
        As in `build`.

    Raises
    ------
    StoreError
        The folder holds no store and no begun build.
    """
    folder = open_folder(store, storage_options)
    log = read_log(folder)
    begun = {
        name: read_build_or_none(folder.folder(name))
        for name in folder.names()
        if VERSION.fullmatch(name) and name not in log.removed
    }
    building = tuple(
        build
        for name, build in begun.items()
        if build is not None and not (name in log.versions and folder.exists(f"{name}/{ROOT}"))
    )
    current = log.current
    if current is None and not building:
        raise StoreError(f"there is no store at {folder}, and no build has begun there")
    return StoreStatus(
        str(folder),
        None if current is None else current.version,
        None if current is None else current.time,
        tuple(sorted(building, key=lambda build: (build.idle_seconds, build.version))),
    )


def read_description(version: Folder) -> Identity | None:
    """Read the description of a version that was begun; None if there is none.

    Raises
    ------
    StoreError
        It is damaged.
    """
    data = version.get(DESCRIPTION)
    return None if data is None else Identity.read(data, version.path(DESCRIPTION))


def read_build_or_none(folder: Folder) -> BuildStatus | None:
    """Like `read_build`; returns None, too, if the description is damaged or not ours."""
    with contextlib.suppress(StoreError):
        return read_build(folder)
    return None


def read_build(version: Folder) -> BuildStatus | None:
    """Return the progress of a version that was begun; None if nothing describes its build."""
    identity = read_description(version)
    if identity is None or identity.version != version.name:
        return None
    receipts: list[FileInfo] = []
    with contextlib.suppress(StorageError):  # none yet, or committed at this moment
        receipts = list(version.folder(RECEIPTS).walk())
    lease = latest(version)
    beat = 0.0 if lease is None else lease.time
    last = max([identity.begun, beat, *(file.mtime_ns / 1e9 for file in receipts)])
    return BuildStatus(
        identity.version,
        identity.rows,
        -(-identity.rows // identity.rows_per_shard),
        len(receipts),
        max(0.0, time.time() - last),
    )


def remove_scratch(version: Folder) -> None:
    """Remove the scratch files of a version's builds; the description of the build goes last."""
    for name in [] if version.is_link(BUILD) else version.names(BUILD):
        if f"{BUILD}/{name}" != DESCRIPTION:
            version.remove(f"{BUILD}/{name}")
    version.remove(BUILD)  # a link alone, where it is one


def remove_abandoned_scratch(version: Folder) -> None:
    """Remove the scratch files unless a build of the version is alive, such as a repair."""
    if version.is_link(BUILD) or (version.exists(BUILD) and not is_built(version)):
        remove_scratch(version)


def remove_folder(store: Folder, version: str) -> None:
    """Remove a version of which the log says that it is removed, its root first.

    A kill at any moment is safe: the next `gc` finishes the removal.
    """
    store.remove(f"{version}/{ROOT}")
    if store.local(version) is None:
        while names := store.sizes(version):
            deque(prefetch(store.remove, names, REMOVALS, 2 * REMOVALS), maxlen=0)
        return
    while store.exists(version):  # another process may put or remove files at the same time
        store.remove(version)
