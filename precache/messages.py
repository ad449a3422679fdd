"""Text for people: control characters escaped, and no secret of a URL.

File names, class names, error texts and the answers of servers are foreign text. A terminal obeys
the control characters in them, a newline forges a line, and an override of the writing direction
hides the end of a name. All foreign text therefore goes through `printable` before it is shown:
in errors when they are raised (`precache.errors`), in the text of results (`as_text`), in lines and
tables when they are printed (`precache.runtime.terminal`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SHOWN = 10
"""Number of holes, keys and classes that are listed; the rest is only counted."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0, DEL and C1, line and paragraph separators, overrides of direction, undecodable bytes."""

_WITH_PORTS = frozenset(("http", "https", "ray"))
"""Schemes whose URLs have a host, with or without a port; object stores have a bucket."""

_PORT = re.compile(r"[^@:]*:\d*|\[[^\]@]*\](?::\d*)?")

_URL = re.compile(r"(?<![\w+.-])[A-Za-z][\w+.-]*://[^\s'\"<>]*[^\s'\"<>.,;:)\]]")
"""A URL within other text, without the punctuation after it."""

_PARAMETER = re.compile(
    r"\b(sig|AccountKey|X-Amz-Signature|X-Amz-Security-Token|X-Goog-Signature)=[^\s&;'\"<>]{16,}",
    re.IGNORECASE,
)
"""Keys and signatures that libraries quote without their URL."""


_HEADER = re.compile(r"(authorization\W{1,9}(?:basic|bearer|digest))\s+[^'\"\r\n]+", re.IGNORECASE)
"""Headers of a request that a server repeats."""


def printable(text: str) -> str:
    r"""Return the text on one line, with control characters as ``\x1b``, ``\n``, ``\u202e``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def indented(text: str) -> str:
    """Indent all lines of a text but the first, such as a traceback."""
    return "\n    ".join(map(printable, text.rstrip("\n").split("\n")))


def shown(uri: str | os.PathLike[str]) -> str:
    """Return a path or URL without user, password, query and fragment, which may be secret.

    URLs of object stores have no fragment: their keys may contain ``#``. There ``?`` is part of a
    key or a pattern, unless ``name=`` follows it.
    """
    scheme, mark, _ = os.fspath(uri).partition("://")
    return f"{scheme}://{url_parts(uri)[1]}" if mark else scheme


def url_parts(uri: str | os.PathLike[str]) -> tuple[str, str, str]:
    """Return ``user:password@`` of a URL, its host and path, and its query and fragment.

    Together they are what follows ``://``. What `shown` leaves out may be empty.
    """
    scheme, _, rest = os.fspath(uri).partition("://")
    user = _user(scheme, rest)
    end = "[?#]" if scheme.lower() in _WITH_PORTS else r"[?](?=[^/?]*=)"
    place = re.split(end, rest[len(user) :], maxsplit=1)[0]
    return user, place, rest[len(user) + len(place) :]


def _user(scheme: str, rest: str) -> str:
    """Return user and password at the beginning of `rest`, with the ``@``.

    `urlsplit` would refuse some mistyped URLs, and would end the user at a slash, which secret keys
    may contain.
    """
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    web = scheme.lower() in _WITH_PORTS
    if "@" in host:
        user = host[: host.rindex("@") + 1]
        # bucket@version, and container@account of Azure, hold no secret
        return user if web or ":" in user else ""
    address = _PORT.fullmatch(host) if web else host.startswith("arn:")
    if ":" in host and not address:
        return rest[: rest.rfind("@") + 1]
    return ""


def without_secrets(text: str) -> str:
    """Return text with every URL in it replaced by `shown`."""
    if "://" in text:
        text = _URL.sub(lambda match: shown(match[0]), text)
    return _HEADER.sub(r"\1 …", _PARAMETER.sub(r"\1=…", text))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is spelled most alike; empty if none is near."""
    import difflib

    near = difflib.get_close_matches(name, known, 1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def plain_data(value: Any) -> Any:
    """Return a result as plain data for JSON; numbers that it cannot hold are None."""
    import dataclasses  # not to be loaded by a command line that names no command

    if hasattr(value, "to_dict"):
        return plain_data(value.to_dict())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain_data(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: plain_data(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- the text of results ------------------------------------------------------------------------


def as_text(lines: Iterable[str]) -> str:
    """Join lines into the text of a result, which its command prints, too."""
    return "\n".join(printable(line).rstrip() for line in lines)


def aligned(rows: Iterable[tuple[str, str]], width: int = 0) -> Iterator[str]:
    """Yield a line for each name and value, with values below each other.

    Parameters
    ----------
    width
        Minimum width of the names.
    """
    rows = list(rows)
    width = max([width, *(len(name) + 2 for name, _ in rows)])
    return (name.ljust(width) + value for name, value in rows)


class Table(NamedTuple):
    """Rows of text below headings, for a terminal and for a page (``parts.html``).

    Attributes
    ----------
    headings
        May have several lines.
    text
        Headings of the columns that are left-aligned, besides the first; others hold numbers.
    total
        Number of all rows, if `rows` are only the first ones.
    """

    headings: Sequence[str]
    rows: list[Sequence[str]]
    text: Collection[str] = ()
    total: int = 0

    def add_row(self, *cells: str) -> None:
        """Append a row; missing cells are empty."""
        self.rows.append((*cells, *[""] * (len(self.headings) - len(cells))))

    def is_text(self, column: int) -> bool:
        """Return True if a column is left-aligned."""
        return column == 0 or self.headings[column] in self.text

    def lines(self) -> Iterator[str]:
        """Yield the lines for a terminal."""
        heads = [heading.split("\n") for heading in self.headings]
        height = max(map(len, heads), default=0)
        above = zip(*([""] * (height - len(head)) + head for head in heads), strict=True)
        rows = [[printable(cell) for cell in row] for row in (*above, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = enumerate(zip(row, widths, strict=True))
            yield "  ".join(
                text.ljust(width) if self.is_text(column) else text.rjust(width)
                for column, (text, width) in cells
            ).rstrip()


def first_ones(items: Sequence[str], separator: str = ", ", most: int = SHOWN) -> str:
    """List the first ones of the items, and count the rest."""
    rest = f" … and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + rest


def hole_lines(holes: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each of the first `SHOWN` holes (key, reason), and count the rest."""
    lines = [f"hole: {key}: {reason}" for key, reason in holes[:SHOWN]]
    rest = len(holes) - len(lines)
    return [*lines, *([f"… and {rest:,} more holes"] if rest else [])]


def statistics_text(
    mean: Mapping[str, list[float]], std: Mapping[str, list[float]]
) -> list[tuple[str, str]]:
    """Return names and values of the statistics of each field."""

    def numbers(values: Sequence[float]) -> str:
        return first_ones([f"{value:.2f}" for value in values], " ")

    return [(f"{n} mean, std", f"{numbers(mean[n])}, {numbers(std[n])}") for n in mean]


def row_types_text(row_types: Mapping[str, str]) -> str:
    """Format the dtype and shape of a row, by field."""
    return ", ".join(f"{name} {row}" for name, row in row_types.items())
