"""The log of a store: which version is current, which were before, and which were removed.

Commits and removals are entries under one numbering. An entry is created, and never changed: of two
processes that append at once one gets the number, and the other decides anew by the longer log. So
a version that is removed never becomes current, and the current one is never removed.

A version is a folder `ID.G`. The id is a digest of all that decides its rows; the generation G,
from 1 on, is above any that the log or the store has of that id. So no name is used for other
bytes.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from precache.errors import BuildError, StorageError, StoreError
from precache.messages import shown
from precache.storage.base import Folder
from precache.store.json_documents import LogEntry
from precache.store.tree import seal_of

ROOT = "zarr.json"
"""Document of a version's group: written last and removed first, so only whole versions have it."""

BUILD = "_build"
"""Folder of a version for scratch objects, which are removed after its commit."""

VERSION = re.compile(r"[0-9a-f]{32}\.[1-9][0-9]{0,8}")
"""Names of versions' folders; a folder of such a name need not be a version."""

NUMBERED = re.compile(r"[0-9]{6,}\.json")
"""Names of objects that are created under the next number: log entries and leases."""


def folder_name(version_id: str, generation: int) -> str:
    """Return the name of a version's folder."""
    return f"{version_id}.{generation}"


def id_of(version: str) -> str:
    """Return the id of a version by the name of its folder."""
    return version.partition(".")[0]


def generation_of(version: str) -> int:
    """Return the generation of a version by the name of its folder."""
    return int(version.partition(".")[2])


def short(version: str, digits: int = 8) -> str:
    """Return the name of a version for people: the first digits, and its generation from 2 on."""
    generation = version.partition(".")[2]
    return version[:digits] + (f".{generation}" if generation not in ("", "1") else "")


@dataclass(frozen=True)
class Log:
    """All entries of a log, or the newest one.

    Attributes
    ----------
    entries
        Oldest first.
    number
        The highest number by name, of an empty object, too; 0 if there is none.
    """

    entries: tuple[LogEntry, ...] = ()
    number: int = 0

    @functools.cached_property
    def commits(self) -> tuple[LogEntry, ...]:
        """Entries by which a version is current; also those that remove others."""
        return tuple(entry for entry in self.entries if entry.version)

    @functools.cached_property
    def removed(self) -> frozenset[str]:
        """Names of all versions that were removed."""
        return frozenset(version for entry in self.entries for version in entry.removed)

    @property
    def current(self) -> LogEntry | None:
        """The entry of the current version."""
        return self.commits[-1] if self.commits else None

    @functools.cached_property
    def versions(self) -> dict[str, LogEntry]:
        """Version -> its latest entry; the version that was current last comes first."""
        latest: dict[str, LogEntry] = {}
        for entry in reversed(self.commits):
            latest.setdefault(entry.version, entry)
        return latest

    def root_of(self, version: str) -> str | None:
        """Return the digest of the root that a version was last committed with, if known."""
        commit = self.versions.get(version)
        return None if commit is None else commit.root

    def source_of(self, version: str) -> str | None:
        """Return the source that a version was last built from, as far as the log has it."""
        sources = (entry.source for entry in reversed(self.commits) if entry.version == version)
        return next(filter(None, sources), None)

    def next_generation(self, version_id: str, names: Iterable[str]) -> int:
        """Return the generation above all that an id has in the log, and among names of a store."""
        taken = {*self.versions, *self.removed, *filter(VERSION.fullmatch, names)}
        return 1 + max((generation_of(n) for n in taken if id_of(n) == version_id), default=0)


# --- reading ------------------------------------------------------------------------------------

EMPTY_SECONDS = 2.0
"""Longest wait for an entry that is being created."""


def read_log(store: Folder, *, newest: bool = False, appends: bool = False) -> Log:
    """Read the log.

    Parameters
    ----------
    newest
        Read only the last entry: then `removed` is incomplete.
    appends
        Pass over a last entry that stays empty, as a process leaves it that is killed on a disk
        without links: the next one gets a higher number.

    Raises
    ------
    StoreError
        An entry is damaged: no other says what it made current.
    """
    names = [name for name in store.names("commits") if NUMBERED.fullmatch(name)]
    names.sort(key=lambda name: int(name[:-5]))
    paths = [f"commits/{name}" for name in (names[-1:] if newest else names)]
    entries: list[LogEntry] = []
    for path, data in zip(paths, store.read_small(paths), strict=True):
        if isinstance(data, StorageError):
            raise data
        is_last = path == paths[-1]
        written = data or (_once_written(store, path) if is_last else b"")
        if not written and (appends or not is_last):
            continue  # nothing was committed by it
        entries.append(_entry(written, store.path(path), _number(path)))
    return Log(tuple(entries), _number(paths[-1]) if paths else 0)


def _number(path: str) -> int:
    return int(path.rpartition("/")[2].removesuffix(".json"))


def _once_written(store: Folder, path: str) -> bytes:
    """Read an entry that was found empty: on a disk without links it may be being created."""
    until = time.monotonic() + EMPTY_SECONDS
    while not (data := store.read(path)) and time.monotonic() < until:
        time.sleep(0.01)
    return data


def _entry(data: bytes, where: str, number: int) -> LogEntry:
    try:
        entry = LogEntry.read(data, where)
        if entry.number != number:
            raise StoreError(f"it is entry {entry.number}")
        return entry
    except StoreError as error:
        why = str(error).removeprefix(f"{where} is damaged or forged: ")
        do = (
            "Remove that file, and before any gc make that version current: run the build that "
            "made it, or precache use STORE/VERSION"
        )
        if not data:
            why = "it is empty, as a process leaves it that is killed on some network disks"
            do = "Run the same precache build command again, and do not remove that file"
        raise StoreError(
            f"{where} is damaged or forged: {why}; it alone says which version was made current. "
            f"Versions are still read by their folders (STORE/VERSION). {do}; a build finds its "
            "version whole, and computes nothing"
        ) from None


# --- appending ----------------------------------------------------------------------------------

CREATE_TRIES = 3
"""Attempts to create an object twice: another build's commit may remove it in between."""

READ_BACK_SECONDS = (0.1, 0.5, 2.0)
"""Pauses before an entry is read back of which no answer came."""

Decide = Callable[[Log], LogEntry | None]
"""From the log to the entry that is to follow; None for none. Raises if it is refused."""


def append(store: Folder, decide: Decide) -> Log:
    """Append the entry that is decided by the log as it is at that moment; returns the log then.

    Parameters
    ----------
    decide
        A pure function. It is called again if another process appended meanwhile.

    Raises
    ------
    StorageError
        The store cannot be written to, or lets an object be created twice.
    """
    while True:
        log = read_log(store, appends=True)
        entry = decide(log)
        if entry is None:
            return log
        entry = entry.with_(number=log.number + 1, nonce=uuid.uuid4().hex)
        require_create_only(store, "commits")
        if _created(store, f"commits/{entry.number:06d}.json", entry.to_json()):
            return Log((*log.entries, entry), entry.number)


def _created(store: Folder, name: str, data: bytes) -> bool:
    """Create an entry; its nonce shows whose it is where an answer was lost."""
    try:
        return store.create(name, [data]) or store.get(name) == data
    except StorageError as error:
        for seconds in READ_BACK_SECONDS:
            time.sleep(seconds)
            with contextlib.suppress(StorageError):
                if found := store.get(name):
                    return found == data
        raise error from None


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


# --- commits and removals -----------------------------------------------------------------------


class ReplacedError(BuildError):
    """The version whose place another was to take is not current any more."""


def commit_entry(
    log: Log,
    version: str,
    root: str | None = None,
    source: str | None = None,
    replaces: str | None = None,
    since: int | None = None,
) -> LogEntry | None:
    """Decide about the entry that makes a version current; None if nothing is to be added.

    A version that is current already gets another entry only if it was built from another source,
    or has another root, or an empty object follows its entry; that entry differs from the last in
    nothing else.

    Parameters
    ----------
    root
        Digest of its root; None if that is not known.
    source
        The source that it was built from, as `recordable_source` returns it.
    replaces
        The version that must be current at that moment; by default any.
    since
        The number of an entry. If `version` was current at it or later, and has been replaced,
        nothing is added.

    Raises
    ------
    BuildError
        The version was removed.
    ReplacedError
        Neither `replaces` nor `version` itself is current.
    """
    if version in log.removed:
        raise BuildError(f"version {version} was removed meanwhile; run the same command again")
    last = log.current
    parent, began = last.version if last else None, time.time()
    if last is not None and last.version == version:
        is_newest = log.number <= log.entries[-1].number
        if is_newest and root in (None, last.root) and source in (None, log.source_of(version)):
            return None
        parent, began = last.parent, last.time
    elif since is not None and any(
        commit.version == version and commit.number >= since for commit in log.commits
    ):
        return None
    elif replaces is not None and (last is None or last.version != replaces):
        now = f"version {short(last.version, 12)}" if last else "no version"
        raise ReplacedError(
            f"{now} of the store is current, and no longer {short(replaces, 12)}, of which a "
            "child was built; refresh it again"
        )
    return LogEntry(version=version, root=root, parent=parent, time=began, source=source)


def removal_entry(
    log: Log, versions: Iterable[str], unfinished: Collection[str] = ()
) -> LogEntry | None:
    """Decide about the entry that removes versions, except the current one.

    Parameters
    ----------
    unfinished
        Those of the versions that stay if they were ever committed.
    """
    last = log.current
    stay = {*log.removed, *(log.versions.keys() & set(unfinished))}
    stay |= set() if last is None else {last.version}
    removed = tuple(version for version in versions if version not in stay)
    if not removed:
        return None
    return last.with_(removed=removed) if last else LogEntry(time=time.time(), removed=removed)


def make_current(
    store: Folder,
    version: str,
    source: str | None = None,
    replaces: str | None = None,
    since: int | None = None,
) -> LogEntry:
    """Make a complete version the current one; returns the entry that is current then.

    Parameters
    ----------
    source, replaces, since
        As in `commit_entry`.

    Raises
    ------
    BuildError
        The version is not there; or as by `commit_entry`.
    StorageError
        The store cannot be written to.
    """
    document = store.get(f"{version}/{ROOT}")
    if document is None:
        raise BuildError(
            f"version {version} of {store} was removed before it was made current; run the same "
            "command again"
        )
    decide = partial(
        commit_entry,
        version=version,
        root=seal_of(document),
        source=source,
        replaces=replaces,
        since=since,
    )
    try:
        log = append(store, decide)
    except StorageError:
        log = read_log(store)
        if log.current is None or log.current.version != version:
            raise
        # A store that cannot be written to is current as it is.
    assert log.current is not None
    return log.current


def record_removal(store: Folder, versions: Sequence[str], unfinished: Collection[str] = ()) -> Log:
    """Record in the log that versions are removed, as `removal_entry`; returns the log then."""
    return append(store, partial(removal_entry, versions=versions, unfinished=unfinished))


SCRATCH = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.tmp")
"""Names of objects that a killed process may leave in the folder of the log."""


def recordable_source(source: str) -> str | None:
    """Return the source as the log records it; None for a URL that may hold credentials."""
    if source.startswith("python:"):
        return source
    if "://" not in source:
        return str(Path(source).absolute())
    return source if shown(source) == source else None
