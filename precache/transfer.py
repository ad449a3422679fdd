"""Pull and push: a whole version from one store to another, one object at a time, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from precache.commits import BUILD, ROOT, append_commit
from precache.errors import DamageError, StorageError, StoreError, UsageError
from precache.folder import Folder
from precache.prefetch import prefetch
from precache.storage import StorageOptions, open_folder
from precache.store import open_version, split_uri
from precache.version import Version

THREADS = 4
"""Objects under way at a time; each is in memory whole."""

SCRATCH = f"{BUILD}/tmp"
Tick = Callable[[int], None]


@dataclass(frozen=True)
class Transferred:
    """What a transfer did: `objects` of `nbytes` were copied, `skipped` were there already."""

    version: str
    path: str
    objects: int
    nbytes: int
    skipped: int


@dataclass(frozen=True)
class _Object:
    """One object of a version: its size and, for a shard, its XXH3-64."""

    name: str
    size: int
    xxh3: int | None = None


def pull(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str],
    tick: Tick = lambda nbytes: None,
    storage_options: StorageOptions = None,
) -> Transferred:
    """Copy a version into another store, from or to a bucket alike, and make it current there.

    What is there already, with its checksum, is not copied again; stopped at any moment, the same
    call continues. Shards are checked on their way.

    Parameters
    ----------
    uri
        A store, or ``STORE@prefix``; path or URL.
    to
        The other store; made if missing.
    tick
        Told the bytes of each object that is done.
    storage_options
        Of remote file systems, as their fsspec classes take them.

    Raises
    ------
    DamageError
        An object is not what its version says, however often it is read.
    StorageError
        An object cannot be read or written.
    """
    version = open_version(uri, None, storage_options)
    if version.foreign:
        raise StoreError(f"{version.path} is not a version that precache wrote; copy it as it is")
    if split_uri(to, storage_options)[1] is not None:
        raise UsageError(f"{to} names a version; give the store itself")
    store = open_folder(to, storage_options)
    target = store.folder(version.id)
    objects = list(_objects(version))
    copied = skipped = nbytes = 0
    copy = partial(_copy, version.folder, target)
    for each, was_there in prefetch(copy, objects, THREADS, 2 * THREADS):
        copied, skipped = copied + (not was_there), skipped + was_there
        nbytes += 0 if was_there else each.size
        tick(each.size)
    there = target.sizes()
    gone = [each.name for each in objects if there.get(each.name) != each.size >= 0]
    if gone:
        raise StorageError(
            f"{target.path(gone[0])} was removed while others were copied; run the same again"
        )
    # The group's own document last: only a whole version has it.
    target.put(ROOT, [version.folder.read(ROOT)], scratch=SCRATCH)
    append_commit(store, version.id)
    target.remove(BUILD)
    return Transferred(version.id, str(target), copied, nbytes, skipped)


def _objects(version: Version) -> Iterator[_Object]:
    """Everything of a version but its group's document, large objects first."""
    shards = {
        f"{name}/c/{number}" + "/0" * len(version.arrays[name][1].row_shape): (size, xxh3)
        for name in version.stored
        for number, (size, xxh3) in enumerate(_table(version, name).tolist())
    }
    for name, (size, xxh3) in shards.items():
        yield _Object(name, size, xxh3)
    for name, size in version.folder.sizes().items():
        if name not in shards and name != ROOT and not name.startswith(f"{BUILD}/"):
            yield _Object(name, size)


def _table(version: Version, name: str) -> np.ndarray:
    table = version.shard_table(name)
    assert table is not None  # it is a version of ours
    return table


def _copy(source: Folder, target: Folder, each: _Object) -> tuple[_Object, bool]:
    """Copy one object; the second value says whether it was there."""
    if target.size(each.name) == each.size and _holds(target, each):
        return each, True
    data = source.read(each.name)
    if not _is(each, data):
        data = source.read(each.name)  # bytes may change on their way
    if not _is(each, data):
        raise DamageError(
            f"{source.path(each.name)} is damaged: its checksum does not hold; delete it and run "
            "the same precache build command again to repair it"
        )
    target.put(each.name, [data], scratch=SCRATCH)
    return each, False


def _holds(target: Folder, each: _Object) -> bool:
    """Whether what is there is right; small objects without a checksum are copied again."""
    if each.xxh3 is None:
        return False
    try:
        return _is(each, target.read(each.name))
    except StorageError:
        return False


def _is(each: _Object, data: bytes) -> bool:
    if each.xxh3 is None:
        return each.size in (-1, len(data))
    return len(data) == each.size and xxhash.xxh3_64_intdigest(data) == each.xxh3
