"""Search the rows of a version by key, class and state, and read them a page at a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlencode

import numpy as np

from precache.errors import DamageError, StorageError, UsageError
from precache.reading.version_reader import VersionReader
from precache.storage.open import StorageOptions
from precache.store.labels import has_label, label_texts
from precache.store.small_arrays import KEYS_PER_CHUNK

STATES = ("all", "valid", "holes")
_DEFAULTS = {"q": "", "class": "", "rows": "all", "from": "0"}


class Query(NamedTuple):
    """Conditions on rows, all of which must hold; by default every row matches.

    Attributes
    ----------
    text
        The key contains it.
    label
        Name or number of a class, or a label that is a number; -1 for rows without a label.
    state
        ``all``, ``valid`` or ``holes``.
    """

    text: str = ""
    label: str = ""
    state: str = "all"

    def link(self, start: int = 0) -> str:
        """Return the part of an address that asks for these rows, from `start` on."""
        values = {"q": self.text, "class": self.label, "rows": self.state, "from": str(start)}
        return "?" + urlencode(sorted(values.items() - _DEFAULTS.items()))


class RowPage(NamedTuple):
    """A page of matching rows, in ascending order.

    Attributes
    ----------
    first, stop
        Range of the rows that were searched, without `stop`.
    later
        Where the next page starts; None if there is none.
    """

    rows: list[int]
    first: int
    stop: int
    later: int | None


class Catalogue:
    """The rows of a store's current version, or of the one that ``STORE@prefix`` names.

    Notes
    -----
    Memory holds one byte per row for `valid`, the labels in their narrow type, fields of at most 64
    bytes per row, and 16 chunks of 65,536 keys. Larger fields are read a page at a time. A search
    by key reads chunks until the page is full, two million keys a second, and skips chunks in which
    no row has the class and state.
    """

    def __init__(self, uri: str, storage_options: StorageOptions = None) -> None:
        self._reader = VersionReader(uri, storage_options=storage_options)
        self.version = self._reader.version

    @functools.cached_property
    def counts(self) -> list[tuple[int, str, int]]:
        """(class number, its name, valid rows), by number; empty if labels are numbers.

        The name is the number if it has none, and empty for rows without a label.
        """
        labels = self.version.labels[self.version.valid]
        if labels.dtype.kind == "f":
            return []
        if labels.ndim == 2:
            labels = np.nonzero(labels)[1]
        numbers, counts = np.unique(labels, return_counts=True)
        names = label_texts(numbers.astype(np.int64), self.version.classes)
        return list(zip(numbers.tolist(), names, counts.tolist(), strict=True))

    def key(self, row: int) -> str:
        """Return the key of a row.

        Raises
        ------
        UsageError
            There is no such row.
        """
        if not 0 <= row < self.version.rows:
            raise UsageError(f"there is no row {row}; rows go from 0 to {self.version.rows - 1}")
        return self.version.keys[row]

    def labels(self, row: int) -> list[str]:
        """Return the label of a row: names of its classes, or a number; empty if it has none."""
        label = self.version.labels[row : row + 1]
        if label.ndim == 2:
            label = np.flatnonzero(label[0])
        return [text for text in label_texts(label, self.version.classes) if text]

    def hole(self, row: int) -> str:
        """Return why a row is a hole; empty if it is valid."""
        if self.version.valid[row]:
            return ""
        _, hole = self.version.holes.get(row, ("", "for a reason that is not recorded"))
        return str(hole)

    # --- searching ------------------------------------------------------------------------------

    def find(self, query: Query, start: int, count: int) -> RowPage:
        """Find the first `count` rows from `start` on.

        Raises
        ------
        UsageError
            There is no such class.
        """
        candidates, rows = self._candidates(query), list[int]()
        start = stop = min(max(0, start), len(candidates))
        while stop < len(candidates) and len(rows) <= count:
            first, stop = stop, min(stop - stop % KEYS_PER_CHUNK + KEYS_PER_CHUNK, len(candidates))
            matches = first + np.flatnonzero(candidates[first:stop])
            if query.text and len(matches):
                keys = self.version.key_chunk(first // KEYS_PER_CHUNK)
                matches = matches[[query.text in key for key in keys[matches % KEYS_PER_CHUNK]]]
            rows += matches[: count + 1 - len(rows)].tolist()
        later = rows[count - 1] + 1 if len(rows) > count else None
        return RowPage(rows[:count], start, stop, later)

    def _candidates(self, query: Query) -> np.ndarray:
        """Mark the rows that have the class and state: (rows,) bool."""
        valid, labels = self.version.valid, self.version.labels
        wanted = {"all": np.ones(len(valid), bool), "valid": valid, "holes": ~valid}[query.state]
        if not query.label:
            return wanted
        is_number = re.fullmatch(r"\s*[+-]?\d+\s*", query.label)
        named = query.label in self.version.classes or not is_number
        label = query.label if named else int(query.label)
        if label == -1:
            wanted = wanted & ~has_label(labels)
        elif labels.dtype.kind == "f":
            wanted = wanted & (labels == _parse_number(query.label))
        else:
            wanted = wanted & np.isin(np.arange(len(valid)), self.version.rows_of_classes(label))
        return wanted

    # --- reading --------------------------------------------------------------------------------

    def read(self, rows: Sequence[int], epoch: int = 0) -> list[dict[str, np.ndarray] | str]:
        """Read rows as an epoch does, as array name -> values.

        A row that cannot be read gives the reason instead.
        """
        try:
            reader = self._reader.at_epoch(epoch)
            out = reader.read_whole(np.array(rows, np.int64))
        except (DamageError, StorageError) as error:
            if len(rows) == 1:
                return [str(error)]
            return [self.read([row], epoch)[0] for row in rows]
        return [{a: out[name][at] for name, a in reader.arrays.items()} for at in range(len(rows))]

    def variants(self, row: int) -> dict[str, np.ndarray] | str:
        """Read all variants of all fields of a row, by array; or the reason why they cannot."""
        arrays: dict[str, np.ndarray] = {}
        for epoch in range(max(field.variants for field in self.version.fields.values())):
            [values] = self.read([row], epoch)
            if isinstance(values, str):
                return values
            arrays |= values
        return arrays


def _parse_number(text: str) -> np.float32:
    try:
        return np.float32(text)
    except ValueError:
        raise UsageError(f"labels are numbers, and {text!r} is none") from None
