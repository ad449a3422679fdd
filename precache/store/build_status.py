"""Status of a store: its current version, and builds that have begun and not committed."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from precache.errors import StorageError, StoreError
from precache.runtime.process_id import has_ended
from precache.storage.base import FileInfo, Folder
from precache.storage.open import StorageOptions, open_folder
from precache.storage.rename import is_link
from precache.store.commit_log import BUILD, ROOT, VERSION, read_commits
from precache.store.documents import Identity, LeaseDocument

DESCRIPTION = f"{BUILD}/build.json"
"""Object of a version that was begun and not committed: describes its build."""

BUILD_LEASES = f"{BUILD}/leases"
"""Folder of a version with a lease of each build that writes to it, renewed as a heartbeat."""

ALIVE_SECONDS = 100.0
"""Age of its last heartbeat below which a build is taken to be alive: three heartbeats."""


@dataclass(frozen=True)
class BuildStatus:
    """A version that is being built, or was left unfinished.

    Attributes
    ----------
    rows, shards
        Totals of the version; None if a build of an earlier release began it.
    done
        Shards that have a receipt.
    idle_seconds
        Seconds since the last receipt or heartbeat, or since the build began; below a minute while
        the build is alive.
    """

    version: str
    rows: int | None
    shards: int | None
    done: int
    idle_seconds: float | None


@dataclass(frozen=True)
class StoreStatus:
    """The current version, seconds since 1970 of its commit, and builds that have begun."""

    store: str
    version: str | None
    committed: float | None
    building: tuple[BuildStatus, ...]


def read_status(
    store: str | os.PathLike[str], storage_options: StorageOptions = None
) -> StoreStatus:
    """Read the status of a store from its objects alone, without a cluster.

    Raises
    ------
    StoreError
        There is no store, and no build has begun.
    """
    folder = open_folder(store, storage_options)
    log = read_commits(folder)
    logged = {commit.version for commit in log}
    begun = {
        name: read_build_or_none(folder.folder(name))
        for name in folder.names()
        if VERSION.fullmatch(name)
    }
    building = tuple(
        build
        for name, build in begun.items()
        if build is not None and not (name in logged and folder.exists(f"{name}/{ROOT}"))
    )
    if not log and not building:
        raise StoreError(f"there is no store at {folder}, and no build has begun there")
    current = log[-1] if log else None
    return StoreStatus(
        str(folder),
        None if current is None else current.version,
        None if current is None else current.time,
        tuple(sorted(building, key=lambda build: (build.idle_seconds or 0, build.version))),
    )


def read_build_or_none(folder: Folder) -> BuildStatus | None:
    """Return the result of `read_build`, or None if the description is damaged."""
    with contextlib.suppress(StoreError):
        return read_build(folder)
    return None


def read_build(version: Folder) -> BuildStatus | None:
    """Read how far the build of a version is; None if nothing describes its build."""
    data = version.get(DESCRIPTION)
    if data is None:
        return None
    identity = Identity.read(data, version.path(DESCRIPTION))
    if identity.version != version.name:
        return None
    receipts: list[FileInfo] = []
    with contextlib.suppress(StorageError):  # none yet, or committed at this moment
        receipts = list(version.folder(f"{BUILD}/receipts").walk())
    beats = [lease.time for lease in read_leases(version).values()]
    last = max([identity.begun or 0.0, *beats, *(f.mtime_ns / 1e9 for f in receipts)])
    rows = identity.rows
    return BuildStatus(
        identity.version,
        rows,
        None if rows is None else -(-rows // identity.rows_per_shard),
        len(receipts),
        max(0.0, time.time() - last) if last > 0 else None,
    )


def is_alive(version: Folder) -> bool:
    """Return whether a build of the version is alive, as far as the leases show."""
    return bool(live_leases(version))


def remove_scratch(version: Folder) -> None:
    """Remove the scratch objects of a version's builds; the description of the build goes last."""
    for name in [] if is_link(version, BUILD) else version.names(BUILD):
        if f"{BUILD}/{name}" != DESCRIPTION:
            version.remove(f"{BUILD}/{name}")
    version.remove(BUILD)  # if it is a link, only that


def remove_abandoned_scratch(version: Folder) -> None:
    """Remove the scratch objects of a version, unless a build of it (a repair, say) is alive."""
    if is_link(version, BUILD) or (version.exists(BUILD) and not live_leases(version)):
        remove_scratch(version)


def read_leases(version: Folder, but: str | None = None) -> dict[str, LeaseDocument]:
    """Read the leases of builds that write to a version, by name, without unreadable ones."""
    names = [
        f"{BUILD_LEASES}/{name}" for name in version.names(BUILD_LEASES) if name.endswith(".json")
    ]
    names = [name for name in names if name != but]
    leases = {}
    for name, data in zip(names, version.read_many(names, [-1] * len(names)), strict=True):
        if isinstance(data, bytes):
            with contextlib.suppress(StoreError):  # cut short, or forged
                leases[name] = LeaseDocument.read(data, version.path(name))
    return leases


def live_leases(version: Folder, but: str | None = None) -> dict[str, LeaseDocument]:
    """Return the leases of builds taken to be alive, except the one named `but`.

    `but` is the caller's own lease, renewed a moment ago. If it is given, the ages of the others
    are differences to it, by the store's own times, since clocks of machines may be wrong.
    """
    leases = read_leases(version, but)
    others = {name: lease for name, lease in leases.items() if not has_ended(lease.holder)}
    files = _lease_files(version) if others and but is not None else []
    times = {f"{BUILD_LEASES}/{file.name}": file.mtime_ns / 1e9 for file in files}
    if but in times:
        ages = {name: times[but] - times.get(name, 0.0) for name in others}
    else:
        ages = {name: abs(time.time() - lease.time) for name, lease in others.items()}
    return {name: lease for name, lease in others.items() if ages[name] < ALIVE_SECONDS}


def _lease_files(version: Folder) -> list[FileInfo]:
    with contextlib.suppress(StorageError):  # all were just removed
        return list(version.folder(BUILD_LEASES).walk())
    return []
