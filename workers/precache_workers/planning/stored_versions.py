"""Stored versions: those committed, and which objects of the target version exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from precache.errors import DamageError, GoneError, StorageError, StoreError
from precache.runtime.operating_system import usable_cores
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.commit_log import ROOT, read_log
from precache.store.json_documents import Attributes
from precache.store.receipts import RECEIPTS, Receipt
from precache.store.row_table import RowTable, read_contents
from precache.store.tree import Leaf
from precache.store.version import ROW_TABLE, Version, read_attributes
from precache_workers.planning.target_version import TargetVersion

RECEIPTS_AT_ONCE = 64
"""Receipts read at a time."""

COMPARED_AT_ONCE = 8
"""Objects whose bytes are compared at a time, at most."""

StoredObjects = Mapping[tuple[str, int], Leaf]
"""(field, shard) -> object."""


UNREADABLE = DamageError, StorageError, StoreError
"""Raised where a version is read that is damaged, was removed, or is of a newer release."""


def committed_versions(store: Folder) -> Iterator[tuple[Folder, Attributes]]:
    """Yield the versions of a store that can be read, the latest first."""
    log = read_log(store, appends=True)
    for name in log.versions:
        if name not in log.removed:
            folder = store.folder(name)
            with contextlib.suppress(*UNREADABLE):
                yield folder, read_attributes(folder.read(ROOT), folder)


def latest_of(store: Folder, source: str) -> tuple[Folder, Attributes] | None:
    """Return the latest version of a source, as `RowTable.source` names it; None if it has none."""
    versions = committed_versions(store)
    return next((version for version in versions if version[1].source == source), None)


def rows_of(version: Version) -> tuple[RowTable, Texts]:
    """Read the row table of a version, and the content of each row's sample (hex)."""
    data, where = version.read_checked(ROW_TABLE), version.folder.path(ROW_TABLE)
    return RowTable.from_parquet(data, where), Texts(read_contents(data, where))


def is_committed(target: TargetVersion) -> bool:
    """Return whether the version was committed, as far as its root or the copy can be read."""
    if target.folder.size(ROOT) is None:
        return False
    try:
        target.committed()
    except StoreError:
        return False
    return True


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


def contents_of(version: Version) -> list[str]:
    """Read the content hashes of a version by row."""
    return read_contents(version.read_checked(ROW_TABLE), version.folder.path(ROW_TABLE))


def read_receipts(target: TargetVersion) -> dict[int, Receipt]:
    """Read the receipts of a version that was begun, by shard."""
    names = [f"{RECEIPTS}/{name}" for name in target.folder.names(RECEIPTS)]
    receipts = {}
    for start in range(0, len(names), RECEIPTS_AT_ONCE):
        part = names[start : start + RECEIPTS_AT_ONCE]
        for data in target.folder.read_many(part, [-1] * len(part)):
            # If it is damaged, or removed by another build's commit, its shard is built again.
            if isinstance(data, bytes):
                with contextlib.suppress(ValueError):
                    receipt = Receipt.from_json(data)
                    if receipt.shard in range(target.shards) and receipt.fits(
                        target.rows_of(receipt.shard), target.shapes, target.rows_per_shard
                    ):
                        receipts[receipt.shard] = receipt
    return receipts
