"""Remove versions that are out of use, by age and by which one is current.

Readers leave no mark in a store, so only age tells that a version is out of use. Ages are
differences of times that the store itself gave (`scan`). Unfinished builds and copies that show no
sign of life are removed by age as well. Only what is a version by its own metadata is removed;
links are neither followed nor removed.

A removal is an entry of the log: from then on no process makes the version current or builds it.
Then its bytes go, its `zarr.json` first, so that readers see that it is gone. If `gc` is killed,
the log says what the next run is to remove. An unfinished version is removed by who holds its
lease, as a build does. A build that reuses objects of a version that is being removed finds them
gone and computes them.

Scratch files in ``_build``, left by a process that was killed right after a commit, are removed
from versions that stay. So are old indexes and records of sources (``_listings``) that no version
that stays was built from.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from precache.maintenance.scan import (
    StoredFolder,
    dated_commits,
    list_objects,
    recorded_place,
    scan_folder,
    scan_store,
    store_clock,
)
from precache.maintenance.versions import current_periods
from precache.messages import as_text
from precache.runtime.integers import whole
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.build_status import COPY, remove_abandoned_scratch, remove_folder
from precache.store.commit_log import SCRATCH, Log, record_removal
from precache.store.json_documents import LogEntry
from precache.store.lease import QUIET_SECONDS, Leases, latest, remove_ended_leases
from precache.store.row_table import LISTINGS_FOLDER, listing_prefix, record_prefix
from precache.units import ago, parse_age, size

BEGUN = "its removal was not finished"
IN_USE = "in use by a process"


@dataclass(frozen=True)
class Removal:
    """A removed version.

    Attributes
    ----------
    nbytes, freed_nbytes
        Size of all its objects, and of those that no remaining hard link shares.
    """

    version: str
    why: str
    nbytes: int
    freed_nbytes: int

    def __str__(self) -> str:
        nbytes = size(self.nbytes)
        if self.freed_nbytes != self.nbytes:
            nbytes += f", of which {size(self.nbytes - self.freed_nbytes)} stay in use"
        return f"{self.version[:12]}: {self.why}; {nbytes}"


@dataclass(frozen=True)
class Kept:
    """A version that stays."""

    version: str
    why: str


@dataclass(frozen=True)
class GcResult:
    """Versions that were removed, or would be, and those that stay.

    Attributes
    ----------
    swept
        Versions that stay, from which scratch files of a killed process were removed.
    listings
        Names of removed indexes and records of sources that no version was built from that stays.
    """

    store: str
    dry_run: bool
    removed: tuple[Removal, ...]
    kept: tuple[Kept, ...]
    swept: tuple[str, ...] = ()
    listings: tuple[str, ...] = ()

    @property
    def freed_nbytes(self) -> int:
        """Bytes of the removed objects that no remaining hard link shares."""
        return sum(removal.freed_nbytes for removal in self.removed)

    def __str__(self) -> str:
        removed, kept, freed = "removed", "kept", "freed"
        if self.dry_run:
            removed, kept, freed = "would remove", "would keep", "would free"
        return as_text(
            [
                *(f"{removed} {removal}" for removal in self.removed),
                *(f"{kept} {version.version[:12]}: {version.why}" for version in self.kept),
                *(f"{removed} temporary files of {swept[:12]}" for swept in self.swept),
                *(f"{removed} {name}, an index of a former source" for name in self.listings),
                f"{freed} {size(self.freed_nbytes)}" if self.removed else "nothing to remove",
            ]
        )


def gc(
    store: str | os.PathLike[str],
    keep: int = 2,
    older_than: str | float | timedelta = "7d",
    dry_run: bool = False,
    storage_options: StorageOptions = None,
) -> GcResult:
    """Remove versions that are not current, not among the newest, and old; and stale builds.

    The commit log keeps its entries. If it is killed, the same call finishes the removal.

    Processes that read a version are not seen: choose an age longer than a training run.

    Parameters
    ----------
    store
        A store, as path or URL.
    keep
        Number of versions that stay at any age: those that were current last, including
        the current one.
    older_than
        Least age, by the store's own times: of a version, since another one replaced it; of an
        unfinished build, since its last sign of life. Such as ``"7d"`` or ``"12h"`` (s, m, h, d,
        w), or 0 for all.
    dry_run
        Write and remove nothing. Ages are then measured with this machine's clock.
    storage_options
        As `open` takes them.

    Raises
    ------
    StoreError
        There is no store.
    """
    keep = whole("keep", keep, 0)
    if isinstance(older_than, timedelta):
        older_than = f"{older_than.total_seconds():f}s"
    min_age = parse_age(older_than if isinstance(older_than, str) else f"{older_than:g}")
    folder = open_folder(store, storage_options)
    log, folders = scan_store(folder)
    clock = partial(_latest_time, folders) if dry_run else store_clock(folder)
    plan = plan_gc(log, dated_commits(folder, log), folders, keep, min_age, clock())
    kept = list(plan.kept)
    stay = {version.version for version in kept}
    listings = _stale_listings(folder, log, stay, min_age, clock())
    removed = _removals(plan.removed, folders)
    if not dry_run:
        refused = _remove(folder, log, [removal.version for removal in removed], clock)
        kept += [Kept(version, why) for version, why in refused.items()]
        removed = [removal for removal in removed if removal.version not in refused]
        for name in plan.swept:
            remove_abandoned_scratch(folder.folder(name))
        for name in listings:
            folder.remove(name)
        for name in filter(SCRATCH.fullmatch, folder.names("commits")):
            folder.remove(f"commits/{name}")
        folder.remove_if_empty(LISTINGS_FOLDER)
        remove_ended_leases(folder)
    return GcResult(str(folder), dry_run, tuple(removed), tuple(kept), plan.swept, listings)


def _stale_listings(
    store: Folder, log: Log, stay: Collection[str], min_age: float, now: float
) -> tuple[str, ...]:
    """Return the names of old indexes and records of sources of which no version stays."""
    if store.is_link(LISTINGS_FOLDER):
        return ()
    used = {listing_prefix(commit.source) for commit in log.commits if commit.version in stay}
    used |= {record_prefix(recorded_place(store.folder(version))) for version in stay}
    return tuple(
        f"{LISTINGS_FOLDER}/{item.name}"
        for item in list_objects(store.folder(LISTINGS_FOLDER))
        if item.name.partition("-")[0] + "-" not in used and now - item.mtime >= min_age
    )


def _latest_time(folders: Sequence[StoredFolder]) -> float:
    """Return this machine's time, but no earlier than any object of the store."""
    times = [item.mtime for folder in folders for item in folder.objects]
    return max(time.time(), *(mtime for mtime in times if mtime < math.inf), 0.0)


# --- the plan -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GcPlan:
    """Decisions about the folders of a store.

    Attributes
    ----------
    removed
        Name of a folder -> why it is removed; committed versions come before unfinished ones.
    swept
        Names of versions that stay, from which scratch files are removed.
    """

    removed: Mapping[str, str]
    kept: tuple[Kept, ...]
    swept: tuple[str, ...]


def plan_gc(
    log: Log,
    commits: Sequence[LogEntry],
    folders: Sequence[StoredFolder],
    keep: int,
    min_age: float,
    now: float,
) -> GcPlan:
    """Decide about each folder of a store.

    Parameters
    ----------
    commits
        Those of the log, with the store's times.
    keep
        Committed versions that stay at any age: those that were current last.
    min_age
        Seconds that a version must be out of use.
    now
        Unix time, by the store's clock.
    """
    periods = current_periods(commits)
    current = commits[-1].version if commits else None
    by_name = {folder.version: folder for folder in folders}
    committed = [name for name in periods if name in by_name and name not in log.removed]
    newest = committed[-keep:] if keep else []
    removed: dict[str, str] = {}
    kept = []
    swept = []
    for name in [*reversed(committed), *sorted(by_name.keys() - set(committed))]:
        folder = by_name[name]
        replaced = periods[name][1] if name in committed else None
        idle = folder.idle_seconds(now, committed=name in committed)
        unused, reason = _time_out_of_use(folder, replaced, idle, now)
        if name in log.removed:
            removed[name] = BEGUN
        elif name == current:
            kept.append(Kept(name, "current"))
        elif idle < QUIET_SECONDS:
            kept.append(Kept(name, f"{IN_USE}, last changed {ago(idle)}"))
        elif name in newest:
            kept.append(Kept(name, f"among the newest {keep}"))
        elif unused < min_age:
            kept.append(Kept(name, reason))
        else:
            removed[name] = reason
        stays = name in committed and name not in removed
        if stays and folder.scratch and idle >= QUIET_SECONDS:
            swept.append(name)
    return GcPlan(removed, tuple(kept), tuple(swept))


def _time_out_of_use(
    folder: StoredFolder, replaced: float | None, idle: float, now: float
) -> tuple[float, str]:
    """Return for how many seconds a folder has been out of use, and why it is."""
    if replaced is not None:
        return now - replaced, f"replaced {ago(max(0.0, now - replaced))}"
    if not folder.objects:
        return idle, "empty"
    is_copy = any(item.name == COPY for item in folder.objects)
    kind = "unfinished copy" if is_copy else "unfinished build"
    return idle, f"{kind}, last changed {ago(idle)}"


def _removals(removed: Mapping[str, str], folders: Sequence[StoredFolder]) -> list[Removal]:
    """Compute the bytes that each removal frees: those whose last hard link goes."""
    by_name = {folder.version: folder for folder in folders}
    removed_links: Counter[tuple[int, int]] = Counter()
    removals = []
    for name, why in removed.items():
        folder, freed = by_name[name], 0
        for item in folder.objects:
            if item.inode is not None:
                removed_links[item.inode] += 1
            if item.inode is None or removed_links[item.inode] == item.links:
                freed += item.size
        removals.append(Removal(folder.version, why, folder.nbytes, freed))
    return removals


# --- removal ------------------------------------------------------------------------------------


def _remove(
    store: Folder, log: Log, versions: Sequence[str], clock: Callable[[], float]
) -> dict[str, str]:
    """Remove versions whose state is still that of the plan; returns why others were kept."""
    refused: dict[str, str] = {}
    unfinished = [v for v in versions if v not in log.versions and v not in log.removed]
    with contextlib.ExitStack() as held:
        for version in unfinished:
            leases, last = Leases(store.folder(version)), latest(store.folder(version))
            folder = scan_folder(store, version, log)
            if folder is None:
                refused[version] = "another process is removing it"
            elif folder.idle_seconds(clock(), committed=False) >= QUIET_SECONDS and (
                lease := leases.take(ended=last)  # as a build of it would
            ):
                held.enter_context(lease)
            else:
                refused[version] = IN_USE
        going = [version for version in versions if version not in refused]
        log = record_removal(store, going, unfinished)
    for version in going:
        if version in log.removed:
            remove_folder(store, version)
        else:
            is_current = log.current is not None and log.current.version == version
            refused[version] = "current" if is_current else "it was committed at this moment"
    return refused
