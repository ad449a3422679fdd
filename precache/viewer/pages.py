"""Pages about a store, from what is to stand in them: no script, no network, light and dark."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from precache.html.pages import environment, style
from precache.viewer.search import Query

LISTED = 200
"""Classes and holes in a table."""


@dataclass(frozen=True)
class Picture:
    """One image of a sample.

    Attributes
    ----------
    title, note
        What it is, and its size or what was done to its values.
    source
        URL, or all of it as a ``data:`` URL; empty where there is only the note.
    alt
        What it shows, for those who do not see it.
    size
        (width, height) in pixels, where known.
    """

    title: str
    source: str = ""
    alt: str = ""
    note: str = ""
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Card:
    """One sample: its images, fields that are none as (name, words), and what is wrong with it."""

    row: int
    key: str
    label: str = ""
    hole: str = ""
    problems: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    numbers: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Count:
    """Valid rows of one label."""

    label: int
    name: str
    rows: int


@dataclass(frozen=True)
class VersionFacts:
    """A version as a whole.

    Attributes
    ----------
    sizes, build
        (name, words).
    statistics
        (field, channel, mean, standard deviation), in stored units.
    """

    store: str
    version: str
    path: str
    created: str
    rows: int
    holes: int
    classes: int
    sizes: Sequence[tuple[str, str]]
    statistics: Sequence[tuple[str, str, float, float]]
    build: Sequence[tuple[str, str]]


Link = tuple[str, str, str]
"""Words, target, and what it is to this page (``next``, ``prev`` or nothing)."""


@dataclass(frozen=True)
class Grid:
    """A page of samples.

    Attributes
    ----------
    found
        In words, how many rows of which.
    note
        About the pictures of all samples.
    traced
        Whether samples have several pictures each.
    """

    facts: VersionFacts
    query: Query
    cards: Sequence[Card]
    counts: Sequence[Count]
    holes: Sequence[tuple[int, str, str]]
    links: Sequence[Link] = ()
    found: str = ""
    note: str = ""
    error: str = ""
    traced: bool = False


def grid_page(grid: Grid, *, static: bool = False) -> str:
    """HTML of a page of samples; a static one links to nothing and loads nothing."""
    title = f"{grid.facts.store}: {grid.facts.rows:,} rows"
    return _render("view_grid.html", static=static, title=title, root=".", **vars(grid))


def sample_page(facts: VersionFacts, card: Card, links: Sequence[Link]) -> str:
    """HTML of a page about one sample, one level below the pages of samples."""
    title = f"{card.key} in {facts.store}"
    return _render("view_sample.html", title=title, root="..", facts=facts, card=card, links=links)


def error_page(title: str, error: str, root: str) -> str:
    """HTML of a page that says what is wrong."""
    return _render("view_error.html", title=title, error=error, root=root)


def _render(name: str, *, static: bool = False, **values: object) -> str:
    template = environment().get_template(name)
    return template.render(
        static=static, css=style("view.css"), policy=policy(static), listed=LISTED, **values
    )


def policy(static: bool) -> str:
    """Content-Security-Policy: no script at all, this style sheet alone, images of its own."""
    digest = base64.b64encode(hashlib.sha256(style("view.css").encode()).digest()).decode()
    images, forms = ("", "'none'") if static else ("'self' ", "'self'")
    return (
        f"default-src 'none'; img-src {images}data:; style-src 'sha256-{digest}'; "
        f"form-action {forms}; base-uri 'none'"
    )
