"""Repair of a committed version: of copies of its objects, and shards of their samples, too.

An object is put only if it has the bytes that the version's tree of digests names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from precache.errors import BuildError, DamageError, StorageError, StoreError
from precache.maintenance.mending import mended_objects
from precache.storage.base import Folder
from precache.store.commit_log import BUILD, ROOT, read_commits, recorded_root
from precache.store.lease import decision_lease
from precache.store.open import open_own
from precache.store.receipts import Receipt
from precache.store.tree import Flaw, Leaf, seal_of, spare_root
from precache.store.version import Version
from precache_workers.planning.stored_versions import StoredObjects, committed_versions
from precache_workers.planning.target_version import SCRATCH, TargetVersion

# --- small objects ------------------------------------------------------------------------------


def restore_root(store: Folder, target: TargetVersion) -> None:
    """Put the lost root of a committed version again of its spare copy, if its shards are there.

    Callers hold the lease to decide about the version.
    """
    if target.folder.size(ROOT) is not None or (root := spare_root(target.folder)) is None:
        return
    if seal_of(root) != recorded_root(read_commits(store), target.version):
        return
    version = open_own(target.folder, root)
    sizes = target.folder.sizes()
    leaves = (leaf for name in version.stored for leaf in version.shard_leaves(name))
    if all(sizes.get(leaf.name) == leaf.size for leaf in leaves):
        target.folder.create(ROOT, [root], scratch=SCRATCH)


def mend_small(store: Folder, target: TargetVersion, flaws: Sequence[Flaw]) -> None:
    """Put flawed small objects of a committed version again, of copies.

    Parameters
    ----------
    flaws
        As `stored_versions.flaws_of` returns them.

    Raises
    ------
    StoreError, BuildError
        There is no copy of an object, or another process changed the version meanwhile.
    """
    version = open_own(target.folder, mends=True)

    def copy_of(leaf: Leaf) -> bytes | None:
        others = (folder.get(leaf.name) for folder, _ in committed_versions(store))
        return next((data for data in others if data and not leaf.fault(data)), None)

    objects = mended_objects(version, flaws, copy_of)
    with decision_lease(store, target.version) as decision:
        if version.was_made_again(target.folder.get(ROOT) or b""):
            raise StoreError(
                f"{target.folder} was changed by another process; run the same command again"
            )
        for name, data in objects.items():
            decision.require()
            target.folder.put(name, [data], scratch=SCRATCH)


# --- shards -------------------------------------------------------------------------------------


def lost_by_shard(lost: StoredObjects) -> dict[int, dict[str, Leaf]]:
    """Return shard -> field -> lost object."""
    by_shard: dict[int, dict[str, Leaf]] = {}
    for (field, shard), leaf in lost.items():
        by_shard.setdefault(shard, {})[field] = leaf
    return by_shard


def objects_of(target: TargetVersion, receipts: Iterable[Receipt]) -> dict[tuple[str, int], Leaf]:
    """Return (field, shard) -> object of receipts."""
    return {
        (field, receipt.shard): Leaf(
            target.object_name(field, receipt.shard), stored.size, stored.xxh3
        )
        for receipt in receipts
        for field, stored in receipt.objects.items()
    }


def require_recorded(target: TargetVersion, lost: StoredObjects) -> None:
    """Raise `BuildError` if the version has other objects now, as one that replaced it may."""
    version = open_own(target.folder)
    if any(_shard_of(version, *item) != leaf for item, leaf in lost.items()):
        raise BuildError(
            f"another process changed {target.folder} meanwhile; run the same command again"
        )


def copy_from_other_versions(
    store: Folder, target: TargetVersion, lost: StoredObjects, require: Callable[[], None]
) -> list[tuple[str, int]]:
    """Copy lost objects from other versions that have them whole; returns which.

    Parameters
    ----------
    require
        Raises where the build may no longer write.
    """
    copied = []
    for item, leaf in lost.items():
        for other in _versions_with(store, target, item, leaf):
            if _is_whole(other, leaf):
                require()
                target.folder.copy(leaf.name, other, leaf.name, scratch=SCRATCH)
                copied.append(item)
                break
    return copied


def copy_to_other_versions(
    store: Folder, target: TargetVersion, rebuilt: StoredObjects
) -> list[str]:
    """Copy objects that were built again to other versions in which the same ones are damaged.

    Returns the ids of these versions.
    """
    mended = set()
    for item, leaf in rebuilt.items():
        for other in _versions_with(store, target, item, leaf):
            if _is_one_file(other, target.folder, leaf.name) or _is_whole(other, leaf):
                continue
            if not _is_whole(target.folder, leaf):
                continue  # it was replaced meanwhile
            with decision_lease(store, other.name) as decision:
                if _shard_in(other, item) != leaf:
                    continue  # it was replaced meanwhile
                decision.require()
                other.copy(leaf.name, target.folder, leaf.name, scratch=SCRATCH)
            other.remove(SCRATCH)
            if not other.names(BUILD):
                other.remove(BUILD)
            mended.add(other.name)
    return sorted(mended)


def _versions_with(
    store: Folder, target: TargetVersion, item: tuple[str, int], leaf: Leaf
) -> Iterator[Folder]:
    """Yield other versions that have the same object."""
    for folder, attributes in committed_versions(store):
        is_other = folder.name != target.version and item[0] in attributes.fields
        if is_other and _shard_in(folder, item) == leaf:
            yield folder


def _shard_in(folder: Folder, item: tuple[str, int]) -> Leaf | None:
    """Return what a version has as a shard; None if it is damaged."""
    try:
        return _shard_of(open_own(folder), *item)
    except (DamageError, StorageError, StoreError):
        return None  # `verify` reports it


def recorded_leaf(folder: Folder, name: str) -> Leaf | None:
    """Return the record of a shard by its name; None if the version is gone or damaged."""
    array, _, rest = name.partition("/c/")
    return _shard_in(folder, (array, int(rest.partition("/")[0])))


def _shard_of(version: Version, field: str, shard: int) -> Leaf | None:
    leaves = version.shard_leaves(field)
    return leaves[shard] if shard < len(leaves) else None


def _is_one_file(one: Folder, other: Folder, name: str) -> bool:
    path, other_path = one.local(name), other.local(name)
    return bool(path and other_path and path.exists() and path.samefile(other_path))


def _is_whole(folder: Folder, leaf: Leaf) -> bool:
    try:
        return not leaf.fault_in(folder)
    except StorageError:
        return False
