"""The version that a build is to make, fully determined before its first shard task."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from precache.errors import NewerFormatError, StorageError, StoreError
from precache.recipe.recipe import Recipe
from precache.runtime.process_id import process_of
from precache.storage.base import Folder, is_missing
from precache.storage.rename import is_link
from precache.store.build_status import DESCRIPTION
from precache.store.commit_log import BUILD, ROOT, VERSION, read_commits
from precache.store.documents import Attributes, Identity, version_id
from precache.store.layout import RowShape, rows_per_shard
from precache.store.row_table import RowTable
from precache.store.version import ROW_TABLE, read_attributes

SCRATCH = f"{BUILD}/tmp"

FROZEN_ROWS = f"{BUILD}/rows.parquet"
"""The row table of a version that is not committed."""


def receipt_name(shard: int) -> str:
    """Name of a shard's receipt below the version's folder."""
    return f"{BUILD}/receipts/{shard:08d}.json"


@dataclass(frozen=True)
class VersionSpec:
    """What a version's id is made of, rows per shard apart; `version_id` explains `retries`.

    Attributes
    ----------
    declared
        As the user wrote it.
    """

    declared: Recipe
    fingerprint: str
    table: RowTable
    rows_digest: str
    retries: int = 0

    @functools.cached_property
    def recipe(self) -> Recipe:
        """With a field for each stored array."""
        return self.declared.by_array()


@dataclass(frozen=True)
class TargetVersion:
    """A version of a store, begun or finished or neither.

    Attributes
    ----------
    folder
        Of the version.
    shapes
        Row shape of each field.
    """

    spec: VersionSpec
    folder: Folder
    rows_per_shard: int
    shapes: Mapping[str, RowShape]

    @classmethod
    def of(
        cls, store: Folder, spec: VersionSpec, rows_per_shard: int, shapes: Mapping[str, RowShape]
    ) -> TargetVersion:
        version = version_id(spec.fingerprint, spec.rows_digest, rows_per_shard, spec.retries)
        return cls(spec, store.folder(version), rows_per_shard, shapes)

    def anew(self, store: Folder) -> TargetVersion:
        """The version that makes the same rows once more."""
        again = replace(self.spec, retries=self.spec.retries + 1)
        return TargetVersion.of(store, again, self.rows_per_shard, self.shapes)

    @property
    def version(self) -> str:
        return self.folder.name

    @property
    def table(self) -> RowTable:
        return self.spec.table

    @property
    def shards(self) -> int:
        return -(-len(self.table) // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        """Rows of a shard; the last may be short."""
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, len(self.table)))

    def object_name(self, field: str, shard: int) -> str:
        """Name of a shard's object below the version's folder."""
        return f"{field}/c/{shard}" + "/0" * len(self.shapes[field].shape)

    def sizes(self) -> dict[tuple[str, int], int | None]:
        """(field, shard) -> bytes of the stored object, None where there is none."""
        found: dict[tuple[str, int], int | None] = {}
        for name in self.shapes:
            there = self.folder.sizes(name)
            for shard in range(self.shards):
                found[name, shard] = there.get(self.object_name(name, shard))
        return found

    def describe(self) -> dict[str, Any]:
        """What tells this version from others, as build.json and the metadata hold it."""
        return {
            "version": self.version,
            "fingerprint": self.spec.fingerprint,
            "rows_digest": self.spec.rows_digest,
            "rows_per_shard": self.rows_per_shard,
            **({"retries": self.spec.retries} if self.spec.retries else {}),
            "fields": {
                name: {"shape": list(row.shape), "dtype": row.dtype}
                for name, row in self.shapes.items()
            },
        }

    def begin(self, refreshes: str | None = None, *, recompute: bool = False) -> None:
        """Freeze the row table, unless it is frozen, and put the description.

        Parameters
        ----------
        refreshes
            Id of the version of which it is a refresh.
        recompute
            Whether all of it is computed again.
        """
        if self.folder.size(FROZEN_ROWS) is None:
            self.folder.create(FROZEN_ROWS, [self.table.to_parquet()], scratch=SCRATCH)
        by = process_of(os.getpid()).model_dump()
        begun = {**self.describe(), "rows": len(self.table), "begun": time.time(), "by": by}
        begun |= {"refreshes": refreshes} if refreshes else {}
        begun |= {"recompute": True} if recompute else {}
        self.folder.put(DESCRIPTION, [json.dumps(begun).encode()], scratch=SCRATCH)

    def frozen_rows(self) -> RowTable:
        """The row table of a version that was begun, or was committed since."""
        data = self.folder.get(FROZEN_ROWS)
        name = ROW_TABLE if data is None else FROZEN_ROWS
        return RowTable.from_parquet(data or self.folder.read(name), self.folder.path(name))

    def tell_failure(self, why: str) -> None:
        """Say in the description that the build which began the version has failed."""
        data = self.folder.get(DESCRIPTION)
        if data is not None:
            told = {**json.loads(data), "failed": why}
            self.folder.put(DESCRIPTION, [json.dumps(told).encode()], scratch=SCRATCH)


def find_goal(store: Folder, spec: VersionSpec, wanted: int | None) -> TargetVersion | None:
    """The version of this recipe that the store has, committed or begun; None where it has none.

    Of several that are committed it is the one that was made anew most often.

    Parameters
    ----------
    wanted
        Rows a shard, as the user gave them; any will do by default.
    """
    committed, begun = _goals(store, spec, wanted)
    begun = [
        goal for goal in begun if goal.spec.retries == spec.retries and not is_recomputed(goal)
    ]
    return max(committed or begun, key=lambda each: each.spec.retries, default=None)


def next_goal(store: Folder, spec: VersionSpec, wanted: int | None) -> TargetVersion | None:
    """The version that makes this recipe anew; None where the store has none to be made anew.

    Parameters
    ----------
    wanted
        As in `find_goal`.
    """
    committed, begun = _goals(store, spec, wanted)
    last = max(committed + begun, key=lambda each: each.spec.retries, default=None)
    return None if last is None else untaken(store, last.anew(store), removed=True)


def is_recomputed(goal: TargetVersion) -> bool:
    """Whether a version that is not committed was begun to compute all of it again."""
    data = goal.folder.get(DESCRIPTION)
    begun = None if data is None else _begun(data, goal.folder.path(DESCRIPTION))
    return begun is not None and begun.recompute


def untaken(store: Folder, goal: TargetVersion, *, removed: bool = False) -> TargetVersion:
    """The version that makes the same rows by an id under which nobody computes all of them again.

    Parameters
    ----------
    removed
        Nor one of a version that was removed, which may have had other pixels, and of which copies
        may be elsewhere.
    """
    named = {entry.version for entry in read_commits(store)} if removed else ()
    while goal.folder.size(ROOT) is None and (goal.version in named or is_recomputed(goal)):
        goal = goal.anew(store)
    return goal


def _goals(
    store: Folder, spec: VersionSpec, wanted: int | None
) -> tuple[list[TargetVersion], list[TargetVersion]]:
    """Versions of a recipe, committed and begun, made anew however often."""
    found: tuple[list[TargetVersion], list[TargetVersion]] = [], []
    names = [n for n in store.names() if VERSION.fullmatch(n) and not is_link(store, n)]
    for leaf, read, goals in zip((ROOT, DESCRIPTION), (_committed, _begun), found, strict=True):
        paths = [f"{name}/{leaf}" for name in names]
        for path, data in zip(paths, store.read_many(paths, [-1] * len(paths)), strict=True):
            if isinstance(data, StorageError):
                if is_missing(data):
                    continue
                raise data
            goal = _matching(store, read(data, path), spec)
            if goal is not None and has_shards_of(goal, wanted):
                goals.append(goal)
    return found


def has_shards_of(goal: TargetVersion, wanted: int | None) -> bool:
    """Whether a version has as many rows a shard as were asked for, any by default."""
    nbytes = [row.nbytes for row in goal.shapes.values()]
    if wanted in (None, goal.rows_per_shard):
        return True
    return goal.rows_per_shard == rows_per_shard(len(goal.table), nbytes, wanted)


def _committed(data: bytes, where: str) -> Attributes | None:
    try:
        return read_attributes(data, where)
    except NewerFormatError:
        raise
    except StoreError:
        return None  # not ours, or damaged: then it is made again


def _begun(data: bytes, where: str) -> Identity | None:
    try:
        return Identity.read(data, where)
    except StoreError:
        return None  # all it says is computed again


def _matching(
    store: Folder, found: Attributes | Identity | None, spec: VersionSpec
) -> TargetVersion | None:
    if found is None or (found.fingerprint, found.rows_digest) != (
        spec.fingerprint,
        spec.rows_digest,
    ):
        return None
    goal = goal_of(store, found, replace(spec, retries=found.retries))
    return goal if goal.version == found.version else None


def goal_of(store: Folder, found: Attributes | Identity, spec: VersionSpec) -> TargetVersion:
    """The version of a recipe that has the rows of another version."""
    shapes = {name: RowShape(row.shape, row.dtype) for name, row in found.fields.items()}
    return TargetVersion.of(store, spec, found.rows_per_shard, shapes)
