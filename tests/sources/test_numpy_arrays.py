"""Arrays whose first axis is the samples, and arrays of one sample a file."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import SampleError, SourceError
from precache_workers.sources.base import Columns, Inputs
from precache_workers.sources.kinds import open_source
from tests.sources.test_sample_columns import described, header, opened, parts_of
from tests.support.containers import class_of, fetched, in_bucket, listed
from tests.support.servers import S3Server
from tests.support.source_contract import check_source

COUNT = 40
RNG = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray] = {
    "images": RNG.integers(0, 255, (COUNT, 6, 5, 3), np.uint8),
    "tokens": RNG.integers(0, 99, (COUNT, 7)).astype(">i8"),
    "scores": RNG.random(COUNT).astype(np.float16),
    "labels": np.arange(COUNT) % 3,
    "names": np.array(["cat", "dög"])[np.arange(COUNT) % 2],
    "ids": np.array([f"id-{number}" for number in range(COUNT)]),
    "several": RNG.integers(0, 2, (COUNT, 4), np.uint8),
    "one": np.arange(COUNT)[:, None] % 4,
    "short": np.zeros(4),
    "turned": np.asfortranarray(RNG.random((COUNT, 3))),
}
RECIPE = precache.Recipe.from_dict(
    {"fields": {"image": {}, "tokens": {"input": "tokens"}, "score": {"input": "scores"}}}
)


@pytest.fixture
def images(tmp_path: Path) -> str:
    """The array of images; those of its columns lie beside it."""
    for name, array in ARRAYS.items():
        np.save(tmp_path / f"{name}.npy", array)
    return str(tmp_path / "images.npy")


def check_rows(store: Path) -> None:
    """Check that the rows of a store are those of the arrays."""
    dataset = precache.CachedDataset(store)
    assert len(dataset) == COUNT
    for number, key in enumerate(dataset.keys):
        row, place = dataset[number], int(key.rpartition("/")[2].removeprefix("id-"))
        for name, array in (("image", "images"), ("tokens", "tokens"), ("score", "scores")):
            wanted = ARRAYS[array][place]
            np.testing.assert_array_equal(row[name].numpy(), wanted)
            assert row[name].numpy().dtype == wanted.dtype.newbyteorder("=")


def test_arrays_keep_the_contract_also_in_a_bucket(images: str, s3: S3Server) -> None:
    check_source(opened(images, "tokens", "images"))
    bucket = in_bucket(Path(images).parent, "s3://bucket/arrays", s3.options())
    remote = opened(f"{bucket}/images.npy", "tokens", storage_options=s3.options())
    check_source(remote)
    local = parts_of(opened(images, "tokens"))
    contents = {stem: one.content for stem, one in local.items()}
    assert {stem: one.content for stem, one in parts_of(remote).items()} == contents


def test_rows_are_samples_and_arrays_beside_them_columns(images: str, tmp_path: Path) -> None:
    options = {"address": "serial", "label_column": "labels"}
    precache.build(images, tmp_path / "store", RECIPE, **options)
    check_rows(tmp_path / "store")
    precache.build(images, tmp_path / "keyed", RECIPE, address="serial", key_column="ids")
    check_rows(tmp_path / "keyed")
    said = "40 samples are rows of arrays: 6 x 5 x 3 uint8, 7 int64 from 'tokens'; no labels"
    [note] = opened(images, "tokens").list(lambda count: None).notes
    assert note == f"{said} (--label-column NAME takes those of NAME.npy beside it)"


def test_an_edited_array_is_a_change_of_its_rows(images: str, tmp_path: Path) -> None:
    precache.build(images, tmp_path / "store", RECIPE, address="serial", shard_samples=100)
    tokens = ARRAYS["tokens"].copy()
    tokens[7] += 1
    np.save(tmp_path / "tokens.npy", tokens)
    os.utime(tmp_path / "tokens.npy", (2_000_000_000, 2_000_000_000))
    again = precache.build(images, tmp_path / "store", RECIPE, address="serial", shard_samples=100)
    assert again.rows_reused == COUNT - 1
    dataset = precache.CachedDataset(tmp_path / "store")
    rows = {key: dataset[number]["tokens"].numpy() for number, key in enumerate(dataset.keys)}
    np.testing.assert_array_equal(rows["images.npy/7"], tokens[7])
    source = opened(images, "tokens")
    table = source.list(lambda count: None).table
    os.utime(tmp_path / "tokens.npy", (2_100_000_000, 2_100_000_000))
    for error in source.fetch(table.keys, table.sizes.tolist(), table.locations):
        assert "has changed since it was listed" in str(error)


@pytest.mark.parametrize(
    ("column", "labels"),
    [
        ("labels", ARRAYS["labels"]),
        ("one", ARRAYS["one"][:, 0]),
        ("names", np.arange(COUNT) % 2),
        ("several", ARRAYS["several"]),
        ("scores", ARRAYS["scores"].astype(np.float32)),
    ],
)
def test_labels_are_those_of_the_array(images: str, column: str, labels: np.ndarray) -> None:
    listing = listed(images, None, column)
    np.testing.assert_array_equal(listing.table.labels, labels)
    if column == "names":
        assert class_of(listing)["images.npy/1"] == "dög"


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("label", r"has no column 'label' \(did you mean labels\?\), as there is no label\.npy"),
        ("../labels", r"has no column '\.\./labels'"),
        ("short", r"short\.npy has 4 rows, and .*images\.npy has 40"),
        ("turned", r"in Fortran's order.*np\.ascontiguousarray"),
        ("names", "is an array of <U3, and not of numbers"),
    ],
)
def test_a_column_that_cannot_be_read_is_refused(images: str, column: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        opened(images, column).list(lambda count: None)


HOSTILE = {
    header(described((1 << 50, 2))): "is said to be",
    header(described((-1, -8))): "no row with values",
    header(described((1 << 50, 0))): "no row with values",
    header(described(())): "no row with values",
    header(described((1,), "|O")): r"nothing is unpickled; of text, save array\.astype\(str\)",
    header("{" + "'a': 1, " * 99999 + "}", b"\x02\x00"): "is no NumPy array",
}


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_header_is_refused_before_memory_is_taken(number: int, tmp_path: Path) -> None:
    data, reason = [*HOSTILE.items()][number]
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(SourceError, match=reason):
        listed(tmp_path / "a.npy")


def test_a_row_over_the_limit_is_a_hole(images: str) -> None:
    assert all(isinstance(one, SampleError) for one in fetched(images, most_bytes=80))


# --- several files ------------------------------------------------------------------------------


def test_several_files_are_parts_or_samples_as_the_user_says(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / "data" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.npy"
        np.save(path, np.full((4, 3), number, np.float32))
    recipe = precache.Recipe.from_dict({"fields": {"x": {}}})
    with pytest.raises(SourceError, match=r"has no image.* give '(.*)'") as error:
        listed(tmp_path / "data")
    source = str(error.value).rpartition("give '")[2].partition("'")[0]
    with pytest.raises(precache.errors.ChoiceError, match="has 6 files of arrays") as choice:
        listed(source)
    for (flag, kind), shape, count in zip(choice.value.ways, [(3,), (4, 3)], [24, 6], strict=True):
        assert flag == "--source-kind"
        options: Any = {"source_kind": kind, "address": "serial"}
        precache.build(source, tmp_path / f"{kind}.store", recipe, **options)
        dataset = precache.CachedDataset(tmp_path / f"{kind}.store")
        assert [len(dataset), tuple(dataset[0]["x"].shape)] == [count, shape]
        check_source(open_source(source, kind=kind))
        assert dataset.version.classes == (("a", "b") if kind == "folders" else ())


def test_an_archive_of_arrays_is_unpacked_first(images: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", images=ARRAYS["images"], labels=ARRAYS["labels"])
    with pytest.raises(SourceError, match="unpack it by `python3 -m") as error:
        listed(tmp_path / "all.npz")
    command = str(error.value).partition("`")[2].partition("`")[0]
    subprocess.run(command, shell=True, check=True)
    source = tmp_path / "all_arrays" / "images.npy"
    columns = Columns(label="labels", inputs=Inputs())
    listing = check_source(open_source(str(source), columns=columns))
    np.testing.assert_array_equal(listing.table.labels, ARRAYS["labels"])
