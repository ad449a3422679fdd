"""Labels of a source: their kind, and their encoding as the array of a row table.

During a listing, a label is text: a class name or number, a number with a fraction, or a JSON list
of classes; empty for no label. A list of 0 and 1 that repeats one of them, or contains bools or
floats, may be a multi-hot vector: it is held as ``LENGTH:[indices of the ones]``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from precache.errors import SourceError
from precache.messages import printable
from precache.store.labels import MOST_CLASSES, MOST_LABEL_NBYTES
from precache.units import size

Kind = Literal["names", "numbers", "values", "several names", "several numbers"]
"""Class names or numbers, regression values, or lists of class names or numbers."""

MOST_TEXT = 4096
"""Maximum characters of a key, path or label; maximum bytes of a file or value that is a label."""

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_VALUE = re.compile(
    r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?inf(inity)?", re.IGNORECASE
)

_NOTHING = frozenset(
    ("nan", "-nan", "null", "none", "na", "n/a", "#n/a", "<na>", "nil", "nat", "-", "?", "\\n")
)
"""Words for no value, as tables have them, in lower case."""

_LIST = re.compile(r"\[\s*(['\"\d.+\-\[]|True\b|False\b).*\]", re.DOTALL)
"""Lists as Python and NumPy print them."""

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
        return "numbers" if all(map(_INTEGER.fullmatch, known)) else "values"
    texts_of: dict[str, str] = {"": ""}
    kinds: set[Kind] = set()
    for row, text in enumerate(labels):
        if text in texts_of:
            continue
        alone = int(text) if _INTEGER.fullmatch(text) else text
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


# --- arrays -------------------------------------------------------------------------------------


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
                named = in_order({name for names in lists for name in names}, order, where)
                numbers = {name: number for number, name in enumerate(named)}
                return _multi_hot(
                    [[numbers[n] for n in some] for some in lists], len(named), where
                ), named
    except (TypeError, ValueError):
        raise SourceError(f"{where} has labels that are no {kind}") from None
    named = in_order(set(labels) - {""}, order, where)
    numbers = {name: number for number, name in enumerate(named)} | {"": -1}
    return np.fromiter(map(numbers.__getitem__, labels), np.int64, len(labels)), named


def in_order(names: Iterable[str], order: Literal["text", "number"], where: str) -> tuple[str, ...]:
    """Sort names of classes as text or as numbers.

    Raises
    ------
    SourceError
        A name is no whole number, and they are to be sorted as numbers.
    """
    ordered = sorted(names)
    if order == "number":
        wrong = next((name for name in ordered if not _INTEGER.fullmatch(name)), None)
        if wrong is not None:
            raise SourceError(
                f"{where} has the class {printable(wrong)!r}, which is no whole number; leave out "
                "--class-order number"
            )
        ordered.sort(key=int)
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
    count = _vector_length(parsed)
    if count:
        lists = [
            numbers if length else np.flatnonzero(numbers).tolist() for length, numbers in parsed
        ]
    else:  # not vectors: possible ones are lists of the classes 0 and 1, with repetitions
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


def _numbers(text: str) -> tuple[int, list[int]]:
    """Return the length of a possible vector and its ones; or 0 and a list of class numbers."""
    length, colon, rest = text.partition(":")
    numbers = json.loads(rest if colon else text or "[]")
    return int(length) if colon else 0, numbers if isinstance(numbers, list) else [numbers]


def _vector_length(parsed: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Return the number of classes if all labels are multi-hot vectors; 0 if some are not."""
    lengths = {length or len(numbers) for length, numbers in parsed if length or numbers}
    binary = all(length or set(numbers) <= {0, 1} for length, numbers in parsed)
    return max(lengths) if len(lengths) == 1 and max(lengths) > 1 and binary else 0


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
