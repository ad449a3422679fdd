"""Indexes beside tar archives in buckets and on web servers: used where they fit, else not."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import FetchError, PrecacheError
from precache.storage.open import open_folder
from precache_workers.sources import tar_archives
from precache_workers.sources.base import Listing
from precache_workers.sources.contract import check_source
from precache_workers.sources.kinds import open_source
from tests.support.building import cut, encoded, labels, pixels, write_jpegs
from tests.support.containers import add, tar_index, write_tars, write_webdataset
from tests.support.servers import S3Server, web_server

RECIPE = precache.Recipe.image(resize=40, crop=32)
PHOTO = encoded(cut(0))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "shards").mkdir()
    with web_server(tmp_path / "shards") as url:
        yield url


def write_index(archive: Path) -> Path:
    index = archive.with_suffix(".idx")
    with archive.open("rb") as file:
        index.write_text(tar_index(file))
    return index


def write_archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            add(tar, name, data)


def listed(source: str) -> Listing:
    return open_source(source).list(lambda count: None)


def build(source: str, store: Path, **options: Any) -> Any:
    return precache.build(source, store, RECIPE, address="serial", **options)


def refuse_to_open(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("the archive was read")


@pytest.mark.parametrize("write", [write_tars, write_webdataset])
def test_an_index_stands_for_reading_the_archive(
    write: Any, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jpegs(tmp_path / "photos", 20)
    (tmp_path / "shards").mkdir()
    write(tmp_path / "photos", tmp_path / "shards")
    bucket = f"s3://bucket/{write.__name__}"
    folder = open_folder(bucket, s3.options())
    for archive in (tmp_path / "shards").glob("*.tar"):
        folder.put(archive.name, [archive.read_bytes()])
    build(f"{bucket}/*.tar", tmp_path / "read.store", storage_options=s3.options())
    for archive in (tmp_path / "shards").glob("*.tar"):
        index = write_index(archive)
        folder.put(index.name, [index.read_bytes()])
    monkeypatch.setattr(tar_archives, "open_file", refuse_to_open)
    listing = check_source(open_source(f"{bucket}/*.tar", s3.options()))
    assert listing.notes[0] == "3 tar archives are listed by the .idx files beside them"
    build(f"{bucket}/*.tar", tmp_path / "indexed.store", storage_options=s3.options())
    assert labels(tmp_path / "indexed.store") == labels(tmp_path / "read.store")
    expected, rows = pixels(tmp_path / "read.store"), pixels(tmp_path / "indexed.store")
    assert expected.keys() == rows.keys()
    assert len(rows) == 20
    for key, row in rows.items():
        np.testing.assert_array_equal(row, expected[key])


@pytest.mark.parametrize("write", [write_tars, write_webdataset])
def test_the_tool_of_dali_writes_such_indexes(write: Any, tmp_path: Path) -> None:
    wds2idx = pytest.importorskip("wds2idx", reason="NVIDIA DALI is not installed")
    write_jpegs(tmp_path / "photos", 20)
    write(tmp_path / "photos", tmp_path)
    for archive in tmp_path.glob("*.tar"):
        index = write_index(archive).read_bytes()
        with wds2idx.IndexCreator(str(archive), str(archive.with_suffix(".idx"))) as creator:
            creator.create_index()
        assert archive.with_suffix(".idx").read_bytes() == index


def test_a_local_archive_is_read_itself(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.tar", {"one.jpg": PHOTO})
    (tmp_path / "a.idx").write_text("v1.2 1\njpg 512 1 two.jpg\n")
    listing = listed(str(tmp_path / "a.tar"))
    assert list(listing.table.keys) == ["a.tar/one.jpg"]
    assert listing.notes == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"v1\.2 2", "v1.1 2"),
        (r"v1\.2 2\n", ""),
        (r" a\.jpg", " a 1.jpg"),
        (r" a\.jpg", f" {'a' * 101}.jpg"),
        (r" b\.jpg\n", " b.jpg"),
        (r" b\.jpg\n", ""),
        (r"jpg \d+ ", "jpg 513 "),
        (r"jpg \d+ ", "jpg -512 "),
        (r"jpg \d+ ", "jpg 512512512512512512512 "),
        (r"jpg \d+ ", "jpg 1024000 "),
        (r"jpg \d+ ", "jpg 0 "),
        (r"a\.jpg", "ä.jpg"),
        (r"b\.jpg", "c.jpg"),
        ("jpg", "png"),
        ("^", "\0"),
    ],
)
def test_an_index_that_does_not_fit_is_not_used(
    old: str, new: str, url: str, tmp_path: Path
) -> None:
    archive = tmp_path / "shards/a.tar"
    write_archive(archive, {"a.jpg": PHOTO, "b.jpg": PHOTO})
    index = write_index(archive)
    index.write_text(re.sub(old, new, index.read_text(), count=1), "utf-8")
    listing = listed(f"{url}/a.tar")
    assert list(listing.table.keys) == ["a.tar/a.jpg", "a.tar/b.jpg"]
    assert listing.notes == (tar_archives.NO_INDEX_NOTE.replace("{count}", "1"),)


@pytest.mark.parametrize("now", [["a"], ["a", "b", "c"], ["b", "a"], ["b"]])
def test_an_index_of_an_archive_that_was_written_anew_is_not_used(
    now: list[str], url: str, tmp_path: Path
) -> None:
    archive = tmp_path / "shards/a.tar"
    write_archive(archive, {"a.jpg": PHOTO, "b.jpg": PHOTO})
    write_index(archive)
    write_archive(archive, {f"{name}.jpg": PHOTO for name in now})
    assert list(listed(f"{url}/a.tar").table.keys) == [f"a.tar/{name}.jpg" for name in now]


def test_a_label_that_moved_makes_an_index_unfit(url: str, tmp_path: Path) -> None:
    archive = tmp_path / "shards/a.tar"
    members = {"a.cls": b"1", "b.cls": b"2", "a.jpg": PHOTO, "b.jpg": PHOTO}
    write_archive(archive, members)
    write_index(archive)
    write_archive(archive, {"b.cls": b"1", "a.cls": b"2", "a.jpg": PHOTO, "b.jpg": PHOTO})
    table = listed(f"{url}/a.tar").table
    assert table.labels.tolist() == [2, 1]


def test_of_an_old_index_no_sample_gets_another_ones_image(url: str, tmp_path: Path) -> None:
    archive, source = tmp_path / "shards/a.tar", f"{url}/a.tar"
    photos = [encoded(cut(n), "PNG") for n in range(3)]
    length = max(map(len, photos))
    one, two, three = (photo.ljust(length, b"\0") for photo in photos)
    write_archive(archive, {"one.png": one, "two.png": two, "three.png": three})
    write_index(archive)
    write_archive(archive, {"two.png": two, "one.png": one, "three.png": three})
    opened = open_source(source)
    table = opened.list(lambda count: None).table
    first, second, third = opened.fetch(table.keys, table.sizes.tolist(), table.locations)
    assert isinstance(first, FetchError)
    assert isinstance(second, FetchError)
    assert not isinstance(third, PrecacheError)
    with pytest.raises(PrecacheError, match=r"remove a\.idx if that is older, and build again"):
        build(source, tmp_path / "store")
    (tmp_path / "shards/a.idx").unlink()
    build(source, tmp_path / "store")
    build(str(archive), tmp_path / "local.store")
    expected = pixels(tmp_path / "local.store")
    assert len(expected) == 3
    for key, row in pixels(tmp_path / "store").items():
        np.testing.assert_array_equal(row, expected[key])


def test_a_name_that_leads_out_is_left_out(url: str, tmp_path: Path) -> None:
    archive = tmp_path / "shards/a.tar"
    write_archive(archive, {"a.jpg": PHOTO, "../b.jpg": PHOTO, "/c.jpg": PHOTO, "d.jpg": PHOTO})
    write_index(archive)
    listing = listed(f"{url}/a.tar")
    assert list(listing.table.keys) == ["a.tar/a.jpg", "a.tar/d.jpg"]
    assert sum(listing.left_out.values()) == 2
