"""Labels of every kind, from every source: classes, numbers, several classes; hostile ones."""

import csv
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tfrecord import TFRecordWriter

from precache.errors import SourceError
from precache.store.labels import MOST_CLASSES
from precache.store.row_table import RowTable
from precache_workers.sources import labels as source_labels
from precache_workers.sources.kinds import open_source
from precache_workers.sources.label_evidence import decide
from tests.support.building import cut, encoded, write
from tests.support.containers import add, quiet_datasets
from tests.support.source_contract import check_source

Value = Any
PHOTOS = [encoded(cut(number)) for number in range(4)]

SEVERAL = [[1, 5], [], [0], [5, 3, 1]]
NAMED = [["dog", "cat"], [], ["ant"], ["cat"]]
NUMBERS = [0.5, float("nan"), -2.0, 1e-3]


# --- the same labels, written by each format's own writer ----------------------------------------


def _csv(folder: Path, labels: list[Value]) -> str:
    with (folder / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label"))
        for number, label in enumerate(labels):
            text = "" if label != label else json.dumps(label)
            rows.writerow((f"{number}.jpg", text))
    return _beside(folder, "list.csv")


def _jsonl(folder: Path, labels: list[Value]) -> str:
    lines = [
        json.dumps({"path": f"{number}.jpg", "label": None if label != label else label})
        for number, label in enumerate(labels)
    ]
    write(folder / "list.jsonl", "\n".join(lines).encode())
    return _beside(folder, "list.jsonl")


def _beside(folder: Path, name: str) -> str:
    for number, photo in enumerate(PHOTOS):
        write(folder / f"{number}.jpg", photo)
    return str(folder / name)


def _parquet(folder: Path, labels: list[Value]) -> str:
    pq.write_table(pa.table({"image": PHOTOS, "label": labels}), folder / "a.parquet")
    return str(folder / "a.parquet")


def _saved(folder: Path, labels: list[Value]) -> str:
    images = [{"bytes": photo, "path": None} for photo in PHOTOS]
    with quiet_datasets():
        data = datasets.Dataset.from_dict({"image": images, "label": labels})
        data.save_to_disk(folder / "saved")
    return str(folder / "saved")


def _tfrecord(folder: Path, labels: list[Value]) -> str:
    writer = TFRecordWriter(str(folder / "a.tfrecord"))
    for photo, label in zip(PHOTOS, labels, strict=True):
        values = label if isinstance(label, list) else [label]
        if values and isinstance(values[0], str):
            feature = ([value.encode() for value in values], "byte")
        else:
            feature = (values, "float" if isinstance(label, float) else "int")
        writer.write({"image": (photo, "byte"), "label": feature})
    writer.close()
    return str(folder / "a.tfrecord")


def _tar(folder: Path, labels: list[Value]) -> str:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, (photo, label) in enumerate(zip(PHOTOS, labels, strict=True)):
            add(tar, f"{number}.jpg", photo)
            add(tar, f"{number}.cls", json.dumps(label).encode())
    return str(folder / "a.tar")


def _lmdb(folder: Path, labels: list[Value]) -> str:
    with (
        lmdb.open(str(folder / "data"), map_size=1 << 24) as database,
        database.begin(write=True) as transaction,
    ):
        for number, (photo, label) in enumerate(zip(PHOTOS, labels, strict=True)):
            transaction.put(f"image-{number}".encode(), photo)
            transaction.put(f"label-{number}".encode(), json.dumps(label).encode())
    return str(folder / "data")


WRITERS: Mapping[str, Callable[[Path, list[Value]], str]] = {
    "csv": _csv, "jsonl": _jsonl, "parquet": _parquet, "saved": _saved, "tfrecord": _tfrecord,
    "tar": _tar, "lmdb": _lmdb,
}  # fmt: skip


def listed(source: str) -> RowTable:
    return check_source(open_source(source)).table


VECTORS = [[0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]
KINDS: list[tuple[list[Value], Any, tuple[str, ...], Any]] = [
    (SEVERAL, np.uint8, (), [[0, 1, 0, 0, 0, 1], [0] * 6, [1] + [0] * 5, [0, 1, 0, 1, 0, 1]]),
    (NAMED, np.uint8, ("ant", "cat", "dog"), [[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]),
    (NUMBERS, np.float32, (), NUMBERS),
    (VECTORS, np.uint8, (), VECTORS),
    ([1, 0, 4, -1], np.int64, (), [1, 0, 4, -1]),
]
"""Labels as they are written; dtype, names of classes, and values as they are listed."""


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_labels_of_every_kind_are_read_from_every_source(tmp_path: Path, writer: Any) -> None:
    for number, (labels, dtype, classes, values) in enumerate(KINDS):
        (tmp_path / str(number)).mkdir()
        table = listed(writer(tmp_path / str(number), labels))
        assert (table.labels.dtype, table.classes) == (dtype, classes)
        np.testing.assert_array_equal(table.labels, np.array(values, dtype))


# --- which kind ---------------------------------------------------------------------------------


def encode(values: list[Value], classes: tuple[str, ...] = ()) -> tuple[np.ndarray, Any]:
    keys = [f"key{number}" for number in range(len(values))]
    column = source_labels.column_of([source_labels.label_of(value) for value in values])
    encoded = source_labels.encode(source_labels.Column(column, keys, "it", classes=classes))
    return encoded.values, encoded.classes


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "0", "-1", "nan"], "numbers"),
        (["1", "2.5", "-3e-2", "NaN", ".5"], "values"),
        (["12345678901234567890", "7"], "names"),  # an identifier
        (["1", "two", "three"], "names"),
        (["nan", "cat"], "names"),
        (["[cat", "dog"], "names"),
        (["", "[]"], None),
        (["", ""], None),
        (["[1]", "2", ""], "several numbers"),
        (['["1"]', "two"], "several names"),
    ],
)
def test_labels_without_a_type_are_what_fits_all(texts: list[str], kind: str | None) -> None:
    keys = [str(number) for number in range(len(texts))]
    column = source_labels.column_of([source_labels.label_of(text) for text in texts], typed=False)
    assert decide(source_labels.Column(column, keys, "it", typed=False)).kind == kind


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[True, False], [False, False]], [[1, 0], [0, 0]]),
        ([[0.0, 1.0], [1.0, 1.0]], [[0, 1], [1, 1]]),
        ([[0, 1], [1, 0], None], [[0, 1], [1, 0], [0, 0]]),
        ([[0, 1], [2]], [[1, 1, 0], [0, 0, 1]]),
        ([[0, 0, 1], [1, 1]], [[1, 1], [0, 1]]),  # of two lengths: objects of two classes
        ([3, [1, 1, 3]], [[0, 0, 0, 1], [0, 1, 0, 1]]),
    ],
)
def test_lists_are_read_as_what_fits_all(values: list[Value], expected: list[list[int]]) -> None:
    assert encode(values)[0].tolist() == expected


def test_names_of_classes_say_how_many_there_are() -> None:
    labels, classes = encode([[1], [0, 1]], ("cat", "dog", "eel"))
    assert labels.tolist() == [[0, 1, 0], [1, 1, 0]]
    assert classes == ("cat", "dog", "eel")
    with pytest.raises(SourceError, match=r"key1 has the class number 3; .* it names 3 classes"):
        encode([[1], [0, 3]], ("cat", "dog", "eel"))
    with pytest.raises(SourceError, match="labels of 2 classes, and names 3"):
        encode([[True, False]], ("cat", "dog", "eel"))


def test_hugging_face_names_the_classes_of_lists(tmp_path: Path) -> None:
    names = ["cat", "dog", "eel"]
    features = datasets.Features(
        image=datasets.Value("binary"), tags=datasets.List(datasets.ClassLabel(names=names))
    )
    data = datasets.Dataset.from_dict({"image": PHOTOS, "tags": [[2], [], [0, 1], [0]]}, features)
    data.to_parquet(tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"), columns=_label_column("tags"))
    table = check_source(source).table
    assert table.classes == tuple(names)
    assert table.labels.tolist() == [[0, 0, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]]


def _label_column(name: str) -> Any:
    from precache_workers.sources.base import Columns

    return Columns(label=name)


def test_labels_of_a_container_may_all_be_missing(tmp_path: Path) -> None:
    """Lists that are all empty, or texts that are all NaN, fit what other containers have."""
    for name, labels in (("a", [[1, 2], [0]]), ("b", [[], []])):
        column = pa.array(labels, pa.list_(pa.int64()))
        pq.write_table(
            pa.table({"image": PHOTOS[:2], "label": column}), tmp_path / f"{name}.parquet"
        )
    source = open_source(str(tmp_path / "*.parquet"))
    listing = check_source(source)
    assert listing.table.labels.tolist() == [[0, 1, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    for name, texts in (("a", ("1.5", "2")), ("b", ("nan", "nan"))):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for number, text in enumerate(texts):
                add(tar, f"{number}.jpg", PHOTOS[number])
                add(tar, f"{number}.cls", text.encode())
    np.testing.assert_array_equal(
        listed(str(tmp_path / "*.tar")).labels, np.array([1.5, 2, np.nan, np.nan], np.float32)
    )


def test_labels_of_containers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    for name, label in (("a", 1), ("b", 1.5), ("c", "cat")):
        table = pa.table({"image": PHOTOS[:1], "label": [label]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            add(tar, "0.jpg", PHOTOS[0])
            add(tar, "0.cls", str(label).encode())
    with pytest.raises(SourceError, match=r"names and numbers and values, such as cat and 1 and"):
        listed(str(tmp_path / "*.parquet"))
    [doubt] = check_source(open_source(str(tmp_path / "*.tar"))).doubts
    assert (
        "such as 'cat' are words beside numbers" in doubt.text
    )  # text without a type is read once for all


@pytest.mark.parametrize("writer", [_parquet, _saved])
def test_the_file_of_what_is_no_label_is_named(tmp_path: Path, writer: Any) -> None:
    with pytest.raises(
        SourceError, match=r"\.(parquet|arrow) .*its column label, .* class number -1"
    ):
        listed(writer(tmp_path, [[0], [1, -1], [2], []]))


# --- hostile ones -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([[1], [-1]], "class number -1; those of several classes are from 0 to 65,535"),
        ([[MOST_CLASSES]], "class number 65536"),
        ([[10**30]], "class number 1000"),
        ([[0] * (MOST_CLASSES + 1)], "a list of 65,537 values"),
        ([[0.5, 1.0]], r"is \[0.5, 1.0\]; a list has class names, class numbers, or 0 and 1"),
        ([[1, "cat"]], "a list has class names, class numbers"),
        ([[None]], "a list has class names"),
        ([[[1]]], "a list has class names"),
        ([{"a": 1}], "is {'a': 1}"),
        (["x" * 5000], "a text of more than 4,096 characters"),
        ([["x" * 5000]], "a text of more than 4,096 characters"),
    ],
)
def test_a_value_that_is_no_label_is_named(values: list[Value], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode(values)


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), 1e39])
def test_a_number_beyond_float32_is_refused_by_its_key(number: float) -> None:
    with pytest.raises(SourceError, match=r"the label of key1 is .*, which is no finite float32"):
        encode([0.5, number])


@pytest.mark.parametrize("writer", [_csv, _jsonl, _parquet, _saved, _tar, _lmdb])
def test_a_negative_class_among_several_is_refused(tmp_path: Path, writer: Any) -> None:
    with pytest.raises(SourceError, match="has the class number -7"):
        listed(writer(tmp_path, [[1, 2], [3, -7], [1], [2]]))


def test_a_record_with_a_negative_class_is_a_hole(tmp_path: Path) -> None:
    source = open_source(_tfrecord(tmp_path, [[1, 2], [3, -7], [1], [2]]))
    table = source.list(lambda count: None).table
    [fetched] = source.fetch([table.keys[1]], [-1], table.locations_of([1]))
    assert "has the class number -7" in str(fetched)
    assert table.labels.tolist() == [[0, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("labels", [["cat", [1], [2], [3]], [0.5, [1], [2], [3]]])
@pytest.mark.parametrize("writer", [_jsonl, _tar, _lmdb])
def test_labels_of_two_kinds_are_refused(tmp_path: Path, writer: Any, labels: list[Value]) -> None:
    if writer is _tar and labels[0] == "cat":
        labels = ["[cat", *labels[1:]]
    with pytest.raises(SourceError, match=r"labels of .* are .*, such as .*make them alike"):
        listed(writer(tmp_path, labels))


def test_multi_hot_labels_that_memory_does_not_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_labels, "MOST_LABEL_NBYTES", 1000)
    with pytest.raises(SourceError, match="labels of 501 classes, which take 1 KB as multi-hot"):
        encode([[500], [1]])
