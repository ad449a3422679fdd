"""Pages about a version: a grid of samples, one sample, and the images they load."""

from __future__ import annotations

from urllib.parse import urlencode

from precache.errors import PrecacheError, UsageError
from precache.html.pages import TABLE_ROWS, bar, hyperlink, render
from precache.html.png import as_picture, encode_png
from precache.viewer.cards import EMBEDDED_SIDE, Cards
from precache.viewer.facts import build_facts, sizes, statistics_rows
from precache.viewer.search import Catalogue, Query, RowPage
from precache.viewer.source_trace import SourceTracer, Trace, media_type

STYLES = "view.css"

MAX_SAMPLES = 1000
"""Samples per page."""

PageLink = tuple[str, str, str]
"""Text, target, and ``rel`` attribute (``next``, ``prev`` or empty)."""


class Pages:
    """Pages about a version.

    Parameters
    ----------
    tracer
        The source of the version; None if the user gave none.
    count
        Samples per page.
    """

    def __init__(
        self, store: str, catalogue: Catalogue, tracer: SourceTracer | None, count: int
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._tracer = tracer
        self._count = count
        self._cards = Cards(catalogue, tracer)

    # --- pages ----------------------------------------------------------------------------------

    def grid(
        self, query: Query, start: int = 0, *, before: bool = False, static: bool = False
    ) -> str:
        """Return the HTML of the rows that match a query, from `start` on or right before it.

        A static page has no links and loads nothing.
        """
        matches, error = RowPage([], 0, 0, None, None), ""
        try:
            matches = self._catalogue.find(query, start, self._count, before=before)
        except UsageError as refused:
            if static:
                raise
            error = str(refused)
        counts, version = self._catalogue.counts, self._catalogue.version
        return render(
            "view_grid.html",
            styles=STYLES,
            served=not static,
            static=static,
            root=".",
            title=f"{self._store}: {version.rows:,} rows",
            store=self._store,
            version=version,
            sizes=sizes(version),
            build=build_facts(version),
            query=query,
            cards=self._cards.page(matches.rows, static=static),
            statistics=[
                (field, channel, f"{mean:.3f}", f"{std:.3f}")
                for name in version.mean
                for field, channel, mean, std in statistics_rows(version, name)
            ],
            class_names=[name for _, name, _ in counts[:TABLE_ROWS] if name],
            classes=self._class_table(static),
            class_count=len(counts),
            holes=self._hole_table(static),
            links=_page_links(query, matches),
            summary=_summarize(matches, version.rows),
            note=self._note(static),
            error=error,
            traced=self._tracer is not None,
        )

    def _class_table(self, static: bool) -> list[tuple[object, ...]]:
        counts = self._catalogue.counts
        largest = max((rows for _, _, rows in counts), default=1)
        return [
            (
                name if static and name else hyperlink(name, _target({"class": name})) if name
                else "no label",
                label, f"{rows:,}", bar(rows / largest),
            )
            for label, name, rows in counts[:TABLE_ROWS]
        ]  # fmt: skip

    def _hole_table(self, static: bool) -> list[tuple[str, str]]:
        version = self._catalogue.version
        return [
            (
                version.keys[row] if static else hyperlink(version.keys[row], f"row/{row}"),
                self._catalogue.hole(row),
            )
            for row in version.hole_rows[:TABLE_ROWS].tolist()
        ]

    def _note(self, static: bool) -> str:
        if self._tracer is None:
            note = (
                "Only what is stored is shown. With --source, raw files and the result of each op "
                "are shown beside it."
            )
        elif self._tracer.ops_problem:
            note = f"Raw files are shown beside what is stored; {self._tracer.ops_problem}."
        else:
            note = "Results of ops are computed from the raw files as they are now."
        reduced = (
            f" Pictures are reduced to at most {EMBEDDED_SIDE} pixels a side; without --out, "
            "precache view shows them in full."
        )
        return note + reduced * static

    def sample(self, row: int) -> str:
        """Return the HTML of the page about one row."""
        last = self._catalogue.version.rows - 1
        key = self._catalogue.key(row)
        neighbours = (("Previous row", row - 1, "prev"), ("Next row", row + 1, "next"))
        return render(
            "view_sample.html",
            styles=STYLES,
            served=True,
            static=False,
            root="..",
            title=f"{key} in {self._store}",
            store=self._store,
            card=self._cards.single(row),
            links=[(text, str(to), rel) for text, to, rel in neighbours if 0 <= to <= last],
        )

    # --- images ---------------------------------------------------------------------------------

    def stored_png(self, row: int, name: str) -> bytes:
        """Return a stored row of an array as a PNG file."""
        self._catalogue.key(row)
        stored = self._catalogue.variants(row)
        if isinstance(stored, str):
            raise PrecacheError(stored)
        preview = as_picture(stored[name]) if name in stored else None
        if preview is None:
            raise UsageError(f"there is no image {name!r} in row {row}")
        return encode_png(preview.pixels)

    def raw(self, row: int) -> tuple[bytes, str]:
        """Return a raw file and its media type."""
        trace = self._trace(row)
        media = media_type(trace.raw or b"")
        if trace.raw is None or media is None:
            raise UsageError(trace.note or f"row {row} has no raw file that a browser shows")
        return trace.raw, media

    def step_png(self, row: int, name: str, number: int) -> bytes:
        """Return the result of an op as a PNG file."""
        trace = self._trace(row)
        steps = trace.steps.get(name, [])
        step = steps[number] if number < len(steps) else None
        if step is None or step.preview is None:
            raise UsageError(trace.note or (step.note if step else f"there is no step {number}"))
        return encode_png(step.preview.pixels)

    def _trace(self, row: int) -> Trace:
        key = self._catalogue.key(row)
        if self._tracer is None:
            raise UsageError("no source is given; give --source")
        return self._tracer.trace(key)


def error_page(error: str, root: str) -> str:
    """Return the HTML of a page that reports an error; `root` leads to the grid."""
    title = "This cannot be shown"
    return render(
        "view_error.html", styles=STYLES, served=True, title=title, error=error, root=root
    )


def redirect_page(url: str) -> str:
    """Return the HTML of a file that leads to a URL."""
    return render("view_open.html", styles=STYLES, title="precache view", url=url)


# --- links --------------------------------------------------------------------------------------

_DEFAULTS = {"q": "", "match": "begins", "class": "", "rows": "all"}


def _page_links(query: Query, matches: RowPage) -> list[PageLink]:
    values = {"q": query.text, "match": query.match, "class": query.label, "rows": query.state}
    values = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    links: list[PageLink] = []
    if matches.earlier is not None:
        links.append(("First page", _target(values), ""))
        links.append(("Previous page", _target({**values, "before": str(matches.earlier)}), "prev"))
    if matches.later is not None:
        text = "Continue the search" if matches.cut else "Next page"
        links.append((text, _target({**values, "from": str(matches.later)}), "next"))
    return links


def _target(values: dict[str, str]) -> str:
    return "?" + urlencode(values)


def _summarize(matches: RowPage, rows: int) -> str:
    """Describe which rows match."""
    if not matches.rows:
        last = max(matches.first, matches.stop - 1)
        text = f"No row from {matches.first:,} to {last:,} matches"
    else:
        first, last = matches.rows[0], matches.rows[-1]
        span = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        text = f"{len(matches.rows)} shown: {span}"
    text += f", of {rows:,}."
    if matches.cut:
        text += " The search stopped here, after two million keys."
    return text
