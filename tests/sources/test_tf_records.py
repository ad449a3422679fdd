"""TFRecord files: features, labels, checksums, and hostile files."""

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter
from tfrecord import TFRecordWriter

from precache.errors import ChoiceError, PrecacheError, SampleError, SourceError
from precache_workers.sources.base import Columns, Sample
from precache_workers.sources.kinds import open_source
from precache_workers.sources.tf_records import parts_of
from tests.support.building import cut, encoded
from tests.support.containers import fetched, listed, write_examples
from tests.support.source_contract import check_source

PHOTO = encoded(cut(0))
HEAD = 12


def example(image: Any = PHOTO, label: Any = 1, name: str = "image") -> dict[str, Any]:
    return {name: (image, "byte"), "label": (label, "int"), "bbox": ([0.1, 0.2], "float")}


# --- features -----------------------------------------------------------------------------------


def test_features_of_tensorflows_image_examples_are_found(tmp_path: Path) -> None:
    records = [
        {
            "image/encoded": (encoded(cut(n)), "byte"),
            "image/format": (b"JPEG", "byte"),
            "image/class/label": (n, "int"),
            "image/class/text": (b"cat", "byte"),
            "image/height": (40, "int"),
        }
        for n in range(3)
    ]
    source = write_examples(tmp_path / "train.tfrecord", *records)
    listing = check_source(open_source(source))
    assert listing.notes == (
        "Images from the feature 'image/encoded', labels from 'image/class/label'",
        "Features that are not used: 'image/class/text', 'image/format', 'image/height'",
    )
    assert listing.table.labels.tolist() == [0, 1, 2]
    assert list(listing.table.keys) == [f"train.tfrecord/{n}" for n in range(3)]
    assert [one.inputs["bytes"] for one in fetched(source)] == [encoded(cut(n)) for n in range(3)]


def test_features_are_chosen_by_name(tmp_path: Path) -> None:
    record = {
        "left": (PHOTO, "byte"), "right": (b"other", "byte"), "breed": (b"pug", "byte"),
        "id": (-7, "int"),
    }  # fmt: skip
    source = write_examples(tmp_path / "a.tfrecords", record)
    table = listed(source, "right", "breed", "id").table
    assert list(table.keys) == ["-7"]
    assert table.classes == ("pug",)
    assert fetched(source, "right")[0].inputs == {"bytes": b"other"}


BREED = {"image": (PHOTO, "byte"), "breed": (b"pug", "byte"), "id": (-7, "int")}
TEXT = {"image": (PHOTO, "byte"), "label": (b"cat", "byte")}


@pytest.mark.parametrize(
    ("records", "columns", "why"),
    [
        ([BREED], (None, "breeds"), r"first record, it has no feature 'breeds' \(did you "),
        ([BREED], ("id",), "'id' has no bytes"),
        ([{"left": (PHOTO, "byte"), "right": (PHOTO, "byte")}], (),
         "several images: left, right; choose one by --image"),
        ([{"text": (b"a", "byte")}], (), "no feature with an encoded image; it has 'text'"),
        ([example(label=1), TEXT], (), r"names and numbers, such as cat and 1; .*--label-column"),
        ([{**TEXT, "label": ([0.5, 1.5], "float")}], (),
         "'label' is .0.5, 1.5.; a list has class names"),
        ([{**TEXT, "label": ([1, -2], "int")}], (), "has the class number -2; .* from 0 to"),
        ([{**TEXT, "label": (float("inf"), "float")}], (), "is inf, which is no finite"),
        ([example(name="image/encoded") | example()], (), "several images: image, image/encoded;"),
        ([{**TEXT, "label": (PHOTO, "byte")}], (), "'label' has bytes that are no text; give"),
    ],
)  # fmt: skip
def test_features_that_do_not_fit_are_refused(
    tmp_path: Path, records: Any, columns: Any, why: str
) -> None:
    with pytest.raises(SourceError, match=why):
        listed(write_examples(tmp_path / "a.tfrecord", *records), *columns)


SPLITS = [{**TEXT, "image/split": (name, "byte")} for name in (b"train", b"val")]


@pytest.mark.parametrize(
    ("records", "columns", "what", "ways"),
    [
        ([{**example(), "labels": (n, "int")} for n in (1, 2)], (), "'label', 'labels' of .* other",
         [("--label-column", "label"), ("--label-column", "labels")]),
        ([example(), {**example(), "image/class/label": (3, "int")}], (), "'label', 'image/class/l",
         [("--label-column", "label"), ("--label-column", "image/class/label")]),
        (SPLITS, (None, "label"), "'image/split' .* look like splits", [("--all-splits",)]),
    ],
)  # fmt: skip
def test_features_that_leave_two_readings_are_doubts(
    tmp_path: Path, records: Any, columns: Any, what: str, ways: Any
) -> None:
    [doubt] = listed(write_examples(tmp_path / "a.tfrecord", *records), *columns).doubts
    assert re.search(what, doubt.what)
    assert [way for way, _ in doubt.choices if way] == ways


def test_equal_labels_of_two_features_leave_no_doubt(tmp_path: Path) -> None:
    records = [{**example(label=n), "labels": (n, "int")} for n in (1, 2)]
    listing = listed(write_examples(tmp_path / "a.tfrecord", *records))
    assert (listing.doubts, listing.table.labels.tolist()) == ((), [1, 2])


def test_records_may_be_images(tmp_path: Path) -> None:
    with (tmp_path / "a.tfrecord").open("wb") as file:
        writer = RecordWriter(file)
        for n in range(3):
            writer.write(encoded(cut(n)))
    listing = check_source(open_source(str(tmp_path / "a.tfrecord")))
    assert listing.notes == ("Each record is an image, without a label",)
    assert listing.table.labels.tolist() == [-1] * 3


def test_records_with_and_without_labels_are_named_in_a_line_each(tmp_path: Path) -> None:
    bare = {"image": (PHOTO, "byte")}
    source = write_examples(tmp_path / "a.tfrecord", bare, example())
    listing = listed(source)
    assert listing.notes == (
        "Images from the feature 'image', no labels",
        "Images from the feature 'image', labels from 'label'",
    )
    assert listed(source, None, "label").table.labels.tolist() == [-1, 1]
    with pytest.raises(SourceError, match=r"in its first record, it has no feature 'label'"):
        listed(write_examples(tmp_path / "c.tfrecord", bare, bare), None, "label")
    source = write_examples(tmp_path / "b.tfrecord", example(), bare)
    assert listed(source, None, "label").table.labels.tolist() == [1, -1]
    assert [type(one) for one in fetched(source, None, "label")] == [Sample, Sample]


def test_a_record_without_an_image_is_a_hole(tmp_path: Path) -> None:
    none = {"label": (1, "int")}
    source = write_examples(tmp_path / "a.tfrecord", example(), none, example(image=[]), example())
    samples = fetched(source)
    assert [type(one) for one in samples] == [Sample, SampleError, SampleError, Sample]
    assert "no feature with an encoded image" in str(samples[1])
    assert "has 0 images" in str(samples[2])


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(
            st.tuples(st.lists(st.binary(max_size=300), max_size=3), st.just("byte")),
            st.tuples(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), st.just("int")),
            st.tuples(st.lists(st.floats(width=32), max_size=3), st.just("float")),
        ),
        max_size=5,
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=300),
)
def test_every_example_is_read_as_it_was_written(
    features: dict[str, Any], label: int, image: bytes
) -> None:
    features |= {"i": ([image], "byte"), "l": ([label], "int"), "k": ([b"key"], "byte")}
    parts = parts_of(TFRecordWriter.serialize_tf_example(features), Columns("i", "l", "k"))
    assert (bytes(parts.image), parts.label, parts.key) == (image, label, "key")


# --- hostile files ------------------------------------------------------------------------------


def test_a_length_that_lies_is_refused(tmp_path: Path) -> None:
    path = Path(write_examples(tmp_path / "a.tfrecord", example(), example()))
    data = bytearray(path.read_bytes())
    length = 1 << 62
    data[:HEAD] = length.to_bytes(8, "little") + TFRecordWriter.masked_crc(
        length.to_bytes(8, "little")
    )
    path.write_bytes(data)
    with pytest.raises(SourceError, match="the record at byte 0 has 4,611,686,018,427,387,904 by"):
        listed(str(path))
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="is no TFRecord file"):
        listed(str(path))


def test_a_damaged_record_is_a_hole(tmp_path: Path) -> None:
    path = Path(write_examples(tmp_path / "a.tfrecord", *[example(name="scan")] * 3))
    data = bytearray(path.read_bytes())
    for number in (0, 2):
        data[number * len(data) // 3 + 500] ^= 1
    path.write_bytes(data)
    samples = fetched(path, "scan")
    assert [type(one) for one in samples] == [SampleError, Sample, SampleError]
    assert str(samples[0]) == "its record is damaged: it has another CRC-32C"


def test_a_compressed_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = Path(write_examples(tmp_path / "a.tfrecord", example()))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(SourceError, match=r"is compressed: .*decompress it"):
        listed(str(path))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_examples_are_refused_or_lead_into_the_record(data: st.DataObject) -> None:
    record = bytearray(TFRecordWriter.serialize_tf_example(example(image=b"\xff\xd8\xff" * 20)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(record) - 1))
        record[place] = data.draw(st.integers(0, 255))
    try:
        parts = parts_of(bytes(record[: data.draw(st.integers(0, len(record)))]), Columns())
    except (PrecacheError, ValueError):
        return
    assert len(parts.image) <= len(record)


@pytest.mark.parametrize("name", ["cifar10-train.tfrecord-00000-of-00001", "train-00000-of-01024"])
def test_files_as_tensorflow_calls_them_are_refused_with_the_flag_that_reads_them(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "in").mkdir()
    write_examples(tmp_path / "in" / name, example())
    (tmp_path / "in/label.labels.txt").write_text("cat")
    for source in (tmp_path / "in", tmp_path / "in" / name):
        with pytest.raises(ChoiceError, match="is called as TFRecord files are") as refused:
            listed(source)
        [[uri, *flags]] = refused.value.ways
        assert flags == ["--source-kind", "tfrecord"]
        assert len(listed(uri, kind="tfrecord").table) == 1
    if ".tfrecord" in name:
        with pytest.raises(ChoiceError, match="is called as TFRecord files are"):
            listed(tmp_path / "in/*.tfrecord-*")
