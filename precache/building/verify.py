"""`verify`: check every stored byte of a version, and that its recipe produced its rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

from precache.errors import PrecacheError
from precache.maintenance.verify import Tick, Verified, verify_version
from precache.storage.open import StorageOptions
from precache.store.open import open_unchecked
from precache.store.version import Version


def verify(
    uri: str | os.PathLike[str],
    tick: Tick = lambda nbytes: None,
    storage_options: StorageOptions = None,
) -> Verified:
    """Check every stored byte of a version.

    Parameters
    ----------
    uri
        A store, or ``STORE@prefix``.
    tick
        Called with the number of bytes read.
    storage_options
        Options of a remote file system, passed to its fsspec class.

    Raises
    ------
    StoreError
        There is no such version, or other software wrote it without checksums.
    GoneError
        The version was removed in the meantime.
    """
    return verify_version(open_unchecked(uri, storage_options), tick, check_recipe)


def check_recipe(version: Version) -> Iterator[str]:
    """Yield the reason if it cannot be confirmed that the recipe produced the rows."""
    from precache.recipe.ops import Function
    from precache_workers.ops.behaviour import digest_of
    from precache_workers.ops.identity import ops_digest, recipe_steps, select_identities

    attributes = version.attributes
    assert attributes is not None  # open_unchecked refuses others
    try:
        recipe = version.recipe
        arrays, decided = recipe.by_array(), attributes.decides
        fingerprint = recipe.fingerprint(select_identities(recipe, decided))
        digests = {
            name: ops_digest(arrays, name, len(field.ops), decided)
            for name, field in arrays.fields.items()
        }
    except (PackageNotFoundError, PrecacheError) as error:
        yield f"the recipe: {error}"
        return
    stored = {name: field.recipe for name, field in attributes.fields.items()}
    same = all(
        digest_of(attributes.behaviours.get(step.name, {})) == decided.get(step.name)
        for step in recipe_steps(recipe)
        if not isinstance(step.op, Function)
    )
    if (fingerprint, digests) != (attributes.fingerprint, stored) or not same:
        yield (
            "the recipe: its fingerprint is not that of the version; the recipe is damaged, or "
            "another release of precache wrote it"
        )
