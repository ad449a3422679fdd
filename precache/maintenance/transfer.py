"""Pull and push: copy a whole version from one store to another, object by object, resumably.

Only objects that the version's tree of digests names are copied, never what a listing finds. Each
is checked before it is put.

- On a local disk the copy is assembled in ``_pull`` and renamed into place when it is complete. A
  damaged or unfinished version that was there is replaced by the same rename.
- In a bucket the objects are put in their final place, `zarr.json` last. A version that is
  committed there is only repaired, by objects that its own tree names.

If the target has the version undamaged, it is only made current.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from precache.errors import (
    DamageError,
    GoneError,
    PrecacheError,
    StorageError,
    StoreError,
)
from precache.maintenance.location import open_for_writing
from precache.maintenance.mending import mended_objects
from precache.maintenance.scan import COPIES, TRASH, pull_lease_name, scan_folder
from precache.maintenance.verify import Tick
from precache.messages import printable
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder
from precache.storage.open import StorageOptions
from precache.storage.rename import exchange, move, refuse_link, remove_if_empty
from precache.store.build_status import remove_abandoned_scratch
from precache.store.commit_log import (
    BUILD,
    ROOT,
    Commit,
    append_commit,
    require_create_only,
)
from precache.store.lease import ExclusiveLease, NamedLease, decision_lease, live_leases
from precache.store.open import open_own, open_version, split_uri
from precache.store.small_arrays import READ_TOGETHER
from precache.store.tree import CHECKSUM, Leaf, seal_of, spare_objects
from precache.store.version import REPAIR_HINT, VERIFY_HINT, Version
from precache.units import size

THREADS = 4
"""Objects that are copied at the same time; each is in memory as a whole."""

TEMPORARY = f"{BUILD}/tmp"
"""Folder of temporary files in a copy."""


@dataclass(frozen=True)
class Transferred:
    """Result of a transfer; `objects` of `nbytes` were copied, `skipped` shards existed already."""

    version: str
    path: str
    objects: int
    nbytes: int
    skipped: int

    def __str__(self) -> str:
        skipped = f"; {self.skipped} existed" if self.skipped else ""
        return (
            f"version {self.version[:8]} is at {printable(self.path)}: {self.objects} objects, "
            f"{size(self.nbytes)} copied{skipped}"
        )


class _Progress:
    """Counts copied objects and reports progress."""

    def __init__(self, tick: Tick) -> None:
        self.objects = self.nbytes = self.skipped = 0
        self._tick = tick

    def add_objects(self, sizes: Iterable[int]) -> None:
        """Count copied objects by their sizes."""
        for nbytes in sizes:
            self.objects, self.nbytes = self.objects + 1, self.nbytes + nbytes

    def add_shards(self, shards: Iterable[tuple[Leaf, bool]]) -> None:
        """Count shards, each with whether it existed before."""
        for shard, existed in shards:
            self.skipped += existed
            self.add_objects([] if existed else [shard.size])
            self._tick(shard.size)


@dataclass(frozen=True)
class _Copied:
    """A version to copy: its root, its other objects but the shards, and what its shards are.

    Attributes
    ----------
    objects
        Name -> bytes.
    """

    version: Version
    root: bytes
    objects: dict[str, bytes]
    shards: list[Leaf]


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
        Options of remote file systems, as their fsspec classes take them.

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
        version = open_version(uri, None, storage_options)
        if version.foreign:
            raise StoreError(
                f"{version.path} was not written by precache; copy it with other tools"
            )
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

    Errors are those of `pull`.

    Parameters
    ----------
    uri, to, tick, storage_options
        As in `pull`.
    """
    return pull(uri, to, tick, storage_options)


def _pull(version: Version, store: Folder, tick: Tick) -> Transferred:
    target, progress = store.folder(version.id), _Progress(tick)
    refuse_link(store, COPIES)
    with NamedLease(store, pull_lease_name(version.id)).acquire():
        shards = _undamaged_shards(target)
        if shards is not None:
            progress.add_shards((shard, True) for shard in shards)
        else:
            _require_free_or_committed(store, version.id)
            on_disk = store.local("") is not None
            destination = store.folder(_copy_name(version.id)) if on_disk else target
            require_create_only(destination, TEMPORARY)
            metadata = _read(version)
            if on_disk:
                _copy_to_disk(version.folder, metadata, store, progress)
            else:
                with decision_lease(store, version.id) as decision:
                    if _require_free_or_committed(store, version.id):
                        _repair(metadata, target, progress, decision)
                    else:
                        store.put(_copy_name(version.id), [metadata.root])
                        _copy_to_bucket(version.folder, metadata, target, progress, decision)
        append_commit(store, version.id)
        # Not needed once the version is complete and current.
        store.remove(_copy_name(version.id))
        remove_if_empty(store, COPIES)
        remove_abandoned_scratch(target)
    return Transferred(version.id, str(target), progress.objects, progress.nbytes, progress.skipped)


# --- checks -------------------------------------------------------------------------------------


def _undamaged_shards(folder: Folder) -> list[Leaf] | None:
    """Return the shards of a version if it is whole by its own tree; otherwise None."""
    try:
        version = open_own(folder)
        if version.flaws():
            return None
        shards = _shards(version)
    except PrecacheError:
        return None
    present = prefetch(lambda leaf: _is_in(folder, leaf), shards, THREADS, 2 * THREADS)
    with contextlib.closing(present):
        return shards if all(present) else None


def _is_in(folder: Folder, leaf: Leaf) -> bool:
    try:
        return not leaf.fault_in(folder)
    except StorageError:
        return False


def _require_free_or_committed(store: Folder, version: str) -> bool:
    """Raise if a version's place is taken or a build runs; return whether it is committed."""
    target = store.folder(version)
    scanned = scan_folder(store, version, [Commit(0, version, None, 0.0)])
    if (scanned is None and target.exists()) or (scanned is not None and scanned.link):
        raise StoreError(
            f"{target} is not a version of precache but a link or files of others; move it "
            "elsewhere and run the same command again"
        )
    committed = target.size(ROOT) is not None
    is_built = False
    with contextlib.suppress(StoreError):  # if the description of the build is damaged
        # In a bucket nothing is replaced: what is missing is put beside a repair.
        is_replaced = not committed or store.local("") is not None
        is_built = is_replaced and bool(live_leases(target))
    if is_built:
        how = "repaired" if committed else "built"
        raise StoreError(f"version {version} is being {how} in {store}; wait for its end")
    return committed


def _shards(version: Version) -> list[Leaf]:
    return [leaf for name in version.stored for leaf in version.shard_leaves(name)]


def _read(version: Version) -> _Copied:
    """Read all objects of a version but its shards; raises `DamageError` if one is damaged."""
    version.prefetch(version.stored)
    names = list(version.leaves)
    parts = [names[start : start + READ_TOGETHER] for start in range(0, len(names), READ_TOGETHER)]
    read = itertools.chain.from_iterable(map(version.small_objects, parts))
    objects = dict(zip(names, read, strict=True))
    root = version.folder.read(ROOT)
    if seal_of(root) != version.digest:
        where = version.folder.path(ROOT)
        raise DamageError(f"{where} has changed: {CHECKSUM}; {REPAIR_HINT}")
    objects |= spare_objects(root, objects.values())
    return _Copied(version, root, objects, _shards(version))


# --- copying ------------------------------------------------------------------------------------


def _copy_to_bucket(
    source: Folder,
    metadata: _Copied,
    target: Folder,
    progress: _Progress,
    decision: ExclusiveLease,
) -> None:
    """Put the objects of a version in their final place in a bucket, `zarr.json` last.

    A build of the version waits until `decision` ends, and so changes none of them.
    """

    def put_shard(shard: Leaf) -> tuple[Leaf, bool]:
        if _is_in(target, shard):
            return shard, True
        data = shard.read(source, VERIFY_HINT)
        _require_held(decision, target)
        if not target.create(shard.name, [data]):
            target.put(shard.name, [data])  # a copy or build that was cut off left other bytes
        return shard, False

    progress.add_shards(prefetch(put_shard, metadata.shards, THREADS, 2 * THREADS))
    _put_objects(metadata, target, progress, decision)
    _require_all(metadata, target)
    _require_held(decision, target)
    if not target.create(ROOT, [metadata.root]):
        raise _written_by_another(target)


def _require_held(decision: ExclusiveLease, target: Folder) -> None:
    if not decision.is_held():
        raise _written_by_another(target)


def _written_by_another(target: Folder) -> StorageError:
    return StorageError(f"another process wrote {target}; run the same command again")


def _put_objects(
    metadata: _Copied,
    target: Folder,
    progress: _Progress,
    decision: ExclusiveLease | None = None,
) -> None:
    """Put all objects of a version but its shards and its `zarr.json`."""

    def put(item: tuple[str, bytes]) -> int:
        if decision is not None:
            _require_held(decision, target)
        target.put(item[0], [item[1]], scratch=TEMPORARY)
        return len(item[1])

    progress.add_objects(prefetch(put, metadata.objects.items(), THREADS, 2 * THREADS))


def _require_all(metadata: _Copied, target: Folder) -> None:
    """Raise if another process has removed an object since it was put."""
    sizes = target.sizes()
    expected = {shard.name: shard.size for shard in metadata.shards}
    expected |= {name: len(data) for name, data in metadata.objects.items()}
    gone = [name for name, size in expected.items() if sizes.get(name) != size]
    if gone:
        raise StorageError(
            f"{target.path(gone[0])} was removed during the copy; run the same command again"
        )


def _repair(
    metadata: _Copied, target: Folder, progress: _Progress, decision: ExclusiveLease
) -> None:
    """Put the missing and damaged objects of a committed version in a bucket, by its own tree."""
    source, known = metadata.version.folder, set(metadata.shards)

    def put(name: str, data: bytes) -> None:
        _require_held(decision, target)
        target.put(name, [data])

    def repair(leaf: Leaf) -> tuple[Leaf, bool]:
        put(leaf.name, leaf.read(source, VERIFY_HINT))
        return leaf, False

    try:
        version = open_own(target, mends=True)
        objects = mended_objects(
            version, version.flaws(), lambda leaf: metadata.objects.get(leaf.name)
        )
        shards = _shards(version)
        sound = prefetch(lambda leaf: _is_in(target, leaf), shards, THREADS, 2 * THREADS)
        damaged = [leaf for leaf, is_sound in zip(shards, sound, strict=True) if not is_sound]
        for leaf in damaged:
            if leaf not in known:
                raise StoreError(f"{target.path(leaf.name)} is damaged, and other bytes lie there")
    except (DamageError, StoreError) as error:
        raise StoreError(
            f"version {target.name} of {target} is damaged and cannot be repaired from {source}: "
            f"{error}; repair it with the precache build command that built it, or remove that "
            "folder and run the same command again"
        ) from None
    for name, data in objects.items():
        put(name, data)
    progress.add_objects(map(len, objects.values()))
    progress.add_shards((leaf, True) for leaf in shards if leaf not in damaged)
    progress.add_shards(prefetch(repair, damaged, THREADS, 2 * THREADS))


def _copy_to_disk(source: Folder, metadata: _Copied, store: Folder, progress: _Progress) -> None:
    """Assemble a version beside its place on a local disk, then rename it into place."""
    version = metadata.version.id
    target, copy = store.folder(version), store.folder(_copy_name(version))

    def put_shard(shard: Leaf) -> tuple[Leaf, bool]:
        if _is_in(copy, shard):
            return shard, True
        if _is_in(target, shard):
            with contextlib.suppress(StorageError):  # another process may remove it
                copy.copy(shard.name, target, shard.name, scratch=TEMPORARY)
                return shard, True
        copy.put(shard.name, [shard.read(source, VERIFY_HINT)], scratch=TEMPORARY)
        return shard, False

    progress.add_shards(prefetch(put_shard, metadata.shards, THREADS, 2 * THREADS))
    _put_objects(metadata, copy, progress)
    _require_all(metadata, copy)
    copy.put(ROOT, [metadata.root], scratch=TEMPORARY)
    copy.remove(BUILD)
    with decision_lease(store, version) as decision:
        if _undamaged_shards(target) is None:
            _require_free_or_committed(store, version)
            _require_held(decision, target)
            _replace(store, version)


def _replace(store: Folder, version: str) -> None:
    """Rename a complete copy to the place of a version, and replace what is there."""
    name = _copy_name(version)
    if move(store, name, version) or exchange(store, name, version):
        return  # an exchange leaves the old version in place of the copy
    refuse_link(store, TRASH)
    old = f"{TRASH}/{version}.{uuid.uuid4().hex}"
    move(store, version, old)
    if not move(store, name, version):
        raise StorageError(f"{store.path(name)} was removed; run the same command again")
    store.remove(old)
    remove_if_empty(store, TRASH)


def _copy_name(version: str) -> str:
    """Return the name of the copy in progress; in a bucket that of its record."""
    return f"{COPIES}/{version}"
