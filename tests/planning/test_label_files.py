"""Files of labels: their columns, keys and labels, as public data sets have them."""

import csv
import itertools
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precache.errors import ChoiceError, SourceError
from precache.store.row_table import RowTable
from precache_workers.planning.class_maps import freeze_classes
from precache_workers.planning.labels import override_labels
from tests.support.building import write
from tests.support.layouts import (
    ANIMALS,
    NAME,
    NUMBER,
    Labels,
    label_of,
    labels_by,
    put_csv,
    rules_of,
)


def given(
    keys: Sequence[str], path: str, flags: str = "", classes: Sequence[str] = (), source: str = "in"
) -> Labels:
    """Return the labels that a file gives the samples of a folder with these classes.

    Reads the file as a build with these flags does.
    """
    words = shlex.split(flags)
    alone = {word for word in words if word in ("--accept-unmatched", "--all-splits")}
    pairs = dict(itertools.pairwise(words))
    options = {name: pairs.get(f"--{name}-column") for name in ("label", "key")}
    of_labels = shlex.join(word for word in words if word not in alone)
    rules = replace(rules_of(of_labels), all_splits="--all-splits" in alone)
    table = override_labels(
        replace(RowTable.of_keys(list(keys)), classes=tuple(classes)),
        path,
        rules=rules,
        source=str(Path(source).absolute()),
        label_column=options["label"],
        key_column=options["key"],
        accept_unmatched="--accept-unmatched" in alone,
    )
    stems = (re.split(r"[/.]", key.removesuffix(".png"))[-1] for key in keys)
    labels = (label_of(table.classes, label) for label in table.labels)
    return dict(zip(stems, labels, strict=True))


def in_doubt(keys: Sequence[str], path: str, flags: str = "") -> tuple[str, list[Labels]]:
    """Return the refusal of a file of labels, and the labels that each way out gives."""
    with pytest.raises(ChoiceError) as refused:
        given(keys, path, flags)
    ways = (shlex.join(way) for way in refused.value.ways)
    return str(refused.value), [given(keys, path, f"{flags} {way}") for way in ways]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


TABLES: dict[str, tuple[str, ...]] = {
    "row numbers beside names of files": (
        "id,image,label / 0,2.png,cat / 1,1.png,dog / 2,0.png,eel", "eel, dog, cat",
    ),
    "row numbers of pandas": (
        "Unnamed: 0,image_id,label / 0,2,cat / 1,1,dog / 2,0,eel", "eel, dog, cat",
    ),
    "row numbers beside absolute paths": (
        "index,path,label / 0,ROOT/in/2.png,cat / 1,ROOT/in/1.png,dog / 2,ROOT/in/0.png,eel",
        "eel, dog, cat",
    ),
    "paths of another computer, and numbers that are stems of samples": (
        "C:\\x\\in\\2.png,0 / C:\\x\\in\\0.png,1 / C:\\x\\in\\1.png,2", "1, 2, 0",
    ),
    "two columns of stems": (
        "index,image_id,label / 0,2,cat / 1,1,dog / 2,0,eel", "cat, dog, eel | eel, dog, cat",
        "the columns 'index', 'image_id' of labels.csv name the samples",
    ),
    "two columns of names of files": (
        "pair,image,label / 1.png,0.png,cat / 2.png,1.png,dog / 0.png,2.png,eel",
        "cat, dog, eel | eel, cat, dog",
        "the columns 'image', 'pair' of labels.csv name the samples",
    ),
    "two columns of keys, and two of labels": (
        "index,image_id,x,y / 0,2,a,k / 1,1,b,k / 2,0,c,m",
        "a, b, c | k, k, m | c, b, a | m, k, k",
        "Choose: `--key-column index --label-column x`; or",
    ),
    "two columns of the same keys": (
        "id,image,label / 0,0.png,cat / 1,1.png,dog / 2,2.png,eel", "cat, dog, eel",
    ),
    "numbers of folds, which name samples only by chance": (
        "id,label,fold_of / 0,cat,0 / 1,dog,1 / 2,eel,1", "cat, dog, eel",
    ),
    "a column for each class": (
        "image,MEL,NV,BCC / 0,0.0,1.0,0.0 / 1,1.0,0.0,0.0 / 2,0.0,0.0,0.0",
        "NV, MEL, - | 0, 1, 0 | 1, 0, 0 | 0, 0, 0",
        "Choose: `--label-column MEL,NV,BCC` if each is a class; or",
    ),
    "columns of 0 and 1 that are no classes": (
        "image,young,smiling / 0,0,1 / 1,1,1 / 2,0,0",
        "{smiling}, {smiling+young}, {} | 0, 1, 0 | 1, 1, 0",
        "young,smiling` if each is a class; or",
    ),
    "columns of 1 and -1": (
        "image,young,male,smiling / 0,-1,1,1 / 1,1,-1,1 / 2,-1,-1,1",
        "{male+smiling}, {smiling+young}, {smiling} | -1, 1, -1 | 1, -1, -1 | 1, 1, 1",
        "or `--label-column young --label-kind name`; or",
    ),
    "several findings": (
        "image,Finding / 0,Edema|Mass / 1,Mass / 2,None found",
        "{Edema+Mass}, {Mass}, {None found} | Edema|Mass, Mass, None found",
        "`--label-separator '|'` for several of 3 classes, such as 'Edema'",
    ),
    "a category beside another column": (
        "id,w,category / 0,3,cat / 1,4,dog / 2,5,eel", "cat, dog, eel",
    ),
    "a comma at the end of lines": ("id,label, / 0,cat, / 1,dog, / 2,eel,", "cat, dog, eel"),
    "labels before keys": ("label,filename / cat,0.png / dog,1.png / cat,2.png", "cat, dog, cat"),
    "labels before keys, without names": ("cat,0.png / dog,1.png / cat,2.png", "cat, dog, cat"),
    "columns separated by spaces": ("0.png 7 / 1.png  8 / 2.png\t7", "7, 8, 7"),
    "two columns beside stems, without names": (
        "0 dog tabby / 1 cat eel / 2 cat eel", "dog, cat, cat | tabby, eel, eel", "",
    ),
    "paths of samples": (
        "path,label / ./in/0.png,cat / ./in/1.png,dog / ./in/2.png,eel", "cat, dog, eel",
    ),
    "absolute paths of samples": (
        "path,label,w / ROOT/in/0.png,cat,3 / ROOT/in/1.png,dog,4 / ROOT/in/2.png,eel,5",
        "cat, dog, eel",
    ),
    "a usage": (
        "id,label,Usage / 0,cat,Training / 1,dog,PublicTest / 2,eel,PrivateTest", "cat, dog, eel",
        "column 'Usage' of labels.csv has 'PrivateTest', 'PublicTest', 'Training', which",
    ),
    "a phase": (
        "id,label,phase / 0,cat,trn / 1,dog,tst / 2,eel,trn", "cat, dog, eel",
        "column 'phase' of labels.csv has 'trn', 'tst', which look like splits",
    ),
    "a flag of validation": (
        "id,label,is_valid / 0,cat,True / 1,dog,False / 2,eel,True", "cat, dog, eel",
        "column 'is_valid' of labels.csv has 'False', 'True', which look",
    ),
    "splits alone": (
        "id,split / 0,train / 1,val / 2,train", "train, val, train",
        "are 'train', 'val', which look like splits. Choose: `--label-column split`",
    ),
    "splits alone, without names": (
        "0.png,train / 1.png,val / 2.png,train", "train, val, train",
        "labels of labels.csv are 'train', 'val', which look like",
    ),
    "folds": ("id,label,fold / 0,cat,1 / 1,dog,5 / 2,eel,5", "cat, dog, eel"),
    "a class and a box, without names": (
        "0.png\tn02\t0\t3 / 1.png\tn01\t0\t3 / 2.png\tn02\t1\t2",
        "n02, n01, n02 | 0, 0, 1 | 3, 3, 2", "",
    ),
    "codes beside their numbers": ("0,007 / 1,7 / 2,8", "007, 7, 8 | 7, 7, 8 | 7.0, 7.0, 8.0", ""),
    "classes that a word joins": (
        "0,scab / 1,rust / 2,scab and rust",
        "{scab}, {rust}, {rust+scab} | scab, rust, scab and rust", "",
    ),
    "names with brackets": (
        "0,scab (leaf) / 1,rust (leaf) / 2,scab", "scab (leaf), rust (leaf), scab",
    ),
}  # fmt: skip
"""Lines of a file of labels of 0.png, 1.png and 2.png, with / between; the labels of the build, or
of all that a refusal names, with | between; and what is said of the refusal."""


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_labels_is_read_in_the_one_way_or_refused(
    here: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines, labels, *refused = TABLES[name]
    expected = [labels_by("012", text) for text in labels.split(" | ")]
    put_csv(here / "labels.csv", *lines.replace("ROOT", str(here)).split(" / "))
    keys = ["0.png", "1.png", "2.png"]
    if refused:
        text, choices = in_doubt(keys, "labels.csv", "--accept-unmatched")
        assert choices == expected
        assert refused[0] in text
    else:
        assert [given(keys, "labels.csv")] == expected
    said = "The column 'fold' of labels.csv has '1', '5', which may be splits"
    assert (said in caplog.text) == (name == "folds")


@pytest.mark.parametrize(
    ("lines", "labels"),
    [
        (
            "lesion_id,image_id,dx,age / H1,p_1,bkl,80.0 / H1,p_2,nv, / H3,p_3,bkl,75.0",
            "H1, H1, H3 | bkl, nv, bkl | 80, -, 75",
        ),
        ("C:\\1\\p_1.png,17 / C:\\1\\p_2.png,17 / C:\\2\\p_3.png,17", "17, 17, 17"),
        (
            "path;age / /x/1/p_1.png;0.5 / /x/1/p_2.png;1.5 / /x/2/p_3.png;2.5",
            "0.5, 1.5, 2.5",
        ),
        ("#Image CLASS-ID / # 1:Cat 2:Dog / p_1 1 4 / p_2 1 5 / p_3 2 4", "1, 1, 2 | 4, 5, 4"),
        (
            "p_1 cat tabby / p_2 dog pug / p_3 cat manx",
            "cat, dog, cat | tabby, pug, manx",
        ),
    ],
    ids=["stems", "paths of Windows", "absolute paths, and values", "comments", "words alone"],
)
def test_photos_in_folders_are_named_as_data_sets_do(here: Path, lines: str, labels: str) -> None:
    expected = [labels_by(["p_1", "p_2", "p_3"], text) for text in labels.split(" | ")]
    keys = ["1/p_1.png", "1/p_2.png", "2/p_3.png"]
    put_csv(here / "labels.csv", *lines.split(" / "))
    if len(expected) > 1:
        assert in_doubt(keys, "labels.csv")[1] == expected
    else:
        assert [given(keys, "labels.csv", source="/photos/in")] == expected


@pytest.mark.parametrize(
    ("header", "way"),
    [
        (",filename,width,label", ""),
        ("filename,width,breed,label", ""),
        ("filename,width,breed", "--label-column breed"),
        ("filename,label,breed,class", "--label-column breed"),
    ],
)
def test_the_column_of_labels_is_chosen_by_its_name_or_asked_for(
    here: Path, header: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    columns, keys = header.split(","), [f"{name}.png" for name in ANIMALS]
    cells = {"width": "9", "class": "x"}
    rows = [
        ",".join({"filename": f"{n}.png", **cells}.get(c, label) for c in columns)
        for n, label in ANIMALS.items()
    ]
    put_csv(here / "labels.csv", header, *rows)
    if way:
        with pytest.raises(ChoiceError, match="which of them has the labels is not known") as one:
            given(keys, "labels.csv")
        assert tuple(shlex.split(way)) in one.value.ways
    assert given(keys, "labels.csv", way) == ANIMALS
    assert re.search(r"labels are the column '.*; not used \(--label-column\): '", caplog.text)
    known = "has no column 'bread'" + " .did you mean bre" * bool(way)
    with pytest.raises(SourceError, match=known):
        given(keys, "labels.csv", "--label-column bread")


def test_classes_of_a_column_each_keep_their_order_and_are_one_of_a_sample(here: Path) -> None:
    keys, flags = ["0.png", "1.png"], "--label-column NV,MEL,BCC"
    for rows, labels in [
        (("0,0,1,0", "1,1,0,0"), {"0": "MEL", "1": "NV"}),
        (("0,0,1,1", "1,1,0,0"), {"0": {"MEL", "BCC"}, "1": {"NV"}}),
    ]:
        put_csv(here / "labels.csv", "image,NV,MEL,BCC", *rows)
        assert given(keys, "labels.csv", flags) == labels
    put_csv(here / "labels.csv", "image,NV,MEL,BCC", "0,0,1.0,-1.0", "1,1,1,")
    assert in_doubt(keys, "labels.csv", flags)[1] == [{"0": {"MEL"}, "1": {"NV", "MEL"}}]
    put_csv(here / "labels.csv", "image,NV,MEL,BCC", "0,0,1,7", "1,1,0,0")
    with pytest.raises(SourceError, match=r"line 2 of labels.csv: has '7' in the column 'BCC'"):
        given(keys, "labels.csv", flags)


@pytest.mark.parametrize(
    ("header", "end"), [("id_code,diagnosis", ""), ("Image,Id", ","), ("id_code;diagnosis", ";")]
)
def test_a_header_of_other_names_and_blank_rows_need_no_flag(
    here: Path, header: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    mark = ";" if ";" in header else ","
    rows = [f"{name}{mark}{label}" for name, label in zip("abc", "010", strict=True)]
    put_csv(here / "labels.csv", header, *rows, end, end, mark="\ufeff")
    labels = given(["a.png", "b.png", "c.png"], "labels.csv")
    assert labels == {"a": "0", "b": "1", "c": "0"}
    key, label = header.split(mark)
    assert f"labels are the column {label!r} of labels.csv, for the keys in {key!r}" in caplog.text


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("x.png,eel", "fit no sample, such as line 1 with 'x.png'"),
        ("x,cat", "fit no sample, such as line 1 with 'x'"),
        ("x,", "fit no sample, such as line 1 with 'x'"),
        ("b,eel", ""),
    ],
)
def test_a_first_line_that_may_be_of_a_sample_is_no_header(
    here: Path, first: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    put_csv(here / "labels.csv", first, "a,cat")
    given(["a.png", "b.png"], "labels.csv", "--accept-unmatched")
    assert said in caplog.text
    assert "labels are the column" not in caplog.text


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "labels.jsonl", "labels.parquet"])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["cat", "dog", "cat"], ["cat", "dog", "cat"]),
        ([7, None, 0], ["7", None, "0"]),
        ([1.0, None, 2.0], ["1", None, "2"]),
        ([["cat", "dog"], [], ["dog"]], [{"cat", "dog"}, set(), {"dog"}]),
        ([[2, 5], [5], [2]], [{2, 5}, {5}, {2}]),
    ],
)
def test_every_format_of_a_file_of_labels_gives_the_same_labels(
    here: Path, name: str, labels: list[Any], expected: list[Any]
) -> None:
    keys = ["a.png", "b.png", "c.png"]
    columns = {"file_name": keys, "width": [9] * 3, "label": labels}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if name.endswith(".parquet"):
        pq.write_table(pa.table(columns), here / name)
    elif name.endswith(".jsonl"):
        put_csv(here / name, *map(json.dumps, rows))
    else:
        with (here / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, delimiter="\t" if name[-3] == "t" else ",")
            writer.writeheader()
            for row in rows:
                label = row["label"]
                text = json.dumps(label) if isinstance(label, list) else label
                writer.writerow({**row, "label": text})
    assert given(keys, name) == dict(zip("abc", expected, strict=True))


def test_a_file_of_labels_in_another_form_is_refused_with_the_way(here: Path) -> None:
    put_csv(here / "labels.csv", "id,x,y", "a.png,1,-1")
    assert in_doubt(["a.png"], "labels.csv", NAME)[1] == [{"a": "1"}, {"a": "-1"}]
    for header in (",file,label", ",0,1"):  # the second as of a DataFrame without names
        put_csv(here / "labels.csv", header, "0,a.png,1")
        assert given(["a.png"], "labels.csv") == {"a": "1"}
    for suffix in ("mat", "json", "xlsx"):
        write(here / f"labels.{suffix}", b"\0\xff")
        with pytest.raises(SourceError, match=r"and a file of labels is CSV.*: write it as lin"):
            given(["a.png"], f"labels.{suffix}")


def test_names_that_the_folders_have_are_no_other_labels_unless_a_flag_says_so(here: Path) -> None:
    keys = ["cat/a.png", "none/b.png"]
    put_csv(here / "labels.csv", "key,label", "cat/a.png,none", "none/b.png,cat")
    assert given(keys, "labels.csv", classes=["cat", "none"]) == {"a": "none", "b": "cat"}
    flags = "--no-label none --accept-unmatched"
    assert given(keys, "labels.csv", flags, ["cat", "none"]) == {"a": None, "b": "cat"}
    put_csv(here / "labels.csv", "key,label", "0/a.png,2")
    keys, folders = ["0/a.png", "2/b.png"], ["0", "1", "10", "2"]
    labels = given(keys, "labels.csv", "--accept-unmatched", folders)
    assert labels == {"a": "2", "b": None}


def test_class_numbers_of_a_file_get_names_and_none_are_counted(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_csv(here / "labels.csv", "key,label", "a.png,1.0", "b.png,-1.0", "c.png,0.0", "d.png,")
    keys = [f"{name}.png" for name in "abcd"]
    for flags in ("", NUMBER):
        assert given(keys, "labels.csv", flags) == {"a": "1", "b": None, "c": "0", "d": None}
    assert "class numbers (--label-kind name: names of classes; --label-kind value:" in caplog.text
    assert "1 labels that are -1 are taken as none" in caplog.text
    assert "2 lines of labels.csv have no label" in caplog.text
    put_csv(here / "labels.csv", "key,label", "a.png,cat", "b.png,Cat")
    with pytest.raises(ChoiceError, match="'Cat' and 'cat', which look alike"):
        given(keys[:2], "labels.csv")


@pytest.mark.parametrize(
    ("numbers", "names", "expected"),
    [
        ([0, 1, 2], "ant bee cat", "ant bee cat"),
        ([3, 3, 1], "ant bee cat", "cat cat ant"),
        ([10, 9, 0], "a b c d e f g h i j k", "k j a"),
        ([2, -1, 1], "ant bee", "bee - ant"),
    ],
)
def test_class_numbers_are_those_of_a_class_map(
    here: Path, numbers: list[int], names: str, expected: str
) -> None:
    classes = names.split()
    table = replace(RowTable.of_keys([*"abc"]), labels=np.array(numbers))
    put_csv(here / "labels.csv", *(f"{k},{n}" for k, n in zip("abc", numbers, strict=True)))
    given = override_labels(table, "labels.csv", classes)
    for of in (table, given):
        named = freeze_classes(of, classes, "classes.txt")
        assert [[*classes, "-"][label] for label in named.labels] == expected.split()
