"""Stored versions: those committed, and which objects of the target version exist."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from precache.errors import DamageError, GoneError, StorageError, StoreError
from precache.runtime.operating_system import usable_cores
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder
from precache.store.columns import Texts
from precache.store.commit_log import ROOT, VERSION, read_log
from precache.store.json_documents import Attributes
from precache.store.live_version import LiveVersion, open_begun
from precache.store.open import open_own
from precache.store.receipts import RECEIPTS, Receipt
from precache.store.row_table import RowTable, read_contents, read_parts
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


@dataclass(frozen=True)
class StoredVersion:
    """A version of a store.

    Attributes
    ----------
    begun
        The version, if it was begun and not committed.
    """

    folder: Folder
    attributes: Attributes
    begun: LiveVersion | None = None

    @functools.cached_property
    def version(self) -> Version:
        """The version; raises one of `UNREADABLE`, as `read_rows` does."""
        return open_own(self.folder) if self.begun is None else self.begun

    def read_rows(self) -> tuple[RowTable, Texts, Texts, np.ndarray]:
        """Read the row table, the contents of each row's sample and of its parts (hex), empty where
        unknown, and whether its shard is finished: (rows,) bool."""
        if self.begun is not None:
            return self.begun.table, *add_receipts(self.begun)
        table, contents, parts = rows_of(self.version)
        return table, contents, parts, np.ones(len(table), np.bool_)


def stored_versions(
    store: Folder, source: str | None = None, *, begun: bool = False
) -> Iterator[StoredVersion]:
    """Yield the committed versions of a store that can be read, the latest first; then others.

    Parameters
    ----------
    source
        As `RowTable.source` names it: only versions of this one.
    begun
        Also those that were begun and not committed.
    """
    log = read_log(store, appends=True)
    for name in log.versions:
        if name not in log.removed:
            folder = store.folder(name)
            with contextlib.suppress(*UNREADABLE):
                attributes = read_attributes(folder.read(ROOT), folder)
                if source in (None, attributes.source):
                    yield StoredVersion(folder, attributes)
    for name in store.names() if begun else ():
        known = name in log.versions or name in log.removed
        if VERSION.fullmatch(name) and not known and not store.is_link(name):
            with contextlib.suppress(*UNREADABLE):
                live = open_begun(store.folder(name))
                if live is not None and source in (None, live.table.source):
                    yield StoredVersion(live.folder, live.attributes, live)


def add_receipts(begun: LiveVersion) -> tuple[Texts, Texts, np.ndarray]:
    """Read the receipts of a version that was begun.

    Returns
    -------
    tuple
        The content of each row's sample (hex), empty if its shard has no receipt; those of its
        parts; and whether it has one: (rows,) bool.
    """
    contents, parts, done = dict[int, str](), dict[int, str](), np.zeros(begun.rows, np.bool_)
    for receipt in _receipts(begun.folder):
        with contextlib.suppress(StoreError):  # its shard is not taken
            rows = begun.add(receipt, receipt.shard)
            contents |= zip(rows, receipt.content, strict=True)
            parts |= zip(rows, receipt.parts, strict=False)
            done[rows.start : rows.stop] = True
    blank = Texts.repeated([""], [begun.rows])
    return blank.replaced(contents), blank.replaced(parts), done


def open_finished(folder: Folder) -> Version:
    """Open a committed version, or the finished shards of one that was begun."""
    if folder.size(ROOT) is None and (begun := open_begun(folder)) is not None:
        add_receipts(begun)
        return begun
    return open_own(folder)


def rows_of(version: Version) -> tuple[RowTable, Texts, Texts]:
    """Read the row table of a version, and the contents of each row's sample and its parts (hex),
    none of the latter if no sample has several."""
    data, where = version.read_checked(ROW_TABLE), version.folder.path(ROW_TABLE)
    table = RowTable.from_parquet(data, where)
    return table, Texts(read_contents(data, where)), Texts(read_parts(data, where))


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


def read_receipts(target: TargetVersion) -> dict[int, Receipt]:
    """Read the receipts of a version that was begun, by shard."""
    return {
        receipt.shard: receipt
        for receipt in _receipts(target.folder)
        if receipt.shard in range(target.shards)
        and receipt.fits(target.rows_of(receipt.shard), target.shapes, target.rows_per_shard)
    }


def _receipts(folder: Folder) -> Iterator[Receipt]:
    names = [f"{RECEIPTS}/{name}" for name in folder.names(RECEIPTS)]
    for start in range(0, len(names), RECEIPTS_AT_ONCE):
        part = names[start : start + RECEIPTS_AT_ONCE]
        for data in folder.read_many(part, [-1] * len(part)):
            # If it is damaged, or removed by another build's commit, its shard is built again.
            with contextlib.suppress(ValueError):
                yield Receipt.from_json(data if isinstance(data, bytes) else b"")
