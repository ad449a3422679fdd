"""Zip archives: names, identity, and hostile ones."""

import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import FetchError, SampleError, SourceError
from precache.storage.base import NO_FILE, NO_NAME
from precache_workers.sources import zip_archives
from precache_workers.sources.base import Sample
from precache_workers.sources.kinds import open_source
from tests.support.building import cut, encoded
from tests.support.containers import fetched, listed
from tests.support.source_contract import check_source

RECIPE = precache.Recipe.image(resize=40, crop=32)
PHOTO = encoded(cut(0))


def write_zip(
    path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, **options: Any
) -> str:
    with zipfile.ZipFile(path, "w", method, **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return str(path)


def photos(count: int) -> dict[str, bytes]:
    return {f"{n:03d}.jpg": encoded(cut(n)) for n in range(count)}


@pytest.mark.parametrize(
    ("members", "raw", "keys", "left_out", "ignored"),
    [
        (
            "füße/日本.jpg ./cat/1.jpg cat/ notes.txt",
            {},
            "füße/日本.jpg cat/1.jpg",
            {},
            {".txt": 1},
        ),
        ("f_/1.jpg bar/1.jpg", {b"f_": b"f\x81"}, "fü/1.jpg bar/1.jpg", {}, {}),  # code page 437
        ("caf__/1.jpg", {b"caf__": "café".encode()}, "café/1.jpg", {}, {}),  # UTF-8 without flag
        ("cat\\1.jpg dog\\2.jpg ..\\3.jpg cat\\", {}, "cat/1.jpg dog/2.jpg", {NO_NAME: 1}, {}),
        ("cat/1.jpg __MACOSX/cat/._1.jpg cat/.DS_Store", {}, "cat/1.jpg", {}, {"._": 1, "": 1}),
        ("/etc/1.jpg ../2.jpg a/../../3.jpg a/1.jpg", {}, "a/1.jpg", {NO_NAME: 3}, {}),
    ],
)
def test_names_are_read_as_programs_write_them(
    tmp_path: Path,
    members: str,
    raw: dict[bytes, bytes],
    keys: str,
    left_out: dict[str, int],
    ignored: dict[str, int],
) -> None:
    """Info-ZIP and macOS write UTF-8 without its flag, old software of Windows backslashes."""
    path = Path(write_zip(tmp_path / "a.zip", dict.fromkeys(members.split(), PHOTO)))
    for name, written in raw.items():
        path.write_bytes(path.read_bytes().replace(name, written))
    listing = check_source(open_source(str(path)))
    assert [*listing.table.keys] == [f"a.zip/{key}" for key in keys.split()]
    assert listing.table.classes == tuple(sorted(key.partition("/")[0] for key in keys.split()))
    assert (listing.left_out, listing.ignored) == (left_out, ignored)
    guessed = [note for note in listing.notes if "1 names" in note and "code page 437" in note]
    assert len(guessed) == (b"f_" in raw)
    assert {sample.inputs["bytes"] for sample in fetched(path)} == {PHOTO}


def test_links_are_left_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("fine.jpg", PHOTO)
        link = zipfile.ZipInfo("link.jpg")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    listing = listed(tmp_path / "a.zip")
    assert (list(listing.table.keys), listing.left_out) == (["a.zip/fine.jpg"], {NO_FILE: 1})


def test_an_archive_that_was_streamed_and_one_of_zip64(tmp_path: Path) -> None:
    with (tmp_path / "streamed.zip").open("wb") as file:
        file.seekable = lambda: False  # type: ignore[method-assign]
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in photos(3).items():
                archive.writestr(name, data)
    with zipfile.ZipFile(tmp_path / "large.zip", "w") as archive:
        for name, data in photos(3).items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    for name in ("streamed.zip", "large.zip"):
        check_source(open_source(str(tmp_path / name)))
        assert [s.inputs["bytes"] for s in fetched(str(tmp_path / name))] == [*photos(3).values()]


@pytest.mark.heavy
def test_a_directory_of_zip64_is_read(tmp_path: Path) -> None:
    """As `zipfile` writes one beyond 65,535 members."""
    members = {f"{n}.jpg": b"" for n in range(66_000)}
    source = write_zip(tmp_path / "a.zip", members, zipfile.ZIP_STORED)
    assert len(listed(source).table) == 66_000


def test_an_archive_that_was_cut_off_after_listing_makes_no_holes(tmp_path: Path) -> None:
    source = write_zip(tmp_path / "a.zip", photos(3), zipfile.ZIP_STORED)
    opened = open_source(source)
    table = opened.list(lambda count: None).table
    os.truncate(source, len(PHOTO) + len(PHOTO) // 2)
    first, second, _ = opened.fetch(table.keys, table.sizes.tolist(), table.locations)
    assert isinstance(first, Sample)
    assert isinstance(second, FetchError)
    assert "has changed since it was listed" in str(second)


# --- hostile archives ---------------------------------------------------------------------------


def test_an_archive_with_data_before_it_is_refused(tmp_path: Path) -> None:
    path = Path(write_zip(tmp_path / "a.zip", photos(3)))
    path.write_bytes(b"#!/bin/sh" + path.read_bytes())
    with pytest.raises(SourceError, match="has other data before it"):
        listed(str(path))


def directory_entry(path: Path, at: int, value: bytes) -> None:
    """Change the first entry of the directory."""
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\1\2") + at
    data[place : place + len(value)] = value
    path.write_bytes(data)


def test_a_declared_size_of_a_bomb_is_a_hole(tmp_path: Path) -> None:
    path = Path(write_zip(tmp_path / "a.zip", {"1.jpg": bytes(5_000_000)}))
    [large] = fetched(str(path), most_bytes=1_000_000)
    assert isinstance(large, SampleError)
    assert "--max-sample-bytes" in str(large)
    directory_entry(path, 24, struct.pack("<L", 20_000))  # the size that it says
    [bomb] = fetched(str(path), most_bytes=1_000_000)
    assert isinstance(bomb, SampleError)
    assert "another CRC-32" in str(bomb)


def test_a_member_beyond_the_archive_is_refused(tmp_path: Path) -> None:
    path = Path(write_zip(tmp_path / "a.zip", photos(1)))
    directory_entry(path, 42, struct.pack("<L", 1 << 30))
    with pytest.raises(SourceError, match=r"000\.jpg is said to lie at 1,073,741,824"):
        listed(str(path))


def test_a_damaged_member_is_a_hole_and_others_are_not(tmp_path: Path) -> None:
    path = Path(write_zip(tmp_path / "a.zip", photos(3), zipfile.ZIP_STORED))
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    os.utime(path, (1, 1))
    damaged, *others = fetched(str(path))
    assert isinstance(damaged, SampleError)
    assert all(isinstance(sample, Sample) for sample in others)


@pytest.mark.parametrize(
    ("method", "flag", "why"),
    [
        (zipfile.ZIP_BZIP2, b"", "is compressed by bzip2 in its archive"),
        (zipfile.ZIP_LZMA, b"", "is compressed by LZMA in its archive"),
        (zipfile.ZIP_DEFLATED, b"\1", "is encrypted in its archive"),
    ],
)
def test_a_member_that_is_not_read_is_a_hole_with_the_reason(
    tmp_path: Path, method: int, flag: bytes, why: str
) -> None:
    path = Path(write_zip(tmp_path / "a.zip", photos(1), method))
    directory_entry(path, 8, flag)
    [sample] = fetched(path)
    assert isinstance(sample, SampleError)
    assert why in str(sample)


def test_more_extra_data_than_is_expected_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("1.jpg")
        info.extra = struct.pack("<2H", 0x9999, 500) + bytes(500)
        archive.writestr(info, PHOTO)
    assert len(info.extra) > zip_archives.EXTRA_BYTES
    [sample] = fetched(str(tmp_path / "a.zip"))
    assert sample.inputs == {"bytes": PHOTO}
