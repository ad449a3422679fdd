"""The reading of labels: the user's, else the one that the evidence leaves.

Text, and numbers too, can often be read in two ways that give other classes. A column is read once,
by `decide`: as its type, the user's flags and the source tell, and what is then open is settled by
the rules of its kind, `OF_NAMES` to `OF_BITS`. Each says a line or is a doubt, which a build
refuses.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from precache.errors import SourceError
from precache.messages import printable
from precache.store.columns import numbers_of
from precache_workers.sources.evidence import Rule, Rules, Way, no_label, quoted, weighed
from precache_workers.sources.label_readings import INTEGER, numbers_out_of_order, spelling
from precache_workers.sources.labels import (
    Column,
    Kind,
    Label,
    as_number,
    column_of,
    encode,
    is_nothing,
    label_of,
    number_of,
)

NAME, NUMBER, VALUE = (("--label-kind", kind) for kind in ("name", "number", "value"))

_MOST_DIGITS = 18
"""Of a class number; longer ones may not fit int64."""

_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_EXPONENT = re.compile(r"[0-9]+[eE][0-9]+")
_NO_WORD = re.compile(
    r"(?=.*\d)(?=.*(?:[ ,;|%$€£¥:]|[-/.]\d+[-/.]))(?:-?\d+ days? )?"
    r"(?:[-+.,:;/|%$€£¥ \d]|(?<=\d)(?:[Te](?=[-\d])|Z))+(?: ?[AaPp]\.?[Mm]\.?)?"
)
"""Amounts, dates and times, several numbers, and numbers with a decimal comma."""
_TRUTH = re.compile("true|false|yes|no", re.IGNORECASE)
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}(\.0*)?")
_LIST = re.compile(
    r"\[\s*(['\"\d.+\-\[]|True\b|False\b|[^\]]*,).*\]|\(\s*['\"\d.+\-].*,.*\)", re.DOTALL
)
"""Lists and tuples as Python, NumPy and YAML write them."""


# --- the rules ----------------------------------------------------------------------------------


def _whole(c: Column) -> Sequence[str]:
    """Return numbers with a fraction if they are all whole."""
    return c.given if all(float(text).is_integer() for text in c.given) else ()


def _below(c: Column) -> Sequence[str]:
    """Return whole numbers that are no class numbers, where the source lists no classes."""
    return [str(n) for n in sorted(map(int, c.given)) if n < -1 and not c.classes]


def _too_long(c: Column) -> Sequence[str]:
    """Return a number that is too long for one of a class, beside others, and its sample."""
    texts, is_long = c.given, [len(text) > _MOST_DIGITS for text in c.given]
    if c.typed or all(is_long) or not any(is_long) or not all(map(str.isdecimal, texts)):
        return ()
    one = texts[is_long.index(True)]
    return one, c.keys[c.row(c.texts.index(one))]


def _odd(c: Column) -> Sequence[str]:
    """Return texts that are hardly names of classes: some if any, others only if all words are."""
    if odd := sorted(text for text in c.given if text[0] + text[-1] == "{}" or "\n" in text):
        return odd
    truth = len(c.words) < len(c.given) and all(map(_TRUTH.fullmatch, c.words))
    return c.words if truth or all(map(_NO_WORD.fullmatch, c.words)) else ()


def _none(words: Sequence[str]) -> Way:
    return no_label(words), "if that stands for no label"


def _ways_of_nothing(c: Column) -> Sequence[Way]:
    """Return the ways out where words for no value stand beside names."""
    none = _none(c.nothing)
    if "--" in c.nothing:  # argparse drops it
        none = (), "write nothing in place of '--', if that stands for no label"
    if len({*map(spelling, c.nothing)}) < len(c.nothing):
        return [none, ((), "rename those that look alike, if they are classes")]
    return [none, (NAME, "if it is a class")]


def _separator(c: Column) -> Sequence[str]:
    """Return the flag of the text that joins classes; a space stands for a tab, too."""
    return "--label-separator", c.mark.replace("\t", " ")


def _ways_below(c: Column) -> Sequence[Way]:
    below = _below(c)
    none = [_none(below)] if len(below) == 1 else []
    return [_NUMBER_NAMES, *none, _REGRESSION]


_CODES: Way = NAME, "if they are codes, one class each"
_CLASSES: Way = NAME, "if each is the name of a class"
_NUMBER_NAMES: Way = NAME, "if each number is a class"
_NUMBERS: Way = NUMBER, "if they are class numbers"
_NO_MINUS: Way = NUMBER, "if -1 stands for no label"
_REGRESSION: Way = VALUE, "for a regression"
_PLAIN: Way = (), "plain names or numbers, or another column by --label-column"

OF_NAMES: Rules = [
    Rule(lambda c: c.nothing, "{of.blank:,} labels of {of.where} are {some}", _ways_of_nothing),
    [
        Rule(
            _too_long,
            "labels of {of.where} are whole numbers, and that of {shown[1]!r} is {shown[0]}, which "
            "is too large for the number of a class",
            [_NUMBER_NAMES, _REGRESSION],
        ),
        Rule(
            _odd,
            "labels of {of.where} such as {some} are objects, several lines, amounts, times or "
            "truth values, rather than names",
            lambda c: [
                *([(_separator(c), "if they are several classes")] * bool(c.mark)),
                _PLAIN,
                _CLASSES,
            ],
        ),
        Rule(
            lambda c: len(c.words) == 1 < len(c.given) and not (c.typed or c.mark) and c.words,
            "all labels of {of.where} are numbers but {some}",
            lambda c: [_none(c.words), _CLASSES],
        ),
        Rule(
            lambda c: c.mark and sorted(text for text in c.given if c.mark in text),
            "labels of {of.where} such as {some} seem to be several classes",
            lambda c: [(_separator(c), "if they are"), _CLASSES],
        ),
        Rule(
            lambda c: c.all_differ and sorted(c.given),
            "labels of {of.where} differ in nearly every sample ({count:,} texts, such as {one}), "
            "as captions do",
            [((), "another column by --label-column, or other labels"), _CLASSES],
        ),
    ],
]
OF_VALUES: Rules = [
    [
        Rule(
            lambda c: sorted(filter(_EXPONENT.fullmatch, _whole(c))),
            "labels of {of.where} such as {some} are codes, or have an exponent",
            [_CODES, _REGRESSION],
        ),
        Rule(
            lambda c: {*map(float, _whole(c))} == {-1, 1},
            "labels of {of.where} are 1 and -1 with a fraction that is zero",
            [_NUMBER_NAMES, _NO_MINUS, _REGRESSION],
        ),
        Rule(
            lambda c: sorted(_whole(c)),
            "labels of {of.where} are numbers with a fraction that is zero, such as {one}"
            "{of.lacking}, as a column of class numbers with a blank cell is often written",
            [_NUMBERS, _REGRESSION],
        ),
    ],
]
OF_NUMBERS: Rules = [
    [
        Rule(
            lambda c: sorted(filter(_LEADING_ZERO.fullmatch, c.given)),
            "labels of {of.where} have leading zeros, such as {some}",
            [_CODES, _NUMBERS],
        ),
        Rule(
            _below,
            "labels of {of.where} are whole numbers, and some are below -1, such as {shown[0]}",
            _ways_below,
        ),
        Rule(
            lambda c: {*map(int, c.given)} == {-1, 1} and not c.classes,
            "labels of {of.where} are 1 and -1",
            [_NUMBER_NAMES, _NO_MINUS],
        ),
        Rule(
            lambda c: c.gets_names and c.all_differ and c.texts,
            "labels of {of.where} are {count:,} whole numbers that nearly all differ",
            [_REGRESSION, _NUMBERS],
        ),
        Rule(
            lambda c: c.gets_names and numbers_out_of_order(sorted(filter(str.isdecimal, c.texts))),
            "labels of {of.where} are numbers, and {shown[0]!r} is sorted before {shown[1]!r} as "
            "text, as names of class folders are",
            [_NUMBERS, (NAME, "to number them as class folders of these names")],
            by_classes=True,
        ),
    ],
    Rule(
        lambda c: c.all_differ and not (c.gets_names or c.classes),
        "Labels are whole numbers that nearly all differ, and are taken as class numbers "
        "(--label-kind value: for a regression)",
    ),
]
OF_ALL_NUMBERS: Rules = [
    Rule(lambda c: c.nothing, "{of.blank:,} labels that are {some} are taken as none")
]
OF_LISTS: Rules = [
    Rule(
        lambda c: c.beside,
        "some labels of {of.where} are {some}, beside lists",
        lambda c: [_none(c.beside), ((), '["NaN"] if it is a class')],
    ),
    Rule(
        lambda c: c.kind == "several numbers",
        "labels of {of.where} are lists of {of.listed}",
    ),
]
OF_BITS: Rules = [
    Rule(
        lambda c: {-1, 0} <= c.bits and not {"-1", "-1.0"} & {*c.rules.none} and c.classes,
        "the columns {some} of {of.where} have -1 beside 0 and 1",
        [(no_label(["-1"]), "if it counts as 0"), ((), "write 0 or 1")],
    ),
    Rule(lambda c: -1 in c.bits and c.classes, "In the columns {some}, -1 counts as 0"),
    Rule(
        lambda c: c.cells.null_count and c.classes,
        "In the columns {some}, {of.cells.null_count:,} blank cells count as 0",
    ),
]


def _weighed(column: Column, rules: Rules) -> Column:
    """Return a column with the lines and doubts of the evidence that it shows."""
    notes, doubts = weighed(column, rules)
    return replace(column, notes=(*column.notes, *notes), doubts=(*column.doubts, *doubts))


# --- the reading --------------------------------------------------------------------------------


def decide(column: Column) -> Column:
    """Find the one reading of labels: the user's, else the one that leaves no doubt.

    Raises
    ------
    SourceError
        A label cannot be of the kind that the user names, or there is no list that fits all.
    """
    import pyarrow as pa

    rules, classes = column.rules, column.classes
    if column.kind is None:
        column = replace(column, values=column.values.cast(pa.large_string()), typed=False)
    is_several = "several" in str(column.kind)
    missing = rules.none if is_several else sorted({*rules.none} - {*column.texts})
    if missing and not _are_bits(column.values):
        raise SourceError(f"{column.where} has no label {quoted(missing)}; correct --no-label")
    if is_several:
        return _of_lists(column)
    if rules.none:
        pairs = zip(column.labels, column.texts, strict=True)
        kept = [None if text in rules.none else label for label, text in pairs]
        column = column.mapped(kept, column.kind)
    chosen = rules.kind or rules.separator or rules.none
    if column.known and not chosen and {*column.texts} <= {*column.known}:
        return column.mapped(column.texts)
    kind, given = column.kind, column
    if kind == "names" and not column.typed:
        column = _with_lists(column)
        if column.kind != kind:
            return _of_lists(column)
        kind = _untyped_kind(column.given)
    if rules.separator:
        return _separated(column, rules.separator)
    if rules.kind and not (classes and rules.kind != "value"):
        return _without_minus(_converted(column, rules.kind))
    if column.folders or (classes and kind == "names"):
        return given
    if kind == "names":
        return _weighed(column, OF_NAMES)
    notes, _ = weighed(column, OF_ALL_NUMBERS)
    # A column of class numbers with a blank cell is often written so.
    if column.is_file and kind == "values" and all(map(_WHOLE.fullmatch, column.given)):
        kind = "numbers"
        column = column.as_numbers(kind)
    more, doubts = weighed(column, {"values": OF_VALUES, "numbers": OF_NUMBERS}.get(kind or "", []))
    if doubts and kind == "numbers" and _below(column):
        kind = "values"  # so that other doubts are found, and one refusal has them all
    said = (*column.notes, *notes, *more)
    column = replace(column.as_numbers(kind), notes=said, doubts=(*doubts,))
    column = column if classes else _without_minus(column)
    if column.is_file and not column.gets_names and kind == "numbers":
        return replace(column, values=column.values.cast(pa.large_string()))
    return column


def _untyped_kind(texts: Sequence[str]) -> Kind | None:
    """Return the kind of labels that are text without a type, and no lists; None for no text."""
    longest = max(map(len, texts), default=0)
    identifiers = all(map(str.isdecimal, texts)) and longest > _MOST_DIGITS
    if identifiers or None in map(number_of, texts):
        return "names"
    return ("numbers" if all(map(INTEGER.fullmatch, texts)) else "values") if texts else None


def _list_of(text: str) -> Any:
    """Parse a JSON list; returns None for any other text."""
    try:
        return json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None


def _with_lists(column: Column) -> Column:
    """Return texts of which some are JSON lists as a column of lists: each other one is a class.

    Where only empty ones are, these are no label, and there is no column of lists.

    Raises
    ------
    SourceError
        A list is invalid, or the labels have kinds that cannot be combined.
    """
    lists = {text: parsed for text in column.texts if (parsed := _list_of(text)) is not None}
    labels: list[Label | None] = []
    for number, text in enumerate(column.texts):
        if text not in lists and _LIST.fullmatch(text):
            why = 'which is no list in JSON; write [1, 5] or ["cat", "dog"]'
            raise column.error(column.row(number), f"is {printable(text[:60])}, {why}")
        alone = int(text) if lists and INTEGER.fullmatch(text) else text
        try:
            labels.append(label_of(lists.get(text, alone)))
        except ValueError as reason:
            raise column.error(column.row(number), reason) from None
    if not lists:
        return column
    if not any(lists.values()):
        return column.mapped([None if text in lists else text for text in column.texts])
    values = column_of(labels, f"labels of {column.where}")
    words = [text for text in column.texts if is_nothing(text)]
    return replace(column.taking(values), beside=words)


def _of_lists(column: Column) -> Column:
    """Read lists of classes, or the cells of columns that are a class each."""
    if column.rules.kind or column.rules.separator:
        raise SourceError(
            f"{column.where} has lists of classes as labels; leave out --label-kind and "
            "--label-separator"
        )
    return _of_bits(column) if _are_bits(column.values) else _weighed(column, OF_LISTS)


def _are_bits(values: Any) -> bool:
    """Return True for lists of the cells of several columns, one for each class."""
    import pyarrow as pa

    return bool(pa.types.is_large_list(values.type) and values.type.value_type == pa.int8())


def _of_bits(column: Column) -> Column:
    """Read the cells of columns that are a class each: classes if each row has one, else lists.

    Blank cells count as 0, and so does -1 if no cell is 0, or where the user says so. In a file of
    labels rows may have no class.
    """
    import pyarrow as pa

    column, values, classes = _weighed(column, OF_BITS), column.values, column.classes
    bits = np.zeros((len(values), len(classes)), np.bool_)
    ones = numbers_of(column.cells.fill_null(0)) == 1
    bits[numbers_of(values.is_valid())] = ones.reshape(-1, len(classes))
    counts = bits.sum(axis=1)
    if alone := bool(counts.max() <= 1 and (column.is_file or counts.min() == 1)):
        of_rows = pa.array(bits.argmax(axis=1), mask=counts == 0)
        values = pa.array(classes, pa.large_string()).take(of_rows)
    else:
        ends = pa.array(np.arange(len(bits) + 1) * len(classes))
        values = pa.LargeListArray.from_arrays(ends, pa.array(bits.ravel()))
    each = "one class" if alone else "several classes or none"
    note = f"Labels from columns of 0 and 1, a class each: rows have {each}"
    return replace(column, values=values, notes=(*column.notes, note))


def _without_minus(column: Column) -> Column:
    """Take class numbers that are -1 as none, with a line that counts them."""
    import pyarrow.compute as pc

    is_minus = pc.equal(column.values, -1) if column.kind == "numbers" else None
    if is_minus is None or not (count := pc.sum(is_minus).as_py()):
        return column
    note = f"{count:,} labels that are -1 are taken as none (--label-kind name)"
    values = pc.if_else(is_minus, None, column.values)
    return replace(column, values=values, notes=(*column.notes, note))


def _separated(column: Column, separator: str) -> Column:
    """Read texts of several classes each."""
    mark = separator.strip() or None  # None: any white space
    if mark is not None and mark[0].isalpha():  # a word
        mark = separator
    lists = [[part.strip() for part in text.split(mark) if part.strip()] for text in column.texts]
    if all(INTEGER.fullmatch(part) for parts in lists for part in parts):
        return column.mapped([[*map(int, parts)] or None for parts in lists], "several numbers")
    return column.mapped([parts or None for parts in lists], "several names")


def _converted(column: Column, chosen: str) -> Column:
    """Read labels as the kind that the user chose."""
    if chosen == "name":
        return column.mapped(column.texts, "names" if column.texts else None)
    kind: Kind = "numbers" if chosen == "number" else "values"
    wanted = "a whole number" if kind == "numbers" else "a number"
    labels = list[Label | None]()
    for number, (label, text) in enumerate(zip(column.labels, column.texts, strict=True)):
        value = math.nan if is_nothing(text) else number_of(text)
        is_none = value is not None and math.isnan(value)
        is_large = kind == "numbers" and 1 << 63 <= abs(value or 0) < math.inf
        if value is None or (kind == "numbers" and not (is_none or value.is_integer())) or is_large:
            needs = f"{wanted} below 2**63" if is_large else wanted
            what = f"is {printable(text[:60])!r}, and --label-kind {chosen} needs {needs}; correct"
            raise column.error(column.row(number), f"{what} it, or leave out --label-kind")
        labels.append(None if is_none else as_number(label, kind))
    return column.mapped(labels, kind)


def read_column(column: Column) -> Column:
    """Decide the reading of labels, and encode them; see `decide` and `labels.encode`."""
    return encode(decide(column))
