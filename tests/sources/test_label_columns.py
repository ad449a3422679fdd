"""Columns of labels: what is plainly of one reading, and the ways out of all else."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from precache.errors import SourceError
from precache_workers.sources import label_evidence
from precache_workers.sources.label_evidence import read_column
from precache_workers.sources.labels import LISTED, Column
from precache_workers.sources.listings import disagree
from precache_workers.sources.splits import splits_of
from precache_workers.sources.tables import Batch, read_labels
from tests.support.layouts import NAME, NUMBER, VALUE, label_of, rules_of


def read(labels: list[Any], flags: str = "", form: str = "", **known: Any) -> Column:
    """Read a column of a table: of one with types, of a file of labels, or of CSV."""
    is_typed = form == "typed"
    typed = pa.record_batch({"label": labels}) if is_typed else None
    values = read_labels(Batch(range(len(labels)), {"label": labels}, typed), ["label"], "it")
    keys = [f"k{number}" for number in range(len(labels))]
    column = Column(values, keys, "it", rules_of(flags), typed=is_typed, is_file=form == "file")
    return read_column(replace(column, **known))


def labels_in(column: Column) -> list[Any]:
    assert not column.doubts
    return [label_of(column.classes, label) for label in column.values]


Ways = dict[str, Any]
AS_THEY_ARE: dict[str, Callable[[Any], Any]] = {
    NAME: str, NUMBER: lambda label: int(float(label)), VALUE: float,
}  # fmt: skip
UNCLEAR: list[tuple[str, list[Any], str, Ways]] = [
    ("", ["0.0", "", "2.0"], "exponent", {NUMBER: ..., VALUE: ..., NAME: ...}),
    ("", ["1.0", "NaN", "10"], "exponent",
     {NUMBER: [1, None, 10], VALUE: [1.0, None, 10.0],
      "--no-label NaN --label-kind name": ["1.0", None, "10"]}),
    ("", ["1.0", "-1.0"], "exponent", {NUMBER: [1, None], VALUE: ..., NAME: ...}),
    ("", ["1E5", "2E3"], "exponent", {NUMBER: ..., VALUE: ..., NAME: ...}),
    ("", ["007", "010"], "zeros", {NAME: ..., NUMBER: ..., VALUE: ...}),
    ("", ["02134", "10001", ""], "zeros", {NAME: ..., NUMBER: ..., VALUE: ...}),
    ("", ["1", "-1", "1"], "are 1 and -1", {NAME: ..., NUMBER: [1, None, 1], VALUE: ...}),
    ("", ["+1", "-1", "+1"], "are 1 and -1", {NAME: ..., NUMBER: [1, None, 1], VALUE: ...}),
    ("", ["-99", "0", "1"], "below", {"--no-label=-99": [None, 0, 1], NAME: ..., VALUE: ...}),
    ("", ["-3", "-2", "1"], "below", {NAME: ..., VALUE: ...}),
    ("", ["0", "73786976294838206464", "1"], "no plain", {NAME: ..., VALUE: ...}),
    ("", ["cat", "NaN", "dog"], "for no value",
     {"--no-label NaN": ["cat", None, "dog"], NAME: ...}),
    ("", ["cat", "null", "N/A", "#DIV/0!", "n.a."], "for no value",
     {"--no-label '#DIV/0!' --no-label N/A --no-label n.a. --no-label null": ["cat"] + [None] * 4,
      NAME: ...}),
    ("", ["cat", "-nan", "Unlabeled", "(blank)", "missing"], "for no value",
     {"--no-label '(blank)' --no-label=-nan --no-label Unlabeled --no-label missing":
      ["cat"] + [None] * 4, NAME: ...}),
    ("", ["cat", "(null)", "<NA>", "#N/A N/A", "no label"], "for no value",
     {"--no-label '#N/A N/A' --no-label '(null)' --no-label '<NA>' --no-label 'no label'":
      ["cat"] + [None] * 4, NAME: ...}),
    ("", ["cat", "--", "dog"], "for no value", {NAME: ...}),
    ("", ["0", "1", "unknown"], "beside numbers",
     {"--no-label unknown": [0, 1, None], NAME: ...}),
    ("", ["0", "1", "unknown", "NaN"], "for no value",
     {"--no-label NaN --no-label unknown": [0, 1, None, None], NAME: ...}),
    ("", ["1_2", "1", "2"], "no plain", {"--no-label 1_2": [None, 1, 2], NAME: ...}),
    ("", ["0", "1", "True"], "beside numbers", {"--no-label True": [0, 1, None], NAME: ...}),
    ("", ["0", "1", "yes", "no"], "beside numbers", {NAME: ...}),
    ("", ["0", "cat", "dog"], "beside names", {"--no-label 0": [None, "cat", "dog"], NAME: ...}),
    ("", ["-1", "1", "4a", "4b"], "beside names",
     {"--no-label=-1": [None, "1", "4a", "4b"], NAME: ...}),
    ("", ["cat", ".", "dog"], "for no value",
     {"--no-label .": ["cat", None, "dog"], NAME: ...}),
    ("", ["a|b", "a"], "several", {"--label-separator '|'": [{"a", "b"}, {"a"}], NAME: ...}),
    ("", ["a|b", "c"], "several", {"--label-separator '|'": [{"a", "b"}, {"c"}], NAME: ...}),
    ("", ["a b", "b c", "a"], "several",
     {"--label-separator ' '": [{"a", "b"}, {"b", "c"}, {"a"}], NAME: ...}),
    ("", ["a, b", "b", ""], "several",
     {"--label-separator ,": [{"a", "b"}, {"b"}, set()], NAME: ...}),
    ("", ["cat;dog", "dog;eel"], "several",
     {"--label-separator ';'": [{"cat", "dog"}, {"dog", "eel"}], NAME: ...}),
    ("", ["1|2", "1", "2"], "several", {"--label-separator '|'": [{1, 2}, {1}, {2}], NAME: ...}),
    ("", ["0 3", "3", "0 1 3"], "several",
     {"--label-separator ' '": [{0, 3}, {3}, {0, 1, 3}], NAME: ...}),
    ("", ["1,000", "2,000", "500"], "several",
     {"--label-separator ,": [{0, 1}, {0, 2}, {500}], NAME: ...}),
    ("", ["cat\tdog", "dog", "cat"], "several",
     {"--label-separator ' '": [{"cat", "dog"}, {"dog"}, {"cat"}], NAME: ...}),
    ("", ["cat:dog", "dog", "cat"], "several",
     {"--label-separator :": [{"cat", "dog"}, {"dog"}, {"cat"}], NAME: ...}),
    ("", ["scab", "rust", "scab and rust"], "several",
     {"--label-separator ' and '": [{"scab"}, {"rust"}, {"rust", "scab"}], NAME: ...}),
    ("", ["a|b", "a", "NaN"], "for no value",
     {"--no-label NaN --label-separator '|'": [{"a", "b"}, {"a"}, set()],
      "--no-label NaN --label-kind name": ["a|b", "a", None],
      "--label-separator '|'": [{"a", "b"}, {"a"}, {"NaN"}], NAME: ...}),
    ("", ['["cat", "dog"]', "NaN"], "beside lists", {"--no-label NaN": [{"cat", "dog"}, set()]}),
    ("", ['["cat"]', "tensor(3)"], "beside lists", {}),
    ("typed", [1.0, None, 12.0], "exponent", {NUMBER: ..., VALUE: ..., NAME: ...}),
    ("typed", [1, -1], "are 1 and -1", {NAME: ..., NUMBER: [1, None], VALUE: ...}),
    ("typed", ["cat", "None", "dog"], "for no value",
     {"--no-label None": ["cat", None, "dog"], NAME: ...}),
    ("typed", ["a|b", "a", "b"], "several",
     {"--label-separator '|'": [{"a", "b"}, {"a"}, {"b"}], NAME: ...}),
    ("typed", ["0", "1", "True"], "beside numbers", {NAME: ...}),
    ("typed", ["2024-05-01", "12:30"], "no plain", {NAME: ...}),
    ("file", ["007", "010"], "zeros", {NAME: ..., NUMBER: ..., VALUE: ...}),
    ("file", ["cat", "NaN"], "for no value", {"--no-label NaN": ["cat", None], NAME: ...}),
    ("file", ["1", "unknown"], "beside numbers", {"--no-label unknown": [1, None], NAME: ...}),
    ("file", ["10", "9"], "order", {NAME: ..., NUMBER: ..., VALUE: ...}),
    ("file", ["+1", "-1"], "are 1 and -1", {NAME: ..., NUMBER: [1, None], VALUE: ...}),
    ("file", ["-99", "0"], "below", {"--no-label=-99": [None, 0], NAME: ..., VALUE: ...}),
    ("file", ["1e5", "2e5"], "exponent", {NUMBER: ..., VALUE: ..., NAME: ...}),
    ("file", ["-1.0", "1.0"], "are 1 and -1", {NAME: ..., NUMBER: [None, 1], VALUE: ...}),
]  # fmt: skip
"""Form of a column, its labels, why they are not clear -> flags that are offered, what they give.

`...` is for the labels as they are.
"""


@pytest.mark.parametrize(("form", "labels", "why", "ways"), UNCLEAR)
def test_an_unclear_column_is_in_doubt_and_each_reading_that_fits_is_a_way_out(
    form: str, labels: list[Any], why: str, ways: Ways
) -> None:
    [doubt] = read(labels, form=form).doubts
    assert re.search(f"labels of it such as .* {why}", doubt.what)
    assert [shlex.join(way) for way in doubt.ways] == [*ways]
    for flags, expected in ways.items():
        given = [None if label == "" else label for label in labels]
        if expected is ...:
            given = [None if label is None else AS_THEY_ARE[flags](label) for label in given]
        assert labels_in(read(labels, flags, form)) == (given if expected is ... else expected)
    assert doubt.choices[-1][1] == 'write plain names or numbers, or lists such as ["cat", "dog"]'


@pytest.mark.parametrize(
    "text",
    [
        "10%", "2024-05-01", "12:30", "10:30 AM", "$1.50", "€2", "1,5", "0.1 0.9", "1/2", "16:9",
        "0 days 01:00:00", "-1 days 23:00:00", "2024-05-01T10:00:00Z", "1.0.3", "two\nlines",
        "\\x00", "tensor(3)", "b'cat'", 'b"dog"', "PosixPath('x')", "array([1, 2])", "np.int64(3)",
        "('x', 'y')", "['x', 'y']", "[1 0 1]", "[cat, dog]", "[cat", "<class 'int'>",
        "<Animal.CAT: 1>", "Label(name='x')", "label=cat", "cat?", '{"id": 1}', "{'id': 1}",
        "'cat'", "(0.5, 1]",
    ],
)  # fmt: skip
def test_text_that_is_no_plain_name_is_in_doubt(text: str) -> None:
    [doubt] = read([text, "x"]).doubts
    assert doubt.what == f"labels of it such as {text!r} are no plain names of classes"
    assert [shlex.join(way) for way in doubt.ways] == [NAME]
    assert labels_in(read([text, "x"], NAME)) == [text, "x"]


def test_a_doubt_says_what_each_way_gives() -> None:
    [doubt] = read(["007", "010", "007"]).doubts
    assert doubt.text == (
        "labels of it such as '007', '010' have leading zeros. Choose: `--label-kind name` for 2 "
        "classes, such as '007'; or `--label-kind number` for class numbers from 7 to 10; or "
        "`--label-kind value` for numbers from 7 to 10; or write plain names or numbers, or lists "
        'such as ["cat", "dog"]'
    )
    [doubt] = read(["0|1", "1"]).doubts
    assert "`--label-separator '|'` for several of 2 class numbers" in doubt.text
    [doubt] = read(["a|b", "a"]).doubts
    assert "`--label-separator '|'` for several of 2 classes, such as 'a'" in doubt.text
    [doubt] = read(["x" * 4000 + "?", "y"]).doubts
    assert len(doubt.text) < 400
    [doubt] = read(["0.0", "", "1.0"]).doubts
    assert doubt.what.endswith("or a fraction that is zero, and 1 of 3 have none")


@pytest.mark.parametrize("text", ["n0{0} {1} 7", "a dog that has {1} balls", "{1}-mask", "{1}"])
def test_labels_that_differ_in_nearly_every_sample_are_classes_if_the_user_says_so(
    text: str,
) -> None:
    labels = [text.format(number % 5, number + 10) for number in range(20)]
    column = read(labels)
    if text == "{1}":  # such as ages, or prices
        note = "are taken as class numbers (--label-kind value: for a regression)"
        assert any(note in line for line in column.notes)
        assert not [*read(labels, NUMBER).notes, *read(labels, VALUE).notes]
        [doubt] = read(labels, form="file").doubts
        assert [way[1] for way in doubt.ways] == ["name", "number", "value"]
    else:
        assert [shlex.join(way) for way in column.doubts[0].ways] == [NAME]
        assert labels_in(read(labels[:19])) == labels[:19]
        assert labels_in(read(labels * 2)) == labels * 2
    assert labels_in(read(labels, NAME)) == labels


def test_a_joining_mark_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, mark = list[int](), label_evidence._mark
    monkeypatch.setattr(label_evidence, "_mark", lambda of: (searched.append(len(of)), mark(of))[1])
    assert read([f"a dog and {number} cats" for number in range(30)]).doubts
    assert searched == [30]


CLEAR: list[tuple[str, list[Any], str, list[Any], str]] = [
    ("", ["0", "", "12"], "", [0, None, 12], ""),
    ("", ["0", "nan", "null"], "", [0, None, None], "2 labels that are 'nan', 'null' are taken"),
    ("", ["0", "-1", "1"], "", [0, None, 1], "1 labels that are -1 are taken as none (--label-k"),
    ("", ["0.5", "NaN", "2"], "", [0.5, None, 2.0], "1 labels that are 'NaN' are taken as none"),
    ("", ["NaN", "", "NaN"], "", [None] * 3, "2 labels that are 'NaN' are taken as none"),
    ("", ["sea lion", "lion", "red fox"], "", ["sea lion", "lion", "red fox"],
     "Labels such as 'sea lion' are one class each (--label-separator ' ': each word"),
    ("", ["New York", "New Delhi", "Rome"], "", ["New York", "New Delhi", "Rome"], "one class"),
    ("file", ["haze primary", "clear primary", "farm clear primary"], "",
     ["haze primary", "clear primary", "farm clear primary"], "one class each"),
    ("", ["tench, Tinca tinca", "crane"], "", ["tench, Tinca tinca", "crane"], ""),
    ("", ["F/A-18", "C++", "jack-o'-lantern"], "", ["F/A-18", "C++", "jack-o'-lantern"], ""),
    ("", ["Speed limit (20km/h)", "Corn_(maize)", "A+"], "",
     ["Speed limit (20km/h)", "Corn_(maize)", "A+"], ""),
    ("", ["0-2", "20-29", "60+", "<18"], "", ["0-2", "20-29", "60+", "<18"], ""),
    ("", ["Aves: Passer", "100% cotton", "R&D", "> 65 years"], "",
     ["Aves: Passer", "100% cotton", "R&D", "> 65 years"], ""),
    ("", ["中文", "हिन्दी", "😀", "cafe\u0301"], "", ["中文", "हिन्दी", "😀", "cafe\u0301"], ""),
    ("", ["0", "a", "b"], "", ["0", "a", "b"], ""),
    ("", ["+0", "+1", "+2"], "", [0, 1, 2], ""),
    ("", ["[UNK]", "cat", "(dog)"], "", ["[UNK]", "cat", "(dog)"], ""),
    ("", ["'", ",", "a'", "a", "{"], "", ["'", ",", "a'", "a", "{"], ""),
    ("", ["9" * 20, "8" * 20], "", ["9" * 20, "8" * 20], ""),
    ("", ["[0, 1]", "[1, 1]", ""], "", [{1}, {0, 1}, set()], 'write them as names (["0", "1"])'),
    ("", ['["0", "1"]', '["1", "1"]'], "", [{"0", "1"}, {"1"}], ""),
    ("", ["[0, 0, 1]", "[1, 0, 0]"], "", [{2}, {0}], "lists of 3 values that are 0 or 1, one for"),
    ("", ["[0, 0, 1]", "[1, 1]"], "", [{0, 1}, {1}], "are lists of class numbers, as not all are"),
    ("", ["[0, 1]", "[2]"], "", [{0, 1}, {2}], "are lists of class numbers"),
    ("", ["[1]", "2", ""], "", [{1}, {2}, set()], "class numbers"),
    ("", ['["1"]', "two"], "", [{"1"}, {"two"}], ""),
    ("", ["", "[]"], "", [None, None], ""),
    ("", ["", ""], "", [None, None], ""),
    ("", ["1", "2.5", "-25e-2", "NaN", ".5"], "", [1.0, 2.5, -0.25, None, 0.5], "are 'NaN' are"),
    ("typed", [5, None, 0], "", [5, None, 0], ""),
    ("typed", [0.5, None, 2.0], "", [0.5, None, 2.0], ""),
    ("typed", [True, False], "", [1, 0], ""),
    ("typed", ["1", "2", "unknown"], "", ["1", "2", "unknown"], ""),
    ("typed", ["007", "7.0"], "", ["007", "7.0"], ""),
    ("file", ["1.0", "", "0.0"], "", [1, None, 0], ""),
    ("file", ["1.0", "", "0.0"], VALUE, [1.0, None, 0.0], ""),
    ("file", ["1.0", "0.0", "-1.0", "", "-1.0"], "", [1, 0, None, None, None], "2 labels that are"),
    ("", ["1.0", "0.0", "-1.0"], NUMBER, [1, 0, None], "1 labels that are -1 are taken as none"),
    ("", ["cat", "unsorted"], "--no-label unsorted", ["cat", None], ""),
]  # fmt: skip
"""Form of a column, its labels, flags -> labels, and the line about them."""


@pytest.mark.parametrize(("form", "labels", "flags", "expected", "said"), CLEAR)
def test_a_clear_column_is_read_with_a_line_about_a_guess(
    form: str, labels: list[Any], flags: str, expected: list[Any], said: str
) -> None:
    column = read(labels, flags, form)
    assert labels_in(column) == expected
    assert [said in line for line in column.notes] == [True] * bool(said)


@pytest.mark.parametrize(
    ("labels", "flags", "error"),
    [
        (["a", "b"], NUMBER, "label of k0 is 'a', and --label-kind number needs a whole number"),
        (["1", "1.5"], NUMBER, "label of k1 is '1.5', and --label-kind number needs"),
        (["1", "9" * 20], NUMBER, r"needs a whole number below 2\*\*63; correct it, or leave out"),
        (["a", "b"], VALUE, "--label-kind value needs a number"),
        (["a", "b"], "--no-label c", "has no label 'c'; correct --no-label"),
        (['["a"]', "b"], NAME, "has lists of classes as labels; leave out --label-kind and"),
        (["['a', 'b']", "b"], "--label-separator ,", r"k0 is \['a', 'b'\], which is no list in J"),
        (["[1, -1]", "2"], "", "label of k0 has the class number -1"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused(labels: list[Any], flags: str, error: str) -> None:
    with pytest.raises(SourceError, match=error):
        read(labels, flags)


def test_names_that_are_known_need_no_other_evidence() -> None:
    assert labels_in(read(["none", "a|b"], known=["none", "a|b"])) == ["none", "a|b"]
    assert labels_in(read(["1", "10", "2"], form="file", known=["1", "2"])) == ["1", "10", "2"]
    floats = read([1.0, 0.0], NUMBER, "typed", classes=("ant", "bee"))
    assert labels_in(floats) == ["bee", "ant"]
    [doubt] = read(["cat", "Cat", "dog"]).doubts
    assert "'Cat' and 'cat', which look alike" in doubt.text
    assert labels_in(read(["01", "1"], NAME)) == ["01", "1"]


@pytest.mark.parametrize(
    "names",
    [
        ("cat", "Cat"), ("cat", "cat "), ("sea lion", "sea  lion"), ("sea_lion", "sea lion"),
        ("caf\u00e9", "cafe\u0301"), ("cat", "c\u200bat"), ("cat", "c\u0430t"), ("Oak", "\u039fak"),
        ("\ufb01sh", "fish"), ("it's", "it\u2019s"), ("t-shirt", "t\u2013shirt"), ("01", "1"),
        ("cat", "cat (1)"), ("cat", "Cat - Copy (2)"), ("dog", "dog copy"), ("dog", "dog copy 2"),
        ("dog", "dog(1)"), ("cat", "'cat'"), ("cat", "cat,"), ("St. Bernard", "St Bernard"),
    ],
)  # fmt: skip
def test_names_that_look_alike_are_refused(names: tuple[str, str]) -> None:
    column = read([*names], "", "typed", folders=True)
    [doubt] = column.doubts
    assert doubt.by_classes
    assert f"it has the classes {min(names)!a} and {max(names)!a}, which look alike" in doubt.what
    assert [text for way, text in doubt.choices if not way] == ["rename one", LISTED]
    codes = names[0].isdecimal()
    assert [shlex.join(way) for way in doubt.ways] == [NAME] * codes
    assert not read([*names], "", "typed", classes=names).doubts
    assert not codes or labels_in(read([*names], NAME, "typed", folders=True)) == [*names]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("-1", "1", "-1.0", "1.0"), ""),
        (("a", "A", "b"), ""),
        (("1", "2", "10"), "'10' comes before '2' (--class-order number: as numbers)"),
        (
            ("class_1", "class_2", "class_10"),
            "'class_10' comes before 'class_2' (--class-order num",
        ),
        (("1_dog", "2_cat", "10_ant"), "'10_ant' comes before '1_dog' (--class-order number"),
        (("1.0", "2.0", "10.0"), "'10.0' comes before '2.0' (--class-order number"),
        (tuple("0123456789"), ""),
    ],
)
def test_names_are_sorted_as_text_with_a_line_or_as_numbers(
    names: tuple[str, ...], said: str
) -> None:
    column = read([*names], "", "typed", folders=True)
    assert column.classes == tuple(sorted(names))
    assert not column.doubts
    assert [said in note for note in column.notes] == [True] * bool(said)
    numbered = read([*names], "--class-order number", "typed", folders=True)
    assert not said or (numbered.classes, numbered.notes) == (names, ())


@pytest.mark.parametrize(
    ("column", "values", "kind"),
    [
        ("is_valid", ["True", "False"], "sure"),
        ("Test", ["1", "0"], "sure"),
        ("dataset_split", ["trn", "tst"], "sure"),
        ("fold", ["1", "2"], "maybe"),
        ("subset", ["coco", "lvis"], "maybe"),
        ("valid", ["3", "4"], ""),
        ("split", ["train"], ""),
    ],
)
def test_columns_of_splits_are_known_by_their_name(
    column: str, values: list[str], kind: str
) -> None:
    assert splits_of(column, values) == kind


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("0 cat, 1 dog, 0 dog", True),
        ("0 cat, 1 dog, 0 cat", False),
        ("0 1, 1 2", True),
        ("0 0.0, 1 1.0", False),
    ],
)
def test_columns_disagree_unless_each_label_is_with_one_of_the_other(
    pairs: str, expected: bool
) -> None:
    assert disagree({tuple(pair.split()) for pair in pairs.split(", ")}) == expected  # type: ignore[misc]


def test_values_that_all_differ_are_read_in_one_pass() -> None:
    column = read([f"{number / 7:.4f}" for number in range(60_000)])
    assert len(column.values) == 60_000
    assert column.values.dtype.kind == "f"
