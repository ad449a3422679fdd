"""Verify: read every byte of a version, check every checksum, report damage by object and key.

Small objects are compared with each other and with the row table, whose digest is part of the
version's id (`consistency`); shards with the sizes and checksums in their table. If no shard of a
field matches, though all can be read, their table is at fault if the sums by channel are theirs. In
any other case both are named: shards may have been exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from precache.errors import DamageError, PrecacheError, StorageError, StoreError, missing_library
from precache.messages import as_text, first_ones
from precache.reading.array_reader import ArrayReader
from precache.reading.remote_shards import RangedShardFiles
from precache.storage.base import is_missing
from precache.storage.local_files import map_file
from precache.store.array_metadata import SUMS
from precache.store.commit_log import ROOT
from precache.store.consistency import Flaw, has_labels_with_samples, inspect
from precache.store.row_table import RowTable, read_contents, read_reasons
from precache.store.version import ROW_TABLE, VERIFY_HINT, Version, gone_error
from precache.units import size

PROGRESS_BYTES = 8 << 20
"""Bytes that are checked between two reports of progress."""

ROWS_AT_ONCE = 64
"""Rows that are decoded at a time."""

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
        Parts that could not be checked here, and why.
    """

    version: str
    path: str
    rows: int
    objects: int
    nbytes: int
    damage: tuple[Damage, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing is damaged."""
        return not self.damage

    def __str__(self) -> str:
        lines = [
            *(f"damaged: {damage}" for damage in self.damage),
            *(f"not checked: {part}" for part in self.unchecked),
        ]
        version = f"version {self.version[:8]}"
        checked = f"{self.objects} shards, {self.rows:,} rows, {size(self.nbytes)} read"
        if self.ok:
            return as_text([*lines, f"{version} is whole: {checked}"])
        lines.append(f"{version} is damaged in {len(self.damage)} objects ({checked})")
        if any(damage.shard == ROOT for damage in self.damage):
            lines.append(
                f"remove {self.path}/{ROOT} and run the same precache build command again: "
                "without it the whole version is built again"
            )
        else:
            lines.append(
                f"{VERIFY_HINT}: what is damaged is made again from the source, and put if it is "
                "what was recorded"
            )
        return as_text(lines)


def verify_version(
    version: Version, tick: Tick, check_recipe: Callable[[Version], Iterable[str]] = lambda _: ()
) -> Verified:
    """Check every stored byte of a version opened with `store.open.open_unchecked`.

    Parameters
    ----------
    check_recipe
        Returns why it cannot be confirmed that the recipe made the rows.
    """
    with version.unless_gone():
        verified = _verify(version, tick, check_recipe)
    if verified.damage and version.is_gone():
        raise gone_error(version.path)
    return verified


def _verify(
    version: Version, tick: Tick, check_recipe: Callable[[Version], Iterable[str]]
) -> Verified:
    flaws, unchecked = check_metadata(version)
    unchecked += check_recipe(version)
    damage = {flaw.name: Damage(flaw.name, flaw.reason) for flaw in flaws}
    objects = nbytes = 0
    for name in version.stored:
        tables = [flawed for flawed in damage if flawed.startswith(f"shards/{name}/c/")]
        if ROOT in damage or tables:
            why = ROOT if ROOT in damage else f"{tables[0]}, which has their checksums,"
            unchecked.append(
                f"the shards of {name}: {why} is damaged; verify again after the repair"
            )
            continue
        # What is not mapped is checked at each read, whatever this process has checked before.
        reader = ArrayReader(version, name, objects=RangedShardFiles(version, name))
        shards: list[Damage] = []
        for number in range(reader.array.objects):
            shard = f"{name}/{reader.array.object_name(number)}"
            problem = _check_object(version, reader, number, shard, tick)
            objects += 1
            nbytes += version.folder.size(shard) or 0
            shards += [] if problem is None else [problem]
        for problem in _blame(version, reader, shards):
            damage[problem.shard] = problem
    for name in version.stored:
        _blame_mean(version, name, damage)
    return Verified(
        version=version.id,
        path=version.path,
        rows=version.rows,
        objects=objects,
        nbytes=nbytes,
        damage=tuple(damage.values()),
        unchecked=tuple(unchecked),
    )


# --- small objects ------------------------------------------------------------------------------


def check_metadata(version: Version) -> tuple[list[Flaw], list[str]]:
    """Check the small objects; returns their flaws, and what could not be checked."""
    unchecked: list[str] = []
    table = None
    flaws: list[Flaw] = []
    try:
        table = _row_table(version)
        flaws = list(_check_reasons(version))
    except ModuleNotFoundError as error:
        unchecked.append(
            f"keys, labels and classes against the row table: {missing_library('this', error.name)}"
        )
    except StoreError as error:
        flaws = [Flaw(ROW_TABLE, str(error))]
    except (DamageError, StorageError):
        pass  # `inspect` reports it
    if table is not None and has_labels_with_samples(table):
        unchecked.append("labels: they came with the samples and are stored only once")
    inspected = inspect(version, table)
    names = {flaw.name for flaw in inspected}
    if ROOT in names:
        return inspected, unchecked
    return inspected + [flaw for flaw in flaws if flaw.name not in names], unchecked


def _row_table(version: Version) -> RowTable:
    assert version.attributes is not None  # open_unchecked refuses others
    data = version.read_checked(ROW_TABLE)
    table = RowTable.from_parquet(data, ROW_TABLE)
    if table.digest != version.attributes.rows_digest:
        raise StoreError("its digest is not the one in the version's id")
    return table


def _check_reasons(version: Version) -> Iterator[Flaw]:
    """Yield a flaw if the row table has other holes than the list of holes."""
    data = version.read_checked(ROW_TABLE)
    reasons = {row: why for row, why in enumerate(read_reasons(data, ROW_TABLE)) if why}
    if len(read_contents(data, ROW_TABLE)) != version.rows:
        yield Flaw(ROW_TABLE, "it lacks hashes of samples")
    try:
        holes = {row: why for row, (_, why) in version.holes.items()}
    except PrecacheError:
        return
    if reasons != holes:
        yield Flaw(ROW_TABLE, "its holes differ from the list of holes")


def _blame_mean(version: Version, name: str, damage: dict[str, Damage]) -> None:
    """Decide whether the sums or the mean are damaged, if the sums do not give the mean."""
    flawed = f"{SUMS}/{name}/c/0/0"
    if flawed not in damage or any(damaged.startswith(f"{name}/c/") for damaged in damage):
        return
    try:
        stored = version.stored_sums(name)
        reader = ArrayReader(version, name)
        sums_match = all(
            _sums_match(version, reader, number, stored) for number in range(len(stored))
        )
    except PrecacheError:
        return
    if sums_match:
        del damage[flawed]
        damage.setdefault(ROOT, Damage(ROOT, f"its mean or standard deviation of {name} is wrong"))


# --- shards -------------------------------------------------------------------------------------

CHECKSUM = "its checksum does not hold"
READABLE = f"{CHECKSUM}, though its rows can be read"


def _check_object(
    version: Version, reader: ArrayReader, number: int, shard: str, tick: Tick
) -> Damage | None:
    table = version.shard_table(reader.name)
    assert table is not None  # open_unchecked refuses others
    size, checksum = table[number].tolist()
    try:
        data = _read_object(version, shard, size)
    except (OSError, StorageError) as error:
        missing = isinstance(error, StorageError) and is_missing(error)
        reason = "it is missing" if missing else str(error)
        return Damage(shard, reason, _keys(version, reader, number))
    if len(data) != size:
        reason = f"it has {len(data)} bytes where {size} were written"
        return Damage(shard, reason, _keys(version, reader, number))
    digest = xxhash.xxh3_64()
    for start in range(0, len(data), PROGRESS_BYTES):
        piece = data[start : start + PROGRESS_BYTES]
        digest.update(piece.data)
        tick(len(piece))
    if digest.intdigest() == checksum:
        return None
    keys = tuple(_unreadable(version, reader, number))
    if keys:
        return Damage(shard, CHECKSUM, keys)
    owners = np.flatnonzero((table == np.array([size, digest.intdigest()], np.uint64)).all(1))
    if owners.size:
        other = reader.array.object_name(int(owners[0]))
        return Damage(shard, f"{READABLE}: it has the bytes recorded for {other}")
    return Damage(shard, f"{READABLE}: it is another shard, or shards/{reader.name} is wrong")


def _blame(version: Version, reader: ArrayReader, shards: list[Damage]) -> list[Damage]:
    """Return the damaged shards; or their table, if the sums by channel are those of the shards."""
    count = reader.array.objects
    readable = all(damage.reason.startswith(READABLE) for damage in shards)
    if not (readable and len(shards) == count > 1):
        return shards
    sums = version.shard_sums(reader.name)
    if sums is None or not all(_sums_match(version, reader, n, sums) for n in range(count)):
        return shards
    return [
        Damage(f"shards/{reader.name}/c/0/0", "it matches none of the shards, which are intact")
    ]


def _sums_match(version: Version, reader: ArrayReader, number: int, sums: np.ndarray) -> bool:
    """Return whether the rows of a shard have the recorded sums per channel."""
    rows = np.array(reader.array.rows_of(number))
    rows = rows[version.valid[rows]]
    channels = reader.array.row_shape[0]
    total, squares = np.zeros(channels), np.zeros(channels)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        out = np.empty((len(part), *reader.array.row_shape), reader.array.dtype)
        reader.read(part, out)
        values = out.astype(np.float64)
        total += values.sum((0, 2, 3))
        squares += np.square(values).sum((0, 2, 3))
    return np.allclose(sums[number, 1:], [*total, *squares], rtol=1e-9)


def _read_object(version: Version, shard: str, size: int) -> np.ndarray:
    """Read an object, memory-mapped if possible, or `size` + 1 bytes of it."""
    descriptor = version.folder.open(shard)
    if descriptor is None:
        return np.frombuffer(version.folder.read_first(shard, size + 1), np.uint8)
    try:
        return map_file(descriptor)
    finally:
        os.close(descriptor)


def _keys(version: Version, reader: ArrayReader, number: int) -> tuple[str, ...]:
    return tuple(_key(version, row) for row in reader.array.rows_of(number))


def _key(version: Version, row: int) -> str:
    try:
        return version.keys[row]
    except PrecacheError:
        return f"row {row}"


def _unreadable(version: Version, reader: ArrayReader, number: int) -> Iterator[str]:
    out = np.empty((1, *reader.array.row_shape), reader.array.dtype)
    for row in reader.array.rows_of(number):
        try:
            reader.read(np.array([row]), out, undo=False)
        except PrecacheError:
            yield _key(version, row)
