"""Stored versions: those committed, and which objects of the target version exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np

from precache.errors import GoneError, StorageError, StoreError
from precache.runtime.operating_system import usable_cores
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder
from precache.storage.stored_digest import has_bytes
from precache.store.commit_log import ROOT, read_commits
from precache.store.consistency import Flaw, inspect
from precache.store.json_documents import Attributes
from precache.store.open import open_own_unchecked
from precache.store.receipts import RECEIPTS, Receipt
from precache.store.row_table import read_contents
from precache.store.version import ROW_TABLE, Version, read_attributes
from precache_workers.planning.target_version import TargetVersion

RECEIPTS_AT_ONCE = 64
"""Receipts read at a time."""

COMPARED_AT_ONCE = 8
"""Objects whose bytes are compared at a time, at most."""

StoredObjects = Mapping[tuple[str, int], tuple[int, int]]
"""(field, shard) -> size and XXH3-64."""


def committed_versions(store: Folder) -> Iterator[tuple[Folder, Attributes]]:
    """Yield the versions of a store that can be read, the latest first."""
    for name in dict.fromkeys(commit.version for commit in reversed(read_commits(store))):
        folder = store.folder(name)
        try:
            yield folder, read_attributes(folder.read(ROOT), folder.path(ROOT))
        except (StorageError, StoreError):
            continue  # removed, damaged, or of a newer release


def latest_of(store: Folder, source: str) -> tuple[Folder, Attributes] | None:
    """Return the latest version of a source, as `RowTable.source` names it; None if it has none."""
    versions = committed_versions(store)
    return next((version for version in versions if version[1].source == source), None)


def is_committed(target: TargetVersion) -> bool:
    """Return whether the version was committed, as far as its document can be read."""
    if target.folder.size(ROOT) is None:
        return False
    try:
        return open_own_unchecked(target.folder).id == target.version
    except StoreError:
        return False


def flaws_of(target: TargetVersion, listed: bool = True) -> list[Flaw]:
    """Find flaws of the small objects and the documents of a committed version.

    Parameters
    ----------
    listed
        Whether the target has its row table, and not its length alone.
    """
    return inspect(open_own_unchecked(target.folder), target.table if listed else None)


def is_whole(target: TargetVersion, listed: bool = True) -> bool:
    """Return whether the version was committed and no object is missing; see `flaws_of`."""
    with contextlib.suppress(GoneError):
        return is_committed(target) and not flaws_of(target, listed) and not lost_objects(target)
    return False


def lost_objects(target: TargetVersion) -> dict[tuple[str, int], tuple[int, int]]:
    """Find missing objects of a committed version: (field, shard) -> size and XXH3-64."""
    return open_own_unchecked(target.folder).lost_objects()


def recorded_objects(target: TargetVersion) -> dict[tuple[str, int], tuple[int, int]]:
    """Return what a committed version records of all its objects."""
    version = open_own_unchecked(target.folder)
    return {
        (name, shard): (size, xxh3)
        for name in version.stored
        for shard, (size, xxh3) in enumerate(np.asarray(version.shard_table(name)).tolist())
    }


def compare_objects(
    target: TargetVersion, recorded: StoredObjects
) -> Iterator[tuple[tuple[str, int], bool]]:
    """Read objects; yields field and shard of each, and whether it has the recorded bytes."""

    def compare(item: tuple[str, int]) -> tuple[tuple[str, int], bool]:
        return item, has_bytes(target.folder, target.object_name(*item), *recorded[item])

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
                    if _fits(target, receipt):
                        receipts[receipt.shard] = receipt
    return receipts


def _fits(target: TargetVersion, receipt: Receipt) -> bool:
    """Return whether a receipt can belong to the version; if not, its shard is built again."""
    if not 0 <= receipt.shard < target.shards:
        return False
    rows = target.rows_of(receipt.shard)
    sums = [channels.flat() for channels in receipt.sums.values()]
    lengths = [
        1 + 2 * (*target.shapes[name].shape, 0)[0] for name in receipt.sums if name in target.shapes
    ]
    return (
        receipt.objects.keys() == target.shapes.keys()
        and all(0 <= n < 2**64 for o in receipt.objects.values() for n in (o.size, o.xxh3))
        and all(row in rows for row in receipt.holes)
        and len(receipt.content) == len(rows)
        and len(receipt.labels or receipt.content) == len(rows)
        and all(-(2**63) <= label < 2**63 for label in receipt.labels or ())
        and list(map(len, sums)) == lengths
    )
