"""Removal of versions that nobody is to read any more, by age and by what is current.

Readers leave no mark in a store, so that age alone tells. What has no commit, and shows no sign of
life, goes by age as well. A version is put out of reach before its bytes go:

- On a local disk its folder is moved into ``_gc``, at once and whole, and removed there.
- In a bucket its `zarr.json` is copied to ``_gc`` and taken away, and so is what tells of its
  build; then the rest goes.

Then the log is read once more. A build that makes the version current meanwhile looks, after its
entry, whether the version is there (`commits.append_commit`); so one of the two sees the other,
and a version that was current in that moment is put back. Whatever was under way when a process
was killed is told by ``_gc``, and the next run ends it. A build that takes objects over from a
version on its way out finds them gone and computes them; one that loses objects of its own notes
it at its commit (`workers.commit`).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from precache.commits import ROOT, Commit, read_commits
from precache.errors import StorageError, StoreError, UsageError
from precache.finished import kept_name
from precache.folder import Folder
from precache.inventory import reigns
from precache.places import Place, look, look_around
from precache.status import DESCRIPTION
from precache.storage import StorageOptions, open_folder

ALIVE_SECONDS = 900.0
"""Since the last sign of life of a build, below which it is never touched: thirty heartbeats."""

TRASH = "_gc"
"""Folder of a store with what is being removed."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw])\s*")


@dataclass(frozen=True)
class Removal:
    """A version that goes, and why.

    Attributes
    ----------
    nbytes, freed_nbytes
        Of all its objects, and of those that no other name holds once all that goes is gone.
    """

    version: str
    why: str
    nbytes: int
    freed_nbytes: int


@dataclass(frozen=True)
class Kept:
    """A version that stays, and why."""

    version: str
    why: str


@dataclass(frozen=True)
class Collected:
    """What was removed, or would be, and what stays."""

    store: str
    dry_run: bool
    removed: tuple[Removal, ...]
    kept: tuple[Kept, ...]

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
        sign of life: such as ``"7d"`` or ``"12h"`` (s, m, h, d, w), or seconds.
    dry_run
        Only tell.

    Raises
    ------
    StoreError
        There is nothing of ours.
    """
    if keep < 0:
        raise UsageError(f"keep is {keep}; give 0 or more")
    least = seconds_of(older_than)
    folder = open_folder(store, storage_options)
    log, places = read_commits(folder), look_around(folder)
    if not log and all(place.build is None for place in places):
        raise StoreError(f"there is no store at {folder}, and no build has begun there")
    going, kept = plan_gc(log, places, keep, least, time.time())
    removed = _removals(going, places)
    if not dry_run:
        _end_what_was_begun(folder)
        done = []
        for each in removed:
            spared = _remove(folder, each.version)
            if spared:
                kept.append(Kept(each.version, spared))
            else:
                done.append(each)
        removed = done
        if (trash := folder.local(TRASH)) is not None:
            with contextlib.suppress(OSError):  # there is none, or another run has something in it
                trash.rmdir()
    return Collected(str(folder), dry_run, tuple(removed), tuple(kept))


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


def plan_gc(
    log: Sequence[Commit], places: Sequence[Place], keep: int, least: float, now: float
) -> tuple[dict[str, str], list[Kept]]:
    """Version -> why it goes, those replaced first before the others; and what stays.

    Parameters
    ----------
    log
        Oldest first.
    least
        Seconds that a version must be out of use.
    now
        Unix time.
    """
    terms = reigns(log)
    there = {place.name: place for place in places}
    complete = [name for name in terms if name in there and there[name].complete]
    newest = complete[-keep:] if keep else []
    going: dict[str, str] = {}
    kept = []
    for name in [*reversed(complete), *sorted(set(there) - set(complete))]:
        place = there[name]
        idle = place.idle_seconds(now, committed=name in complete)
        _, replaced = terms.get(name, (0.0, None))
        if log and name == log[-1].version:
            kept.append(Kept(name, "current"))
        elif idle < ALIVE_SECONDS:
            kept.append(Kept(name, f"somebody was at work on it {ago(idle)}"))
        elif name in newest:
            kept.append(Kept(name, f"among the newest {keep}"))
        elif name in complete and replaced is not None:
            why = f"replaced {ago(now - replaced)}"
            if now - replaced < least:
                kept.append(Kept(name, why))
            else:
                going[name] = why
        elif idle < least:
            kept.append(Kept(name, f"unfinished, left {ago(idle)}"))
        else:
            going[name] = f"unfinished, left {ago(idle)}" if place.objects else "empty"
    return going, kept


def _removals(going: Mapping[str, str], places: Sequence[Place]) -> list[Removal]:
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
        removals.append(Removal(name, why, there[name].nbytes, freed))
    return removals


def ago(seconds: float) -> str:
    """An age for people, in whole units of the largest kind of which there are two."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{int(seconds // unit)} {name} ago"
    return "just now" if seconds < 2 else f"{int(seconds)} seconds ago"


# --- how it goes --------------------------------------------------------------------------------


def _remove(store: Folder, version: str) -> str:
    """Remove a version, unless somebody took it up since it was looked at: then says so."""
    place, log = look(store, version), read_commits(store)
    committed = place.complete and version in reigns(log)
    if place.idle_seconds(time.time(), committed) < ALIVE_SECONDS:
        return "somebody is at work on it"
    if log and log[-1].version == version:
        return "current"
    path = store.local(version)
    if path is None:
        left = f"{TRASH}/{version}"
        store.put(left, [store.get(f"{version}/{ROOT}") or b""])
        for name in (ROOT, DESCRIPTION):
            store.remove(f"{version}/{name}")
    else:
        left = f"{TRASH}/{version}.{uuid.uuid4().hex}"
        if not _move(store, version, left):
            return "somebody else removes it"
    return "current" if _finish(store, left) else ""


def _end_what_was_begun(store: Folder) -> None:
    for name in store.names(TRASH):
        _finish(store, f"{TRASH}/{name}")


def _finish(store: Folder, left: str) -> bool:
    """Remove what is out of reach for good; True where it had to be put back instead."""
    version = left.removeprefix(f"{TRASH}/").partition(".")[0]
    log, there = read_commits(store), store.exists(f"{version}/{ROOT}")
    wanted = bool(log) and log[-1].version == version and not there
    begun = there or store.exists(f"{version}/{DESCRIPTION}")
    if not (wanted or begun):
        store.remove(kept_name(version))
    if store.local(TRASH) is None:
        document = store.get(left)
        if wanted and document:
            store.put(f"{version}/{ROOT}", [document])
        elif not begun:
            _remove_all(store, version)
        store.remove(left)
        return wanted
    if wanted:
        _remove_all(store, version)  # what a committer's temporary file left
        _move(store, left, version)
    _remove_all(store, left)
    return wanted


def _move(store: Folder, name: str, to: str) -> bool:
    """Move a folder of a local disk; False where it is gone."""
    source, target = store.local(name), store.local(to)
    if source is None or target is None:
        return False
    while source.exists():
        try:
            target.parent.mkdir(exist_ok=True)
            source.rename(target)
        except FileNotFoundError:
            continue  # another run has removed the empty folder that it was to go to
        except OSError as error:
            raise StorageError(f"cannot move {source} to {target}: {error.strerror}") from error
        return True
    return False


def _remove_all(store: Folder, name: str) -> None:
    """Also where another process removes the same at this moment."""
    while store.exists(name):
        store.remove(name)
