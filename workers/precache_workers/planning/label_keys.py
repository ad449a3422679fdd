"""Find the samples that the values of a column name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from precache_workers.sources.base import is_image

FORMS = (
    "by key", "by their paths", "without the suffix of their key", "by file name alone",
    "by file name alone, without its suffix", "by paths that end in their keys",
    "by paths that end in their keys without suffix",
)  # fmt: skip
"""How values may name samples; a form counts only if no value is of an earlier one."""


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
        yield 2, _rows(names, self._stems)
        yield 3, _rows(names, self._ends(self._images))
        yield 4, _rows(names, self._ends(self._image_stems))
        for form, keys in ((5, self._images), (6, self._image_stems)):
            row_of = {name: _row_at_end(name.strip(), keys) for name in {*names}}
            found = [row for row in row_of.values() if row >= 0]
            if len({*found}) == len(found):
                yield form, tuple(row_of[name] for name in names)

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

    @cached_property
    def _has_backslash(self) -> bool:
        return any("\\" in key for key in self.keys)

    @cached_property
    def _stems(self) -> dict[str, int]:
        stems = {_stem(key): row for key, row in self._numbers.items()}
        return stems if len(stems) == len(self.keys) else {}

    @cached_property
    def _images(self) -> dict[str, int]:
        return {key: row for key, row in self._numbers.items() if is_image(key)}

    @cached_property
    def _image_stems(self) -> dict[str, int]:
        return {_stem(key): row for key, row in self._images.items()} if self._stems else {}

    @staticmethod
    def _ends(keys: Mapping[str, int]) -> dict[str, int]:
        """Return the ends of keys, from a folder or file name on, that are of one key alone."""
        ends: dict[str, int] = {}
        for key, row in keys.items():
            for end in _tails(key)[1:]:
                ends[end] = -1 if end in ends else row
        return ends


def _stem(key: str) -> str:
    return key.rpartition(".")[0] if is_image(key) else key


def _tails(name: str) -> list[str]:
    """Return a path, and what is left of it after each of its folders."""
    parts = name.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _row_at_end(path: str, keys: Mapping[str, int]) -> int:
    return next((keys[tail] for tail in _tails(path) if tail in keys), -1)


def _rows(names: Sequence[str], numbers: dict[str, int]) -> tuple[int, ...]:
    return tuple(numbers.get(name, numbers.get(name.strip(), -1)) for name in names)


def composed(text: str) -> str:
    """Return a text in Unicode's normal form C."""
    return normalize("NFC", text)
