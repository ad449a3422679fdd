"""Facts of a listing beside its table: counts, examples and lines, and what columns leave open."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from pydantic import NonNegativeInt

from precache.messages import printable
from precache_workers.sources.base import (
    Doubt,
    count_ignored,
    flag,
    hidden_as,
    is_utf8,
    no_label,
    quoted,
)
from precache_workers.sources.label_readings import is_beside
from precache_workers.sources.labels import bit_of, is_blank, number_of
from precache_workers.sources.splits import (
    ALL_SPLITS,
    MOST_SPLITS,
    is_split,
    names_splits,
    splits_of,
)

MOST_COMBINATIONS = 1000
"""Combinations of the images of samples in an archive that are counted apart."""


@dataclass
class ColumnEvidence:
    """Facts about columns of one file, or of all files of a source.

    Attributes
    ----------
    label
        The column of labels; empty for none.
    bits
        Columns of only 0, 1, -1 and blank cells, if no column has labels, with their numbers.
    splits
        Columns that may name splits, with their different values; empty for none.
    rivals
        Columns that may have the labels in place of a guessed one, with the different pairs of its
        labels and theirs, until these disagree.
    """

    label: str = ""
    bits: dict[str, set[int]] = field(default_factory=dict)
    splits: dict[str, list[str]] = field(default_factory=dict)
    rivals: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    def look(
        self,
        values: Callable[[str], Iterable[object]],
        labels: Callable[[str], Sequence[str]],
    ) -> None:
        """Look at more rows.

        Parameters
        ----------
        values, labels
            Return the different values of a column, and its labels as text by row.
        """
        for name in [*self.bits]:
            cells = {bit_of(value) for value in values(name) if not is_blank(value)}
            if None in cells:
                del self.bits[name]
            else:
                self.bits[name] |= {bit for bit in cells if bit is not None}
        for name in [*self.splits]:
            self._add_splits(name, values(name))
        for name, pairs in self.rivals.items():
            if not are_mixed(pairs):
                both = zip(labels(self.label), labels(name), strict=True)
                pairs.update(pair for pair in both if pair[1])

    def _add_splits(self, name: str, values: Iterable[object]) -> None:
        """Add values to those of a column; drop it if neither they nor its name tell of splits."""
        known = self.splits[name]
        for value in values:
            text = "" if value is None else str(value).strip()
            if text in known:
                continue
            if len(known) > MOST_SPLITS or not (not text or is_split(text) or names_splits(name)):
                del self.splits[name]
                return
            known.append(text)

    @classmethod
    def joined(cls, files: Sequence[Self]) -> Self:
        """Return what is known of the columns of several files."""
        common = set.intersection(*(set(file.bits) for file in files))
        label = next((file.label for file in files if file.label), "")
        whole = cls(label, {n: set[int]() for n in files[0].bits if n in common})
        for file in files:
            for name in whole.bits:
                whole.bits[name] |= file.bits[name]
            for name, values in file.splits.items():
                whole.splits[name] = [*dict.fromkeys([*whole.splits.get(name, ()), *values])]
            for name, pairs in file.rivals.items():
                whole.rivals[name] = whole.rivals.get(name, set()) | pairs
        return whole

    def reading(self, where: object, *, all_splits: bool) -> tuple[list[str], list[Doubt]]:
        """Return the lines about guesses, and the doubts.

        Parameters
        ----------
        all_splits
            The user takes the rows of all splits.
        """
        notes: list[str] = []
        doubts: list[Doubt] = []
        for name, values in self.splits.items():
            kind = splits_of(name, values)
            column = f"column {name!r} of {where} has {quoted(sorted({*values} - {''}))}"
            if kind == "maybe":
                notes.append(f"The {column}, which may be splits: all rows are built")
            elif kind and all_splits:
                notes.append(f"Rows of several splits are taken together: the {column}")
            elif kind and not doubts:
                text = f"the {column}, which look like splits, and the samples of all are built"
                one = (
                    "write the rows of one split, with their images or with paths relative to it, "
                    "to a file of their own, and give that as the source"
                )
                ways = (ALL_SPLITS, "for all of them"), ((), one)
                doubts.append(Doubt.of(f"{text} together", *ways, of_members=True))
        rivals = next((name for name, pairs in self.rivals.items() if disagree(pairs)), None)
        if rivals is not None:
            columns = self.label, rivals
            doubts += doubt_of_rivals("--label-column", columns, "have other labels", where)
        bits = [name for name, numbers in self.bits.items() if numbers - {-1}]
        if len(bits) > 1:
            numbers = set().union(*(self.bits[name] for name in bits))
            text = f"{where} has no column of labels, and {len(bits):,} columns of only "
            text += " and ".join(map(str, sorted(numbers)))
            minus = no_label(["-1"]) if {-1, 0} <= numbers else []
            taken = [*flag("--label-column", ",".join(bits)), *minus], "if each is a class"
            if any("," in name for name in bits):
                taken = [], "rename those that have a comma in their name, for --label-column"
            none = ("--label-column", ""), "for no label"
            doubts.append(Doubt.of(f"{text}: {quoted(bits)}", taken, none))
        return notes, doubts


def are_mixed(pairs: Collection[tuple[str, str]]) -> bool:
    """Return True unless each label of one column is with one of the other; numbers, if equal."""
    with contextlib.suppress(ValueError):  # some are no numbers
        return True in [one != other and float(one) != float(other) for one, other in pairs]
    return any(len({pair[side] for pair in pairs}) < len(pairs) for side in (0, 1))


def disagree(pairs: Collection[tuple[str, str]]) -> bool:
    """Return True for all labels of two columns that are mixed, or names and other numbers than
    these get by their order."""
    named = sorted(pair for pair in pairs if pair[0])
    are_names = any(number_of(name) is None for name, _ in named)
    by_order = [str(number) for number in range(len(named))]
    numbers = [number for _, number in named]
    return are_mixed(pairs) or (
        are_names and all(map(str.isdecimal, numbers)) and numbers != by_order
    )


def doubt_of_rivals(name: str, columns: Sequence[str], what: str, where: object) -> list[Doubt]:
    """Return the doubt about columns that disagree, with the flag that chooses one."""
    text = f"the columns {quoted(columns)} of {where} {what}"
    return [Doubt.of(text, *((flag(name, column), "") for column in columns))] if columns else []


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
    combinations, combined
        Number of samples by the suffixes of their images, if samples may have several, and the key
        of the first of them.
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
    combinations: Counter[str] = field(default_factory=Counter)
    combined: dict[str, str] = field(default_factory=dict)
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

    def combine(self, suffixes: Sequence[str], key: str, samples: int) -> None:
        """Count samples by the suffixes of their images; of too many combinations the rest is one.

        Parameters
        ----------
        key
            Of the first one.
        """
        combination = ",".join(suffixes)
        if combination not in self.combinations and len(self.combinations) >= MOST_COMBINATIONS:
            combination = "," if "," in combination else ""
        self.combinations[combination] += samples
        self.combined.setdefault(combination, key)

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
        self.combinations += other.combinations
        self.combined = other.combined | self.combined
        for folder, may_be_class in other.others.items():
            self.others[folder] = self.others.get(folder, False) or may_be_class

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines for the user, with their counts."""
        return tuple(text.replace("{count}", f"{n:,}") for text, n in self.notes.items())


def text_at(texts: Any, row: int) -> str:
    """Return a text of an Arrow array; bytes that are not UTF-8 become surrogates."""
    return bytes(texts[row].as_buffer()).decode("utf-8", "surrogateescape")
