"""Labels of a source: their kind, decided once, and their encoding as the array of a row table.

During a listing, a label is text: a class name or number, a number with a fraction, or a JSON list
of classes; empty for no label. A list of 0 and 1 that repeats one of them, or contains bools or
floats, may be a multi-hot vector: it is held as ``LENGTH:[indices of the ones]``.

Text, and numbers too, can often be read in two ways that give other classes. Where the user chose
none, the labels have a `Doubt`, which a build refuses.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from precache.errors import SourceError
from precache.messages import printable
from precache.store.labels import MOST_CLASSES, MOST_LABEL_NBYTES
from precache.units import size
from precache_workers.sources.base import NO_RULES, Doubt, LabelRules, choice_error, is_utf8
from precache_workers.sources.label_readings import (
    INTEGER,
    doubts_of_classes,
    no_label,
    note_of_order,
    numbers_in,
    quoted,
)

Kind = Literal["names", "numbers", "values", "several names", "several numbers"]
"""Class names or numbers, regression values, or lists of class names or numbers."""

MOST_TEXT = 4096
"""Maximum characters of a key, path or label; maximum bytes of a file or value that is a label."""

FEWEST_TEXTS = 20
"""Fewest texts that differ in nearly every sample, and so may be no classes."""

NAME, NUMBER, VALUE = (("--label-kind", kind) for kind in ("name", "number", "value"))

_SEPARATORS = ("|", ";", ",", "/", "+", "&", " ")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_EXPONENT = re.compile(r"[0-9]+[eE][0-9]+")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")
_WHOLE = re.compile(r"[-+]?[0-9]+(\.0*)?")
_CLASS_NUMBER = re.compile(r"-?[0-9]{1,18}")
_VALUE = re.compile(
    r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?inf(inity)?", re.IGNORECASE
)
_LIST = re.compile(r"\[\s*(['\"\d.+\-\[]|True\b|False\b).*\]", re.DOTALL)
"""Lists as Python and NumPy print them."""

_NOTHING = frozenset(
    (
        "nan", "-nan", "null", "none", "na", "n/a", "n.a.", "#n/a", "<na>", "nil", "nat", "-", "--",
        "?", "\\n", "#ref!", "#value!", "#div/0!", "#name?", "#null!", "#num!", "(blank)",
        "missing", "undefined", "not available", "unlabeled", "unlabelled",
    )
)  # fmt: skip
"""Words for no value, as tables have them, in lower case."""

_JOINED: Mapping[frozenset[Kind], Kind] = {
    frozenset(("names", "several names")): "several names",
    frozenset(("numbers", "several numbers")): "several numbers",
    frozenset(("numbers", "values")): "values",
}
"""Kinds of labels that may occur together in a source -> their common kind."""


def is_nothing(text: str) -> bool:
    """Return True for a word that may stand for no value, such as ``NaN``."""
    return text.lower() in _NOTHING


def joined(kinds: Iterable[Kind]) -> Kind | None:
    """Return the common kind of labels of several kinds; None if they cannot be combined."""
    different = frozenset(kinds)
    return next(iter(different)) if len(different) == 1 else _JOINED.get(different)


def label_of(value: Any) -> tuple[str, Kind | None]:
    """Return a label of a typed column or feature as text, and its kind; ("", None) for no label.

    Raises
    ------
    ValueError
        The value cannot be a label.
    """
    match value:
        case None:
            return "", None
        case str():
            if len(value) > MOST_TEXT:
                raise ValueError(f"is a text of more than {MOST_TEXT:,} characters")
            return value, "names" if value else None
        case int():
            return str(int(value)), "numbers"
        case float():
            return ("", None) if math.isnan(value) else (repr(value), "values")
        case list() | tuple():
            return _list_text(value)
    raise ValueError(f"is {printable(repr(value)[:60])}")


def _list_text(values: Sequence[Any]) -> tuple[str, Kind | None]:
    if len(values) > MOST_CLASSES:
        raise ValueError(f"is a list of {len(values):,} values; up to {MOST_CLASSES:,} are allowed")
    types = {type(value) for value in values}
    if types == {str}:
        if max(map(len, values)) > MOST_TEXT:
            raise ValueError(f"has a text of more than {MOST_TEXT:,} characters")
        return json.dumps(values), "several names"
    binary = types in ({bool}, {int}, {float}) and all(value in (0, 1) for value in values)
    if binary and (types != {int} or len(set(values)) < len(values)):
        return f"{len(values)}:{json.dumps(np.flatnonzero(values).tolist())}", "several numbers"
    if types == {int}:
        if min(values) < 0 or max(values) >= MOST_CLASSES:
            wrong = min(values) if min(values) < 0 else max(values)
            raise ValueError(f"has the class number {wrong}; {_RANGE}")
        return json.dumps(values), "several numbers"
    if types:
        raise ValueError(
            f"is {printable(repr(values)[:60])}; a list has class names, class numbers, or 0 and 1 "
            "for each class"
        )
    return "", None


_RANGE = f"those of several classes are from 0 to {MOST_CLASSES - 1:,}"


def infer_kind(labels: list[str], keys: Sequence[str], where: str) -> Kind | None:
    """Infer the kind of text labels from a file without types; lists are normalised in place.

    Raises
    ------
    SourceError
        A list is invalid, or the labels have kinds that cannot be combined.
    """
    texts = set(labels) - {""}
    lists = {text: parsed for text in texts if (parsed := _parsed(text)) is not None}
    for text in texts - lists.keys():
        if _LIST.fullmatch(text):
            raise SourceError(
                f"{where}: the label of {printable(keys[labels.index(text)])} is "
                f"{printable(text[:60])}, which is no list in JSON; write [1, 5] or "
                '["cat", "dog"]'
            )
    if not lists:
        known = {text for text in texts if not is_nothing(text)}
        identifiers = all(map(str.isdecimal, known)) and max(map(len, known), default=0) > 18
        if not known:
            return None  # other files decide whether these are numbers or names
        if identifiers or not all(map(_VALUE.fullmatch, known)):
            return "names"
        return "numbers" if all(map(_CLASS_NUMBER.fullmatch, known)) else "values"
    texts_of: dict[str, str] = {"": ""}
    kinds: set[Kind] = set()
    for row, text in enumerate(labels):
        if text in texts_of:
            continue
        alone = int(text) if _CLASS_NUMBER.fullmatch(text) else text
        try:
            texts_of[text], kind = label_of(lists.get(text, alone))
        except ValueError as error:
            raise SourceError(f"{where}: the label of {printable(keys[row])} {error}") from None
        kinds |= {kind} if kind else set()
        if joined(kinds or {"names"}) is None:
            raise SourceError(
                f"{where}: the label of {printable(keys[row])} is {printable(text[:60])}, and "
                f"others are {' or '.join(sorted(kinds - {kind}))}; make them alike"
            )
    labels[:] = [texts_of[text] for text in labels]
    return joined(kinds) if kinds else None


def _parsed(text: str) -> list[Any] | None:
    """Parse a JSON list; returns None for any other text."""
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


# --- the reading --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decided:
    """Labels as text of one kind, the lines about them, and the doubts that leave two readings."""

    labels: list[str]
    kind: Kind | None
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()


def decide(
    labels: list[str],
    kind: Kind | None,
    keys: Sequence[str],
    where: str,
    rules: LabelRules = NO_RULES,
    *,
    classes: Sequence[str] = (),
    typed: bool = True,
    folders: bool = False,
    values: bool = True,
) -> Decided:
    """Give labels the kind that the user names, or find what leaves their kind in doubt.

    Parameters
    ----------
    classes
        Names that the source lists, by number.
    typed
        A type says that text is text, and no number.
    folders
        The labels are names of folders, which nobody writes for nothing.
    values
        False for a file of labels, which has classes alone.

    Raises
    ------
    SourceError
        A label cannot be of the kind that the user names.
    ChoiceError
        The labels are numbers, and some are no class numbers.
    """
    if unknown := sorted(set(rules.none) - set(labels)):
        raise SourceError(f"{where} has no label {quoted(unknown)}; correct --no-label")
    if rules.none:
        labels = ["" if label in rules.none else label for label in labels]
        kind = infer_kind(labels, keys, where) if kind == "names" and not typed else kind
    if kind in ("several names", "several numbers"):
        if rules.kind or rules.separator:
            raise SourceError(
                f"{where} has lists of classes as labels; leave out --label-kind and "
                "--label-separator"
            )
        nothing = sorted(filter(is_nothing, set(labels)))
        ways = (no_label(nothing), "if that stands for no label"), ((), '["NaN"] if it is a class')
        text = f"some labels of {where} are {quoted(nothing)}, beside lists"
        notes = _notes_of_lists(labels, where, classes) if kind == "several numbers" else []
        return Decided(labels, kind, tuple(notes), (Doubt.of(text, *ways),) if nothing else ())
    if rules.separator:
        return _separated(labels, rules.separator)
    if rules.kind and not (classes and rules.kind != "value"):
        return _without_minus(_converted(labels, keys, where, rules.kind))
    if folders or (classes and kind == "names"):
        return Decided(labels, kind)
    if kind == "names":
        return Decided(labels, kind, doubts=_doubts_of_names(labels, where, typed))
    if kind == "values" and not values:
        texts = {text for text in labels if text and not is_nothing(text)}
        if wrong := sorted(text for text in texts if not _WHOLE.fullmatch(text)):
            text = f"{where} has labels such as {quoted(wrong)}, and a file of labels has classes"
            table = "a table of URIs as the source, for values"
            doubt = Doubt.of(text, (NAME, "if they are names of classes"), ((), table))
            return Decided(labels, kind, doubts=(doubt,))
        labels, kind = _converted(labels, keys, where, "number").labels, "numbers"
    doubts = _doubts_of_numbers(labels, kind, where, listed=bool(classes), values=values)
    notes = []
    if words := {text for text in set(labels) if is_nothing(text)}:
        count = sum(label in words for label in labels)
        notes.append(f"{count:,} labels that are {quoted(sorted(words))} are taken as none")
        labels = ["" if label in words else label for label in labels]
    decided = Decided(labels, kind, tuple(notes), doubts)
    return decided if classes else _without_minus(decided)


def _notes_of_lists(labels: Iterable[str], where: str, classes: Sequence[str]) -> list[str]:
    """Return the line about lists of only 0 and 1, which may be vectors or class numbers."""
    parsed = [_numbers(text) for text in {*labels}]
    marked = [length > 0 for length, _ in parsed]
    if length := _vector_length(parsed):
        text = f"labels of {where} are lists of {length} values that are 0 or 1, one for each class"
        way = 'if they are class numbers, write them as names (["0", "1"])'
        return [] if classes and all(marked) else [f"{text}; {way}"]
    if any(marked):
        text = f"labels of {where} are lists of class numbers, as not all are equally long lists of"
        return [f"{text} 0 and 1; make them so if they have a value for each class"]
    return []


def _without_minus(decided: Decided) -> Decided:
    """Take class numbers that are -1 as none, with a line that counts them."""
    count = decided.labels.count("-1") if decided.kind == "numbers" else 0
    if not count:
        return decided
    labels = ["" if label == "-1" else label for label in decided.labels]
    note = f"{count:,} labels that are -1 are taken as none (--label-kind name)"
    return replace(decided, labels=labels, notes=(*decided.notes, note))


def _separated(labels: Sequence[str], separator: str) -> Decided:
    mark = separator.strip() or None  # None: any white space
    lists = {
        text: [part.strip() for part in text.split(mark) if part.strip()] for text in set(labels)
    }
    numbers = all(INTEGER.fullmatch(part) for parts in lists.values() for part in parts)
    texts = {
        text: json.dumps(list(map(int, parts)) if numbers else parts) if parts else ""
        for text, parts in lists.items()
    }
    return Decided(
        [texts[text] for text in labels], "several numbers" if numbers else "several names"
    )


def _converted(labels: list[str], keys: Sequence[str], where: str, kind: str) -> Decided:
    if kind == "name":
        return Decided(labels, "names" if any(labels) else None)
    texts = {"": ""}
    for row, text in enumerate(labels):
        if text in texts:
            continue
        number = math.nan if is_nothing(text) else _number(text)
        if number is None or (kind == "number" and not (math.isnan(number) or number.is_integer())):
            wanted = "a whole number" if kind == "number" else "a number"
            raise SourceError(
                f"{where}: the label of {printable(keys[row])} is {printable(text[:60])!r}, and "
                f"--label-kind {kind} needs {wanted}; correct it, or leave out --label-kind"
            )
        if math.isnan(number):
            texts[text] = ""
        elif kind == "value":
            texts[text] = text
        else:  # not by way of a float, which is not exact
            texts[text] = str(int(text) if INTEGER.fullmatch(text) else int(number))
    return Decided([texts[text] for text in labels], "numbers" if kind == "number" else "values")


def is_number(text: str) -> bool:
    """Return True for a number, no text, and a word for no value."""
    return _number(text) is not None or is_nothing(text) or not text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _doubts_of_numbers(
    labels: Sequence[str], kind: Kind | None, where: str, *, listed: bool, values: bool
) -> tuple[Doubt, ...]:
    texts = {text for text in labels if text and not is_nothing(text)}
    if not texts or kind not in ("numbers", "values"):
        return ()
    if kind == "values":
        if not all(float(text).is_integer() for text in texts):
            return ()
        if codes := sorted(filter(_EXPONENT.fullmatch, texts)):
            text = f"labels of {where} such as {quoted(codes)} are codes, or have an exponent"
            name = (NAME, "if they are codes, one class each")
            return (Doubt.of(text, name, (VALUE, "for a regression")),)
        blank = sum(not label or is_nothing(label) for label in labels)
        none = f", and {blank:,} of {len(labels):,} have none" if blank else ""
        text = (
            f"labels of {where} are numbers with a fraction that is zero, such as "
            f"{quoted(sorted(texts), 1)}{none}, as a column of class numbers with a blank cell is "
            "often written"
        )
        number = (NUMBER, "if they are class numbers")
        return (Doubt.of(text, number, (VALUE, "for a regression")),)
    if zeros := sorted(filter(_LEADING_ZERO.fullmatch, texts)):
        text = f"labels of {where} have leading zeros, such as {quoted(zeros)}"
        name = (NAME, "if they are codes, one class each")
        return (Doubt.of(text, name, (NUMBER, "if they are class numbers")),)
    if listed:
        return ()
    name = (NAME, "if each number is a class")
    numbers = sorted(map(int, texts))
    if numbers[0] < -1:
        below = [str(number) for number in numbers if number < -1]
        ways = [name, (no_label(below), "if that stands for no label"), (VALUE, "for a regression")]
        text = f"labels of {where} are whole numbers, and some are below -1, such as {below[0]}"
        ways = [ways[0], *ways[1 : 2 * (len(below) == 1)], *ways[2 : 3 * values]]
        raise choice_error([Doubt.of(text, *ways)])
    if {*numbers} == {-1, 1}:
        text = f"labels of {where} are 1 and -1"
        return (Doubt.of(text, name, (NUMBER, "if -1 stands for no label")),)
    return ()


def doubt_of_order(labels: Iterable[str], where: str) -> tuple[Doubt, ...]:
    """Return the doubt about class numbers that would be other classes as names of folders."""
    pairs = pairwise(sorted({text for text in labels if text.isdecimal()}))
    pair = next((pair for pair in pairs if len(pair[0]) > len(pair[1])), None)
    if pair is None:
        return ()
    text = (
        f"labels of {where} are numbers, and {pair[0]!r} is sorted before {pair[1]!r} as text, as "
        "names of class folders are"
    )
    name = (NAME, "to number them as class folders of these names")
    return (Doubt.of(text, (NUMBER, "if they are class numbers"), name),)


def _doubts_of_names(labels: Sequence[str], where: str, typed: bool) -> tuple[Doubt, ...]:
    texts, doubts = set(labels) - {""}, []
    if nothing := sorted(filter(is_nothing, texts)):
        count = sum(label in nothing for label in labels)
        text = f"{count:,} labels of {where} are {quoted(nothing)}"
        none: tuple[Sequence[str], str] = no_label(nothing), "if that stands for no label"
        if "--" in nothing:  # argparse drops it
            none = (), "write nothing in place of '--', if that stands for no label"
        doubts.append(Doubt.of(text, none, (NAME, "if it is a class")))
    texts.difference_update(nothing)
    words = sorted(text for text in texts if _number(text) is None)
    separator = next((mark for mark in _SEPARATORS if _joins(texts, mark)), "")
    is_list = bool(words) and separator and not _DECIMAL_COMMA.fullmatch(words[0])
    if not typed and len(words) == 1 < len(texts) and not is_list:
        text = f"all labels of {where} are numbers but {quoted(words)}"
        way: tuple[Sequence[str], str] = no_label(words), "if that stands for no label"
    elif words and all(map(_DECIMAL_COMMA.fullmatch, words)):
        text = (
            f"labels of {where} such as {quoted(words)} may be numbers with a decimal comma, which "
            "are to be written with a point"
        )
        way = ("--label-separator", ","), "if they are several classes"
    elif separator:
        some = sorted(text for text in texts if separator in text)
        text = f"labels of {where} such as {quoted(some)} seem to be several classes"
        way = ("--label-separator", separator), "if they are"
    elif len(texts) >= FEWEST_TEXTS and 10 * len(texts) > 9 * sum(map(bool, labels)):
        text = (
            f"labels of {where} differ in nearly every sample ({len(texts):,} texts, such as "
            f"{quoted(sorted(texts), 1)}), as captions do"
        )
        way = (), "another column by --label-column, or other labels"
    else:
        return tuple(doubts)
    return (*doubts, Doubt.of(text, way, (NAME, "if each is the name of a class")))


def _joins(texts: Collection[str], separator: str) -> bool:
    """Return True if a separator seems to join classes: parts recur in several labels."""
    lists = [
        parts
        for text in texts
        if separator in text
        and len(parts := {part.strip() for part in text.split(separator)} - {""}) > 1
    ]
    if not lists:
        return False
    counts = Counter(text for text in texts if separator not in text)
    counts.update(part for parts in lists for part in parts)
    parts = set().union(*lists)
    recurring = sum(counts[part] > 1 for part in parts)
    # These marks are rare in names, and others are not: "sea lion" is one class beside "lion".
    least = {"|": 0, ";": 1, ",": (len(parts) + 1) // 2}.get(separator, len(parts) // 2 + 1)
    return recurring >= least


# --- arrays -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelColumn:
    """The labels of all samples as an array, with the names of their classes."""

    values: np.ndarray
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()


def encode_column(
    decided: Decided,
    keys: Sequence[str],
    where: str,
    rules: LabelRules = NO_RULES,
    classes: Sequence[str] = (),
) -> LabelColumn:
    """Encode labels whose kind is decided; see `encode_labels`."""
    labels, kind = decided.labels, decided.kind
    values, names = encode_labels(labels, kind, classes, keys, where, rules.order)
    if wrong := [name for name in names if not is_utf8(name)]:
        raise SourceError(f"{where} has the class {printable(wrong[0])}, which is not UTF-8")
    if classes:
        return LabelColumn(values, names, decided.notes, decided.doubts)
    notes = (*decided.notes, *note_of_order(names))
    return LabelColumn(values, names, notes, (*decided.doubts, *doubts_of_classes(names, where)))


def encode_labels(
    labels: Sequence[str],
    kind: Kind | None,
    classes: Sequence[str],
    keys: Sequence[str],
    where: str,
    order: Literal["text", "number"] = "text",
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Encode labels as the array of a row table; returns it and the class names.

    Parameters
    ----------
    classes
        Class names by number, if the source lists them separately.
    order
        Order of class names that the source does not list.

    Raises
    ------
    SourceError
        A label is invalid or out of range, or there are too many classes.
    """
    if kind in ("several names", "several numbers") and not (classes or any(labels)):
        kind = None  # the number of classes is unknown
    try:
        match kind:
            case "numbers":
                return _class_numbers(labels, classes, where), tuple(classes)
            case "values":
                return _values(labels, keys, where), ()
            case "several numbers":
                return _several_numbers(labels, classes, keys, where), tuple(classes)
            case "several names":
                lists = [_names(text) for text in labels]
                named = tuple(classes) or in_order(
                    {n for names in lists for n in names}, order, where
                )
                numbers = {name: number for number, name in enumerate(named)}
                hot = [[numbers[name] for name in names] for names in lists]
                return _multi_hot(hot, len(named), where), named
            case _:
                named = tuple(classes) or in_order({*labels} - {""}, order, where)
                numbers = {name: number for number, name in enumerate(named)} | {"": -1}
                return np.array([numbers[name] for name in labels], np.int64), named
    except KeyError as error:
        row = next(row for row, text in enumerate(labels) if error.args[0] in {text, *_names(text)})
        raise SourceError(
            f"{where}: the label of {printable(keys[row])} is {printable(error.args[0][:60])!r}, "
            f"which is not among its classes: {quoted(named, 10)}"
        ) from None
    except (TypeError, ValueError):
        raise SourceError(f"{where} has labels that are no {kind}") from None


def in_order(names: Iterable[str], order: Literal["text", "number"], where: str) -> tuple[str, ...]:
    """Sort names of classes as text or as numbers.

    Raises
    ------
    SourceError
        A name is no whole number, and they are to be sorted as numbers.
    """
    ordered = sorted(names)
    if order == "number":
        numbers = numbers_in(ordered)
        wrong = next((name for name in ordered if not _CLASS_NUMBER.fullmatch(name)), None)
        if wrong is not None and not any(numbers):
            raise SourceError(
                f"{where} has the class {printable(wrong)!r}, which is no whole number; leave out "
                "--class-order number"
            )
        ordered = [name for _, name in sorted(zip(numbers, ordered, strict=True))]
    return tuple(ordered)


def _class_numbers(labels: Sequence[str], classes: Sequence[str], where: str) -> np.ndarray:
    given = [-1 if not text or is_nothing(text) else int(text) for text in labels]
    if max(given) >= 1 << 63:
        raise SourceError(f"{where} has the class number {max(given)}, which is too large")
    lowest, highest = min(given), max(given)
    if lowest < -1 or (classes and highest >= len(classes)):
        raise SourceError(
            f"{where} has the class number {lowest if lowest < -1 else highest}; class numbers "
            "go from -1 (no label) up"
            + (f" to {len(classes) - 1}, as it names {len(classes)} classes" if classes else "")
        )
    return np.array(given, np.int64)


def _values(labels: Sequence[str], keys: Sequence[str], where: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = np.array(
            [math.nan if not text or is_nothing(text) else float(text) for text in labels]
        ).astype(np.float32)
    wrong = np.flatnonzero(np.isinf(values))
    if len(wrong):
        raise SourceError(
            f"{where}: the label of {printable(keys[wrong[0]])} is {labels[wrong[0]]}, which is no "
            "finite float32"
        )
    return values


def _several_numbers(
    labels: Sequence[str], classes: Sequence[str], keys: Sequence[str], where: str
) -> np.ndarray:
    parsed = [_numbers(text) for text in labels]
    if count := _vector_length(parsed):
        lists = [
            numbers if length else np.flatnonzero(numbers).tolist() for length, numbers in parsed
        ]
    else:  # possible vectors are lists of the classes 0 and 1, with repetitions
        lists = [
            [0] * (len(numbers) < length) + [1] * (len(numbers) > 0) if length else numbers
            for length, numbers in parsed
        ]
        count = len(classes) or 1 + max(number for numbers in lists for number in numbers)
    if classes and count != len(classes):
        raise SourceError(f"{where} has labels of {count} classes, and names {len(classes)}")
    for key, numbers in zip(keys, lists, strict=True):
        wrong = [number for number in numbers if not 0 <= number < min(count, MOST_CLASSES)]
        if wrong:
            named = f"; it names {len(classes)} classes" if classes else ""
            raise SourceError(
                f"{where}: the label of {printable(key)} has the class number {wrong[0]}; "
                f"{_RANGE}{named}"
            )
    return _multi_hot(lists, count, where)


def _vector_length(parsed: Sequence[tuple[int, list[int]]]) -> int:
    """Return the length of lists that are all multi-hot vectors; 0 if they have class numbers."""
    lengths = {length or len(numbers) for length, numbers in parsed} - {0}
    are_binary = all(length or {*numbers} <= {0, 1} for length, numbers in parsed)
    return max(lengths) if are_binary and len(lengths) == 1 and 1 not in lengths else 0


def _numbers(text: str) -> tuple[int, list[int]]:
    """Return the length of a possible vector and its ones; or 0 and a list of class numbers."""
    length, colon, rest = text.partition(":")
    numbers = json.loads(rest if colon else text or "[]")
    return int(length) if colon else 0, numbers if isinstance(numbers, list) else [numbers]


def _names(text: str) -> list[str]:
    names = _parsed(text)
    return names if names is not None else [text] if text else []


def _multi_hot(lists: Sequence[Sequence[int]], classes: int, where: str) -> np.ndarray:
    nbytes = len(lists) * classes
    if classes > MOST_CLASSES or nbytes > MOST_LABEL_NBYTES:
        raise SourceError(
            f"{where} has labels of {classes:,} classes, which take {size(nbytes)} as multi-hot; "
            f"up to {MOST_CLASSES:,} classes and {size(MOST_LABEL_NBYTES)} are allowed"
        )
    labels = np.zeros((len(lists), classes), np.uint8)
    for row, numbers in zip(labels, lists, strict=True):
        row[numbers] = 1
    return labels
