"""Tar archives: samples, labels, identity, what changed, and hostile ones."""

import bz2
import gzip
import io
import lzma
import os
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import precache
from precache.errors import FetchError, SourceError
from precache.storage.base import (
    BAD_LABEL,
    HIDDEN_FILE,
    NO_FILE,
    NO_NAME,
    NOT_UTF8,
    FileInfo,
    left_out_text,
)
from precache.storage.local import LocalFolder
from precache_workers.runtime.time_limit import SamplesAtWork
from precache_workers.sources import file_ranges
from precache_workers.sources.containers import Members, rows_of_one
from precache_workers.sources.kinds import open_source
from precache_workers.sources.tar_archives import TarFormat
from precache_workers.sources.tar_members import read_members
from tests.support import containers
from tests.support.building import build, cut, encoded, pixels, write, write_jpegs
from tests.support.containers import add, fetched, listed, write_tars
from tests.support.source_contract import check_source

RECIPE = precache.Recipe.image(resize=40, crop=32)
PHOTO = encoded(cut(0))


def write_tar(path: Path, members: dict[str, bytes], **options: Any) -> str:
    return containers.write_tar(path, [*members.items()], **options)


# --- samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read_in_every_format(tmp_path: Path, form: int) -> None:
    names = ["plain.jpg", "füße/日本.jpg", f"{'deep/' * 20}a.jpg"]
    if form != tarfile.USTAR_FORMAT:
        names.append(f"{'long' * 50}.jpg")
    source = write_tar(tmp_path / "a b#1.tar", dict.fromkeys(names, PHOTO), format=form)
    assert [key.removeprefix("a b#1.tar/") for key in listed(source).table.keys] == names
    assert [sample.inputs["jpg"] for sample in fetched(source)] == [PHOTO] * len(names)
    write(tmp_path / "in" / "/".join(["long"] * 30) / "cat/1.jpg", PHOTO)
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        tar.add(tmp_path / "in", ".")  # with its folders
    listing = listed(str(tmp_path / "a.tar"))
    assert (len(listing.table), listing.left_out) == (1, {})


def test_members_of_a_stem_are_one_sample(tmp_path: Path) -> None:
    members = {}
    for n in (1, 2):
        label = f"{n + 2}\n".encode()
        members |= {f"{n}.jpg": PHOTO, f"{n}.cls": label, f"{n}.seg.png": b"mask", f"{n}.json": b""}
    source = write_tar(tmp_path / "a.tar", members)
    listing = listed(source)
    assert list(listing.table.keys) == ["a.tar/1.jpg", "a.tar/2.jpg"]
    assert listing.table.labels.tolist() == [3, 4]
    assert listing.table.sizes.tolist() == [len(PHOTO) + 4] * 2
    assert listing.ignored == {".json": 2}
    [note] = listing.notes
    assert note.startswith("2 of 2 samples of tar archives have several images")
    for sample in fetched(source):
        assert sample.inputs == {"jpg": PHOTO, "seg.png": b"mask"}


def test_labels_may_be_names_and_missing(tmp_path: Path) -> None:
    names = {
        "1.jpg": PHOTO,
        "1.cls": "\ufeffcat".encode(),
        "2.jpg": PHOTO,
        "2.cls": b"ant",
        "3.jpg": PHOTO,
    }
    write_tar(tmp_path / "empty.tar", {"1.jpg": PHOTO, "1.cls": b""})
    write_tar(tmp_path / "names.tar", names)
    table = listed(tmp_path / "*.tar").table
    assert table.classes == ("ant", "cat")
    assert table.labels.tolist() == [-1, 1, 0, -1]


def test_members_are_read_some_thousands_at_a_time(tmp_path: Path) -> None:
    """Headers of all members of a large archive would take gigabytes."""
    path = Path(write_tar(tmp_path / "a.tar", {f"{n}.jpg": b"" for n in range(5000)}))
    with path.open("rb") as stream:
        runs = [len(run.headers) for run in read_members(stream, "it", path.stat().st_size)]
    assert runs == [4096, 904]


def test_shards_of_webdatasets_own_writer(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(str(tmp_path / "w-%02d.tar"), maxcount=3, verbose=0) as writer:
        for number in range(7):
            sample = {"jpg": encoded(cut(number)), "cls": number % 3, "json": {"a": 1}}
            writer.write({"__key__": f"{number:04d}", **sample})
    table = check_source(open_source(str(tmp_path / "w-*.tar"))).table
    assert table.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert list(table.keys)[3] == "w-01.tar/0003.jpg"


def test_a_sample_with_two_labels_is_bad(tmp_path: Path) -> None:
    labels = {"1.cls": b"1", "1.b.cls": b"2", "2.cls": b"2", "2.b.cls": b"2"}
    source = write_tar(tmp_path / "a.tar", {"1.jpg": PHOTO, "2.jpg": PHOTO, **labels})
    listing = listed(source)
    assert (listing.table.labels.tolist(), listing.left_out) == ([2], {BAD_LABEL: 1})
    assert "of a.cls and a.b.cls, --sample-name last-dot takes" in left_out_text(listing.left_out)
    of_last = check_source(open_source(source, sample_name="last-dot")).table  # the advice
    assert of_last.labels.tolist() == [1, 2]
    write_tar(tmp_path / "b.tar", {})
    notes = check_source(open_source(str(tmp_path / "*.tar"))).notes
    assert not any("containers without labels" in note for note in notes)


def test_a_build_reads_each_byte_of_an_archive_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache_workers.sources.containers.UNIT_BYTES", 10_000)
    monkeypatch.setattr(file_ranges, "GAP_BYTES", 2048)
    write_jpegs(tmp_path / "in", 60)
    source = write_tars(tmp_path / "in", tmp_path)
    read: list[tuple[str, int, int]] = []
    ranges = LocalFolder.read_ranges

    def noted(self: LocalFolder, parts: Any) -> Any:
        read.extend(parts)
        return ranges(self, parts)

    monkeypatch.setattr(LocalFolder, "read_ranges", noted)
    build(source, tmp_path / "store", RECIPE, shard_samples=100)
    nbytes = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    probed = 24 / 60
    assert sum(length for _, _, length in read) < (1 + probed) * nbytes
    assert len(read) < 50


# --- identity -----------------------------------------------------------------------------------


def some_photos(count: int) -> dict[str, bytes]:
    return {f"{n:03d}.jpg": encoded(cut(n)) for n in range(count)}


def test_an_unchanged_archive_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tar(tmp_path / "a.tar", some_photos(5))
    write_tar(tmp_path / "b.tar", some_photos(5))
    source = str(tmp_path / "*.tar")
    first = build(source, tmp_path / "store", RECIPE)
    os.utime(tmp_path / "a.tar", (1, 1))
    assert build(source, tmp_path / "store", RECIPE).version == first.version, "only touched"
    write_tar(tmp_path / "b.tar", some_photos(6))
    opened: list[str] = []

    def noted(folder: Any, file: Any, **options: Any) -> Any:
        opened.append(file.name)
        return file_ranges.open_file(folder, file, **options)

    monkeypatch.setattr("precache_workers.sources.tar_archives.open_file", noted)
    assert build(source, tmp_path / "store", RECIPE).samples == 11
    assert opened == ["b.tar"]
    monkeypatch.setattr("precache_workers.sources.containers.INDEX_RULES", b"of a later release")
    plan = precache.plan(source, tmp_path / "store", RECIPE, address="serial", timing=False)
    assert plan.rows_computed == 0
    assert sorted(opened) == ["a.tar", "b.tar", "b.tar"]


def test_an_archive_changed_within_its_size_and_time_is_listed_anew(tmp_path: Path) -> None:
    members = some_photos(4)
    source = write_tar(tmp_path / "a.tar", members)
    os.utime(source, (1, 1))
    build(source, tmp_path / "store", RECIPE)
    write_tar(tmp_path / "a.tar", dict(reversed(members.items())))
    os.utime(source, (1, 1))
    recipe = precache.Recipe.image(resize=41, crop=32)
    assert build(source, tmp_path / "store", recipe).samples == 4
    build(source, tmp_path / "fresh", recipe)
    for key, row in pixels(tmp_path / "fresh").items():
        np.testing.assert_array_equal(pixels(tmp_path / "store")[key], row)


# --- hostile archives ---------------------------------------------------------------------------


def test_odd_names_and_links_are_left_out(tmp_path: Path) -> None:
    names = ["/etc/1.jpg", "../2.jpg", "a/../../3.jpg", ".a.jpg", "x/.b.jpg", "._c.jpg"]
    names += ["fine.jpg", "fine.\udcf6.jpg"]
    with tarfile.open(tmp_path / "a.tar", "w", errors="surrogateescape") as tar:
        for name in names:
            add(tar, name, PHOTO)
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"{kind.decode()}.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    listing = listed(str(tmp_path / "a.tar"))
    assert list(listing.table.keys) == ["a.tar/fine.jpg"]
    assert listing.ignored == {"._": 1}
    assert listing.left_out == {NO_NAME: 3, NO_FILE: 3, HIDDEN_FILE: 2, NOT_UTF8: 1}
    assert "or links in an archive (pack what they lead to" in left_out_text(listing.left_out)


def header(name: str, size: int, **attributes: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info.tobuf(attributes.get("format", tarfile.GNU_FORMAT))


def spoiled(place: int, data: bytes) -> bytes:
    """An archive of forty members with other bytes somewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(40):
            add(tar, f"{number}.jpg", bytes(100), mtime=number)
    whole = bytearray(buffer.getvalue())
    whole[place : place + len(data)] = data
    return bytes(whole)


def test_an_archive_without_images_is_refused_with_what_it_has_and_the_way(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "a.tar", dict.fromkeys(("n01.tar", "n02.tar", "it"), b"x"))
    why = r"no image \(other members: 2 \.tar, 1 without .* python:mydata:photos as the source"
    with pytest.raises(SourceError, match=why):
        listed(archive)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (header("a.jpg", 1 << 50) + bytes(2048), r"a\.jpg is said to have 1,125,899,906,842,624 b"),
        (header("x", 8 << 20, type=tarfile.XHDTYPE) + bytes(9 << 20), "bytes of attributes"),
        (spoiled(1024 + 20, b"?"), "at byte 1,024 it has no header of a member"),
        (spoiled(20480, bytes(8192)), "is damaged"),  # zeros over a header end no archive
    ],
)
def test_headers_that_are_damaged_or_lie_are_refused(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(SourceError, match=why):
        listed(tmp_path / "a.tar")


ATTRIBUTES = {f"comment{n}": "x" for n in range(500)} | {"comment.sparse": "1"}


@pytest.mark.parametrize("name", ["./1.jpg", "BZh1.jpg"])
@pytest.mark.parametrize("attributes", [{}, ATTRIBUTES])
def test_odd_names_and_attributes_do_no_harm(
    tmp_path: Path, name: str, attributes: dict[str, str]
) -> None:
    """Names may begin as a compressed file does; attributes may have the word sparse."""
    info = tarfile.TarInfo(name)
    info.size, info.pax_headers = len(PHOTO), attributes
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(info, io.BytesIO(PHOTO))
    assert [*listed(tmp_path / "a.tar").table.keys] == [f"a.tar/{name.removeprefix('./')}"]


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_of_sparse_members_no_byte_counts_as_a_header(tmp_path: Path, form: str) -> None:
    with (tmp_path / "holes.jpg").open("wb") as file:
        for number in range(30):
            file.seek(number << 17)
            file.write(b"x")
    (tmp_path / "z.jpg").write_bytes(PHOTO)
    line = ["tar", f"--format={form}", "-S", "-cf", "a.tar", "holes.jpg", "z.jpg"]
    subprocess.run(line, cwd=tmp_path, check=True)
    listing = listed(str(tmp_path / "a.tar"))
    assert list(listing.table.keys) == ["a.tar/z.jpg"]
    assert listing.left_out == {NO_FILE: 1}


@pytest.mark.parametrize("zeros", [0, 9 << 10, 300 << 10])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.zst"])
def test_archives_joined_byte_by_byte_are_refused(tmp_path: Path, suffix: str, zeros: int) -> None:
    path = tmp_path / f"a.{suffix}"
    joined = b""
    for n in range(2):
        data = Path(write_tar(tmp_path / f"{n}.part", {f"{n}.jpg": PHOTO})).read_bytes()
        data += bytes(zeros)
        joined += data if suffix == "tar" else COMPRESS[suffix](data)
    path.write_bytes(joined)
    with pytest.raises(SourceError, match="more than zeros behind its end"):
        listed(str(path))


@pytest.mark.parametrize("between", [b"", b"junk", bytes(20 << 10)])
def test_a_joined_archive_without_a_magic_is_refused(tmp_path: Path, between: bytes) -> None:
    """Headers of the seventh edition of Unix do not say that they are any."""
    for name in ("1", "2"):
        write(tmp_path / f"{name}.jpg", PHOTO)
        line = ["tar", "--format=v7", "-cf", f"{name}.part", f"{name}.jpg"]
        subprocess.run(line, cwd=tmp_path, check=True)
    one, two = ((tmp_path / f"{name}.part").read_bytes() for name in ("1", "2"))
    path = write(tmp_path / "a.tar", one + between + two)
    with pytest.raises(SourceError, match="more than zeros behind its end"):
        listed(str(path))


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_an_incremental_archive_has_the_names_of_its_files(tmp_path: Path, form: str) -> None:
    """In headers of GNU tar, times lie where others have the beginning of a name."""
    for name in ("cat", "eel"):
        write(tmp_path / name / "1.jpg", PHOTO)
    line = ["tar", f"--format={form}", "-g", "state", "-cf", "a.tar", "cat", "eel"]
    subprocess.run(line, cwd=tmp_path, check=True)
    listing = listed(str(tmp_path / "a.tar"))
    assert list(listing.table.keys) == ["a.tar/cat/1.jpg", "a.tar/eel/1.jpg"]
    assert not listing.left_out


def test_thousands_of_images_of_a_stem_are_refused(tmp_path: Path) -> None:
    frames = {f"clip.{number:06d}.jpg": b"" for number in range(4000)}
    with pytest.raises(SourceError, match=r"several images .*clip\.000000\.jpg"):
        listed(write_tar(tmp_path / "a.tar", frames))


FIELDS = {
    name: precache.Field(ops=[precache.Decode(), precache.Resize(size=[16, 16])], input=name)
    for name in ("png", "seg.png", "depth.png")
}


def test_images_that_change_their_suffixes_are_seen(tmp_path: Path) -> None:
    recipe = precache.Recipe(fields={n.partition(".")[0]: field for n, field in FIELDS.items()})
    grey = [encoded(Image.new("RGB", (16, 16), (v, v, v)), "PNG") for v in (10, 50, 90)]
    assert len(set(map(len, grey))) == 1

    def means(suffixes: list[str]) -> list[float]:
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for number in range(3):
                for suffix, data in zip(suffixes, grey, strict=True):
                    add(tar, f"{number}.{suffix}", data)
        build(str(tmp_path / "a.tar"), tmp_path / "store", recipe)
        version = precache.open(tmp_path / "store")
        return [round(version.mean[name][0]) for name in ("png", "seg", "depth")]

    assert means(["png", "seg.png", "depth.png"]) == [10, 50, 90]
    assert means(["png", "depth.png", "seg.png"]) == [10, 90, 50]


def test_samples_of_an_archive_without_identity_have_none(tmp_path: Path) -> None:
    """As of a web server that sends neither an ETag nor a time."""
    path = Path(write_tar(tmp_path / "a.tar", {"1.jpg": PHOTO, "1.seg.png": PHOTO, "2.jpg": PHOTO}))
    file = FileInfo("a.tar", path.stat().st_size, -1, "")
    rows = rows_of_one(
        [*filter(None, TarFormat().scan(LocalFolder(tmp_path), file, Members()))], ""
    )
    assert {*rows["mtime_ns"].to_pylist()} == {-1}
    assert {*rows["etag"].to_pylist()} == {""}


def test_a_lone_image_has_the_name_of_its_suffix_too(tmp_path: Path) -> None:
    members = {"1.png": PHOTO, "1.seg.png": PHOTO, "2.png": PHOTO, "3.seg.png": PHOTO}
    recipe = precache.Recipe(fields={"image": FIELDS["png"]})
    source = write_tar(tmp_path / "a.tar", members)
    result = build(source, tmp_path / "store", recipe, sample_name="first-dot")
    assert result.holes == [("a.tar/3.seg.png", "its image: has no 'png'; it has 'seg.png'")]


# --- compressed ---------------------------------------------------------------------------------

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "tar.gz": gzip.compress,
    "tar.zst": lambda data: bytes(pa.compress(data, "zstd", asbytes=True)),
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
}
FORWARD = ["tar.gz", "tar.zst"]
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"size"
"""A frame of zstd without contents, which files of pzstd begin with."""


def write_compressed(path: Path, members: dict[str, bytes]) -> Path:
    whole = Path(write_tar(path.with_name("whole"), members))
    path.write_bytes(COMPRESS[path.name.partition(".")[2]](whole.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("name", "form", "parts", "start"),
    [
        ("a.tar.gz", "tar.gz", 1, b""),
        ("a.tgz", "tar.gz", 3, b""),
        ("a.tar", "tar.gz", 1, b""),
        ("a.tar.zst", "tar.zst", 1, b""),
        ("a.tzst", "tar.zst", 3, SKIPPABLE),
    ],
)
def test_compressed_archives_have_the_samples_of_others(
    tmp_path: Path, name: str, form: str, parts: int, start: bytes
) -> None:
    """The suffix need not tell that they are compressed, nor be they compressed at once."""
    members = {**some_photos(9), "7.cls": b"3", "1.txt": b"unused", "z.jpg": bytes(3 << 20)}
    whole = write_tar(tmp_path / "plain.tar", members)
    plain, data = fetched(whole), Path(whole).read_bytes()
    size = -(-len(data) // parts)
    packed = [COMPRESS[form](data[n : n + size]) for n in range(0, len(data), size)]
    source = str(write(tmp_path / name, start + b"".join(packed)))
    listing = check_source(open_source(source))
    assert sum("1 tar archives are compressed" in note for note in listing.notes) == 1
    assert fetched(source) == plain
    assert not listing.table.locations.unit_numbers.any()
    some = [7, 0, 9, 3]  # not in their order
    table = listing.table
    keys, sizes = [table.keys[n] for n in some], table.sizes[some].tolist()
    again = open_source(source).fetch(keys, sizes, table.locations_of(some))
    assert again == [plain[n] for n in some]


@pytest.mark.parametrize(("program", "suffix"), [("xz", "tar.xz"), ("bzip2", "tar.bz2")])
def test_an_archive_of_a_slow_compression_is_refused(
    tmp_path: Path, program: str, suffix: str
) -> None:
    packed = write_compressed(tmp_path / f"a.{suffix}", some_photos(4))
    plain = fetched(packed.with_name("whole"), kind="tar")
    misnamed = write(tmp_path / "misnamed.tar", packed.read_bytes())
    for source in (packed, tmp_path / f"*.{suffix}", misnamed):
        with pytest.raises(SourceError, match=rf"by {program}, .* decompress it \({program} -d\)"):
            listed(source)
    subprocess.run([program, "-d", packed], check=True)
    assert fetched(packed.with_suffix("")) == plain


@pytest.mark.parametrize("suffix", FORWARD)
def test_compressed_archives_that_are_cut_off_or_damaged_are_refused(
    tmp_path: Path, suffix: str
) -> None:
    path = write_compressed(tmp_path / f"a.{suffix}", some_photos(4))
    data = path.read_bytes()
    cases = [data[:size] for size in (*range(20, len(data), len(data) // 7), len(data) - 1)]
    if suffix == "tar.gz":  # it has a checksum
        cases += [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
                  for at in (len(data) // 2, len(data) - 6)]  # fmt: skip
    for case in cases:
        path.write_bytes(case)
        with pytest.raises(
            SourceError, match=r"a\.tar\.\w+ (cannot be read: |is damaged|is no tar)"
        ):
            listed(path)


@pytest.mark.parametrize("suffix", FORWARD)
def test_an_archive_that_decompresses_without_end_is_refused(tmp_path: Path, suffix: str) -> None:
    endless = header("1.jpg", 1 << 40) + bytes(200 << 20)
    path = write(tmp_path / f"a.{suffix}", COMPRESS[suffix](endless))
    with pytest.raises(SourceError, match="over 1,000 times its size"):
        listed(path)


def test_skipping_what_is_compressed_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that lies far in an archive takes as long as all before it, and does not hang."""
    path = write_compressed(tmp_path / "a.tar.gz", {"0.jpg": bytes(2 << 20), "1.jpg": PHOTO})
    table, advanced = listed(path).table, list[int]()
    monkeypatch.setattr(SamplesAtWork, "advance", lambda self: advanced.append(1))
    [sample] = open_source(str(path)).fetch(["a.tar.gz/1.jpg"], [-1], table.locations_of([1]))
    assert sample.inputs == {"jpg": PHOTO}
    assert len(advanced) > 8


def test_a_compressed_archive_that_changes_between_listing_and_reading(tmp_path: Path) -> None:
    path = write_compressed(tmp_path / "a.tar.gz", some_photos(4))
    opened, whole = open_source(str(path)), path.read_bytes()
    table = opened.list(lambda count: None).table
    for data in (b"no archive", gzip.compress(bytes(2000)), whole[: len(whole) // 2], b""):
        path.write_bytes(data)
        for one in opened.fetch(table.keys, table.sizes.tolist(), table.locations):
            assert isinstance(one, FetchError)
            assert "has changed" in str(one)
