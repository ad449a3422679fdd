"""The reading of labels: the user's, else the one that they plainly have.

A column has few readings: names of classes, class numbers, values, several classes joined by a
mark, lists, and columns of 0 and 1. It is read as one of them if it plainly is that one; anything
else is one doubt, which a build refuses, and each reading that fits is tried and offered.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precache.errors import SourceError
from precache.messages import printable
from precache.store.columns import arrow_of, filled, numbers_of
from precache_workers.sources.base import Doubt, Way, no_label, quoted
from precache_workers.sources.labels import (
    INTEGER,
    Column,
    Kind,
    Label,
    are_bits,
    as_number,
    column_of,
    encode,
    is_nothing,
    label_of,
    number_of,
    numbers_out_of_order,
    vector_length,
)

FEWEST_TEXTS = 20
"""Fewest texts that differ in nearly every sample, and so may be no classes."""

_MOST_DIGITS = 18
"""Of a class number; longer ones may not fit int64."""

_MOST_SHOWN = 60
"""Characters of a label in a message."""

_NAME = re.compile(
    r"(?!.*'.*'(?:[,)]|$))(?:[<>]=? ?)?"
    r"(?:[\w .,'&+#!%/)-]|:(?!\d)|(?<![A-Za-z0-9])\(|[^\x00-\x7f])+"
    r"|[<\[]\w+[>\]]"
)
"""Names of classes, if they have a letter: no calls, quotes, lists, assignments or times."""
_GROUP = re.compile(r"(?:[<>]=? ?|[~#])?\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)?\+?")
"""Names of classes without a letter, such as ``20-29`` and ``60+``."""
_TRUTH = re.compile("true|false|yes|no", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}(\.0*)?")
_LIST = re.compile(r"\[.*\]|\(\s*['\"\d].*,.*\)", re.DOTALL)
"""Lists and tuples as Python and NumPy write them."""
_SEPARATORS = ("|", ";", ",", "/", "+", "&", ":", " and ", "\t", " ")

_PLAIN: Way = (), 'write plain names or numbers, or lists such as ["cat", "dog"]'


class Unclear(NamedTuple):
    """Labels that are not plainly of one reading, and why.

    Attributes
    ----------
    words
        Those that may stand for no label.
    by_classes
        As of `Doubt`.
    mark
        Text that seems to join several classes; empty for none.
    """

    some: Sequence[str]
    why: str
    words: Sequence[str] = ()
    by_classes: bool = False
    mark: str = ""


Read = tuple[Column, Unclear | None]


# --- plain readings -----------------------------------------------------------------------------


def _is_name(text: str) -> bool:
    """Return True for text that is plainly the name of a class."""
    if len(text) == 1 or _GROUP.fullmatch(text):
        return True
    has_letter = any(letter.isalpha() or unicodedata.category(letter) == "So" for letter in text)
    return has_letter and _NAME.fullmatch(text) is not None


def _all_differ(c: Column) -> bool:
    """Return True if labels differ in nearly every sample, and so may be no classes."""
    samples = len(c.values) - c.values.null_count
    return len(c.texts) >= FEWEST_TEXTS and 10 * len(c.texts) > 9 * samples


def _unclear_names(c: Column, mark: str) -> list[Unclear]:
    words = c.words
    beside = words if len(words) < len(c.given) else []
    one = beside if len(beside) == 1 and not c.typed else []
    is_truth = all(map(_TRUTH.fullmatch, beside))
    numbers = {text: number for text in c.given if (number := number_of(text)) is not None}
    alone = [*numbers.values()] == [0] and min(map(len, words), default=0) > 1
    low = [text for text, number in numbers.items() if words and (number < 0 or alone)]
    odd = [text for text in words if not _is_name(text)]
    if not (words or c.typed) and len({len(text) > _MOST_DIGITS for text in c.given}) > 1:
        odd = [max(c.given, key=len)]
    none = [*c.nothing, *one]
    return [
        Unclear(c.nothing, "are words for no value", none),
        Unclear([t for t in c.given if mark and mark in t], "seem to be several classes"),
        Unclear(odd, "are no plain names of classes", none),
        Unclear(beside if one or is_truth else [], "are words beside numbers", none),
        Unclear(low, "are numbers beside names", low),
        Unclear(c.given if _all_differ(c) else [], "differ in nearly every sample, as captions do"),
    ]


def _unclear_values(c: Column) -> list[Unclear]:
    count = len(c.values) - c.count_of(c.given)
    lacking = f", and {count:,} of {len(c.values):,} have none" if count else ""
    whole = all(float(text).is_integer() for text in c.given)
    why = f"are whole numbers with an exponent, or a fraction that is zero{lacking}"
    return [Unclear(c.given if whole else [], why)]


def _unclear_numbers(c: Column) -> list[Unclear]:
    zeros = [text for text in c.given if not _NUMBER.fullmatch(text)]
    below = [text for text in c.given if int(text) < -1]
    pair = numbers_out_of_order(sorted(filter(str.isdecimal, c.texts)))
    unclear = [
        Unclear(below, "are below -1", below if len(below) == 1 else ()),
        Unclear(c.given if {*map(int, c.given)} == {-1, 1} else [], "are 1 and -1"),
        Unclear(c.given if c.gets_names and _all_differ(c) else [], "nearly all differ"),
        Unclear(pair if c.gets_names else (), "are in another order as text", by_classes=True),
    ]
    return [Unclear(zeros, "have leading zeros"), *([] if c.classes else unclear)]


def _mark(texts: Collection[str]) -> str:
    """Return the text that seems to join several classes; empty for none."""
    return next((mark for mark in _SEPARATORS if _joins(texts, mark)), "")


def _joins(texts: Collection[str], mark: str) -> bool:
    """Return True if a mark seems to join classes: parts recur in several labels."""
    lists = [
        parts
        for text in texts
        if mark in text and len(parts := {part.strip() for part in text.split(mark)} - {""}) > 1
    ]
    if not lists or (mark == " " and any("(" in text for text in texts)):
        return False
    alone = [text for text in texts if mark not in text]
    if mark in "|;, " and all(map(INTEGER.fullmatch, [*alone, *set().union(*lists)])):
        return True
    counts = Counter(alone)
    counts.update(part for parts in lists for part in parts)
    parts = set().union(*lists)
    recurring = sum(counts[part] > 1 for part in parts)
    # These marks are rare in names, and others are not: "sea lion" is one class beside "lion".
    least = {"|": 0, ";": 1, ",": (len(parts) + 1) // 2}.get(mark, len(parts) // 2 + 1)
    return recurring >= least


def _notes_of_words(texts: Collection[str]) -> list[str]:
    """Return the line about labels of several words that recur, as of names or of classes."""
    counts = Counter(word for text in texts for word in {*text.split(" ")})
    some = [t for t in texts if " " in t and any(counts[word] > 1 for word in t.split(" "))]
    several = "--label-separator ' ': each word is a class"
    return [f"Labels such as {quoted(sorted(some))} are one class each ({several})"] if some else []


# --- the reading --------------------------------------------------------------------------------


def decide(column: Column) -> Column:
    """Read labels as the user says, else as they plainly are; with a doubt if they are unclear.

    Raises
    ------
    SourceError
        A label cannot be of the kind that the user names, or there is no list that fits all.
    """
    reading, unclear = _read(column)
    if unclear is None:
        return reading
    tried = [*_tried(column, reading, unclear)]
    ways = [(flags, given) for flags, given, _ in tried]
    some = quoted(text[:_MOST_SHOWN] for text in sorted(unclear.some))
    text = f"labels of {column.where} such as {some} {unclear.why}"
    doubt = Doubt.of(text, *ways, _PLAIN, by_classes=unclear.by_classes)
    decided = reading if unclear.by_classes or not tried else tried[0][2]
    return replace(decided, doubts=(doubt,))


def read_column(column: Column) -> Column:
    """Decide the reading of labels, and encode them; see `decide` and `labels.encode`."""
    return encode(decide(column))


def _tried(
    column: Column, reading: Column, unclear: Unclear
) -> Iterator[tuple[list[str], str, Column]]:
    """Yield the flags by which unclear labels are clear, what they give, and that reading."""
    is_text, rules = reading.kind == "names", column.rules
    kinds = ("number", "value", "name") if reading.kind == "values" else ("name", "number", "value")
    choices: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), {})]
    if "several" not in f"{column.kind} {reading.kind}":
        mark = unclear.mark.replace("\t", " ")
        choices += [(("--label-separator", mark), {"separator": mark})] if mark else []
        choices += [(("--label-kind", kind), {"kind": kind}) for kind in kinds]
    for words in dict.fromkeys((tuple(unclear.words), ())):
        for flags, chosen in choices:
            if not (words or chosen):
                continue
            # Beside numbers, a word for nothing would be a class.
            more = column.nothing if chosen.get("kind") == "name" and not is_text else ()
            none = *words, *more
            if "--" in none or not "".join(none).isprintable():  # argparse drops it
                continue
            given = replace(rules, none=(*rules.none, *none), **chosen)
            try:
                fitting, still_unclear = _read(replace(column, rules=given))
                encoded = encode(fitting)
            except SourceError:
                continue
            is_empty = fitting.values.null_count == len(column.values) and not column.classes
            if still_unclear or encoded.doubts or is_empty:
                continue
            yield [*no_label(none), *flags], _described(encoded), fitting
            if not chosen:
                break


def _described(encoded: Column) -> str:
    """Say what a reading gives."""
    labels, classes = encoded.values, encoded.classes
    if labels.dtype.kind == "f":
        return f"for numbers from {np.nanmin(labels):g} to {np.nanmax(labels):g}"
    several = "several of " if labels.ndim == 2 else ""
    if classes:
        many = "classes" if len(classes) > 1 else "class"
        return f"for {several}{len(classes):,} {many}, such as {quoted([classes[0][:_MOST_SHOWN]])}"
    if several:
        return f"for {several}{labels.shape[1]:,} class numbers"
    return f"for class numbers from {labels[labels >= 0].min()} to {labels.max()}"


def _read(column: Column) -> Read:
    """Return a reading of labels, and why it is not clear; None if it is, or the user's."""
    rules, classes = column.rules, column.classes
    if column.kind is None:
        column = replace(column, values=column.values.cast(pa.large_string()), typed=False)
    if is_several := "several" in str(column.kind):
        _require_no_kind(column)
    if are_bits(column.values):
        return _of_bits(column)
    if missing := rules.none if is_several else sorted({*rules.none} - {*column.texts}):
        raise SourceError(f"{column.where} has no label {quoted(missing)}; correct --no-label")
    if is_several:
        return _of_lists(column), None
    column = column.without(rules.none)
    chosen = rules.kind or rules.separator or rules.none
    if column.known and not chosen and {*column.texts} <= {*column.known}:
        return column.mapped(column.texts), None
    if column.kind == "names" and not column.typed:
        lists, unclear = _with_lists(column)
        if lists.kind != "names":
            _require_no_kind(column)
            return _of_lists(lists), unclear
        column = lists
    kind = _plain_kind(column)
    if rules.separator:
        return _separated(column, rules.separator), None
    if rules.kind and not (classes and rules.kind != "value" and kind != "values"):
        return _without_minus(_converted(column, rules.kind)), None
    if column.folders or (classes and kind == "names"):
        return column, None
    if kind == "names":
        mark = _mark(column.given)
        unclear = _first(_unclear_names(column, mark))
        notes = () if mark else _notes_of_words(column.given)
        column = replace(column, notes=(*column.notes, *notes))
        return column, unclear and unclear._replace(mark=mark)
    return _numeric(column, kind)


def _first(unclear: Sequence[Unclear]) -> Unclear | None:
    return next((one for one in unclear if one.some), None)


def _plain_kind(column: Column) -> Kind | None:
    """Return the kind of labels by their type, else by their texts; None if these are nothing."""
    texts = column.given
    if column.kind != "names" or column.typed:
        return column.kind
    identifiers = all(map(str.isdecimal, texts)) and max(map(len, texts), default=0) > _MOST_DIGITS
    if identifiers or None in map(number_of, texts):
        return "names"
    return ("numbers" if all(map(INTEGER.fullmatch, texts)) else "values") if texts else None


def _numeric(column: Column, kind: Kind | None) -> Read:
    """Read labels as numbers of a kind: words for nothing are none."""
    notes = [*column.notes]
    if nothing := column.nothing:
        count = column.count_of(nothing)
        notes.append(f"{count:,} labels that are {quoted(nothing)} are taken as none")
    # A column of class numbers with a blank cell is often written so.
    if column.is_file and kind == "values" and all(map(_WHOLE.fullmatch, column.given)):
        kind = "numbers"
        column = column.as_numbers(kind)
    unclear = _unclear_values(column) if kind == "values" else []
    if kind == "numbers":
        unclear = _unclear_numbers(column)
        if _all_differ(column) and not (column.gets_names or column.classes):
            notes.append(
                "Labels are whole numbers that nearly all differ, and are taken as class numbers "
                "(--label-kind value: for a regression)"
            )
    column = replace(column.as_numbers(kind), notes=(*notes,))
    column = column if column.classes else _without_minus(column)
    if column.is_file and not column.gets_names and kind == "numbers":
        column = replace(column, values=column.values.cast(pa.large_string()))
    return column, _first(unclear)


def _list_of(text: str) -> Any:
    """Parse a JSON list; returns None for any other text."""
    try:
        return json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None


def _with_lists(column: Column) -> Read:
    """Return texts of which some are JSON lists as a column of lists: each other one is a class.

    Where only empty ones are, these are no label, and there is no column of lists.

    Raises
    ------
    SourceError
        A list is invalid, or the labels have kinds that cannot be combined.
    """
    lists = {text: parsed for text in column.texts if (parsed := _list_of(text)) is not None}
    if not any(lists.values()):
        return column.mapped([None if text in lists else text for text in column.texts]), None
    labels: list[Label | None] = []
    for number, text in enumerate(column.texts):
        alone = int(text) if INTEGER.fullmatch(text) else text
        try:
            labels.append(label_of(lists.get(text, alone)))
        except ValueError as reason:
            raise column.error(column.row(number), reason) from None
    values = column_of(labels, f"labels of {column.where}")
    beside = [text for text in column.texts if text not in lists]
    odd = [text for text in beside if is_nothing(text) or not _is_name(text)]
    unclear = Unclear(odd, "are beside lists", [*filter(is_nothing, odd)])
    return column.taking(values), _first([unclear])


def _require_no_kind(column: Column) -> None:
    if column.rules.kind or column.rules.separator:
        raise SourceError(
            f"{column.where} has lists of classes as labels; leave out --label-kind and "
            "--label-separator"
        )


def _of_lists(column: Column) -> Column:
    """Return lists of classes with the line about those of numbers."""
    if column.kind != "several numbers":
        return column
    listed = "class numbers, as not all are equally long lists of 0 and 1"
    if length := vector_length(column.values):
        names = 'if they are class numbers, write them as names (["0", "1"])'
        listed = f"{length} values that are 0 or 1, one for each class; {names}"
    return replace(column, notes=(*column.notes, f"labels of {column.where} are lists of {listed}"))


def _of_bits(column: Column) -> Read:
    """Read the cells of columns that are a class each: classes if each row has one, else lists.

    Blank cells count as 0, and so does -1 if no cell is 0, or where the user says so. In a file of
    labels rows may have no class.
    """
    values, classes = column.values, column.classes
    cells, notes, unclear = values.flatten(), [*column.notes], None
    some, different = quoted(classes), {*cells.unique().to_pylist()}
    if {-1, 0} <= different and not {"-1", "-1.0"} & {*column.rules.none}:
        unclear = Unclear(["-1"], f"are beside 0 and 1 in the columns {some}", ["-1"])
    if -1 in different:
        notes.append(f"In the columns {some}, -1 counts as 0")
    if cells.null_count:
        notes.append(f"In the columns {some}, {cells.null_count:,} blank cells count as 0")
    bits = np.zeros((len(values), len(classes)), np.bool_)
    ones = numbers_of(cells.fill_null(0)) == 1
    bits[numbers_of(values.is_valid())] = ones.reshape(-1, len(classes))
    counts = bits.sum(axis=1)
    if alone := bool(counts.max() <= 1 and (column.is_file or counts.min() == 1)):
        of_rows = pa.array(bits.argmax(axis=1), mask=counts == 0)
        values = pa.array(classes, pa.large_string()).take(of_rows)
    else:
        ends = pa.array(np.arange(len(bits) + 1) * len(classes))
        values = pa.LargeListArray.from_arrays(ends, pa.array(bits.ravel()))
    each = "one class" if alone else "several classes or none"
    notes.append(f"Labels from columns of 0 and 1, a class each: rows have {each}")
    return replace(column, values=values, notes=(*notes,)), unclear


def _without_minus(column: Column) -> Column:
    """Take class numbers that are -1 as none, with a line that counts them."""
    is_minus = filled(column.values, 0) == -1 if column.kind == "numbers" else np.array([])
    if not (count := int(is_minus.sum())):
        return column
    note = f"{count:,} labels that are -1 are taken as none (--label-kind name)"
    values = pc.if_else(arrow_of(is_minus), None, column.values)
    return replace(column, values=values, notes=(*column.notes, note))


def _separated(column: Column, separator: str) -> Column:
    """Read texts of several classes each."""
    mark = separator.strip() or None  # None: any white space
    if mark is not None and mark[0].isalpha():  # a word
        mark = separator
    lists = list[list[str]]()
    for number, text in enumerate(column.texts):
        if _LIST.fullmatch(text):
            why = 'which is no list in JSON; write [1, 5] or ["cat", "dog"]'
            raise column.error(column.row(number), f"is {printable(text[:_MOST_SHOWN])}, {why}")
        lists.append([part.strip() for part in text.split(mark) if part.strip()])
    if all(INTEGER.fullmatch(part) for parts in lists for part in parts):
        return column.mapped([[*map(int, parts)] or None for parts in lists], "several numbers")
    return column.mapped([parts or None for parts in lists], "several names")


def _converted(column: Column, chosen: str) -> Column:
    """Read labels as the kind that the user chose."""
    if chosen == "name":
        return column.mapped(column.texts, "names" if column.texts else None)
    kind: Kind = "numbers" if chosen == "number" else "values"
    needs = "a whole number below 2**63" if kind == "numbers" else "a number"
    labels = list[Label | None]()
    for number, (label, text) in enumerate(zip(column.labels, column.texts, strict=True)):
        value = math.nan if is_nothing(text) else number_of(text)
        is_none = value is not None and math.isnan(value)
        is_whole = value is not None and value.is_integer() and abs(value) < 1 << 63
        if value is None or (kind == "numbers" and not (is_none or is_whole)):
            shown = printable(text[:_MOST_SHOWN])
            what = f"is {shown!r}, and --label-kind {chosen} needs {needs}"
            raise column.error(column.row(number), f"{what}; correct it, or leave out --label-kind")
        labels.append(None if is_none else as_number(label, kind))
    return column.mapped(labels, kind)
