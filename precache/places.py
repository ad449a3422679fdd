"""What lies in the folders of a store that have a version's name."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from precache.commits import BUILD, ROOT
from precache.errors import StorageError
from precache.folder import Folder, is_missing
from precache.status import BuildStatus, read_build

_VERSION = re.compile("[0-9a-f]{32}")


class StoredObject(NamedTuple):
    """One object.

    Attributes
    ----------
    mtime
        Unix time of its last change; 0 where unknown.
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
class Place:
    """A folder that has a version's name, with all that lies in it.

    Attributes
    ----------
    complete
        Whether its group's document is there.
    """

    name: str
    complete: bool
    objects: tuple[StoredObject, ...]
    build: BuildStatus | None

    @property
    def nbytes(self) -> int:
        return sum(each.size for each in self.objects)

    def changed(self, under: str = "") -> float:
        """Unix time of the last change below a folder; 0 where there is nothing."""
        return max((o.mtime for o in self.objects if o.name.startswith(under)), default=0.0)

    def idle_seconds(self, now: float, committed: bool) -> float:
        """Since anybody was last at work on it: what is committed is not made any more."""
        idle = now - self.changed(f"{BUILD}/" if committed else "")
        if self.build is not None and self.build.idle_seconds is not None:
            idle = min(idle, self.build.idle_seconds)
        return max(0.0, idle)


def look(store: Folder, name: str) -> Place:
    """One folder of a store, as it is at this moment."""
    folder = store.folder(name)
    objects = tuple(_objects(folder))
    complete = any(each.name == ROOT for each in objects)
    return Place(name, complete, objects, read_build(folder))


def look_around(store: Folder) -> list[Place]:
    """Every folder of a store that has a version's name."""
    return [look(store, name) for name in store.names() if _VERSION.fullmatch(name)]


def real_nbytes(objects: Iterable[StoredObject]) -> int:
    """Bytes on the disk: those with several names counted once."""
    sizes = {each.inode or number: each.size for number, each in enumerate(objects)}
    return sum(sizes.values())


def _objects(folder: Folder) -> Iterator[StoredObject]:
    path = folder.local("")
    if path is not None:
        if folder.exists():  # and is no link out of the store
            yield from _files(path)
        return
    try:
        for each in folder.walk():
            mtime = each.mtime_ns / 1e9 if each.mtime_ns > 0 else 0.0
            yield StoredObject(each.name, max(0, each.size), mtime)
    except StorageError as error:
        if not is_missing(error):
            raise


def _files(root: Path) -> Iterator[StoredObject]:
    """Files come and go while a build works."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                where = path.relative_to(root).as_posix()
                inode = (found.st_dev, found.st_ino)
                yield StoredObject(where, found.st_size, found.st_mtime, inode, found.st_nlink)
