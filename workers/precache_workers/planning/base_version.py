"""Find the base version: an earlier version whose rows a build may reuse, and of which fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precache.errors import DamageError, StorageError, StoreError
from precache.recipe.recipe import Recipe
from precache.storage.base import Folder
from precache.store.json_documents import Attributes
from precache.store.layout import RowShape
from precache.store.open import open_own
from precache.store.receipts import ChannelSums, ShardObject
from precache.store.row_table import RowTable, read_contents
from precache.store.tree import Leaf
from precache.store.version import ROW_TABLE, Version
from precache_workers.planning.base_shard import BaseField, BaseShard
from precache_workers.planning.field_match import FieldMatch, match_fields
from precache_workers.planning.stored_versions import committed_versions
from precache_workers.planning.target_version import TargetVersion, VersionSpec


@dataclass(frozen=True)
class BaseArray:
    """An array of a committed version with rows of a field, with all ops or some.

    Attributes
    ----------
    objects, sums
        Object of each shard; sums by channel of each shard.
    """

    match: FieldMatch
    version: Version
    objects: Sequence[Leaf]
    sums: np.ndarray | None

    @property
    def folder(self) -> Folder:
        """Folder of the version."""
        return self.version.folder

    def shard(self, shard: int, rows: int, rows_per_shard: int) -> BaseField:
        """Return the object of a shard of so many rows."""
        match, leaf, shapes = self.match, self.objects[shard], None
        raw = match.shape.padded_nbytes(rows, rows_per_shard)
        if match.shape.ragged:
            start = shard * rows_per_shard
            shapes = self.version.row_shapes(match.array)[start : start + rows]
            raw = int(shapes.prod(axis=1).sum()) * np.dtype(match.shape.dtype).itemsize
        checks = self.version.checks(match.array, shard).astype("<u4").tobytes().hex()
        return BaseField(
            match,
            self.folder,
            leaf.name,
            ShardObject(leaf.size, leaf.xxh3, raw, checks),
            None if self.sums is None else ChannelSums.of(self.sums[shard].tolist()),
            shapes,
        )


@dataclass(frozen=True)
class BaseVersion:
    """A committed version whose rows are the first rows of the table to be built.

    Attributes
    ----------
    fields
        Field -> its rows, of this version, or of another with the same samples.
    same, content, holes, retries
        As in `BaseShard`, for all rows; holes by row.
    labels
        Labels by row that came with the samples; None if others are known.
    candidates
        Number of versions, this one among them, that have rows of some field.
    """

    version: Version
    fields: Mapping[str, BaseArray]
    rows_per_shard: int
    same: np.ndarray
    content: Sequence[str]
    holes: Mapping[int, str]
    labels: np.ndarray | None = None
    candidates: int = 1
    retries: bool = False

    def with_retries(self) -> BaseVersion:
        """Return the same version with all its holes to be tried again."""
        content = list(self.content)
        for row in self.holes:
            content[row] = ""
        return replace(self, content=content, retries=True)

    def is_of(self, rows_digest: str) -> bool:
        """Return whether its rows are those of the table with this digest."""
        return self.version.attributes is not None and (
            self.version.attributes.rows_digest == rows_digest
        )

    def shapes(self) -> dict[str, RowShape]:
        """Row shapes of the fields that have all their ops applied: these shapes stay."""
        matches = {name: array.match for name, array in self.fields.items()}
        return {name: match.shape for name, match in matches.items() if match.finished}

    def nbytes_to_write(self, rows: int, recipe: Recipe) -> int:
        """Estimate the bytes of a version of so many rows that are no links to this one."""
        starts = np.arange(0, len(self.same), self.rows_per_shard)
        linked = np.logical_and.reduceat(self.same, starts)
        needed = 0.0
        for name in self.shapes():
            match = self.fields[name].match
            sizes = np.array([leaf.size for leaf in self.fields[name].objects], np.float64)
            if recipe.fields[name].stored_as.name == "raw":
                sizes = np.full(len(starts), match.shape.nbytes * len(self.same) / len(starts))
            added = (rows / len(self.same) - 1) * sizes.sum()
            needed += added + sizes[~linked | (not match.encoded)].sum()
        return int(needed)

    def shard(self, target: TargetVersion, shard: int) -> BaseShard | None:
        """Return what it has of a shard of the target version; None where it has nothing."""
        if target.rows_per_shard != self.rows_per_shard:
            return None
        rows = target.rows_of(shard)
        part = slice(rows.start, min(rows.stop, len(self.content)))
        if part.start >= part.stop:
            return None
        count = part.stop - part.start
        return BaseShard(
            fields={
                name: array.shard(shard, count, self.rows_per_shard)
                for name, array in self.fields.items()
                if not array.match.finished or array.match.shape == target.shapes[name]
            },
            same=self.same[part].tolist(),
            content=self.content[part],
            holes={row - rows.start: self.holes[row] for row in rows if row in self.holes},
            labels=() if self.labels is None else self._labels(target, part),
            retries=self.retries,
        )

    def _labels(self, target: TargetVersion, part: slice) -> list[int]:
        """Labels of the samples that the source still has."""
        assert self.labels is not None
        removed, rows = target.table.removed, range(part.start, part.stop)
        labels = zip(rows, self.labels[part].tolist(), strict=True)
        return [-1 if row in removed else label for row, label in labels]


Candidate = tuple[Folder, Attributes, Mapping[str, FieldMatch]]
"""A committed version, and how far it has the rows of which fields."""


def find_base(store: Folder, spec: VersionSpec, *, other_versions: bool) -> BaseVersion | None:
    """Find the committed version whose reuse saves most work, the latest of several such.

    Parameters
    ----------
    other_versions
        Whether fields that it lacks may resume rows of other versions.
    """
    recipe, table = spec.recipe, spec.table
    candidates = [
        (folder, attributes, matches)
        for folder, attributes in committed_versions(store)
        if (matches := match_fields(recipe, spec.decides, attributes))
    ]
    # Of another source, every sample would have to be fetched to be compared.
    by_saving = sorted(
        candidates, key=lambda c: (-_saving(c[2], recipe), c[1].source != table.source)
    )
    for folder, attributes, matches in by_saving:
        base = _read(folder, attributes, matches, table)
        if base is not None:
            base = replace(base, candidates=len(candidates))
            return _with_other_versions(base, recipe, table, candidates) if other_versions else base
    return None


def _saving(matches: Mapping[str, FieldMatch], recipe: Recipe) -> float:
    return sum(
        match.encoded + (1 + match.applied) / (1 + len(recipe.fields[name].ops))
        for name, match in matches.items()
    )


def _with_other_versions(
    base: BaseVersion, recipe: Recipe, table: RowTable, candidates: Sequence[Candidate]
) -> BaseVersion:
    """Add rows of another version that have a part of their ops, for fields that the base lacks."""
    missing = recipe.fields.keys() - base.fields.keys()
    for folder, attributes, matches in candidates:
        begun = {n: match for n, match in matches.items() if n in missing and not match.finished}
        same_shards = attributes.rows_per_shard == base.rows_per_shard
        if not (begun and same_shards and base.is_of(attributes.rows_digest)):
            continue
        other = _read(folder, attributes, begun, table)
        if other is not None and _has_samples_of(other, base):
            return replace(base, fields={**base.fields, **other.fields})
    return base


def _has_samples_of(other: BaseVersion, base: BaseVersion) -> bool:
    """Return whether another version has all rows of the base, made of the same samples."""
    pairs = enumerate(zip(other.content, base.content, strict=True))
    holes = base.holes.keys()
    return other.holes.keys() <= holes and all(a == b for row, (a, b) in pairs if row not in holes)


def _read(
    folder: Folder, attributes: Attributes, matches: Mapping[str, FieldMatch], table: RowTable
) -> BaseVersion | None:
    """Read what a version has of a table's rows; None if it has others, or is damaged."""
    try:
        version = open_own(folder)
        data, where = version.read_checked(ROW_TABLE), folder.path(ROW_TABLE)
        before = RowTable.from_parquet(data, where)
        if len(before) > len(table) or before.keys != table.keys[: len(before)]:
            return None
        first = slice(len(before))
        same = before.unchanged(table, first, first)
        same[list(before.removed & table.removed)] = True
        holes = {row: reason for row, (_, reason) in version.holes.items()}
        content = read_contents(data, where)
        others = attributes.fields.keys() - {match.array for match in matches.values()}
        if others or any(match.refuses_more for match in matches.values()):
            for row in holes:  # it may be due to a field or a refusal that the recipe has no more
                content[row] = ""
        fields = {
            name: BaseArray(
                match,
                version,
                version.shard_leaves(match.array),
                version.shard_sums(match.array),
            )
            for name, match in matches.items()
        }
        for array in fields.values():
            if array.match.shape.ragged:
                version.row_shapes(array.match.array)  # damage shows here
        return BaseVersion(
            version=version,
            fields=fields,
            rows_per_shard=attributes.rows_per_shard,
            same=same,
            content=content,
            holes=holes,
            labels=version.labels if before.labels_with_samples else None,
        )
    except (DamageError, StorageError, StoreError):
        return None  # `verify` says why
