"""The log of a store's commits: which version is current, and which were before."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from precache.errors import StorageError
from precache.messages import shown
from precache.storage.base import Folder
from precache.store.attributes import CommitEntry

ROOT = "zarr.json"
"""Document of a version's group: written last and removed first, as only a whole version has it."""

BUILD = "_build"
"""Folder of a version for what is gone after its commit."""

VERSION = re.compile("[0-9a-f]{32}")
"""Names of versions' folders; not all that is so named is one (`places`)."""

_COMMIT = re.compile(r"[0-9]{6,}\.json")


@dataclass(frozen=True)
class Commit:
    """One entry of the log; the highest number is current."""

    number: int
    version: str
    parent: str | None
    time: float
    source: str | None = None
    code: Mapping[str, tuple[str, str]] = field(default_factory=dict)


PROBES = 3
"""Tries to create an object twice: another build's commit may remove it in between."""


def require_create_only(folder: Folder, scratch: str) -> None:
    """Refuse a place where an object can be created twice: of two commits one would be lost.

    Parameters
    ----------
    scratch
        Folder below it for an object that is created and removed.

    Raises
    ------
    StorageError
        It cannot be written to, or does not create only.
    """
    if folder.local("") is not None:  # what publishes files there replaces none
        return
    for _ in range(PROBES):
        name = f"{scratch}/{uuid.uuid4().hex}"
        try:
            folder.create(name, [b"first"], scratch)
            if not folder.create(name, [b"the second"], scratch):
                return
        finally:
            with contextlib.suppress(StorageError):  # it goes with the build's temporary objects
                folder.remove(name)
    raise StorageError(
        f"{folder} lets what is created overwrite what exists, so that of two who commit at once "
        "one would be lost: its service ignores If-None-Match; give a store on a local disk, "
        "gs://, az://, or an s3:// that has conditional writes"
    )


def read_commits(store: Folder, *, newest: bool = False) -> list[Commit]:
    """The log, oldest first; versions that it names may have been removed.

    An empty entry is being created, or was by a process that was killed: there is none.

    Parameters
    ----------
    newest
        Read the last entry alone.
    """
    names = [name for name in store.names("commits") if _COMMIT.fullmatch(name)]
    names.sort(key=lambda name: int(name[:-5]), reverse=True)
    at_a_time = 1 if newest else max(1, len(names))
    log: list[Commit] = []
    for start in range(0, len(names), at_a_time):
        paths = [f"commits/{name}" for name in names[start : start + at_a_time]]
        for path, data in zip(paths, store.read_many(paths, [-1] * len(paths)), strict=True):
            if isinstance(data, StorageError):
                raise data
            if data:
                log.append(_commit(data, store.path(path)))
        if log:
            break
    return log[::-1]


def _commit(data: bytes, where: str) -> Commit:
    entry = CommitEntry.read(data, where)
    number = int(where.rpartition("/")[2].removesuffix(".json"))
    return Commit(number, entry.version, entry.parent, entry.time, entry.source, entry.code or {})


def source_to_keep(source: str) -> str | None:
    """What the log says of a source; None for a URL that may hold credentials."""
    if source.startswith("python:"):
        return source
    if "://" not in source:
        return str(Path(source).absolute())
    return source if shown(source) == source else None


Code = Mapping[str, tuple[str, str]]
NO_CODE: Code = MappingProxyType({})


def source_of(log: Sequence[Commit], version: str) -> str | None:
    """What a version was built from last, as far as the log tells."""
    told = (each.source for each in reversed(log) if each.version == version and each.source)
    return next(told, None)


def code_of(log: Sequence[Commit], version: str) -> Code:
    """What stands for the code that made a version, as far as the log tells."""
    return {
        name: pair for each in log if each.version == version for name, pair in each.code.items()
    }


def append_entry(
    store: Folder, version: str, source: str | None = None, code: Code = NO_CODE
) -> Commit:
    """The next entry; of two committers one gets the number, the other the one after.

    What is current already gets another one where it was built from elsewhere, or by code that the
    log does not name, which differs from the last in that alone.
    """
    number = 0
    while True:
        log = read_commits(store)
        last = log[-1] if log else None
        named = {item for each in log for item in each.code.items()}
        new = {name: pair for name, pair in code.items() if (name, pair) not in named}
        if last is not None and last.version == version:
            if source in (None, source_of(log, version)) and not new:
                return last
            parent, began = last.parent, last.time
        else:
            parent, began, new = last.version if last else None, time.time(), dict(code)
        entry = CommitEntry(
            version=version, parent=parent, time=began, source=source, code=new or None
        )
        number = max(number, last.number if last else 0) + 1  # the one refused may be empty
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
            return Commit(number, version, parent, began, source, new)


def append_commit(
    store: Folder, version: str, source: str | None = None, code: Code = NO_CODE
) -> Commit:
    """Make a version that is there current.

    Parameters
    ----------
    source
        What it was built from, as `source_to_keep` gives it.
    code
        What made it, as `CommitEntry` explains.

    A version may be removed until the log names it as current; whoever removes one looks at the
    log once more after taking its `zarr.json` away, so that one of the two sees the other.

    Raises
    ------
    StorageError
        The version was removed meanwhile; what was current before is so again.
    """
    commit = append_entry(store, version, source, code)
    if store.exists(f"{version}/{ROOT}"):
        return commit
    if commit.parent is not None and store.exists(f"{commit.parent}/{ROOT}"):
        append_entry(store, commit.parent)
    raise StorageError(
        f"version {version} of {store} was removed while it was made current; run the same "
        "command again"
    )
