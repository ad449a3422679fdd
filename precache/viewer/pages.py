"""Pages about a version: a grid of samples, one sample, and the images they load."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator

from precache.errors import UsageError
from precache.html.pages import TABLE_ROWS, bar, hyperlink, render, save
from precache.maintenance.info import summarize
from precache.messages import plain_data
from precache.units import counted
from precache.viewer.cards import full_card, page_cards, side_of
from precache.viewer.search import Catalogue, Query, RowPage

STYLES = "view.css"

MAX_SAMPLES = 1000
"""Samples per page."""


class View:
    """Pages about a version, as `precache.view` returns them.

    Parameters
    ----------
    count
        Samples per page.
    query
        The rows that the first page shows.
    """

    def __init__(self, store: str, catalogue: Catalogue, count: int, query: Query) -> None:
        self._store = store
        self._catalogue = catalogue
        self._count = count
        self._query = query
        self._info = summarize(catalogue.version)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the first page as one HTML file that needs no other and no server.

        A path that ends in ``.json`` gets what the page shows, without the pictures.

        Raises
        ------
        StorageError
            The file cannot be written.
        """
        name = os.fspath(path)
        as_data = name.endswith(".json")
        query = self._query
        save(self.data(query) if as_data else self.grid(query, served=False), name)

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

        with contextlib.suppress(KeyboardInterrupt), ViewServer(self, port) as server:
            sys.stdout.write(f"{server.url}{self._query.link().rstrip('?')}\n")
            sys.stdout.flush()
            note = "precache: only this machine can open this address; press Ctrl-C to stop\n"
            sys.stderr.write(note)
            server.serve_forever()

    # --- pages ----------------------------------------------------------------------------------

    def grid(self, query: Query, start: int = 0, *, served: bool = True) -> str:
        """Return the HTML of the rows that match a query, from `start` on.

        A page that is not served has no links.
        """
        matches, error = RowPage([], 0, 0, None), ""
        try:
            matches = self._catalogue.find(query, start, self._count)
        except UsageError as refused:
            if not served:
                raise
            error = str(refused)
        counts, version = self._catalogue.counts, self._catalogue.version
        full = "the page of a row" if served else "without --out, precache view"
        side = side_of(len(matches.rows))
        return render(
            "view_grid.html",
            styles=STYLES,
            served=served,
            root=".",
            title=f"{self._store}: {counted(version.rows, 'row')}",
            store=self._store,
            version=version,
            facts=self._info.facts(),
            query=query,
            cards=page_cards(self._catalogue, matches.rows),
            class_names=[name for _, name, _ in counts[:TABLE_ROWS] if name],
            classes=self._class_table(served),
            class_count=len(counts),
            holes=self._hole_table(served),
            links=list(_page_links(query, matches)),
            summary=_summarize(matches, version.rows),
            note=f"Pictures have at most {side} pixels a side; {full} shows them in full.",
            error=error,
        )

    def data(self, query: Query, start: int = 0) -> str:
        """Return the same as JSON: the version, the rows, and where the next page starts.

        It has what is said of pictures, and not the pictures.
        """
        matches = self._catalogue.find(query, start, self._count)
        cards = page_cards(self._catalogue, matches.rows)
        data = {"info": self._info, "rows": cards, "next": matches.later}
        return json.dumps(plain_data(data))

    def _class_table(self, served: bool) -> list[tuple[object, ...]]:
        counts = self._catalogue.counts
        largest = max((rows for _, _, rows in counts), default=1)
        table: list[tuple[object, ...]] = []
        for label, name, rows in counts[:TABLE_ROWS]:
            linked = hyperlink(name, Query(label=name).link()) if name and served else name
            table.append((linked or "no label", label, f"{rows:,}", bar(rows / largest)))
        return table

    def _hole_table(self, served: bool) -> list[tuple[str, str]]:
        table = []
        for row in self._catalogue.version.hole_rows[:TABLE_ROWS].tolist():
            key, reason = self._catalogue.key(row), self._catalogue.hole(row)
            table.append((hyperlink(key, f"row/{row}") if served else key, reason))
        return table

    def sample(self, row: int) -> str:
        """Return the HTML of the page about one row."""
        last = self._catalogue.version.rows - 1
        key = self._catalogue.key(row)
        neighbours = (("Previous row", row - 1, "prev"), ("Next row", row + 1, "next"))
        return render(
            "view_sample.html",
            styles=STYLES,
            served=True,
            root="..",
            title=f"{key} in {self._store}",
            store=self._store,
            card=full_card(self._catalogue, row),
            links=[(text, str(to), rel) for text, to, rel in neighbours if 0 <= to <= last],
        )


def error_page(error: str, root: str) -> str:
    """Return the HTML of a page that reports an error; `root` leads to the grid."""
    title = "This cannot be shown"
    return render(
        "view_error.html", styles=STYLES, served=True, title=title, error=error, root=root
    )


def _page_links(query: Query, matches: RowPage) -> Iterator[tuple[str, str, str]]:
    """Yield text, target, and ``rel`` attribute (``next`` or empty)."""
    if matches.first:
        yield "First page", query.link(), ""
    if matches.later is not None:
        yield "Next page", query.link(matches.later), "next"


def _summarize(matches: RowPage, rows: int) -> str:
    """Describe which rows match."""
    if not matches.rows:
        last = max(matches.first, matches.stop - 1)
        text = f"No row from {matches.first:,} to {last:,} matches"
    else:
        first, last = matches.rows[0], matches.rows[-1]
        span = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        text = f"{len(matches.rows)} shown: {span}"
    return f"{text}, of {rows:,}."
