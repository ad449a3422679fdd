"""Rows of a version to be looked at: found by key, class and state, and read a page at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from precache.errors import DamageError, StorageError, UsageError
from precache.reading.version_reader import VersionReader
from precache.storage.open import StorageOptions
from precache.store.small_arrays import KEYS_PER_CHUNK

KEY_CHUNKS = 32
"""Chunks of keys that one search reads at most: two million keys, about a second."""

MATCHES = ("begins", "contains", "is")
STATES = ("all", "valid", "holes")


@dataclass(frozen=True)
class Query:
    """Which rows are wanted: all conditions together; the default is every row.

    Attributes
    ----------
    text, match
        What a key ``begins`` with, ``contains`` or ``is``.
    label
        A class's name, else its number; -1 for rows without one.
    state
        ``all``, ``valid`` or ``holes``.
    """

    text: str = ""
    match: str = "begins"
    label: str = ""
    state: str = "all"

    def __post_init__(self) -> None:
        for value, known in ((self.match, MATCHES), (self.state, STATES)):
            if value not in known:
                raise UsageError(f"{value!r} is none of {', '.join(known)}")

    def fits(self, key: str) -> bool:
        """Whether a key is as `text` and `match` say."""
        match self.match:
            case "begins":
                return key.startswith(self.text)
            case "contains":
                return self.text in key
        return key == self.text


@dataclass(frozen=True)
class Found:
    """A page of rows, ascending.

    Attributes
    ----------
    first, stop
        The rows looked through, `stop` not among them.
    earlier, later
        Rows before and from which other pages can be asked for; None where there is no more.
    cut
        Whether the search stopped because it had read as many keys as one may.
    """

    rows: list[int]
    first: int
    stop: int
    earlier: int | None
    later: int | None
    cut: bool = False


@dataclass
class _Search:
    rows: list[int] = field(default_factory=list)
    edge: int = 0
    cut: bool = False


class Catalogue:
    """The current version of a store, or the one that ``STORE@prefix`` names, to be looked at.

    Notes
    -----
    In memory are one byte a row for what is valid, the labels in their narrow type, fields of 64
    bytes a row or less, and 16 chunks of 65,536 keys. Large fields are read a page at a time. A
    search by key reads chunk after chunk until the page is full, `KEY_CHUNKS` at most; of those
    that class or state leave no row in, none is read.
    """

    def __init__(self, uri: str, storage_options: StorageOptions = None) -> None:
        self._columns = VersionReader(uri, None, "first", storage_options)
        self.version = self._columns.version
        self.fields = list(self.version.fields)

    @functools.cached_property
    def counts(self) -> list[tuple[int, str, int]]:
        """Label, its name, and its valid rows, by label."""
        labels, counts = np.unique(self.version.labels[self.version.valid], return_counts=True)
        pairs = zip(labels.tolist(), counts.tolist(), strict=True)
        return [(label, self.class_name(label), count) for label, count in pairs]

    def class_name(self, label: int) -> str:
        """A label's class; its number where the store names none, empty for no label."""
        if label < 0:
            return ""
        classes = self.version.classes
        return classes[label] if label < len(classes) else str(label)

    def key(self, row: int) -> str:
        """A row's key.

        Raises
        ------
        UsageError
            There is no such row.
        """
        if not 0 <= row < self.version.rows:
            raise UsageError(f"there is no row {row}; rows go from 0 to {self.version.rows - 1}")
        return self.version.keys[row]

    def label(self, row: int) -> int:
        return int(self.version.labels[row])

    def hole(self, row: int) -> str:
        """Why a row is a hole; empty where it is none."""
        if self.version.valid[row]:
            return ""
        return self.version.holes.get(row, ("", "for a reason that is not recorded"))[1]

    # --- finding --------------------------------------------------------------------------------

    def find(self, query: Query, start: int, count: int, *, before: bool = False) -> Found:
        """`count` rows from `start` on, or, with `before`, the last ones before it.

        Raises
        ------
        UsageError
            There is no such class.
        """
        rows = self.version.rows
        start = min(max(0, start), rows)
        search = self._search(query, start, count, before)
        more = len(search.rows) > count or search.cut
        found = search.rows[:count]
        if before:
            if not more:  # a page that begins at the first row is full again
                return self.find(query, 0, count)
            found.reverse()
            first = found[0] if len(search.rows) > count else search.edge
            return Found(found, search.edge, start, first, start, search.cut)
        later = found[-1] + 1 if len(search.rows) > count else search.edge if more else None
        return Found(found, start, search.edge, start or None, later, search.cut)

    def _search(self, query: Query, start: int, count: int, before: bool) -> _Search:
        """One row more than `count` where there is one, in the order they are met."""
        wanted = self._wanted(query)
        search, read = _Search(edge=start), 0
        for first, stop in _pieces(start, self.version.rows, before):
            here = first + np.flatnonzero(wanted[first:stop])
            if query.text and len(here):
                if read == KEY_CHUNKS:
                    search.cut = True
                    return search
                read += 1
                here = self._with_keys(query, here)
            met = here[::-1] if before else here
            search.rows += met[: count + 1 - len(search.rows)].tolist()
            search.edge = first if before else stop
            if len(search.rows) > count or (search.rows and query.match == "is" and query.text):
                break
        return search

    def _with_keys(self, query: Query, rows: np.ndarray) -> np.ndarray:
        """Those of some rows of one chunk whose keys match."""
        keys = self.version.key_chunk(int(rows[0]) // KEYS_PER_CHUNK)
        return rows[[query.fits(key) for key in keys[rows % KEYS_PER_CHUNK]]]

    def _wanted(self, query: Query) -> np.ndarray:
        """(rows,) bool: what class and state ask for."""
        valid = self.version.valid
        wanted = np.ones(len(valid), bool) if query.state == "all" else valid.copy()
        if query.state == "holes":
            np.logical_not(valid, out=wanted)
        if query.label:
            named = query.label in self.version.classes
            number = None if named else _whole(query.label)
            of_class = np.zeros(len(valid), bool)
            of_class[self.version.rows_of_classes(query.label if number is None else number)] = True
            wanted &= of_class
        return wanted

    # --- reading --------------------------------------------------------------------------------

    def read(self, rows: Sequence[int]) -> list[dict[str, np.ndarray] | str]:
        """Field -> row, of each of some rows; why, where one cannot be read.

        Of a field with variants it is the one that epoch 0 reads.
        """
        try:
            return list(self._read(rows, self._columns))
        except (DamageError, StorageError) as error:
            if len(rows) == 1:
                return [str(error)]
            return [each for row in rows for each in self.read([row])]

    def variants(self, row: int) -> dict[str, np.ndarray] | str:
        """Array -> row, of all variants of all fields; why, where it cannot be read."""
        found: dict[str, np.ndarray] = {}
        try:
            for epoch in range(max(each.variants for each in self.version.fields.values())):
                columns = self._columns.at_epoch(epoch)
                [read] = self._read([row], columns)
                found |= {columns.arrays[name]: values for name, values in read.items()}
        except (DamageError, StorageError) as error:
            return str(error)
        return found

    def _read(self, rows: Sequence[int], columns: VersionReader) -> Iterator[dict[str, np.ndarray]]:
        shapes = columns.shapes.items()
        out = {name: np.empty((len(rows), *shape), dtype) for name, (shape, dtype) in shapes}
        columns.read(np.array(rows, np.int64), out)
        for position in range(len(rows)):
            yield {name: out[name][position] for name in self.fields}


def _pieces(start: int, rows: int, before: bool) -> Iterator[tuple[int, int]]:
    """Runs of rows from `start` on, or back from it, each in one chunk of keys."""
    lower, upper = (0, start) if before else (start, rows)
    numbers = range(lower // KEYS_PER_CHUNK, -(-upper // KEYS_PER_CHUNK))
    for number in reversed(numbers) if before else numbers:
        first = number * KEYS_PER_CHUNK
        yield max(lower, first), min(upper, first + KEYS_PER_CHUNK)


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
