"""Removal of versions that nobody is to read any more, by age and by what is current.

Readers leave no mark in a store, so that age alone tells, by the times that the store itself gave
(`places`). What has no commit, and shows no sign of life, goes by age as well. Only what is a
version by its own metadata is removed, and links are neither followed nor removed. A version is put
out of reach before its bytes go:

- On a local disk its folder is moved into ``_gc``, at once and whole, and removed there.
- In a bucket its `zarr.json`, or what else tells that it is ours, is copied to ``_gc`` and taken
  away; then the rest goes.

Then the log is read once more. A build that makes the version current meanwhile looks, after its
entry, whether the version is there (`commits.append_commit`); so one of the two sees the other,
and a version that was current in that moment is put back. Both are done under the claim to decide
about the version: no other run removes what this one puts back. Whatever was under way when a
process was killed is told by ``_gc``, and the next run ends it. A build that takes objects over
from a version on its way out finds them gone and computes them; one that loses objects of its own
notes it at its commit (`precache_workers.driver.commit`).

Copies under way (``_pull``) go as builds do. What a process that was killed right after a commit
left in ``_build`` is removed from versions that stay.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from precache.errors import StoreError, UsageError
from precache.maintenance.scan import (
    COPIES,
    TRASH,
    StoredVersion,
    dated_log,
    look,
    look_around,
    pull_claim,
    store_clock,
    version_of,
)
from precache.maintenance.versions import reigns
from precache.runtime.integers import whole
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, open_folder
from precache.storage.rename import is_link, move, refuse_link, remove_if_empty
from precache.store.build_status import DESCRIPTION, remove_left_scratch
from precache.store.commit_log import BUILD, ROOT, VERSION, Commit, read_commits
from precache.store.lease import Claims, deciding, remove_ended
from precache.store.shard_log import kept_name

UNTOUCHED_SECONDS = 900.0
"""Since the last change of what is being built or copied, below which `gc` never touches it.

Longer than `lease.ALIVE_SECONDS`, after which a build is taken to have ended: what is removed by
mistake is lost."""

_REMAINS = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}")
"""Names below ``_gc`` on a local disk; in a bucket they are versions'."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw])\s*")


@dataclass(frozen=True)
class Removal:
    """A version that goes, and why.

    Attributes
    ----------
    nbytes, freed_nbytes
        Of all its objects, and of those that no other name holds once all that goes is gone.
    place
        Name below the store of what is removed: the version, or a copy of it under way.
    """

    version: str
    why: str
    nbytes: int
    freed_nbytes: int
    place: str


@dataclass(frozen=True)
class Kept:
    """A version that stays, and why."""

    version: str
    why: str


@dataclass(frozen=True)
class Collected:
    """What was removed, or would be, and what stays.

    Attributes
    ----------
    swept
        Versions that stay, less what a process that was killed after a commit left in them.
    """

    store: str
    dry_run: bool
    removed: tuple[Removal, ...]
    kept: tuple[Kept, ...]
    swept: tuple[str, ...] = ()

    @property
    def freed_nbytes(self) -> int:
        return sum(each.freed_nbytes for each in self.removed)


def gc(
    store: str | os.PathLike[str],
    keep: int = 2,
    older_than: str | float | timedelta = "7d",
    dry_run: bool = False,
    storage_options: StorageOptions = None,
) -> Collected:
    """Remove versions that are not current, not among the newest, and old; and stale builds.

    The log of commits keeps its entries. Killed at any moment, the same call ends what was begun.

    Parameters
    ----------
    keep
        How many versions stay whatever their age, the current one among them: those that were
        current last.
    older_than
        Since another version took its place, or since a build that did not commit last showed a
        sign of life, by the store's own times: such as ``"7d"`` or ``"12h"`` (s, m, h, d, w), or
        seconds.
    dry_run
        Only tell. Nothing is written, so that this machine's clock says what time it is.

    Raises
    ------
    StoreError
        There is nothing of ours.
    """
    keep = whole("keep", keep, 0)
    least = seconds_of(older_than)
    folder = open_folder(store, storage_options)
    refuse_link(folder, TRASH)
    if not dry_run:
        _end_what_was_begun(folder)
    log = read_commits(folder)
    places = look_around(folder, log)
    if not log and all(place.link for place in places):
        raise StoreError(f"there is no store at {folder}, and no build has begun there")
    clock = partial(_latest, places) if dry_run else store_clock(folder)
    plan = plan_gc(dated_log(folder, log), places, keep, least, clock())
    kept = list(plan.kept)
    removed = _removals(plan.going, places)
    if not dry_run:
        done = []
        for each in removed:
            with deciding(folder, each.version):
                spared = _remove(folder, each.place, clock)
            if spared:
                kept.append(Kept(each.version, spared))
            else:
                done.append(each)
        removed = done
        for name in plan.swept:
            remove_left_scratch(folder.folder(name))
            if folder.local("") is None:
                folder.remove(f"{COPIES}/{name}")
        for name in (TRASH, COPIES):
            remove_if_empty(folder, name)
        remove_ended(folder)
    return Collected(str(folder), dry_run, tuple(removed), tuple(kept), plan.swept)


def _latest(places: Sequence[StoredVersion]) -> float:
    """Unix time by this machine's clock, and no earlier than what has happened."""
    times = [each.mtime for place in places for each in place.objects]
    return max(time.time(), *(each for each in times if each < math.inf), 0.0)


def seconds_of(age: str | float | timedelta) -> float:
    """An age in seconds.

    Raises
    ------
    UsageError
        It is none.
    """
    if isinstance(age, timedelta):
        age = age.total_seconds()
    if isinstance(age, str):
        found = _AGE.fullmatch(age.lower())
        if found is None:
            raise UsageError(f"{age!r} is no age; give a number and s, m, h, d or w, such as 7d")
        return float(found[1]) * _UNITS[found[2]]
    if not 0 <= age < float("inf"):
        raise UsageError(f"{age!r} is no age; give seconds from 0 up, or such as '7d'")
    return float(age)


# --- what goes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is to become of the places of a store.

    Attributes
    ----------
    going
        Name of a place -> why it goes; versions that were replaced first before the others.
    swept
        Names of versions that stay, in which nothing of a build or a copy is to be left.
    """

    going: Mapping[str, str]
    kept: tuple[Kept, ...]
    swept: tuple[str, ...]


def plan_gc(
    log: Sequence[Commit], places: Sequence[StoredVersion], keep: int, least: float, now: float
) -> Plan:
    """Decide about each place of a store.

    Parameters
    ----------
    log
        Oldest first, with the store's times.
    least
        Seconds that a version must be out of use.
    now
        Unix time, by the store's clock.
    """
    terms = reigns(log)
    there = {place.name: place for place in places if not place.link}
    complete = [name for name in terms if name in there and there[name].complete]
    newest = complete[-keep:] if keep else []
    going: dict[str, str] = {}
    kept = []
    swept = []
    for name in [*reversed(complete), *sorted(set(there) - set(complete))]:
        place = there[name]
        idle = place.idle_seconds(now, committed=name in complete)
        _, replaced = terms.get(name, (0.0, None))
        left = f"unfinished{' copy' * (name != place.version)}, left {ago(idle)}"
        if log and name == log[-1].version:
            kept.append(Kept(name, "current"))
        elif idle < UNTOUCHED_SECONDS:
            kept.append(Kept(place.version, f"somebody was at work on it {ago(idle)}"))
        elif name in newest:
            kept.append(Kept(name, f"among the newest {keep}"))
        elif name in complete and replaced is not None:
            why = f"replaced {ago(max(0.0, now - replaced))}"
            if now - replaced < least:
                kept.append(Kept(name, why))
            else:
                going[name] = why
        elif idle < least:
            kept.append(Kept(place.version, left))
        else:
            going[name] = left if place.objects else "empty"
        if name in complete and name not in going and place.scratch and idle >= UNTOUCHED_SECONDS:
            swept.append(name)
    links = [Kept(p.name, "a link, and no version: gc does not touch it") for p in places if p.link]
    return Plan(going, (*kept, *links), tuple(swept))


def _removals(going: Mapping[str, str], places: Sequence[StoredVersion]) -> list[Removal]:
    """With the bytes that each frees: an object's go with the last of its names."""
    there = {place.name: place for place in places}
    gone: Counter[tuple[int, int]] = Counter()
    removals = []
    for name, why in going.items():
        freed = 0
        for each in there[name].objects:
            if each.inode is not None:
                gone[each.inode] += 1
            if each.inode is None or gone[each.inode] == each.links:
                freed += each.size
        removals.append(Removal(there[name].version, why, there[name].nbytes, freed, name))
    return removals


def ago(seconds: float) -> str:
    """An age for people, in whole units of the largest kind of which there are two."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{int(seconds // unit)} {name} ago"
    return "just now" if seconds < 2 else f"{int(seconds)} seconds ago"


# --- how it goes --------------------------------------------------------------------------------


def _remove(store: Folder, name: str, clock: Callable[[], float]) -> str:
    """Remove a place, unless somebody took it up since it was looked at: then says so."""
    log = read_commits(store)
    place = look(store, name, log)
    if place is None or place.link:
        return "somebody else removes it"
    committed = place.complete and name in reigns(log)
    if place.idle_seconds(clock(), committed) < UNTOUCHED_SECONDS:
        return "somebody is at work on it"
    if log and log[-1].version == name:
        return "current"
    if name != place.version:
        if Claims(store, pull_claim(place.version)).holder() is not None:
            return "somebody is at work on it"
        store.remove(name)  # nobody reads a copy under way
        return ""
    return "current" if put_away(store, name) else ""


def put_away(store: Folder, version: str) -> bool:
    """Remove a version, killed at any moment or not; True where it became current meanwhile."""
    if store.local(version) is not None:
        left = f"{TRASH}/{version}.{uuid.uuid4().hex}"
        wanted = move(store, version, left) and _finish(store, left)
        remove_if_empty(store, TRASH)
        return wanted
    left = f"{TRASH}/{version}"
    root = store.get(f"{version}/{ROOT}")
    store.put(left, [root] if root is not None and version_of(root) == version else [])
    for name in (f"{version}/{ROOT}", f"{version}/{DESCRIPTION}", f"{COPIES}/{version}"):
        store.remove(name)
    return _finish(store, left)


def _end_what_was_begun(store: Folder) -> None:
    local = store.local("") is not None
    for name in store.names(TRASH):
        left, version = f"{TRASH}/{name}", name.partition(".")[0]
        if local and _REMAINS.fullmatch(name):
            with deciding(store, version):
                _finish(store, left)
        elif not local and VERSION.fullmatch(name):
            with deciding(store, version):
                record = store.get(left)
                if record is not None and (not record or version_of(record) == version):
                    _finish(store, left)


def _finish(store: Folder, left: str) -> bool:
    """Remove what is out of reach for good; True where it had to be put back instead."""
    path = store.local(left)
    if path is not None and is_link(store, left):  # the link alone
        path.unlink(missing_ok=True)
        return False
    version = left.removeprefix(f"{TRASH}/").partition(".")[0]
    log, there = read_commits(store), store.exists(f"{version}/{ROOT}")
    wanted = bool(log) and log[-1].version == version and not there
    begun = there or store.exists(f"{version}/{DESCRIPTION}")
    if not (wanted or begun):
        store.remove(kept_name(version))
    if path is None:
        begun = begun or store.size(f"{COPIES}/{version}") is not None
        document = store.get(left)
        if wanted and document:
            store.put(f"{version}/{ROOT}", [document])
        elif not begun:
            _remove_all(store, version)
        store.remove(left)
        return wanted
    if wanted:
        store.remove(f"{version}/{BUILD}")  # what a committer's temporary file left
        with contextlib.suppress(OSError):
            os.utime(path / ROOT)  # so that readers know it was away (`version.stamp_of`)
        if not move(store, left, version) and not store.exists(f"{version}/{ROOT}"):
            return True  # somebody makes it anew: a later run looks again
    _remove_all(store, left)
    return wanted


def _remove_all(store: Folder, name: str) -> None:
    """Also where another process removes the same at this moment."""
    while store.exists(name):
        store.remove(name)
