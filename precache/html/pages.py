"""HTML pages that stand alone: one base template, one style sheet, one content policy."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

from precache.errors import StorageError, UsageError, needs
from precache.messages import Table
from precache.units import duration, size

with needs("a page", "report"):
    import jinja2
    from markupsafe import Markup

TABLE_ROWS = 200
"""Maximum number of rows of a table; a page only counts the rest."""

_HERE = Path(__file__).parent


@functools.cache
def part(name: str) -> Markup:
    """Return the text of one of this package's files; it goes into pages unescaped."""
    return Markup((_HERE / name).read_text("utf-8"))


@functools.cache
def style_sheet(styles: str = "") -> Markup:
    """Return the style sheet of all pages, followed by the files named in `styles`."""
    return Markup("").join(map(part, ["page.css", *styles.split()]))


@functools.cache
def content_policy(styles: str, script: str = "", *, served: bool = False) -> str:
    """Return the Content-Security-Policy of a page: its style sheet and at most one script.

    Inline styles and scripts are blocked, so text that was put into a page unescaped can neither
    run nor load anything.

    Parameters
    ----------
    styles, script
        As in `render`.
    served
        Allow forms of the page's own server.
    """
    scripts = f"script-src {_source(part(script))}; " if script else ""
    forms = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; {scripts}style-src {_source(style_sheet(styles))}; "
        f"img-src data:; form-action {forms}; base-uri 'none'"
    )


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _environment() -> jinja2.Environment:
    """Load this package's templates; every value put into them is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = {"percent": "{:.2f}%".format, "integer": "{:,.0f}".format}
    environment.filters |= {"size": size, "duration": duration, **numbers}
    environment.globals["Table"] = Table
    return environment


def render(
    template: str, *, styles: str = "", script: str = "", served: bool = False, **values: object
) -> str:
    """Render one of this package's templates as a whole page.

    Parameters
    ----------
    styles
        Names of style sheets besides the common one, separated by spaces.
    script
        Name of the only script that can run in the page.
    served
        The page is served over HTTP, and its links and forms lead there; otherwise it is one file.
    """
    page = _environment().get_template(template)
    return page.render(
        css=style_sheet(styles),
        script=part(script) if script else "",
        policy=content_policy(styles, script, served=served),
        served=served,
        **values,
    )


def bar(share: float, colour: str = "blue") -> Markup:
    """Draw a horizontal bar for a table cell; 1 is the full width of the cell."""
    rect = Markup('<rect width="{:.1f}%" height="100%"/>').format(100 * share)
    return Markup('<svg class="bar {}" aria-hidden="true">{}</svg>').format(colour, rect)


def hyperlink(text: str, target: str) -> Markup:
    """Return a link for a table cell."""
    return Markup('<a href="{}">{}</a>').format(target, text)


def check_page(path: str | Path) -> None:
    """Check in advance that a page can be written.

    Raises
    ------
    UsageError
        If its folder is missing, or `path` is a folder.
    """
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: its folder does not exist; create it")
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file, such as page.html")


def save(html: str, path: str | Path) -> None:
    """Write a page to a file.

    Raises
    ------
    StorageError
        If the file cannot be written.
    """
    try:
        # File names need not be valid Unicode.
        Path(path).write_text(html, "utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"cannot write the page {path}: {error.strerror}") from None
