"""Mend small objects of a version: from the spare copy, or from wherever the same bytes lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from precache.errors import DamageError, StoreError
from precache.store.commit_log import ROOT
from precache.store.tree import SPARE, Flaw, Leaf, seal_of, spare_objects, spare_root
from precache.store.version import Version


def mended_objects(
    version: Version, flaws: Sequence[Flaw], copy_of: Callable[[Leaf], bytes | None]
) -> dict[str, bytes]:
    """Return the bytes of flawed objects as they were written, by name; `zarr.json` comes last.

    Parameters
    ----------
    version
        Opened with `mends`.
    flaws
        As `Version.flaws` returns them.
    copy_of
        Returns the bytes of an object from elsewhere; None if they are not to be had.

    Raises
    ------
    StoreError
        There is no copy of an object.
    """
    names = [flaw.name for flaw in flaws]
    objects = {n: _mended(version, leaf, copy_of) for n in names if (leaf := version.leaves.get(n))}
    if len(objects) < len(names):  # the root or the spare copy
        root = version.folder.get(ROOT) or b""
        if seal_of(root) != version.digest:
            root = spare_root(version.folder) or b""
        whole = (objects.get(name) or version.read_checked(name) for name in version.leaves)
        objects |= {**spare_objects(root, whole), ROOT: root}
    return {name: data for name, data in objects.items() if name in names}


def _mended(version: Version, leaf: Leaf, copy_of: Callable[[Leaf], bytes | None]) -> bytes:
    try:
        return version.read_checked(leaf.name)
    except DamageError:
        data = copy_of(leaf)
    if data is None or leaf.fault(data):
        raise StoreError(
            f"{version.folder.path(leaf.name)} is damaged, and so is its copy in {SPARE}: remove "
            f"{version.folder.path(ROOT)} and run the same precache build command again, which "
            "makes all of the version again"
        )
    return data
