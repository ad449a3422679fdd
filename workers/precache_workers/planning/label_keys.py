"""Find the samples that the values of a column name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from precache_workers.sources.base import is_image
from precache_workers.sources.container_names import common_start
from precache_workers.sources.splits import is_split

FORMS = (
    "by key", "by their paths", "by file name alone", "without suffix",
    "by file name alone, without suffix", "by absolute paths that end in their keys",
    "by absolute paths without suffix", "by paths below the folder that holds all of them",
)  # fmt: skip
"""How values may name samples; a form counts only if no value is of an earlier one."""

_ABSOLUTE = re.compile(r"/|[A-Za-z]:/")


class Fit(NamedTuple):
    """The samples that the values of a column name.

    Attributes
    ----------
    form
        Index of `FORMS`.
    rows
        The row of the sample that each value names, -1 for none.
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
        fits = (Fit(form, rows) for form, rows in self._forms(names))
        return next((fit for fit in fits if fit.samples), None)

    def _forms(self, names: Sequence[str]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the numbers of forms, and the rows that the names have by them."""
        yield 0, _rows(names, self._numbers)
        paths = self._rows_of_paths(names)
        if len(paths) > 1:  # a path that names two samples names none
            return
        yield from ((1, rows) for rows in paths)
        yield 2, _rows(names, self._file_names)
        yield 3, _rows(names, self._stems)
        yield 4, _rows(names, self._file_stems)
        for form, keys in ((5, self._numbers), (6, self._stems)):
            row_of = {name: self._row_at_end(name.strip(), keys) for name in {*names}}
            found = [row for row in row_of.values() if row >= 0]
            if len({*found}) == len(found):
                yield form, tuple(row_of[name] for name in names)
        if shared := common_start([key.split("/")[:-1] for key in self.keys]):
            below = "/".join([*shared, ""])
            yield 7, _rows([below + name.strip() for name in names], self._numbers)

    def _rows_of_paths(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        found = []
        for folder in self._folders:
            below = [
                name.strip().removeprefix(folder) if name.strip().startswith(folder) else ""
                for name in names
            ]
            rows = _rows(below, self._numbers) if any(below) else ()
            if any(row >= 0 for row in rows):
                found.append(rows)
        return found

    @cached_property
    def _folders(self) -> list[str]:
        """The source's folder as paths of its files may begin: absolute, or its last parts."""
        if "://" in self._source:
            paths = [self._source.partition("?")[0].rstrip("/")]
        else:
            paths = [str(Path(self._source).absolute()), os.path.realpath(self._source)]
        folders = {"./": None}
        for path in paths:
            parts = composed(path).split("/")
            for start in range(len(parts)):
                if any(parts[start:]):
                    folder = "/".join(parts[start:]) + "/"
                    folders |= {folder: None, f"./{folder}": None}
        return list(folders)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {composed(key): row for row, key in reversed([*enumerate(self.keys)])}

    @cached_property
    def twins(self) -> dict[int, int]:
        """First row of keys that differ only in how their letters are composed -> another one."""
        rows = enumerate(map(composed, self.keys))
        return {first: row for row, key in rows if (first := self._numbers[key]) != row}

    def _row_at_end(self, path: str, keys: Mapping[str, int]) -> int:
        """Return the row of the key that an absolute path ends in; -1 if it is of another split."""
        if not _ABSOLUTE.match(path):
            return -1
        tail = path
        while tail and tail not in keys:
            tail = tail.partition("/")[2]
        own, theirs = (
            {*filter(is_split, folder.split("/"))}
            for folder in (self._source, path.removesuffix(tail))
        )
        return -1 if own and theirs and own.isdisjoint(theirs) else keys.get(tail, -1)

    @cached_property
    def _has_backslash(self) -> bool:
        return any("\\" in key for key in self.keys)

    @property
    def _images(self) -> Iterator[tuple[str, int]]:
        return ((key, row) for key, row in self._numbers.items() if is_image(key))

    @cached_property
    def _file_names(self) -> dict[str, int]:
        return _of_one((key.rpartition("/")[2], row) for key, row in self._images)

    @cached_property
    def _stems(self) -> dict[str, int]:
        return _of_one((key.rpartition(".")[0], row) for key, row in self._images)

    @cached_property
    def _file_stems(self) -> dict[str, int]:
        return _of_one((stem.rpartition("/")[2], row) for stem, row in self._stems.items())


def _of_one(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the row of each name; -1 for a name of several."""
    rows: dict[str, int] = {}
    for name, row in pairs:
        rows[name] = -1 if name in rows else row
    return rows


def _rows(names: Sequence[str], numbers: dict[str, int]) -> tuple[int, ...]:
    return tuple(numbers.get(name, numbers.get(name.strip(), -1)) for name in names)


def composed(text: str) -> str:
    """Return a text in Unicode's normal form C."""
    return normalize("NFC", text)
