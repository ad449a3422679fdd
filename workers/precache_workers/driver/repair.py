"""Repair of a committed version: of copies of its objects, and shards of their samples, too.

An object is put only if it has the bytes that the version's tree of digests names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from precache.errors import DamageError, StoreError
from precache.storage.base import Folder
from precache.store.commit_log import BUILD, ROOT
from precache.store.open import open_own
from precache.store.receipts import Receipt
from precache.store.tree import SPARE, Flaw, Leaf, seal_of, spare_objects, spare_root
from precache.store.version import Version
from precache_workers.planning.stored_versions import (
    UNREADABLE,
    StoredObjects,
    stored_versions,
)
from precache_workers.planning.target_version import SCRATCH, TargetVersion

# --- small objects ------------------------------------------------------------------------------


class UnmendedError(StoreError):
    """A small object of a version is damaged, and there is no copy of it."""


def mend_small(store: Folder, target: TargetVersion, flaws: Sequence[Flaw]) -> None:
    """Put flawed small objects of a committed version again, of copies; `zarr.json` comes last.

    Parameters
    ----------
    flaws
        As `Version.flaws` returns them.

    Raises
    ------
    UnmendedError
        There is no copy of an object; nothing was put.
    """
    version = target.committed()
    names = [flaw.name for flaw in flaws]
    leaves = [leaf for name in names if (leaf := version.leaves.get(name))]
    objects = {leaf.name: _mended(store, version, leaf) for leaf in leaves}
    if len(objects) < len(names):  # the root or the spare copy
        root = version.folder.get(ROOT) or b""
        if seal_of(root) != version.digest:
            root = spare_root(version.folder) or b""
        whole = (objects.get(name) or version.read_checked(name) for name in version.leaves)
        objects |= {**spare_objects(root, whole), ROOT: root}
    for name, data in objects.items():
        if name in names:
            target.folder.put(name, [data], scratch=SCRATCH)


def _mended(store: Folder, version: Version, leaf: Leaf) -> bytes:
    """Return an object from the spare copy, or from another version that has the same."""
    try:
        return version.read_checked(leaf.name)
    except DamageError:
        others = (stored.folder.get(leaf.name) for stored in stored_versions(store))
        found = next((data for data in others if data and not leaf.fault(data)), None)
    if found is None:
        raise UnmendedError(
            f"{version.folder.path(leaf.name)} is damaged, and so is its copy in {SPARE}"
        )
    return found


# --- shards -------------------------------------------------------------------------------------


def objects_of(target: TargetVersion, receipts: Iterable[Receipt]) -> dict[tuple[str, int], Leaf]:
    """Return (field, shard) -> object of receipts."""
    return {
        (field, receipt.shard): Leaf(
            target.object_name(field, receipt.shard), stored.size, stored.xxh3
        )
        for receipt in receipts
        for field, stored in receipt.objects.items()
    }


def copy_to_other_versions(
    store: Folder, target: TargetVersion, rebuilt: StoredObjects
) -> list[str]:
    """Copy objects that were built again to other versions in which the same ones are damaged.

    Returns the ids of these versions.
    """
    mended = set()
    for item, leaf in rebuilt.items():
        for stored in stored_versions(store):
            other = stored.folder
            if other.name == target.version or item[0] not in stored.attributes.fields:
                continue
            if _shard_in(other, item) != leaf or leaf.is_in(other):
                continue
            if not leaf.is_in(target.folder):
                continue  # another process removes the version
            other.copy(leaf.name, target.folder, leaf.name, scratch=SCRATCH)
            other.remove(SCRATCH)
            if not other.names(BUILD):
                other.remove(BUILD)
            mended.add(other.name)
    return sorted(mended)


def _shard_in(folder: Folder, item: tuple[str, int]) -> Leaf | None:
    """Return what a version has as a shard; None if it is damaged."""
    name, shard = item
    try:
        leaves = open_own(folder).shard_leaves(name)
    except UNREADABLE:
        return None  # `verify` reports it
    return leaves[shard] if shard < len(leaves) else None


def recorded_leaf(folder: Folder, name: str) -> Leaf | None:
    """Return the record of a shard by its name; None if the version is gone or damaged."""
    array, _, rest = name.partition("/c/")
    return _shard_in(folder, (array, int(rest.partition("/")[0])))
