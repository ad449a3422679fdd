"""What lies in a store: folders of versions, copies under way, and when each last changed.

A folder is a version's only if it says so itself: its `zarr.json` or the description of its build
names it, or the log or a record of the store does and it has nothing but what versions have. Any
other folder is somebody else's, whatever its name, and so is what a link leads to.

Ages are differences of times that the store gave, which a wrong clock of a builder, or of this
machine, does not change. An object that is copied gets a new time: its age counts from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from precache.errors import StorageError
from precache.storage.base import Folder, is_missing
from precache.storage.rename import is_link
from precache.store.build_status import DESCRIPTION, BuildStatus, read_build_or_none
from precache.store.commit_log import BUILD, ROOT, VERSION, Commit

COPIES = "_pull"
"""Folder of a store with copies under way: on a local disk the folders in which they are put
together; in a bucket, by version, the `zarr.json` that is put last."""

TRASH = "_gc"
"""Folder of a store with what is being removed."""

_ARRAY = r"[A-Za-z_]\w*(\.[0-9]{1,9})?/(zarr\.json|c/[0-9]+(/0)*)"
_SCRATCH = (
    r"build\.json|rows\.parquet|heartbeat|fate|receipts/[0-9]{8}\.json|finished/[0-9]{6,}\.json"
    r"|(leases|permits|tmp)/[0-9a-f]{32}(\.json)?|_claims/[a-z]+/[0-9]{6,}\.json"
)
_OBJECT = re.compile(
    rf"zarr\.json|(shards|_sums)/zarr\.json|((shards|_sums)/)?{_ARRAY}|{BUILD}/({_SCRATCH})"
    r"|(.*/)?\.([^/]+\.)?[0-9a-f]{32}\.tmp"
)
"""Names that objects of a version have, from the beginning of its build on."""


def pull_claim(version: str) -> str:
    """Name of the claim to put a copy of a version together."""
    return f"{version}-pull"


class ListedObject(NamedTuple):
    """One object.

    Attributes
    ----------
    mtime
        Unix time of its last change, by the store's clock; infinite where unknown.
    inode
        Device and number; None in a bucket, where no two names are one object.
    links
        Names that its bytes have, in this store or not.
    """

    name: str
    size: int
    mtime: float
    inode: tuple[int, int] | None = None
    links: int = 1


@dataclass(frozen=True)
class StoredVersion:
    """A folder of a version, or of a copy under way, with all that lies in it.

    Attributes
    ----------
    name
        Below the store.
    complete
        Whether its group's document is there.
    link
        Whether it is a link with a version's name, which is no version.
    scratch
        Whether it has what is to be gone after a commit.
    """

    name: str
    complete: bool
    objects: tuple[ListedObject, ...]
    build: BuildStatus | None
    link: bool = False
    scratch: bool = False

    @property
    def version(self) -> str:
        """Id of the version that it is, or is a copy of."""
        return self.name.rpartition("/")[2]

    @property
    def nbytes(self) -> int:
        return sum(each.size for each in self.objects)

    def idle_seconds(self, now: float, committed: bool) -> float:
        """Since anybody was last at work on it: what is committed is not made any more.

        Parameters
        ----------
        now
            Unix time, by the store's clock.
        """
        under = (f"{BUILD}/", f"{COPIES}/") if committed else ""
        changed = [each.mtime for each in self.objects if each.name.startswith(under)]
        return max(0.0, now - max(changed, default=0.0))


def look_around(store: Folder, log: Sequence[Commit]) -> list[StoredVersion]:
    """Every folder of a store that is a version's or a copy's, and links with such names."""
    names = {name for name in store.names() if VERSION.fullmatch(name)}
    records = _records(store)
    copies = []
    if store.local("") is not None and not is_link(store, COPIES):
        copies = [f"{COPIES}/{name}" for name in store.names(COPIES) if VERSION.fullmatch(name)]
    below = [*sorted(names | records.keys()), *copies]
    places = (look(store, name, log, records) for name in below)
    return [place for place in places if place is not None]


def look(
    store: Folder,
    name: str,
    log: Sequence[Commit],
    records: Mapping[str, ListedObject] | None = None,
) -> StoredVersion | None:
    """One place of a store, as it is at this moment; None where it is somebody else's, or gone."""
    path, folder = store.local(name), store.folder(name)
    if is_link(store, name):
        return StoredVersion(name, False, (), None, link=True)
    if path is not None and not path.is_dir():
        return None
    version = name.rpartition("/")[2]
    record = (_records(store) if records is None else records).get(version)
    objects = tuple(_objects(folder))
    names = {each.name for each in objects}
    build = read_build_or_none(folder) if DESCRIPTION in names else None
    scratch = any(each.startswith(f"{BUILD}/") for each in names)
    build_path = None if path is None else path / BUILD
    scratch = scratch or (build_path is not None and os.path.lexists(build_path))
    # Nobody else has a folder of scratch in which nothing is but what is ours.
    copy = path is not None and name != version
    logged = any(each.version == version for each in log)
    marked = copy or logged or (scratch and ROOT not in names)
    ours = (
        build is not None
        or (ROOT in names and version_of(_get(folder, ROOT)) == version)
        or (record is not None and version_of(_get(store, record.name)) == version)
        or (marked and all(map(_OBJECT.fullmatch, names)))
    )
    if not ours:
        return None
    if record is not None:
        objects += (record,)
    return StoredVersion(name, ROOT in names, objects, build, scratch=scratch or record is not None)


def version_of(document: bytes | None) -> str | None:
    """The version that a group's `zarr.json` is of; None where it is none of ours."""
    try:
        found: Any = from_json(document or b"")
    except ValueError:
        return None
    for key in ("attributes", "precache", "version"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def real_nbytes(objects: Iterable[ListedObject]) -> int:
    """Bytes on the disk: those with several names counted once."""
    sizes = {each.inode or number: each.size for number, each in enumerate(objects)}
    return sum(sizes.values())


def _get(folder: Folder, name: str) -> bytes | None:
    """An object's bytes; None where it cannot be read: somebody else's may be anything."""
    try:
        return folder.get(name)
    except StorageError:
        return None


def _records(store: Folder) -> dict[str, ListedObject]:
    """Version -> record in a bucket of a copy under way, by its name below the store."""
    if store.local("") is not None:
        return {}
    found = _objects(store.folder(COPIES))
    return {
        each.name: each._replace(name=f"{COPIES}/{each.name}")
        for each in found
        if VERSION.fullmatch(each.name)
    }


def _objects(folder: Folder) -> Iterator[ListedObject]:
    path = folder.local("")
    if path is not None:
        if folder.exists():  # and is no link out of the store
            yield from _files(path)
        return
    try:
        for each in folder.walk():
            mtime = each.mtime_ns / 1e9 if each.mtime_ns > 0 else math.inf
            yield ListedObject(each.name, max(0, each.size), mtime)
    except StorageError as error:
        if not is_missing(error):
            raise


def _files(root: Path) -> Iterator[ListedObject]:
    """Files, and links to folders, which are not followed; they come and go while a build works."""
    for folder, folders, names in os.walk(root):
        links = (path for name in folders if (path := Path(folder, name)).is_symlink())
        for path in (*(Path(folder, name) for name in names), *links):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                where = path.relative_to(root).as_posix()
                inode = (found.st_dev, found.st_ino)
                yield ListedObject(where, found.st_size, found.st_mtime, inode, found.st_nlink)


# --- times --------------------------------------------------------------------------------------


def dated_log(store: Folder, log: Sequence[Commit]) -> list[Commit]:
    """The log with the times that the store gave its entries, infinite where unknown."""
    times = {each.name: each.mtime for each in _objects(store.folder("commits"))}
    return [
        dataclasses.replace(each, time=times.get(f"{each.number:06d}.json", math.inf))
        for each in log
    ]


def store_clock(store: Folder) -> Callable[[], float]:
    """Unix time by the store's clock, which is asked once; it must be writable."""
    now = _touch(store)
    asked = time.monotonic()
    return lambda: now + time.monotonic() - asked


def _touch(store: Folder) -> float:
    path = store.local("")
    if path is not None:
        try:
            os.utime(path)  # takes no space, of which there may be none
            return path.stat().st_mtime
        except OSError as error:
            raise StorageError(f"cannot write to {path}: {error.strerror}") from error
    while True:
        name = uuid.uuid4().hex
        store.put(f"{TRASH}/now/{name}", [b"now"])
        times = {each.name: each.mtime for each in _objects(store.folder(f"{TRASH}/now"))}
        store.remove(f"{TRASH}/now")  # with those of runs that were killed
        if name in times:  # another run may do the same
            return times[name] if times[name] < math.inf else time.time()
