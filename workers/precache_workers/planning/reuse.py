"""Earlier versions whose rows a build may take over: which, and of which fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from precache.errors import DamageError, StorageError, StoreError
from precache.recipe.recipe import Recipe
from precache.storage.base import Folder
from precache.store.commit_log import ROOT, read_commits
from precache.store.documents import Attributes
from precache.store.layout import RowShape
from precache.store.open import open_own, open_own_unchecked
from precache.store.receipts import ChannelSums, ShardObject
from precache.store.row_table import REMOVED, RowTable, read_contents
from precache.store.version import ROW_TABLE, Version, read_attributes
from precache_workers.planning.descent import changes, descend, same_identity
from precache_workers.planning.field_match import FieldMatch, made_of
from precache_workers.planning.rows import order_rows
from precache_workers.planning.target_version import TargetVersion

Contents = Callable[[Sequence[str], Sequence[int]], Sequence[str]]

MOST_TOUCHED, MOST_TOUCHED_BYTES = 4096, 256 << 20
"""Samples, and their bytes, that are read where a source is listed; more are left to the build."""


@dataclass(frozen=True)
class OfferedField:
    """One object of an earlier version, and the sums of its rows.

    `base` is that version's folder, where it is another than the offer's.
    """

    made: FieldMatch
    object_name: str
    stored: ShardObject
    sums: ChannelSums | None
    base: Folder | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stored.size


@dataclass(frozen=True)
class BaseShard:
    """A shard of an earlier version, row for row the beginning of the one to be made.

    Attributes
    ----------
    folder
        Of the earlier version.
    same
        Whether each row's sample has the identity that it had, or is gone as it was.
    content
        XXH3-128 (hex) of each raw sample, empty where there was none, or where it has to be tried
        again.
    holes
        Row number -> why.
    content_decides
        Whether a sample of another identity but the same content is the same.
    retries
        Whether holes are tried again, and stay holes where their samples cannot be fetched.
    """

    folder: Folder
    fields: Mapping[str, OfferedField]
    same: Sequence[bool]
    content: Sequence[str]
    holes: Mapping[int, str]
    content_decides: bool
    retries: bool = False

    def without(self, field: str) -> BaseShard:
        """The same but for one field, and those that go on from the same object."""
        gone = self.place_of(self.fields[field])
        left = {name: each for name, each in self.fields.items() if self.place_of(each) != gone}
        return replace(self, fields=left)

    def nbytes_of(self, fields: Iterable[str]) -> int:
        """Bytes of the objects of some fields, each counted once."""
        found = [self.fields[name] for name in fields]
        return sum({self.place_of(each): each.size for each in found}.values())

    def place_of(self, each: OfferedField) -> tuple[str, str]:
        """Version and name of a field's object."""
        return (each.base or self.folder).name, each.object_name


@dataclass(frozen=True)
class BaseVersion:
    """A committed version whose rows are those of the table to be built, as far as it goes.

    `BaseShard` explains its attributes, which are of all rows here. What it lacks may begin at rows
    of the same samples in another version, of the `bases`.
    """

    version: Version
    fields: Mapping[str, FieldMatch]
    rows_per_shard: int
    same: np.ndarray
    content: Sequence[str]
    holes: Mapping[int, str]
    objects: Mapping[str, np.ndarray]
    sums: Mapping[str, np.ndarray | None]
    rivals: int = 1
    """Versions, this one among them, that have some field made as far."""
    retries: bool = False
    bases: Mapping[str, Folder] = field(default_factory=dict)

    def retried(self) -> BaseVersion:
        """The same, with all its holes to be tried again."""
        content = list(self.content)
        for row in self.holes:
            content[row] = ""
        return replace(self, content=content, retries=True)

    def is_of(self, rows_digest: str) -> bool:
        """Whether its rows are those of a table, sample by sample."""
        return self.version.attributes is not None and (
            self.version.attributes.rows_digest == rows_digest
        )

    def shapes(self) -> dict[str, RowShape]:
        """Row shapes of the fields that have all their ops applied: they stay as they are."""
        return {name: made.shape for name, made in self.fields.items() if made.finished}

    def nbytes_to_write(self, rows: int, recipe: Recipe) -> int:
        """About how many bytes of a version of so many rows are no links to this one."""
        starts = np.arange(0, len(self.same), self.rows_per_shard)
        linked = np.logical_and.reduceat(self.same, starts)
        needed = 0.0
        for name in self.shapes():
            made = self.fields[name]
            sizes = self.objects[name][:, 0].astype(np.float64)
            if recipe.fields[name].stored_as.name == "raw":
                sizes = np.full(len(starts), made.shape.nbytes * len(self.same) / len(starts))
            added = (rows / len(self.same) - 1) * sizes.sum()
            needed += added + sizes[~linked | (not made.encoded)].sum()
        return int(needed)

    def offer(self, goal: TargetVersion, shard: int, content_decides: bool) -> BaseShard | None:
        """What it has of a shard; None where it has nothing."""
        if goal.rows_per_shard != self.rows_per_shard:
            return None
        rows = goal.rows_of(shard)
        part = slice(rows.start, min(rows.stop, len(self.content)))
        if part.start >= part.stop:
            return None
        fields = {
            name: self._field(name, shard)
            for name, made in self.fields.items()
            if not made.finished or made.shape == goal.shapes[name]
        }
        holes = {row: self.holes[row] for row in rows if row in self.holes}
        same = self.same[part].tolist()
        content = self.content[part]
        return BaseShard(
            self.version.folder, fields, same, content, holes, content_decides, self.retries
        )

    def _field(self, name: str, shard: int) -> OfferedField:
        size, xxh3 = self.objects[name][shard].tolist()
        sums = self.sums[name]
        made = self.fields[name]
        rows = min(self.rows_per_shard, len(self.content) - shard * self.rows_per_shard)
        stored = ShardObject(size, xxh3, made.shape.padded_nbytes(rows, self.rows_per_shard))
        object_name = f"{made.array}/c/{shard}" + "/0" * len(made.shape.shape)
        known = None if sums is None else ChannelSums.of(sums[shard].tolist())
        return OfferedField(made, object_name, stored, known, self.bases.get(name))


def find_origin(
    store: Folder, recipe: Recipe, table: RowTable, with_bases: bool = True
) -> BaseVersion | None:
    """The committed version that spares most of the work, the latest of several; None for none.

    Parameters
    ----------
    with_bases
        Whether fields that it lacks may begin at rows of other versions.
    """
    candidates = [
        (folder, attributes, made)
        for folder, attributes in committed(store)
        if (made := made_of(recipe, attributes))
    ]
    for folder, attributes, made in sorted(candidates, key=lambda each: -_worth(each[2], recipe)):
        try:
            found = _read(open_own(folder), attributes, made, table)
        except (DamageError, StorageError, StoreError):
            continue  # it offers nothing, and `verify` says why
        if found is not None:
            found = replace(found, rivals=len(candidates))
            return _with_bases(found, recipe, table, candidates) if with_bases else found
    return None


def _with_bases(
    origin: BaseVersion, recipe: Recipe, table: RowTable, candidates: Sequence[Candidate]
) -> BaseVersion:
    """For fields that the version has nothing of: rows of others, made part of the way."""
    missing = recipe.fields.keys() - origin.fields.keys()
    for folder, attributes, made in candidates:
        begun = {n: each for n, each in made.items() if n in missing and not each.finished}
        per_shard = attributes.rows_per_shard == origin.rows_per_shard
        if not (begun and per_shard and origin.is_of(attributes.rows_digest)):
            continue
        try:
            base = _read(open_own(folder), attributes, begun, table)
        except (DamageError, StorageError, StoreError):
            continue
        if base is not None and _has_samples_of(base, origin):
            return replace(
                origin,
                fields={**origin.fields, **base.fields},
                objects={**origin.objects, **base.objects},
                sums={**origin.sums, **base.sums},
                bases=dict.fromkeys(base.fields, folder),
            )
    return origin


def _has_samples_of(base: BaseVersion, origin: BaseVersion) -> bool:
    """Whether rows of `base` were made of the same samples, and are there for all of `origin`."""
    pairs = enumerate(zip(base.content, origin.content, strict=True))
    holes = origin.holes.keys()
    return base.holes.keys() <= holes and all(a == b for row, (a, b) in pairs if row not in holes)


Candidate = tuple[Folder, Attributes, Mapping[str, FieldMatch]]
"""A committed version, and what it has made of which fields."""


def _worth(made: Mapping[str, FieldMatch], recipe: Recipe) -> float:
    return sum(
        each.encoded + (1 + each.applied) / (1 + len(recipe.fields[name].ops))
        for name, each in made.items()
    )


def committed(store: Folder) -> Iterator[tuple[Folder, Attributes]]:
    """The store's versions that can be read, the latest first."""
    for name in dict.fromkeys(commit.version for commit in reversed(read_commits(store))):
        folder = store.folder(name)
        try:
            yield folder, read_attributes(folder.read(ROOT), folder.path(ROOT))
        except (StorageError, StoreError):
            continue  # removed, damaged, or of a newer release


@dataclass(frozen=True)
class Placed:
    """A listing in rows.

    Attributes
    ----------
    rows_per_shard
        Of the version whose rows they are; None where they begin anew.
    changed
        What changed since that version, in words.
    """

    table: RowTable
    rows_per_shard: int | None = None
    changed: str = ""


def place_rows(
    store: Folder,
    listing: RowTable,
    keep_order: bool,
    compact: bool,
    may_have: Callable[[int, Mapping[str, RowShape]], bool],
    contents: Contents | None = None,
) -> Placed:
    """The listing in rows: those that its samples have in the current version, where it has them.

    A few samples that differ from those of that version by their time or etag alone are read: where
    the content is what it was, so is their identity.

    Parameters
    ----------
    compact
        Begin anew, without the rows of samples that are no more.
    may_have
        Whether rows of these shapes may come in shards of so many.
    contents
        XXH3-128 (hex) of samples by keys and sizes, empty where one cannot be read; None where
        identity does not follow from content.
    """
    fresh = order_rows(listing, keep_order)
    current = None if compact else next(committed(store), None)
    if current is None:
        return Placed(fresh)
    folder, attributes = current
    shapes = {name: RowShape(each.shape, each.dtype) for name, each in attributes.fields.items()}
    if not may_have(attributes.rows_per_shard, shapes):
        return Placed(fresh)
    if attributes.rows_digest == fresh.digest:
        return Placed(fresh, attributes.rows_per_shard)
    try:
        parent = _rows_of(open_own_unchecked(folder))
    except (DamageError, StorageError, StoreError):
        return Placed(fresh)
    placed = descend(parent, listing, keep_order)
    if placed is None or (keep_order and list(placed.present_keys()) != list(listing.keys)):
        return Placed(fresh)
    if contents is not None and (touched := _touched(parent, placed)):
        placed = _as_they_were(parent, placed, touched, folder, contents)
    if placed.digest == attributes.rows_digest:
        parent = placed
    changed = f"Since version {folder.name[:8]}: {changes(parent, placed)}"
    return Placed(placed, attributes.rows_per_shard, changed)


def _touched(before: RowTable, now: RowTable) -> list[int]:
    """Rows whose samples have the sizes that they had, and another time or etag; none where these
    are too many to be read here."""
    count, sizes = len(before), now.sizes[: len(before)]
    etags = np.fromiter(map(str.__ne__, before.etags, now.etags), np.bool_, count)
    other = (before.mtimes != now.mtimes[:count]) | etags
    rows = np.flatnonzero(other & (before.sizes == sizes) & (sizes >= 0))
    few = len(rows) <= MOST_TOUCHED and sizes[rows].sum() <= MOST_TOUCHED_BYTES
    return [row for row in rows.tolist() if row not in before.removed] if few else []


def _as_they_were(
    before: RowTable, now: RowTable, touched: Sequence[int], folder: Folder, contents: Contents
) -> RowTable:
    """A table with the identities that samples of the same content had before."""
    data = open_own_unchecked(folder).read_checked(ROW_TABLE)
    kept = read_contents(data, folder.path(ROW_TABLE))
    found = contents([now.keys[row] for row in touched], now.sizes[touched].tolist())
    same = [row for row, each in zip(touched, found, strict=True) if each and each == kept[row]]
    mtimes, etags = now.mtimes.copy(), list(now.etags)
    mtimes[same] = before.mtimes[same]
    for row in same:
        etags[row] = before.etags[row]
    return replace(now, mtimes=mtimes, etags=etags)


def _rows_of(version: Version) -> RowTable:
    """The row table of a version; where that is lost, at least its keys and what is removed, by
    which the samples of its source find their rows again."""
    where = version.folder.path(ROW_TABLE)
    try:
        return RowTable.from_parquet(version.read_checked(ROW_TABLE), where)
    except (DamageError, StorageError, StoreError):
        unknown = np.full(version.rows, -1, np.int64)
        gone = frozenset(row for row, (_, why) in version.holes.items() if why == REMOVED)
        keys, none = list(version.keys), [""] * version.rows
        return RowTable(keys, unknown, unknown, none, unknown, version.classes, gone)


def _read(
    version: Version, attributes: Attributes, made: Mapping[str, FieldMatch], table: RowTable
) -> BaseVersion | None:
    data, where = version.read_checked(ROW_TABLE), version.folder.path(ROW_TABLE)
    before = RowTable.from_parquet(data, where)
    if len(before) > len(table) or not all(map(str.__eq__, before.keys, table.keys)):
        return None
    same = same_identity(before, table)
    same[list(before.removed & table.removed)] = True
    holes = {row: why for row, (_, why) in version.holes.items()}
    content = read_contents(data, where)
    if attributes.fields.keys() - {each.array for each in made.values()}:
        for row in holes:  # that may be for the sake of a field that is no more
            content[row] = ""
    tables = {name: version.shard_table(each.array) for name, each in made.items()}
    return BaseVersion(
        version,
        made,
        attributes.rows_per_shard,
        same,
        content,
        holes,
        {name: each for name, each in tables.items() if each is not None},
        {name: version.shard_sums(each.array) for name, each in made.items()},
    )
