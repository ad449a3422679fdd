"""Remove versions that are out of use, by age and by which one is current.

Readers leave no mark in a store, so only age tells that a version is out of use. Ages are
differences of times that the store itself gave (`scan`). Unfinished builds and copies (``_pull``)
that show no sign of life are removed by age as well. Only what is a version by its own metadata is
removed; links are neither followed nor removed. A version is made unreachable before its bytes go:

- On a local disk its folder is renamed into ``_gc`` and removed there.
- In a bucket its `zarr.json`, or whatever else marks it as ours, is copied to ``_gc`` and removed;
  then the rest goes.

Then the log is read again. A build that makes the version current in the meantime checks, after its
entry, that the version exists (`commit_log.append_commit`). So one of the two notices the other,
and a version that has become current is put back. Both hold the lease to decide about the version,
so no other run removes what this one puts back. ``_gc`` records what was in progress when a process
was killed, and the next run finishes it. A build that reuses objects of a version that is being
removed finds them gone and computes them; a build that loses objects of its own notices at its
commit (`precache_workers.driver.commit`).

Scratch files in ``_build``, left by a process that was killed right after a commit, are removed
from versions that stay. So are old indexes and records of sources (``_listings``) that no version
that stays was built from.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from precache.errors import BuildError, StoreError
from precache.maintenance.scan import (
    COPIES,
    TRASH,
    StoredVersion,
    dated_log,
    list_objects,
    pull_lease_name,
    recorded_place,
    recorded_version,
    scan_folder,
    scan_store,
    store_clock,
)
from precache.maintenance.versions import current_periods
from precache.messages import as_text
from precache.runtime.integers import whole
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, open_folder
from precache.storage.rename import is_link, move, refuse_link, remove_if_empty
from precache.store.build_status import DESCRIPTION, remove_abandoned_scratch
from precache.store.commit_log import BUILD, ROOT, VERSION, Commit, read_commits
from precache.store.lease import (
    QUIET_SECONDS,
    ExclusiveLease,
    NamedLease,
    decision_lease,
    remove_ended_leases,
)
from precache.store.row_table import LISTINGS_FOLDER, listing_prefix, record_prefix
from precache.units import ago, parse_age, size

_MOVED = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}")
"""Names below ``_gc`` on a local disk; in a bucket they are version ids."""

REMOVALS = 16
"""Objects of a bucket that are removed at the same time."""


@dataclass(frozen=True)
class Removal:
    """A removed version.

    Attributes
    ----------
    nbytes, freed_nbytes
        Size of all its objects, and of those that no remaining hard link shares.
    place
        Name of the removed folder below the store: the version, or a copy in progress.
    """

    version: str
    why: str
    nbytes: int
    freed_nbytes: int
    place: str

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
    refuse_link(folder, TRASH)
    if not dry_run:
        _finish_interrupted_removals(folder)
    log = read_commits(folder)
    folders = scan_store(folder, log)
    if not log and all(item.link for item in folders):
        raise StoreError(f"there is no store at {folder}, and no build has started there")
    clock = partial(_latest_time, folders) if dry_run else store_clock(folder)
    plan = plan_gc(dated_log(folder, log), folders, keep, min_age, clock())
    kept = list(plan.kept)
    stay = {version.version for version in kept}
    listings = _stale_listings(folder, log, stay, min_age, clock())
    removed = _removals(plan.removed, folders)
    if not dry_run:
        done = []
        for removal in removed:
            with decision_lease(folder, removal.version) as decision:
                try:
                    refusal = _remove(folder, removal.place, clock, decision)
                except BuildError:  # the lease was lost
                    refusal = "in use by a process"
            if refusal:
                kept.append(Kept(removal.version, refusal))
            else:
                done.append(removal)
        removed = done
        for name in plan.swept:
            remove_abandoned_scratch(folder.folder(name))
            if folder.local("") is None:
                folder.remove(f"{COPIES}/{name}")
        for name in listings:
            folder.remove(name)
        for name in (TRASH, COPIES, LISTINGS_FOLDER):
            remove_if_empty(folder, name)
        remove_ended_leases(folder)
    return GcResult(str(folder), dry_run, tuple(removed), tuple(kept), plan.swept, listings)


def _stale_listings(
    store: Folder, log: Sequence[Commit], stay: Collection[str], min_age: float, now: float
) -> tuple[str, ...]:
    """Return the names of old indexes and records of sources of which no version stays."""
    if is_link(store, LISTINGS_FOLDER):
        return ()
    used = {listing_prefix(commit.source) for commit in log if commit.version in stay}
    used |= {record_prefix(recorded_place(store.folder(version))) for version in stay}
    return tuple(
        f"{LISTINGS_FOLDER}/{item.name}"
        for item in list_objects(store.folder(LISTINGS_FOLDER))
        if item.name.partition("-")[0] + "-" not in used and now - item.mtime >= min_age
    )


def _latest_time(folders: Sequence[StoredVersion]) -> float:
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
    log: Sequence[Commit], folders: Sequence[StoredVersion], keep: int, min_age: float, now: float
) -> GcPlan:
    """Decide about each folder of a store.

    Parameters
    ----------
    log
        Oldest first, with the store's times.
    keep
        Committed versions that stay at any age: those that were current last.
    min_age
        Seconds that a version must be out of use.
    now
        Unix time, by the store's clock.
    """
    periods = current_periods(log)
    current = log[-1].version if log else None
    by_name = {folder.name: folder for folder in folders if not folder.link}
    committed = [name for name in periods if name in by_name and by_name[name].complete]
    newest = committed[-keep:] if keep else []
    removed: dict[str, str] = {}
    kept = []
    swept = []
    for name in [*reversed(committed), *sorted(by_name.keys() - set(committed))]:
        folder = by_name[name]
        replaced = periods[name][1] if name in committed else None
        idle = folder.idle_seconds(now, committed=name in committed)
        unused, reason = _time_out_of_use(folder, replaced, idle, now)
        if name == current:
            kept.append(Kept(name, "current"))
        elif idle < QUIET_SECONDS:
            kept.append(Kept(folder.version, f"in use by a process, last changed {ago(idle)}"))
        elif name in newest:
            kept.append(Kept(name, f"among the newest {keep}"))
        elif unused < min_age:
            kept.append(Kept(folder.version, reason))
        else:
            removed[name] = reason
        stays = name in committed and name not in removed
        if stays and folder.scratch and idle >= QUIET_SECONDS:
            swept.append(name)
    links = [Kept(f.name, "a link, which gc never touches") for f in folders if f.link]
    return GcPlan(removed, (*kept, *links), tuple(swept))


def _time_out_of_use(
    folder: StoredVersion, replaced: float | None, idle: float, now: float
) -> tuple[float, str]:
    """Return for how many seconds a folder has been out of use, and why it is."""
    if replaced is not None:
        return now - replaced, f"replaced {ago(max(0.0, now - replaced))}"
    if not folder.objects:
        return idle, "empty"
    kind = "unfinished copy" if folder.name != folder.version else "unfinished build"
    return idle, f"{kind}, last changed {ago(idle)}"


def _removals(removed: Mapping[str, str], folders: Sequence[StoredVersion]) -> list[Removal]:
    """Compute the bytes that each removal frees: those whose last hard link goes."""
    by_name = {folder.name: folder for folder in folders}
    removed_links: Counter[tuple[int, int]] = Counter()
    removals = []
    for name, why in removed.items():
        folder, freed = by_name[name], 0
        for item in folder.objects:
            if item.inode is not None:
                removed_links[item.inode] += 1
            if item.inode is None or removed_links[item.inode] == item.links:
                freed += item.size
        removals.append(Removal(folder.version, why, folder.nbytes, freed, name))
    return removals


# --- removal ------------------------------------------------------------------------------------


def _remove(store: Folder, name: str, clock: Callable[[], float], decision: ExclusiveLease) -> str:
    """Remove a folder unless its state has changed since the plan; returns why it was kept."""
    log = read_commits(store)
    folder = scan_folder(store, name, log)
    if folder is None or folder.link:
        return "another process is removing it"
    committed = folder.complete and name in current_periods(log)
    if folder.idle_seconds(clock(), committed) < QUIET_SECONDS:
        return "in use by a process"
    if log and log[-1].version == name:
        return "current"
    if not decision.is_held():
        return "in use by a process"
    if name != folder.version:
        if NamedLease(store, pull_lease_name(folder.version)).holder() is not None:
            return "in use by a process"
        store.remove(name)  # a copy in progress has no readers
        return ""
    return "current" if remove_version(store, name, decision) else ""


def remove_version(store: Folder, version: str, decision: ExclusiveLease) -> bool:
    """Remove a version; returns True if it became current in the meantime and stays.

    A kill at any moment is safe: the next `gc` finishes the removal.

    Parameters
    ----------
    decision
        The lease to decide about the version, which the caller holds.
    """
    if store.local(version) is not None:
        trash = f"{TRASH}/{version}.{uuid.uuid4().hex}"
        stays = move(store, version, trash) and _empty_trash_of(store, trash, decision)
        remove_if_empty(store, TRASH)
        return stays
    trash = f"{TRASH}/{version}"
    root = store.get(f"{version}/{ROOT}")
    store.put(trash, [root] if root is not None and recorded_version(root) == version else [])
    for name in (f"{version}/{ROOT}", f"{version}/{DESCRIPTION}", f"{COPIES}/{version}"):
        decision.require()
        store.remove(name)
    return _empty_trash_of(store, trash, decision)


def _finish_interrupted_removals(store: Folder) -> None:
    local = store.local("") is not None
    for name in store.names(TRASH):
        trash, version = f"{TRASH}/{name}", name.partition(".")[0]
        if local and _MOVED.fullmatch(name):
            with decision_lease(store, version) as decision:
                _empty_trash_of(store, trash, decision)
        elif not local and VERSION.fullmatch(name):
            with decision_lease(store, version) as decision:
                record = store.get(trash)
                if record is not None and (not record or recorded_version(record) == version):
                    _empty_trash_of(store, trash, decision)


def _empty_trash_of(store: Folder, trash: str, decision: ExclusiveLease) -> bool:
    """Remove what is in the trash for good, or put it back and return True if it is current."""
    path = store.local(trash)
    if path is not None and is_link(store, trash):  # remove only the link
        path.unlink(missing_ok=True)
        return False
    version = trash.removeprefix(f"{TRASH}/").partition(".")[0]
    log, rebuilt = read_commits(store), store.exists(f"{version}/{ROOT}")
    is_current = bool(log) and log[-1].version == version and not rebuilt
    started = rebuilt or store.exists(f"{version}/{DESCRIPTION}")
    if path is None:
        started = started or store.size(f"{COPIES}/{version}") is not None
        document = store.get(trash)
        decision.require()
        if is_current and document:
            store.put(f"{version}/{ROOT}", [document])
        elif not started:
            _remove_objects(store, version, decision)
        store.remove(trash)
        return is_current
    if is_current:
        store.remove(f"{version}/{BUILD}")  # temporary files of a committer
        with contextlib.suppress(OSError):
            os.utime(path / ROOT)  # shows readers that it was gone for a while
        if not move(store, trash, version) and not store.exists(f"{version}/{ROOT}"):
            return True  # another process rebuilds it: a later run decides
    _remove_all(store, trash)
    return is_current


def _remove_objects(store: Folder, version: str, decision: ExclusiveLease) -> None:
    """Remove a version's objects from a bucket, one by one: the lease may be lost meanwhile."""

    def remove(name: str) -> None:
        decision.require()
        store.remove(name)

    while names := store.sizes(version):
        deque(prefetch(remove, names, REMOVALS, 2 * REMOVALS), maxlen=0)


def _remove_all(store: Folder, name: str) -> None:
    """Remove a folder, even if another process removes it at the same time."""
    while store.exists(name):
        store.remove(name)
