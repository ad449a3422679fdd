"""Files of labels: tables of keys and labels, and the columns that have these."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precache.errors import ChoiceError, SourceError
from precache_workers.sources.base import (
    Columns,
    Doubt,
    LabelRules,
    choice_error,
    is_image,
    is_utf8,
    quoted,
    require_columns,
)
from precache_workers.sources.columns import LABEL_COLUMNS
from precache_workers.sources.label_evidence import decide
from precache_workers.sources.labels import Column, bit_of, kind_of, note_of_categories, number_of
from precache_workers.sources.listings import ColumnEvidence, disagree
from precache_workers.sources.sample_keys import SampleKeys
from precache_workers.sources.splits import splits_of
from precache_workers.sources.tables import (
    JSON_LINES,
    Batch,
    by_column,
    csv_rows,
    read_batches,
    read_labels,
    text_of,
    width_of,
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

_UNNAMED = re.compile(r"(Unnamed: \d+(\.\d+)*)?")
"""Names of the column in which pandas writes the numbers of rows."""

_LINE = "each line is key,label"


@dataclass(frozen=True)
class LabelFile:
    """The keys and labels of a file, by line.

    Attributes
    ----------
    labels, typed
        Labels as an Arrow array, and whether a type says that text is text.
    columns
        Columns of labels: one, or one for each class, whose order is that of the classes.
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
    """Read a file of labels and choose its columns.

    Raises
    ------
    SourceError
        It cannot be read, or has no such columns.
    ChoiceError
        It is not known which column has the labels or keys, or another has several splits.
    """
    if path.lower().endswith(_OTHERS):
        raise SourceError(
            f"{where} is no table, and a file of labels is CSV, TSV, JSON lines or Parquet: write "
            "it as lines key,label with the names of the samples"
            + "; --label-column NAME takes NAME.npy beside an array that is the source"
            * path.lower().endswith(".npy")
        )
    try:
        with Path(path).open("rb") as stream:
            if path.lower().endswith((*JSON_LINES, ".parquet")):
                read = [*read_batches(stream, path, where, _readable, whole=True)]
                [rows] = read or [Batch([], {})]
            else:
                rows = _by_column([*csv_rows(stream, path, where)], where, columns, keys)
    except (MemoryError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        reason = "memory does not suffice for it" if isinstance(error, MemoryError) else reason
        raise SourceError(f"cannot read labels from {where}: {reason}") from None
    if not rows.lines:
        raise SourceError(f"{where} holds no label; {_LINE}")
    key, labels = _choose(rows, where, columns, keys, rules)
    ids = [cell if isinstance(cell, str) else text_of(cell) for cell in rows.columns[key]]
    for line, text in zip(rows.lines, ids, strict=True):
        if not text.strip():
            raise SourceError(f"line {line} of {where} has no key; {_LINE}")
    values = read_labels(rows, labels, where, rules.none)
    for note in note_of_categories(rows.typed, labels):
        log.warning("%s", note)
    return LabelFile(rows.lines, ids, values, rows.typed is not None, labels)


def _readable(schema: Any) -> list[str]:
    """Return the columns of an Arrow schema that may have keys or labels."""
    return [name for name in schema.names if kind_of(schema.field(name).type) is not None]


# --- lines of CSV -------------------------------------------------------------------------------


def _by_column(
    lines: Sequence[tuple[int, list[str]]], where: str, columns: Columns, keys: SampleKeys
) -> Batch:
    """Return lines of CSV by column; columns without names are called by number from 1."""
    if bad := [line for line in lines if any("\0" in c or not is_utf8(c) for c in line[1])]:
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
        return Batch([], {})
    numbers, rows = ([*column] for column in zip(*lines, strict=True))
    parts = [row[0].split() for row in rows]
    if {len(row) for row in rows} == {1} and 1 not in {*map(len, parts)}:
        log.warning("columns of %s are separated by spaces", where)
        rows = parts
    if len(rows[0]) < 2:
        raise SourceError(
            f"line {numbers[0]} of {where} is {short(rows[0])}; {_LINE}, separated by a comma, a "
            "tab or a space, or the first line names the columns"
        )
    lines, width = [*zip(numbers, rows, strict=True)], max(width_of(rows[0]), 2)
    table = by_column([*map(str, range(1, width + 1))], lines, where)
    header = [cells[0].strip() for cells in table.columns.values()]
    named = _names_columns(table, header, columns, keys)
    return by_column(header, lines[1:], where) if named else table


def _names_columns(table: Batch, header: Sequence[str], columns: Columns, keys: SampleKeys) -> bool:
    """Return whether the first line names the columns: it has a chosen name, or texts that no
    sample and no other line has. pandas names all columns but the first, by numbers, too."""
    of_sample = keys.fit([cell for cell in header if not cell.isdecimal()]) is not None
    wanted = {*filter(None, (*columns.labels(header), columns.key))} & {*header}
    if wanted and not (of_sample and all(map(str.isdecimal, wanted))):
        return True
    again = any(name.strip() in map(str.strip, cells) for name, *cells in table.columns.values())
    is_data = again or any(is_image(name) or number_of(name) is not None for name in header)
    unique = len({*header}) == len(header) and all(header[1:])
    is_text = unique and not (is_data and header[0])
    return is_text and len(table.lines) > 1 and keys.fit(header) is None


# --- columns ------------------------------------------------------------------------------------


def _choose(
    rows: Batch, where: str, columns: Columns, keys: SampleKeys, rules: LabelRules
) -> tuple[str, tuple[str, ...]]:
    """Choose the columns of keys and labels."""
    if keys.in_column and columns.key not in rows.columns:
        columns = replace(columns, key=None)  # it is one of the source alone
    labels = columns.labels(rows.columns)
    require_columns(rows.columns, (*labels, columns.key), where)
    if columns.key in labels:
        raise SourceError(f"{columns.key!r} is both --key-column and --label-column; give two")
    cells = {name: [*map(text_of, values)] for name, values in rows.columns.items()}
    usual = [name for name in cells if name.lower() in LABEL_COLUMNS]
    possible = [columns.key] if columns.key else _key_columns(cells, labels or usual, keys)
    others = [name for name in cells if name and name not in possible]
    candidates = [labels] if labels else _label_columns(cells, usual, others)
    if len(possible) > 1:
        text = (
            f"the columns {quoted(possible, 4)} of {where} name the samples differently, and "
            "give them other labels"
        )
        ways = [
            (("--key-column", key, "--label-column", ",".join(names)), "")
            for key in possible[:4]
            for names in candidates[:5]
        ]
        if keys.in_column:  # --key-column is for the source
            raise SourceError(f"{text}: remove all but one of them from the file")
        raise choice_error([Doubt.of(text, *ways)])
    [key] = possible
    if key not in cells or not candidates:
        only = f"{where} has no two columns of keys and labels, only {quoted(cells) or 'others'}"
        raise SourceError(f"{only}; write keys as text, and labels as text or numbers")
    if len(candidates) > 1 and keys.fit(cells[key]) is not None:
        raise _which(candidates, rows, cells, where, rules)
    labels = candidates[0]  # if keys fit no sample, no choice of a column would help
    unused = [name for name in others if name not in labels]
    first = next(iter(cells))
    if len(cells) > 2 or key != first or not (key.isdecimal() or (key.lower() in _KEYS and usual)):
        log.warning(
            "labels are the column %s of %s, for the keys in %s; not used (--label-column): %s",
            *(", ".join(map(short, labels)), where, short(key), quoted(unused, 8) or "none"),
        )
    evidence = ColumnEvidence(splits={name: [] for name in unused})
    evidence.look(cells.__getitem__, cells.__getitem__)
    notes, doubts = evidence.reading(where, all_splits=rules.all_splits)
    for note in notes:
        log.warning("%s", note)
    if doubts:
        raise choice_error(doubts)
    return key, labels


def _key_columns(
    cells: Mapping[str, Sequence[str]], excluded: Collection[str], keys: SampleKeys
) -> list[str]:
    """Return the column whose values name the samples; several that do it differently."""
    names = [name for name in cells if name not in excluded] or [*cells]
    first, is_pair = next(iter(cells)), len(cells) == 2
    names.sort(key=lambda name: name.lower() not in _KEYS)
    fits = {name: fit for name in names if (fit := keys.fit(cells[name])) is not None}
    most = max((fit.samples for fit in fits.values()), default=0)
    # Columns that pandas writes without a name number the rows.
    ranks = {
        name: (fit.form, not is_pair and (fit.repeats, bool(_UNNAMED.fullmatch(name))))
        for name, fit in fits.items()
        if 2 * fit.samples > most or (is_pair and name == "1")  # of lines key,label
    }
    best = [name for name, rank in ranks.items() if rank == min(ranks.values())]
    if not best:
        return [next(filter(None, names), "")]
    if is_pair and first in best:
        return [first]
    return [best[0], *(name for name in best if fits[name].rows != fits[best[0]].rows)]


def _label_columns(
    cells: Mapping[str, Sequence[str]], usual: Sequence[str], others: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the columns that may have the labels: by name, or those without another use.

    Several of 0 and 1 may be a class each.
    """
    named = [name for name in others if name in usual]
    pairs = ({*zip(cells[named[0]], cells[name], strict=True)} for name in named[1:])
    if named and not any(map(disagree, pairs)):
        return [(named[0],)]
    able = dict.fromkeys([*named, *others])
    names = [name for name in able if not splits_of(name, cells[name])] or [*others]
    bits = tuple(name for name in names if _has_bits(cells[name]))
    several = len(bits) > 1 and not any("," in name for name in bits)
    several &= any(bit_of(cell) for name in bits for cell in cells[name])
    return [*([bits] if several else []), *((name,) for name in names)]


def _has_bits(cells: Iterable[str]) -> bool:
    """Return True for the cells of a column that may be a class: of 0, 1, -1 and blank ones."""
    bits = {bit_of(cell) for cell in {*cells} - {""}}
    return bool(bits - {-1}) and None not in bits


def _which(
    candidates: Sequence[tuple[str, ...]],
    rows: Batch,
    cells: Mapping[str, Sequence[str]],
    where: str,
    rules: LabelRules,
) -> SourceError:
    """Return the error of columns of which each may have the labels.

    Its ways settle how labels are read, too.
    """
    ids, typed, errors = [*map(str, rows.lines)], rows.typed is not None, list[SourceError]()
    ways: list[tuple[Sequence[str], str]] = []
    for names in candidates:
        classes = names if len(names) > 1 else ()
        try:
            read = read_labels(rows, names, where, rules.none)
            doubts = decide(Column(read, ids, where, rules, classes, typed, is_file=True)).doubts
        except ChoiceError as error:
            doubts = error.doubts
        except SourceError as error:  # such as labels of other kinds than the user says
            errors.append(error)
            continue
        flags = itertools.chain(*(doubt.ways[0] for doubt in doubts if doubt.ways))
        each = "if each is a class" if classes else ""
        ways.append((("--label-column", ",".join(names), *flags), each))
    if not ways:
        return errors[0]
    text = (
        f"{where} has the columns {quoted(filter(None, cells), 20)}, and which of them has the "
        "labels is not known"
    )
    return choice_error([Doubt.of(text, *ways[:20])])


def short(value: object) -> str:
    """Write a value as Python does, without the middle of long ones."""
    text = repr(value)
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[: MOST_SHOWN - 20]} … {text[-10:]} ({len(text):,} characters)"
