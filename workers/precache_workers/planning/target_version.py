"""The version that a build is to complete, determined before its first shard task."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from precache.errors import GoneError, StorageError, StoreError
from precache.recipe.recipe import Recipe
from precache.recipe.variants import field_of
from precache.runtime.operating_system import usable_cores
from precache.runtime.process_id import process_of
from precache.runtime.threads import prefetch
from precache.storage.base import Folder, is_missing
from precache.store.build_status import DESCRIPTION, FROZEN_ROWS, read_description
from precache.store.commit_log import (
    BUILD,
    ROOT,
    Log,
    folder_name,
    generation_of,
    id_of,
    read_log,
)
from precache.store.json_documents import Attributes, Identity, version_id
from precache.store.layout import RowShape, rows_per_shard
from precache.store.open import open_own
from precache.store.receipts import Receipt
from precache.store.row_table import RowTable, freeze
from precache.store.tree import Leaf, seal_of, spare_root
from precache.store.version import Version
from precache_workers.ops.identity import decides, ops_digest
from precache_workers.planning.stored_versions import documents, receipts_of

SCRATCH = f"{BUILD}/tmp"

COMPARED_AT_ONCE = 8
"""Objects whose bytes are compared at a time, at most."""

StoredObjects = Mapping[tuple[str, int], Leaf]
"""(field, shard) -> object."""


@dataclass(frozen=True)
class VersionSpec:
    """All that decides a version's id except rows per shard.

    Attributes
    ----------
    declared
        The recipe as the user wrote it.
    decides
        Identities of its ops and functions, by name, when it was planned; empty where nothing is
        built of it.
    """

    declared: Recipe
    fingerprint: str
    table: RowTable
    rows_digest: str
    decides: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, declared: Recipe, table: RowTable) -> VersionSpec:
        """Return what a recipe and a row table decide, with the code and libraries of today."""
        decided = decides(declared)
        return cls(declared, declared.fingerprint(decided), table, table.digest, decided)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe with a field for each stored array."""
        return self.declared.by_array()


@dataclass(frozen=True)
class TargetVersion:
    """A version of a store, begun or finished or neither.

    Attributes
    ----------
    folder
        Folder of the version.
    shapes
        Row shape of each field.
    """

    spec: VersionSpec
    folder: Folder
    rows_per_shard: int
    shapes: Mapping[str, RowShape]

    @classmethod
    def of(
        cls,
        store: Folder,
        spec: VersionSpec,
        rows_per_shard: int,
        shapes: Mapping[str, RowShape],
        generation: int = 1,
    ) -> TargetVersion:
        own = version_id(spec.fingerprint, spec.rows_digest, rows_per_shard)
        folder = store.folder(folder_name(own, generation))
        return cls(spec, folder, rows_per_shard, shapes)

    def at(self, store: Folder, generation: int) -> TargetVersion:
        """Return another generation of the version."""
        return TargetVersion.of(store, self.spec, self.rows_per_shard, self.shapes, generation)

    @property
    def version(self) -> str:
        """Name of the version's folder, ``ID.G``."""
        return self.folder.name

    @property
    def table(self) -> RowTable:
        return self.spec.table

    @property
    def row_types(self) -> dict[str, str]:
        """Dtype and shape of a row, by field."""
        fields = self.spec.recipe.fields
        return {field_of(a): row.described(fields[a].kind) for a, row in self.shapes.items()}

    @property
    def shards(self) -> int:
        return -(-len(self.table) // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        """Rows of a shard; the last may be short."""
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, len(self.table)))

    def samples_of(self, shard: int) -> int:
        """Rows of a shard without those whose samples were removed."""
        rows = self.rows_of(shard)
        return len(rows) - len(self.table.removed.intersection(rows))

    def object_name(self, field: str, shard: int) -> str:
        """Name of a shard's object below the version's folder."""
        return f"{field}/{self.shapes[field].object_name(shard)}"

    def shards_to_do(self, receipts: Mapping[int, Receipt]) -> list[int]:
        """List the shards without a receipt, or with objects of another size than it records."""
        sizes, todo = self.folder.sizes(), []
        for shard in range(self.shards):
            objects = receipts[shard].objects.items() if shard in receipts else None
            if objects is None or any(
                sizes.get(self.object_name(name, shard)) != made.size for name, made in objects
            ):
                todo.append(shard)
        return todo

    def committed(self) -> Version:
        """Open the version, which was committed, be it by its copies; see `open_own`."""
        return open_own(self.folder, mends=True)

    def describe(self) -> dict[str, Any]:
        """Describe the identity of the version, as build.json and the metadata hold it."""
        recipe, decides = self.spec.recipe, self.spec.decides
        fields = {
            name: {
                **row.document,
                "codec": recipe.fields[name].stored_as.name,
                "recipe": ops_digest(recipe, name, len(recipe.fields[name].ops), decides),
            }
            for name, row in self.shapes.items()
        }
        return {
            "version": id_of(self.version),
            "fingerprint": self.spec.fingerprint,
            "rows_digest": self.spec.rows_digest,
            "rows_per_shard": self.rows_per_shard,
            "source": self.table.source,
            "fields": fields,
            "recipe": self.spec.declared.to_dict(),
            "rows": len(self.table),
        }

    def begin(self, refreshes: str | None = None, *, recompute: bool = False) -> None:
        """Freeze the row table, unless it is frozen, and put the description.

        Parameters
        ----------
        refreshes
            Id of the version of which it is a refresh.
        recompute
            Whether all rows are computed again.
        """
        if self.folder.size(FROZEN_ROWS) is None:
            self.folder.create(FROZEN_ROWS, [freeze(self.table)], scratch=SCRATCH)
        by = process_of(os.getpid()).model_dump()
        begun = {**self.describe(), "begun": time.time(), "by": by}
        begun |= {"version": self.version, "refreshes": refreshes, "recompute": recompute}
        self.folder.put(DESCRIPTION, [json.dumps(begun).encode()], scratch=SCRATCH)

    def record_failure(self, reason: str) -> None:
        """Record in the description that this process, which began the version, has failed.

        Another one that took over has put its own description.
        """
        description = json.loads(self.folder.get(DESCRIPTION) or b"{}")
        if description.get("by") == process_of(os.getpid()).model_dump():
            description["failed"] = reason
            self.folder.put(DESCRIPTION, [json.dumps(description).encode()], scratch=SCRATCH)


def find_target(
    store: Folder, spec: VersionSpec, per_shard: int | None, *, recompute: bool = False
) -> TargetVersion | None:
    """Return the store's version of a recipe, committed or begun; None if it has none.

    Of several committed versions, it is the one of the highest generation.

    Parameters
    ----------
    per_shard
        Rows of a shard that the user asks for; None for any.
    recompute
        Return the version that builds it anew.
    """
    first, begun = list[TargetVersion](), list[TargetVersion]()
    for folder, document in documents(store, begun=True):
        if (document.fingerprint, document.rows_digest) != (spec.fingerprint, spec.rows_digest):
            continue
        shapes = {name: field.row for name, field in document.fields.items()}
        shards, generation = document.rows_per_shard, generation_of(folder.name)
        target = TargetVersion.of(store, spec, shards, shapes, generation)
        if target.version != folder.name or not has_shards_of(target, per_shard):
            continue
        if recompute or isinstance(document, Attributes):
            first.append(target)
        elif not document.recompute:
            begun.append(target)
    last = max(first or begun, key=lambda target: generation_of(target.version), default=None)
    return new_target(store, last, recompute=True) if recompute and last else last


def new_target(store: Folder, like: TargetVersion, *, recompute: bool = False) -> TargetVersion:
    """Return the next generation of a version, or one that was begun and nobody has committed.

    Parameters
    ----------
    recompute
        Whether all rows are computed again: then none is taken that was described before.
    """
    log, own = read_log(store), id_of(like.version)
    generation = log.next_generation(own, store.names())
    last = like.at(store, max(1, generation - 1))
    is_there = generation > 1 and not store.is_link(last.version)
    if is_there and _is_open(log, last, recompute=recompute):
        return last
    return like.at(store, generation)


def _is_open(log: Log, target: TargetVersion, *, recompute: bool) -> bool:
    """Return whether a build may go on with a version: nothing else was or will be its bytes."""
    is_used = target.version in log.removed or target.version in log.versions
    if is_used or target.folder.size(ROOT) is not None:
        return False
    is_begun = target.folder.size(DESCRIPTION) is not None
    return not is_begun or not (recompute or is_recomputed(target))


def restore_roots(store: Folder) -> None:
    """Put back lost roots of committed versions, from their copies, where all shards are there."""
    for folder, root in lost_roots(store):
        folder.put(ROOT, [root], scratch=SCRATCH)


def lost_roots(store: Folder) -> Iterator[tuple[Folder, bytes]]:
    """Yield the versions that `restore_roots` mends, and their roots."""
    log = read_log(store, appends=True)
    names = [f"{version}/{ROOT}" for version in log.versions if version not in log.removed]
    for name, data in zip(names, store.read_small(names), strict=True):
        if not isinstance(data, StorageError) or not is_missing(data):
            continue
        folder = store.folder(name.partition("/")[0])
        root, sizes = spare_root(folder), folder.sizes()
        if root is None or seal_of(root) != log.root_of(folder.name):
            continue
        with contextlib.suppress(StoreError):  # the tables of its shards were lost, too
            version = open_own(folder, root)
            leaves = [leaf for array in version.stored for leaf in version.shard_leaves(array)]
            if all(sizes.get(leaf.name) == leaf.size for leaf in leaves):
                yield folder, root


def description_of(target: TargetVersion) -> Identity | None:
    """Return the description of an uncommitted version; None if it is missing or damaged."""
    with contextlib.suppress(StoreError):
        return read_description(target.folder)
    return None


def is_recomputed(target: TargetVersion) -> bool:
    """Return whether an uncommitted version was begun to compute all rows again."""
    begun = description_of(target)
    return begun is not None and begun.recompute


def has_shards_of(target: TargetVersion, per_shard: int | None) -> bool:
    """Return whether a version has as many rows a shard as the user asks for."""
    nbytes = [row.nbytes for row in target.shapes.values()]
    if per_shard in (None, target.rows_per_shard):
        return True
    return target.rows_per_shard == rows_per_shard(len(target.table), nbytes, per_shard)


# --- what is stored of it -----------------------------------------------------------------------


def is_committed(target: TargetVersion) -> bool:
    """Return whether the version was committed, as far as its root or the copy can be read."""
    with contextlib.suppress(StoreError):
        return target.folder.size(ROOT) is not None and target.committed() is not None
    return False


def is_whole(target: TargetVersion) -> bool:
    """Return whether the version was committed, and no object is missing or flawed."""
    with contextlib.suppress(GoneError):
        if is_committed(target):
            version = target.committed()
            return not version.flaws() and not version.lost_objects()
    return False


def compare_objects(
    target: TargetVersion, recorded: StoredObjects
) -> Iterator[tuple[tuple[str, int], bool]]:
    """Read shards; yields field and number of each, and whether it is what was written."""

    def compare(item: tuple[str, int]) -> tuple[tuple[str, int], bool]:
        return item, not recorded[item].fault_in(target.folder)

    local = target.folder.local("") is not None
    threads = min(COMPARED_AT_ONCE, usable_cores() if local else COMPARED_AT_ONCE)
    return prefetch(compare, recorded, threads, threads)


def read_receipts(target: TargetVersion) -> dict[int, Receipt]:
    """Read the receipts of a version that was begun, by shard."""
    return {
        receipt.shard: receipt
        for receipt in receipts_of(target.folder)
        if receipt.shard in range(target.shards)
        and receipt.fits(target.rows_of(receipt.shard), target.shapes, target.rows_per_shard)
    }
