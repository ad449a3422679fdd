"""`view`: pages about a version, in a browser or in a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from precache.errors import UsageError
from precache.storage.open import StorageOptions

if TYPE_CHECKING:
    from precache.viewer.pages import View


def view(
    store: str | os.PathLike[str],
    *,
    rows: int = 24,
    find: str = "",
    label: str = "",
    storage_options: StorageOptions = None,
) -> View:
    """Show the samples, classes, statistics, holes and build of a version.

    Parameters
    ----------
    store
        A store, or ``STORE@prefix`` for a version; path or URL.
    rows
        Rows of a page, 1 to 1000.
    find, label
        The first page shows rows whose keys contain `find`, of the class `label` (its name or
        number).
    storage_options
        As `open` takes them.

    Returns
    -------
    View
        With ``serve()`` for a browser and ``write(path)`` for a file.

    Raises
    ------
    StoreError
        There is no such store.
    UsageError
        `rows` is out of range, or a library of the ``report`` extra is missing.
    """
    from precache.viewer.pages import MAX_SAMPLES, View
    from precache.viewer.search import Catalogue, Query

    if not 1 <= rows <= MAX_SAMPLES:
        raise UsageError(f"rows is {rows}; give 1 to {MAX_SAMPLES} samples per page")
    catalogue = Catalogue(os.fspath(store), storage_options)
    return View(os.fspath(store), catalogue, rows, Query(find, label=label))
