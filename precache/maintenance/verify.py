"""Verify: read every byte of a version, check every checksum, name damage by object and key.

Small objects are held against each other and against the row table, by whose digest the version is
called (`inspection`); shards against the sizes and checksums in their table. Where the two do not
fit, the shard is decoded: if its rows are those that the rest of the version tells of, its table is
at fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError

import numpy as np
import xxhash

from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.reading.array_reader import ArrayReader
from precache.storage.base import is_missing
from precache.storage.local_files import map_file
from precache.storage.open import StorageOptions
from precache.store.array_metadata import SUMS
from precache.store.commit_log import ROOT
from precache.store.consistency import Flaw, has_labels_with_samples, inspect
from precache.store.open import open_unchecked
from precache.store.row_table import RowTable, read_contents, read_reasons
from precache.store.version import ROW_TABLE, Version, gone_error

PIECE = 8 << 20
"""Bytes checked between two reports of progress."""

TOGETHER = 64
"""Rows decoded at a time."""

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
    """What a verification found.

    Attributes
    ----------
    objects, nbytes
        Shards that were read.
    unchecked
        What could not be checked here, and what that takes.
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
        """Whether nothing is damaged."""
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
    GoneError
        It was removed meanwhile.
    """
    return verify_version(open_unchecked(uri, storage_options), tick)


def verify_version(version: Version, tick: Tick) -> Verified:
    """As `verify`, of a version as `store.open_unchecked` gives it."""
    with version.unless_gone():
        verified = _verify(version, tick)
    if verified.damage and version.is_gone():
        raise gone_error(version.path)
    return verified


def _verify(version: Version, tick: Tick) -> Verified:
    flaws, unchecked = inspected(version)
    damage = {flaw.name: Damage(flaw.name, flaw.reason) for flaw in flaws}
    objects = nbytes = 0
    for name in version.stored if ROOT not in damage else ():
        if any(flawed.startswith(f"shards/{name}/c/") for flawed in damage):
            continue  # nothing to hold its objects against
        reader = ArrayReader(version, name, verify="always")
        shards: list[Damage] = []
        for number, shard in reader.objects():
            found = _check_object(version, reader, number, shard, tick)
            objects += 1
            nbytes += version.folder.size(shard) or 0
            shards += [] if found is None else [found]
        for each in _at_fault(version, reader, shards):
            damage[each.shard] = each
    for name in version.stored:
        _judge_sums(version, name, damage)
    all_damage = tuple(damage.values())
    return Verified(
        version.id, version.path, version.rows, objects, nbytes, all_damage, tuple(unchecked)
    )


# --- small objects ------------------------------------------------------------------------------


def inspected(version: Version) -> tuple[list[Flaw], list[str]]:
    """What is wrong with the small objects, and what cannot be known of them."""
    unchecked: list[str] = []
    table = None
    wrong: list[Flaw] = []
    try:
        table = _row_table(version)
        wrong = list(_reasons(version))
    except ModuleNotFoundError as error:
        unchecked.append(
            f"keys, labels and classes against the row table: that needs {error.name}, as on nodes "
            "that build: pip install 'precache[workers]'"
        )
    except StoreError as error:
        wrong = [Flaw(ROW_TABLE, str(error))]
    except (DamageError, StorageError):
        pass  # found again below
    if table is not None and has_labels_with_samples(table):
        unchecked.append("labels: they came with the samples, and nothing tells them twice")
    unchecked += _recipe(version)
    known = inspect(version, table)
    names = {flaw.name for flaw in known}
    if ROOT in names:
        return known, unchecked
    return known + [flaw for flaw in wrong if flaw.name not in names], unchecked


def _recipe(version: Version) -> Iterator[str]:
    """Why it is not known that the recipe is what made the rows, where that is so."""
    from precache_workers.ops.behaviour import digest_of
    from precache_workers.ops.identity import as_recorded, named_ops, ops_digest

    attributes = version.attributes
    assert attributes is not None  # open_unchecked gave a version of ours
    try:
        recipe = version.recipe
        arrays, rule = recipe.by_array(), as_recorded(attributes)
        if not attributes.decides and any(not op.version for op in recipe.functions):
            yield "the recipe: it has functions whose code is not in the store"
            return
        made = recipe.fingerprint(rule(recipe))
        digests = {
            name: ops_digest(arrays, name, len(field.ops), rule)
            for name, field in arrays.fields.items()
        }
    except (PackageNotFoundError, PrecacheError) as error:
        yield f"the recipe: {error}"
        return
    stored = {name: field.recipe for name, field in attributes.fields.items()}
    outputs, decides = attributes.behaviours, attributes.decides
    same = all(
        digest_of(outputs.get(name, {})) == decides[name]
        for name, _, step in named_ops(recipe)
        if step is not None and name in decides
    )
    if (made, digests) != (attributes.fingerprint, stored) or not same:
        yield (
            "the recipe: it does not give the fingerprint of the version, so that it is damaged, "
            "or another release of precache wrote it"
        )


def _row_table(version: Version) -> RowTable:
    assert version.attributes is not None  # open_unchecked gave a version of ours
    data = version.read_checked(ROW_TABLE)
    table = RowTable.from_parquet(data, ROW_TABLE)
    if table.digest != version.attributes.rows_digest:
        raise StoreError("it is not the row table that the version is called by")
    return table


def _reasons(version: Version) -> Iterator[Flaw]:
    """Whether the row table tells of the same holes as their list."""
    data = version.read_checked(ROW_TABLE)
    reasons = {row: why for row, why in enumerate(read_reasons(data, ROW_TABLE)) if why}
    if len(read_contents(data, ROW_TABLE)) != version.rows:
        yield Flaw(ROW_TABLE, "it lacks hashes of samples")
    try:
        holes = {row: why for row, (_, why) in version.holes.items()}
    except PrecacheError:
        return
    if reasons != holes:
        yield Flaw(ROW_TABLE, "it does not tell of the same holes as the list of them")


def _judge_sums(version: Version, name: str, damage: dict[str, Damage]) -> None:
    """Where sums do not give the mean of the version: they are at fault, or else the mean is."""
    flawed = f"{SUMS}/{name}/c/0/0"
    if flawed not in damage or any(each.startswith(f"{name}/c/") for each in damage):
        return
    try:
        stored = version.stored_sums(name)
        reader = ArrayReader(version, name)
        right = all(_fits(version, reader, number, stored) for number in range(len(stored)))
    except PrecacheError:
        return
    if right:
        del damage[flawed]
        damage.setdefault(ROOT, Damage(ROOT, f"its mean or deviation is not that of {name}"))


# --- shards -------------------------------------------------------------------------------------

CHECKSUM = "its checksum does not hold"


def _check_object(
    version: Version, reader: ArrayReader, number: int, shard: str, tick: Tick
) -> Damage | None:
    table = version.shard_table(reader.name)
    assert table is not None  # open_unchecked gave a version of ours
    size, checksum = table[number].tolist()
    try:
        data = _bytes(version, shard, size)
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
    return Damage(shard, CHECKSUM, tuple(_unreadable(version, reader, number)))


def _at_fault(version: Version, reader: ArrayReader, shards: list[Damage]) -> list[Damage]:
    """The shards; or their table, where it fits none of several that are whole by themselves."""
    count = reader.array.objects
    alike = len(shards) == count > 1 and all(not d.keys and d.reason == CHECKSUM for d in shards)
    if not alike:
        return shards
    sums = version.shard_sums(reader.name)
    if sums is not None and not all(_fits(version, reader, n, sums) for n in range(count)):
        return shards
    return [Damage(f"shards/{reader.name}/c/0/0", "it fits none of the shards, which are whole")]


def _fits(version: Version, reader: ArrayReader, number: int, sums: np.ndarray) -> bool:
    """Whether the rows of a shard have the sums by channel that are kept of it."""
    rows = np.array(_rows(version, reader, number))
    rows = rows[version.valid[rows]]
    channels = reader.array.row_shape[0]
    total, squares = np.zeros(channels), np.zeros(channels)
    for start in range(0, len(rows), TOGETHER):
        some = rows[start : start + TOGETHER]
        out = np.empty((len(some), *reader.array.row_shape), reader.array.dtype)
        reader.read(some, out)
        values = out.astype(np.float64)
        total += values.sum((0, 2, 3))
        squares += np.square(values).sum((0, 2, 3))
    return np.allclose(sums[number, 1:], [*total, *squares], rtol=1e-9)


def _bytes(version: Version, shard: str, size: int) -> np.ndarray:
    """A whole object, mapped where that is possible; of a longer one, a byte more than `size`."""
    descriptor = version.folder.open(shard)
    if descriptor is None:
        return np.frombuffer(version.folder.read_first(shard, size + 1), np.uint8)
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
