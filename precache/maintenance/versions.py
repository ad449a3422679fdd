"""The versions of a store, and which of them is current."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from precache.errors import PrecacheError, StorageError, StoreError, UsageError
from precache.maintenance.scan import StoredVersion, look_around, real_nbytes
from precache.messages import shown
from precache.recipe.recipe import Recipe, op_texts
from precache.recipe.variants import variants_text
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.build_status import BuildStatus, remove_abandoned_scratch
from precache.store.commit_log import ROOT, Commit, append_commit, read_commits
from precache.store.consistency import inspect
from precache.store.documents import Attributes
from precache.store.open import open_version, split_uri
from precache.store.version import Version, read_attributes

# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VersionSummary:
    """One committed version.

    Attributes
    ----------
    committed, replaced
        Seconds since 1970 when it last became current, and when another did after it; None while
        it is current.
    rows, holes
        Holes are rows, too; None where the version cannot be read.
    nbytes, shared_nbytes
        Of all its objects, and of those that other versions of the store have too, by hard links.
    recipe
        In short.
    problem
        Why its metadata cannot be read; empty where it can.
    """

    version: str
    current: bool
    committed: float
    replaced: float | None
    rows: int | None
    holes: int | None
    nbytes: int
    shared_nbytes: int
    recipe: str
    problem: str


@dataclass(frozen=True)
class Unfinished:
    """A version that is being made, or was left.

    Attributes
    ----------
    idle_seconds
        Since the last sign of life, of whatever kind.
    build
        How far it is; None of a copy, and of what is left of a version that was removed.
    """

    version: str
    nbytes: int
    shared_nbytes: int
    idle_seconds: float
    build: BuildStatus | None


@dataclass(frozen=True)
class Inventory:
    """Versions, the current one first and then as they were current last; and all bytes, each
    counted once."""

    store: str
    versions: tuple[VersionSummary, ...]
    unfinished: tuple[Unfinished, ...]
    nbytes: int


@dataclass(frozen=True)
class Used:
    """The version that was made current, by which number of the log, and the one before."""

    version: str
    number: int
    previous: str | None


# --- reading it ---------------------------------------------------------------------------------


def versions(store: str | os.PathLike[str], storage_options: StorageOptions = None) -> Inventory:
    """The versions of a store, and the builds that have begun there.

    Every object is listed; nothing is written.

    Raises
    ------
    StoreError
        There is nothing of ours.
    """
    folder = open_folder(store, storage_options)
    log = read_commits(folder)
    places = look_around(folder, log)
    if not log and all(place.link for place in places):
        raise StoreError(f"there is no store at {folder}, and no build has begun there")
    terms = reigns(log)
    shared = _shared(places)
    found = []
    unfinished = []
    for place in places:
        if place.name in terms and (place.complete or place.link):
            found.append(_summary(folder, place, log, shared))
        elif not place.link:
            idle = place.idle_seconds(time.time(), committed=False)
            unfinished.append(
                Unfinished(place.version, place.nbytes, shared[place.name], idle, place.build)
            )
    order = {version: -number for number, version in enumerate(terms)}
    return Inventory(
        str(folder),
        tuple(sorted(found, key=lambda each: order[each.version])),
        tuple(sorted(unfinished, key=lambda each: each.idle_seconds)),
        real_nbytes(each for place in places for each in place.objects),
    )


def reigns(log: Sequence[Commit]) -> dict[str, tuple[float, float | None]]:
    """Version -> when it last became current, and when another did after it; the current one last.

    Parameters
    ----------
    log
        Oldest first.
    """
    terms: dict[str, tuple[float, float | None]] = {}
    for number, commit in enumerate(log):
        after = log[number + 1].time if number + 1 < len(log) else None
        terms.pop(commit.version, None)
        terms[commit.version] = commit.time, after
    return terms


def _shared(places: Iterable[StoredVersion]) -> dict[str, int]:
    """Version -> bytes that another one has, too."""
    inodes = {
        place.name: {each.inode: each.size for each in place.objects if each.inode is not None}
        for place in places
    }
    holders = Counter(inode for held in inodes.values() for inode in held)
    return {
        name: sum(size for inode, size in held.items() if holders[inode] > 1)
        for name, held in inodes.items()
    }


def _summary(
    store: Folder, place: StoredVersion, log: Sequence[Commit], shared: dict[str, int]
) -> VersionSummary:
    committed, replaced = reigns(log)[place.name]
    attributes, problem = None, "a link, which is not followed"
    if not place.link:
        attributes, problem = _attributes(store, place.name)
    return VersionSummary(
        place.name,
        place.name == log[-1].version,
        committed,
        replaced,
        attributes.rows if attributes else None,
        attributes.holes if attributes else None,
        place.nbytes,
        shared[place.name],
        in_short(attributes) if attributes else "",
        problem,
    )


def _attributes(store: Folder, name: str) -> tuple[Attributes | None, str]:
    place = f"{name}/{ROOT}"
    try:
        return read_attributes(store.read(place), store.path(place)), ""
    except (StorageError, StoreError) as error:
        return None, str(error)


def in_short(attributes: Attributes) -> str:
    """A version's recipe in a line."""
    try:
        recipe = Recipe.from_dict(attributes.pipeline)
    except PrecacheError:
        return "a recipe of another release"
    fields = []
    for name, field in recipe.fields.items():
        several = f", variants {variants_text(field)}" if field.variants > 1 else ""
        ops = " → ".join(op_texts(field))
        fields.append(f"{name}: {ops}, {field.stored_as.name}{several}")
    return "; ".join(fields)


# --- changing which is current ------------------------------------------------------------------


def use(uri: str | os.PathLike[str], storage_options: StorageOptions = None) -> Used:
    """Make a version of a store current: readers that open the store from here on get it.

    The log gets an entry; nothing else changes, and the way back is the same.

    Parameters
    ----------
    uri
        ``STORE@prefix``.

    Raises
    ------
    UsageError
        It names no version.
    StoreError
        There is no such version, or an object of it is missing or has another size.
    """
    base, prefix = split_uri(uri, storage_options)
    if prefix is None:
        named = shown(base)
        raise UsageError(
            f"{named} names no version; give one, such as {named}@3f2a: precache ls {named}"
        )
    version = open_version(uri, None, storage_options)
    _require_whole(version)
    store = open_folder(base, storage_options)
    log = read_commits(store)
    previous = log[-1].version
    commit = append_commit(store, version.id)
    remove_abandoned_scratch(version.folder)
    return Used(version.id, commit.number, previous)


def _require_whole(version: Version) -> None:
    way_out = "run the precache build that made it once more, and it repairs it"
    flaws = inspect(version)
    lost = {} if flaws else version.lost_objects()
    for flaw in flaws:
        raise StoreError(
            f"version {version.id} is not whole: {flaw.name}: {flaw.reason}; {way_out}"
        )
    if lost:
        field, shard = min(lost)
        raise StoreError(
            f"version {version.id} is not whole: {len(lost)} of its shards are missing or cut "
            f"short, such as number {shard} of {field}; {way_out}"
        )
