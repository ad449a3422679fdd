"""Pages of a listing, and ranges of names that can be listed at the same time."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any, NamedTuple

from precache.storage.base import is_name

GOOGLES_PAGE = 5000
"""Most objects in a page of Google's."""

GOOGLES_FIELDS = "nextPageToken,prefixes,items(name,size,updated,generation)"
"""Fields to request, of some twenty that Google has for an object."""

Entry = dict[str, Any]
"""An object or folder directly below a prefix, with fsspec's keys (`type`, `size`, ...); its name
is relative to the prefix."""


def file_entry(name: str, size: int, last_modified: Any, etag: str | None) -> Entry:
    """Return the entry of an object of S3 or Azure."""
    facts = {"size": size, "last_modified": last_modified, "etag": etag}
    return {"name": name, "type": "file", **facts}


class Page(NamedTuple):
    """Entries, and the token of the next page; None after the last page."""

    entries: list[Entry]
    token: Any


class KeyRange(NamedTuple):
    """A range of names below a prefix that is still to be listed.

    Attributes
    ----------
    prefix
        Below the folder that is walked; empty, or with a slash behind it.
    after, end
        Names in it, the former exclusive, the latter inclusive, None for the last one; those of
        folders end in ``/``.
    token, seen
        Token of the next page, and the last name so far; None and empty before the first page.
    """

    prefix: str
    after: str = ""
    end: str | None = None
    token: Any = None
    seen: str = ""

    def holds(self, name: str) -> bool:
        """Return True if a name lies in the range."""
        return self.after < name and (self.end is None or name <= self.end)

    def split(self) -> list[KeyRange]:
        """Split a range whose first page was listed in two that can be listed concurrently."""
        middle = between(self.seen, self.end) if self.token else None
        if middle is None:
            return [self]
        return [self._replace(end=middle), KeyRange(self.prefix, middle, self.end)]


_LOWEST, _BASE, _DIGITS = 32, 95, 4
"""Names count as fractions whose digits are printable ASCII: some of those behind a common part."""


def between(low: str, high: str | None) -> str | None:
    """Return a name about half-way between two; or None.

    If possible it has no ``/`` behind what they share, so that all below one folder is on one side
    of it. Services order names by their bytes in UTF-8, as Python does strings.
    """
    shared = commonprefix((low, high or ""))  # noqa: RUF071 - no paths
    last = _BASE**_DIGITS - 1 if high is None else _fraction(high[len(shared) :])
    middle = (_fraction(low[len(shared) :]) + last) // 2
    digits = [middle // _BASE**place % _BASE for place in reversed(range(_DIGITS))]
    middle_text = "".join(chr(_LOWEST + digit) for digit in digits)
    for name in (shared + middle_text.replace("/", "0"), shared + middle_text):
        if is_name(name) and low < name and (high is None or name < high):
            return name
    return None


def _fraction(name: str) -> int:
    """Return a name's first characters as a number; beyond ASCII, all count as the last digit."""
    value = 0
    for letter in name[:_DIGITS].ljust(_DIGITS, chr(_LOWEST)):
        value = value * _BASE + min(max(ord(letter) - _LOWEST, 0), _BASE - 1)
    return value


def page_of_google(fs: Any, root: str, span: KeyRange) -> Page:
    """List a page of what is directly below a prefix, with the prefix itself if it is a key.

    Keys may have empty parts: no slash is added to them or taken away.

    Parameters
    ----------
    root, span
        The folder that is walked, and where in it to begin; the page may go beyond either end.
    """
    bucket, _, key = root.partition("/")
    prefix = f"{key}/{span.prefix}" if key else span.prefix
    start = f"{prefix}{span.after}" if span.after and not span.token else None
    wanted = {"delimiter": "/", "maxResults": GOOGLES_PAGE, "fields": GOOGLES_FIELDS}
    places = {"prefix": prefix, "startOffset": start, "pageToken": span.token}
    bounds = {name: value for name, value in places.items() if value}
    answer = fs.call("GET", "b/{}/o", bucket, **wanted, **bounds, json_out=True)
    folders = [_folder(prefix, name) for name in answer.get("prefixes", ())]
    files = [
        {
            **item,
            "name": item["name"].removeprefix(prefix),
            "type": "file",
            "size": int(item["size"]),
        }
        for item in answer.get("items", ())
    ]
    return Page(folders + files, answer.get("nextPageToken"))


def _folder(prefix: str, name: str) -> Entry:
    return {"name": name.removeprefix(prefix)[:-1], "type": "directory", "size": 0}
