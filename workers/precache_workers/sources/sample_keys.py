"""Find the samples that the values of a column name, as those of a file of labels."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from precache_workers.sources.base import is_image
from precache_workers.sources.container_names import common_start
from precache_workers.sources.splits import is_split

FORMS = (
    "by key", "by paths below the source", "by paths that end in their keys",
    "by the ends of their keys", "by key without suffix",
    "by paths below the source, without suffix", "by paths that end in their keys without suffix",
    "by the ends of their keys, without suffix",
)  # fmt: skip
"""How values may name samples; a form counts only if no value is of an earlier one."""

_ABSOLUTE = re.compile(r"/|[A-Za-z]:/")
_HOME = re.compile("^(?:[A-Za-z]:)?/(?:home/[^/]+|Users/[^/]+|dev)/")
"""Folders of users and devices, whose names tell of no split."""


class Fit(NamedTuple):
    """The samples that the values of a column name.

    Attributes
    ----------
    form
        Index of `FORMS`.
    rows
        The row of the sample that each value names, -1 for none, or for several.
    """

    form: int
    rows: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Number of different samples that are named."""
        return len({*self.rows} - {-1})

    @property
    def repeats(self) -> bool:
        """True if two values name one sample."""
        return self.samples < sum(row >= 0 for row in self.rows)


class SampleKeys:
    """The keys of a source's samples.

    Parameters
    ----------
    source
        The source; paths of its files begin with its folder, or the last parts of it.
    in_column
        A column of the source has the keys.
    """

    def __init__(self, keys: Sequence[str], source: str, *, in_column: bool = False) -> None:
        self.keys = keys
        self.in_column = in_column
        self._source = source

    def fit(self, values: Sequence[str]) -> Fit | None:
        """Return the samples that values name, in the form that comes first; None for none."""
        names = [composed(value) for value in values]
        if not self._has_backslash:  # paths of Windows
            names = [name.replace("\\", "/") for name in names]
        fits = (Fit(form, rows) for form, rows in enumerate(self._forms(names)))
        return next((fit for fit in fits if fit.samples), None)

    def _forms(self, names: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yield the rows that names have by each of `FORMS`."""
        for keys, ends in ((self._keys, self._ends), (self._stems, self._ends_of_stems)):
            yield _rows(names, keys)
            yield _rows([*map(self._below, names)], keys)
            row_of = {name: self._row_at_end(name.strip(), keys) for name in {*names}}
            paths = Counter(row_of.values())  # of one sample, two are of two folders
            yield tuple(row if paths[row] == 1 else -1 for row in map(row_of.__getitem__, names))
            yield _rows(names, ends)

    def _below(self, path: str) -> str:
        """Return an absolute path below the source's folder without this."""
        path = path.strip()
        return next((path.removeprefix(f) for f in self._paths if path.startswith(f)), path)

    def _row_at_end(self, path: str, keys: Mapping[str, int]) -> int:
        """Return the row of the key that a path ends in.

        A relative path has to begin with the last parts of the source's folder; an absolute one
        may be of another computer, unless it is of another split. Of several keys it names the
        longest, unless the source's folder has the name before a shorter one.
        """
        is_absolute, rest = _ABSOLUTE.match(path), path.removeprefix("./")
        rows = [keys[rest]] if rest in keys else []
        while rest := rest.partition("/")[2]:
            before = path.removesuffix(rest)
            if rest not in keys or (is_absolute and not self._has_split(before)):
                continue
            last = f"{before[:-1].rpartition('/')[2]}/" if is_absolute else before
            if (is_absolute and not rows) or self._ends_in(last):
                rows.append(keys[rest])
        return rows[0] if len({*rows}) == 1 else -1

    def _has_split(self, folder: str) -> bool:
        """Return True unless a folder and the source are of different splits."""
        inside = (_HOME.sub("", path) for path in (self._source, folder))
        own, theirs = ({*filter(is_split, path.split("/"))} for path in inside)
        return not own or not theirs or not own.isdisjoint(theirs)

    def _ends_in(self, folder: str) -> bool:
        return any(path.endswith("/" + folder.removeprefix("./")) for path in self._paths)

    @cached_property
    def _paths(self) -> list[str]:
        """The source's folder as paths of its files may have it, between slashes."""
        paths = [self._source.partition("?")[0]]
        if "://" not in self._source:
            paths = [str(Path(self._source).absolute()), os.path.realpath(self._source)]
        return [f"/{composed(path).strip('/')}/" for path in paths]

    @cached_property
    def _has_backslash(self) -> bool:
        return any("\\" in key for key in self.keys)

    @cached_property
    def _keys(self) -> dict[str, int]:
        return _of_one((composed(key), row) for row, key in enumerate(self.keys))

    @cached_property
    def _stems(self) -> dict[str, int]:
        keys = self._keys.items()
        return _of_one((key.rpartition(".")[0], row) for key, row in keys if is_image(key))

    @cached_property
    def _ends(self) -> dict[str, int]:
        return _of_one(self._ends_of(self._keys))

    @cached_property
    def _ends_of_stems(self) -> dict[str, int]:
        return _of_one(self._ends_of(self._stems))

    def _ends_of(self, keys: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """Yield the last parts of keys; of others than images, those below the folder of all."""
        shared = len(common_start([key.split("/")[:-1] for key in self.keys]))
        for key, row in keys.items():
            end = key
            if row < 0 or is_image(self.keys[row]):
                while end := end.partition("/")[2]:
                    yield end, row
            elif shared:
                yield key.split("/", shared)[shared], row


def _of_one(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the row of each name; -1 for a name of several."""
    rows: dict[str, int] = {}
    for name, row in pairs:
        rows[name] = -1 if name in rows else row
    return rows


def _rows(names: Sequence[str], rows: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(rows.get(name, rows.get(name.strip(), -1)) for name in names)


def composed(text: str) -> str:
    """Return a text in Unicode's normal form C."""
    return normalize("NFC", text)
