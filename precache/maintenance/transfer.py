"""Pull and push: copy a whole version from one store to another, object by object, resumably.

Only objects whose names follow from the version's metadata (`object_names`) are copied, never what
a listing finds. Each is checked before it is put: a shard against the version's table, all others
by opening them as the version.

- On a local disk the copy is assembled in ``_pull`` and renamed into place when it is complete. A
  damaged or unfinished version that was there is replaced by the same rename.
- In a bucket the objects are put in their final place, `zarr.json` last. A version that is
  committed there is only repaired, by objects that its own tables list.

If the target has the version undamaged, by its own tables, it is only made current.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from precache.errors import (
    DamageError,
    GoneError,
    PrecacheError,
    StorageError,
    StoreError,
)
from precache.maintenance.location import open_for_writing
from precache.maintenance.scan import COPIES, TRASH, pull_lease_name, scan_folder
from precache.maintenance.verify import Tick, check_metadata
from precache.messages import printable
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder, is_missing
from precache.storage.local import LocalFolder
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
from precache.store.object_names import ObjectNames
from precache.store.open import open_own, open_version, split_uri
from precache.store.version import VERIFY_HINT, Version
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


@dataclass(frozen=True)
class _NamedObject:
    """Name, size and XXH3-64 checksum of a shard's object."""

    name: str
    size: int
    xxh3: int

    def matches(self, data: bytes) -> bool:
        """Return whether `data` are its bytes."""
        return len(data) == self.size and xxhash.xxh3_64_intdigest(data) == self.xxh3

    def is_in(self, folder: Folder) -> bool:
        """Return whether a folder has it undamaged."""
        try:
            return folder.size(self.name) == self.size and self.matches(folder.read(self.name))
        except StorageError:
            return False

    def read(self, source: Folder) -> bytes:
        """Read its bytes; raises `DamageError` if they are wrong twice."""
        for _ in range(2):  # a transfer can corrupt bytes
            data = source.read_first(self.name, self.size + 1)
            if self.matches(data):
                return data
        raise DamageError(
            f"{source.path(self.name)} is damaged: its checksum does not hold; {VERIFY_HINT}"
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

    def add_shards(self, shards: Iterable[tuple[_NamedObject, bool]]) -> None:
        """Count shards, each with whether it existed before."""
        for shard, existed in shards:
            self.skipped += existed
            self.add_objects([] if existed else [shard.size])
            self._tick(shard.size)


@dataclass(frozen=True)
class _Metadata:
    """All objects of a version but its shards, read from its store and checked.

    Attributes
    ----------
    version
        The version opened from these objects.
    root
        The `zarr.json` of the group.
    objects
        Name -> bytes of all other objects.
    """

    version: Version
    root: bytes
    objects: dict[str, bytes]
    shards: list[_NamedObject]


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
            metadata = _read_metadata(version)
            if on_disk:
                _copy_to_disk(version.folder, metadata, store, progress)
            else:
                with decision_lease(store, version.id) as decision:
                    if _require_free_or_committed(store, version.id):
                        _repair(version.folder, metadata, target, progress, decision)
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


def _undamaged_shards(folder: Folder) -> list[_NamedObject] | None:
    """Return the shards of a version if it is complete by its own tables; otherwise None."""
    try:
        version = open_own(folder)
        _check(version)
        shards = _shards(version)
    except PrecacheError:
        return None
    present = prefetch(lambda shard: shard.is_in(folder), shards, THREADS, 2 * THREADS)
    with contextlib.closing(present):
        return shards if version.id == folder.name and all(present) else None


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


def _check(version: Version) -> None:
    """Raise if an object other than a shard is missing or damaged."""
    for flaw in check_metadata(version)[0]:
        raise DamageError(f"{version.folder.path(flaw.name)} is damaged: {flaw.reason}")


def _read_existing(folder: Folder, names: Sequence[str]) -> dict[str, bytes]:
    """Read the objects that exist."""
    existing = {}
    for name, data in zip(names, folder.read_many(names, [-1] * len(names)), strict=True):
        if isinstance(data, bytes):
            existing[name] = data
        elif not is_missing(data):
            raise data
    return existing


def _shards(version: Version) -> list[_NamedObject]:
    assert version.attributes is not None
    tables = {name: version.shard_table(name) for name in version.stored}
    names = ObjectNames.of(version.attributes).shards
    return [
        _NamedObject(object_name, size, xxh3)
        for name, table in tables.items()
        if table is not None
        for object_name, (size, xxh3) in zip(names[name], table.tolist(), strict=True)
    ]


def _read_metadata(version: Version) -> _Metadata:
    """Read all objects of a version but its shards; raises `DamageError` if one is damaged."""
    assert version.attributes is not None
    version.prefetch(version.stored)
    contents, problem = ObjectNames.of(version.attributes), ""
    for _ in range(2):  # a transfer can corrupt bytes
        names = [ROOT, *contents.small]
        objects = dict(zip(names, prefetch(version.small_object, names, THREADS, 8), strict=True))
        root = objects.pop(ROOT)
        with tempfile.TemporaryDirectory(prefix="precache-pull-") as path:
            for name, data in [*objects.items(), (ROOT, root)]:
                Path(path, name).parent.mkdir(parents=True, exist_ok=True)
                Path(path, name).write_bytes(data)
            try:
                own = open_own(LocalFolder(Path(path)))
                _check(own)
                if own.attributes == version.attributes:
                    return _Metadata(own, root, objects, _shards(own))
                problem = f"{version.folder.path(ROOT)} has changed"
            except PrecacheError as error:
                problem = str(error).replace(path, version.path)
    raise DamageError(f"{problem}; run the same precache build command again to repair it")


# --- copying ------------------------------------------------------------------------------------


def _copy_to_bucket(
    source: Folder,
    metadata: _Metadata,
    target: Folder,
    progress: _Progress,
    decision: ExclusiveLease,
) -> None:
    """Put the objects of a version in their final place in a bucket, `zarr.json` last.

    A build of the version waits until `decision` ends, and so changes none of them.
    """

    def put_shard(shard: _NamedObject) -> tuple[_NamedObject, bool]:
        if shard.is_in(target):
            return shard, True
        data = shard.read(source)
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
    metadata: _Metadata,
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


def _require_all(metadata: _Metadata, target: Folder) -> None:
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
    source: Folder,
    metadata: _Metadata,
    target: Folder,
    progress: _Progress,
    decision: ExclusiveLease,
) -> None:
    """Put the missing and damaged objects of a committed version in a bucket."""
    if target.get(ROOT) == metadata.root:  # then all other objects are the same, too
        existing = _read_existing(target, list(metadata.objects))
        for name, data in metadata.objects.items():
            if existing.get(name) != data:
                _require_held(decision, target)
                target.put(name, [data])
                progress.add_objects([len(data)])
    advice = (
        "repair it with the precache build command that built it, or remove that folder and run "
        "the same command again"
    )
    try:
        version = open_own(target)
        _check(version)
        shards = _shards(version)
    except PrecacheError as error:
        raise StoreError(
            f"version {target.name} of {target} is damaged and cannot be repaired from {source}: "
            f"{error}; {advice}"
        ) from None

    def repair(shard: _NamedObject) -> tuple[_NamedObject, bool]:
        if shard.is_in(target):
            return shard, True
        try:
            data = shard.read(source)
        except DamageError:
            raise StoreError(
                f"{target.path(shard.name)} is damaged, and {source.path(shard.name)} has other "
                f"bytes: {advice}"
            ) from None
        _require_held(decision, target)
        target.put(shard.name, [data])
        return shard, False

    progress.add_shards(prefetch(repair, shards, THREADS, 2 * THREADS))


def _copy_to_disk(source: Folder, metadata: _Metadata, store: Folder, progress: _Progress) -> None:
    """Assemble a version beside its place on a local disk, then rename it into place."""
    version = metadata.version.id
    target, copy = store.folder(version), store.folder(_copy_name(version))

    def put_shard(shard: _NamedObject) -> tuple[_NamedObject, bool]:
        if shard.is_in(copy):
            return shard, True
        if shard.is_in(target):
            with contextlib.suppress(StorageError):  # another process may remove it
                copy.copy(shard.name, target, shard.name, scratch=TEMPORARY)
                return shard, True
        copy.put(shard.name, [shard.read(source)], scratch=TEMPORARY)
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
