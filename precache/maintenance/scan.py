"""Scan a store: folders of versions, finished or begun, and their times of change.

A folder counts as a version only if its `zarr.json` or the description of its build names it, or if
the log names it, or it was begun, and it holds only objects that versions have. Any other folder is
foreign, whatever its name, and so is the target of a link.

Ages are differences of times that the store gave, so wrong clocks of builders or of this machine do
not matter. A copied object gets a new time.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from precache.errors import StorageError, StoreError
from precache.storage.base import Folder, is_missing
from precache.store.build_status import DESCRIPTION, BuildStatus, read_build
from precache.store.commit_log import BUILD, ROOT, VERSION, Log, id_of, read_log
from precache.store.json_documents import LogEntry

_ARRAY = r"[A-Za-z_]\w*(\.[0-9]{1,9})?/(zarr\.json|c/[0-9]+(/0)*)"
_TABLES = "(shards|_checks|_sums|rows)"
_SCRATCH = (
    r"build\.json|copy\.json|rows\.zip|receipts/[0-9]{8}\.json|leases/[0-9]{6,}\.json"
    r"|tmp/[0-9a-f]{32}"
)
_OBJECT = re.compile(
    rf"zarr\.json|{_TABLES}/zarr\.json|({_TABLES}/)?{_ARRAY}|{BUILD}/({_SCRATCH})"
    r"|(.*/)?\.([^/]+\.)?[0-9a-f]{32}\.tmp"
)
"""Names of objects that a version has, during and after its build."""


_OWN = "attributes", "precache"
"""Where a version's root has its attributes."""


class ListedObject(NamedTuple):
    """One object of a store.

    Attributes
    ----------
    mtime
        Unix time of its last change, by the store's clock; infinite if unknown.
    inode
        Device and number; None in a bucket, which has no hard links.
    links
        Number of hard links, inside this store or outside.
    """

    name: str
    size: int
    mtime: float
    inode: tuple[int, int] | None = None
    links: int = 1


@dataclass(frozen=True)
class StoredFolder:
    """The folder of a version, finished or begun, and its objects.

    Attributes
    ----------
    version
        Name below the store.
    scratch
        Whether it has files that are removed after a commit.
    """

    version: str
    objects: tuple[ListedObject, ...]
    build: BuildStatus | None
    scratch: bool = False

    @property
    def nbytes(self) -> int:
        return sum(item.size for item in self.objects)

    def idle_seconds(self, now: float, committed: bool) -> float:
        """Return the seconds since a process last worked on it.

        Parameters
        ----------
        now
            Unix time, by the store's clock.
        committed
            Only scratch files count, since nothing else of a committed version changes.
        """
        prefix = f"{BUILD}/" if committed else ""
        changed = [item.mtime for item in self.objects if item.name.startswith(prefix)]
        return max(0.0, now - max(changed, default=0.0))


def scan_store(store: Folder) -> tuple[Log, list[StoredFolder]]:
    """Read the log of a store, and list the folders of its versions.

    Raises
    ------
    StoreError
        There is no store.
    """
    log = read_log(store)
    names = [name for name in store.names() if VERSION.fullmatch(name)]
    scanned = (scan_folder(store, name, log) for name in names)
    folders = [folder for folder in scanned if folder is not None]
    if log.current is None and not folders:
        raise StoreError(f"there is no store at {store}, and no build has started there")
    return log, folders


def scan_folder(store: Folder, name: str, log: Log) -> StoredFolder | None:
    """Scan one folder of a store; None if it is gone or foreign."""
    path, folder = store.local(name), store.folder(name)
    if path is not None and (path.is_symlink() or not path.is_dir()):
        return None
    # Asked first: it is removed once the root is there.
    is_begun = path is not None and os.path.lexists(path / BUILD)
    objects = tuple(list_objects(folder))
    names = {item.name for item in objects}
    build = read_build(folder) if DESCRIPTION in names else None
    scratch = is_begun or any(item.startswith(f"{BUILD}/") for item in names)
    # Folders of others do not have only scratch files of ours.
    marked = name in log.versions or name in log.removed or (scratch and ROOT not in names)
    ours = (
        build is not None
        or (ROOT in names and _recorded(folder, ROOT, *_OWN, "version") == id_of(name))
        or (marked and all(map(_OBJECT.fullmatch, names)))
    )
    if not ours:
        return None
    return StoredFolder(name, objects, build, scratch=scratch)


def recorded_place(version: Folder) -> str:
    """Return the source, as in `RowTable`, of a version or a build; empty if it is unknown."""
    committed = _recorded(version, ROOT, *_OWN, "source")
    return committed or _recorded(version, DESCRIPTION, "source") or ""


def _recorded(folder: Folder, name: str, *keys: str) -> str | None:
    """Return a text of a document; None if there is none, as in a document of others."""
    try:
        value: Any = from_json(folder.get(name) or b"")
    except (StorageError, ValueError):
        return None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def real_nbytes(objects: Iterable[ListedObject]) -> int:
    """Add up sizes, counting objects with several hard links once."""
    sizes = {item.inode or number: item.size for number, item in enumerate(objects)}
    return sum(sizes.values())


def list_objects(folder: Folder) -> Iterator[ListedObject]:
    """Yield the objects of a folder; none if it is missing."""
    path = folder.local("")
    if path is not None:
        if folder.exists():  # and is not a link out of the store
            yield from _files(path)
        return
    try:
        for entry in folder.walk():
            mtime = entry.mtime_ns / 1e9 if entry.mtime_ns > 0 else math.inf
            yield ListedObject(entry.name, max(0, entry.size), mtime)
    except StorageError as error:
        if not is_missing(error):
            raise


def _files(folder: str | Path, prefix: str = "") -> Iterator[ListedObject]:
    """Yield files, and links without following them; a build may change them."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path, f"{prefix}{entry.name}/")
            continue
        with contextlib.suppress(FileNotFoundError):
            stat = entry.stat(follow_symlinks=False)
            inode, name = (stat.st_dev, stat.st_ino), prefix + entry.name
            yield ListedObject(name, stat.st_size, stat.st_mtime, inode, stat.st_nlink)


# --- times --------------------------------------------------------------------------------------


def dated_commits(store: Folder, log: Log) -> list[LogEntry]:
    """Return the commits with the times that the store gave their entries; infinite if unknown."""
    times = {entry.name: entry.mtime for entry in list_objects(store.folder("commits"))}
    return [
        commit.with_(time=times.get(f"{commit.number:06d}.json", math.inf))
        for commit in log.commits
    ]


def store_clock(store: Folder) -> Callable[[], float]:
    """Return a clock of Unix time by the store's clock, which is read once by writing."""
    name = f"commits/{uuid.uuid4().hex}"
    store.put(name, [b"now"])
    written = store.info(name)
    store.remove(name)
    now = written.mtime_ns / 1e9 if written and written.mtime_ns > 0 else time.time()
    started = time.monotonic()
    return lambda: now + time.monotonic() - started
