"""Names of samples: images that may be one sample, names that are not UTF-8, names that recur."""

import functools
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import precache
from precache.cli.main import main
from precache.errors import SourceError, UsageError
from precache.storage.base import BAD_LABEL, NOT_UTF8, REPEATED, SAME_KEY
from precache_workers.sources.base import Columns, Sample
from precache_workers.sources.kinds import open_source
from tests.support import building
from tests.support.building import cut, encoded, labels, pixels, write
from tests.support.containers import (
    KEYED,
    SOURCES,
    Members,
    keys_of,
    write_tar,
)
from tests.support.source_contract import same_locations

RECIPE = precache.Recipe.image(resize=40, crop=32)
PHOTO = encoded(cut(0))
build = functools.partial(building.build, recipe=RECIPE)
FLAGS = ("--resize", "40", "--crop", "32", "--address", "serial")


def photo(number: int) -> bytes:
    return encoded(cut(number))


def mask(shade: int) -> bytes:
    return encoded(Image.new("L", (48, 48), shade), "PNG")


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that succeeds prints, on one line."""
    assert main([str(argument) for argument in arguments]) == 0
    return " ".join("".join(capsys.readouterr()).split())


def advised(error: str) -> list[str]:
    """The flags of --sample-name that a refusal names."""
    return re.findall(r"--sample-name ([\w-]+)", error)


# --- images that share a name up to the first dot -----------------------------------------------

DOTTED = {
    "versions": [f"{name}.v{n}.jpg" for name in ("cat", "eel", "owl") for n in (1, 2)],
    "days": ["2021.05.03_cam1.jpg", "2021.05.04_cam2.jpg"],
    "one": ["photo.left.jpg", "photo.right.jpg"],
    "copies": ["1.jpg", "2.jpg", "2.copy.jpg", "3.jpg", "4.jpg", "5.jpg"],
    "copies of all": [f"{n}{suffix}.jpg" for n in range(4) for suffix in ("", ".2")],
    "apart": ["img.a.jpg", "x.jpg", "img.b.jpg", "y.jpg"],
    "two formats": ["1.jpg", "1.png", "2.jpg", "3.jpg", "4.jpg"],
    "frames": [f"clip.{number:03d}.jpg" for number in range(300)],
}


@pytest.mark.parametrize("names", DOTTED.values(), ids=DOTTED.keys())
def test_images_that_may_be_samples_or_inputs_are_refused_and_the_advice_works(
    tmp_path: Path, names: list[str]
) -> None:
    photos = [(name, photo(number % 7)) for number, name in enumerate(names)]
    source = write_tar(tmp_path / "a.tar", photos)
    with pytest.raises(SourceError, match=r"share their names up to the first dot") as refusal:
        build(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    flags = advised(str(refusal.value))
    assert "whole" in flags
    assert "first-dot" in flags
    for flag in flags:
        command = ["build", source, tmp_path / flag, *FLAGS, "--no-progress", "--sample-name", flag]
        assert main([str(word) for word in command]) == 0
        rows = precache.open(tmp_path / flag).rows
        by_dot = {
            "first-dot": lambda name: name.partition(".")[0],
            "last-dot": lambda name: name[:-4],
        }
        assert rows == len(set(map(by_dot.get(flag, str), names)))


def test_a_name_may_end_at_the_last_dot(tmp_path: Path) -> None:
    members = []
    for n, name in enumerate(("2021.05.03", "2021.05.04", "2021.05.05")):
        members += [(f"{name}.jpg", photo(n)), (f"{name}.png", mask(n)), (f"{name}.cls", b"%d" % n)]
    source = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(SourceError, match=r"2021\.05\.03\.jpg.*--sample-name last-dot"):
        build(source, tmp_path / "store")
    build(source, tmp_path / "store", sample_name="last-dot")
    assert labels(tmp_path / "store") == {f"a.tar/2021.05.0{n + 3}.jpg": n for n in range(3)}
    build(source, tmp_path / "all", sample_name="whole")
    assert labels(tmp_path / "all") == {
        f"a.tar/2021.05.0{n + 3}.{suffix}": n for n in range(3) for suffix in ("jpg", "png")
    }


PLAIN = {
    "img2dataset": [f"{n:09d}.{suffix}" for n in range(6) for suffix in ("jpg", "json", "txt")],
    "ImageFolder": [f"{c}/ILSVRC_{n}.JPEG" for c in ("cat", "dog") for n in range(3)],
    "dots without a collision": [f"day.{c}/{n}{c}.5.jpg" for c in "ab" for n in range(3)],
}


@pytest.mark.parametrize("names", PLAIN.values(), ids=PLAIN.keys())
def test_plain_archives_need_no_flag_and_say_what_they_do_not_use(
    tmp_path: Path, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tar(tmp_path / "a.tar", [(name, PHOTO) for name in names])
    for command in ("plan", "build"):
        said = printed(capsys, command, source, tmp_path / "store", *FLAGS)
        assert ("6 .json, 6 .txt" in said) is any(name.endswith(".txt") for name in names)
        assert "--sample-name" not in said
    images = [f"a.tar/{name}" for name in names if not name.endswith((".txt", ".json"))]
    assert sorted(precache.open(tmp_path / "store").keys) == sorted(images)


CLASSED = [(f"{'cat' if n % 2 else 'dog'}/{n}.jpg", photo(n)) for n in range(6)]


def pairs(count: int, lacking: dict[int, str] | None = None) -> Members:
    """Images and masks; of some samples one of the two is missing."""
    members = []
    for n in range(count):
        both = {"input.jpg": photo(n), "target.png": mask(10 + n)}
        both.pop((lacking or {}).get(n, ""), None)
        members += [(f"{n:04d}.{suffix}", data) for suffix, data in both.items()]
    return members


PAIRED = precache.Recipe(
    fields={
        "image": precache.Field(ops=(precache.Decode(), precache.Resize(size=(32, 32)))),
        "mask": precache.Field(
            ops=(precache.Decode(mode="L"), precache.Resize(size=(32, 32))), input="target.png"
        ),
    }
)


def test_suffixes_that_recur_are_inputs_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tar(tmp_path / "a.tar", pairs(4))
    said = printed(capsys, "build", source, tmp_path / "store", *FLAGS)
    assert "4 samples" in said
    assert "4 of 4 samples" in said
    assert "'input.jpg', 'target.png'" in said
    assert "start from 'input.jpg'" in said
    assert "--sample-name" in said


@pytest.mark.parametrize("parts", [1, 5])
def test_a_sample_without_an_input_that_others_have_is_a_hole_and_no_other_input(
    tmp_path: Path, parts: int
) -> None:
    members = pairs(12, {3: "input.jpg", 7: "target.png"})
    members[8], members[9] = members[9], members[8]  # this mask comes first
    for number in range(parts):
        some = [m for m in members if int(m[0][:4]) % parts == number]
        write_tar(tmp_path / f"{number}.tar", some)
    source = str(tmp_path / "*.tar")
    result = build(source, tmp_path / "store", recipe=PAIRED)
    reasons = {key.rpartition("/")[2]: reason for key, reason in result.holes}
    assert reasons.keys() == {"0003.target.png", "0007.input.jpg"}
    assert "has no 'input.jpg'; it has 'target.png'" in reasons["0003.target.png"]
    assert "has no 'target.png'" in reasons["0007.input.jpg"]
    plain = build(source, tmp_path / "plain")
    assert [key.rpartition("/")[2] for key, _ in plain.holes] == ["0003.target.png"]
    shown = {key.rpartition("/")[2][:4]: row for key, row in pixels(tmp_path / "plain").items()}
    build(write_tar(tmp_path / "only.t", [m for m in pairs(12) if m[0].endswith("input.jpg")]),
          tmp_path / "only", source_kind="tar")  # fmt: skip
    for key, row in pixels(tmp_path / "only").items():
        name = key.rpartition("/")[2][:4]
        if name in shown:
            np.testing.assert_array_equal(shown[name], row)


def test_a_field_named_as_an_input_does_not_take_another_one(tmp_path: Path) -> None:
    members = [m for n in range(8) for m in ((f"{n}.jpg", photo(n)), (f"{n}.png", mask(n)))]
    source = write_tar(tmp_path / "a.tar", [m for m in members if m[0] != "5.png"])
    ops = (precache.Decode(mode="L"), precache.Resize(size=(32, 32)))
    recipe = precache.Recipe(fields={"png": precache.Field(ops=ops)})
    result = build(source, tmp_path / "store", recipe=recipe)
    [(key, reason)] = result.holes
    assert key == "a.tar/5.jpg"
    assert "has no 'png'; it has 'jpg'" in reason


def test_the_flag_is_refused_where_it_has_no_meaning(tmp_path: Path) -> None:
    write(tmp_path / "in/cat/1.jpg", PHOTO)
    with pytest.raises(UsageError, match="--sample-name"):
        build(str(tmp_path / "in"), tmp_path / "store", sample_name="last-dot")
    source = write_tar(tmp_path / "a.tar", [("1.jpg", PHOTO)])
    with pytest.raises(UsageError, match="first-dot"):
        build(source, tmp_path / "store", sample_name="middle")


# --- what nobody asked for ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_members_that_are_not_used_are_named_and_counted(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [(f"cat/{n}.{s}", PHOTO) for n in range(3) for s in ("jpg", "json", "TXT")]
    members += [
        ("LICENSE", b""),
        ("cat/._0.jpg", b""),
        *((f"cat/a.{n:04d}", b"") for n in range(30)),
    ]
    source = SOURCES[kind](tmp_path, members)
    for command in ("plan", "build"):
        said = printed(capsys, command, source, tmp_path / "store", *FLAGS)
        assert "3 .json, 3 .txt" in said
        assert "1 without a suffix" in said
        assert "1 ._ files of macOS" in said
        assert "of other suffixes" in said
        assert said.count(".json") == 1
    result = build(source, tmp_path / "store")
    assert result.ignored[".json"] == 3
    assert sum(result.ignored.values()) == 38


# --- names that are not UTF-8 -------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_a_name_that_is_not_utf8_costs_its_own_sample_only(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = kind in ("tar", "csv", "parquet", "tfrecord")
    members = list(CLASSED)
    members.insert(0 if first else 3, ("cat/odd-\udcff.jpg", photo(99)))
    source = SOURCES[kind](tmp_path, members)
    keyed = [f"--key-column={name}" for name in keys_of(kind).values()]
    for command in ("plan", "build"):
        said = printed(capsys, command, source, tmp_path / "store", *FLAGS, *keyed)
        assert "1 whose names are not UTF-8" in said
        assert "odd-" in said
        assert "rename" in said
    result = build(source, tmp_path / "store", **keys_of(kind))
    assert result.left_out == {NOT_UTF8: 1}
    assert result.samples == 6
    assert not result.failed
    version = precache.open(tmp_path / "store")
    found = {key[-5:]: version.classes[label] for key, label in labels(tmp_path / "store").items()}
    assert found == {f"{n}.jpg".rjust(5, "/"): "cat" if n % 2 else "dog" for n in range(6)}
    opened = open_source(source, columns=Columns(key=keys_of(kind).get("key_column")))
    for key in version.keys:
        [sample] = opened.fetch([key], [-1])
        assert isinstance(sample, Sample)
        assert photo(int(key[-5])) in sample.inputs.values()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, "6 whose names are not UTF-8.*rename.*") for kind in ("folder", "csv", "parquet")),
        ("tar", "6 that share their keys .*"),
    ],
)
def test_more_bad_names_than_may_fail_are_refused_with_the_way_out(
    tmp_path: Path, kind: str, why: str
) -> None:
    more = [(f"cat/{n}{'' if kind == 'tar' else chr(0xDCFF)}.jpg", PHOTO) for n in range(6)]
    source = SOURCES[kind](tmp_path, [*((f"cat/{n}.jpg", PHOTO) for n in range(12)), *more])
    count = 6 if kind == "tar" else 12
    with pytest.raises(SourceError, match=why + "--max-failures 6"):
        build(source, tmp_path / "store", **keys_of(kind))
    with pytest.raises(SourceError, match=why + "--on-error skip$"):
        build(source, tmp_path / "store", on_error="raise", **keys_of(kind))
    assert build(source, tmp_path / "store", max_failures=6, **keys_of(kind)).samples == count


@pytest.mark.parametrize("relative", [True, False])
def test_a_source_whose_path_is_not_utf8_is_refused_and_builds_by_a_link(
    relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "caf\udce9"
    write(folder / "in/cat/1.jpg", PHOTO)
    monkeypatch.chdir(folder)
    source, store = "in" if relative else str(folder / "in"), tmp_path / "store"
    with pytest.raises(UsageError, match=r"caf\\udce9.*not UTF-8.*a link to it \(ln -s\)"):
        build(source, store)
    assert main(["build", source, str(store), *FLAGS]) == 2
    assert not store.exists()
    (tmp_path / "link").symlink_to(folder / "in")
    for _ in range(2):
        assert build(str(tmp_path / "link"), store).samples == 1
    assert labels(store) == {"cat/1.jpg": 0}


# --- names that recur ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tar", "zip", *KEYED])
def test_members_or_rows_of_one_name_are_left_out_and_counted(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SOURCES[kind](tmp_path, [*CLASSED, ("cat/1.jpg", photo(50))])
    keyed = [f"--key-column={name}" for name in keys_of(kind).values()]
    said = printed(capsys, "build", source, tmp_path / "store", *FLAGS, *keyed)
    assert "that share their keys with others, so that none of these is taken" in said
    assert "cat/1.jpg" in said
    result = build(source, tmp_path / "store", **keys_of(kind))
    assert (result.samples, result.left_out) == (5, {SAME_KEY: 1 + (kind != "tar")})
    version = precache.open(tmp_path / "store")
    for key, label in labels(tmp_path / "store").items():
        assert version.classes[label] == key.split("/")[-2]
        assert not key.endswith("cat/1.jpg")


@pytest.mark.parametrize(
    ("more", "labels_left", "left_out"),
    [
        ([("1.cls", b"2")], [1, 1], {BAD_LABEL: 1}),
        ([("1.cls", b"1"), ("1.cls", b"2")], [1, 1], {BAD_LABEL: 1}),
        ([("1.cls", b"")], [1, 1], {BAD_LABEL: 1}),
        ([("1.cls", b"1")], [1, 1, 1], {}),
        ([("9.cls", b"1"), ("9.cls", b"2")], [1, 1, 1], {}),
        ([("1.jpg", photo(9)), ("1.cls", b"2")], [1, 1], {SAME_KEY: 1}),
        ([("9.jpg", photo(9)), ("9.cls", b"caf\xe9")], [1, 1, 1], {BAD_LABEL: 1}),
        ([("9.jpg", photo(9)), ("9.cls", b"1" * 5000)], [1, 1, 1], {BAD_LABEL: 1}),
        ([("1.cls", b"\xe9")], [1, 1], {BAD_LABEL: 1}),
        ([("1.JPG", photo(50))], [1, 1], {SAME_KEY: 1}),
    ],
)
def test_a_sample_whose_label_is_unclear_is_bad(
    more: list[tuple[str, bytes]],
    labels_left: list[int],
    left_out: dict[str, int],
    tmp_path: Path,
) -> None:
    members = [
        (f"{n}.{s}", PHOTO if s == "jpg" else b"1") for n in range(3) for s in ("jpg", "cls")
    ]
    source = write_tar(tmp_path / "a.tar", [*members, *more])
    listing = open_source(source).list(lambda count: None)
    assert sorted(listing.table.labels.tolist()) == sorted(labels_left)
    assert listing.left_out == left_out
    result = build(source, tmp_path / "store")
    assert (result.samples, result.left_out) == (len(labels_left), left_out)
    if more[0][0] == "1.JPG":
        assert len(open_source(source, sample_name="whole").list(lambda count: None).table) == 4


def test_rows_of_one_key_with_two_labels_are_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [PHOTO] * 3, "label": list("xyx"), "id": list("aab")})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"2 samples a with the labels x and y; .*remove"):
        build(str(tmp_path / "a.parquet"), tmp_path / "store", key_column="id")


@pytest.mark.parametrize(
    ("last", "key", "left_out"),
    [
        ("in/0.jpg,x,0", None, {REPEATED: 1}),
        ("in/0.jpg,x,9", None, {REPEATED: 1}),
        ("in/7.jpg,x,0", "id", {SAME_KEY: 2}),
        ("in/0.jpg,x,0", "id", {REPEATED: 1}),
        ("in/0.jpg,y,0", None, None),
        ("in/7.jpg,y,0", "id", None),
        ("in/7.jpg,caf\udce9,7", None, None),
    ],
)
def test_lines_of_a_table_that_recur_or_are_not_utf8(
    tmp_path: Path, last: str, key: str | None, left_out: dict[str, int] | None
) -> None:
    for n in range(8):
        write(tmp_path / f"in/{n}.jpg", photo(n))
    lines = [f"in/{n}.jpg,{'xy'[n % 2]},{n}" for n in range(6)]
    text = "\n".join(["path,label,id", *lines, last])
    (tmp_path / "list.csv").write_text(text, errors="surrogateescape")
    source = str(tmp_path / "list.csv")
    if left_out is None:
        recurs = r"with the labels x and y; .*remove"
        why = recurs if last.isascii() else r"line 8 of .*list\.csv.*save it as UTF-8"
        with pytest.raises(SourceError, match=why):
            build(source, tmp_path / "store", key_column=key)
        return
    result = build(source, tmp_path / "store", key_column=key)
    assert result.left_out == left_out
    assert result.samples == (6 if REPEATED in left_out else 5)


def test_an_unchanged_archive_from_the_index_says_the_same(tmp_path: Path) -> None:
    members = [*pairs(6, {2: "input.jpg"}), ("\udcff.jpg", PHOTO), ("a.txt", b"")]
    members += [("caf\udce9/a.txt", b""), ("a.t\udce9", b"")]
    write_tar(tmp_path / "a.tar", members)
    source = open_source(str(tmp_path / "a.tar"))
    first = source.list(lambda count: None)
    again = source.list(lambda count: None, index=first.index)
    assert again.index is None
    for name in ("notes", "ignored", "left_out", "examples"):
        assert getattr(first, name) == getattr(again, name)
    assert same_locations(first.table, again.table)


# --- labels beside images, and of folders -------------------------------------------------------


@pytest.mark.parametrize("kind", ["tar", "lmdb"])
def test_where_some_containers_have_labels_beside_images_folders_are_no_labels(
    tmp_path: Path, kind: str
) -> None:
    for part, beside in (("a", True), ("b", False)):
        members = [(f"train/{part}{n}.jpg", photo(n)) for n in range(3)]
        if beside:
            members += [(f"train/{part}{n}.cls", b"cat") for n in range(3)]
        (tmp_path / part).mkdir()
        SOURCES[kind](tmp_path / part, members)
    listing = open_source(str(tmp_path / f"*/*.{kind}")).list(lambda count: None)
    assert listing.table.classes == ("cat",)
    assert listing.table.labels.tolist() == [0, 0, 0, -1, -1, -1]
    assert any("folders of names are no labels" in note for note in listing.notes)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_class_names_that_are_not_utf8_are_refused(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "1.jpg", PHOTO)
    name = b"\xff"
    if kind == "jsonl":
        (tmp_path / "list.jsonl").write_text('{"path": "1.jpg", "label": ["a", "\\ud800"]}')
        source = str(tmp_path / "list.jsonl")
    else:
        raw = pa.array([name], pa.binary())
        label = pa.Array.from_buffers(pa.string(), 1, raw.buffers())
        pq.write_table(pa.table({"image": [PHOTO], "label": label}), tmp_path / "a.parquet")
        source = str(tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="not UTF-8"):
        build(source, tmp_path / "store")


def test_a_parquet_table_of_uris_loses_the_row_of_a_bad_name_only(tmp_path: Path) -> None:
    for n in range(3):
        write(tmp_path / f"{n}.jpg", photo(n))
    names = pa.array([b"0.jpg", b"\xff.jpg", b"2.jpg"], pa.binary())
    path = pa.Array.from_buffers(pa.string(), 3, names.buffers())
    pq.write_table(pa.table({"path": path, "label": ["a", "b", "c"]}), tmp_path / "a.parquet")
    result = build(str(tmp_path / "a.parquet"), tmp_path / "store", source_kind="manifest")
    assert result.left_out == {NOT_UTF8: 1}
    assert labels(tmp_path / "store") == {"0.jpg": 0, "2.jpg": 1}


def test_what_is_left_out_is_said_without_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = [(f"{'cat' if n % 2 else 'dog'}/{n}.jpg", photo(n)) for n in range(8)]
    members += [("cat/1.jpg", photo(9)), ("cat/.h.jpg", PHOTO), ("dog/\udce9.jpg", PHOTO)]
    source = write_tar(tmp_path / "x.tar", [*members, ("a.json", b"{}")])
    for store in ("api", "quiet"):
        if store == "api":
            build(source, tmp_path / store)
        else:
            assert main(["build", source, str(tmp_path / store), "--no-progress", *FLAGS]) == 0
        said = caplog.text
        caplog.clear()
        assert "1 hidden images" in said
        assert "1 that share their keys with others" in said
        assert "1 whose names are not UTF-8" in said
        assert "Not used, as they are no images and no field names them: 1 .json" in said
    build(write_tar(tmp_path / "clean.tar", members[:8]), tmp_path / "b")
    assert not [record for record in caplog.records if "samples in" in record.getMessage()]
