"""Labels from a file: what fits the source, what does not, and files that are none."""

import csv
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache.errors import ChoiceError, SourceError
from precache.store.row_table import RowTable
from precache_workers.planning.class_maps import freeze_classes, read_classes, require_names
from precache_workers.planning.labels import override_labels
from tests.support.building import build_here, labels, write, write_jpegs

COMPOSED, APART = "caf\u00e9", "cafe\u0301"


def table_of(keys: Sequence[str], classes: Sequence[str] = ()) -> RowTable:
    """A listing of keys, with classes by first folder where they have one."""
    names = [key.partition("/")[0] if "/" in key else None for key in keys]
    found = tuple(classes or sorted({name for name in names if name is not None}))
    numbers = np.array([-1 if name is None else found.index(name) for name in names], np.int64)
    return RowTable.of_keys(list(keys), labels=numbers, classes=found)


Relabel = Callable[..., dict[str, str | None]]


@pytest.fixture
def relabel(tmp_path: Path) -> Relabel:
    """Key -> class, of keys or a table by the text of a file."""

    def relabel(
        keys: Sequence[str] | RowTable, text: str | bytes, **options: object
    ) -> dict[str, str | None]:
        path = tmp_path / "labels.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        table = keys if isinstance(keys, RowTable) else table_of(keys)
        found = override_labels(table, str(path), **options)  # type: ignore[arg-type]
        names = [found.classes[n] if n >= 0 else None for n in found.labels.tolist()]
        return dict(zip(found.keys, names, strict=True))

    return relabel


def lines_of(count: int, name: str = "{}.jpg,cat") -> str:
    return "".join(name.format(number) + "\n" for number in range(count))


# --- what fits ----------------------------------------------------------------------------------

THREE = "a.jpg", "b.jpg", "c.jpg"
FITS: dict[str, tuple[Sequence[str], str | bytes, Sequence[str | None]]] = {
    **{f"an empty label, {mark!r}": (
        THREE, mark.join(("a.jpg", "x\nb.jpg", "\nc.jpg", "y\n")), ("x", None, "y"),
    ) for mark in ",;\t"},
    "keys composed": ((f"{COMPOSED}.jpg", "b.jpg"), f"{APART}.jpg,x\nb.jpg,y\n", "xy"),
    "keys apart": ((f"{APART}.jpg", "b.jpg"), f"{COMPOSED}.jpg,x\nb.jpg,y\n", "xy"),
    "a class of the source": (
        (f"{APART}/1.jpg", "b/2.jpg", "b/3.jpg"), f"b/2.jpg,{COMPOSED}\n", (None, APART, None),
    ),
    "one class in two forms": (THREE[:2], f"a.jpg,{COMPOSED}\nb.jpg,{APART}\n", (COMPOSED,) * 2),
    "a line for two keys": (
        (f"{COMPOSED}.jpg", f"{APART}.jpg", "b.jpg"), f"b.jpg,x\n{APART}.jpg,x\n",
        (None, None, "x"),
    ),
    "spaces": (
        (" a.jpg", "b.jpg", "c d.jpg"), '" a.jpg",x\n  b.jpg  , y \n"c d.jpg", "z, z"\n',
        ("x", "y", "z, z"),
    ),
    **{f"a header, {header!r}": (THREE, f"{header}a.jpg,4\nb.jpg, 0\nc.jpg,2\n", "402")
       for header in ("key,label\n", "Key, Label\r\n", "\ufeffkey,label\n", "\ufeff")},
    "one label twice": ((f"{COMPOSED}.jpg",), f"key,label\n{COMPOSED}.jpg,x\n{APART}.jpg,x\n", "x"),
    "a whole key before its end": (("p1/x.jpg", "x.jpg"), "x.jpg,cat\n", (None, "cat")),
    **{f"a spreadsheet in {coding}": (
        THREE[:2], f"{mark}a.jpg\tcaf\u00e9\nb.jpg\tx\n".encode(coding), (COMPOSED, "x"),
    ) for coding, mark in (("utf-16", ""), ("utf-16-be", "\ufeff"))},
}  # fmt: skip


@pytest.mark.parametrize("case", FITS)
def test_lines_reach_their_samples(
    relabel: Relabel, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys, text, found = FITS[case]
    assert relabel(keys, text) == dict(zip(keys, found, strict=True))
    if "empty label" in case:
        assert "1 lines of" in caplog.text
        assert "have no label, and their samples get none" in caplog.text
    if case == "a line for two keys":
        said = f"fit no sample, such as line 2 with {APART + '.jpg'!r}; 2 of 3 samples"
        assert "1 of 2 lines of " in caplog.text
        assert said in caplog.text


def test_a_file_name_alone_names_the_one_image_that_has_it(
    relabel: Relabel, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["p1/x.jpg", "p1/y.jpg", "p2/y.jpg", "p2/z.jpg", "p2/w"]
    labels = ["cat", None, None, "eel", None]
    found = relabel(keys, "x.jpg,cat\ny.jpg,dog\nz.jpg,eel\nw,fox\n")
    assert found == dict(zip(keys, labels, strict=True))
    assert "names samples by the ends of their keys, such as 'x.jpg' (--key-column " in caplog.text
    assert "2 of 4 lines of" in caplog.text
    assert "fit no sample, such as line 2 with 'y.jpg'" in caplog.text


@settings(max_examples=25)
@given(
    keys=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
        lambda key: key == key.strip() != ""), min_size=1, max_size=8,
        unique_by=lambda key: normalize("NFC", key).strip()),
    data=st.data(),
)  # fmt: skip
def test_every_line_of_a_file_reaches_its_sample(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], data: st.DataObject
) -> None:
    forms = data.draw(st.lists(st.sampled_from(["NFC", "NFD"]), min_size=8, max_size=8))
    numbers = data.draw(st.permutations(range(len(keys))))
    written = [normalize(form, keys[n]) for form, n in zip(forms, numbers, strict=False)]
    path = tmp_path_factory.mktemp("labels") / "labels.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(zip(written, numbers, strict=True))
    table = RowTable.of_keys(keys)
    found = override_labels(table, str(path))
    assert found.labels.tolist() == list(range(len(keys)))


# --- what does not ------------------------------------------------------------------------------


def test_a_few_that_do_not_fit_are_counted(
    relabel: Relabel, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"{n}.jpg" for n in range(20)] + ["cat/a.jpg", "dog/b.jpg"]
    with caplog.at_level(logging.WARNING):
        found = relabel(keys, lines_of(17) + "typo.jpg,x\ncat/typo.jpg,x\ncat/a.jpg,cat\n")
    assert [found["19.jpg"], found["dog/b.jpg"]] == [None, None]
    [line] = caplog.messages
    assert "2 of 20 lines of " in line
    assert "fit no sample, such as line 18 with 'typo.jpg'" in line
    assert "4 of 22 samples get no label, such as '17.jpg'" in line


HUNDRED = [f"{n}.jpg" for n in range(100)]
MINUS = "".join(f"{n}.jpg,-1\n" for n in range(94, 100))  # as the file says


@pytest.mark.parametrize(
    ("keys", "text", "few", "error"),
    [
        (
            HUNDRED, lines_of(100) + lines_of(6, "x{}.jpg,cat"),
            lines_of(100) + lines_of(5, "x{}.jpg,cat"),
            r"6 of 106 lines .* 'x0\.jpg'.*--accept-unmatched",
        ),
        (HUNDRED, lines_of(94), lines_of(95), r"6 of 100 samples get no label, such as '94\.jpg'"),
        (HUNDRED, lines_of(94), lines_of(94, "{}.jpg,0") + MINUS, "6 of 100 samples get no label"),
        (  # whose folders are no classes then
            [f"cat/{n}" for n in HUNDRED], "cat/7.jpg,dog\n", lines_of(100, "cat/{}.jpg,dog"),
            r"99 of 100 samples get no label, such as 'cat/0\.jpg'",
        ),
    ],
)  # fmt: skip
def test_lines_without_a_sample_and_samples_without_a_line_are_refused_above_a_few(
    relabel: Relabel, keys: list[str], text: str, few: str, error: str
) -> None:
    with pytest.raises(SourceError, match=error):
        relabel(keys, text)
    named = {line.split(",")[0]: line.split(",")[1] for line in text.split()}
    found = relabel(keys, text, accept_unmatched=True)
    assert found == {key: named.get(key) for key in keys}
    assert len(relabel(keys, few)) == 100


@pytest.mark.parametrize(
    ("name", "first", "shift"),
    [("{}.jpg", 0, 1), ("a.parquet/{}", 0, 1), ("{:04d}.jpg", 1, -1), ("x/{}.png", 7, 1)],
)
def test_numbers_that_are_counted_from_another_are_refused(
    relabel: Relabel, name: str, first: int, shift: int
) -> None:
    keys = [name.format(number) for number in range(first, first + 30)]
    lines = [name.format(first + shift + number) + f",{number % 2}\n" for number in range(30)]
    text = "".join(lines)
    with pytest.raises(ChoiceError, match=rf"of the source's keys \{shift:+}, counted"):
        relabel(keys, text)
    assert relabel(keys, text, accept_unmatched=True)[keys[-1 if shift < 0 else 0]] is None
    assert len(relabel(keys, "".join(lines[1:]) + "other,1\n")) == 30


def test_labels_of_the_images_of_another_folder_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``train/metadata.csv`` for ``test``, whose images have the same names."""
    for split in ("train", "test"):
        write(tmp_path / split / "1.jpg", b"x")
    for own in ("train", "test"):
        path = tmp_path / own / "metadata.csv"
        path.write_text("file_name,label\n1.jpg,cat\n")
        override_labels(table_of(["1.jpg"]), str(path), source=str(tmp_path / "test"))
    said = "train/metadata.csv has labels of images beside it, such as"
    assert [said in record.getMessage() for record in caplog.records].count(True) == 1
    assert "test/metadata.csv has labels" not in caplog.text


def test_names_of_a_class_map_may_have_numbers_but_not_their_own() -> None:
    for names in (
        ("1 cat", "2 sea lion", "3 dog"), ("1 eel", "0 cat", "2 dog"), ("eel 1", "cat 0", "dog,2"),
        ("id\tname", "0\tcat", "1\tdog"),
    ):  # fmt: skip
        match = r"names of c have their numbers beside .*write the name"
        with pytest.raises(SourceError, match=match):
            require_names(names, ["dog"], "c")
    require_names(("1 cat", "2 dog"), ["1 cat"], "c")  # as the source has it
    for names in ("1 cat", "3 dog"), ("2 cat", "3 dog"), ("tier 1", "tier 2"), ("A 319", "A 320"):
        require_names(names, [], "c")


def test_folders_that_are_not_utf_8_are_no_classes_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("cat", "dog", os.fsdecode(b"caf\xe9")):
        write(tmp_path / folder / "a.jpg", b"x")
    assert read_classes(str(tmp_path)) == ("cat", "dog")
    assert "1 images of" in caplog.text
    assert "have no class, as their names are not UTF-8, such as caf" in caplog.text


# --- files that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a.jpg,1\nb.jpg,True\nc.jpg,no\n", "such as 'True', 'no' are words beside numbers"),
        ("a.jpg,17\nb.jpg,cat\n",
         "'cat' are words beside numbers. Choose: `--no-label cat` for .*; or `--"),
        ("Bild,Klasse\na.jpg,17\nb.jpg,3\n", "such as '17', '3' are in another order as text"),
        ("a.jpg,1\nb.jpg,-2\n", "such as '-2' are below -1. Choose: .*--no-label=-2"),
        (f"a.jpg,1\nb.jpg,{'9' * 5000}\n", "line 2 .*column 2 is a text of more than 4,096 char"),
        ("a.jpg,1\nb.jpg,100001\n", r"'b.jpg' the class number 100001; .* to 100,000, .*\. N"),
        ("a.jpg,x\n , y\n", "line 2 .*labels.csv has no key"),
        ("", "holds no label; each line is key,label"),
        ("key,label\n", "no key of .*labels.csv is in the source; its first is 'key'"),
        ("a.jpg\n", r"line 1 of .*labels.csv is \['a.jpg'\]; each line is key,label"),
        ("key,label\n\na.jpg,x\nb.jpg\n", "line 4 "),
        ("cats/1.jpg,x\n", "no key of .*labels.csv is in the source; its first is 'cats/1.jpg'"),
        (b"a.jpg,\xff\xfe\n", "cannot read labels from .*labels.csv"),
        ("a.jpg|x\nb.jpg|y\n", r"line 1 .*'a.jpg\|x'.*; each line is key,label, sep"),
        ("a.jpg,x\nb.jpg,y,z\n", "line 2 of .*labels.csv has 3 cells, and the first line 2"),
        ("a.jpg,x\nb.jpg,y\0\n", "line 2 has bytes that are not UTF-8, or NUL, as UTF-16 has"),
        ("a.jpg,x\nb.jpg,y\n".encode("utf-16")[:-1], "labels.csv is damaged: .* truncated data"),
        ("a.jpg,x\nb.jpg,y\n".encode("utf-16-le"), "line 1 has bytes that .* or NUL"),
        ("a.jpg,x\nb.jpg,é\n".encode("latin-1"), "line 2 has bytes that are not UTF-8"),
        ('a.jpg,x\n"b.jpg,y\nc.jpg,z\n', "line 2 .* is not CSV: unexpected end of data"),
        ('a.jpg,x\n"b".jpg,y\n', "line 2 .* is not CSV"),
        (f"a.jpg,x\nb.jpg,{'y' * 200_000}\n", r"line 2 .* is not CSV: field larger than .*limit"),
        (f"{'b' * 50_000}\na.jpg,x\n", r"line 1 .*\(50,004 characters\); each line"),
        ("a.jpg,\"['x', 'y']\"\nb.jpg,x\n", "are no plain names .* or lists such as"),
        ("a.jpg,\"('x', 'y')\"\nb.jpg,x\n", r"such as .\('x', 'y'\). are no plain names"),
        ("a.jpg,{'x': 1}\nb.jpg,x\n", r"such as .\{.x.: 1\}. are no plain names"),
        ("a.jpg,x\nb.jpg,caf\u00e9\n".encode("cp1252"), r"of \d lines\. Save it as UTF-8"),
        ("key,label\na.jpg,x\nb.jpg,x\na.jpg,y\n", "two labels: 'x' in line 2 and 'y' in line 4"),
        ("1 1\n2 2\n", "as another file may give them by number"),
        ("x y.jpg 3\nc d.jpg 5\n", "no key of .*write keys as the source has them"),
        ("id,w,breed\nx,3,cat\ny,4,dog\n", "no key of .*write keys as the source has them"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    relabel: Relabel, text: str | bytes, error: str
) -> None:
    with pytest.raises(SourceError, match=error) as caught:
        relabel(["a.jpg", "b.jpg"], text)
    assert len(str(caught.value)) < 600
    assert not ("no key of" in error and isinstance(caught.value, ChoiceError))


def test_a_chosen_column_of_two_is_refused(relabel: Relabel) -> None:
    with pytest.raises(SourceError, match="has several columns 'label'; rename all but one"):
        relabel(["a.jpg"], "id,label,label\na.jpg,x,y\n", label_column="label")


def test_a_path_that_is_none_is_said() -> None:
    for path in ("nowhere.csv", "nowhere\0.csv", "/"):
        with pytest.raises(SourceError, match="cannot read labels from"):
            override_labels(table_of(["a.jpg"]), path)


# --- class maps ---------------------------------------------------------------------------------


def test_a_class_map_fits_however_its_letters_are_composed(tmp_path: Path) -> None:
    (tmp_path / "classes").write_text(f"\ufeff{COMPOSED}\r\ndog\r\n", "utf-8", newline="")
    classes = read_classes(str(tmp_path / "classes"))
    assert classes == (COMPOSED, "dog")
    frozen = freeze_classes(table_of([f"{APART}/1.jpg", "dog/2.jpg"]), classes, "classes")
    assert (frozen.labels.tolist(), frozen.classes) == ([0, 1], classes)
    both = table_of([f"{APART}/1.jpg", f"{COMPOSED}/2.jpg", "dog/3.jpg"])
    with pytest.raises(SourceError, match=r"'cafe\\u0301' and 'caf\\xe9', which differ only"):
        freeze_classes(both, classes, "classes")
    assert freeze_classes(both, (APART, COMPOSED, "dog"), "x").labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "data",
    [
        f"{COMPOSED}\n{APART}\n".encode(),
        b'["\\ud800"]',
        b"[" * 100_000,
        b"[" + b"9" * 5000 + b"]",
        "cat\ndog\n".encode("utf-16"),
        "cat\ndog\n".encode("utf-16-le"),
        b"", b"\n \n", b"cat\ndog\ncat\n", b'["cat", "cat"]', b"[]", b'["cat",',
        b'{"cat": 0, "dog": 2}', b'{"cat": 0, "dog": 0}', b'{"cat": 1, "cat": 0}',
        b'[{"name": "cat"}]', b"cat\xff\n",
    ],
)  # fmt: skip
def test_files_that_are_no_class_map(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "classes").write_bytes(data)
    with pytest.raises(SourceError, match=r"--classes .*classes"):
        read_classes(str(tmp_path / "classes"))
    with pytest.raises(SourceError, match=r"--classes .*nowhere is neither a file nor a store"):
        read_classes(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "text", ["dog\ncat\n", "dog\r\n\r\n  cat  \n", '["dog", "cat"]', '\n[ "dog",\n "cat" ]\n']
)
def test_classes_from_a_file_keep_its_order(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes").write_text(text)
    classes = read_classes(str(tmp_path / "classes"))
    table = table_of(["cat/1.jpg", "cat/2.jpg", "dog/3.jpg"])
    frozen = freeze_classes(table, classes, "classes")
    assert (frozen.labels.tolist(), frozen.classes) == ([1, 1, 0], ("dog", "cat"))
    with pytest.raises(SourceError, match=r"classes that list\.txt does not: dog; remove them"):
        freeze_classes(table, ("ant", "cat"), "list.txt")


@given(
    st.lists(st.sampled_from(["ant", "bee", "cow", "dog", ""]), min_size=1, max_size=12),
    st.permutations(["ant", "bee", "cow", "dog", "elk"]),
)
def test_freezing_renumbers_and_never_renames(names: list[str], classes: list[str]) -> None:
    table = table_of([f"{name}/{n}" if name else f"{n}" for n, name in enumerate(names)])
    frozen = freeze_classes(table, classes, "x")
    assert [[*classes, ""][label] for label in frozen.labels] == names


def test_classes_from_a_store(tmp_path: Path) -> None:
    recipe = precache.Recipe.image(resize=16, crop=16)
    train, val = tmp_path / "train.store", tmp_path / "val.store"
    build_here(write_jpegs(tmp_path / "train", 3, classes=("ant", "bee", "cow")), train, recipe)
    source = write_jpegs(tmp_path / "val", 2, classes=("bee", "cow"))
    build_here(source, val, recipe, {"classes": train})
    assert labels(val) == {"bee/0000.jpg": 1, "cow/0001.jpg": 2}
    assert precache.open(val).classes == ("ant", "bee", "cow")


# --- paths below the source ---------------------------------------------------------------------

HERE = "/data/train/"


@pytest.mark.parametrize(
    ("folder", "keys", "lines", "labels"),
    [  # however keys end, and whatever of the source is gone
        (HERE, "2.jpg A/1.jpg train/A/1.jpg", "A/1.jpg,cat gone/2.jpg,dog", [None, "cat", None]),
        (HERE, "2.jpg A/1.jpg train/A/1.jpg", "A/1,cat gone/2,dog", [None, "cat", None]),
        *(  # of another computer: what may be of two samples names none
            (
                folder,
                "2.jpg A/1.jpg A/2.jpg train/A/1.jpg",
                "2.jpg,cat A/1.jpg,cat A/2.jpg,dog",
                ["cat", None, "dog", None],
            )
            for folder in ("/mnt/data/train/", "D:\\data\\train\\")
        ),
    ],
)
def test_a_path_names_the_one_sample_below_the_source_that_it_can_be_of(
    relabel: Relabel, folder: str, keys: str, lines: str, labels: list[str | None]
) -> None:
    text = "".join(f"{folder}{line}\n" for line in lines.split())
    found = relabel(keys.split(), text, source="/data/train", accept_unmatched=True)
    assert [*found.values()] == labels


@pytest.mark.parametrize("folder", ["/home/test/", "/Users/val/", "/dev/shm/", "C:\\Users\\dev\\"])
def test_a_folder_of_a_user_is_no_split(folder: str, relabel: Relabel) -> None:
    text = f"{folder}1.jpg,cat\n{folder}2.jpg,dog\n"
    found = relabel(["1.jpg", "2.jpg"], text, source="/data/train")
    assert found == {"1.jpg": "cat", "2.jpg": "dog"}
    with pytest.raises(SourceError, match="is in the source"):
        relabel(["1.jpg", "2.jpg"], text.replace(folder, f"{folder}val/"), source="/data/train")


def test_paths_of_several_folders_or_of_another_one_name_none(relabel: Relabel) -> None:
    """Even where they have one label: it is not known which folder the source is."""
    keys = [f"{number}.jpg" for number in range(9)]
    several = "".join(f"/mnt/{folder}/{key},cat\n" for key in keys for folder in "ab")
    folders = ("val/", "/data/val/", "C:\\val\\")
    others = [f"{folder}0.jpg,cat\n{folder}1.jpg,dog\n" for folder in folders]
    for text, source in ((several, "/data/b"), *((text, "/in/train") for text in others)):
        with pytest.raises(SourceError, match=r"no key of .* is in the source"):
            relabel(keys, text, source=source)
    found = relabel(keys, f"{several}/mnt/a/last.jpg,cat\n", source="/mnt/b", accept_unmatched=True)
    assert found == dict.fromkeys(keys, "cat")
