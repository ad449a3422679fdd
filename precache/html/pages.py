"""Pages of HTML that stand alone: one style sheet, inside each, and nothing fetched."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

import jinja2
from markupsafe import Markup

from precache.errors import StorageError
from precache.units import size

_HERE = Path(__file__).parent


def style(*names: str) -> Markup:
    """The style sheet of all pages, and the files `names` after it."""
    return Markup("").join(map(part, ("page.css", *names)))


@functools.cache
def part(name: str) -> Markup:
    """One of the package's own files, to stand in a page as it is."""
    return Markup((_HERE / name).read_text("utf-8"))


@functools.cache
def environment(folder: Path = _HERE) -> jinja2.Environment:
    """Templates of a folder and of this package; all that is put into them is escaped."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["size"] = size
    return made


def render(template: str, *, styles: str = "", script: str = "", **values: object) -> str:
    """A page of one of this package's templates.

    Parameters
    ----------
    styles, script
        Files that it carries besides the common style sheet. No other script can run in it.
    """
    code = part(script) if script else Markup("")
    return (
        environment()
        .get_template(template)
        .render(css=style(*styles.split()), script=code, policy=policy(code), **values)
    )


def policy(script: str = "") -> str:
    """Content-Security-Policy of a page that stands alone, with at most this one script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"script-src 'sha256-{digest}'; " if script else ""
    return (
        f"default-src 'none'; {scripts}style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def save(html: str, path: str | Path) -> None:
    """Write a page.

    Raises
    ------
    StorageError
        If the file cannot be written.
    """
    try:
        # Names of files need not be text.
        Path(path).write_text(html, "utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"cannot write the page {path}: {error.strerror}") from None
