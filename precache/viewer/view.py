"""`view`: pages about a version, in a browser or in a file."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precache.errors import UsageError
from precache.storage.open import StorageOptions

if TYPE_CHECKING:
    from precache.viewer.pages import Pages
    from precache.viewer.search import Query


@dataclass(frozen=True)
class View:
    """Pages about a version, and the rows that the first of them shows."""

    pages: Pages
    query: Query

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the first page as one HTML file that needs no other and no server.

        A path that ends in ``.json`` gets what the page shows, without the pictures.

        Raises
        ------
        StorageError
            The file cannot be written.
        """
        from precache.html.pages import save

        name = os.fspath(path)
        as_data = name.endswith(".json")
        pages, query = self.pages, self.query
        save(pages.data(query) if as_data else pages.grid(query, served=False), name)

    def serve(self, port: int = 0) -> None:
        """Print an address of this machine, and serve the pages there until Ctrl-C.

        Parameters
        ----------
        port
            0 for any that is free.

        Raises
        ------
        UsageError
            The port is not free.
        """
        from precache.viewer.server import ViewServer

        with contextlib.suppress(KeyboardInterrupt), ViewServer(self.pages, port) as server:
            sys.stdout.write(f"{server.url}{self.query.link().rstrip('?')}\n")
            sys.stdout.flush()
            note = "precache: only this machine can open this address; press Ctrl-C to stop\n"
            sys.stderr.write(note)
            server.serve_forever()


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
        As `build` takes them.

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
    from precache.viewer.pages import MAX_SAMPLES, Pages
    from precache.viewer.search import Catalogue, Query

    if not 1 <= rows <= MAX_SAMPLES:
        raise UsageError(f"rows is {rows}; give 1 to {MAX_SAMPLES} samples per page")
    catalogue = Catalogue(os.fspath(store), storage_options)
    return View(Pages(os.fspath(store), catalogue, rows), Query(find, label=label))
