"""Labels of a source as a column of Arrow, and its encoding for a row table.

A label is text, a whole number, a float, or a list of texts or whole numbers. Tables, archives,
records, files of labels, datasets and class folders all give an Arrow array of these, null for no
label. A `Column` is this with what is known of it; `label_evidence.decide` turns it into one of
classes by name or number, of values, or of several classes; `encode` into the array of a row table.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precache.errors import SourceError
from precache.messages import printable
from precache.store.columns import filled, numbers_of, numbers_or_nulls, texts_or_nulls
from precache.store.labels import MOST_CLASSES, MOST_LABEL_NBYTES
from precache.units import size
from precache_workers.sources.base import NO_RULES, Doubt, LabelRules, is_utf8, quoted

INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,18}")

LISTED = "list the names of all classes in a text file, one a line, and give it by --classes"
"""The way out by which the user says which classes there are."""

Kind = Literal["names", "numbers", "values", "several names", "several numbers"]
"""Class names or numbers, regression values, or lists of class names or numbers."""

Label = str | int | float | list[Any]
"""A label as a Python value."""

MOST_TEXT = 4096
"""Maximum characters of a key, path or label; maximum bytes of a file or value that is a label."""

BYTES_OF = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
"""Types of the bytes of texts."""

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
"""Characters of no text; those of white space stand between several lines and columns."""

_NOTHING = frozenset(
    (
        "nan", "-nan", "+nan", "null", "none", "na", "n/a", "n/d", "n.a.", "#n/a", "nil", "nat",
        "-", "--", "?", ".", "\\n", "#ref!", "#value!", "#div/0!", "#name?", "#null!", "#num!",
        "#n/a n/a", "#na", "1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan", "(blank)",
        "missing", "undefined", "not available", "no label", "no_label", "unlabeled", "unlabelled",
    )
)  # fmt: skip
"""Words for no value, as tables have them, in lower case; they may be in brackets, too."""

_IN_BRACKETS = re.compile(r"\((.+)\)|<(.+)>|\[(.+)\]")

_BITS = {"0": 0, "1": 1, "-1": -1, "false": 0, "true": 1}
"""Texts of cells in lower case; pandas writes columns of `get_dummies` as True and False."""

_JOINED: Mapping[frozenset[Kind], Kind] = {
    frozenset(("names", "several names")): "several names",
    frozenset(("numbers", "several numbers")): "several numbers",
    frozenset(("numbers", "values")): "values",
}
"""Kinds of labels that may occur together in a source -> their common kind."""

_RANGE = f"those of several classes are from 0 to {MOST_CLASSES - 1:,}"


# --- columns ------------------------------------------------------------------------------------


def is_binary(kind: Any) -> bool:
    """Return True for an Arrow type of bytes."""
    return str(kind) in BYTES_OF.values()


def is_list(kind: Any) -> bool:
    """Return True for an Arrow type of lists, of one length or of several."""
    types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_type(kind) for is_type in types)


def kind_of(type_: Any) -> Kind | None:
    """Return the kind of labels in a column of an Arrow type; None if it cannot hold labels."""
    if pa.types.is_integer(type_) or pa.types.is_boolean(type_):
        return "numbers"
    if pa.types.is_floating(type_):
        return "values"
    if is_list(type_):
        inner = kind_of(type_.value_type)
        return "several names" if inner == "names" else inner and "several numbers"
    if pa.types.is_dictionary(type_):
        return "names" if kind_of(type_.value_type) == "names" else None
    return "names" if str(type_) in BYTES_OF else None


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


def _kind_of(label: Label) -> Kind:
    if isinstance(label, list):
        return "several names" if isinstance(label[0], str) else "several numbers"
    return "names" if isinstance(label, str) else "values" if type(label) is float else "numbers"


def column_of(labels: Sequence[Label | None], where: str = "labels", *, typed: bool = True) -> Any:
    """Return labels as an Arrow array of the one type that fits all.

    Parameters
    ----------
    typed
        If not, numbers and lists beside text are text.

    Raises
    ------
    SourceError
        There is no such type.
    """
    found: dict[Kind, Label] = {}
    for label in labels:
        if label is not None:
            found.setdefault(_kind_of(label), label)
    if len(found) < 2:
        return array_of(labels, next(iter(found), None))
    joined = None if "names" in found and not typed else _JOINED.get(frozenset(found))
    if joined is None and typed:
        some = " and ".join(printable(str(found[kind])[:60]) for kind in sorted(found))
        kinds = " and ".join(sorted(found))
        raise SourceError(
            f"{where} are {kinds}, such as {some}; make them alike, or choose others by "
            "--label-column"
        )
    return array_of(labels, joined or "names")  # their text is read once all is known


def array_of(labels: Sequence[Label | None], kind: Kind | None) -> Any:
    """Return labels as an Arrow array of a kind that fits them; of nulls for None."""
    if kind is None:
        return pa.nulls(len(labels))
    if kind == "names":
        texts = [label if isinstance(label, str | None) else json.dumps(label) for label in labels]
        return texts_or_nulls(texts)
    if kind in ("numbers", "values"):
        return numbers_or_nulls(labels, np.int64 if kind == "numbers" else np.float64)
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
    values = array_of(labels, kind)
    return values if codes is None else values.take(codes)


def note_of_categories(batch: Any, labels: Sequence[str]) -> list[str]:
    """Return the line about a column of labels whose type orders its names otherwise than as text.

    Parameters
    ----------
    batch
        Rows of a table with types; None for those of another.
    """
    column = batch.column(labels[0]) if batch is not None and len(labels) == 1 else None
    if column is None or not pa.types.is_dictionary(column.type) or not column.type.ordered:
        return []
    names = values_of(column.dictionary)
    if kind_of(column.type) != "names" or names == sorted(names):
        return []
    order = f"The categories of the column {labels[0]!r} are ordered: {quoted(names)}"
    return [f"{order}; classes are numbered by name, or as the file of --classes lists them"]


def texts_of_labels(column: Any) -> list[str]:
    """Return labels as text, to be compared; empty for none."""
    return ["" if label is None else str(label) for label in column.to_pylist()]


def join_columns(columns: Sequence[Any], where: str, *, typed: bool = True) -> Any:
    """Return columns of labels as one, as `column_of` does."""
    types = {column.type for column in columns if kind_of(column.type) is not None}
    if len(types) <= 1:
        return pa.concat_arrays([column.cast(*types) for column in columns] if types else columns)
    return column_of(
        [label for column in columns for label in column.to_pylist()], where, typed=typed
    )


def is_blank(value: object) -> bool:
    """Return True for a cell without a value."""
    return value is None or value != value or not str(value).strip()


def bit_of(value: object) -> int | None:
    """Return 0, 1 or -1 for a cell of a column that may be a class; None for any other value."""
    if isinstance(value, str):
        return _BITS.get(value.strip().lower().removesuffix(".0"))
    return int(value) if isinstance(value, int | float) and value in (-1, 0, 1) else None


def bits_column(rows: Iterable[Sequence[int | None]]) -> Any:
    """Return the cells of columns that are a class each, by row, as one column of lists."""
    return pa.array(rows, pa.large_list(pa.int8()))


def are_bits(values: Any) -> bool:
    """Return True for lists of the cells of several columns, one for each class."""
    return bool(pa.types.is_large_list(values.type) and values.type.value_type == pa.int8())


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


# --- a column -----------------------------------------------------------------------------------


def is_nothing(text: str) -> bool:
    """Return True for a word that may stand for no value, such as ``NaN``."""
    word = text.lower()
    return word in _NOTHING or _IN_BRACKETS.sub(r"\1\2\3", word) in _NOTHING


def number_of(text: str) -> float | None:
    """Return the number that a text is; None for another text, and for ``1_000`` of Python."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Column:
    """The labels of a source, with what is known of them, and of their reading.

    Attributes
    ----------
    values
        Labels as an Arrow array, as of `column_of`; once encoded, as a row table has them.
    keys, where
        The keys of their samples, and the source.
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
    notes, doubts
        Lines about the reading, and doubts about others.
    """

    values: Any
    keys: Sequence[str]
    where: str
    rules: LabelRules = NO_RULES
    classes: tuple[str, ...] = ()
    typed: bool = True
    folders: bool = False
    known: Collection[str] = ()
    is_file: bool = False
    notes: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    @property
    def kind(self) -> Kind | None:
        """Kind of the labels by their type; None if there are none."""
        return kind_of(self.values.type)

    @cached_property
    def _encoded(self) -> Any:
        return self.values.dictionary_encode()

    @cached_property
    def labels(self) -> list[Label]:
        """The different labels, of one for each sample."""
        labels: list[Label] = self._encoded.dictionary.to_pylist()
        return labels

    @cached_property
    def texts(self) -> list[str]:
        """The different labels as text."""
        return [*map(str, self.labels)]

    @cached_property
    def nothing(self) -> list[str]:
        """The labels that are words for no value, sorted."""
        return sorted(filter(is_nothing, self.texts))

    @cached_property
    def given(self) -> list[str]:
        """The other labels."""
        return [*itertools.filterfalse(is_nothing, self.texts)]

    @cached_property
    def words(self) -> list[str]:
        """Those that are no numbers, sorted."""
        return sorted(text for text in self.given if number_of(text) is None)

    @cached_property
    def gets_names(self) -> bool:
        """True if class numbers of a file get names, which known classes do not have."""
        are_names = bool(self.known) and all(map(INTEGER.fullmatch, self.known))
        return self.is_file and not are_names

    def count_of(self, texts: Collection[str]) -> int:
        """Return the number of samples that have one of some labels."""
        codes, wanted = numbers_of(self._encoded.indices.drop_null()), {*texts}
        counts = np.bincount(codes, minlength=len(self.texts)).tolist()
        return sum(n for n, text in zip(counts, self.texts, strict=True) if text in wanted)

    def row(self, number: int) -> int:
        """Return the first row of one of the different labels, by its number."""
        return int(self._encoded.indices.index(number).as_py())

    def error(self, row: int, what: object) -> SourceError:
        """Return the error of a label."""
        return SourceError(f"{self.where}: the label of {printable(self.keys[row])} {what}")

    def mapped(self, labels: Sequence[Label | None], kind: Kind | None = "names") -> Column:
        """Return the column with others in place of its different labels."""
        return self.taking(array_of(labels, kind))

    def taking(self, labels: Any) -> Column:
        """Return the column with an Arrow array of others in place of its different labels."""
        return replace(self, values=labels.take(self._encoded.indices))

    def without(self, none: Collection[str]) -> Column:
        """Return the column without labels that stand for none."""
        if not none:
            return self
        pairs = zip(self.labels, self.texts, strict=True)
        return self.mapped([None if text in none else label for label, text in pairs], self.kind)

    def as_numbers(self, kind: Kind | None) -> Column:
        """Return the column with numbers of a kind; words for no value are none."""
        return self.mapped([as_number(label, kind) for label in self.labels], kind)


def as_number(label: Label, kind: Kind | None) -> int | float | None:
    """Return a label as a number of a kind; None for a word for no value."""
    if kind is None or (isinstance(label, str) and is_nothing(label)):
        return None
    if kind == "values":
        return float(label)  # type: ignore[arg-type]
    # Not by way of a float, which is not exact.
    whole = isinstance(label, int) or (isinstance(label, str) and INTEGER.fullmatch(label))
    return int(label) if whole else int(float(label))  # type: ignore[arg-type]


# --- arrays -------------------------------------------------------------------------------------


def encode(column: Column) -> Column:
    """Encode labels of one reading as the array of a row table, with the names of all classes.

    Raises
    ------
    SourceError
        A label is invalid or out of range, or there are too many classes.
    """
    values, names = _encoded(column)
    if wrong := [name for name in names if not is_utf8(name)]:
        raise SourceError(f"{column.where} has the class {printable(wrong[0])}, which is not UTF-8")
    notes, doubts = column.notes, column.doubts
    if not column.classes:
        are_names = column.rules.kind == "name"
        notes = (*notes, *note_of_order(names))
        if not doubts:
            clear = [n for n in names if are_names or not is_nothing(n)]  # others are in doubt
            doubts = (*doubts_of_classes(clear, column.where, are_codes=are_names),)
    return replace(column, values=values, classes=names, notes=notes, doubts=doubts)


def _encoded(column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    labels, kind, classes = column.values, column.kind, column.classes
    count = len(labels)
    if kind is None or ("several" in kind and not classes and labels.null_count == count):
        return np.full(count, -1, np.int64), classes
    if kind == "numbers":
        return _class_numbers(column), classes
    if kind == "values":
        return _float32(column), ()
    if kind == "several numbers":
        return _several_numbers(column), classes
    parents = numbers_of(pc.list_parent_indices(labels)) if kind == "several names" else None
    encoded = (labels if parents is None else labels.flatten()).dictionary_encode()
    theirs: list[str] = encoded.dictionary.to_pylist()
    named = classes or in_order(theirs, column.rules.order)
    number = {name: number for number, name in enumerate(named)}
    binary = [n for n, name in enumerate(theirs) if not column.folders and _CONTROL.search(name)]
    unknown = binary or [place for place, name in enumerate(theirs) if name not in number]
    if unknown:
        first = encoded.indices.index(unknown[0]).as_py()
        text = theirs[unknown[0]][:60]
        what = f"is {text!r}, which is not among its classes: {quoted(named, 10)}"
        if binary:
            what = f"is {text!r}, which seems to be binary; write numbers and names as text"
        raise column.error(first if parents is None else int(parents[first]), what)
    codes = np.array([*(number[name] for name in theirs), -1], np.int64)
    places = encoded.indices
    numbers: np.ndarray = codes[np.where(numbers_of(places.is_valid()), numbers_of(places), -1)]
    if parents is None:
        return numbers, named
    return _multi_hot(column, parents, numbers, len(named)), named


def in_order(names: Iterable[str], order: Literal["text", "number"]) -> tuple[str, ...]:
    """Sort names of classes as text, or by the numbers in them."""
    ordered = sorted(names)
    return tuple(sorted(ordered, key=by_number) if order == "number" else ordered)


def names_by_number(numbered: Mapping[Any, Any]) -> list[Any] | None:
    """Return names by number, of a map of either to the other; None unless it has 0 to n once."""
    numbers = range(len(numbered))
    if all(isinstance(value, int | np.integer) for value in numbered.values()):
        numbered = {number: name for name, number in numbered.items()}
    names = {int(key) if str(key).isdecimal() else -1: name for key, name in numbered.items()}
    return [*map(names.get, numbers)] if {*names} == {*numbers} else None


def _class_numbers(column: Column) -> np.ndarray:
    classes, numbers = column.classes, filled(column.values, -1)
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < -1 or (classes and highest >= len(classes)):
        raise SourceError(
            f"{column.where} has the class number {lowest if lowest < -1 else highest}; class "
            "numbers go from -1 (no label) up"
            + (f" to {len(classes) - 1}, as it names {len(classes)} classes" if classes else "")
        )
    return numbers


def _float32(column: Column) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = filled(column.values, math.nan).astype(np.float32)
    if len(wrong := np.flatnonzero(np.isinf(values))):
        what = f"is {column.values[int(wrong[0])]}, which is no finite float32"
        raise column.error(int(wrong[0]), what)
    return values


def _several_numbers(column: Column) -> np.ndarray:
    labels, classes = column.values, column.classes
    parents = numbers_of(pc.list_parent_indices(labels))
    numbers = numbers_of(labels.flatten()).astype(np.int64)
    if count := vector_length(labels):
        of_class = np.arange(len(numbers)) % count
        parents, numbers = parents[numbers == 1], of_class[numbers == 1]
    else:
        count = len(classes) or 1 + int(numbers.max())
    if classes and count != len(classes):
        has = f"has labels of {count} classes, and names {len(classes)}"
        raise SourceError(f"{column.where} {has}")
    wrong = np.flatnonzero((numbers < 0) | (numbers >= min(count, MOST_CLASSES)))
    if len(wrong):
        named = f"; it names {len(classes)} classes" if classes else ""
        what = f"has the class number {numbers[wrong[0]]}; {_RANGE}{named}"
        raise column.error(int(parents[wrong[0]]), what)
    return _multi_hot(column, parents, numbers, count)


def vector_length(labels: Any) -> int:
    """Return the length of lists that are all multi-hot vectors; 0 if they have class numbers."""
    lengths = {*pc.unique(pc.list_value_length(labels)).to_pylist()} - {0, None}
    numbers = numbers_of(labels.flatten()).astype(np.int64)
    are_binary = bool(((numbers == 0) | (numbers == 1)).all())
    return max(lengths) if are_binary and len(lengths) == 1 and 1 not in lengths else 0


def _multi_hot(column: Column, rows: np.ndarray, numbers: np.ndarray, classes: int) -> np.ndarray:
    nbytes = len(column.values) * classes
    if classes > MOST_CLASSES or nbytes > MOST_LABEL_NBYTES:
        raise SourceError(
            f"{column.where} has labels of {classes:,} classes, which take {size(nbytes)} as "
            f"multi-hot; up to {MOST_CLASSES:,} classes and {size(MOST_LABEL_NBYTES)} are allowed"
        )
    labels = np.zeros((len(column.values), classes), np.uint8)
    labels[rows, numbers] = 1
    return labels


# --- names of classes ---------------------------------------------------------------------------

_COPY = re.compile(r"(?: ?\(\d+\)|(?: -)? copy(?: \d+)?)+$", re.IGNORECASE)
"""Ends of the names that systems give to copies of a folder."""

_QUOTED = re.compile(r"""(['"`])(.+)\1""", re.DOTALL)

_BETWEEN = re.compile(r"(?:[\s_\u2010-\u2015\u2212-]|(?<=[^\W\d_])\.)+")
"""Spaces, lines and dashes, and the point of an abbreviation."""

_LATIN = str.maketrans(
    "\u0410\u0412\u0415\u0405\u0406\u0408\u041a\u041c\u041d\u041e\u0420\u0421\u0422"
    "\u0425\u0423\u0430\u0435\u043e\u0455\u0456\u0458\u0440\u0441\u0445\u0443\u0391"
    "\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
    "\u03bf\u0501\u051b\u051d\u2018\u2019\u02bc\u00b4",
    "ABESIJKMHOPCTXYaeosijpcxyABEZHIKMNOPTYXodqw''''",
)
"""Letters of other scripts that look like Latin ones, and apostrophes."""


def spelling(name: str) -> str:
    """Return a text that is equal for names that look alike."""
    if INTEGER.fullmatch(name):
        return str(int(name))  # its sign counts
    if _DECIMAL.fullmatch(name):
        return repr(float(name))
    text = name
    if not name.isascii():
        text = unicodedata.normalize("NFKC", name)
        text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
        text = text.translate(_LATIN)
    text = " ".join(_BETWEEN.split(_COPY.sub("", text))).strip()
    text = _QUOTED.sub(r"\2", text).rstrip(",; ") or text
    return text.casefold() if len(text) > 1 else text


def doubts_of_classes(
    classes: Iterable[str], where: object, *, are_codes: bool = False
) -> list[Doubt]:
    """Return the doubt about names of classes that look alike.

    Parameters
    ----------
    are_codes
        Numbers are codes, in which each digit counts.
    """
    seen: dict[str, str] = {}
    for name in classes:
        number = INTEGER.fullmatch(name) is not None
        other = seen.setdefault(name if number and are_codes else spelling(name), name)
        if other != name:
            text = f"{where} has the classes {other!a} and {name!a}, which look alike"
            codes = ("--label-kind", "name"), "if they are codes, one class each"
            ways = [codes] if number else []
            return [Doubt.of(text, *ways, ((), "rename one"), ((), LISTED), by_classes=True)]
    return []


def by_number(name: str) -> list[Any]:
    """Sort key by which numbers in names count: frame-2 is before frame-10, and 0.25 before 0.5."""
    if _NUMBER.fullmatch(name):
        return ["", Decimal(name)]
    parts = re.split("([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


def numbers_out_of_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first two neighbours that are in the order of text, and not of their numbers;
    none if there are none."""
    pairs = pairwise(names)
    return next(((a, b) for a, b in pairs if a < b and by_number(a) > by_number(b)), ())


def note_of_order(
    classes: Sequence[str], way: str = "--class-order number: as numbers"
) -> list[str]:
    """Return the line about classes whose names are numbers in the order of text."""
    pair = numbers_out_of_order(classes)
    why = f"{pair[0]!r} comes before {pair[1]!r}" if pair else ""
    return [f"Names of classes are sorted as text: {why} ({way})"] if pair else []
