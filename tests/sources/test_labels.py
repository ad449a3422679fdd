"""Labels of every kind, from every source: classes, numbers, several classes; hostile ones."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from precache.errors import SourceError
from precache.store.labels import MOST_CLASSES
from precache.store.row_table import RowTable
from precache_workers.sources import labels as source_labels
from precache_workers.sources.base import Columns
from precache_workers.sources.kinds import open_source
from tests.support.building import cut, encoded, write
from tests.support.containers import SOURCES, quiet_datasets, write_table, write_tar
from tests.support.source_contract import check_source

Value = Any
PHOTOS = [encoded(cut(number)) for number in range(4)]

SEVERAL = [[1, 5], [], [0], [5, 3, 1]]
NAMED = [["dog", "cat"], [], ["ant"], ["cat"]]
NUMBERS = [0.5, float("nan"), -2.0, 1e-3]


# --- the same labels, written by each format's own writer ----------------------------------------

WRITERS = ("csv", "jsonl", "parquet", "saved", "tfrecord", "tar", "lmdb")
NAMES = {"tar": ("{}.jpg", "{}.cls"), "lmdb": ("image-{}", "label-{}")}


def put(kind: str, folder: Path, labels: list[Value]) -> str:
    """Write a source of photographs with these labels."""
    if kind in ("tar", "lmdb"):
        photo_name, label_name = NAMES[kind]
        members = [(photo_name.format(n), photo) for n, photo in enumerate(PHOTOS)]
        members += [(label_name.format(n), json.dumps(v).encode()) for n, v in enumerate(labels)]
        return SOURCES[kind](folder, members)
    columns: dict[str, Any] = {"image": PHOTOS, "label": labels}
    if kind == "saved":
        with quiet_datasets():
            datasets.Dataset.from_dict(columns).save_to_disk(folder / "saved")
        return str(folder / "saved")
    if kind in ("csv", "jsonl"):
        paths = [write(folder / f"{n}.jpg", photo) for n, photo in enumerate(PHOTOS)]
        columns = {"path": [path.name for path in paths], "label": labels}
    return write_table(folder / f"a.{kind}", columns)


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


@pytest.mark.parametrize("kind", WRITERS)
def test_labels_of_every_kind_are_read_from_every_source(tmp_path: Path, kind: str) -> None:
    for number, (labels, dtype, classes, values) in enumerate(KINDS):
        (tmp_path / str(number)).mkdir()
        table = listed(put(kind, tmp_path / str(number), labels))
        assert (table.labels.dtype, table.classes) == (dtype, classes)
        np.testing.assert_array_equal(table.labels, np.array(values, dtype))


# --- which kind ---------------------------------------------------------------------------------


def encode(values: list[Value], classes: tuple[str, ...] = ()) -> tuple[np.ndarray, Any]:
    keys = [f"key{number}" for number in range(len(values))]
    column = source_labels.column_of([source_labels.label_of(value) for value in values])
    encoded = source_labels.encode(source_labels.Column(column, keys, "it", classes=classes))
    return encoded.values, encoded.classes


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
        image=datasets.Image(), tags=datasets.List(datasets.ClassLabel(names=names))
    )
    images = [{"bytes": photo, "path": f"{n}.jpg"} for n, photo in enumerate(PHOTOS)]
    data = datasets.Dataset.from_dict({"image": images, "tags": [[2], [], [0, 1], [0]]}, features)
    with quiet_datasets():
        data.to_parquet(tmp_path / "a.parquet")
    columns = Columns(label="tags")
    table = check_source(open_source(str(tmp_path / "a.parquet"), columns=columns)).table
    assert [*table.keys] == [f"a.parquet/{n}.jpg" for n in range(4)]
    assert table.classes == tuple(names)
    assert table.labels.tolist() == [[0, 0, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]]


def test_labels_of_a_container_may_all_be_missing(tmp_path: Path) -> None:
    """Lists that are all empty, or texts that are all NaN, fit what other containers have."""
    for name, labels, texts in (("a", [[1, 2], [0]], "1.5 2"), ("b", [[], []], "nan nan")):
        column = pa.array(labels, pa.list_(pa.int64()))
        write_table(tmp_path / f"{name}.parquet", {"image": PHOTOS[:2], "label": column})
        members = [(f"{n}.cls", text.encode()) for n, text in enumerate(texts.split())]
        photos = [(f"{n}.jpg", PHOTOS[n]) for n in range(2)]
        write_tar(tmp_path / f"{name}.tar", [*photos, *members])
    table = listed(str(tmp_path / "*.parquet"))
    assert table.labels.tolist() == [[0, 1, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    table = listed(str(tmp_path / "*.tar"))
    np.testing.assert_array_equal(table.labels, np.array([1.5, 2, np.nan, np.nan], np.float32))


def test_labels_of_containers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    for name, label in (("a", 1), ("b", 1.5), ("c", "cat")):
        write_table(tmp_path / f"{name}.parquet", {"image": PHOTOS[:1], "label": [label]})
        write_tar(tmp_path / f"{name}.tar", [("0.jpg", PHOTOS[0]), ("0.cls", f"{label}".encode())])
    with pytest.raises(SourceError, match=r"names and numbers and values, such as cat and 1 and"):
        listed(str(tmp_path / "*.parquet"))
    # Text without a type is read once for all.
    [doubt] = check_source(open_source(str(tmp_path / "*.tar"))).doubts
    assert "such as 'cat' are words beside numbers" in doubt.text


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


@pytest.mark.parametrize("kind", WRITERS)
def test_a_negative_class_among_several_is_refused(tmp_path: Path, kind: str) -> None:
    source = open_source(put(kind, tmp_path, [[1, 2], [3, -7], [1], [2]]))
    if kind == "tfrecord":  # the record is a hole
        table = source.list(lambda count: None).table
        [fetched] = source.fetch([table.keys[1]], [-1], table.locations_of([1]))
        assert "has the class number -7" in str(fetched)
        assert table.labels.tolist() == [[0, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
        return
    column = r"a?\.(parquet|arrow) .*its column label, .*"
    where = {"jsonl": r"line 2 of .*a\.jsonl", "parquet": column, "saved": column}.get(kind, "")
    with pytest.raises(SourceError, match=f"{where}.* the class number -7"):
        source.list(lambda count: None)


@pytest.mark.parametrize("labels", [["cat", [1], [2], [3]], [0.5, [1], [2], [3]]])
@pytest.mark.parametrize("kind", ["jsonl", "tar", "lmdb"])
def test_labels_of_two_kinds_are_refused(tmp_path: Path, kind: str, labels: list[Value]) -> None:
    if kind == "tar" and labels[0] == "cat":
        labels = ["[cat", *labels[1:]]
    with pytest.raises(SourceError, match=r"labels of .* are .*, such as .*make them alike"):
        listed(put(kind, tmp_path, labels))


def test_multi_hot_labels_that_memory_does_not_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_labels, "MOST_LABEL_NBYTES", 1000)
    with pytest.raises(SourceError, match="labels of 501 classes, which take 1 KB as multi-hot"):
        encode([[500], [1]])
