"""Facts of a listing beside its table: counts, examples and lines; and labels of folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import NonNegativeInt

from precache.messages import printable
from precache.store.columns import Texts
from precache_workers.sources.base import (
    Folders,
    LabelRules,
    count_ignored,
    hidden_as,
    is_utf8,
)
from precache_workers.sources.column_evidence import ColumnEvidence
from precache_workers.sources.label_evidence import read_column
from precache_workers.sources.label_readings import Bare, folder_labels, is_beside, read_folders
from precache_workers.sources.labels import Column, column_of
from precache_workers.sources.sample_inputs import merged
from precache_workers.sources.splits import notes_of_folders


@dataclass(kw_only=True)
class Members:
    """Facts about the samples of one container, or of all of a source.

    Attributes
    ----------
    count
        Number of samples.
    has_labels
        Some of its samples have labels.
    classes
        Names of all classes, by number, if the container has them.
    ignored, left_out, examples
        As in `Listing`.
    others
        Folders of members that are no images -> whether some do not just lie beside samples.
    notes
        Lines for the user, shown once for all containers; the total replaces ``{count}``.
    combinations
        Samples by the suffixes of their images, if samples may have several.
    columns
        Members by suffix, if fields name some as their inputs.
    evidence
        What its columns leave in doubt.
    forward
        As in `Container`.
    """

    count: NonNegativeInt = 0
    has_labels: bool = False
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)
    others: dict[str, bool] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    combinations: dict[str, tuple[NonNegativeInt, str]] = field(default_factory=dict)
    columns: Counter[str] = field(default_factory=Counter)
    evidence: ColumnEvidence = field(default_factory=ColumnEvidence)
    forward: bool = False

    def ignore(self, name: str, container: str = "") -> None:
        """Count a file or member that is no image, and keep its folder."""
        count_ignored(self.ignored, f"{container}/{name}" if container else name)
        folder = name.rpartition("/")[0]
        if folder and not hidden_as(name) and (is_utf8(folder) or not container):
            self.others[folder] = self.others.get(folder, False) or not is_beside(name)

    def leave_out(self, reason: str, name: str) -> None:
        """Count a sample that is left out, and keep the first name as an example."""
        self.left_out[reason] += 1
        self.examples.setdefault(reason, printable(name))

    def keep(self, rows: Any, reasons: Mapping[int, str]) -> np.ndarray:
        """Leave out the samples at some rows, each for its reason; returns which are kept."""
        kept = np.ones(len(rows), np.bool_)
        for row, reason in reasons.items():
            self.leave_out(reason, text_at(rows["key"], row))
            kept[row] = False
        return kept

    def add(self, other: Members) -> None:
        """Add what is counted of another container."""
        self.count += other.count
        self.ignored += other.ignored
        self.left_out += other.left_out
        self.notes += other.notes
        self.columns += other.columns
        self.examples = other.examples | self.examples
        self.combinations = {**merged([self.combinations, other.combinations])}
        for folder, may_be_class in other.others.items():
            self.others[folder] = self.others.get(folder, False) or may_be_class

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines for the user, with their counts."""
        return tuple(text.replace("{count}", f"{n:,}") for text, n in self.notes.items())


def text_at(texts: Any, row: int) -> str:
    """Return a text of an Arrow array; bytes that are not UTF-8 become surrogates."""
    return bytes(texts[row].as_buffer()).decode("utf-8", "surrogateescape")


def labels_of_folders(
    names: Texts,
    keys: Texts,
    where: object,
    rules: LabelRules,
    path_of: Callable[[str], str] | None = None,
    bare_in: Callable[[str], Bare] | None = None,
    unpack: tuple[tuple[str, ...], ...] = (),
) -> tuple[Column, tuple[str, ...]]:
    """Read the folders of names as labels; also returns those beside them that may be classes.

    Parameters
    ----------
    path_of, bare_in, unpack
        As of `read_folders`.
    """
    # Members of several archives may have the same names.
    reading = read_folders(Texts(names.plain.unique()), rules, where, path_of, bare_in, unpack)
    folders = Folders(names)
    labels = folders.each(lambda some: folder_labels(some, reading.level))
    given = column_of([label or None for label in labels])
    column = read_column(Column(given, keys, str(where), rules, folders=True))
    notes = (*reading.notes, *notes_of_folders(folders.names), *column.notes)
    doubts = (*reading.doubts, *column.doubts)
    return replace(column, notes=notes, doubts=doubts), reading.bare
