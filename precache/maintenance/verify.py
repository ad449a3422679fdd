"""Verify: read every byte of a version, and report what is not what was written, by key."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precache.errors import PrecacheError, StorageError, StoreError
from precache.messages import as_text, first_ones, shown
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import RangedShardFiles
from precache.reading.version_reader import open_reader
from precache.storage.base import required
from precache.storage.open import StorageOptions, open_folder
from precache.store.commit_log import read_log, short
from precache.store.layout import CHECK_NBYTES, INDEX_CHECKSUM_NBYTES, INDEX_ENTRY_NBYTES
from precache.store.open import open_version, split_uri
from precache.store.tree import CHECKSUM
from precache.store.version import VERIFY_HINT, Version
from precache.units import counted, size

LOST = "it is missing, or of another size than was written"
MISPLACED = "it is another shard than was written"

SHARDS_AT_ONCE = 256
"""Shards of which the end is read at a time."""

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """One damaged object.

    Attributes
    ----------
    shard
        Path of the object below the version's folder.
    reason
        Kind of damage.
    keys
        Keys of samples that cannot be read; empty if all rows still decode.
    """

    shard: str
    reason: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        keys = f"; keys {first_ones(self.keys)}" if self.keys else ""
        return f"{self.shard}: {self.reason}{keys}"


@dataclass(frozen=True)
class Verified:
    """Result of a verification.

    Attributes
    ----------
    objects, nbytes
        Number and size of the shards that were read.
    unchecked
        Parts that could not be checked, and why.
    way_out
        Advice on damage; empty if there is none.
    """

    version: str
    path: str
    rows: int
    objects: int
    nbytes: int
    damage: tuple[Damage, ...]
    unchecked: tuple[str, ...] = ()
    way_out: str = ""

    @property
    def ok(self) -> bool:
        """True if nothing is damaged."""
        return not self.damage

    def __str__(self) -> str:
        lines = [
            *(f"damaged: {damage}" for damage in self.damage),
            *(f"not checked: {part}" for part in self.unchecked),
        ]
        version = f"version {short(self.version)}"
        checked = f"{counted(self.objects, 'shard')}, {counted(self.rows, 'row')}"
        checked += f", {size(self.nbytes)} read"
        if self.ok:
            return as_text([*lines, f"{version} is whole: {checked}"])
        lines.append(f"{version} is damaged in {counted(len(self.damage), 'object')} ({checked})")
        return as_text([*lines, self.way_out])


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
        Called with the number of bytes read.
    storage_options
        As `open` takes them.

    Raises
    ------
    StoreError
        There is no such version, its root and the copy of that are damaged, or other software wrote
        it without checksums.
    GoneError
        The version was removed in the meantime.
    """
    version = open_version(uri, storage_options, mends=True)
    with version.unless_gone():
        verified = _verify(version, tick)
    if verified.ok:
        return verified
    version.require_there()
    return replace(verified, way_out=way_out(version, uri, storage_options))


def _verify(version: Version, tick: Tick) -> Verified:
    damage = [Damage(*flaw) for flaw in version.flaws().items()]
    unchecked: list[str] = []
    objects = nbytes = 0
    for name in version.stored:
        try:
            leaves = version.shard_leaves(name)
            # What is not mapped is checked at each read, whatever this process has checked before.
            reader = open_reader(version, name, objects=RangedShardFiles(version, name))
        except PrecacheError as error:
            unchecked.append(f"the shards of {name}: {error}")
            continue
        for number, leaf in enumerate(leaves):
            try:
                reason = leaf.fault_in(version.folder, tick)
            except StorageError as error:
                reason = str(error)
            objects += 1
            nbytes += leaf.size
            if reason:
                keys = _lost_keys(version, reader, number, whole=reason != CHECKSUM)
                damage.append(Damage(leaf.name, reason, keys))
    return Verified(
        version=version.id,
        path=version.path,
        rows=version.rows,
        objects=objects,
        nbytes=nbytes,
        damage=tuple(damage),
        unchecked=tuple(unchecked),
    )


def _lost_keys(
    version: Version, reader: ArrayReader, number: int, *, whole: bool
) -> tuple[str, ...]:
    """Return the keys of the rows of a damaged shard that cannot be read; all if it is lost."""
    lost = []
    for row in reader.array.rows_of(number):
        try:
            if not whole:
                reader.probe(row)
                continue
        except PrecacheError:
            pass
        lost.append(_key(version, row))
    return tuple(lost)


def _key(version: Version, row: int) -> str:
    try:
        return version.keys[row]
    except PrecacheError:
        return f"row {row}"


def way_out(version: Version, uri: str | os.PathLike[str], storage_options: StorageOptions) -> str:
    """Return the advice on damage of the version that a URI names: of a build, if it is current."""
    store, prefix = split_uri(uri, storage_options)
    with contextlib.suppress(StoreError):
        current = read_log(open_folder(store, storage_options), newest=True).current
        if prefix is not None and current is not None and current.version != version.id:
            return (
                "it is not the current version, so the precache build command that made it, with "
                "--verify, repairs it only while source, recipe and code are as they were then; "
                "else copy what is damaged from a store that has it whole: precache pull "
                f"OTHER@{short(version.id)} {shown(store)}, after which it is current (precache "
                f"use {shown(store)}@{short(current.version)} undoes that)"
            )
    return (
        f"{VERIFY_HINT}; a build takes the bytes from copies, or from the source where that gives "
        "them again"
    )


# --- without reading all bytes ------------------------------------------------------------------


def require_whole(version: Version, advice: str) -> None:
    """Raise `StoreError` if objects of a version are damaged, missing, or in each other's place.

    Of a shard, its size and the end of its last chunk are compared.
    """
    flaws = version.flaws() or {leaf.name: LOST for leaf in version.lost_objects().values()}
    for name in version.stored if not flaws else ():
        flaws |= dict.fromkeys(_misplaced(version, name), MISPLACED)
    for name, reason in flaws.items():
        more = f", and {len(flaws) - 1} others" if len(flaws) > 1 else ""
        raise StoreError(f"version {version.id} is damaged: {name}: {reason}{more}; {advice}")


def _misplaced(version: Version, array: str) -> Iterator[str]:
    """Yield shards of a field whose last chunk ends in another checksum than was written."""
    layout, leaves = version.arrays[array], version.shard_leaves(array)
    behind = CHECK_NBYTES + layout.object_chunks * INDEX_ENTRY_NBYTES + INDEX_CHECKSUM_NBYTES
    for start in range(0, len(leaves), SHARDS_AT_ONCE):
        part = leaves[start : start + SHARDS_AT_ONCE]
        ranges = [(leaf.name, leaf.size - behind, CHECK_NBYTES) for leaf in part]
        read = version.folder.read_ranges(ranges)
        for number, (leaf, data) in enumerate(zip(part, read, strict=True), start):
            last = (len(layout.rows_of(number)) - 1) // layout.chunk_rows
            if required(data) != version.checks(array, number)[last].astype("<u4").tobytes():
                yield leaf.name
