"""Labels of a source: one column, whose reading is decided once, and its encoding for a row table.

A label is text, a whole number, a float, or a list of texts or whole numbers. Tables, archives,
records, files of labels, datasets and class folders all give an Arrow array of these, null for no
label. `decide` turns it into one of classes by name or number, of values, or of several classes;
`encode` into the array of a row table.

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
from precache.store.columns import numbers_of
from precache.store.labels import MOST_CLASSES, MOST_LABEL_NBYTES
from precache.units import size
from precache_workers.sources.base import NO_RULES, Doubt, LabelRules, choice_error, is_utf8
from precache_workers.sources.label_readings import (
    INTEGER,
    bit_of,
    doubts_of_classes,
    is_blank,
    no_label,
    note_of_order,
    numbers_in,
    quoted,
    spelling,
)

Kind = Literal["names", "numbers", "values", "several names", "several numbers"]
"""Class names or numbers, regression values, or lists of class names or numbers."""

Label = str | int | float | list[Any]
"""A label as a Python value."""

MOST_TEXT = 4096
"""Maximum characters of a key, path or label; maximum bytes of a file or value that is a label."""

BYTES_OF = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
"""Types of the bytes of texts."""

FEWEST_TEXTS = 20
"""Fewest texts that differ in nearly every sample, and so may be no classes."""

NAME, NUMBER, VALUE = (("--label-kind", kind) for kind in ("name", "number", "value"))

_SEPARATORS = ("|", ";", ",", "/", "+", "&", " and ", " ")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_EXPONENT = re.compile(r"[0-9]+[eE][0-9]+")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")
_SIGNED = re.compile(r"[-+]?[0-9]+(?:[.,][0-9]+)? ?[%$€£¥]|[-+]?[$€£¥] ?[0-9][0-9.,]*")
"""Percents and amounts of money."""
_TIME = (
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?(?:Z|[+-]\d\d:?\d\d)?"
)
_DATE = re.compile(
    r"(?:\d{4}[-/.][01]?\d[-/.][0-3]?\d|[0-3]?\d[-/.][0-3]?\d[-/.](?:\d\d)?\d\d)"
    rf"(?:[T ]{_TIME})?|{_TIME}"
)
"""Dates, times, and both, as programs and spreadsheets write them."""
_PLAIN_DATE = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
_WHOLE = re.compile(r"[-+]?[0-9]+(\.0*)?")
_CLASS_NUMBER = re.compile(r"-?[0-9]{1,18}")
_VALUE = re.compile(
    r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?inf(inity)?", re.IGNORECASE
)
_LIST = re.compile(r"\[\s*(['\"\d.+\-\[]|True\b|False\b).*\]", re.DOTALL)
"""Lists as Python and NumPy print them."""

_NOTHING = frozenset(
    (
        "nan", "-nan", "null", "none", "na", "n/a", "n/d", "n.a.", "#n/a", "<na>", "nil", "nat",
        "-", "--", "?", "\\n", "#ref!", "#value!", "#div/0!", "#name?", "#null!", "#num!",
        "(blank)", "missing", "undefined", "not available", "unlabeled", "unlabelled",
    )
)  # fmt: skip
"""Words for no value, as tables have them, in lower case."""

_JOINED: Mapping[frozenset[Kind], Kind] = {
    frozenset(("names", "several names")): "several names",
    frozenset(("numbers", "several numbers")): "several numbers",
    frozenset(("numbers", "values")): "values",
}
"""Kinds of labels that may occur together in a source -> their common kind."""

_RANGE = f"those of several classes are from 0 to {MOST_CLASSES - 1:,}"


def is_nothing(text: str) -> bool:
    """Return True for a word that may stand for no value, such as ``NaN``."""
    return text.lower() in _NOTHING


# --- columns ------------------------------------------------------------------------------------


def kind_of(type_: Any) -> Kind | None:
    """Return the kind of labels in a column of an Arrow type; None if it cannot hold labels."""
    import pyarrow as pa

    if pa.types.is_integer(type_) or pa.types.is_boolean(type_):
        return "numbers"
    if pa.types.is_floating(type_):
        return "values"
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = kind_of(type_.value_type)
        return "several names" if inner == "names" else inner and "several numbers"
    if pa.types.is_fixed_size_list(type_):
        return kind_of(pa.list_(type_.value_type))
    if pa.types.is_dictionary(type_):
        return "names" if kind_of(type_.value_type) == "names" else None
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return "names" if any(is_text(type_) for is_text in texts) else None


def label_of(value: Any) -> Label | None:
    """Return a value of a column without a type, or of a feature, as a label; None for no label.

    Raises
    ------
    ValueError
        The value cannot be a label.
    """
    match value:
        case None | "":
            return None
        case str():
            if len(value) > MOST_TEXT:
                raise ValueError(f"is a text of more than {MOST_TEXT:,} characters")
            if not is_utf8(value):
                text = printable(repr(value)[:60])
                raise ValueError(f"is {text}, which is not UTF-8; save it as UTF-8")
            return value
        case int():
            if not -(1 << 63) <= value < 1 << 63:
                raise ValueError(f"is the class number {value}, which is too large")
            return int(value)
        case float():
            return None if math.isnan(value) else value
        case list() | tuple():
            return _list_of(value)
    text = printable(repr(value)[:60])
    raise ValueError(f"is {text}; a label is a class, a number, or a list of classes")


def _list_of(values: Sequence[Any]) -> list[Any] | None:
    if len(values) > MOST_CLASSES:
        raise ValueError(f"is a list of {len(values):,} values; up to {MOST_CLASSES:,} are allowed")
    types = {type(value) for value in values}
    if types == {str}:
        return [label_of(value) or "" for value in values]
    if types in ({bool}, {float}) and all(value in (0, 1) for value in values):
        return [*map(bool, values)]
    if types == {int} and not 0 <= min(values) <= max(values) < MOST_CLASSES:
        wrong = min(values) if min(values) < 0 else max(values)
        raise ValueError(f"has the class number {wrong}; {_RANGE}")
    if types - {str, int} or len(types) > 1:
        raise ValueError(
            f"is {printable(repr(values)[:60])}; a list has class names, class numbers, or 0 and 1 "
            "for each class"
        )
    return [*values] or None


def _kind_of(label: Label | None) -> Kind | None:
    if label is None:
        return None
    if isinstance(label, list):
        return "several names" if isinstance(label[0], str) else "several numbers"
    return "names" if isinstance(label, str) else "values" if type(label) is float else "numbers"


def joined(kinds: Iterable[Kind]) -> Kind | None:
    """Return the common kind of labels of several kinds; None if they cannot be combined."""
    different = frozenset(kinds)
    return next(iter(different)) if len(different) == 1 else _JOINED.get(different)


class MixedLabelsError(ValueError):
    """Labels or columns of labels have kinds that no column holds together.

    Attributes
    ----------
    one, other
        The numbers and kinds of two that do not fit, in order.
    """

    def __init__(self, one: tuple[int, Kind], other: tuple[int, Kind]) -> None:
        super().__init__(f"are {' and '.join(sorted((one[1], other[1])))}")
        self.one, self.other = one, other


def _common(kinds: Iterable[Kind | None], *, typed: bool) -> Kind | None:
    """Return the kind of a column that holds labels of several kinds; None for no label.

    Raises
    ------
    MixedLabelsError
        There is none.
    """
    found: dict[Kind, int] = {}
    for number, kind in enumerate(kinds):
        if kind is not None and kind not in found:
            other = next((one for one in found if typed and joined((one, kind)) is None), None)
            if other is not None:
                raise MixedLabelsError((found[other], other), (number, kind))
            found[kind] = number
    if not typed and found and ("names" in found or joined(found) is None):
        return "names"  # their text is read once all is known
    return joined(found) if found else None


def column_of(labels: Sequence[Label | None], *, typed: bool = True) -> Any:
    """Return labels as an Arrow array of the one type that fits all.

    Parameters
    ----------
    typed
        If not, numbers and lists beside text are text.

    Raises
    ------
    MixedLabelsError
        There is no such type.
    """
    return _array(labels, _common(map(_kind_of, labels), typed=typed))


def differing(where: str, key: str, label: Label | None, other: Kind) -> SourceError:
    """Return the error of a label that is of another kind than one before it."""
    return SourceError(
        f"{where}: the label of {printable(key)} is {printable(str(label)[:60])}, and others are "
        f"{other}; make them alike, or choose others by --label-column"
    )


def _text(label: Label) -> str:
    return label if isinstance(label, str) else json.dumps(label)


def _array(labels: Sequence[Label | None], kind: Kind | None) -> Any:
    """Return labels as an Arrow array of a kind that fits them; of nulls for None."""
    import pyarrow as pa

    if kind is None:
        return pa.nulls(len(labels))
    if kind == "names":
        texts = [None if label is None else _text(label) for label in labels]
        return pa.array(texts, pa.large_string())
    if kind in ("numbers", "values"):
        return pa.array(labels, pa.int64() if kind == "numbers" else pa.float64())
    lists = [label if label is None or isinstance(label, list) else [label] for label in labels]
    if kind == "several names":
        return pa.array(lists, pa.large_list(pa.large_string()))
    bits = all(isinstance(label[0], bool) for label in lists if label is not None)
    if not bits:
        lists = [label if label is None else [*map(int, label)] for label in lists]
    return pa.array(lists, pa.large_list(pa.bool_() if bits else pa.int64()))


def values_of(column: Any) -> list[Any]:
    """Return the values of a column; bytes of texts that are not UTF-8 become surrogates."""
    values: list[Any]
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        kind = BYTES_OF.get(str(column.type))
        if kind is None:  # a text in a list or a struct
            raise
        values = column.view(kind).to_pylist()
        values = [v if v is None else v.decode(errors="surrogateescape") for v in values]
    return values


def typed_column(column: Any, name: str) -> Any:
    """Return a column of a table with types as labels: in one of the types of `column_of`.

    Raises
    ------
    ValueError
        Some value is no label.
    """
    import pyarrow as pa

    kind = kind_of(column.type)
    codes = None
    if "several" not in str(kind):
        column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        column, codes = column.dictionary, column.indices
    labels = []
    for row, value in enumerate(values_of(column)):
        try:
            labels.append(label_of(value))
        except ValueError as error:
            key = "" if codes is not None else f", value {row} of {len(column)} read at once,"
            raise ValueError(f"its column {name}{key} {error}") from None
    values = _array(labels, kind)
    return values if codes is None else values.take(codes)


def texts_of_labels(column: Any) -> list[str]:
    """Return labels as text, to be compared; empty for none."""
    return ["" if label is None else str(label) for label in column.to_pylist()]


def join_columns(columns: Sequence[Any], *, typed: bool = True) -> Any:
    """Return columns of labels as one, of the type that fits all.

    Parameters
    ----------
    typed
        If not, numbers beside text are text.

    Raises
    ------
    MixedLabelsError
        There is no such type.
    """
    import pyarrow as pa

    types = {column.type for column in columns if kind_of(column.type) is not None}
    if len(types) <= 1:
        return pa.concat_arrays([column.cast(*types) for column in columns] if types else columns)
    common = _common((kind_of(column.type) for column in columns), typed=typed)
    return _array([label for column in columns for label in column.to_pylist()], common)


# --- the reading --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decided:
    """Labels of one reading as an Arrow array, the lines about them, and doubts about others."""

    values: Any
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    @property
    def kind(self) -> Kind | None:
        """Kind of the labels; None if there are none."""
        return kind_of(self.values.type)


class _Different:
    """The different labels of a column of one label each, in order, as text.

    Attributes
    ----------
    labels, texts
        The labels, and each as text.
    count
        Number of labels of the column, none among them.
    """

    def __init__(self, values: Any) -> None:
        encoded = values.dictionary_encode()
        self._codes = encoded.indices
        self.labels: list[Label] = encoded.dictionary.to_pylist()
        self.texts = [*map(str, self.labels)]
        self.count = len(values)

    def counted(self, texts: Collection[str]) -> int:
        """Return how many labels are one of some texts."""
        known = np.bincount(numbers_of(self._codes.drop_null()), minlength=len(self.texts))
        return sum(int(n) for n, text in zip(known, self.texts, strict=True) if text in texts)

    @property
    def all_differ(self) -> bool:
        """True if so many differ in nearly every sample that they may be no classes."""
        given = self.count - int(self._codes.null_count)
        return len(self.texts) >= FEWEST_TEXTS and 10 * len(self.texts) > 9 * given

    def row(self, number: int) -> int:
        """Return the first row of a label, by its number."""
        return int(self._codes.index(number).as_py())

    def mapped(self, labels: Sequence[Label | None], kind: Kind | None) -> Any:
        """Return the column with others in place of its different labels."""
        return _array(labels, kind).take(self._codes)


def decide(
    values: Any,
    keys: Sequence[str],
    where: str,
    rules: LabelRules = NO_RULES,
    *,
    classes: Sequence[str] = (),
    typed: bool = True,
    folders: bool = False,
    known: Collection[str] = (),
    is_file: bool = False,
) -> Decided:
    """Find the one reading of labels: the user's, else the one that leaves no doubt.

    Parameters
    ----------
    values
        Labels as an Arrow array, as of `column_of`.
    classes
        Names that the source lists, by number.
    typed
        A type says that text is text, and no number.
    folders
        The labels are names of folders, which nobody writes for nothing.
    known
        Names of classes: labels that are all among them are names of these.
    is_file
        They are of a file of labels, whose class numbers get names, too.

    Raises
    ------
    SourceError
        A label cannot be of the kind that the user names, or there is no list that fits all.
    ChoiceError
        The labels are numbers, and some are no class numbers.
    """
    import pyarrow as pa

    if "several" in str(kind_of(values.type)):
        if rules.none and not _is_bits(values):
            raise SourceError(f"{where} has no label {quoted(rules.none)}; correct --no-label")
        return _of_lists(values, where, rules, classes, is_file=is_file)
    if kind_of(values.type) is None:
        values = values.cast(pa.large_string())
        typed = False
    found = _Different(values)
    if rules.none:
        if unknown := sorted({*rules.none} - {*found.texts}):
            raise SourceError(f"{where} has no label {quoted(unknown)}; correct --no-label")
        pairs = zip(found.labels, found.texts, strict=True)
        kept = [None if text in rules.none else label for label, text in pairs]
        values = found.mapped(kept, kind_of(values.type))
        found = _Different(values)
    chosen = rules.kind or rules.separator or rules.none
    kind = kind_of(values.type)
    if known and not chosen and {*found.texts} <= {*known}:
        return Decided(found.mapped(found.texts, "names"))
    if kind == "names" and not typed:
        found, lists = _with_lists(found, keys, where)
        if lists is not None:
            bare = [text for text in found.texts if is_nothing(text)]
            return _of_lists(lists, where, rules, classes, bare=bare)
        if not rules.kind and (name := _member_of_objects(found, where)) is not None:
            try:
                texts = [label_of(_text(json.loads(text)[name])) for text in found.texts]
            except ValueError as error:
                raise SourceError(f"{where}: {name!r} of a label {error}") from None
            values = found.mapped(texts, kind)
            own = replace(rules, none=())
            inner = decide(values, keys, where, own, classes=classes, typed=False, is_file=is_file)
            note = f"labels of {where} are {name!r} of JSON objects (--label-kind name: their text)"
            return replace(inner, notes=(note, *inner.notes))
        kind = _untyped_kind(found.texts)
    if rules.separator:
        return Decided(_separated(found, rules.separator))
    if rules.kind and not (classes and rules.kind != "value"):
        return _without_minus(_converted(found, keys, where, rules.kind))
    if folders or (classes and kind == "names"):
        return Decided(values)
    if kind == "names":
        return Decided(
            found.mapped(found.texts, kind), doubts=_doubts_of_names(found, where, typed)
        )
    return _of_numbers(found, kind, where, classes, known, is_file=is_file)


def _of_numbers(
    found: _Different,
    kind: Kind | None,
    where: str,
    classes: Sequence[str],
    known: Collection[str],
    *,
    is_file: bool,
) -> Decided:
    """Read labels that are numbers, beside which words for no value are none."""
    import pyarrow as pa

    notes = []
    if words := sorted(filter(is_nothing, found.texts)):
        count = found.counted(words)
        notes.append(f"{count:,} labels that are {quoted(words)} are taken as none")
    # A column of class numbers with a blank cell is often written so.
    if (
        is_file
        and kind == "values"
        and all(is_nothing(t) or _WHOLE.fullmatch(t) for t in found.texts)
    ):
        kind = "numbers"
        found = _Different(found.mapped([_number_of(n, kind) for n in found.labels], kind))
    doubts = _doubts_of_numbers(found, kind, where, listed=bool(classes))
    are_names = is_file and bool(known) and all(map(INTEGER.fullmatch, known))
    if is_file and kind == "numbers" and not are_names:
        doubts = doubts or _doubt_of_ids(found, where) or _doubt_of_order(found.texts, where)
    elif kind == "numbers" and found.all_differ and not classes:
        notes.append(
            "Labels are whole numbers that nearly all differ, and are taken as class numbers "
            "(--label-kind value: for a regression)"
        )
    numbers = [_number_of(label, kind) for label in found.labels]
    decided = Decided(found.mapped(numbers, kind), tuple(notes), doubts)
    decided = decided if classes else _without_minus(decided)
    if are_names and kind == "numbers":
        return replace(decided, values=decided.values.cast(pa.large_string()))
    return decided


def _untyped_kind(texts: Iterable[str]) -> Kind | None:
    """Return the kind of labels that are text without a type, and no lists."""
    known = [text for text in texts if not is_nothing(text)]
    if not known:
        return None
    identifiers = all(map(str.isdecimal, known)) and max(map(len, known)) > 18
    if identifiers or not all(map(_VALUE.fullmatch, known)):
        return "names"
    return "numbers" if all(map(_CLASS_NUMBER.fullmatch, known)) else "values"


def _number_of(label: Label, kind: Kind | None) -> int | float | None:
    if kind is None or (isinstance(label, str) and is_nothing(label)):
        return None
    if kind == "values":
        return float(label)  # type: ignore[arg-type]
    # Not by way of a float, which is not exact.
    whole = isinstance(label, int) or (isinstance(label, str) and INTEGER.fullmatch(label))
    return int(label) if whole else int(float(label))  # type: ignore[arg-type]


def _json(text: str, type_: type) -> Any:
    """Parse a JSON list or object; returns None for any other text."""
    try:
        value = json.loads(text) if text.startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, type_) else None


def _member_of_objects(found: _Different, where: str) -> str | None:
    """Return the name of the one member of labels that are all JSON objects; None for others.

    Raises
    ------
    ChoiceError
        They have several members.
    """
    items = [_json(text, dict) for text in found.texts]
    names = {name: None for item in items if item is not None for name in item}
    if items and None not in items and len(names) == 1:
        return str(*names)
    if names:
        text = f"labels of {where} are JSON objects with the members {quoted(names)}"
        one = (), "write the member that is the label as a column of its own"
        raise choice_error([Doubt.of(text, (NAME, "if each text is a class"), one)])
    return None


def _with_lists(found: _Different, keys: Sequence[str], where: str) -> tuple[_Different, Any]:
    """Return texts of which some are JSON lists as a column of lists: each other one is a class.

    Where only empty ones are, these are no label, and there is no column.

    Raises
    ------
    SourceError
        A list is invalid, or the labels have kinds that cannot be combined.
    """

    def error(row: int, what: object) -> SourceError:
        return SourceError(f"{where}: the label of {printable(keys[found.row(row)])} {what}")

    lists = {text: parsed for text in found.texts if (parsed := _json(text, list)) is not None}
    labels: list[Label | None] = []
    for row, text in enumerate(found.texts):
        if text not in lists and _LIST.fullmatch(text):
            why = 'which is no list in JSON; write [1, 5] or ["cat", "dog"]'
            raise error(row, f"is {printable(text[:60])}, {why}")
        alone = int(text) if lists and _CLASS_NUMBER.fullmatch(text) else text
        try:
            labels.append(label_of(lists.get(text, alone)))
        except ValueError as reason:
            raise error(row, reason) from None
    if not any(lists.values()):
        texts = [None if text in lists else text for text in found.texts]
        return _Different(found.mapped(texts, "names")) if lists else found, None
    try:
        return found, found.mapped(labels, _common(map(_kind_of, labels), typed=True))
    except MixedLabelsError as mixed:
        row, [_, kind] = mixed.other[0], mixed.one
        raise differing(where, keys[found.row(row)], found.texts[row], kind) from None


def _of_lists(
    values: Any,
    where: str,
    rules: LabelRules,
    classes: Sequence[str],
    *,
    bare: Sequence[str] = (),
    is_file: bool = False,
) -> Decided:
    """Read lists of classes.

    Parameters
    ----------
    bare
        Words for no value that stood beside lists.
    """
    if rules.kind or rules.separator:
        raise SourceError(
            f"{where} has lists of classes as labels; leave out --label-kind and --label-separator"
        )
    if _is_bits(values):
        return _of_bits(values, where, rules, classes, is_file=is_file)
    ways = (no_label(bare), "if that stands for no label"), ((), '["NaN"] if it is a class')
    text = f"some labels of {where} are {quoted(bare)}, beside lists"
    notes = _notes_of_lists(values, where, classes) if kind_of(values.type) else []
    return Decided(values, tuple(notes), (Doubt.of(text, *ways),) if bare else ())


def _notes_of_lists(values: Any, where: str, classes: Sequence[str]) -> list[str]:
    """Return the line about lists of only 0 and 1, which may be vectors or class numbers."""
    import pyarrow as pa

    if kind_of(values.type) != "several numbers":
        return []
    if length := _vector_length(values):
        text = f"labels of {where} are lists of {length} values that are 0 or 1, one for each class"
        way = 'if they are class numbers, write them as names (["0", "1"])'
        clear = length > 2 or pa.types.is_boolean(values.type.value_type)
        return [] if classes and clear else [f"{text}; {way}"]
    lists = (label for label in values.to_pylist() if label)
    if any(len(label) > len({*label}) and {*label} <= {0, 1} for label in lists):
        text = f"labels of {where} are lists of class numbers, as not all are equally long lists of"
        return [f"{text} 0 and 1; make them so if they have a value for each class"]
    return []


def _is_bits(values: Any) -> bool:
    """Return True for lists of the cells of several columns, one for each class."""
    import pyarrow as pa

    return bool(pa.types.is_large_list(values.type) and values.type.value_type == pa.int8())


def bits_column(rows: Iterable[Sequence[int | None]]) -> Any:
    """Return the cells of columns that are a class each, by row, as one column of lists."""
    import pyarrow as pa

    return pa.array(rows, pa.large_list(pa.int8()))


def cell_of(value: object, name: str, none: Collection[str] = ()) -> int | None:
    """Return a cell of a column that is a class: 0, 1, -1, or None for a blank one.

    Parameters
    ----------
    none
        Texts that the user takes as no label.

    Raises
    ------
    ValueError
        It is none of these.
    """
    bit = bit_of(value)
    if bit is None and not is_blank(value) and str(value).strip() not in none:
        raise ValueError(
            f"has {printable(repr(value)[:60])} in the column {printable(name)!r}; of several "
            "columns of labels, each has 0 or 1"
        )
    return bit


def _of_bits(
    values: Any, where: str, rules: LabelRules, classes: Sequence[str], *, is_file: bool
) -> Decided:
    """Read the cells of columns that are a class each: classes if each row has one, else lists.

    Blank cells count as 0, and so does -1 if no cell is 0, or where the user says so. In a file of
    labels rows may have no class.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    flat, columns = values.flatten(), quoted(classes)
    has_minus, has_0 = (pc.any(pc.equal(flat, number)).as_py() for number in (-1, 0))
    doubts: tuple[Doubt, ...] = ()
    if has_minus and has_0 and not {"-1", "-1.0"} & {*rules.none}:
        text = f"the columns {columns} of {where} have -1 beside 0 and 1"
        ways = (no_label(["-1"]), "if it counts as 0"), ((), "write 0 or 1")
        doubts = (Doubt.of(text, *ways),)
    notes = [f"In the columns {columns}, -1 counts as 0"] if has_minus else []
    if flat.null_count:
        notes.append(f"In the columns {columns}, {flat.null_count:,} blank cells count as 0")
    bits = np.zeros((len(values), len(classes)), np.bool_)
    bits[numbers_of(values.is_valid())] = (numbers_of(flat.fill_null(0)) == 1).reshape(
        -1, len(classes)
    )
    counts = bits.sum(axis=1)
    alone = bool(counts.max() <= 1 and (is_file or counts.min() == 1))
    each = "one class" if alone else "several classes or none"
    notes.append(f"Labels from columns of 0 and 1, a class each: rows have {each}")
    if not alone:
        ends = pa.array(np.arange(len(bits) + 1) * len(classes))
        return Decided(
            pa.LargeListArray.from_arrays(ends, pa.array(bits.ravel())), (*notes,), doubts
        )
    of_rows = pa.array(bits.argmax(axis=1), mask=counts == 0)
    return Decided(pa.array(classes, pa.large_string()).take(of_rows), (*notes,), doubts)


def _without_minus(decided: Decided) -> Decided:
    """Take class numbers that are -1 as none, with a line that counts them."""
    import pyarrow.compute as pc

    if decided.kind != "numbers":
        return decided
    is_minus = pc.equal(decided.values, -1)
    count = pc.sum(is_minus).as_py()
    if not count:
        return decided
    note = f"{count:,} labels that are -1 are taken as none (--label-kind name)"
    values = pc.if_else(is_minus, None, decided.values)
    return replace(decided, values=values, notes=(*decided.notes, note))


def _separated(found: _Different, separator: str) -> Any:
    mark = separator.strip() or None  # None: any white space
    if mark is not None and mark[0].isalpha():  # a word
        mark = separator
    lists = [[part.strip() for part in text.split(mark) if part.strip()] for text in found.texts]
    if all(INTEGER.fullmatch(part) for parts in lists for part in parts):
        return found.mapped([[*map(int, parts)] or None for parts in lists], "several numbers")
    return found.mapped([parts or None for parts in lists], "several names")


def _converted(found: _Different, keys: Sequence[str], where: str, kind: str) -> Decided:
    if kind == "name":
        return Decided(found.mapped(found.texts, "names" if found.texts else None))
    to: Kind = "numbers" if kind == "number" else "values"
    numbers: list[Label | None] = []
    for row, text in enumerate(found.texts):
        number = math.nan if is_nothing(text) else _number(text)
        is_none = number is not None and math.isnan(number)
        if number is None or (to == "numbers" and not (is_none or number.is_integer())):
            wanted = "a whole number" if to == "numbers" else "a number"
            raise SourceError(
                f"{where}: the label of {printable(keys[found.row(row)])} is "
                f"{printable(text[:60])!r}, and --label-kind {kind} needs {wanted}; correct it, or "
                "leave out --label-kind"
            )
        numbers.append(None if is_none else _number_of(found.labels[row], to))
    return Decided(found.mapped(numbers, to))


def is_number(text: str) -> bool:
    """Return True for a number, no text, and a word for no value."""
    return _number(text) is not None or is_nothing(text) or not text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _doubts_of_numbers(
    found: _Different, kind: Kind | None, where: str, *, listed: bool
) -> tuple[Doubt, ...]:
    texts = {text for text in found.texts if not is_nothing(text)}
    if not texts or kind not in ("numbers", "values"):
        return ()
    if kind == "values":
        if not all(float(text).is_integer() for text in texts):
            return ()
        if codes := sorted(filter(_EXPONENT.fullmatch, texts)):
            text = f"labels of {where} such as {quoted(codes)} are codes, or have an exponent"
            name = (NAME, "if they are codes, one class each")
            return (Doubt.of(text, name, (VALUE, "for a regression")),)
        blank = found.count - found.counted(texts)
        none = f", and {blank:,} of {found.count:,} have none" if blank else ""
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
    if all(map(_PLAIN_DATE.fullmatch, texts)):
        text = f"labels of {where} such as {quoted(sorted(texts))} are dates"
        days = (), "another column by --label-column, or numbers such as of days for a regression"
        return (Doubt.of(text, name, days),)
    numbers = sorted(map(int, texts))
    if numbers[0] < -1:
        below = [str(number) for number in numbers if number < -1]
        ways = [name, (no_label(below), "if that stands for no label"), (VALUE, "for a regression")]
        text = f"labels of {where} are whole numbers, and some are below -1, such as {below[0]}"
        ways = [way for way in ways if len(below) == 1 or way[0][0] == "--label-kind"]
        raise choice_error([Doubt.of(text, *ways)])
    if {*numbers} == {-1, 1}:
        text = f"labels of {where} are 1 and -1"
        return (Doubt.of(text, name, (NUMBER, "if -1 stands for no label")),)
    return ()


def _doubt_of_ids(found: _Different, where: str) -> tuple[Doubt, ...]:
    """Return the doubt about class numbers that nearly all differ, as numbers of samples do."""
    if not found.all_differ:
        return ()
    text = f"labels of {where} are {len(found.texts):,} whole numbers that nearly all differ"
    number = NUMBER, "if they are class numbers"
    return (Doubt.of(text, (VALUE, "for a regression"), number),)


def _doubt_of_order(texts: Iterable[str], where: str) -> tuple[Doubt, ...]:
    """Return the doubt about class numbers that would be other classes as names of folders."""
    pairs = pairwise(sorted({text for text in texts if text.isdecimal()}))
    pair = next((pair for pair in pairs if len(pair[0]) > len(pair[1])), None)
    if pair is None:
        return ()
    text = (
        f"labels of {where} are numbers, and {pair[0]!r} is sorted before {pair[1]!r} as text, as "
        "names of class folders are"
    )
    name = (NAME, "to number them as class folders of these names")
    return (Doubt.of(text, (NUMBER, "if they are class numbers"), name, by_classes=True),)


def _doubts_of_names(found: _Different, where: str, typed: bool) -> tuple[Doubt, ...]:
    texts, doubts = {*found.texts}, []
    if nothing := sorted(filter(is_nothing, texts)):
        count = found.counted(nothing)
        text = f"{count:,} labels of {where} are {quoted(nothing)}"
        none: tuple[Sequence[str], str] = no_label(nothing), "if that stands for no label"
        if "--" in nothing:  # argparse drops it
            none = (), "write nothing in place of '--', if that stands for no label"
        is_one: tuple[Sequence[str], str] = NAME, "if it is a class"
        if len({*map(spelling, nothing)}) < len(nothing):
            is_one = (), "rename those that look alike, if they are classes"
        doubts.append(Doubt.of(text, none, is_one))
    texts.difference_update(nothing)
    words = sorted(text for text in texts if _number(text) is None)
    separator = next((mark for mark in _SEPARATORS if _joins(texts, mark)), "")
    way: tuple[Sequence[str], str]
    if words and all(map(_DECIMAL_COMMA.fullmatch, words)):
        text = (
            f"labels of {where} such as {quoted(words)} may be numbers with a decimal comma, which "
            "are to be written with a point"
        )
        way = ("--label-separator", ","), "if they are several classes"
    elif words and all(map(_SIGNED.fullmatch, words)):
        text = f"labels of {where} such as {quoted(words)} may be numbers of a regression"
        way = (), "write them without the sign, if they are"
    elif words and all(map(_DATE.fullmatch, texts)):
        text = f"labels of {where} such as {quoted(words)} are dates or times"
        way = (), "another column by --label-column, or numbers such as of days for a regression"
    elif not typed and len(words) == 1 < len(texts) and not separator:
        text = f"all labels of {where} are numbers but {quoted(words)}"
        way = no_label(words), "if that stands for no label"
    elif separator:
        some = sorted(text for text in texts if separator in text)
        text = f"labels of {where} such as {quoted(some)} seem to be several classes"
        way = ("--label-separator", separator), "if they are"
    elif found.all_differ:
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
    if not lists or (separator == " " and any("(" in text for text in texts)):
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


def encode(
    decided: Decided,
    keys: Sequence[str],
    where: str,
    rules: LabelRules = NO_RULES,
    classes: Sequence[str] = (),
) -> LabelColumn:
    """Encode labels of one reading as the array of a row table.

    Parameters
    ----------
    classes
        Class names by number, if the source lists them separately.

    Raises
    ------
    SourceError
        A label is invalid or out of range, or there are too many classes.
    """
    values, names = _encoded(decided.values, classes, keys, where, rules.order)
    if wrong := [name for name in names if not is_utf8(name)]:
        raise SourceError(f"{where} has the class {printable(wrong[0])}, which is not UTF-8")
    if classes:
        return LabelColumn(values, names, decided.notes, decided.doubts)
    notes = (*decided.notes, *note_of_order(names))
    are_names = rules.kind == "name"
    clear = [name for name in names if are_names or not is_nothing(name)]  # others are in doubt
    alike = doubts_of_classes(clear, where, are_codes=are_names)
    return LabelColumn(values, names, notes, (*decided.doubts, *alike))


def read_column(
    values: Any,
    keys: Sequence[str],
    where: str,
    rules: LabelRules = NO_RULES,
    *,
    classes: Sequence[str] = (),
    typed: bool = True,
    folders: bool = False,
) -> LabelColumn:
    """Decide the reading of labels, and encode them; see `decide` and `encode`."""
    decided = decide(values, keys, where, rules, classes=classes, typed=typed, folders=folders)
    return encode(decided, keys, where, rules, classes)


def _encoded(
    labels: Any,
    classes: Sequence[str],
    keys: Sequence[str],
    where: str,
    order: Literal["text", "number"],
) -> tuple[np.ndarray, tuple[str, ...]]:
    import pyarrow.compute as pc

    kind = kind_of(labels.type)
    if kind is None or ("several" in kind and not classes and labels.null_count == len(labels)):
        return np.full(len(labels), -1, np.int64), tuple(classes)
    if kind == "numbers":
        return _class_numbers(labels, classes, where), tuple(classes)
    if kind == "values":
        return _values(labels, keys, where), ()
    if kind == "several numbers":
        return _several_numbers(labels, classes, keys, where), tuple(classes)
    parents = numbers_of(pc.list_parent_indices(labels)) if kind == "several names" else None
    encoded = (labels if parents is None else labels.flatten()).dictionary_encode()
    theirs: list[str] = encoded.dictionary.to_pylist()
    named = tuple(classes) or in_order(theirs, order, where)
    number = {name: number for number, name in enumerate(named)}
    if unknown := [place for place, name in enumerate(theirs) if name not in number]:
        first = encoded.indices.index(unknown[0]).as_py()
        row = first if parents is None else int(parents[first])
        raise SourceError(
            f"{where}: the label of {printable(keys[row])} is "
            f"{printable(theirs[unknown[0]][:60])!r}, which is not among its classes: "
            f"{quoted(named, 10)}"
        )
    codes = np.array([*(number[name] for name in theirs), -1], np.int64)
    numbers: np.ndarray = codes[numbers_of(encoded.indices.fill_null(len(theirs)))]
    if parents is None:
        return numbers, named
    return _multi_hot(len(labels), parents, numbers, len(named), where), named


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


def _class_numbers(labels: Any, classes: Sequence[str], where: str) -> np.ndarray:
    numbers = numbers_of(labels.fill_null(-1))
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < -1 or (classes and highest >= len(classes)):
        raise SourceError(
            f"{where} has the class number {lowest if lowest < -1 else highest}; class numbers "
            "go from -1 (no label) up"
            + (f" to {len(classes) - 1}, as it names {len(classes)} classes" if classes else "")
        )
    return numbers


def _values(labels: Any, keys: Sequence[str], where: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        values: np.ndarray = numbers_of(labels.fill_null(math.nan)).astype(np.float32)
    wrong = np.flatnonzero(np.isinf(values))
    if len(wrong):
        raise SourceError(
            f"{where}: the label of {printable(keys[int(wrong[0])])} is {labels[int(wrong[0])]}, "
            "which is no finite float32"
        )
    return values


def _several_numbers(
    labels: Any, classes: Sequence[str], keys: Sequence[str], where: str
) -> np.ndarray:
    import pyarrow.compute as pc

    parents = numbers_of(pc.list_parent_indices(labels))
    numbers = numbers_of(labels.flatten()).astype(np.int64)
    if count := _vector_length(labels):
        of_class = np.arange(len(numbers)) % count
        parents, numbers = parents[numbers == 1], of_class[numbers == 1]
    else:
        count = len(classes) or 1 + int(numbers.max())
    if classes and count != len(classes):
        raise SourceError(f"{where} has labels of {count} classes, and names {len(classes)}")
    wrong = np.flatnonzero((numbers < 0) | (numbers >= min(count, MOST_CLASSES)))
    if len(wrong):
        named = f"; it names {len(classes)} classes" if classes else ""
        raise SourceError(
            f"{where}: the label of {printable(keys[int(parents[wrong[0]])])} has the class number "
            f"{numbers[wrong[0]]}; {_RANGE}{named}"
        )
    return _multi_hot(len(labels), parents, numbers, count, where)


def _vector_length(labels: Any) -> int:
    """Return the length of lists that are all multi-hot vectors; 0 if they have class numbers."""
    import pyarrow.compute as pc

    lengths = {*pc.unique(pc.list_value_length(labels)).to_pylist()} - {0, None}
    numbers = numbers_of(labels.flatten()).astype(np.int64)
    are_binary = bool(((numbers == 0) | (numbers == 1)).all())
    return max(lengths) if are_binary and len(lengths) == 1 and 1 not in lengths else 0


def _multi_hot(
    count: int, rows: np.ndarray, numbers: np.ndarray, classes: int, where: str
) -> np.ndarray:
    nbytes = count * classes
    if classes > MOST_CLASSES or nbytes > MOST_LABEL_NBYTES:
        raise SourceError(
            f"{where} has labels of {classes:,} classes, which take {size(nbytes)} as multi-hot; "
            f"up to {MOST_CLASSES:,} classes and {size(MOST_LABEL_NBYTES)} are allowed"
        )
    labels = np.zeros((count, classes), np.uint8)
    labels[rows, numbers] = 1
    return labels
