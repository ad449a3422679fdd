"""The versions of a store: those committed, and those that were begun."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from precache.errors import DamageError, FormatError, StorageError, StoreError
from precache.storage.base import Folder
from precache.store.build_status import read_description
from precache.store.commit_log import ROOT, VERSION, read_log
from precache.store.json_documents import Attributes, Identity
from precache.store.open import open_own
from precache.store.receipts import RECEIPTS, Receipt
from precache.store.row_table import RowTable, contents_of
from precache.store.tree import spare_root
from precache.store.version import Version, read_attributes

if TYPE_CHECKING:
    from precache.store.live_version import LiveVersion

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
        """The version, if need be by its copies; raises one of `UNREADABLE`, as `read_rows`."""
        return open_own(self.folder, mends=True) if self.begun is None else self.begun

    def read_rows(self) -> tuple[RowTable, np.ndarray, list[np.ndarray], np.ndarray]:
        """Read the row table, the contents of each row's sample and of its parts, none of these if
        no sample has several; and whether its shard is finished: (rows,) bool."""
        if self.begun is not None:
            return self.begun.table, *add_receipts(self.begun)
        finished = np.ones(self.version.rows, np.bool_)
        version = self.version
        return version.row_table(), version.contents(), version.part_contents(), finished


def documents(
    store: Folder, *, begun: bool = False
) -> Iterator[tuple[Folder, Attributes | Identity]]:
    """Yield the versions of a store with their documents, if necessary of the spare copy: the
    committed ones, the latest first; then others, with their descriptions if they have no root.

    Parameters
    ----------
    begun
        Also those that are not in the log.

    Raises
    ------
    FormatError
        One is of another release.
    """
    log = read_log(store, appends=True)
    names = dict.fromkeys(log.versions, True)
    for name in store.names() if begun else ():
        if VERSION.fullmatch(name) and not store.is_link(name):
            names.setdefault(name, False)
    for name, is_logged in names.items():
        if name not in log.removed:
            folder = store.folder(name)
            if (document := _document(folder, is_logged=is_logged)) is not None:
                yield folder, document


def _document(folder: Folder, *, is_logged: bool) -> Attributes | Identity | None:
    root = folder.get(ROOT)
    try:
        if root is None:  # of one that was committed, bytes can be lost, and never others
            return None if is_logged else read_description(folder)
        return read_attributes(root, folder)
    except FormatError:
        raise
    except StoreError:
        with contextlib.suppress(StoreError):  # not ours, or all is damaged: it is built again
            return read_attributes(spare_root(folder) or b"", folder)
    return None


def stored_versions(
    store: Folder, source: str | None = None, *, begun: bool = False
) -> Iterator[StoredVersion]:
    """Yield the versions of `documents`.

    Parameters
    ----------
    source
        As `RowTable.source` names it: only versions of this one.
    """
    for folder, document in documents(store, begun=begun):
        if source not in (None, document.source):
            continue
        if isinstance(document, Attributes):
            yield StoredVersion(folder, document)
            continue
        from precache.store.live_version import open_begun

        with contextlib.suppress(*UNREADABLE):
            if (live := open_begun(folder)) is not None:
                yield StoredVersion(folder, live.attributes, live)


def add_receipts(begun: LiveVersion) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Read the receipts of a version that was begun.

    Returns
    -------
    tuple
        Contents of the samples, zeros if their shards have no receipt; those of their parts; and
        whether they have one: (rows,) bool.
    """
    contents, parts = [""] * begun.rows, [""] * begun.rows
    done = np.zeros(begun.rows, np.bool_)
    for receipt in receipts_of(begun.folder):
        with contextlib.suppress(StoreError):  # its shard is not taken
            rows = begun.add(receipt, receipt.shard)
            part = slice(rows.start, rows.stop)
            contents[part], done[part] = receipt.content, True
            parts[part] = receipt.parts or [""] * len(rows)
    return *contents_of(contents, parts), done


def open_finished(folder: Folder) -> Version:
    """Open a committed version, or the finished shards of one that was begun."""
    from precache.store.live_version import open_begun

    if folder.size(ROOT) is None and (begun := open_begun(folder)) is not None:
        add_receipts(begun)
        return begun
    return open_own(folder, mends=True)


def receipts_of(folder: Folder) -> Iterator[Receipt]:
    """Read the receipts of a version that was begun."""
    for data in folder.read_small([f"{RECEIPTS}/{name}" for name in folder.names(RECEIPTS)]):
        # If it is damaged, or removed by another build's commit, its shard is built again.
        with contextlib.suppress(ValueError):
            yield Receipt.from_json(data if isinstance(data, bytes) else b"")
