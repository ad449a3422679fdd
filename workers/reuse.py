"""Earlier versions of the same keys: what a build may take over where the samples are the same.

A source that was copied has other times and other entity tags, so that its row table is another
and its version too; the content hashes kept in the earlier one tell that the samples are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precache.attributes import Attributes
from precache.errors import DamageError, StorageError, StoreError
from precache.folder import Folder
from precache.rowtable import RowTable, kept_contents
from precache.store import ROOT, ROW_TABLE, Version, open_own, read_attributes, read_commits
from workers.goal import Goal, Recipe, goal_of, has_shards_of


@dataclass(frozen=True)
class Offer:
    """A shard of an earlier version, to be taken over if the samples prove to be the same.

    Attributes
    ----------
    folder
        Of the earlier version.
    objects
        Field -> size and XXH3-64 of the object.
    content
        XXH3-128 (hex) of each raw sample in row order, empty where it could not be fetched.
    holes
        Row number -> why.
    """

    folder: Folder
    objects: Mapping[str, tuple[int, int]]
    content: Sequence[str]
    holes: Mapping[int, str]


@dataclass(frozen=True)
class Earlier:
    """A committed version of the same recipe and keys as the version to be made, `goal`."""

    goal: Goal
    folder: Folder
    sizes: np.ndarray
    content: Sequence[str]
    holes: Mapping[int, str]
    objects: Mapping[str, np.ndarray]

    @property
    def stored_nbytes(self) -> int:
        """Of all its large fields."""
        return sum(int(each[:, 0].sum()) for each in self.objects.values())

    def fits(self, goal: Goal) -> bool:
        """Whether that version has the same rows in the same shards."""
        return (goal.version, goal.shapes) == (self.goal.version, self.goal.shapes)

    def has(self, row: int, content: str) -> bool:
        """Whether a row was made of a sample with this content hash, and is no hole."""
        return bool(content) and self.content[row] == content and row not in self.holes

    def offer(self, shard: int) -> Offer | None:
        """A shard whose samples have the sizes that are listed now; None where one differs."""
        rows = self.goal.rows_of(shard)
        part = slice(rows.start, rows.stop)
        before, now = self.sizes[part], self.goal.table.sizes[part]
        if ((before != now) & (before >= 0) & (now >= 0)).any():
            return None
        tables = {name: each[shard].tolist() for name, each in self.objects.items()}
        objects = {name: (size, xxh3) for name, (size, xxh3) in tables.items()}
        holes = {row: self.holes[row] for row in rows if row in self.holes}
        return Offer(self.folder, objects, self.content[part], holes)


def find_earlier(store: Folder, recipe: Recipe, wanted: int | None) -> Earlier | None:
    """The latest committed version of the same recipe and the same keys in the same rows.

    Parameters
    ----------
    wanted
        Rows a shard, as the user gave them; any will do by default.
    """
    for folder, attributes in _committed(store):
        if (attributes.fingerprint, attributes.rows) != (recipe.fingerprint, len(recipe.table)):
            continue
        goal = goal_of(store, attributes, recipe)
        if goal.version != attributes.version and has_shards_of(goal, wanted):
            try:
                found = _read(open_own(folder), goal)
            except (DamageError, StorageError, StoreError):
                continue  # it offers nothing, and `verify` says why
            if found is not None:
                return found
    return None


def _committed(store: Folder) -> Iterator[tuple[Folder, Attributes]]:
    """The store's versions that can be read, the latest first."""
    for name in dict.fromkeys(commit.version for commit in reversed(read_commits(store))):
        folder = store.folder(name)
        try:
            yield folder, read_attributes(folder.read(ROOT), folder.path(ROOT))
        except (StorageError, StoreError):
            continue  # removed, damaged, or of a newer release


def _read(version: Version, goal: Goal) -> Earlier | None:
    version.small_checks()[ROW_TABLE]()
    where = version.folder.path(ROW_TABLE)
    keys, sizes, content = kept_contents(version.folder.read(ROW_TABLE), where)
    if not _same_keys(keys, goal.table):
        return None
    tables = {name: version.shard_table(name) for name in goal.shapes}
    objects = {name: table for name, table in tables.items() if table is not None}
    holes = {row: why for row, (_, why) in version.holes.items()}
    return Earlier(goal, version.folder, sizes, content, holes, objects)


def _same_keys(keys: Sequence[str], table: RowTable) -> bool:
    return len(keys) == len(table) and all(map(str.__eq__, keys, table.keys))
