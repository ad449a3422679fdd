"""Labels of samples from a file.

Keys and class names are compared in Unicode's normal form C: editors and file systems differ in how
they compose letters. Lines that fit no sample, and samples that get no label, are logged with their
count and an example. More than a few of them are refused, as they are rarely intended.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.errors import SourceError
from precache.messages import shown
from precache.store.labels import are_classes
from precache.store.row_table import RowTable
from precache_workers.planning.label_files import LabelFile, read_label_file, short
from precache_workers.planning.rows import default_max_failures
from precache_workers.sources.base import (
    NO_RULES,
    Columns,
    Doubt,
    LabelRules,
    choice_error,
    flag,
    quoted,
)
from precache_workers.sources.label_evidence import decide
from precache_workers.sources.labels import Column, encode, texts_of_labels
from precache_workers.sources.sample_keys import FORMS, SampleKeys, composed
from precache_workers.sources.splits import splits_of

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?:^|/)([0-9]{1,18})(?:\.[^/.]*)?$")
"""The end of a key that is a number, as of a row, with or without a suffix."""

MOST_EMPTY_CLASSES = 100_000
"""Highest class number in a file of labels, unless there are more samples: each number below it
becomes a class with a name."""


def override_labels(
    table: RowTable,
    path: str,
    classes: Iterable[str] = (),
    rules: LabelRules = NO_RULES,
    *,
    source: str = "",
    label_column: str | None = None,
    key_column: str | None = None,
    source_has_columns: bool = False,
    accept_unmatched: bool = False,
    of_folders: bool = False,
    doubts: Sequence[Doubt] = (),
) -> RowTable:
    """Give samples the labels of a table of keys and labels; those without a line get none.

    Each class number gets a name, which is that of a map of classes if the user gives one.

    Parameters
    ----------
    classes
        Names beside those of the source, by number.
    source
        The source, with whose folder paths of its files may begin.
    label_column
        Name of the column of labels, or of several of 0 and 1, with commas, one for each class.
    key_column
        Name of the column of keys.
    source_has_columns
        The column of keys is one of the source, and of the file only if it has one of that name.
    accept_unmatched
        Accept any number of lines that fit no sample, and of samples without a label.
    of_folders
        Classes of the source are names of folders, which need not be taken.
    doubts
        Doubts about which samples there are, if some have no line.

    Raises
    ------
    SourceError
        The file cannot be read or is not of this form, gives a sample two labels, or fits the
        source badly.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    where, classes = shown(path), (*classes,)
    keys = SampleKeys(table.keys, source, in_column=source_has_columns)
    file = read_label_file(path, where, Columns(label=label_column, key=key_column), keys, rules)
    line_of, unmatched = _matched(table, file, keys, where)
    _note_of_others(path, source, file.keys[0], where)
    column = Column(file.labels, file.keys, where, rules, typed=file.typed, is_file=True)
    column = replace(column, known={*table.classes, *classes})
    column = _decided(column, file, chosen=label_column is not None, has_map=bool(classes))
    if column.kind == "names":  # one that the source has is written as there
        spelt = {composed(name): name for name in table.classes}
        texts = map(str, column.labels)
        column = column.mapped([spelt.setdefault(composed(text), text) for text in texts])
    lines = pa.array(map(line_of.get, range(len(table))), pa.int64())
    given, names = column.values.take(lines), file.classes
    if column.kind == "numbers":
        _require_numbers(table, given, where, classes, of_folders=of_folders)
        top = pc.max(given).as_py()
        names = () if classes or top is None else tuple(map(str, range(top + 1)))
    encoded = encode(replace(column, values=given, keys=table.keys, classes=names))
    if encoded.doubts and not classes:
        raise choice_error(encoded.doubts)
    notes = [*column.notes]
    if column.kind == "numbers" and not classes:
        notes.append(
            f"labels of {where} are class numbers (--label-kind name: names of classes; "
            "--label-kind value: numbers)"
        )
    elif encoded.classes != table.classes:  # else said of the source
        notes = [*encoded.notes]
    if empty := given.take(pa.array([*line_of])).null_count:
        notes.append(f"{empty:,} lines of {where} have no label, and their samples get none")
    bare = [row for row in range(len(table)) if row not in line_of]
    if bare and doubts and not accept_unmatched:
        lack = f"{len(bare):,} of {len(table):,} samples have no line in {where}"
        raise choice_error([replace(one, what=f"{lack}, and {one.what}") for one in doubts])
    notes += _notes_of_fit(table, file, where, unmatched, bare, accepted=accept_unmatched)
    if notes:
        log.warning("%s", "; ".join(notes))
    return replace(table, labels=encoded.values, classes=encoded.classes)


def _notes_of_fit(
    table: RowTable,
    file: LabelFile,
    where: str,
    unmatched: Sequence[int],
    bare: Sequence[int],
    *,
    accepted: bool,
) -> list[str]:
    """Return lines about lines that fit no sample, and rows that get no label; refuse many."""
    notes = []
    if unmatched:
        line, lines = unmatched[0], len(file.lines)
        notes.append(
            f"{len(unmatched):,} of {lines:,} lines of {where} fit no sample, such as line "
            f"{file.lines[line]} with {short(file.keys[line])}"
        )
    if bare:
        notes.append(
            f"{len(bare):,} of {len(table):,} samples get no label, such as "
            f"{short(table.keys[bare[0]])}"
        )
    if unmatched and bare and not accepted and (shift := _shift(file.keys, table.keys)):
        notes.append(f"its numbers are those of the source's keys {shift:+}, counted otherwise")
        text = "; ".join(notes)
        accept = ("--accept-unmatched",), "if equal numbers are equal samples"
        raise choice_error([Doubt.of(text, accept, ((), "write keys as the source has them"))])
    too_many = len(unmatched) > default_max_failures(len(file.lines))
    if (too_many or len(bare) > default_max_failures(len(table))) and not accepted:
        text = f"{'; '.join(notes)}; the source's first key is {short(table.keys[0])}"
        accept = ("--accept-unmatched",), "if the others are meant"
        raise choice_error([Doubt.of(text, accept, ((), "correct the file"))])
    return notes


def _shift(keys: Sequence[str], samples: Sequence[str]) -> int:
    """Return 1 or -1 if keys are numbers, and from that much more to that much more than those of
    all samples; else 0."""
    ends = ([_NUMBER.search(key) for key in column] for column in (keys, samples))
    numbers = [{int(end[1]) for end in of if end} for of in ends if all(of)]
    if len(numbers) < 2:
        return 0
    first, last = (of(numbers[0]) - of(numbers[1]) for of in (min, max))
    return first if first == last and abs(first) == 1 else 0


def _matched(
    table: RowTable, file: LabelFile, keys: SampleKeys, where: str
) -> tuple[dict[int, int], list[int]]:
    """Match lines with rows: row -> its first line, and the lines that fit no row."""
    fit = keys.fit(file.keys)
    if fit is None:
        number = ", as another file may give them by number" * all(map(str.isdecimal, file.keys))
        raise SourceError(
            f"no key of {where} is in the source; its first is {short(file.keys[0])}, the "
            f"source's first {short(table.keys[0])}: write keys as the source has them{number}"
        )
    if fit.form:
        how = FORMS[fit.form]
        log.warning(
            "%s names samples %s, such as %s (--key-column takes another column)",
            *(where, how, short(file.keys[0])),
        )
    line_of, unmatched = dict[int, int](), list[int]()
    labels = file.labels.to_pylist()
    for line, row in enumerate(fit.rows):
        if row < 0:
            unmatched.append(line)
            continue
        before = line_of.setdefault(row, line)
        one, other = labels[before], labels[line]
        if composed(str(one)) != composed(str(other)):
            raise SourceError(
                f"{where} gives {short(file.keys[line])} two labels: {short(one)} in line "
                f"{file.lines[before]} and {short(other)} in line {file.lines[line]}"
            )
    return line_of, unmatched


def _note_of_others(path: str, source: str, key: str, where: str) -> None:
    """Log that a file names images beside it, as of another split, which are not the source's."""
    named, folder = Path(path).absolute().parent / key, Path(source).absolute()
    with contextlib.suppress(OSError, ValueError):  # a key that is no path
        inside = named.resolve().is_relative_to(folder.resolve())
        if folder.is_dir() and named.is_file() and not inside:
            log.warning(
                "%s has labels of images beside it, such as %s, and gives them to those of these "
                "names in %s", where, shown(str(named)), shown(source),
            )  # fmt: skip


def _decided(column: Column, file: LabelFile, *, chosen: bool, has_map: bool) -> Column:
    """Decide the reading of the labels of a file; raises if that leaves two.

    Parameters
    ----------
    chosen, has_map
        The user chose the column of labels; gives the names of classes.
    """
    texts, rules = {*texts_of_labels(column.values)} - {""}, column.rules
    given = chosen or rules.kind or rules.separator or texts <= {*column.known}
    name = ",".join(file.columns)
    if not given and (kind := splits_of(name, texts)):  # "maybe" by the name of the column
        of = "" if kind == "sure" else f" in the column {name!r}"
        text = f"labels of {column.where} are {quoted(sorted(texts))}{of}, which look like splits"
        way = flag("--label-column", name), "if they are classes"
        raise choice_error([Doubt.of(text, way, ((), "another file of labels"))])
    decided = decide(replace(column, classes=file.classes))
    doubts = [doubt for doubt in decided.doubts if not (doubt.by_classes and has_map)]
    if doubts:
        raise choice_error(doubts)
    return decided


def _require_numbers(
    table: RowTable, given: Any, where: str, classes: tuple[str, ...], *, of_folders: bool
) -> None:
    """Raise `SourceError` for class numbers that are too large, or are not those of a map.

    Parameters
    ----------
    classes
        Names of the numbers, if the user gives a map of classes.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    most = max(MOST_EMPTY_CLASSES, len(table))
    wrong = pc.or_kleene(pc.less(given, 0), pc.greater(given, most))
    if (row := pc.index(wrong, True).as_py()) >= 0:
        raise SourceError(
            f"{where} gives {short(table.keys[row])} the class number {given[row]}; with "
            f"{len(table):,} samples they are from 0 to {most:,}, and -1 for none. Number the "
            "classes without gaps, give names, or take the numbers as names (--label-kind name)"
        )
    if not (classes and table.classes and are_classes(table.labels)):
        return
    number = {name: number for number, name in enumerate(classes)}
    own = pa.array(map(number.get, table.classes), pa.int64())
    own = own.take(pa.array(table.labels, mask=table.labels < 0))
    may_be_from_1 = (pc.min(given).as_py() or 0) > 0
    counted = (pc.sum(pc.equal(given, pc.add(own, n))) for n in range(1 + may_be_from_1))
    same = max(count.as_py() or 0 for count in counted)
    both = len(given) - pc.add(given, own).null_count
    if 2 * same < both:
        text = (
            f"{where} gives {both - same:,} of {both:,} samples another number than that of their "
            f"class ({quoted(classes)})"
        )
        alone = ("--label-level", "0"), "for the labels of the file alone"
        write = (), f"write names, or numbers from 0, which is {classes[0]!a}"
        raise choice_error([Doubt.of(text, *[alone] * of_folders, write)])
