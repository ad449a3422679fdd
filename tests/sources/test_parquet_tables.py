"""Parquet files: columns, labels, keys, row groups, changes, and hostile files."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import precache
from precache.errors import FetchError, SampleError, SourceError, StorageError
from precache.storage.local import LocalFolder
from precache_workers.runtime.time_limit import SamplesAtWork
from precache_workers.sources import file_ranges, parquet_tables
from precache_workers.sources.base import Columns, Sample
from precache_workers.sources.fetching import MAX_HELD_NBYTES, _runs_of_units
from precache_workers.sources.kinds import open_source
from tests.support import building
from tests.support.building import ask, cut, encoded, growth, pixels
from tests.support.building import write as file
from tests.support.containers import (
    class_of,
    fetched,
    listed,
    noted_ranges,
    quiet_datasets,
    write_table,
)
from tests.support.layouts import Builds
from tests.support.source_contract import check_source

RECIPE = precache.Recipe.image(resize=40, crop=32)
PHOTO = encoded(cut(0))
build = functools.partial(building.build, recipe=RECIPE)


# --- columns ------------------------------------------------------------------------------------


DECLARED = {
    "mask": {"_type": "Image"},
    "Image": {"_type": "Image"},
    "sex": {"_type": "ClassLabel", "names": ["f", "m"]},
    "Label": {"_type": "ClassLabel", "names": ["ant", "bee"]},
}


def described(columns: Any, features: Any) -> pa.Table:
    """A table with metadata of Hugging Face."""
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table(columns).replace_schema_metadata(metadata)


@pytest.mark.parametrize(
    ("columns", "features", "note", "classes"),
    [
        ({"id": [1, 2], "img": [PHOTO] * 2, "cls": ["b", "a"]}, {},
         "'img', labels from 'cls'; not used: 'id'", ["b", "a"]),
        ({"mask": [b"no"], "Image": [PHOTO], "sex": [0], "Label": [1]}, DECLARED,
         "'Image', labels from 'Label'; not used: 'mask', 'sex'", ["bee"]),
        ({"image": [PHOTO] * 3, "label": ["b", None, "a"]}, {},
         "'image', labels from 'label'", ["b", None, "a"]),
        ({"image": [PHOTO] * 3, "label": pa.array(["b", "a", "b"]).dictionary_encode()}, {},
         "'image', labels from 'label'", ["b", "a", "b"]),
        ({"image": [PHOTO] * 3, "label": pa.array(["b", "a", "b"], pa.large_string())}, {},
         "'image', labels from 'label'", ["b", "a", "b"]),
    ],
)  # fmt: skip
def test_columns_are_guessed_and_named_in_one_line(
    tmp_path: Path, columns: Any, features: Any, note: str, classes: list[str | None]
) -> None:
    listing = listed(write_table(tmp_path / "a.parquet", described(columns, features)))
    assert listing.notes == (f"Images from the column {note}",)
    keys = [f"a.parquet/{number}" for number in range(len(classes))]
    assert [*class_of(listing).items()] == [*zip(keys, classes, strict=True)]


STRUCT = {"image": [PHOTO], "meta": [{"id": "a", "label": 1}]}
TWO = {"image": [PHOTO] * 2}
ALIKE = pa.Table.from_arrays([pa.array([PHOTO]), *[pa.array([1])] * 2], ["image", "age", "age"])


@pytest.mark.parametrize(
    ("columns", "wanted", "expected"),
    [
        ({"image": [b"no"] * 2, "scan": [PHOTO] * 2, "kind": ["m", "n"], "id": ["x/1", "x/2"]},
         ("scan", "kind", "id"), {"x/1": "m", "x/2": "n"}),
        (STRUCT, (None, None, "meta.id"), {"a": None}),
        ({"meta.img": [PHOTO], "meta.label": ["cat"], "meta.id": ["x"]},
         ("meta.img", "meta.label", "meta.id"), {"x": "cat"}),
        ({"image": [PHOTO] * 2, "id": [7, 3]}, (None, None, "id"), {"7": None, "3": None}),
    ],
)  # fmt: skip
def test_columns_are_chosen_by_name(
    tmp_path: Path, columns: Any, wanted: Any, expected: dict[str, str | None]
) -> None:
    source = open_source(write_table(tmp_path / "a.parquet", columns), columns=Columns(*wanted))
    assert class_of(check_source(source)) == expected
    [sample] = source.fetch([[*expected][-1]], [-1])
    assert isinstance(sample, Sample)
    assert sample.inputs == {"bytes": PHOTO}


@pytest.mark.parametrize(
    ("columns", "wanted", "why"),
    [
        ({"image": [PHOTO], "label": [1]}, (None, "lable"), r"'lable' \(did you mean label\?\)"),
        ({"image": [PHOTO], "label": [1]}, ("label",), "'label' has values of type int64; images"),
        (STRUCT, (None, "meta.label"), r"has no column 'meta\..*; it has 'image', 'meta'"),
        (STRUCT, ("meta.id",), r"has no column 'meta\..*; it has 'image', 'meta'"),
        (STRUCT, (None, None, "meta.no"), r"has no column 'meta\..*; it has 'image', 'meta'"),
        (STRUCT, (None, None, "meta"), r"column 'meta' has values of type struct.*; a key is"),
        (STRUCT, (None, "meta"), "column 'meta' of .* has values of type struct"),
        ({"image": [PHOTO], "tags": [["cat"]]}, (None, None, "tags"),
         r"a\.parquet: its column 'tags' .* a key is text or a wh"),
        ({"image": [PHOTO], "label": [[[1], [2]]]}, (), r"a\.parquet .*: its column label, value"),
        ({"image": [PHOTO], "label": pa.array([(1 << 63) + 5], pa.uint64())}, (),
         "class number 9223372036854775813, which is too large"),
        ({"image": pa.array([], pa.binary())}, (), r"a\.parquet is empty: it has no sample"),
        ({"left": [PHOTO], "right": [PHOTO]}, (), r"'left', 'right' of .* may have the images"),
        ({"uri": ["s3://bucket/a.jpg"]}, (), "give --source-kind manifest"),
        ({"image": [[PHOTO, PHOTO]], "box": [[1.0, 2.0]]}, (),
         r"'image' \(list<element: binary>\), 'box' \(list<el"),
        (ALIKE, (), "has several columns 'age'; rename all but one"),
        ({**TWO, "id": ["x", "x"]}, (None, None, "id"), "has 2 samples x; keys name samples"),
        ({**TWO, "id": ["x", None]}, (None, None, "id"), "some of its id are missing or empty"),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, columns: Any, wanted: Any, why: str
) -> None:
    source = write_table(tmp_path / "a.parquet", columns)
    with pytest.raises(SourceError, match=why):
        listed(source, *wanted)


def test_labels_may_be_numbers_with_names_in_the_metadata(tmp_path: Path) -> None:
    def put(name: str, labels: list[int | None], *names: str) -> str:
        columns = {"image": [PHOTO] * 3, "kind": pa.array(labels, pa.int32())}
        features = {"kind": {"_type": "ClassLabel", "names": names}}
        return write_table(tmp_path / f"{name}.parquet", described(columns, features))

    source = put("a", [1, None, -1], "ant", "bee")
    assert [*class_of(listed(source)).values()] == ["bee", None, None]
    assert listed(source).table.classes == ("ant", "bee")
    with pytest.raises(SourceError, match=r"class number 2; .* up to 1, as it names 2 classes"):
        listed(put("b", [1, 2, 0], "ant", "bee"))
    with pytest.raises(SourceError, match="has several classes 'ant'; rename all but one"):
        listed(put("c", [1, 2, 0], "ant", "bee", "ant"))


def test_a_partitioned_directory_is_read_as_one_source(tmp_path: Path) -> None:
    for name in ("year=1/a", "year=2/a"):
        write_table(tmp_path / f"data/{name}.parquet", {"image": [PHOTO]})
    expected = ["year=1/a.parquet/0", "year=2/a.parquet/0"]
    assert list(listed(str(tmp_path / "data/**/*.parquet")).table.keys) == expected
    opened = open_source(str(tmp_path / "data"), kind="parquet")
    keys = opened.list(lambda count: None).table.keys
    assert [key.removeprefix("data/") for key in keys] == expected


def test_paths_that_do_not_name_one_row_each_are_no_keys(tmp_path: Path) -> None:
    for paths in (["a.jpg", "a.jpg"], ["a.jpg", None], ["/home/me/a.jpg", "/home/me/b.jpg"]):
        images = [{"bytes": PHOTO, "path": path} for path in paths]
        source = write_table(tmp_path / "a.parquet", {"image": images})
        assert list(listed(source).table.keys) == ["a.parquet/0", "a.parquet/1"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pa.binary_view(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())], ids=str
)
def test_images_may_be_of_every_type_of_bytes(tmp_path: Path, kind: Any) -> None:
    photos = [PHOTO, encoded(cut(1)), PHOTO]
    source = write_table(tmp_path / "a.parquet", {"image": pa.array(photos).cast(kind)})
    table = check_source(open_source(source)).table
    samples = open_source(source).fetch(table.keys, [-1] * 3, table.locations)
    assert [sample.inputs["bytes"] for sample in samples if isinstance(sample, Sample)] == photos


def test_a_table_that_has_only_paths_is_read_as_one_of_paths(builds: Builds) -> None:
    for number in range(3):
        file(builds.root / f"photos/{number}.png", encoded(cut(number)))
    paths = [str(path) for path in sorted((builds.root / "photos").iterdir())]
    data = datasets.Dataset.from_dict({"image": paths, "label": [1, 0, 1]})
    data = data.cast_column("image", datasets.Image())
    data = data.cast_column("label", datasets.ClassLabel(names=["bee", "ant"]))
    with quiet_datasets():
        data.to_parquet(builds.root / "a.parquet")
    flags = ["--address", "serial", "--resize", "16x16"]
    assert builds.run("build", "a.parquet", "store", *flags) == 2
    assert "to read the files there, give --source-kind manifest" in builds.printed
    assert builds.run("build", "a.parquet", "store", *flags, "--source-kind", "manifest") == 0
    assert {*pixels(builds.root / "store")} == {*paths}
    assert precache.open(builds.root / "store").classes == ("bee", "ant")


def test_a_file_of_paths_among_others_has_holes(tmp_path: Path) -> None:
    for number, photo in enumerate((PHOTO, None, PHOTO)):
        images = [{"bytes": photo, "path": f"{number}.png"}]
        column = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        write_table(tmp_path / f"{number}.parquet", {"image": column})
    write_table(tmp_path / "3.parquet", {"image": pa.array([None, PHOTO], pa.large_binary())})
    opened = open_source(f"{tmp_path}/*.parquet")
    table = opened.list(lambda count: None).table
    one, none, other, missing, _ = opened.fetch(table.keys, [-1] * 5, table.locations)
    assert isinstance(missing, SampleError)
    assert "its row has no image, or only a path" in str(missing)
    assert isinstance(one, Sample)
    assert isinstance(other, Sample)
    assert "only a path of one; " in str(none)
    assert str(none).endswith("give --source-kind manifest")


# --- row groups and changes ---------------------------------------------------------------------


@pytest.mark.parametrize(("unit_bytes", "units"), [(1, 4), (1 << 20, 1)])
def test_row_groups_are_read_once_and_small_ones_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int, units: int
) -> None:
    monkeypatch.setattr("precache_workers.sources.containers.UNIT_BYTES", unit_bytes)
    photos = [encoded(cut(number)) for number in range(40)]
    write_table(tmp_path / "a.parquet", {"image": photos}, row_group_size=10)
    opened: list[str] = []

    def noted(folder: Any, file: Any, *rest: Any, **options: Any) -> Any:
        opened.append(file.name)
        return file_ranges.open_file(folder, file, *rest, **options)

    monkeypatch.setattr("precache_workers.sources.parquet_tables.open_file", noted)
    build(str(tmp_path / "a.parquet"), tmp_path / "store", shard_samples=100)
    expected = 2 + 2 * units  # for the listing and the footer, the probe and the build
    assert expected <= len(opened) <= expected + 1  # two threads may need the footer at once


def test_a_reading_that_fails_is_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_source(write_table(tmp_path / "a.parquet", {"image": [PHOTO] * 3}))
    table = opened.list(lambda count: None).table
    monkeypatch.setattr(LocalFolder, "open", lambda folder, name: None)
    failure = StorageError("no answer")
    monkeypatch.setattr(LocalFolder, "read_ranges", lambda folder, ranges: [failure])
    for error in opened.fetch(table.keys, [-1] * 3, table.locations):
        assert isinstance(error, FetchError)
        assert str(error) == "no answer"


# --- hostile files ------------------------------------------------------------------------------


def test_checksums_of_pages_are_verified(tmp_path: Path) -> None:
    photos = [encoded(cut(number)) for number in range(3)]
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    path = tmp_path / "a.parquet"
    opened = open_source(write_table(path, {"image": photos}, write_page_checksum=True, **plain))
    data = bytearray(path.read_bytes())
    data[data.index(photos[1]) + 300] ^= 1
    path.write_bytes(data)
    table = opened.list(lambda count: None).table
    for sample in opened.fetch(table.keys, table.sizes.tolist(), table.locations):
        assert isinstance(sample, SampleError)
        assert "CRC" in str(sample)


def test_a_footer_that_claims_more_rows_is_refused(tmp_path: Path) -> None:
    images = pa.array([b""] * 200_000)
    source = write_table(tmp_path / "a.parquet", {"image": images}, compression="zstd")
    assert Path(source).stat().st_size < 200_000
    with pytest.raises(SourceError, match="claims 200,000 rows and has"):
        listed(source)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_pages_that_are_damaged_make_holes_and_cost_no_rows_before_them(
    tmp_path: Path, compression: str
) -> None:
    photos = [os.urandom(20_000) for _ in range(400)]
    pages = {"use_dictionary": False, "write_batch_size": 8, "compression": compression}
    path = Path(write_table(tmp_path / "a.parquet", {"image": photos}, **pages))
    opened = open_source(str(path))
    table = opened.list(lambda count: None).table
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size * 3 // 4)
        file.write(b"\xff" * 500_000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    samples = opened.fetch(table.keys, [-1] * 400, table.locations)
    assert all(isinstance(sample, Sample) for sample in samples[:250])
    assert isinstance(samples[-1], SampleError)
    assert "cannot be read" in str(samples[-1])


def test_a_file_replaced_while_it_is_read_gives_no_image_of_another_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_table(tmp_path / "a.parquet", {"image": [PHOTO] * 3})
    other = write_table(tmp_path / "other/a.parquet", {"image": [b"other"] * 3})
    opened = open_source(source)
    table = opened.list(lambda count: None).table
    open_ = LocalFolder.open

    def replaced(folder: LocalFolder, name: str) -> int | None:
        Path(other).replace(source)
        return open_(folder, name)

    monkeypatch.setattr(LocalFolder, "open", replaced)
    for error in opened.fetch(table.keys[:1], [-1], table.locations_of([0])):
        assert isinstance(error, FetchError)


@pytest.mark.parametrize(
    ("failure", "fitting", "kind"),
    [
        (OSError(5, "Input/output error"), 0, FetchError),
        (OSError("x"), 0, SampleError),
        (pa.ArrowMemoryError("malloc of size 4096000000 failed"), 1, Sample),
    ],
)
def test_what_the_system_cannot_read_is_no_hole_and_short_memory_is_no_damage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    fitting: int,
    kind: type[Any],
) -> None:
    """Of few rows at a time."""
    opened = open_source(write_table(tmp_path / "a.parquet", {"image": [PHOTO] * 3}))
    table = opened.list(lambda count: None).table
    read = parquet_tables._values

    def failing(table: Any, group: int, column: str, rows: set[int]) -> Any:
        if len(rows) > fitting:
            raise failure
        return read(table, group, column, rows)

    monkeypatch.setattr(parquet_tables, "_values", failing)
    assert {type(one) for one in opened.fetch(table.keys, [-1] * 3, table.locations)} == {kind}


def test_a_text_that_is_repeated_takes_no_memory_each_time(tmp_path: Path) -> None:
    rows = 4000
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * 10**6]))
    columns = {"image": [os.urandom(4) for _ in range(rows)], "label": text}
    source = write_table(tmp_path / "a.parquet", columns, compression="zstd", store_schema=False)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(SourceError, match="column label is a text of more than 4,096 characters"):
        listed(source)
    assert pa.default_memory_pool().max_memory() < before + (100 << 20)


def test_large_images_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    photos = [bytes(8_000_000)] * 20
    source = write_table(
        tmp_path / "a.parquet", {"image": photos}, use_dictionary=False, compression="zstd"
    )
    opened = open_source(source)
    table = opened.list(lambda count: None).table
    assert table.locations is not None
    assert table.expected_sizes([0])[0] == pytest.approx(8_000_000, rel=0.01)
    runs = list(_runs_of_units([-1] * 20, table.locations))
    assert sorted(row for run in runs for row in run) == list(range(20))
    assert max(map(len, runs)) <= MAX_HELD_NBYTES // 8_000_000


def test_a_remote_listing_reads_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"image": [os.urandom(20_000) for _ in range(400)], "label": [1] * 400}
    source = write_table(tmp_path / "a.parquet", columns, row_group_size=100, use_dictionary=False)
    read = noted_ranges(monkeypatch)
    assert len(listed(source).table) == 400
    assert sum(read) < 1_000_000
    assert len(read) < 10


def test_time_limits_hold_for_a_row_and_not_for_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(write_table(tmp_path / "a.parquet", {"image": [PHOTO] * 4}))
    table = source.list(lambda count: None).table
    kept, make = SamplesAtWork(seconds=1.0), parquet_tables.cell_of
    late: list[str] = []

    def slow(*arguments: Any) -> Any:
        kept.clock += 0.9
        late.extend(kept.late())
        return make(*arguments)

    monkeypatch.setattr(parquet_tables, "cell_of", slow)
    with kept.kept():
        source.fetch(table.keys, table.sizes.tolist(), table.locations)
    assert kept.clock > 3
    assert not late


@pytest.mark.parametrize("struct", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_a_large_image_that_comes_often_takes_little_memory(tmp_path: Path, struct: bool) -> None:
    large, rows = 8 << 20, 64
    images = pa.array([bytes([n]) * large for n in range(3)], pa.binary())
    numbers = pa.array([n % 3 for n in range(rows)], pa.int32())
    column = pa.DictionaryArray.from_arrays(numbers, images)
    if struct:
        column = pa.StructArray.from_arrays(
            [column, pa.nulls(rows, pa.string())], ["bytes", "path"]
        )
    # One page has each image once, and 512 MiB when it is decoded.
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"image": column}), path, store_schema=False, dictionary_pagesize_limit=1 << 30
    )
    assert ask(growth, fetched, str(path)) < 200 << 20
    assert [one.nbytes for one in fetched(path)] == [large] * rows


def test_a_remote_build_reads_each_row_group_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many small shards, most of which have rows of few row groups."""
    photos = [encoded(cut(number)) + os.urandom(20_000) for number in range(320)]
    source = write_table(tmp_path / "a.parquet", {"image": photos}, row_group_size=20)
    read = noted_ranges(monkeypatch)
    build(source, tmp_path / "store")
    assert sum(read) < 3 * Path(source).stat().st_size  # the probe and the footers among it
