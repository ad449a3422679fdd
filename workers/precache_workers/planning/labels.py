"""Labels of samples from a file.

Keys and class names are compared in Unicode's normal form C: editors and file systems differ in how
they compose letters. Lines that fit no sample, and samples that get no label, are logged with their
count and an example. More than a few of them are refused, as they are rarely intended.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from precache.errors import SourceError
from precache.messages import shown
from precache.store.labels import are_classes
from precache.store.row_table import RowTable
from precache_workers.planning.label_files import LabelFile, read_label_file, short
from precache_workers.planning.label_keys import FORMS, SampleKeys, composed
from precache_workers.planning.rows import default_max_failures
from precache_workers.sources.base import NO_RULES, Columns, Doubt, LabelRules, choice_error
from precache_workers.sources.evidence import flag, quoted
from precache_workers.sources.label_evidence import NAME, decide
from precache_workers.sources.label_readings import doubts_of_classes, note_of_order
from precache_workers.sources.labels import Column, column_of, encode, in_order, texts_of_labels
from precache_workers.sources.splits import splits_of

log = logging.getLogger(__name__)

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
    """Give samples the labels of a table of keys and labels; other samples keep their class.

    Class numbers become the classes of a source with names, and each gets a name, unless the names
    of the source's classes are numbers. If samples may have several classes, those without a line
    get none.

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
        Doubts about the classes of the source, which no sample then may keep.

    Raises
    ------
    SourceError
        The file cannot be read or is not of this form, gives a sample two labels, or fits the
        source badly.
    """
    import pyarrow as pa

    where, classes = shown(path), [*classes]
    keys = SampleKeys(table.keys, source, in_column=source_has_columns)
    file = read_label_file(path, where, Columns(label=label_column, key=key_column), keys, rules)
    line_of, unmatched = _matched(table, file, keys, where)
    _note_of_others(path, source, file.keys[0], where)
    column = Column(file.labels, file.keys, where, rules, typed=file.typed, is_file=True)
    column = replace(column, known={*table.classes, *classes})
    column = _decided(column, file, chosen=label_column is not None, has_map=bool(classes))
    lines = pa.array([line_of.get(row) for row in range(len(table))], pa.int64())
    given = column.values.take(lines)
    if not are_classes(table.labels):  # of another kind than those of the file
        table = replace(table, labels=np.full(len(table), -1), classes=())
    are_numbers, merges = column.kind == "numbers", column.kind in (None, "names", "numbers")
    keep = [row for row in np.flatnonzero(table.labels >= 0).tolist() if row not in line_of]
    unlisted = len(keep) * merges
    lack = f"{unlisted:,} of {len(table):,} samples have no line in {where}, and"
    if unlisted and doubts:
        text = (
            f"{lack} would keep a class that is in doubt. Give each a line (an empty label is none)"
        )
        raise choice_error(
            [replace(one, what=f"{text}, or settle this: {one.what}") for one in doubts]
        )
    names = file.classes
    if are_numbers:
        given, names = _with_numbers(table, given, lines, where, classes, of_folders=of_folders)
    elif merges:
        given, names = _with_names(table, given, lines, where, rules, names)
    encoded = encode(replace(column, values=given, keys=table.keys, classes=names))
    labelled = replace(table, labels=encoded.values, classes=encoded.classes)
    are_codes = rules.kind == "name"
    if not classes and (alike := doubts_of_classes(labelled.classes, where, are_codes=are_codes)):
        raise choice_error(alike)
    none = np.flatnonzero(labelled.labels < 0).tolist() if merges else range(len(table))
    bare = [row for row in none if row not in line_of]
    notes = [*column.notes]
    if are_numbers and not (classes and not labelled.classes):
        had_fraction = any("." in text for text in texts_of_labels(file.labels))
        value = "; --label-kind value: numbers" * had_fraction
        notes.append(
            f"labels of {where} are class numbers (--label-kind name: names of classes{value})"
        )
    elif labelled.classes != table.classes and not file.classes:  # else said of the source
        notes += note_of_order(labelled.classes)
    if empty := given.take(pa.array([*line_of])).null_count:
        notes.append(f"{empty:,} lines of {where} have no label, and their samples get none")
    notes += _notes_of_fit(table, file, where, unmatched, bare, accepted=accept_unmatched)
    if unlisted:
        notes.append(f"{lack} keep their class")
    if notes:
        log.warning("%s", "; ".join(notes))
    return labelled


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
    too_many = len(unmatched) > default_max_failures(len(file.lines))
    if (too_many or len(bare) > default_max_failures(len(table))) and not accepted:
        text = f"{'; '.join(notes)}; the source's first key is {short(table.keys[0])}"
        accept = ("--accept-unmatched",), "if the others are meant"
        raise choice_error([Doubt.of(text, accept, ((), "correct the file"))])
    return notes


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
        log.warning("%s names samples %s, such as %s", where, how, short(file.keys[0]))
    line_of: dict[int, int] = {}
    labels = file.labels.to_pylist()
    for line, row in enumerate(fit.rows):
        if row in keys.twins:
            raise SourceError(
                f"line {file.lines[line]} of {where} fits two samples, whose keys differ only in "
                f"how their letters are composed: {table.keys[row]!a} and "
                f"{table.keys[keys.twins[row]]!a}; rename one"
            )
        before = line_of.setdefault(row, line) if row >= 0 else line
        one, other = labels[before], labels[line]
        if composed(str(one)) != composed(str(other)):
            raise SourceError(
                f"{where} gives {short(file.keys[line])} two labels: {short(one)} in line "
                f"{file.lines[before]} and {short(other)} in line {file.lines[line]}"
            )
    return line_of, [line for line, row in enumerate(fit.rows) if row < 0]


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
    if not given and splits_of(name, texts) == "sure":
        text = f"labels of {column.where} are {quoted(sorted(texts))}, which look like splits"
        way = flag("--label-column", name) if name else NAME
        another = (), "another file of labels"
        raise choice_error([Doubt.of(text, (way, "if they are classes"), another)])
    columns = file.columns if len(file.columns) > 1 else ()
    decided = decide(replace(column, classes=columns))
    doubts = [doubt for doubt in decided.doubts if not (doubt.by_classes and has_map)]
    if doubts:
        raise choice_error(doubts)
    return decided


def _with_numbers(
    table: RowTable,
    given: Any,
    lines: Any,
    where: str,
    classes: Sequence[str],
    *,
    of_folders: bool,
) -> tuple[Any, tuple[str, ...]]:
    """Return class numbers of all rows, which are those of the source's classes, and the names.

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
            "classes without gaps, or give names"
        )
    own, kept = table.labels, table.classes if lines.null_count else ()
    by_map = bool(classes) and {*kept} <= {*classes}
    if kept and by_map:  # which has a number for each, so that the source's own do not count
        own = np.append([classes.index(name) for name in kept], -1)[own]
        kept = tuple(classes)
    own = pa.array(own, mask=own < 0)
    numbers = pc.if_else(lines.is_valid(), given, own)
    are_same = pc.equal(given, own).drop_null()
    same, both, text = pc.sum(are_same).as_py() or 0, len(are_same), ""
    if kept and (pc.max(given).as_py() or 0) >= len(kept):
        text = (
            f"{where} has the class number {pc.max(given)}, and samples without a line keep one of "
            f"the classes 0 to {len(kept) - 1} ({quoted(kept)})"
        )
    elif other := _numbered_otherwise(table, given, kept or classes, [0] if kept else [0, 1]):
        text = f"{where} numbers classes otherwise than {quoted(kept or classes)}: {other}"
    elif kept and 2 * same < both:
        text = (
            f"{where} gives {both - same:,} of {both:,} samples another number than that of their "
            f"class ({quoted(kept)}), and samples without a line keep theirs"
        )
    if text:
        beside = (NAME, "if each number is a class beside these")
        no_folder = ("--label-level", "0", *["--accept-unmatched"] * bool(kept))
        alone = no_folder, "for the labels of the file alone"
        write = (), f"write names, or numbers from 0, which is {(kept or classes)[0]!a}"
        ways = [*[beside] * (not classes), *[alone] * of_folders, write]
        raise choice_error([Doubt.of(text, *ways)])
    top = (pc.max(numbers).as_py() or 0) if numbers.null_count < len(numbers) else -1
    named = not by_map and (kept or not classes)
    return numbers, (*kept, *map(str, range(len(kept), top + 1))) if named else ()


def _numbered_otherwise(
    table: RowTable, given: Any, names: Sequence[str], firsts: Sequence[int]
) -> str:
    """Return how the numbers of a file differ from the order of names, counted from one of
    `firsts`, if nearly all samples of each number are of one class; else an empty text."""
    counts = Counter(
        (number, table.classes[own])
        for number, own in zip(given.to_pylist(), table.labels.tolist(), strict=True)
        if number is not None and 0 <= own < len(table.classes)
    )
    main = dict(pair for pair, _ in reversed(counts.most_common()))
    of_main = sum(counts[pair] for pair in main.items())
    known = {*main.values()} <= {*names}
    if not known or len({*main.values()}) < max(2, len(main)) or of_main < 0.9 * counts.total():
        return ""
    starts = {number - names.index(name) for number, name in main.items()}
    number, name = min(main.items())
    is_same = any(starts == {first} for first in firsts)
    return "" if is_same else f"{number} has the samples of {name!a}"


def _with_names(
    table: RowTable, given: Any, lines: Any, where: str, rules: LabelRules, first: Sequence[str]
) -> tuple[Any, tuple[str, ...]]:
    """Return the names of classes of all rows, and those of all classes: `first`, then in order."""
    known = dict(enumerate(table.classes))
    names = [known.get(n, str(n)) if n >= 0 else None for n in table.labels.tolist()]
    spelt = {composed(name): name for name in names if name is not None}
    texts, has_line = given.to_pylist(), lines.is_valid().to_pylist()
    for row in np.flatnonzero(has_line).tolist():
        text = texts[row]
        names[row] = None if text is None else spelt.setdefault(composed(text), text)
    others = in_order({name for name in names if name} - {*first}, rules.order)
    return column_of(names), (*first, *others)
