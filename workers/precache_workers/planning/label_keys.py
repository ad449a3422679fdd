"""Find the samples that the values of a column name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from precache_workers.sources.base import is_image

FORMS = ("by key", "by their paths", "without the suffix of their key", "by file name alone")
"""How values may name samples; a form counts only if no value is of an earlier one."""


class Fit(NamedTuple):
    """The samples that the values of a column name.

    Attributes
    ----------
    form
        Index of `FORMS`.
    rows
        The row of the sample that each value names, -1 for none.
    folder
        What comes before the keys in paths, with its last slash.
    """

    form: int
    rows: tuple[int, ...]
    folder: str = ""

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
        fits = [Fit(0, _rows(names, self._numbers))]
        if not any(row >= 0 for row in fits[0].rows):
            fits = self._fits_of_paths(names) or [Fit(2, _rows(names, self._stems))]
        if not any(row >= 0 for row in fits[0].rows):
            fits = [Fit(3, _rows(names, self._file_names))]
        # A path that names two samples names none.
        fit = fits[0]
        return fit if len(fits) == 1 and any(row >= 0 for row in fit.rows) else None

    def _fits_of_paths(self, names: Sequence[str]) -> list[Fit]:
        fits = []
        for folder in self._folders:
            below = [
                name.strip().removeprefix(folder) if name.strip().startswith(folder) else ""
                for name in names
            ]
            rows = _rows(below, self._numbers) if any(below) else ()
            if any(row >= 0 for row in rows):
                fits.append(Fit(1, rows, folder))
        return fits

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
    def _stems(self) -> dict[str, int]:
        stems = {
            composed(key.rpartition(".")[0] if is_image(key) else key): row
            for row, key in enumerate(self.keys)
        }
        return stems if len(stems) == len(self.keys) else {}

    @cached_property
    def _file_names(self) -> dict[str, int]:
        """Name of an image without its folders, if no other has it -> its row."""
        names = [composed(key.rpartition("/")[2]) for key in self.keys]
        counts = Counter(names)
        rows = enumerate(names)
        return {name: row for row, name in rows if counts[name] == 1 and is_image(name)}


def _rows(names: Sequence[str], numbers: dict[str, int]) -> tuple[int, ...]:
    return tuple(numbers.get(name, numbers.get(name.strip(), -1)) for name in names)


def composed(text: str) -> str:
    """Return a text in Unicode's normal form C."""
    return normalize("NFC", text)
