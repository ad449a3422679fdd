"""Pages of a listing, and ranges of names that can be listed at the same time."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any, NamedTuple

from precache.storage.base import FileInfo, is_name


class Page(NamedTuple):
    """A page of what lies below a prefix, to which all names are relative.

    Attributes
    ----------
    files
        A name that is empty is the prefix itself; one that ends in a slash marks a folder.
    folders
        Names directly below; none if the service lists at any depth.
    token
        Of the next page; None after the last one.
    """

    files: list[FileInfo]
    folders: list[str]
    token: Any

    @property
    def has_any(self) -> bool:
        """True if something lies below the prefix, and not at it alone."""
        return bool(self.folders) or any(info.name for info in self.files)

    def names(self) -> list[str]:
        """Names directly below the prefix."""
        below = [*self.folders, *(info.name.partition("/")[0] for info in self.files)]
        return [name for name in below if name]


class KeyRange(NamedTuple):
    """A range of names below a prefix that is still to be listed.

    Attributes
    ----------
    prefix
        Below the folder that is walked; empty, or with a slash behind it.
    after, end
        Names in it, the former exclusive, the latter inclusive, None for the last one.
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
