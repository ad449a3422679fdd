"""List the versions of a store, and make one of them current."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from precache.errors import StorageError, StoreError, UsageError
from precache.maintenance.scan import StoredFolder, real_nbytes, scan_store
from precache.maintenance.verify import require_whole, way_out
from precache.messages import Table, as_text, shown
from precache.recipe.recipe import Recipe
from precache.recipe.variants import variants_text
from precache.storage.base import Folder
from precache.storage.open import StorageOptions, open_folder
from precache.store.build_status import BuildStatus, remove_abandoned_scratch
from precache.store.commit_log import ROOT, VERSION, Log, make_current, read_log, short
from precache.store.json_documents import LogEntry
from precache.store.open import open_own, open_version, split_uri
from precache.store.version import read_attributes
from precache.units import ago, size

# --- results ------------------------------------------------------------------------------------

_HEADINGS = ("", "version", "committed", "rows", "holes", "size", "recipe")
_TEXT = ("version", "committed", "recipe")
"""Columns that are left-aligned."""


@dataclass(frozen=True)
class VersionSummary:
    """One committed version.

    Attributes
    ----------
    committed, replaced
        Unix times at which it last became current, and at which another version replaced it; the
        latter is None for the current version.
    rows, holes
        Number of rows, holes included, and of holes; None if the version cannot be read.
    nbytes
        Size of all its objects, those that it shares with other versions by hard links included.
    recipe
        One-line summary of the recipe.
    problem
        Why its metadata cannot be read; empty if it can.
    """

    version: str
    current: bool
    committed: float
    replaced: float | None
    rows: int | None
    holes: int | None
    nbytes: int
    recipe: str
    problem: str

    def cells(self) -> tuple[str, ...]:
        """Return what stands below `_HEADINGS` in the table of versions."""
        return (
            "*" if self.current else "",
            short(self.version, 12),
            ago(time.time() - self.committed),
            "" if self.rows is None else f"{self.rows:,}",
            "" if self.holes is None else f"{self.holes:,}",
            size(self.nbytes),
            self.recipe or self.problem,
        )


@dataclass(frozen=True)
class Unfinished:
    """A version whose build, copy or removal is in progress or was interrupted.

    Attributes
    ----------
    idle_seconds
        Seconds since its last change.
    build
        Progress of the build; None for a copy, or remains of a removed version.
    """

    version: str
    nbytes: int
    idle_seconds: float
    build: BuildStatus | None

    def __str__(self) -> str:
        kind, done = "copy or removal", ""
        if self.build is not None:
            kind, done = "build", f"{self.build.done:,} of {self.build.shards:,} shards, "
        return (
            f"unfinished {kind} of {short(self.version, 12)}: {done}{size(self.nbytes)}; "
            f"last change {ago(self.idle_seconds)}"
        )


@dataclass(frozen=True)
class StoreListing:
    """The versions of a store.

    Attributes
    ----------
    versions
        The current version first, the others by when they were current last.
    nbytes
        Size of all objects, with hard links counted once.
    """

    store: str
    versions: tuple[VersionSummary, ...]
    unfinished: tuple[Unfinished, ...]
    nbytes: int

    def __str__(self) -> str:
        table = Table(_HEADINGS, [version.cells() for version in self.versions], _TEXT)
        return as_text(
            [
                f"{self.store}: {size(self.nbytes)}; * marks the current version",
                *(table.lines() if table.rows else ()),
                *map(str, self.unfinished),
            ]
        )


@dataclass(frozen=True)
class UseResult:
    """The version that was made current, its number in the log, and the previous version."""

    version: str
    number: int
    previous: str | None

    def __str__(self) -> str:
        if self.previous == self.version:
            return f"version {short(self.version, 12)} is already current"
        previous = "" if self.previous is None else f"; it replaces {short(self.previous, 12)}"
        return f"version {short(self.version, 12)} is now current{previous}"


# --- listing ------------------------------------------------------------------------------------


def versions(store: str | os.PathLike[str], storage_options: StorageOptions = None) -> StoreListing:
    """List the versions of a store, and its unfinished builds and copies.

    It lists every object and writes nothing. Bytes that versions share by hard links count once.

    Parameters
    ----------
    store
        A store, as path or URL.
    storage_options
        As `open` takes them.

    Raises
    ------
    StoreError
        There is no store.
    """
    folder = open_folder(store, storage_options)
    log, scanned = scan_store(folder)
    periods = current_periods(log.commits)
    committed = []
    unfinished = []
    for stored in scanned:
        if stored.version in periods and stored.version not in log.removed:
            committed.append(_summarize(folder, stored, log))
        else:
            idle = stored.idle_seconds(time.time(), committed=False)
            unfinished.append(Unfinished(stored.version, stored.nbytes, idle, stored.build))
    order = {version: -number for number, version in enumerate(periods)}
    return StoreListing(
        str(folder),
        tuple(sorted(committed, key=lambda summary: order[summary.version])),
        tuple(sorted(unfinished, key=lambda version: version.idle_seconds)),
        real_nbytes(item for stored in scanned for item in stored.objects),
    )


def current_periods(commits: Sequence[LogEntry]) -> dict[str, tuple[float, float | None]]:
    """Return for each version when it last became current, and when another replaced it.

    The current version is the last one, and its second time is None.

    Parameters
    ----------
    commits
        Oldest first.
    """
    periods: dict[str, tuple[float, float | None]] = {}
    began = 0.0
    for number, commit in enumerate(commits):
        is_new = number == 0 or commits[number - 1].version != commit.version
        began = commit.time if is_new else began
        after = commits[number + 1].time if number + 1 < len(commits) else None
        periods.pop(commit.version, None)
        periods[commit.version] = began, after
    return periods


def _summarize(store: Folder, folder: StoredFolder, log: Log) -> VersionSummary:
    committed, replaced = current_periods(log.commits)[folder.version]
    attributes, problem, version = None, "", store.folder(folder.version)
    try:
        attributes = read_attributes(version.read(ROOT), version)
    except (StorageError, StoreError) as error:
        problem = str(error)
    return VersionSummary(
        version=folder.version,
        current=folder.version == log.commits[-1].version,
        committed=committed,
        replaced=replaced,
        rows=attributes.rows if attributes else None,
        holes=attributes.holes if attributes else None,
        nbytes=folder.nbytes,
        recipe=_summarize_recipe(attributes.recipe) if attributes else "",
        problem=problem,
    )


def _summarize_recipe(recipe: Recipe) -> str:
    fields = []
    for name, field in recipe.fields.items():
        several = f", variants {variants_text(field)}" if field.variants > 1 else ""
        ops = " → ".join(map(str, (*filter(None, [field.kind]), *field.ops)))
        fields.append(f"{name}: {ops}, {field.stored_as.name}{several}")
    return "; ".join(fields)


# --- changing the current version ---------------------------------------------------------------


def use(uri: str | os.PathLike[str], storage_options: StorageOptions = None) -> UseResult:
    """Make a version of a store current, so that readers that open the store now get it.

    It only appends to the log, so the same call with the previous version undoes it.

    Parameters
    ----------
    uri
        ``STORE@prefix``; or the folder of a version, ``STORE/VERSION``, of which the log may have
        lost its entry.
    storage_options
        As `open` takes them.

    Raises
    ------
    UsageError
        `uri` names no version.
    StoreError
        There is no such version, or objects of it are damaged, missing or in a wrong place.
    """
    base, prefix = split_uri(uri, storage_options)
    above, _, name = base.rstrip("/").rpartition("/")
    by_folder = prefix is None and VERSION.fullmatch(name) is not None
    if prefix is None and not by_folder:
        name = shown(base)
        raise UsageError(
            f"{name} names no version; give one, such as {name}@3f2a; precache ls {name} lists them"
        )
    store = open_folder((above or ".") if by_folder else base, storage_options)
    log = read_log(store)
    version = open_version(uri, storage_options)
    if by_folder and version.id in log.versions:
        version = open_own(version.folder, commit=log.versions[version.id])
    require_whole(version, way_out(version, uri, storage_options))
    before = log.current
    commit = make_current(store, version.id)
    remove_abandoned_scratch(version.folder)
    return UseResult(version.id, commit.number, None if before is None else before.version)
