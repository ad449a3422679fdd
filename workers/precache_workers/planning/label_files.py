"""Files of labels: tables of keys and labels, and the columns that have these."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precache.errors import ChoiceError, SourceError
from precache_workers.planning.label_keys import Fit, SampleKeys
from precache_workers.sources.base import (
    Columns,
    Doubt,
    LabelRules,
    choice_error,
    is_image,
    is_utf8,
    require_columns,
)
from precache_workers.sources.column_evidence import ColumnEvidence, disagree
from precache_workers.sources.columns import LABEL_COLUMNS
from precache_workers.sources.evidence import quoted
from precache_workers.sources.label_evidence import decide, is_number
from precache_workers.sources.label_readings import INTEGER
from precache_workers.sources.labels import Column, bit_of, kind_of
from precache_workers.sources.splits import splits_of
from precache_workers.sources.tables import (
    JSON_LINES,
    Batch,
    csv_rows,
    joined_batches,
    read_batches,
    read_labels,
    text_of,
)

log = logging.getLogger(__name__)

MOST_SHOWN = 60
"""Characters of a key or label in a message."""

_OTHERS = (
    ".mat", ".json", ".xml", ".xlsx", ".xls", ".npy", ".npz", ".pkl", ".pickle", ".h5",
)  # fmt: skip
"""Suffixes of files that often hold labels, and are none of labels."""

_KEYS = ("key", "file", "filename", "file_name", "path", "image", "id", "index")
"""Usual names of columns of keys, in lower case."""


@dataclass(frozen=True)
class LabelFile:
    """The keys and labels of a file, by line.

    Attributes
    ----------
    labels, typed
        Labels as an Arrow array, and whether a type says that text is text.
    columns
        Columns of labels: one, or one for each class, whose order is that of the classes; none if
        the file does not name its columns.
    """

    lines: Sequence[int]
    keys: Sequence[str]
    labels: Any
    typed: bool
    columns: tuple[str, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes by number, if the file has a column for each."""
        return self.columns if len(self.columns) > 1 else ()


def read_label_file(
    path: str, where: str, columns: Columns, keys: SampleKeys, rules: LabelRules
) -> LabelFile:
    """Read a file of labels and choose its columns."""
    _require_table(path, where)
    reader = _Reader(where, columns, keys, rules)
    try:
        with Path(path).open("rb") as stream:
            if path.lower().endswith((*JSON_LINES, ".parquet")):
                rows = joined_batches([*read_batches(stream, path, where, _readable)])
                named = True
            else:
                rows, named = reader.rows_of([*csv_rows(stream, path, where)])
    except (MemoryError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        reason = "memory does not suffice for it" if isinstance(error, MemoryError) else reason
        raise SourceError(f"cannot read labels from {where}: {reason}") from None
    if not rows.lines:
        raise SourceError(f"{where} holds no label; each line is key,label")
    key, labels = reader.choose(rows) if named else ("key", ("label",))
    ids = [cell if isinstance(cell, str) else text_of(cell) for cell in rows.columns[key]]
    for line, text in zip(rows.lines, ids, strict=True):
        if not text.strip():
            raise SourceError(
                f"line {line} of {where} has no key; each line is key,label, and a sample that is "
                "to keep its class needs none"
            )
    read, typed = read_labels(rows, labels, where, rules.none), rows.typed is not None
    file = LabelFile(rows.lines, ids, read, typed, labels if named else ())
    return _with_names(file, path, where, keys)


def _with_names(file: LabelFile, path: str, where: str, keys: SampleKeys) -> LabelFile:
    """Return a file whose keys are numbers with the names that another file beside it gives them.

    Its lines are a number and a name, as those of CUB-200's ``images.txt``.
    """
    if keys.fit(file.keys) is not None or not all(map(str.isdecimal, file.keys)):
        return file
    for other in sorted(Path(path).absolute().parent.iterdir()):
        if other.suffix.lower() not in (".txt", ".csv", ".tsv") or not other.is_file():
            continue
        with contextlib.suppress(OSError, SourceError, ValueError), other.open("rb") as stream:
            lines = [row for _, row in csv_rows(stream, other.name, str(other))]
            pairs = [row if len(row) > 1 else row[0].split(None, 1) for row in lines]
            names = dict(pairs)
            fit = keys.fit([*names.values()])
            if fit is not None and 2 * fit.samples > len(names) >= len({*names} & {*file.keys}) > 0:
                first = file.keys[0]
                log.warning(
                    "keys of %s are numbers, and samples have the names that %s gives these: %s is "
                    "%s", where, other.name, first, short(names.get(first)),
                )  # fmt: skip
                return replace(file, keys=[names.get(key, key) for key in file.keys])
    return file


def _is_text(row: Sequence[str]) -> bool:
    return all("\0" not in cell and is_utf8(cell) for cell in row)


def _readable(schema: Any) -> list[str]:
    """Return the columns of an Arrow schema that may have keys or labels."""
    return [name for name in schema.names if kind_of(schema.field(name).type) is not None]


def _require_table(path: str, where: str) -> None:
    if path.lower().endswith(_OTHERS):
        raise SourceError(
            f"{where} is no table, and a file of labels is CSV, TSV, JSON lines or Parquet: write "
            "it as lines key,label with the names of the samples"
            + "; --label-column NAME takes NAME.npy beside an array that is the source"
            * path.lower().endswith(".npy")
        )


@dataclass(frozen=True)
class _Reader:
    """Finds the columns of a file of labels.

    Attributes
    ----------
    columns
        As the user chose them.
    keys
        Those of the source's samples.
    """

    where: str
    columns: Columns
    keys: SampleKeys
    rules: LabelRules

    def rows_of(self, lines: Sequence[tuple[int, list[str]]]) -> tuple[Batch, bool]:
        """Return the rows of CSV by column, and whether the columns have names.

        Those of two columns without names are called ``key`` and ``label``; of more, by number
        from 1.
        """
        where, keys = self.where, self.keys
        if bad := [line for line in lines if not _is_text(line[1])]:
            number, row = bad[0]
            data = ",".join(row).encode("utf-8", "surrogateescape")
            raise SourceError(  # what is guessed would be another class
                f"cannot read labels from {where}: line {number} has bytes that are not UTF-8, or "
                f"NUL, as UTF-16 has: {data[:60]!r}; so have {len(bad):,} of {len(lines):,} lines. "
                "Save it as UTF-8"
            )
        plain = [(number, row) for number, row in lines if not row[0].startswith("#")]
        if len(plain) < len(lines) and not any(key.startswith("#") for key in keys.keys):
            count = len(lines) - len(plain)
            log.warning("%s lines of %s that begin with # are left out", f"{count:,}", where)
            lines = plain
        if not lines:
            return Batch([], {}), False
        numbers, rows = ([*column] for column in zip(*lines, strict=True))
        if all(len(row) == 1 for row in rows):
            parts = [row[0].split() for row in rows]
            counted = [[str(len(rows) - 1)], [str(len(rows) - 2)]]
            if has_count := len(rows) > 2 and parts[0] in counted:
                log.warning("line %s of %s has their number", numbers[0], where)
                del parts[0]
            widths = {len(row) for row in parts[1:]}
            if {len(parts[0]) + 1} == widths:
                parts[0] = ["key", *parts[0]]
            if {len(row) for row in parts} == widths and min(widths) > 1:
                log.warning("columns of %s are separated by spaces", where)
                numbers, rows = numbers[has_count:], parts
        used = max(place + 1 for row in rows for place, cell in enumerate(row) if cell.strip())
        rows = [row[: max(used, 2)] for row in rows]
        header, widths = [cell.strip() for cell in rows[0]], {len(row) for row in rows}
        named = self._names_columns(rows, header)
        if not named and all(header) and len(header) > 2 and len(widths) == 1:
            by_number = {str(n): [*cells] for n, cells in enumerate(zip(*rows, strict=True), 1)}
            return Batch(numbers, by_number), True
        width = len(header) if named else 2
        for number, row in zip(numbers, rows, strict=True):
            if len(row) != width:
                raise self._wrong(number, row, width if named else 0)
        cells = [[row[place] for row in rows[named:]] for place in range(width)]
        if not named:
            header = ["key", "label"]
            if not _is_first(*map(keys.fit, cells)):
                log.warning("the second column of %s has the keys, and the first one labels", where)
                header.reverse()
        return Batch(numbers[named:], dict(zip(header, cells, strict=True))), named

    def _wrong(self, number: int, row: Sequence[str], named: int) -> SourceError:
        """Return the error of a line without a cell for each column, of which some have names."""
        line = f"line {number} of {self.where}"
        if named:
            return SourceError(
                f"{line} has {len(row)} cells, and its first line names {named} columns"
            )
        return SourceError(
            f"{line} is {short(row)}; each line is key,label, separated by a comma, a tab or a "
            "space, or the first line names the columns"
        )

    def _names_columns(self, rows: Sequence[Sequence[str]], header: Sequence[str]) -> bool:
        """Return whether the first line names the columns.

        Of two columns it does if it has usual names, or names that no sample and no other line has.
        """
        fits = [self.keys.fit((cell,)) is not None for cell in header]
        chosen = self._of_file(header)
        wanted = [*chosen.labels(header), *filter(None, [chosen.key])]
        by_number = all(map(str.isdecimal, wanted)) and any(
            fit for fit, cell in zip(fits, header, strict=True) if not cell.isdecimal()
        )
        if wanted and not by_number:
            return True
        if any(len(row) != len(header) for row in rows):
            return False
        if len(header) != 2:
            unique = len({*header}) == len(header) > 2 and all(header[1:])
            of_sample = any(is_image(cell) or INTEGER.fullmatch(cell) for cell in header)
            return unique and len(rows) > 1 and not of_sample and not any(fits)
        key, label = header
        usual = key.lower() in _KEYS and label.lower() in LABEL_COLUMNS
        again = any(row[1].strip() == label for row in rows[1:])
        other = not (is_image(key) or is_image(label) or is_number(label) or again)
        if usual and len(rows) == 1:
            return True
        if len(rows) < 2 or not (usual or other) or any(fits):
            return False
        if not usual:
            names = f"{short(key)}, {short(label)}"
            log.warning("line 1 of %s is taken as the names of its columns: %s", self.where, names)
        return True

    def _of_file(self, names: Collection[str]) -> Columns:
        """Leave out the column of keys if it is one of the source alone."""
        of_source = self.keys.in_column and self.columns.key not in names
        return replace(self.columns, key=None) if of_source else self.columns

    def choose(self, rows: Batch) -> tuple[str, tuple[str, ...]]:
        """Choose the columns of keys and labels.

        Raises
        ------
        SourceError
            There is no such column.
        ChoiceError
            It is not known which column has the labels or keys, or another has several splits.
        """
        where, columns = self.where, self._of_file(rows.columns)
        labels = columns.labels(rows.columns)
        require_columns(rows.columns, (*labels, columns.key), where)
        if columns.key in labels:
            raise SourceError(f"{columns.key!r} is both --key-column and --label-column; give two")
        cells = {name: [*map(text_of, values)] for name, values in rows.columns.items()}
        usual = [name for name in cells if name.lower() in LABEL_COLUMNS]
        excluded = labels or usual if len(usual) == 1 else labels
        possible = [columns.key] if columns.key else _key_columns(cells, excluded, self.keys)
        others = [name for name in cells if name and name not in possible]
        candidates = [",".join(labels)] if labels else _label_columns(cells, others)
        if len(possible) > 1:
            text = (
                f"the columns {quoted(possible, 4)} of {where} name the samples differently, and "
                "give them other labels"
            )
            ways = [
                (("--key-column", key, "--label-column", label), "")
                for key in possible[:4]
                for label in candidates[:5]
            ]
            if self.keys.in_column:  # --key-column is for the source
                raise SourceError(f"{text}: remove all but one of them from the file")
            raise choice_error([Doubt.of(text, *ways)])
        [key] = possible
        if not labels and candidates and self.keys.fit(cells.get(key, ())) is None:
            labels = (candidates[0],)  # no choice of a column would make keys fit
        labels = labels or self._one_of(candidates, rows, cells)
        if key not in cells:
            raise SourceError(f"{where} has no column of keys beside {quoted(labels)}; add one")
        unused = [name for name in others if name not in labels]
        if len(cells) > 2 or key != next(iter(cells)):
            log.warning(
                "labels are the column %s of %s, for the keys in %s; not used (--label-column): %s",
                *(", ".join(map(short, labels)), where, short(key), quoted(unused, 8) or "none"),
            )
        evidence = ColumnEvidence(splits={name: [] for name in unused})
        evidence.look(cells.__getitem__, cells.__getitem__)
        notes, doubts = evidence.reading(where, all_splits=self.rules.all_splits)
        for note in notes:
            log.warning("%s", note)
        if doubts:
            raise choice_error(doubts)
        return key, labels

    def _one_of(
        self, candidates: Sequence[str], rows: Batch, cells: Mapping[str, Sequence[str]]
    ) -> tuple[str, ...]:
        """Return the one column that may have the labels; raises `ChoiceError` for several.

        Its ways settle how labels are read, too.
        """
        if len(candidates) == 1:
            return (candidates[0],)
        where, rules = self.where, self.rules
        bits = [name for name in candidates if _has_bits(cells[name])]
        several = len(bits) > 1 and not any("," in name for name in bits)
        several &= any(bit_of(cell) for name in bits for cell in cells[name])
        ways: list[tuple[Sequence[str], str]] = []
        ids, typed, other = [*map(str, rows.lines)], rows.typed is not None, None
        for names in (*([tuple(bits)] if several else ()), *((name,) for name in candidates)):
            classes, each = names if len(names) > 1 else (), ""
            try:
                read = read_labels(rows, names, where, rules.none)
                decided = decide(Column(read, ids, where, rules, classes, typed, is_file=True))
            except ChoiceError as error:
                firsts = [*error.ways[:1]]
            except SourceError as error:  # such as labels of other kinds than the user says
                other = other or error
                continue
            else:
                firsts = [doubt.ways[0] for doubt in decided.doubts if doubt.ways]
                if classes:
                    each = "a class each" if decided.kind == "names" else "several classes of a"
                    each += " sample" * (decided.kind != "names")
                    each = f"({each}{'; -1 counts as 0' if firsts else ''})"
            flags = ("--label-column", ",".join(names), *itertools.chain(*firsts))
            ways.append((flags, each))
        if other is not None and not ways:
            raise other
        text = (
            f"{where} has the columns {quoted(filter(None, cells), 20)}, and which of them has the "
            "labels is not known"
        )
        raise choice_error([Doubt.of(text, *ways[:20])])


def _is_first(first: Fit | None, second: Fit | None) -> bool:
    """Return whether the first of two columns has the keys, as it should, and not the second."""
    return second is None or (first is not None and first.form <= second.form)


def _key_columns(
    cells: Mapping[str, Sequence[str]], excluded: Collection[str], keys: SampleKeys
) -> list[str]:
    """Return the column whose values name the samples; several that do it differently."""
    names = [name for name in cells if name not in excluded]
    usual = [name for name in names if name.lower() in _KEYS]
    fits = {name: fit for name in names if (fit := keys.fit(cells[name])) is not None}
    most = max((fit.samples for fit in fits.values()), default=0)
    fits = {name: fit for name, fit in fits.items() if 2 * fit.samples > most}
    if not fits:
        return [next((name for name in (*usual, *names) if name), "")]
    if len(cells) == 2:  # the form of files without names of columns
        first, second = cells
        return [first if second not in fits or _is_first(fits.get(first), fits[second]) else second]
    best = min(fit.form for fit in fits.values())
    fits = {name: fit for name, fit in fits.items() if fit.form == best}
    if not all(fit.repeats for fit in fits.values()):
        fits = {name: fit for name, fit in fits.items() if not fit.repeats}
    named = {name: fit for name, fit in fits.items() if not _numbers_rows(name, cells[name])}
    fits = named or fits
    first = next(name for name in (*usual, *fits) if name in fits)
    return [first, *(name for name, fit in fits.items() if fit.rows != fits[first].rows)]


def _numbers_rows(name: str, values: Sequence[str]) -> bool:
    """Return whether a column is the one in which pandas writes the numbers of rows."""
    return re.fullmatch(r"(Unnamed: \d+(\.\d+)*)?", name) is not None and all(
        value == str(row) for row, value in enumerate(values)
    )


def _label_columns(cells: Mapping[str, Sequence[str]], others: Sequence[str]) -> list[str]:
    """Return the columns that may have the labels: by name, or those without another use."""
    usual = [name for name in others if name.lower() in LABEL_COLUMNS]
    pairs = [{*zip(cells[usual[0]], cells[name], strict=True)} for name in usual[1:]]
    if usual and not any(map(disagree, pairs)):
        return usual[:1]
    names = dict.fromkeys([*usual, *others])
    return [name for name in names if not splits_of(name, cells[name])] or [*others]


def _has_bits(cells: Iterable[str]) -> bool:
    """Return True for the cells of a column that may be a class: of 0, 1, -1 and blank ones."""
    bits = {bit_of(cell) for cell in {*cells} - {""}}
    return bool(bits - {-1}) and None not in bits


def short(value: object) -> str:
    """Write a value as Python does, without the middle of long ones."""
    text = repr(value)
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[: MOST_SHOWN - 20]} … {text[-10:]} ({len(text):,} characters)"
