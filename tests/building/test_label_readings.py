"""Labels that can be read in two ways: refused, and each command that the refusal prints builds."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import precache
from precache.errors import ChoiceError, SourceError, UsageError
from precache.storage.open import open_folder
from tests.support.building import write
from tests.support.containers import quiet_datasets
from tests.support.layouts import (
    ANIMALS,
    Builds,
    Labels,
    built_labels,
    photo,
    put,
    put_classes,
    put_csv,
)
from tests.support.servers import S3Server


@pytest.fixture
def builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Builds:
    monkeypatch.chdir(tmp_path)
    return Builds(tmp_path, capsys)


# --- folders ------------------------------------------------------------------------------------


def as_folder(root: Path) -> str:
    return "in"


def as_zip(root: Path) -> str:
    with zipfile.ZipFile(root / "in.zip", "w") as archive:
        for path in sorted((root / "in").rglob("*.png")):
            archive.write(path, path.relative_to(root / "in"))
    return "in.zip"


def as_tar(root: Path) -> str:
    with tarfile.open(root / "in.tar", "w") as tar:
        for path in sorted((root / "in").rglob("*.png")):
            tar.add(path, f"./{path.relative_to(root / 'in')}")
    return "in.tar"


Pack = Callable[[Path], str]
PACKED = pytest.mark.parametrize("pack", [as_folder, as_zip, as_tar])


@PACKED
@pytest.mark.parametrize(
    "folder",
    [".ipynb_checkpoints", "cat/.ipynb_checkpoints", "@eaDir", "dog/@eaDir/x", "__MACOSX/cat",
     ".Trash-1000/files", "$RECYCLE.BIN", "#recycle/cat", "System Volume Information"],
)  # fmt: skip
def test_images_of_hidden_and_service_folders_are_left_out_and_counted(
    builds: Builds, pack: Pack, folder: str
) -> None:
    put_classes(builds.root / "in")
    put(builds.root / "in" / folder, "x1.png", "x2.png")
    assert builds.labels(pack(builds.root)) == ANIMALS
    [line] = [line for line in builds.printed.splitlines() if "2 images in hidden" in line]
    assert f"{folder}/x" in line
    assert "name such a folder as the source" in line
    if pack is as_folder:
        assert builds.labels(f"'in/{folder}'") == {"x1": None, "x2": None}


TREES: dict[str, tuple[dict[str, str], list[dict[str, str | None]]]] = {
    "splits of classes": (
        {"train/cat/a": "cat", "train/dog/b": "dog", "valid/cat/c": "cat"},
        [{"a": "cat", "b": "dog", "c": "cat"}, {"a": "train", "b": "train", "c": "valid"}],
    ),
    "flat splits": (
        {"train2017/a": "", "val2017/b": ""},
        [{"a": "train2017", "b": "val2017"}],
    ),
    "splits of a letter": ({"trainA/a": "", "testA/b": ""}, [{"a": "trainA", "b": "testA"}]),
    "splits below a folder": (
        {"data/train_set/cat/a": "", "data/test_set/dog/b": ""},
        [{"a": "cat", "b": "dog"}, {"a": "train_set", "b": "test_set"}],
    ),
    "a test folder beside classes": (
        {"cat/a": "", "dog/b": "", "test/c": ""},
        [{"a": "cat", "b": "dog", "c": "test"}],
    ),
    "a train folder with classes beside others": (
        {"train/cat/a": "", "train/dog/b": "", "extra/cat/c": ""},
        [{"a": "cat", "b": "dog", "c": "cat"}, {"a": "train", "b": "train", "c": "extra"}],
    ),
    "images and masks": ({"images/a": "", "masks/a": ""}, []),
    "VOC": ({"JPEGImages/a": "", "SegmentationClass/b": ""}, []),
    "folds": (
        {"fold0/cat/a": "", "fold0/dog/b": "", "fold1/cat/c": "", "fold1/dog/d": ""},
        [
            {"a": "cat", "b": "dog", "c": "cat", "d": "dog"},
            {"a": "fold0", "b": "fold0", "c": "fold1", "d": "fold1"},
        ],
    ),
    "images beside the only folder's folders": (
        {"photos/a": "", "photos/cat/b": "", "photos/dog/c": ""},
        [{"a": None, "b": "cat", "c": "dog"}, {"a": "photos", "b": "photos", "c": "photos"}],
    ),
}


@PACKED
def test_a_source_of_hidden_images_alone_says_so(builds: Builds, pack: Pack) -> None:
    put(builds.root / "in/.cache", "x1.png")
    assert builds.run("build", pack(builds.root), "a.store", "--address", "serial") == 2
    assert "has no image" in builds.printed
    assert "1 images in hidden folders" in builds.printed


@PACKED
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_folders_that_may_be_no_classes_are_refused(
    builds: Builds, pack: Pack, tree: tuple[dict[str, str], list[dict[str, str | None]]]
) -> None:
    files, expected = tree
    put(builds.root / "in", *(f"{name}.png" for name in files))
    choices = builds.choices(pack(builds.root))
    for labels in expected:
        assert labels in choices
    for labels in choices:  # of a part of them as the source
        assert labels.keys() <= {name.rpartition("/")[2] for name in files}
    assert "--label-level" in builds.printed
    targets = any(name.startswith(("masks/", "SegmentationClass/")) for name in files)
    assert ("a torch Dataset as the source" in builds.printed) == targets


@PACKED
@pytest.mark.parametrize(
    ("files", "labels", "said"),
    [
        (["images/x/a", "images/y/b"], {"a": "x", "b": "y"}, "Classes are the 2 folders of images"),
        (["photos/a", "photos/b"], {"a": "photos", "b": "photos"}, "of the one class 'photos'"),
        (["train/x/a", "train/y/b"], {"a": "x", "b": "y"}, "Classes are the 2 folders of train/"),
        (["a/b/x/p", "a/b/y/q"], {"p": "x", "q": "y"}, "Classes are the 2 folders of a/b/"),
        (
            ["car/a", "train/b", "bus/c"],
            {"a": "car", "b": "train", "c": "bus"},
            "'train' is a c",
        ),
        (["valid/a", "invalid/b"], {"a": "valid", "b": "invalid"}, ""),
        (["mask/a", "no_mask/b"], {"a": "mask", "b": "no_mask"}, ""),
        (["n01/images/a", "n02/images/b"], {"a": "n01", "b": "n02"}, "n01/images; --label-level 2"),
        (["00000/a", "00001/b"], {"a": "00000", "b": "00001"}, "--label-level 0 gives no label"),
        (["pet/cat/a", "tree/oak/b"], {"a": "pet", "b": "tree"}, "pet/cat; --label-level 2 takes"),
    ],
)
def test_other_folders_are_classes_and_a_guess_is_said(
    builds: Builds, pack: Pack, files: list[str], labels: Labels, said: str
) -> None:
    put(builds.root / "in", *(f"{name}.png" for name in files))
    assert builds.labels(pack(builds.root)) == labels
    assert said in builds.printed


def test_a_level_without_a_folder_gives_no_label(builds: Builds) -> None:
    put(builds.root / "in", "x/cat/a.png", "y/b.png")
    assert builds.labels("in", "--label-level", "2") == {"a": "cat", "b": None}
    assert builds.labels("in", "--label-level", "0") == {"a": None, "b": None}
    assert builds.labels("in", "--label-level", "1", "--no-label", "y") == {"a": "x", "b": None}


@pytest.mark.parametrize(
    ("name", "data", "said", "flags"),
    [
        (
            "labels.csv",
            b"key,label\na.png,cat\n",
            "by --labels, if it has",
            "--labels in/labels.csv",
        ),
        ("m.csv", b"file_name,label,x\na.png,cat,1\n", "or as the source itself", ""),
        ("m.jsonl", b'{"file_name": "a.png", "label": "cat"}', "as the source itself", ""),
        ("m.parquet", b"", "itself, with --source-kind manifest", "--source-kind manifest"),
    ],
)
def test_a_table_in_a_folder_of_images_is_named_with_the_way_to_read_it(
    builds: Builds, name: str, data: bytes, said: str, flags: str
) -> None:
    put(builds.root / "in", "a.png")
    write(builds.root / "in" / name, data)
    if not data:
        pq.write_table(
            pa.table({"file_name": ["a.png"], "label": ["cat"]}), builds.root / "in" / name
        )
    builds.labels("in")
    assert f"{name} in the source gives labels only " in builds.printed
    assert said in builds.printed
    source = "in" if "--labels" in flags else f"in/{name}"
    assert builds.labels(source, *flags.split()) == {"a": "cat"}


def test_a_folder_of_tars_and_tables_names_the_tars(builds: Builds) -> None:
    put(builds.root / "x", "a.png")
    pq.write_table(pa.table({"url": ["http://x"]}), write(builds.root / "in/0.parquet", b""))
    with tarfile.open(builds.root / "in/0.tar", "w") as tar:
        tar.add(builds.root / "x/a.png", "a.png")
    with pytest.raises(SourceError, match=r"0\.tar is a tar archive: give '.*/in/\*\*/\*\.tar'"):
        precache.build("in", "a.store", address="serial")


# --- columns ------------------------------------------------------------------------------------

NAMES = [*"abcdefgh"]


def put_table(root: Path, labels: list[str]) -> str:
    names = NAMES[: len(labels)]
    put(root, *(f"{name}.png" for name in names))
    rows = [f'{name}.png,"{label}"' for name, label in zip(names, labels, strict=True)]
    put_csv(root / "list.csv", "path,label", *rows)
    return "list.csv"


COLUMNS: list[tuple[list[str], list[list[Any]]]] = [
    (["0.0", "", "2.0"], [[0, None, 2], [0.0, None, 2.0]]),
    (["0.0", "1.0"], [[0, 1], [0.0, 1.0]]),
    (["1.0", "NaN", "10"], [[1, None, 10], [1.0, None, 10.0]]),
    (["007", "010"], [["007", "010"], [7, 10]]),
    (["02134", "10001", ""], [["02134", "10001", None], [2134, 10001, None]]),
    (["cat", "NaN", "dog"], [["cat", None, "dog"], ["cat", "NaN", "dog"]]),
    (["cat", "null", "N/A"], [["cat", None, None], ["cat", "null", "N/A"]]),
    (["0", "1", "unknown"], [[0, 1, None], ["0", "1", "unknown"]]),
    (["a|b", "a"], [[{"a", "b"}, {"a"}], ["a|b", "a"]]),
    (["a|b", "c"], [[{"a", "b"}, {"c"}], ["a|b", "c"]]),
    (["1", "-1", "1"], [["1", "-1", "1"], [1, None, 1]]),
    (["-99", "0", "1"], [["-99", "0", "1"], [None, 0, 1], [-99.0, 0.0, 1.0]]),
    (["-3", "-2", "1"], [["-3", "-2", "1"], [-3.0, -2.0, 1.0]]),
    (["cat", "-nan", "dog"], [["cat", None, "dog"], ["cat", "-nan", "dog"]]),
    (["1E5", "2E3"], [["1E5", "2E3"], [1e5, 2e3]]),
    (["a b", "b c", "a"], [[{"a", "b"}, {"b", "c"}, {"a"}], ["a b", "b c", "a"]]),
    (["a, b", "b", ""], [[{"a", "b"}, {"b"}, set()], ["a, b", "b", None]]),
    (["cat;dog", "dog;eel"], [[{"cat", "dog"}, {"dog", "eel"}], ["cat;dog", "dog;eel"]]),
    (["0 3", "3", "0 1 3"], [[{0, 3}, {3}, {0, 1, 3}], ["0 3", "3", "0 1 3"]]),
]


@pytest.mark.parametrize(
    ("labels", "readings"), COLUMNS, ids=[str(pair[0])[:40] for pair in COLUMNS]
)
def test_a_column_of_two_readings_is_refused(
    builds: Builds, labels: list[str], readings: list[list[Any]]
) -> None:
    expected = [dict(zip(NAMES, reading, strict=False)) for reading in readings]
    choices = builds.choices(put_table(builds.root, labels))
    assert [dict(choice) for choice in choices] == expected


@pytest.mark.parametrize(
    ("labels", "expected", "said"),
    [
        (["0", "", "12"], [0, None, 12], "1 of 3 samples have no label (-1), such as b.png"),
        (
            ["0", "nan", "null"],
            [0, None, None],
            "2 labels that are 'nan', 'null' are taken",
        ),
        (["0", "-1", "1"], [0, None, 1], "1 labels that are -1 are taken as none (--label-kind"),
        (["0.5", "NaN", "2"], [0.5, None, 2.0], "1 labels that are 'NaN' are taken as none"),
        (["NaN", "", "NaN"], [None] * 3, "2 labels that are 'NaN' are taken as none"),
        (["sea lion", "lion", "red fox"], ["sea lion", "lion", "red fox"], ""),
        (["New York", "New Delhi", "Rome"], ["New York", "New Delhi", "Rome"], ""),
        (["tench, Tinca tinca", "crane"], ["tench, Tinca tinca", "crane"], ""),
        (["0", "a", "b"], ["0", "a", "b"], ""),
    ],
)
def test_a_column_of_one_reading_builds(
    builds: Builds,
    labels: list[str],
    expected: list[Any],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert builds.labels(put_table(builds.root, labels)) == dict(zip(NAMES, expected, strict=False))
    assert said in builds.printed + caplog.text


@pytest.mark.parametrize(
    ("labels", "flags", "error"),
    [
        (
            ["a", "b"],
            ["--label-kind", "number"],
            "a.png is 'a', and --label-kind number needs",
        ),
        (["1", "1.5"], ["--label-kind", "number"], "b.png is '1.5', and --label-kind number needs"),
        (["a", "b"], ["--label-kind", "value"], "--label-kind value needs a number"),
        (["a", "b"], ["--no-label", "c"], "has no label 'c'; correct --no-label"),
        (["a", "1"], ["--class-order", "number"], "has the class 'a', which is no whole number"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused(
    builds: Builds, labels: list[str], flags: list[str], error: str
) -> None:
    source = put_table(builds.root, labels)
    assert builds.run("build", source, "a.store", "--address", "serial", *flags) == 2
    assert error in builds.printed


def test_a_table_has_no_level(builds: Builds) -> None:
    source = put_table(builds.root, ["a", "b"])
    with pytest.raises(
        SourceError, match="labels that are not its folders; leave out --label-level"
    ):
        precache.build(source, "a.store", address="serial", label_level=2)


def test_a_dataset_takes_no_flag_for_text(builds: Builds) -> None:
    with pytest.raises(UsageError, match="says itself what its labels are; leave out"):
        precache.build("python:os:getcwd", "a.store", label_kind="name")


def in_parquet(root: Path, columns: dict[str, Any]) -> str:
    pq.write_table(pa.table(columns), root / "a.parquet")
    return "a.parquet --key-column id"


def in_arrow(root: Path, columns: dict[str, Any]) -> str:
    images = [{"bytes": data, "path": None} for data in columns["image"]]
    with quiet_datasets():
        data = datasets.Dataset.from_dict({**columns, "image": images})
        data.save_to_disk(root / "saved")
    return "saved --key-column id"


def in_manifest(root: Path, columns: dict[str, Any]) -> str:
    put(root, *(f"{name}.png" for name in columns["id"]))
    others = {name: values for name, values in columns.items() if name != "image"}
    table = {"path": [f"{name}.png" for name in columns["id"]], **others}
    pq.write_table(pa.table(table), root / "uris.parquet")
    return "uris.parquet --source-kind manifest --key-column id"


Write = Callable[[Path, dict[str, Any]], str]
TYPED = pytest.mark.parametrize("table", [in_parquet, in_arrow, in_manifest])


def columns_of(**labels: list[Any]) -> dict[str, Any]:
    names = NAMES[: len(next(iter(labels.values())))]
    return {"id": names, "image": [photo(name) for name in names], **labels}


@TYPED
@pytest.mark.parametrize(
    ("labels", "readings"),
    [
        ([0.0, None, 12.0], [[0, None, 12], [0.0, None, 12.0]]),
        ([1.0, 2.0], [[1, 2], [1.0, 2.0]]),
        (["cat", "None", "dog"], [["cat", None, "dog"], ["cat", "None", "dog"]]),
        (["a|b", "a", "b"], [[{"a", "b"}, {"a"}, {"b"}], ["a|b", "a", "b"]]),
    ],
)
def test_a_typed_column_of_two_readings_is_refused(
    builds: Builds, table: Write, labels: list[Any], readings: list[list[Any]]
) -> None:
    choices = builds.choices(table(builds.root, columns_of(label=labels)))
    expected = [dict(zip(NAMES, reading, strict=False)) for reading in readings]
    assert [dict(choice) for choice in choices] == expected


@TYPED
def test_a_typed_column_of_one_reading_builds(builds: Builds, table: Write) -> None:
    for labels in ([5, None, 0], [0.5, None, 2.0]):
        shutil.rmtree(builds.root / "saved", ignore_errors=True)
        built = builds.labels(table(builds.root, columns_of(label=labels)))
        assert built == dict(zip(NAMES, labels, strict=False))
    shutil.rmtree(builds.root / "saved", ignore_errors=True)
    built = builds.labels(table(builds.root, columns_of(label=[True, False], size=[7, 9])))
    assert built == {"a": 1, "b": 0}
    assert "not used: 'size'" in builds.printed


@TYPED
@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        ({"eel": [0, 1, 0], "cat": [1, 0, 1]}, ["cat", "eel", "cat"]),
        ({"eel": [0.0, 1.0, 1.0], "cat": [1.0, 1.0, 0.0]}, [{"cat"}, {"cat", "eel"}, {"eel"}]),
        ({"eel": [False, True, False], "cat": [False, False, True]}, [set(), {"eel"}, {"cat"}]),
    ],
)
def test_columns_of_0_and_1_are_refused_with_the_flag_that_takes_them(
    builds: Builds, table: Write, bits: dict[str, list[Any]], expected: list[Any]
) -> None:
    several, none = builds.choices(table(builds.root, columns_of(**bits, width=[7, 8, 9])))
    assert several == dict(zip(NAMES, expected, strict=False))
    assert none == dict.fromkeys(NAMES[:3])
    assert "--label-column eel,cat" in builds.printed


def test_columns_of_0_and_1_are_refused_once_no_other_table_is_beside_theirs(
    builds: Builds,
) -> None:
    (builds.root / "in").mkdir()
    in_parquet(builds.root / "in", columns_of(eel=[0, 1, 1], cat=[1, 1, 0]))
    other = builds.root / "in/other.parquet"
    pq.write_table(pa.table(columns_of(width=[7, 8, 9])), other)
    build = ("build", "in/*.parquet", "in.store", "--address", "serial")
    assert builds.run(*build) == 0, builds.printed
    other.unlink()
    assert builds.run(*build) == 2
    assert "--label-column eel,cat" in builds.printed


def test_columns_of_true_and_false_are_taken_as_those_of_0_and_1(builds: Builds) -> None:
    put(builds.root, "a.png", "b.png", "c.png")
    rows = ["a.png,True,False", "b.png,False,True", "c.png,False,True"]
    put_csv(builds.root / "list.csv", "path,eel,cat", *rows)  # as pandas writes get_dummies
    assert builds.choices("list.csv")[0] == {"a": "eel", "b": "cat", "c": "cat"}


def test_a_class_that_no_row_has_keeps_its_number(builds: Builds) -> None:
    source = in_parquet(builds.root, columns_of(eel=[0, 0], cat=[1, 0], dog=[0, 1]))
    assert builds.labels(source, "--label-column", "eel,cat,dog") == {"a": "cat", "b": "dog"}
    assert precache.open(builds.root / "1.store").classes == ("eel", "cat", "dog")
    assert "Labels from columns of 0 and 1, a class each: rows have one class" in builds.printed


def test_a_wrong_bit_is_named_by_its_line(builds: Builds) -> None:
    put(builds.root, "a.png")
    put_csv(builds.root / "list.csv", "path,x,y", "a.png,0,2")
    with pytest.raises(SourceError, match=r"line 2 .* has '2' in the column 'y'.* 0 or 1"):
        precache.build("list.csv", "a.store", label_column="x,y")


def test_files_of_several_splits_that_are_taken_together_are_named(builds: Builds) -> None:
    for split, name in (("train", "a"), ("test", "b")):
        table = pa.table({"image": [photo(name)], "id": [name], "label": [7]})
        pq.write_table(table, builds.root / f"{split}-00000-of-00001.parquet")
    assert builds.labels("'*.parquet' --key-column id") == {"a": 7, "b": 7}
    assert "Files of several splits are taken together: 'test', 'train'" in builds.printed
    builds.labels("'train-*.parquet' --key-column id")
    assert "Files of several splits" not in builds.printed


def test_labels_of_tar_members_are_read_alike(builds: Builds) -> None:
    with tarfile.open(builds.root / "a.tar", "w") as tar:
        for name, label in (("a", "01"), ("b", "10")):
            for suffix, data in (("png", photo(name)), ("cls", label.encode())):
                info = tarfile.TarInfo(f"{name}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    assert builds.choices("a.tar") == [{"a": "01", "b": "10"}, {"a": 1, "b": 10}]


def test_a_table_beside_the_folder_of_its_files(builds: Builds) -> None:
    put(builds.root / "train", "a.png", "b.png")
    put_csv(builds.root / "train.csv", "id,label", "a.png,cat", "b.png,dog")
    assert builds.choices("train.csv") == [{"a": "cat", "b": "dog"}]


# --- files of labels ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "readings"),
    [
        (["007", "010"], [["007", "010"], [7, 10]]),
        (["cat", "NaN"], [["cat", None], ["cat", "NaN"]]),
        (["1", "unknown"], [["1", "unknown"], [1, None]]),
        (["a|b", "b"], [["a|b", "b"]]),
        (["10", "9"], [[10, 9], ["10", "9"]]),
        (["1", "-1"], [["1", "-1"], [1, None]]),
        (["+1", "-1"], [["+1", "-1"], [1, None]]),
        (["-99", "0"], [["-99", "0"], [None, 0]]),
        (["-nan", "cat"], [[None, "cat"], ["-nan", "cat"]]),
        (["1e5", "2e5"], [["1e5", "2e5"]]),
        (['"0,5"', '"1,5"'], [["0,5", "1,5"]]),
        (['"1,000"', '"2,000"', "500"], [["1,000", "2,000", "500"]]),
    ],
)
def test_a_file_of_labels_of_two_readings_is_refused(
    builds: Builds, labels: list[str], readings: list[list[Any]]
) -> None:
    put(builds.root / "in", *(f"{name}.png" for name in NAMES[: len(labels)]))
    rows = [f"{name}.png,{label}" for name, label in zip(NAMES, labels, strict=False)]
    put_csv(builds.root / "labels.csv", "key,label", *rows)
    choices = builds.choices("in --labels labels.csv", "--accept-unmatched")
    for reading, choice in zip(readings, choices, strict=False):
        texts = [None if label is None else str(label) for label in reading]
        assert choice == dict(zip(NAMES, texts, strict=False))


def test_samples_without_a_line_keep_no_class_that_is_in_doubt(builds: Builds) -> None:
    put(builds.root / "in/train/cat", "a.png")
    put(builds.root / "in/val/cat", "b.png")
    put_csv(builds.root / "labels.csv", "key,label", "train/cat/a.png,eel")
    build = ("build", "in", "in.store", "--labels", "labels.csv", "--address", "serial")
    assert builds.run(*build) == 2
    assert "1 of 2 samples have no line in labels.csv" in builds.printed
    assert "look like splits" in builds.printed
    assert builds.labels("in --labels labels.csv", "--label-level", "2") == {"a": "eel", "b": "cat"}
    put_csv(builds.root / "labels.csv", "key,label", "train/cat/a.png,eel", "val/cat/b.png,ant")
    assert builds.labels("in --labels labels.csv") == {"a": "eel", "b": "ant"}


@pytest.mark.parametrize(
    ("header", "end", "expected"),
    [
        ("id_code,diagnosis", "", {"a": "0", "b": "1", "c": "0"}),
        ("Image,Id", ",", {"a": "0", "b": "1", "c": "0"}),
        ("id_code;diagnosis", ";", {"a": "0", "b": "1", "c": "0"}),
    ],
)
def test_a_header_of_other_names_and_blank_rows_need_no_flag(
    builds: Builds,
    header: str,
    end: str,
    expected: Labels,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(builds.root / "in", "a.png", "b.png", "c.png")
    mark = ";" if ";" in header else ","
    rows = [f"{name}{mark}{expected[name]}" for name in "abc"]
    put_csv(builds.root / "labels.csv", header, *rows, end, end, mark="\ufeff")
    assert builds.labels("in --labels labels.csv") == expected
    assert f"the names of its columns: {header.split(mark, maxsplit=1)[0]!r}" in caplog.text


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("x.png,eel", "fit no sample, such as line 1 with 'x.png'"),
        ("x,cat", "fit no sample, such as line 1 with 'x'"),
        ("b,eel", ""),
    ],
)
def test_a_first_line_that_may_be_of_a_sample_is_no_header(
    builds: Builds, first: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(builds.root / "in", "a.png", "b.png")
    put_csv(builds.root / "labels.csv", first, "a,cat")
    builds.labels("in --labels labels.csv", "--accept-unmatched")
    assert said in caplog.text
    assert "the names of its columns" not in caplog.text


def test_a_file_of_labels_in_another_form_is_refused_with_the_way(builds: Builds) -> None:
    put(builds.root / "in", "a.png")
    put_csv(builds.root / "labels.jsonl", '{"file_name": "a.png", "label": "cat"}')
    with pytest.raises(SourceError, match=r"is JSON.*; give a table in JSON Lines .* as the sou"):
        precache.build("in", "a.store", address="serial", labels="labels.jsonl")
    put_csv(builds.root / "labels.csv", "id,x,y", "a.png,1,-1")
    with pytest.raises(SourceError, match=r"key,label: write a file of these two columns$"):
        precache.build("in", "a.store", address="serial", labels="labels.csv")
    put_csv(builds.root / "labels.csv", ",file,label", "0,a.png,1")
    with pytest.raises(SourceError, match=r"these two columns, with pandas by .*index=False"):
        precache.build("in", "a.store", address="serial", labels="labels.csv")


def test_flags_for_text_apply_to_names_that_the_folders_have(builds: Builds) -> None:
    put(builds.root / "in", "cat/a.png", "none/b.png")
    put_csv(builds.root / "labels.csv", "key,label", "cat/a.png,none", "none/b.png,cat")
    assert builds.labels("in --labels labels.csv") == {"a": "none", "b": "cat"}
    flags = ("--labels", "labels.csv", "--no-label", "none", "--accept-unmatched")
    assert builds.labels("in", *flags) == {"a": None, "b": "cat"}


def test_whole_numbers_with_a_fraction_in_a_file_of_labels_are_class_numbers(
    builds: Builds, caplog: pytest.LogCaptureFixture
) -> None:
    put(builds.root / "in", "a.png", "b.png", "c.png")
    put_csv(builds.root / "labels.csv", "key,label", "a.png,1.0", "b.png,", "c.png,0.0")
    labels = builds.labels("in --labels labels.csv")
    assert labels == {"a": "1", "b": None, "c": "0"}
    assert "are class numbers (--label-kind name: names of classes)" in caplog.text


def test_numbers_of_a_file_of_labels_are_names_where_those_of_the_folders_are(
    builds: Builds,
) -> None:
    put(builds.root / "in", "0/a.png", "1/b.png", "10/c.png", "2/d.png")
    put_csv(builds.root / "labels.csv", "key,label", "0/a.png,2")
    labels = builds.labels("in --labels labels.csv")
    assert labels == {"a": "2", "b": "1", "c": "10", "d": "2"}


# --- names of classes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("cat", "Cat"),
        ("cat", "cat "),
        ("sea lion", "sea  lion"),
        ("sea_lion", "sea lion"),
        ("caf\u00e9", "cafe\u0301"),
        ("cat", "c\u200bat"),
        ("cat", "c\u0430t"),
        ("\ufb01sh", "fish"),
        ("it's", "it\u2019s"),
        ("t-shirt", "t\u2013shirt"),
        ("01", "1"),
        ("cat", "cat (1)"),
        ("cat", "Cat - Copy (2)"),
    ],
)
def test_names_that_look_alike_are_refused(builds: Builds, names: tuple[str, str]) -> None:
    for number, name in enumerate(names):
        put(builds.root / "in" / name, f"{number}.png")
    arguments = ("build", "in", "a.store", "--address", "serial")
    assert builds.run(*arguments) == 2
    assert "which look alike: rename one, or list all names" in builds.printed
    if names[1] == names[1].strip() and "\u0301" not in names[1]:
        write(builds.root / "classes.txt", "\n".join(names).encode())
        assert builds.labels("in", "--classes", "classes.txt") == {"0": names[0], "1": names[1]}


def test_numbers_of_two_signs_are_classes(builds: Builds) -> None:
    put(builds.root / "in", "-1/1.png", "1/2.png")
    assert builds.labels("in") == {"1": "-1", "2": "1"}


def test_letters_of_two_cases_are_classes(builds: Builds) -> None:
    put(builds.root / "in", "a/1.png", "A/2.png", "b/3.png")
    assert builds.labels("in") == {"1": "a", "2": "A", "3": "b"}


def test_names_in_a_table_or_a_file_of_labels_may_look_alike_too(builds: Builds) -> None:
    source = put_table(builds.root, ["cat", "Cat", "dog"])
    with pytest.raises(ChoiceError, match="'Cat' and 'cat', which look alike"):
        precache.build(source, "a.store", address="serial")
    put(builds.root / "in", "1.png", "2.png")
    put_csv(builds.root / "labels.csv", "key,label", "1.png,cat", "2.png,Cat")
    with pytest.raises(ChoiceError, match="'Cat' and 'cat', which look alike"):
        precache.build("in", "a.store", address="serial", labels="labels.csv")


@PACKED
def test_numbers_are_sorted_as_text_which_is_said_once(builds: Builds, pack: Pack) -> None:
    put(builds.root / "in", *(f"{number}/p{number}.png" for number in range(12)))
    builds.labels(pack(builds.root))
    assert builds.printed.count("--class-order number") == 1
    assert "'10' comes before '2'" in builds.printed.replace("'11' comes", "'10' comes")
    assert precache.open(builds.root / "1.store").classes[:4] == ("0", "1", "10", "11")
    builds.labels(pack(builds.root), "--class-order", "number")
    assert "sorted as text" not in builds.printed
    assert precache.open(builds.root / "2.store").classes == tuple(map(str, range(12)))


def test_numbers_whose_orders_agree_need_no_line(builds: Builds) -> None:
    put(builds.root / "in", *(f"{number}/p{number}.png" for number in range(10)))
    builds.labels("in")
    assert "--class-order" not in builds.printed


# --- splits -------------------------------------------------------------------------------------


def test_a_validation_set_that_lacks_a_class_is_refused(builds: Builds) -> None:
    put_classes(builds.root / "photos/train")
    put(builds.root / "photos/val", "dog/v1.png", "eel/v2.png")
    put(builds.root / "photos/train", ".hidden/x/a.png", "ant/.hidden/a.png")
    (builds.root / "photos/train/empty").mkdir()
    same, alone = builds.choices("photos/val")
    assert same == alone == {"v1": "dog", "v2": "eel"}
    assert "lacks 'cat'" in builds.printed
    classes = [precache.open(builds.root / f"choice0{n}.store").classes for n in range(2)]
    assert classes == [("cat", "dog", "eel"), ("dog", "eel")]
    builds.labels("photos/train")
    assert precache.open(builds.root / "2.store").classes == classes[0]


def test_a_validation_set_with_more_classes_is_refused(builds: Builds) -> None:
    put(builds.root / "photos", "train/cat/a.png", "train/dog/b.png", "val/cat/c.png")
    put(builds.root / "photos", "val/eel/d.png", "val/dog/e.png")
    assert builds.choices("photos/val") == [{"c": "cat", "d": "eel", "e": "dog"}]
    assert "has 'eel' besides" in builds.printed


def test_a_validation_set_in_a_folder_that_is_no_class(builds: Builds) -> None:
    put_classes(builds.root / "photos/train")
    put(builds.root / "photos/val", "images/v.png")
    assert builds.choices("photos/val") == [{"v": "images"}, {"v": None}]


def test_a_validation_set_of_the_same_classes_builds(builds: Builds) -> None:
    for split in ("train", "val", "test"):
        put_classes(builds.root / "photos" / split)
    put(builds.root / "photos", "dev/1/x.png", "dev/2/y.png")  # not what is trained on
    assert builds.labels("photos/val") == ANIMALS
    assert "--classes" not in builds.printed
    assert builds.labels("photos/test") == ANIMALS


def test_a_flat_test_set_builds(builds: Builds) -> None:
    put_classes(builds.root / "photos/train")
    put(builds.root / "photos/test", "x.png")
    assert builds.labels("photos/test") == {"x": None}


def test_a_table_of_a_validation_set_says_that_its_classes_are_numbered_alone(
    builds: Builds,
) -> None:
    put(builds.root, "a.png", "b.png")
    put_csv(builds.root / "val.csv", "path,label", "a.png,cat", "b.png,dog")
    builds.labels("val.csv")
    assert "The 2 classes are numbered from this source alone" in builds.printed
    builds.labels("val.csv", "--classes", "1.store")
    assert "numbered from this source alone" not in builds.printed


def test_a_plan_refuses_as_a_build_does_and_no_command_shows_a_secret(builds: Builds) -> None:
    put(builds.root / "in", "train/a.png", "val/b.png")
    assert builds.run("plan", "in", "a.store") == 2
    assert "  precache plan in/train a.store\n" in builds.printed
    assert "  precache plan in a.store --label-level 1\n" in builds.printed
    assert builds.run("plan", "in", "a.store", "--storage-option", "secret=hush") == 2
    assert "hush" not in builds.printed


def test_labels_from_a_file_leave_no_doubt_of_folders(builds: Builds) -> None:
    put(builds.root / "in", "train/a.png", "val/b.png")
    put_csv(builds.root / "labels.csv", "train/a.png,cat", "val/b.png,dog")
    assert builds.labels("in --labels labels.csv") == {"a": "cat", "b": "dog"}


def test_a_source_whose_name_begins_with_a_dash_keeps_its_folder(builds: Builds) -> None:
    for split in ("train", "val"):
        put_classes(builds.root / "-in" / split)
    assert builds.choices("./-in")[0] == ANIMALS


def test_a_choice_in_python_names_its_ways(tmp_path: Path) -> None:
    put(tmp_path / "in", "train/a.png", "val/b.png")
    with pytest.raises(ChoiceError) as caught:
        precache.build(tmp_path / "in", tmp_path / "a.store", address="serial")
    assert caught.value.ways == (
        (str(tmp_path / "in/train"),),
        ("--label-level", "1"),
        ("--label-level", "0"),
    )
    assert json.dumps(caught.value.ways)


def test_folders_of_a_bucket_are_read_alike(tmp_path: Path, s3: S3Server) -> None:
    folder = open_folder("s3://bucket/readings", s3.options())
    for name in ("train/cat/a", "train/dog/b", "val/cat/c", "train/.ipynb_checkpoints/d"):
        folder.put(f"{name}.png", [photo(name)])
    options: dict[str, Any] = {"address": "serial", "storage_options": s3.options()}
    with pytest.raises(ChoiceError) as caught:
        precache.build("s3://bucket/readings", tmp_path / "a.store", **options)
    [train] = caught.value.ways[0]
    assert train == "s3://bucket/readings/train"
    result = precache.build(train, tmp_path / "a.store", **options)
    assert result.left_out == {"service_folder": 1}
    assert built_labels(tmp_path / "a.store") == {"a": "cat", "b": "dog"}
