"""Pull and push: copy a whole version from one store to another, object by object, resumably.

Only objects that the version's tree of digests names are copied, never what a listing finds. Each
is checked before it is put; those that are there with the same bytes are not copied again. The root
comes last. So a copy that was cut off is resumed, and a damaged version mended, by the same call.

The copy is a build of its version as far as others see: it holds the version's lease. Where the
other store has the same id with another root, the copy is a generation of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import partial

from precache.errors import DamageError, GoneError, StorageError
from precache.maintenance.location import open_for_writing
from precache.maintenance.scan import scan_folder
from precache.maintenance.verify import Tick
from precache.messages import printable
from precache.runtime.threads import prefetch
from precache.storage.base import Folder
from precache.storage.open import StorageOptions
from precache.store.build_status import COPY, DESCRIPTION, remove_abandoned_scratch
from precache.store.commit_log import (
    BUILD,
    ROOT,
    VERSION,
    Log,
    folder_name,
    generation_of,
    id_of,
    make_current,
    read_log,
    require_create_only,
    short,
)
from precache.store.json_documents import LeaseDocument
from precache.store.lease import Leases
from precache.store.open import open_version, split_uri
from precache.store.tree import CHECKSUM, Leaf, seal_of, spare_objects
from precache.store.version import REPAIR_HINT, VERIFY_HINT, Version
from precache.units import size

log = logging.getLogger(__name__)

THREADS = 4
"""Objects that are copied at the same time; each is in memory as a whole."""

TEMPORARY = f"{BUILD}/tmp"
"""Folder of temporary files in a copy."""


@dataclass(frozen=True)
class Transferred:
    """Result of a transfer; `objects` of `nbytes` were copied, `skipped` shards existed already.

    `replaced` is the version of the other store that was current before, if that is another one.
    """

    version: str
    path: str
    objects: int
    nbytes: int
    skipped: int
    replaced: str | None = None

    def __str__(self) -> str:
        skipped = f"; {self.skipped} existed" if self.skipped else ""
        if self.replaced:
            skipped += f"; it is current there in place of {short(self.replaced)}"
        return (
            f"version {short(self.version)} is at {printable(self.path)}: "
            f"{self.objects} objects, {size(self.nbytes)} copied{skipped}"
        )


def pull(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str],
    tick: Tick = lambda nbytes: None,
    storage_options: StorageOptions = None,
) -> Transferred:
    """Copy a version into another store, local or remote, and make it current there.

    If it is stopped, the same call resumes: shards that exist with the right checksum are not
    copied again. Every object is checked before it is put.

    Parameters
    ----------
    uri
        A store, or ``STORE@prefix``; path or URL.
    to
        The other store, which is created if missing.
    tick
        Called with the size of each shard that is done.
    storage_options
        As `open` takes them.

    Raises
    ------
    UsageError
        `to` holds something else than a store, or lies inside of the store that is copied.
    DamageError
        An object of the source is damaged.
    StoreError
        There is no such version; or the other store has it in a state that a copy cannot repair.
    StorageError
        An object cannot be read or written.
    """
    origin = split_uri(uri, storage_options)[0]
    store = open_for_writing(to, origin, storage_options)
    last = ""
    while True:
        version = open_version(uri, storage_options)
        try:
            with version.unless_gone():
                return _pull(version, store, tick)
        except GoneError:
            if version.id == last:
                raise
            last = version.id
        # Open the store again: it may have another current version, or raise that it is gone.


def push(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str],
    tick: Tick = lambda nbytes: None,
    storage_options: StorageOptions = None,
) -> Transferred:
    """Copy a version to another store, such as one in a bucket; `pull` under the other name.

    Parameters
    ----------
    uri, to, tick, storage_options
        As in `pull`.

    Raises
    ------
    PrecacheError
        As in `pull`.
    """
    return pull(uri, to, tick, storage_options)


def _pull(version: Version, store: Folder, tick: Tick) -> Transferred:
    while True:
        target = _place(store, version)
        with Leases(target).wait(partial(_say_waiting, target)):
            if _is_free(entries := read_log(store), store, target.name, version):
                copied, skipped = _copy(version, target, store, tick)
                make_current(store, target.name)
                break
    remove_abandoned_scratch(target)  # not needed once the version is complete and current
    before = entries.current.version if entries.current else None
    replaced = None if before == target.name else before
    return Transferred(
        target.name, str(target), len(copied), sum(copied), skipped, replaced=replaced
    )


def _say_waiting(target: Folder, lease: LeaseDocument) -> None:
    log.warning("waiting for %s, which works on %s", lease.holder, target)


# --- places -------------------------------------------------------------------------------------


def _place(store: Folder, version: Version) -> Folder:
    """Return the folder of a version in another store: the one that has it, or is a copy begun.

    Or else that of the next generation, of the version's own number if that is free.
    """
    entries, names = read_log(store), store.names()
    free = [
        name for name in _generations(store, version.id) if _is_free(entries, store, name, version)
    ]
    # What others put into its place is none, though the log names it.
    free = [name for name in free if scan_folder(store, name, entries) or _is_empty(store, name)]
    if free:
        return store.folder(max(free, key=lambda n: _root_of(store.folder(n), entries) is not None))
    own = id_of(version.id)
    generation = max(generation_of(version.id), entries.next_generation(own, names))
    return store.folder(folder_name(own, generation))


def _generations(store: Folder, version: str) -> list[str]:
    """Return the folders that a store has of a version's id, the newest first."""
    names = [name for name in store.names() if VERSION.fullmatch(name)]
    own = [name for name in names if id_of(name) == id_of(version) and not store.is_link(name)]
    return sorted(own, key=generation_of, reverse=True)


def _is_empty(store: Folder, name: str) -> bool:
    """Return True for a folder without anything in it, as of a copy that has just begun."""
    path = store.local(name)
    return (path is None or path.is_dir()) and not store.folder(name).names()


def _root_of(target: Folder, entries: Log) -> str | None:
    """Return the digest of the root that a folder has, had, or is to get; None if it is unknown."""
    return (
        entries.root_of(target.name)
        or seal_of(target.get(ROOT) or b"")
        or seal_of(target.get(COPY) or b"")
    )


def _is_free(entries: Log, store: Folder, name: str, version: Version) -> bool:
    """Return whether a folder is that of this version, or nothing is known to be made there.

    A build may have begun there, or `gc` removed it, before the lease was taken.
    """
    if name in entries.removed:
        return False
    target = store.folder(name)
    root = _root_of(target, entries)
    return root == version.digest or (root is None and target.get(DESCRIPTION) is None)


# --- copying ------------------------------------------------------------------------------------


def _copy(version: Version, target: Folder, store: Folder, tick: Tick) -> tuple[list[int], int]:
    """Put what a folder lacks of a version: shards, other objects, and the root last.

    Returns sizes of objects that were put, but the root, and how many shards were there.

    An object is put only if it has the bytes that the version's tree names, so whatever else wrote
    to the folder wrote the same ones.
    """
    require_create_only(target, TEMPORARY)
    shards = [leaf for name in version.stored for leaf in version.shard_leaves(name)]
    objects, root = _read(version)
    if target.size(ROOT) is None:
        target.put(COPY, [root], scratch=TEMPORARY)
    relatives = [name for name in _generations(store, target.name) if name != target.name]

    def put_shard(shard: Leaf) -> int:
        if shard.is_in(target):
            return -1
        for folder in map(store.folder, relatives):
            if folder.size(shard.name) == shard.size and shard.is_in(folder):
                with contextlib.suppress(StorageError):  # another process may remove it
                    target.copy(shard.name, folder, shard.name, scratch=TEMPORARY)
                    return -1
        target.put(shard.name, [shard.read(version.folder, VERIFY_HINT)], scratch=TEMPORARY)
        return shard.size

    def put(item: tuple[str, bytes]) -> int:
        name, data = item
        if target.get(name) == data:
            return -1
        target.put(name, [data], scratch=TEMPORARY)
        return len(data)

    sizes = list[int]()
    done = prefetch(put_shard, shards, THREADS, 2 * THREADS)
    for shard, nbytes in zip(shards, done, strict=True):
        sizes.append(nbytes)
        tick(shard.size)
    skipped = sizes.count(-1)
    sizes += prefetch(put, objects.items(), THREADS, 2 * THREADS)
    put((ROOT, root))
    return [nbytes for nbytes in sizes if nbytes >= 0], skipped


def _read(version: Version) -> tuple[dict[str, bytes], bytes]:
    """Read all objects of a version but its shards: name -> bytes, and the root.

    Raises `DamageError` if one is damaged.
    """
    objects = version.small_objects(list(version.leaves))
    root = version.folder.read(ROOT)
    if seal_of(root) != version.digest:
        where = version.folder.path(ROOT)
        raise DamageError(f"{where} has changed: {CHECKSUM}; {REPAIR_HINT}")
    return {**objects, **spare_objects(root, objects.values())}, root
