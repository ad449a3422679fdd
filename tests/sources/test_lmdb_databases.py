"""LMDB databases: keys, labels, changes, and hostile files."""

import pickle
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest

from precache.errors import SourceError, UsageError
from precache.storage.base import NO_NAME, SAME_KEY
from precache.storage.open import open_folder
from precache_workers.sources.kinds import open_source
from tests.support.building import cut, encoded
from tests.support.containers import listed
from tests.support.servers import S3Server
from tests.support.source_contract import check_source

PHOTO = encoded(cut(0))


def write(path: Path, values: dict[str, bytes], **options: Any) -> str:
    with (
        lmdb.open(str(path), map_size=1 << 24, **options) as database,
        database.begin(write=True) as transaction,
    ):
        for key, value in values.items():
            transaction.put(key.encode(), value)
    return str(path)


def test_values_are_images_by_their_keys_or_first_bytes(tmp_path: Path) -> None:
    values = {
        "0a1b": PHOTO, "17.webp": b"damaged", "num-samples": b"3", "__keys__": pickle.dumps(["a"]),
        "füße": PHOTO,
    }  # fmt: skip
    listing = check_source(open_source(write(tmp_path / "data", values)))
    names = [key.removeprefix("data.mdb/") for key in listing.table.keys]
    assert names == ["0a1b", "17.webp", "füße"]
    assert sum(listing.ignored.values()) == 2
    assert listing.table.labels.tolist() == [-1] * 3


def test_a_database_may_be_one_file(tmp_path: Path) -> None:
    source = write(tmp_path / "photos.lmdb", {"cat/1": PHOTO, "dog/2": PHOTO}, subdir=False)
    table = check_source(open_source(source)).table
    assert list(table.keys) == ["photos.lmdb/cat/1", "photos.lmdb/dog/2"]
    assert table.classes == ("cat", "dog")


def test_labels_beside_numbered_images(tmp_path: Path) -> None:
    values = {f"image-{n:09d}": PHOTO for n in (1, 2, 3)}
    values |= {"label-000000001": b"word", "label-000000003": b"another", "num-samples": b"3"}
    table = listed(write(tmp_path / "data", values)).table
    assert table.classes == ("another", "word")
    assert table.labels.tolist() == [1, -1, 0]


def test_labels_under_keys_with_another_suffix(tmp_path: Path) -> None:
    values = {"a/1.jpg": PHOTO, "a/1.cls": b"7\n", "2": PHOTO, "2.cls": b"3"}
    values |= {"3.JPG": PHOTO, "./3.cls": b"5", "./4.jpg": PHOTO, "./4.cls": b"4"}
    table = listed(write(tmp_path / "data", values)).table
    assert dict(zip(table.keys, table.labels.tolist(), strict=True)) == {
        "data.mdb/4.jpg": 4, "data.mdb/2": 3, "data.mdb/3.JPG": -1, "data.mdb/a/1.jpg": 7
    }  # fmt: skip


def test_a_folder_of_images_may_begin_as_the_key_of_a_label(tmp_path: Path) -> None:
    values = {f"label-{name}/1.jpg": PHOTO for name in ("clean", "noise")}
    table = listed(write(tmp_path / "data", {**values, "label-1.jpg": PHOTO})).table
    assert table.classes == ("label-clean", "label-noise")
    assert table.labels.tolist() == [-1, 0, 1]


def test_keys_that_differ_in_a_dot_name_one_sample_which_is_bad(tmp_path: Path) -> None:
    other = encoded(cut(1))
    listing = listed(write(tmp_path / "a", {"./1.jpg": PHOTO, "1.jpg": other, "2.jpg": PHOTO}))
    assert list(listing.table.keys) == ["data.mdb/2.jpg"]
    assert listing.left_out == {SAME_KEY: 2}
    with pytest.raises(SourceError, match=r"left out: 2 that share their keys .* data.mdb/1.jpg"):
        listed(write(tmp_path / "b", {"./1.jpg": PHOTO, "1.jpg": other}))


def test_labels_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"1\.cls has 5,000 bytes; a label is"):
        listed(write(tmp_path / "a", {"1.jpg": PHOTO, "1.cls": b"x" * 5000}))
    with pytest.raises(SourceError, match=r"1\.cls is not UTF-8"):
        listed(write(tmp_path / "b", {"1.jpg": PHOTO, "1.cls": b"\xff"}))


def test_keys_that_lead_elsewhere_are_left_out(tmp_path: Path) -> None:
    listing = listed(write(tmp_path / "data", {"../a.jpg": PHOTO, "/b.jpg": PHOTO, "c": PHOTO}))
    assert list(listing.table.keys) == ["data.mdb/c"]
    assert listing.left_out == {NO_NAME: 2}


def test_several_databases_are_named_by_their_files(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, {"1.jpg": PHOTO})
    with pytest.raises(SourceError, match=r"an LMDB database: give '.*/\*\*/data\.mdb'"):
        listed(str(tmp_path))
    table = listed(str(tmp_path / "**/data.mdb")).table
    assert list(table.keys) == ["a/data.mdb/1.jpg", "b/data.mdb/1.jpg"]


# --- hostile files ------------------------------------------------------------------------------


def test_a_database_in_a_bucket_is_refused_with_the_way_out(tmp_path: Path, s3: S3Server) -> None:
    write(tmp_path / "data", {"1.jpg": PHOTO})
    bucket = open_folder("s3://bucket", s3.options())
    bucket.put("data.mdb", [(tmp_path / "data/data.mdb").read_bytes()])
    with pytest.raises(SourceError, match=r"which is read from a disk; copy it there"):
        open_source("s3://bucket/data.mdb", s3.options()).list(lambda count: None)


def test_without_its_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "data", {"1.jpg": PHOTO})
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(UsageError, match=r"pip install 'precache\[lmdb\]'"):
        listed(source)
