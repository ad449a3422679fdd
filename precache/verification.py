"""Verify: read every byte of a version, check every checksum, name damage by shard and key."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from precache.errors import PrecacheError, StorageError
from precache.folder import is_missing
from precache.objects import map_file
from precache.shards import ArrayReader
from precache.storage import StorageOptions
from precache.store import open_version
from precache.version import Version

PIECE = 8 << 20
"""Bytes checked between two reports of progress."""

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """One damaged object.

    Attributes
    ----------
    shard
        Its path below the version's folder.
    reason
        What is wrong with it.
    keys
        Samples that cannot be read; empty where all their rows still decode.
    """

    shard: str
    reason: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verified:
    """What a verification found; `objects` and `nbytes` count what was read."""

    version: str
    path: str
    rows: int
    objects: int
    nbytes: int
    damage: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damage


def verify(
    uri: str | os.PathLike[str],
    tick: Tick = lambda nbytes: None,
    storage_options: StorageOptions = None,
) -> Verified:
    """Check every stored byte of a version.

    Parameters
    ----------
    uri
        A store, or ``STORE@prefix``.
    tick
        Told bytes as they are read.
    storage_options
        Of a remote file system, as its fsspec class takes them.

    Raises
    ------
    StoreError
        There is no such version, or other software wrote it and recorded no checksums.
    """
    return verify_version(open_version(uri, None, storage_options), tick)


def verify_version(version: Version, tick: Tick) -> Verified:
    """As `verify`, of a version that is open."""
    damage = list(_small_arrays(version))
    objects = nbytes = 0
    for name in version.stored:
        if any(each.shard.startswith(f"shards/{name}/") for each in damage):
            continue  # nothing to hold its objects against
        reader = ArrayReader(version, name, verify="always")
        for number, shard in reader.objects():
            found = _check_object(version, reader, number, shard, tick)
            objects += 1
            nbytes += version.folder.size(shard) or 0
            if found is not None:
                damage.append(found)
    return Verified(version.id, version.path, version.rows, objects, nbytes, tuple(damage))


def _small_arrays(version: Version) -> Iterator[Damage]:
    for name, check in version.small_checks().items():
        try:
            check()
        except PrecacheError as error:
            yield Damage(name, str(error))


def _check_object(
    version: Version, reader: ArrayReader, number: int, shard: str, tick: Tick
) -> Damage | None:
    table = version.shard_table(reader.name)
    assert table is not None  # open_version gave a version of ours
    size, checksum = table[number].tolist()
    try:
        data = _bytes(version, shard)
    except (OSError, StorageError) as error:
        missing = isinstance(error, StorageError) and is_missing(error)
        reason = "it is missing" if missing else str(error)
        return Damage(shard, reason, _keys(version, reader, number))
    if len(data) != size:
        reason = f"it has {len(data)} bytes where {size} were written"
        return Damage(shard, reason, _keys(version, reader, number))
    digest = xxhash.xxh3_64()
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        digest.update(piece.data)
        tick(len(piece))
    if digest.intdigest() == checksum:
        return None
    return Damage(shard, "its checksum does not hold", tuple(_unreadable(version, reader, number)))


def _bytes(version: Version, shard: str) -> np.ndarray:
    """A whole object, mapped where that is possible."""
    descriptor = version.folder.open(shard)
    if descriptor is None:
        return np.frombuffer(version.folder.read(shard), np.uint8)
    try:
        return map_file(descriptor)
    finally:
        os.close(descriptor)


def _rows(version: Version, reader: ArrayReader, number: int) -> range:
    step = reader.array.object_shape[0]
    return range(number * step, min((number + 1) * step, version.rows))


def _keys(version: Version, reader: ArrayReader, number: int) -> tuple[str, ...]:
    return tuple(_key(version, row) for row in _rows(version, reader, number))


def _key(version: Version, row: int) -> str:
    try:
        return version.keys[row]
    except PrecacheError:
        return f"row {row}"


def _unreadable(version: Version, reader: ArrayReader, number: int) -> Iterator[str]:
    out = np.empty((1, *reader.array.row_shape), reader.array.dtype)
    for row in _rows(version, reader, number):
        try:
            reader.read(np.array([row]), out, undo=False)
        except PrecacheError:
            yield _key(version, row)
