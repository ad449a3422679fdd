"""Builds that have begun and not committed: their progress, and their scratch files."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from precache.errors import StoreError
from precache.storage.base import Folder
from precache.store.commit_log import BUILD, ROOT
from precache.store.json_documents import Identity
from precache.store.lease import is_built
from precache.store.receipts import RECEIPTS

DESCRIPTION = f"{BUILD}/build.json"
"""Object of a version that was begun and not committed."""

FROZEN_ROWS = f"{BUILD}/rows.zip"
"""The row table of such a version."""

COPY = f"{BUILD}/copy.json"
"""Root of the version of which a folder is an unfinished copy."""


@dataclass(frozen=True)
class BuildStatus:
    """Progress of a version that is being built, or was left unfinished.

    Attributes
    ----------
    rows, shards
        Of the whole version.
    done
        Shards that have a receipt.
    """

    rows: int
    shards: int
    done: int


def read_description(version: Folder) -> Identity | None:
    """Read the description of a version that was begun; None if there is none.

    Raises
    ------
    StoreError
        It is damaged.
    """
    data = version.get(DESCRIPTION)
    return None if data is None else Identity.read(data, version.path(DESCRIPTION))


def read_build(version: Folder) -> BuildStatus | None:
    """Return the progress of a version that was begun; None if no intact document describes it."""
    identity = None
    with contextlib.suppress(StoreError):
        identity = read_description(version)
    if identity is None or identity.version != version.name:
        return None
    shards, done = -(-identity.rows // identity.rows_per_shard), len(version.names(RECEIPTS))
    return BuildStatus(identity.rows, shards, done)


def remove_scratch(version: Folder) -> None:
    """Remove the scratch files of a version's builds; the description of the build goes last."""
    for name in [] if version.is_link(BUILD) else version.names(BUILD):
        if f"{BUILD}/{name}" != DESCRIPTION:
            version.remove(f"{BUILD}/{name}")
    version.remove(BUILD)  # a link alone, where it is one


def remove_abandoned_scratch(version: Folder) -> None:
    """Remove the scratch files unless a build of the version is alive, such as a repair."""
    if version.is_link(BUILD) or (version.exists(BUILD) and not is_built(version)):
        remove_scratch(version)


def remove_folder(store: Folder, version: str) -> None:
    """Remove a version of which the log says that it is removed, its root first.

    A kill at any moment is safe: the next `gc` finishes the removal.
    """
    store.remove(f"{version}/{ROOT}")
    while store.exists(version):  # another process may put or remove files at the same time
        store.remove(version)
