"""Read labels from a file, and the class map that numbers them.

Keys and class names are compared in Unicode's normal form C: editors and file systems differ in how
they compose letters. Lines that fit no sample, and samples that get no label, are logged with their
count and an example. More than a few of them are refused, as they are rarely intended.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple
from unicodedata import normalize

import numpy as np

from precache.errors import SourceError, StoreError
from precache.messages import shown
from precache.storage.open import StorageOptions
from precache.store.labels import are_classes
from precache.store.open import open_version
from precache.store.row_table import RowTable
from precache.store.version import Version
from precache_workers.planning.rows import default_max_failures
from precache_workers.sources.base import (
    NO_RULES,
    Doubt,
    LabelRules,
    Ways,
    choice_error,
    in_service_folder,
    is_image,
)
from precache_workers.sources.label_readings import (
    doubts_of_classes,
    doubts_of_negative_numbers,
    no_label,
    note_of_order,
    settle_labels,
)
from precache_workers.sources.labels import in_order, infer_kind, is_nothing
from precache_workers.sources.manifests import delimiter_of

log = logging.getLogger(__name__)

MOST_EMPTY_CLASSES = 100_000
"""Highest class number in a file of labels, unless there are more samples: each number below it
becomes a class with a name."""

MOST_SHOWN = 60
"""Characters of a key or label in a message."""

_HEADER = (
    frozenset(("key", "file", "filename", "file_name", "path", "image", "id", "index")),
    frozenset(("label", "class", "class_name", "target")),
)

_TABLE = "a table of URIs as the source, whose paths are relative to the folder of the table"

_NUMBER = re.compile(r"-?[0-9]+")


class _Line(NamedTuple):
    """A line of a file of labels, by the number that an editor shows."""

    number: int
    key: str
    label: str


def override_labels(
    table: RowTable,
    path: str,
    classes: Iterable[str] = (),
    rules: LabelRules = NO_RULES,
    *,
    accept_unmatched: bool = False,
    doubts: Sequence[Doubt] = (),
) -> RowTable:
    """Give samples the labels of a CSV file of (key, label); other samples keep their class.

    Labels that are all whole numbers from -1 up are class numbers, -1 for none, unless the names of
    the source's classes are numbers; others are class names, sorted together with those of the
    samples that keep theirs. An empty label is none.

    Parameters
    ----------
    classes
        Names beside those of the source; only names of classes may be numbers among other names.
    accept_unmatched
        Accept any number of lines that fit no sample, and of samples without a label.
    doubts
        Doubts about the classes of the source, which no sample then may keep.

    Raises
    ------
    SourceError
        The file cannot be read or is not of this form, gives a sample two labels, or fits the
        source badly.
    """
    where = shown(path)
    lines = _without_header(_read_lines(path), table.keys, where)
    lines = _settled(lines, {*table.classes, *classes}, where, rules)
    if not are_classes(table.labels):  # of another kind than those of the file
        table = _relabelled(table, [-1] * len(table), ())
    line_of, unmatched = _matched(table, lines, where)
    if not line_of:
        raise SourceError(
            f"no key of {where} is in the source; its first is {_short(unmatched[0].key)}, the "
            f"source's first {_short(table.keys[0])}: write keys as the source has them"
        )
    lines = [*line_of.values(), *unmatched]
    names = {*table.classes, *classes}
    if rules.kind != "name":
        _require_classes(lines, names, where)
    numerals = bool(table.classes) and all(map(_NUMBER.fullmatch, table.classes))
    by_name = rules.kind == "name" or (numerals and rules.kind is None)
    numbers = not by_name and _are_numbers(lines, names, where)
    if numbers and rules.kind is None:
        _require_order([line for line in lines if line.label], where)
    labelled = (
        _numbered(table, line_of, where) if numbers else _named(table, line_of, where, rules.order)
    )
    if not classes and (alike := doubts_of_classes(labelled.classes, where)):
        raise choice_error(alike)
    bare = [row for row in np.flatnonzero(labelled.labels < 0).tolist() if row not in line_of]
    unlisted = len(table) - len(line_of) - len(bare)
    notes = []
    if not numbers and labelled.classes != table.classes:  # else said of the source
        notes = note_of_order(labelled.classes)
    if numbers:
        notes.append(f"labels of {where} are class numbers (--label-kind name: names of classes)")
    if empty := sum(not line.label for line in line_of.values()):
        notes.append(f"{empty:,} lines of {where} have no label, and their samples get none")
    refusable = len(notes)
    if unmatched:
        first = unmatched[0]
        notes.append(
            f"{len(unmatched):,} of {len(lines):,} lines of {where} fit no sample, such as line "
            f"{first.number} with {_short(first.key)}"
        )
    if bare:
        notes.append(
            f"{len(bare):,} of {len(table):,} samples get no label, such as "
            f"{_short(table.keys[bare[0]])}"
        )
    if notes[refusable:] and not accept_unmatched:
        too_many = len(unmatched) > default_max_failures(len(lines))
        if too_many or len(bare) > default_max_failures(len(table)):
            raise SourceError(
                f"{'; '.join(notes[refusable:])}; the source's first key is "
                f"{_short(table.keys[0])}. Correct the file, or accept this with --accept-unmatched"
            )
    if unlisted and doubts:
        raise SourceError(
            f"{unlisted:,} of {len(table):,} samples have no line in {where}, and would keep a "
            "class that is in doubt: give each a line (an empty label is none), or settle this: "
            + "; ".join(doubt.text for doubt in doubts)
        )
    if unlisted:
        notes.append(
            f"{unlisted:,} of {len(table):,} samples have no line in {where}, and keep their class"
        )
    if notes:
        log.warning("%s", "; ".join(notes))
    return labelled


def _settled(lines: list[_Line], known: set[str], where: str, rules: LabelRules) -> list[_Line]:
    """Read labels by the user's rules; raises if they leave two readings."""
    if rules.separator or rules.kind == "value":
        raise SourceError(
            f"{where} is a file of labels, which has class names or class numbers only; give "
            f"values, or several classes of a sample, in {_TABLE}"
        )
    if known >= {line.label for line in lines if line.label} and not (rules.none or rules.kind):
        return lines
    keys, texts = [line.key for line in lines], [line.label for line in lines]
    kind = infer_kind(list(texts), keys, where)
    if kind in ("several names", "several numbers"):
        return lines  # refused with the number of a line
    rules = LabelRules(kind=rules.kind, none=rules.none)
    values = {text for text in texts if text and not is_nothing(text)}
    whole = kind == "values" and all(re.fullmatch(r"[-+]?[0-9]+(\.0*)?", text) for text in values)
    inferred = whole and rules.kind is None
    if inferred:  # in such a file no value for a regression
        rules = LabelRules(kind="number", none=rules.none)
    # Typed: a name among numbers is refused with the number of its line.
    settled = settle_labels(texts, kind, keys, where, rules, typed=True, several=False)
    doubts = settled.doubts
    if inferred and not doubts:
        doubts = doubts_of_negative_numbers(settled.labels, where, values=False)
    if doubts:
        raise choice_error(doubts)
    return [line._replace(label=label) for line, label in zip(lines, settled.labels, strict=True)]


def _without_header(lines: list[_Line], keys: Sequence[str], where: str) -> list[_Line]:
    """Leave out the first line if it names the columns.

    It does if it has usual names, or names that no sample and no other line has.
    """
    first, *rest = lines
    name = _composed(first.key).strip()
    usual = _is_header((first.key, first.label))
    other = not (
        is_image(name)
        or _is_number(first.label)
        or any(line.label == first.label for line in rest)
        or any(name == _composed(key).rpartition(".")[0] for key in keys if is_image(key))
    )
    if not rest or not (usual or other) or any(name == _composed(key) for key in keys):
        return lines
    if not usual:
        names = f"{_short(first.key)}, {_short(first.label)}"
        log.warning("line 1 of %s is taken as the names of its columns: %s", where, names)
    return rest


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return is_nothing(text) or not text
    return True


def _require_order(lines: Sequence[_Line], where: str) -> None:
    """Raise `SourceError` for numbers that would be other classes as the names of folders."""
    labels = sorted({line.label for line in lines if line.label.isdecimal()})
    pair = next((pair for pair in pairwise(labels) if len(pair[0]) > len(pair[1])), None)
    if pair is not None:
        ways = Ways()
        text = (
            f"labels of {where} are numbers, and {pair[0]!r} is sorted before {pair[1]!r} as text, "
            f"as names of class folders are: add {ways('--label-kind', 'number')} if they are "
            f"class numbers, or {ways('--label-kind', 'name')} to number them as class folders of "
            "these names"
        )
        raise choice_error([Doubt(text, tuple(ways))])


def _matched(
    table: RowTable, lines: Sequence[_Line], where: str
) -> tuple[dict[int, _Line], list[_Line]]:
    """Match lines with rows: row -> line, and the lines that fit no row."""
    rows: dict[str, int] = {}
    ambiguous: dict[str, int] = {}
    keys = table.keys
    if not {line.key.strip() for line in lines} & set(keys):
        keys = _without_suffixes(keys, lines, where)
    for row, key in enumerate(keys):
        if rows.setdefault(_composed(key), row) != row:
            ambiguous[_composed(key)] = row
    first_lines: dict[str, _Line] = {}
    line_of: dict[int, _Line] = {}
    unmatched: list[_Line] = []
    for line in lines:
        name = _composed(line.key)
        if name not in rows:
            name = name.strip()
        before = first_lines.setdefault(name, line)
        if _composed(before.label) != _composed(line.label):
            raise SourceError(
                f"{where} gives {_short(line.key)} two labels: {_short(before.label)} in line "
                f"{before.number} and {_short(line.label)} in line {line.number}"
            )
        if name in ambiguous:
            keys = table.keys[rows[name]], table.keys[ambiguous[name]]
            raise SourceError(
                f"line {line.number} of {where} fits two samples, whose keys differ only in how "
                f"their letters are composed: {keys[0]!a} and {keys[1]!a}; rename one"
            )
        if name in rows:
            line_of[rows[name]] = line
        elif before is line:
            unmatched.append(line)
    return line_of, unmatched


def _without_suffixes(keys: Sequence[str], lines: Sequence[_Line], where: str) -> Sequence[str]:
    """Return keys without their suffixes if these are what a file of labels names."""
    stems = [key.rpartition(".")[0] if is_image(key) else key for key in keys]
    if not {line.key.strip() for line in lines} & set(stems) or len(set(stems)) < len(stems):
        return keys
    log.warning("%s names samples without the suffix of their key, such as %r", where, stems[0])
    return stems


def _is_header(cells: Sequence[str]) -> bool:
    return all(cell.strip().lower() in names for cell, names in zip(cells, _HEADER, strict=True))


def _require_classes(lines: Sequence[_Line], names: set[str], where: str) -> None:
    """Raise `SourceError` for labels that are no classes, but for known names."""
    unknown = [line for line in lines if line.label and line.label not in names]
    keys = [line.key for line in unknown]
    kind = infer_kind([line.label for line in unknown], keys, where)
    if kind not in (None, "names", "numbers"):
        first = next(line for line in unknown if not _NUMBER.fullmatch(line.label))
        raise SourceError(
            f"line {first.number} of {where} has the label {_short(first.label)}; such a file has "
            "class names or numbers: give values, or several classes of a sample, in "
            f"{_TABLE}; if it is a class name of an earlier version, add --classes STORE"
        )


def _are_numbers(lines: Sequence[_Line], names: set[str], where: str) -> bool:
    """Return whether the labels are class numbers; raises if some are, and others are names."""
    lines = [line for line in lines if line.label]
    numbers = [line for line in lines if _NUMBER.fullmatch(line.label)]
    if len(numbers) == len(lines):
        return True
    numeral = next((line for line in numbers if line.label not in names), None)
    if numeral is not None:
        name = next(line for line in lines if not _NUMBER.fullmatch(line.label))
        words, ways = {line.label for line in lines} - {line.label for line in numbers}, Ways()
        text = (
            f"{where} has {_short(name.label)}, a name, in line {name.number}, and "
            f"{_short(numeral.label)}, a number, in line {numeral.number}; give class names or "
            "class numbers alone, or with --classes names that may be numbers. Or add "
            f"{ways('--label-kind', 'name')} if all are names of classes"
        )
        if len(words) == 1:
            text += f", or {ways(*no_label(words))} if that stands for none"
        raise choice_error([Doubt(text, tuple(ways))])
    return False


def _numbered(table: RowTable, line_of: dict[int, _Line], where: str) -> RowTable:
    labels = table.labels.tolist()
    most = max(MOST_EMPTY_CLASSES, len(table))
    for row, line in line_of.items():
        if not line.label:
            labels[row] = -1
            continue
        digits = line.label.lstrip("0") or "0"
        if digits.startswith("-") and digits != "-1":
            raise SourceError(
                f"line {line.number} of {where} has class number {_short(line.label)}; they are "
                "from 0 up, and -1 for none"
            )
        if len(digits) > len(str(most)) or int(digits) > most:
            raise SourceError(
                f"line {line.number} of {where} has class number {_short(line.label)}; with "
                f"{len(table):,} samples the highest is {most:,}. Number the classes from 0 up "
                "without gaps, or give names"
            )
        labels[row] = int(digits)
    source_classes = table.classes if len(line_of) < len(table) else ()
    names = map(str, range(len(source_classes), max(labels) + 1))
    return _relabelled(table, labels, (*source_classes, *names))


def _named(
    table: RowTable, line_of: dict[int, _Line], where: str, order: Literal["text", "number"]
) -> RowTable:
    names = _names(table)
    spelt = {_composed(name): name for name in names if name is not None}
    for row, line in line_of.items():
        label = spelt.setdefault(_composed(line.label), line.label) if line.label else None
        names[row] = label
    classes = in_order({name for name in names if name is not None}, order, where)
    lookup: dict[str | None, int] = {name: i for i, name in enumerate(classes)}
    return _relabelled(table, (lookup.get(name, -1) for name in names), classes)


def _names(table: RowTable) -> list[str | None]:
    """List the class of each sample by name, or by number where the source names none."""
    known = dict(enumerate(table.classes))
    return [known.get(n, str(n)) if n >= 0 else None for n in table.labels.tolist()]


def _read_lines(path: str) -> list[_Line]:
    where = shown(path)
    text = _read_text(path, where)
    if text.lstrip().startswith("{"):
        raise SourceError(
            f"{where} is JSON, and a file of labels is CSV with lines key,label; give a table in "
            "JSON Lines that names the images as the source"
        )
    # With a space before it, a quote would be part of the label.
    mark = delimiter_of(text.partition("\n")[0])
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True, strict=True
    )
    lines, end = [], 0
    try:
        for row in reader:
            end = reader.line_num
            if any(map(str.strip, row)):  # spreadsheets write lines of separators alone
                lines.append(_line(end, row, where))
    except csv.Error as error:  # `line_num` is that of the last line that was read
        raise SourceError(f"line {end + 1} of {where} is not CSV: {error}") from None
    if not lines or (len(lines) == 1 and _is_header(lines[0][1:])):
        raise SourceError(f"{where} holds no label; each line is key,label")
    return lines


def _read_text(path: str, where: str) -> str:
    try:
        data = Path(path).read_bytes()
    except (MemoryError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        reason = "memory does not suffice for it" if isinstance(error, MemoryError) else reason
        raise SourceError(f"cannot read labels from {where}: {reason}") from None
    at, wrong = data.find(0), "a NUL byte, as UTF-16 has"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at, wrong = error.start, f"the byte 0x{data[error.start]:02x}, which is not UTF-8"
    if at >= 0:
        line = data.count(b"\n", 0, at) + 1
        raise SourceError(
            f"cannot read labels from {where}: line {line} has {wrong}; save it as UTF-8"
        )
    return text


def _line(number: int, row: Sequence[str], where: str) -> _Line:
    if len(row) != 2:
        used = [mark for mark in (";", "\t", "|") if len(row) == 1 and mark in row[0]]
        hint = f", and {used[0]!r} does not separate them" if used else ""
        way = ": write a file of these two columns" if len(row) > 2 else ""
        if len(row) > 2 and not row[0]:  # what pandas writes above the numbers of rows
            way += ", with pandas by to_csv(…, index=False)"
        raise SourceError(
            f"line {number} of {where} is {_short(row)}; each line is key,label{hint}{way}"
        )
    key, label = row[0], row[1].strip()
    if not key.strip():
        raise SourceError(
            f"line {number} of {where} has no key; each line is key,label, and a sample that is to "
            "keep its class needs none"
        )
    return _Line(number, key, label)


def _short(value: object) -> str:
    """Write a value as Python does, without the middle of long ones."""
    text = repr(value)
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[: MOST_SHOWN - 20]} … {text[-10:]} ({len(text):,} characters)"


def _composed(text: str) -> str:
    return normalize("NFC", text)


# --- class maps ---------------------------------------------------------------------------------


def freeze_classes(table: RowTable, classes: Sequence[str], where: str) -> RowTable:
    """Number the labels by a given class map.

    Multi-hot labels whose classes have no names keep their numbers, and get as many classes as the
    map has.

    Raises
    ------
    SourceError
        The source has classes that the map lacks, or its labels are numbers.
    """
    if table.labels.dtype.kind == "f":
        raise SourceError(f"the source's labels are numbers, and no classes; leave out {where}")
    numbers = {_composed(name): i for i, name in enumerate(classes)}
    numbers |= {name: i for i, name in enumerate(classes)}  # an exact match comes first
    several = table.labels.ndim == 2
    if several:
        columns = table.classes or [*classes, *map(str, range(len(classes), table.labels.shape[1]))]
        some = set(np.flatnonzero(table.labels.any(axis=0)).tolist())
        used = [name if column in some else None for column, name in enumerate(columns)]
    else:
        used = _names(table)
    number_of: dict[str, int] = {}
    name_of: dict[int, str] = {}
    unknown = []
    for name in sorted({name for name in used if name is not None}):
        number = numbers.get(name, numbers.get(_composed(name)))
        if number is None:
            unknown.append(name)
            continue
        number_of[name] = number
        if (other := name_of.setdefault(number, name)) != name:
            raise SourceError(
                f"the source has {other!a} and {name!a}, which differ only in how their "
                f"letters are composed, and {where} has one of them; rename one"
            )
    if unknown:
        raise SourceError(
            f"the source has classes that {where} does not: {', '.join(unknown[:10])}; "
            "remove them or build without --classes"
        )
    labels = [-1 if name is None else number_of[name] for name in used]
    if several:
        chosen = [column for column, number in enumerate(labels) if number >= 0]
        frozen = np.zeros((len(table), len(classes)), np.uint8)
        frozen[:, [labels[column] for column in chosen]] = table.labels[:, chosen]
        return replace(table, labels=frozen, classes=tuple(classes))
    return _relabelled(table, labels, tuple(classes))


def read_classes(
    uri: str,
    storage_options: StorageOptions = None,
    order: Literal["text", "number"] = "text",
) -> tuple[str, ...]:
    """Read class names from a store, a JSON list, a text file with one a line, or class folders."""
    path, where = Path(uri), f"--classes {shown(uri)}"
    if not path.is_file():
        try:
            return _classes_of(open_version(uri, None, storage_options), where)
        except StoreError as error:
            if path.is_dir() and (names := class_folders(path)):
                return in_order(names, order, where)
            raise SourceError(f"{where} is neither a file nor a store: {error}") from None
    try:
        text = path.read_text("utf-8-sig")
        names = json.loads(text) if text.lstrip().startswith(("[", "{")) else text.split("\n")
        text = "".join(names) if isinstance(names, list) else ""
        text.encode()  # JSON may hold lone surrogates
    except (MemoryError, OSError, ValueError, TypeError, RecursionError) as error:
        reason = str(error) or "memory does not suffice for it"
        raise SourceError(
            f"{where} cannot be read: {reason}; give a JSON list of names, or one name a line"
        ) from None
    if not isinstance(names, list) or "\0" in text:
        raise SourceError(f"{where} must be a JSON list of names, or one name a line, in UTF-8")
    classes = tuple(name.strip() for name in names if name.strip())
    if len(set(map(_composed, classes))) != len(classes) or not classes:
        raise SourceError(f"{where} must name each class once, and at least one")
    return classes


def class_folders(path: Path) -> list[str]:
    """Return the class folders of a local folder: those with an image, as a build finds them.

    Of a folder whose only folder holds all images, these are the folders in that one.
    """
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        names = [
            entry.name
            for entry in entries
            if entry.is_dir() and not in_service_folder(f"{entry.name}/") and _has_image(entry.path)
        ]
        if len(names) == 1 and not any(is_image(entry.name) for entry in entries):
            inner = path / names[0]
            if not any(is_image(entry.name) for entry in list(inner.iterdir())):
                below = class_folders(inner)
                return below if len(below) > 1 else names
    except OSError as error:
        raise SourceError(f"cannot list {path}: {error.strerror}") from None
    return names


def _has_image(path: str) -> bool:
    for _, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not in_service_folder(f"{name}/")]
        if any(map(is_image, names)):
            return True
    return False


def _classes_of(version: Version, where: str) -> tuple[str, ...]:
    """Return the names of a version's classes; of multi-hot labels without names, their numbers."""
    label = version.attributes.label if version.attributes else None
    if version.classes:
        return version.classes
    if label is None or not label.shape:
        raise SourceError(f"{where} is a store whose labels have no names of classes")
    return tuple(map(str, range(label.shape[0])))


def _relabelled(table: RowTable, labels: Iterable[int], classes: tuple[str, ...]) -> RowTable:
    numbers = np.fromiter(labels, np.int64, len(table))
    return replace(table, labels=numbers, classes=classes)
