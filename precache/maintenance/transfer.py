"""Pull and push: a whole version from one store to another, one object at a time, resumable.

What is copied are the objects whose names follow from the version's metadata (`contents`), never
what a listing finds, and each is checked before it is put: a shard against the version's table, all
else by opening it as the version that it is to be.

- On a local disk a version is put together in ``_pull`` and takes its place at once, when it is
  whole; a damaged or unfinished one that was there makes way in the same moment.
- In a bucket its objects are put where they belong and `zarr.json` last. What is committed there
  is only mended, by objects that its own tables promise.

A version that is there whole, by its own tables, is made current and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from precache.errors import (
    DamageError,
    GoneError,
    PrecacheError,
    StorageError,
    StoreError,
    UsageError,
)
from precache.maintenance.scan import COPIES, TRASH, look, pull_claim
from precache.maintenance.verify import inspected
from precache.messages import shown
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder, is_missing
from precache.storage.local import LocalFolder
from precache.storage.open import StorageOptions, open_folder
from precache.storage.rename import exchange, move, refuse_link, remove_if_empty
from precache.store.build_status import is_alive, remove_abandoned_scratch
from precache.store.commit_log import (
    BUILD,
    ROOT,
    CodeDigests,
    Commit,
    append_commit,
    read_commits,
    recorded_code,
    require_create_only,
)
from precache.store.lease import NamedLease, decision_lease
from precache.store.object_names import ObjectNames
from precache.store.open import open_own, open_version, split_uri
from precache.store.version import Version

THREADS = 4
"""Objects under way at a time; each is in memory whole."""


SCRATCH = f"{BUILD}/tmp"
Tick = Callable[[int], None]


@dataclass(frozen=True)
class Transferred:
    """What a transfer did: `objects` of `nbytes` were copied; `skipped` shards were there."""

    version: str
    path: str
    objects: int
    nbytes: int
    skipped: int


@dataclass(frozen=True)
class _Shard:
    """A shard's object: its name, size and XXH3-64."""

    name: str
    size: int
    xxh3: int

    def holds(self, data: bytes) -> bool:
        """Whether these are its bytes."""
        return len(data) == self.size and xxhash.xxh3_64_intdigest(data) == self.xxh3

    def is_in(self, folder: Folder) -> bool:
        """Whether a folder has it, whole."""
        try:
            return folder.size(self.name) == self.size and self.holds(folder.read(self.name))
        except StorageError:
            return False

    def read(self, source: Folder) -> bytes:
        """Its bytes; `DamageError` where they are others, however often they are read."""
        for _ in range(2):  # they may change on their way
            data = source.read_first(self.name, self.size + 1)
            if self.holds(data):
                return data
        raise DamageError(
            f"{source.path(self.name)} is damaged: its checksum does not hold; delete it and run "
            "the same precache build command again to repair it"
        )


class _Count:
    """What was copied so far."""

    def __init__(self, tick: Tick) -> None:
        self.objects = self.nbytes = self.skipped = 0
        self._tick = tick

    def copy(self, copied: Iterable[int]) -> None:
        """Objects were copied, of so many bytes each."""
        for nbytes in copied:
            self.objects, self.nbytes = self.objects + 1, self.nbytes + nbytes

    def take(self, shards: Iterable[tuple[_Shard, bool]]) -> None:
        """Shards are there, each with whether it was before."""
        for shard, was_there in shards:
            self.skipped += was_there
            self.copy([] if was_there else [shard.size])
            self._tick(shard.size)


@dataclass(frozen=True)
class _Received:
    """All of a version but its shards, read from its store and checked.

    Attributes
    ----------
    version
        As these objects have it.
    objects
        Name of each -> its bytes, `zarr.json` of the group apart.
    """

    version: Version
    root: bytes
    objects: dict[str, bytes]
    shards: list[_Shard]


def pull(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str],
    tick: Tick = lambda nbytes: None,
    storage_options: StorageOptions = None,
) -> Transferred:
    """Copy a version into another store, from or to a bucket alike, and make it current there.

    Where it is there whole, nothing is copied. Stopped at any moment, the same call continues: a
    shard that is there, with its checksum, is not copied again. Everything is checked on its way.

    Parameters
    ----------
    uri
        A store, or ``STORE@prefix``; path or URL.
    to
        The other store; made if missing.
    tick
        Told the bytes of each shard that is done.
    storage_options
        Of remote file systems, as their fsspec classes take them.

    Raises
    ------
    DamageError
        An object is not what its version says, however often it is read.
    StoreError
        There is no such version; or the other store has it, damaged or being built, in a way that
        this cannot mend.
    StorageError
        An object cannot be read or written.
    """
    if split_uri(to, storage_options)[1] is not None:
        raise UsageError(f"{shown(to)} names a version; give the store itself")
    store = open_folder(to, storage_options)
    last = ""
    while True:
        version = open_version(uri, None, storage_options)
        if version.foreign:
            raise StoreError(f"{version.path} is not a version that precache wrote; copy it as is")
        try:
            with version.unless_gone():
                code = recorded_code(_log(uri, storage_options), version.id)
                return _pull(version, store, tick, code)
        except GoneError:
            if version.id == last:
                raise
            last = version.id
        # Opened again, the store gives what is current now, or says that the version is gone.


def push(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str],
    tick: Tick = lambda nbytes: None,
    storage_options: StorageOptions = None,
) -> Transferred:
    """Copy a version to another store, such as one in a bucket; `pull` under the other name.

    Parameters and errors are those of `pull`.
    """
    return pull(uri, to, tick, storage_options)


def _log(uri: str | os.PathLike[str], storage_options: StorageOptions) -> list[Commit]:
    """Of a store; none of a version's folder."""
    return read_commits(open_folder(split_uri(uri, storage_options)[0], storage_options))


def _pull(version: Version, store: Folder, tick: Tick, code: CodeDigests) -> Transferred:
    target, count = store.folder(version.id), _Count(tick)
    refuse_link(store, COPIES)
    with NamedLease(store, pull_claim(version.id)).acquire():
        there = _whole(target)
        if there is not None:
            count.take((shard, True) for shard in there)
        else:
            committed = _require_free(store, version.id)
            on_disk = store.local("") is not None
            place = store.folder(_copy_name(version.id)) if on_disk else target
            require_create_only(place, SCRATCH)
            received = _receive(version)
            if on_disk:
                _put_together(version.folder, received, store, count)
            elif committed:
                _mend(version.folder, received, target, count)
            else:
                _put_in_place(version.folder, received, store, count)
        append_commit(store, version.id, code=code)
        # What is not needed once a version is there whole and current.
        store.remove(_copy_name(version.id))
        remove_if_empty(store, COPIES)
        remove_abandoned_scratch(target)
    return Transferred(version.id, str(target), count.objects, count.nbytes, count.skipped)


# --- what is there ------------------------------------------------------------------------------


def _whole(folder: Folder) -> list[_Shard] | None:
    """The shards of a version that is there with all that its own tables promise; else None."""
    try:
        version = open_own(folder)
        _check(version)
        shards = _shards(version)
    except PrecacheError:
        return None
    have = prefetch(lambda shard: shard.is_in(folder), shards, THREADS, 2 * THREADS)
    with contextlib.closing(have):
        return shards if version.id == folder.name and all(have) else None


def _require_free(store: Folder, version: str) -> bool:
    """Refuse where somebody else has the place of a version, or builds it; else whether it was
    committed.
    """
    target = store.folder(version)
    place = look(store, version, [Commit(0, version, None, 0.0)])
    if (place is None and target.exists()) or (place is not None and place.link):
        raise StoreError(
            f"{target} is no version of precache: a link, or files of others; move it elsewhere "
            "and run the same again"
        )
    committed = target.size(ROOT) is not None
    is_built = False
    with contextlib.suppress(StoreError):  # what describes the build is damaged
        is_built = not committed and is_alive(target)
    if is_built:
        raise StoreError(f"version {version} is being built in {store}; wait for its end")
    return committed


def _check(version: Version) -> None:
    """Raise where anything but a shard is missing or damaged, as far as can be known here."""
    for flaw in inspected(version)[0]:
        raise DamageError(f"{version.folder.path(flaw.name)} is damaged: {flaw.reason}")


def _there(folder: Folder, names: Sequence[str]) -> dict[str, bytes]:
    """Those of some objects that there are."""
    found = {}
    for name, data in zip(names, folder.read_many(names, [-1] * len(names)), strict=True):
        if isinstance(data, bytes):
            found[name] = data
        elif not is_missing(data):
            raise data
    return found


def _shards(version: Version) -> list[_Shard]:
    assert version.attributes is not None
    tables = {name: version.shard_table(name) for name in version.stored}
    names = ObjectNames.of(version.attributes).shards
    return [
        _Shard(object_name, size, xxh3)
        for name, table in tables.items()
        if table is not None
        for object_name, (size, xxh3) in zip(names[name], table.tolist(), strict=True)
    ]


def _receive(version: Version) -> _Received:
    """Read all of a version but its shards; `DamageError` where it is not what it should be."""
    assert version.attributes is not None
    version.prefetch(version.stored)
    contents, problem = ObjectNames.of(version.attributes), ""
    for _ in range(2):  # bytes may change on their way
        names = [ROOT, *contents.small]
        objects = dict(zip(names, prefetch(version.small_object, names, THREADS, 8), strict=True))
        objects |= _there(version.folder, contents.sums)
        root = objects.pop(ROOT)
        with tempfile.TemporaryDirectory(prefix="precache-pull-") as path:
            for name, data in [*objects.items(), (ROOT, root)]:
                Path(path, name).parent.mkdir(parents=True, exist_ok=True)
                Path(path, name).write_bytes(data)
            try:
                own = open_own(LocalFolder(Path(path)))
                _check(own)
                if own.attributes == version.attributes:
                    return _Received(own, root, objects, _shards(own))
                problem = f"{version.folder.path(ROOT)} has changed"
            except PrecacheError as error:
                problem = str(error).replace(path, version.path)
    raise DamageError(f"{problem}; run the same precache build command again to repair it")


# --- putting it ---------------------------------------------------------------------------------


def _put_in_place(source: Folder, received: _Received, store: Folder, count: _Count) -> None:
    """Put a version where it belongs in a bucket, `zarr.json` last."""
    version = received.version.id
    target = store.folder(version)

    def require_free() -> None:
        if target.size(ROOT) is not None or is_alive(target):
            raise StorageError(f"{target} was made by others meanwhile; run the same again")

    def put_shard(shard: _Shard) -> tuple[_Shard, bool]:
        if shard.is_in(target):
            return shard, True
        data = shard.read(source)
        if not target.create(shard.name, [data]):
            with decision_lease(store, version):
                require_free()
                target.put(shard.name, [data])  # a copy that was cut off had other bytes
        return shard, False

    store.put(_copy_name(version), [received.root])
    count.take(prefetch(put_shard, received.shards, THREADS, 2 * THREADS))
    with decision_lease(store, version):
        require_free()
        _put_small(received, target, count)
        _require_all(received, target)
        target.create(ROOT, [received.root])


def _put_small(received: _Received, target: Folder, count: _Count) -> None:
    """Put all of a version but its shards and its `zarr.json`."""

    def put(item: tuple[str, bytes]) -> int:
        target.put(item[0], [item[1]], scratch=SCRATCH)
        return len(item[1])

    count.copy(prefetch(put, received.objects.items(), THREADS, 2 * THREADS))


def _require_all(received: _Received, target: Folder) -> None:
    """Raise where others have removed an object since it was put."""
    there = target.sizes()
    wanted = {shard.name: shard.size for shard in received.shards}
    wanted |= {name: len(data) for name, data in received.objects.items()}
    gone = [name for name, size in wanted.items() if there.get(name) != size]
    if gone:
        raise StorageError(
            f"{target.path(gone[0])} was removed while others were copied; run the same again"
        )


def _mend(source: Folder, received: _Received, target: Folder, count: _Count) -> None:
    """Put what a committed version of a bucket promises and has not."""
    if target.get(ROOT) == received.root:  # then all else is the same, too
        there = _there(target, list(received.objects))
        for name, data in received.objects.items():
            if there.get(name) != data:
                target.put(name, [data])
                count.copy([len(data)])
    way_out = (
        "repair it by the precache build command that made it, or remove that folder and run the "
        "same again"
    )
    try:
        version = open_own(target)
        _check(version)
        shards = _shards(version)
    except PrecacheError as error:
        raise StoreError(
            f"version {target.name} of {target} is damaged, and was not copied from {source}: "
            f"{error}; {way_out}"
        ) from None

    def mend(shard: _Shard) -> tuple[_Shard, bool]:
        if shard.is_in(target):
            return shard, True
        try:
            data = shard.read(source)
        except DamageError:
            raise StoreError(
                f"{target.path(shard.name)} is damaged, and {source.path(shard.name)} is not what "
                f"it was: {way_out}"
            ) from None
        target.put(shard.name, [data])
        return shard, False

    count.take(prefetch(mend, shards, THREADS, 2 * THREADS))


def _put_together(source: Folder, received: _Received, store: Folder, count: _Count) -> None:
    """Put a version together beside its place on a local disk; then let it take that, at once."""
    version = received.version.id
    target, side = store.folder(version), store.folder(_copy_name(version))

    def put_shard(shard: _Shard) -> tuple[_Shard, bool]:
        if shard.is_in(side):
            return shard, True
        if shard.is_in(target):
            with contextlib.suppress(StorageError):  # it may be removed at any moment
                side.copy(shard.name, target, shard.name, scratch=SCRATCH)
                return shard, True
        side.put(shard.name, [shard.read(source)], scratch=SCRATCH)
        return shard, False

    count.take(prefetch(put_shard, received.shards, THREADS, 2 * THREADS))
    _put_small(received, side, count)
    _require_all(received, side)
    side.put(ROOT, [received.root], scratch=SCRATCH)
    side.remove(BUILD)
    with decision_lease(store, version):
        if _whole(target) is None:
            _require_free(store, version)
            _take_place(store, version)


def _take_place(store: Folder, version: str) -> None:
    """Have a copy that is whole take the place of a version, whatever is there."""
    name = _copy_name(version)
    if move(store, name, version) or exchange(store, name, version):
        return  # what was there is where the copy was
    refuse_link(store, TRASH)
    old = f"{TRASH}/{version}.{uuid.uuid4().hex}"
    move(store, version, old)
    if not move(store, name, version):
        raise StorageError(f"{store.path(name)} was removed; run the same again")
    store.remove(old)
    remove_if_empty(store, TRASH)


def _copy_name(version: str) -> str:
    """Where a copy of a version is put together; in a bucket the record that there is one."""
    return f"{COPIES}/{version}"
