"""Fields start from columns beside the image: texts, arrays, masks and numbers, in every source."""

import io
import json
import random
import re
import shutil
import tarfile
import tomllib
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import precache
from precache.errors import SampleError, SourceError
from precache.store.row_table import REMOVED
from precache_workers.planning.assembly import Compute
from precache_workers.shards.field_writer import stage_rows
from precache_workers.sources.base import Columns, Inputs, Sample
from precache_workers.sources.containers import ContainerSource
from precache_workers.sources.kinds import open_source
from precache_workers.sources.sample_parts import value_of
from tests.support.building import cut, encoded, write
from tests.support.containers import add, in_bucket, listed, noted_ranges, write_table, write_tar
from tests.support.servers import S3Server
from tests.support.source_contract import check_source

COUNT = 12


def npy(array: np.ndarray) -> bytes:
    """The bytes of an array's file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def sample(number: int) -> dict[str, Any]:
    """A photograph with a caption, tokens, a mask and a document."""
    mask = Image.fromarray(np.full((48, 64), number, np.uint8))
    return {
        "image": encoded(cut(number)),
        "caption": f"photo {number} of «{COUNT}»",
        "tokens": np.arange(number % 5 + 1, dtype=np.int64) * number,
        "mask": encoded(mask, "PNG"),
        "meta": json.dumps({"number": number}),
    }


SAMPLES = {f"{number:03d}": sample(number) for number in range(COUNT)}


# --- writers: the source, and the name of each column there -------------------------------------

Named = tuple[str, Mapping[str, str]]
BY_NAME = {name: name for name in ("caption", "tokens", "mask", "meta")}


def write_members(to: Path, suffix: str = "tar") -> Named:
    names = {"caption": "txt", "tokens": "tokens.npy", "mask": "mask.png", "meta": "json"}
    with tarfile.open(to / f"a.{suffix}", "w:gz" if "gz" in suffix else "w") as tar:
        for number, (stem, parts) in enumerate(SAMPLES.items()):
            members = {
                "json": parts["meta"].encode(),
                "jpg": parts["image"],
                "mask.png": parts["mask"],
                "tokens.npy": npy(parts["tokens"]),
                "txt": parts["caption"].encode(),
                "mp4": bytes(1 << 16),
            }
            for name, data in members.items():
                add(tar, f"{stem}.{name}", data, mtime=1000 + number)
    return str(to / f"a.{suffix}"), names


def write_compressed(to: Path) -> Named:
    return write_members(to, "tar.gz")


def columns_of(*names: str) -> dict[str, list[Any]]:
    return {name: [parts[name] for parts in SAMPLES.values()] for name in names}


def table() -> pa.Table:
    """Columns of types as tables have them."""
    columns = columns_of("image", *BY_NAME)
    columns["mask"] = [{"bytes": mask, "path": None} for mask in columns["mask"]]
    paths = [f"{stem}.jpg" for stem in SAMPLES]
    pairs = zip(columns["image"], paths, strict=True)
    columns["image"] = [{"bytes": image, "path": path} for image, path in pairs]
    return pa.table({"video": [bytes(1 << 16)] * COUNT, **columns})


def write_parquet(to: Path) -> Named:
    options = {"row_group_size": 7, "use_dictionary": False}
    return write_table(to / "a.parquet", table(), **options), BY_NAME


def write_arrow(to: Path) -> Named:
    return write_table(to / "a.arrow", table()), BY_NAME


def write_examples(to: Path) -> Named:
    columns = {**columns_of("image", *BY_NAME), "id": [*SAMPLES]}
    return write_table(to / "a.tfrecord", columns), BY_NAME


def write_folders(to: Path) -> Named:
    suffixes = {"image": "jpg", "caption": "txt", "tokens": "npy", "mask": "png", "meta": "json"}
    for stem, parts in SAMPLES.items():
        for name, suffix in suffixes.items():
            part = npy(parts[name]) if suffix == "npy" else parts[name]
            data = part.encode() if isinstance(part, str) else part
            write(to / f"data/{name}/{stem}.{suffix}", data)
    return f"{to}/data/{{{','.join(suffixes)}}}", BY_NAME


def write_patterns(to: Path) -> Named:
    """The same files beside each other."""
    write_folders(to)
    for path in (to / "data").rglob("*.*"):
        path.rename(to / "data" / f"{path.stem}{'_seg' * (path.suffix == '.png')}{path.suffix}")
    patterns = {"caption": "*.txt", "tokens": "*.npy", "mask": "*_seg.png", "meta": "*.json"}
    return f"{to}/data/{{*.jpg,{','.join(patterns.values())}}}", patterns


def rows(to: Path, *names: str) -> dict[str, list[Any]]:
    """Columns of a table of the photographs, and some of their parts."""
    paths = [write(to / f"{stem}.jpg", parts["image"]).name for stem, parts in SAMPLES.items()]
    return {"path": paths, **columns_of(*names)}


def write_lines(to: Path) -> Named:
    named = {name: name for name in BY_NAME if name != "mask"}
    return write_table(to / "a.jsonl", rows(to, *named)), named


def write_csv(to: Path) -> Named:
    named = {"caption": "caption", "meta": "meta"}
    return write_table(to / "a.csv", rows(to, *named)), named


WRITERS: dict[str, Callable[[Path], Named]] = {
    "tar": write_members,
    "compressed tar": write_compressed,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "tfrecord": write_examples,
    "folders": write_folders,
    "patterns": write_patterns,
    "jsonl": write_lines,
    "csv": write_csv,
}
OPTIONS: dict[str, dict[str, Any]] = {"tfrecord": {"key_column": "id"}}

FIELDS = {
    "image": 'ops = [{ op = "decode" }, { op = "resize", size = [16, 16] }]',
    "caption": 'kind = "text"',
    "tokens": 'kind = "ragged"',
    "mask": 'ops = [{ op = "decode", mode = "P" }]',
    "meta": 'kind = "text"',
}


def recipe_of(names: Mapping[str, str], *fields: str) -> precache.Recipe:
    """A recipe of some fields, which start from the columns of these names."""
    lines = list[str]()
    for name in fields:
        lines += [f"[fields.{name}]", FIELDS[name]]
        lines += [f"input = {json.dumps(names[name])}"] if name in names else []
    return precache.Recipe.from_dict(tomllib.loads("\n".join(lines)))


def opened(source: str, *names: str, image: bool = True, **options: Any) -> Any:
    """A source of which fields name some columns."""
    columns = Columns(key=options.pop("key_column", None), inputs=Inputs(names, image))
    return open_source(source, columns=columns, **options)


def parts_of(source: Any) -> dict[str, Any]:
    """Stem -> sample, or the error in place of it."""
    of = source.list(lambda count: None).table
    fetched = source.fetch(of.keys, of.sizes.tolist(), of.locations)
    stems = [key.rpartition("/")[2].partition(".")[0] for key in of.keys]
    return dict(zip(stems, fetched, strict=True))


# --- the same samples by every source -----------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
def test_every_source_gives_the_same_parts_and_rows(kind: str, tmp_path: Path) -> None:
    source, names = WRITERS[kind](tmp_path)
    options = OPTIONS.get(kind, {})
    table_source = opened(source, *sorted(names.values()), **options)
    check_source(table_source)
    samples = parts_of(table_source)
    if kind in ("parquet", "arrow"):
        assert samples.keys() == SAMPLES.keys()
    assert len(samples) == COUNT
    for stem, wanted in SAMPLES.items():
        inputs = dict(samples[stem].inputs)
        assert next(iter(inputs.values())) == wanted["image"]
        for name, column in names.items():
            value, expected = inputs[column], wanted[name]
            if name == "tokens":
                assert np.asarray(value).dtype == np.int64
                np.testing.assert_array_equal(value, expected)
            else:
                text = kind == "tfrecord" and isinstance(expected, str)
                assert value == (expected.encode() if text else expected)

    recipe = recipe_of({"caption": "captoin"}, "image", "caption")
    with pytest.raises(precache.PrecacheError, match="captoin") as error:
        precache.build(source, tmp_path / "store", recipe, address="serial", **options)
    assert all(repr(name) in str(error.value) for name in names.values())
    assert not [*tmp_path.glob("store/*/zarr.json")]

    recipe = recipe_of(names, "image", *names)
    precache.build(source, tmp_path / "store", recipe, address="serial", **options)
    dataset = precache.CachedDataset(tmp_path / "store")
    assert len(dataset) == COUNT
    for number, key in enumerate(dataset.keys):
        row, wanted = dataset[number], SAMPLES[key.rpartition("/")[2].partition(".")[0]]
        for name in names:
            if isinstance(wanted[name], str):
                assert row[name] == wanted[name]
            elif name == "tokens":
                np.testing.assert_array_equal(row[name].numpy(), wanted[name])
            else:
                pixels = np.asarray(Image.open(io.BytesIO(wanted[name])))
                np.testing.assert_array_equal(row[name].numpy()[0], pixels)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "within",
    [
        lambda images: {"images": [[image] for image in images]},
        lambda images: {"images": [[{"bytes": image, "path": None}] for image in images]},
        lambda images: {"sample": [{"id": 1, "photo": image} for image in images]},
    ],
)
def test_images_within_a_column_are_named_as_the_input_that_reads_them(
    kind: str, within: Any, tmp_path: Path
) -> None:
    write_table(tmp_path / f"a.{kind}", pa.table(within(columns_of("image")["image"])))
    with pytest.raises(SourceError, match=r"name these by their `input`, such as \S+;") as raised:
        listed(str(tmp_path / f"a.{kind}"))
    [name] = re.findall(r"such as (\S+);", str(raised.value))
    field = precache.Field(ops=[precache.Decode()], input=name)
    recipe = precache.Recipe(fields={"image": field})
    precache.build(tmp_path / f"a.{kind}", tmp_path / "store", recipe, address="serial")
    assert len(precache.CachedDataset(tmp_path / "store")) == COUNT


@pytest.mark.parametrize("kind", ["tar", "compressed tar", "parquet", "arrow", "tfrecord", "none"])
def test_samples_need_no_image(kind: str, tmp_path: Path) -> None:
    if kind == "none":  # there is no column of images
        source, names = str(tmp_path / "a.parquet"), BY_NAME
        write_table(Path(source), table().select(["caption", "tokens"]))
        with pytest.raises(SourceError, match=r"no column of images .*if all fields start"):
            listed(source)
    else:
        source, names = WRITERS[kind](tmp_path)
    named = names["caption"], names["tokens"]
    columns = opened(source, *named, image=False, **OPTIONS.get(kind, {}))
    check_source(columns)
    samples = [*parts_of(columns).values()]
    assert {frozenset(one.inputs) for one in samples} == {frozenset(named)}
    options = {"address": "serial", **OPTIONS.get(kind, {})}
    recipe = recipe_of(names, "tokens", "caption")
    precache.build(source, tmp_path / "store", recipe, **options)
    dataset = precache.CachedDataset(tmp_path / "store")
    captions = {dataset[number]["caption"] for number in range(COUNT)}
    assert captions == {parts["caption"] for parts in SAMPLES.values()}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_numbers_are_rows_without_axes(kind: str, tmp_path: Path) -> None:
    scores = [number / 4 for number in range(COUNT)]
    columns = rows(tmp_path) if kind == "jsonl" else {}
    write_table(tmp_path / f"a.{kind}", {**columns, "score": scores})
    ops = [{"op": "to_dtype", "dtype": "float32"}]
    recipe = precache.Recipe.from_dict({"fields": {"score": {"input": "score", "ops": ops}}})
    source = tmp_path / f"a.{kind}"
    precache.build(source, tmp_path / "store", recipe, address="serial")
    dataset = precache.CachedDataset(tmp_path / "store")
    assert sorted(float(dataset[number]["score"]) for number in range(COUNT)) == scores


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_only_columns_that_fields_name_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, names = WRITERS[kind](tmp_path)
    columns = opened(source, names["caption"], names["tokens"], image=False)
    of = columns.list(lambda count: None).table
    read = noted_ranges(monkeypatch)
    monkeypatch.setattr("precache_workers.sources.file_ranges.GAP_BYTES", 0)
    fetched = columns.fetch(of.keys, of.sizes.tolist(), of.locations)
    assert all(isinstance(one, Sample) for one in fetched)
    assert sum(read) < (COUNT << 16) / 4, "videos and images are not read"


@pytest.mark.parametrize("kind", ["tar", "parquet", "arrow", "folders", "patterns", "jsonl"])
def test_columns_are_read_in_a_bucket(kind: str, tmp_path: Path, s3: S3Server) -> None:
    source, names = WRITERS[kind](tmp_path)
    bucket = in_bucket(tmp_path, f"s3://bucket/columns-{kind}", s3.options())
    uri = f"{bucket}{source.removeprefix(str(tmp_path))}"
    columns = opened(uri, *sorted(names.values()), storage_options=s3.options())
    check_source(columns)
    local = parts_of(opened(source, *sorted(names.values())))
    remote = parts_of(columns)
    assert {stem: one.content for stem, one in remote.items()} == {
        stem: one.content for stem, one in local.items()
    }


# --- changes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("tar", "caption"),
        ("tar", "image"),
        ("parquet", "caption"),
        ("arrow", "image"),
        ("tfrecord", "caption"),
        ("folders", "image"),
        ("jsonl", "caption"),
        ("csv", "image"),
        *(
            pytest.param(*pair, marks=pytest.mark.heavy)
            for pair in (
                ("parquet", "image"),
                ("arrow", "caption"),
                ("tfrecord", "image"),
                ("folders", "caption"),
                ("jsonl", "image"),
                ("csv", "caption"),
            )
        ),
    ],
)
def test_an_edited_part_changes_its_sample_whatever_recipes_of_other_fields_know(
    kind: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"address": "serial", **OPTIONS.get(kind, {})}
    other = "image" if part == "caption" else "caption"

    source, names = WRITERS[kind](tmp_path)

    reused = []

    def build(*fields: str) -> Any:
        recipe = recipe_of(names, *fields)
        reused.append(precache.build(source, tmp_path / "store", recipe, **options).rows_reused)
        return precache.CachedDataset(tmp_path / "store")

    build(other)
    build(part)
    before = build("image", "caption")
    edited = {**SAMPLES["008"], part: {"caption": "edited", "image": encoded(cut(99))}[part]}
    monkeypatch.setitem(SAMPLES, "008", edited)
    WRITERS[kind](tmp_path)
    build(other)
    after = build("image", "caption")
    is_same = [
        before[n]["caption"] == after[n]["caption"] and before[n]["image"].equal(after[n]["image"])
        for n in range(COUNT)
    ]
    assert sum(is_same) == reused[-1] == COUNT - 1


def test_a_column_that_no_field_names_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, names = write_members(tmp_path)
    recipe = recipe_of(names, "image", "caption")
    precache.build(source, tmp_path / "store", recipe, address="serial")
    monkeypatch.setitem(SAMPLES, "007", {**SAMPLES["007"], "meta": "{}"})
    write_members(tmp_path)
    again = precache.build(source, tmp_path / "store", recipe, address="serial")
    assert again.version == precache.CachedDataset(tmp_path / "store").version.id


# --- refusals and holes -------------------------------------------------------------------------

WRONG = {
    "when": pa.array([0] * 2, pa.timestamp("s")),
    "box": pa.array([{"x": 1, "y": 2}] * 2),
    "images": pa.array([[{"bytes": b"a", "path": ""}]] * 2),
    "words": pa.array([["a", "b"]] * 2),
    "price": pa.array([Decimal(1)] * 2),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_column_of_another_type_is_refused_with_its_type(name: str, tmp_path: Path) -> None:
    columns = {"image": [b"\xff\xd8\xff"] * 2, name: WRONG[name]}
    source = write_table(tmp_path / "a.parquet", columns)
    with pytest.raises(SourceError, match="a field starts from text, bytes, numbers, or") as error:
        opened(source, name).list(lambda count: None)
    assert str(pq.read_schema(source).field(name).type) in str(error.value)
    for way, value in (("box.x", 1), ("images.0", b"a")):  # the advice is followed
        if f"such as {way}" in str(error.value):
            inner = opened(source, way, image=False)
            assert [one.inputs[way] for one in parts_of(inner).values()] == [value, value]
    assert ("such as" in str(error.value)) is (name in ("box", "images"))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tfrecord"])
def test_a_picture_that_has_a_column_of_its_name_names_its_input(kind: str, tmp_path: Path) -> None:
    source, _ = WRITERS[kind](tmp_path)
    options = {"address": "serial", **OPTIONS.get(kind, {})}
    with pytest.raises(SourceError, match=r"although there is a column 'mask'") as error:
        precache.build(source, tmp_path / "store", recipe_of({}, "image", "mask"), **options)
    for column in re.findall(r"input = (\S+?),? (?:or|in)", str(error.value)):
        recipe = recipe_of({"mask": json.loads(column)}, "mask")
        assert len(parts_of(opened(source, *Inputs.of(recipe).names, image=False))) == COUNT


@pytest.mark.parametrize("kind", ["tar", "parquet", "folder"])
def test_bytes_start_from_the_column_of_their_name(kind: str, tmp_path: Path) -> None:
    images, column = (
        [parts["image"] for parts in SAMPLES.values()],
        [b"%d" % n for n in range(COUNT)],
    )
    if kind == "tar":
        files = [(f"{stem}.jpg", data) for stem, data in zip(SAMPLES, images, strict=True)]
        files += [(f"{stem}.audio", data) for stem, data in zip(SAMPLES, column, strict=True)]
        source = write_tar(tmp_path / "a.tar", files)
    elif kind == "parquet":
        write_table(tmp_path / "a.parquet", {"image": images, "audio": column})
        source = str(tmp_path / "a.parquet")
    else:  # it has no columns
        source, column = f"{write_folders(tmp_path)[0].partition('{')[0]}image", images
    fields = {"image": {"ops": [{"op": "decode"}]}, "audio": {"kind": "bytes"}}
    recipe = precache.Recipe.from_dict({"fields": fields})
    precache.build(source, tmp_path / "store", recipe, address="serial")
    dataset = precache.CachedDataset(tmp_path / "store")
    assert {dataset[number]["audio"] for number in range(COUNT)} == {*column}


def test_captions_beside_images_are_named_by_a_pattern(tmp_path: Path) -> None:
    for stem, parts in SAMPLES.items():
        write(tmp_path / f"photos/{stem}.jpg", parts["image"])
        write(tmp_path / f"photos/{stem}.txt", parts["caption"].encode())
    recipe = recipe_of({"caption": "txt"}, "image", "caption")
    with pytest.raises(SourceError, match="is an image alone") as error:
        precache.build(tmp_path / "photos", tmp_path / "store", recipe, address="serial")
    advice = re.search(r"give '(.*)', and in the field input = \"(.*)\"", str(error.value))
    assert advice is not None
    recipe = recipe_of({"caption": advice[2]}, "image", "caption")
    precache.build(advice[1], tmp_path / "store", recipe, address="serial")
    dataset = precache.CachedDataset(tmp_path / "store")
    for number, key in enumerate(dataset.keys):
        assert dataset[number]["caption"] == SAMPLES[key.partition(".")[0]]["caption"]


def test_missing_and_malformed_texts_are_holes_of_fields_that_need_them(tmp_path: Path) -> None:
    image = encoded(cut(1))
    members = [
        ("1.jpg", image), ("1.txt", b"one"), ("2.jpg", image), ("3.jpg", image),
        ("3.txt", b"\xff\xfe"), ("4.jpg", image), ("4.txt", b"first"), ("4.txt", b"last"),
        ("5.jpg", image), ("5.txt", b"a"), ("5.TXT", b"b"), ("6.txt", b"no image"),
        ("7.jpg", image), ("7.txt", "\ufeffmarked".encode()), ("8.jpg", image), ("8.txt", b""),
        ("9.jpg", image), ("._9.txt", b"of macOS"), ("a/.hidden.txt", b""),
    ]  # fmt: skip
    source = opened(write_tar(tmp_path / "a.tar", members), "txt")
    listing = source.list(lambda count: None)
    assert listing.left_out == {"same_key": 2}
    assert "1 inputs of fields in tar archives have no image beside them" in listing.notes
    samples = parts_of(source)
    texts = {stem: one.inputs["txt"] for stem, one in samples.items()}
    assert {stem: str(text) for stem, text in texts.items()} == {
        "1": "one",
        "2": "has no 'txt'; it has 'jpg'",
        "3": "its 'txt' is not UTF-8 (at byte 0); save it as UTF-8",
        "7": "\ufeffmarked",
        "8": "",
        "9": "has no 'txt'; it has 'jpg'",
    }
    assert all(isinstance(texts[stem], SampleError) for stem in "239")
    recipe = recipe_of({}, "image")
    path = tmp_path / "a.tar"
    assert not precache.build(path, tmp_path / "images", recipe, address="serial").holes
    recipe = recipe_of({"caption": "txt"}, "image", "caption")
    result = precache.build(path, tmp_path / "store", recipe, address="serial", max_failures=9)
    reasons = {f"a.tar/{stem}.jpg": f"its caption: {texts[stem]}" for stem in "239"}
    assert dict(result.holes) == reasons


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_cells_that_are_missing_or_no_array_are_holes(kind: str, tmp_path: Path) -> None:
    image = {"bytes": b"a", "path": ""}
    columns = {
        "caption": ["a", None, "c"],
        "tokens": pa.array([[1, None], [1], None]),
        "grid": pa.array([[[1], [2, 3]], [], [[1, 2], [3, 4]]]),
        "images": [[image, image], [image], None],
    }
    source = write_table(tmp_path / f"a.{kind}", columns)
    samples = parts_of(opened(source, "caption", "tokens", "grid", "images.1", image=False))
    reasons = [
        {n: str(v) for n, v in one.inputs.items() if isinstance(v, SampleError)}
        for one in samples.values()
    ]
    assert reasons == [
        {
            "tokens": "its 'tokens' has missing values among its numbers",
            "grid": "its 'grid' has lists of several lengths, which are no array",
        },
        {
            "caption": "has no 'caption'; it has 'tokens', 'grid'",
            "images.1": "has no 'images.1'; it has 'tokens', 'grid'",
        },
        {
            "tokens": "has no 'tokens'; it has 'caption', 'grid'",
            "images.1": "has no 'images.1'; it has 'caption', 'grid'",
        },
    ]
    assert samples["0"].inputs["images.1"] == b"a"
    assert samples["2"].inputs["grid"].tolist() == [[1, 2], [3, 4]]


def header(text: str, version: bytes = b"\x01\x00") -> bytes:
    """An array's file that has a header, and 8 bytes of values."""
    length = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + length + text.encode() + bytes(8)


def described(shape: object, dtype: object = "<i8") -> str:
    return str({"descr": dtype, "fortran_order": False, "shape": shape})


HOSTILE = {
    "": "is no NumPy array",
    b"\x93NUMPY": "is no NumPy array",
    b"\x93NUMPY\x09\x00" + bytes(20): "is no NumPy array",
    header(described((1 << 50,))): "is said to be",
    header(described((1 << 70, 1 << 70))): "is said to be",
    header(described((-1, -1))): "is said to be",
    header(described((2,))): "is said to be",
    header(described((1,), "|O")): "nothing is unpickled",
    header(described((1,), "<U2")): "not of numbers",
    header(described((0,), "<U0")): "not of numbers",
    header(described((1,), [("a", "<i8")])): "not of numbers",
    header(described((1,), ("<i4", (2,)))): "is no NumPy array|not of numbers",
    header(described((1,), "<c8")): "not of numbers",
    header(described("x")): "is no NumPy array",
    header("__import__('os').getpid()"): "is no NumPy array",
    header("(" * 9000): "is no NumPy array",
    header("{" + "'a': 1, " * 99999 + "}", b"\x02\x00"): "is no NumPy array",
    header("'''"): "is no NumPy array",
}


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_array_is_refused_before_memory_is_taken(number: int) -> None:
    data, reason = [*HOSTILE.items()][number]
    value = value_of("1.npy", data.encode() if isinstance(data, str) else data)
    assert isinstance(value, SampleError)
    with pytest.raises(SampleError, match=reason):
        raise value


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "|b1", "<u2", ">i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_as_they_were_saved(dtype: str, order: Any) -> None:
    array = np.asarray(np.arange(12).reshape(3, 4) % 2, dtype, order=order)
    for one in (array, array[:0], array[0, 0]):
        value = value_of("1.NPY", npy(one))
        assert isinstance(value, np.ndarray)
        assert value.dtype == one.dtype.newbyteorder("=")
        np.testing.assert_array_equal(value, one)


# --- labels -------------------------------------------------------------------------------------


def test_a_column_that_a_field_reads_is_no_label_unless_it_is_named(tmp_path: Path) -> None:
    images = [b"\xff\xd8\xff"] * 2
    columns = {"image": images, "labels": [[1, -100], [2, 3]]}
    source = write_table(tmp_path / "a.parquet", columns)
    listing = opened(source, "labels").list(lambda count: None)
    assert (listing.table.labels == -1).all()
    [line] = listing.notes
    assert "'labels' are inputs, and no labels (--label-column makes one both)" in line
    source = write_table(tmp_path / "b.parquet", {"image": images, "label": [3, 4]})
    both = open_source(source, columns=Columns(label="label", inputs=Inputs(("label",))))
    assert both.list(lambda count: None).table.labels.tolist() == [3, 4]
    assert [one.inputs["label"] for one in parts_of(both).values()] == [3, 4]


def test_labels_that_fields_read_are_said_to_be_none(tmp_path: Path) -> None:
    members = [("cat/1.jpg", encoded(cut(1))), ("cat/1.cls", b"3")]
    listing = opened(write_tar(tmp_path / "a.tar", members), "cls").list(lambda count: None)
    assert "The .cls members are inputs of fields, and no labels" in listing.notes
    assert listing.table.classes == ("cat",)


def test_members_of_many_suffixes_hide_none_that_a_field_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache_workers.sources.tar_members.AT_ONCE", 50)
    logs = [(f"log.{number}", b"") for number in range(200)]
    source = write_tar(tmp_path / "a.tar", [*logs, ("1.jpg", encoded(cut(1))), ("1.txt", b"a")])
    assert parts_of(opened(source, "txt"))["1"].inputs["txt"] == "a"
    with pytest.raises(SourceError, match="has no column 'text'"):
        opened(source, "text").list(lambda count: None)


def test_a_listing_of_columns_by_its_index_is_the_same(tmp_path: Path) -> None:
    source, names = write_members(tmp_path)
    columns = opened(source, names["caption"])
    assert isinstance(columns, ContainerSource)
    index = columns.list(lambda count: None).index
    assert index is not None
    again = columns.list(lambda count: None, index=index)
    assert again.index is None
    other = opened(source, names["tokens"])
    assert other.index_name != columns.index_name
    with pytest.raises(SourceError, match="has no column 'captoin'"):
        opened(source, "captoin").list(lambda count: None, index=index)


# --- contents of columns ------------------------------------------------------------------------

DATASET = """
from pathlib import Path
import hashlib
import numpy as np

class Samples:
    def __init__(self):
        self.names = sorted(path.stem for path in Path({root!r}, "image").iterdir())
    def files(self, number):
        name = self.names[number]
        suffixes = dict(image="jpg", caption="txt", tokens="npy", mask="png", meta="json")
        paths = {{n: Path({root!r}, n, f"{{name}}.{{s}}") for n, s in suffixes.items()}}
        return {{n: path.read_bytes() for n, path in paths.items()}}
    def __len__(self):
        return len(self.names)
    def key(self, number):
        return self.names[number]
    def fingerprint(self, number):
        return hashlib.sha256(repr(self.files(number)).encode()).hexdigest()
    def __getitem__(self, number):
        files = self.files(number)
        tokens = np.load(Path({root!r}, "tokens", self.names[number] + ".npy"))
        texts = {{name: files[name].decode() for name in ("caption", "meta")}}
        return {{**files, **texts, "tokens": tokens, "label": None}}
"""
OF_COLUMNS = {
    **FIELDS,
    "tokens": 'kind = "boxes"\nof = "image"',
}


def boxes(number: int) -> list[list[float]]:
    return [[1.0, 2.0, 10.0 + number % 30, 20.0]]


class Columned:
    """A source of samples with several columns, and what is built of it."""

    def __init__(self, kind: str, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.kind, self.root, self.decoded = kind, root, 0

        def noted(actions: Mapping[str, Any], *more: Any) -> str:
            self.decoded += isinstance(actions.get("image"), Compute)
            return stage_rows(actions, *more)

        patch.setattr("precache_workers.shards.shard_task.stage_rows", noted)
        for name, field in OF_COLUMNS.items():
            patch.setitem(FIELDS, name, field)
        for number, stem in enumerate([*SAMPLES]):
            patch.setitem(SAMPLES, stem, {**SAMPLES[stem], "tokens": boxes(number)})
        if kind == "dataset":
            self.module = f"columns_{root.parent.name}_{root.name}".replace("-", "_")
            write(root / f"code/{self.module}.py", DATASET.format(root=f"{root}/data").encode())
            patch.syspath_prepend(root / "code")

    def build(self, *fields: str, store: str = "store") -> dict[str, Any]:
        """Build; returns the rows by key, of a hole the reason."""
        for path in (self.root / "data").rglob("*.*"):
            path.unlink()
        source, names = WRITERS.get(self.kind, write_folders)(self.root)
        if self.kind == "dataset":
            source = f"python:{self.module}:Samples"
        recipe = recipe_of(names, *fields)
        options = {"shard_samples": 8, "max_failures": COUNT}
        self.decoded = 0
        precache.build(source, self.root / store, recipe, address="serial", **options)
        dataset = precache.CachedDataset(self.root / store)
        rows = {key: dataset[number] for number, key in enumerate(dataset.keys)}
        holes = dataset.version.holes.values()
        failed = {key: hole.reason for key, hole in holes if hole != REMOVED}
        return {key: {n: row[n] for n in fields} for key, row in rows.items()} | failed


def assert_equal(found: dict[str, Any], fresh: dict[str, Any]) -> None:
    assert found.keys() == fresh.keys()
    for key, row in fresh.items():
        if isinstance(row, str):
            assert found[key] == row
            continue
        for name, value in row.items():
            same = value == found[key][name] if isinstance(value, str) else None
            assert same if same is not None else value.equal(found[key][name]), (key, name)


@pytest.mark.parametrize("kind", ["tar", "folders", "dataset"])
def test_an_image_is_decoded_once_whatever_lies_beside_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Columned(kind, tmp_path, monkeypatch)
    of.build("image")
    assert of.decoded == COUNT
    fields = "image", "mask", "tokens", "caption"
    of.build(*fields)
    assert of.decoded == 0
    monkeypatch.setitem(SAMPLES, "007", {**SAMPLES["007"], "caption": "edited"})
    monkeypatch.setitem(SAMPLES, "008", {**SAMPLES["008"], "mask": SAMPLES["009"]["mask"]})
    monkeypatch.setitem(SAMPLES, "011", {**SAMPLES["011"], "image": encoded(cut(99))})
    found = of.build(*fields)
    assert of.decoded == 1
    assert_equal(found, of.build(*fields, store="fresh"))


@pytest.mark.parametrize(
    "kind",
    ["tar", "parquet", "folders", pytest.param("patterns", marks=pytest.mark.heavy), "dataset"],
)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.heavy) for n in (1, 2, 3))]
)
def test_histories_of_columns_end_as_fresh_builds(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    of, fields = Columned(kind, tmp_path, monkeypatch), {"image", "caption"}
    before: dict[str, bytes] = {}
    stored: set[tuple[int, bytes]] = set()
    serial, edge = 0, 16
    for step in range(6):
        for _ in range(draw.choice([1, 2, 3]) if step else 0):
            one, other = draw.sample([*SAMPLES], 2)
            kind_of_edit = draw.choice(["edit", "swap", "spoil", "rename", "field", "ops"])
            part, serial = draw.choice(["caption", "mask", "image", "tokens"]), serial + 1
            if kind_of_edit == "field":
                fields ^= {draw.choice(["caption", "mask", "tokens", "image", "meta"])}
                if "tokens" in fields or not fields:
                    fields |= {"image"}
            elif kind_of_edit == "ops":
                edge = 28 - edge
                monkeypatch.setitem(FIELDS, "image", OF_COLUMNS["image"].replace("16", f"{edge}"))
            elif kind_of_edit == "rename":
                monkeypatch.setitem(SAMPLES, f"new{serial}", SAMPLES[one])
                monkeypatch.delitem(SAMPLES, one)
            elif kind_of_edit == "swap":
                parts = SAMPLES[one][part], SAMPLES[other][part]
                monkeypatch.setitem(SAMPLES, one, {**SAMPLES[one], part: parts[1]})
                monkeypatch.setitem(SAMPLES, other, {**SAMPLES[other], part: parts[0]})
            else:
                values = {
                    "caption": f"edit {serial:3}", "tokens": boxes(serial),
                    "image": encoded(cut(1000 * seed + 100 + serial)),
                    "mask": encoded(Image.new("L", (64, 48), serial), "PNG"),
                }  # fmt: skip
                if kind_of_edit == "spoil":
                    other_shape = encoded(Image.new("L", (64, 20)), "PNG")
                    part, values["mask"] = "mask", draw.choice([b"no mask", other_shape])
                monkeypatch.setitem(SAMPLES, one, {**SAMPLES[one], part: values[part]})
        named = sorted(fields)
        found = of.build(*named)
        if "image" in fields:
            now = {key: SAMPLES[key.rpartition("/")[2].partition(".")[0]]["image"] for key in found}
            new = [
                key
                for key, data in now.items()
                if before.get(key) != data or (edge, data) not in stored
            ]
            assert of.decoded <= len(new)
            before |= now
            stored |= {(edge, now[key]) for key, row in found.items() if not isinstance(row, str)}
        shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
        assert_equal(found, of.build(*named, store="fresh"))


@pytest.mark.parametrize("kind", ["tar", "folders", "dataset"])
def test_a_mask_and_an_image_that_no_build_saw_together_are_compared(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Columned(kind, tmp_path, monkeypatch)
    resize = '{ op = "resize", size = [16, 16], interpolation = "nearest" }'
    monkeypatch.setitem(FIELDS, "mask", f'ops = [{{ op = "decode", mode = "P" }}, {resize}]')
    exif = Image.Exif()
    exif[0x112] = 6
    turned = encoded(cut(7), exif=exif), encoded(Image.new("L", (48, 64)), "PNG")
    monkeypatch.setitem(SAMPLES, "007", {**SAMPLES["007"], "image": turned[0], "mask": turned[1]})
    upright, stored = '{ op = "decode" }', '{ op = "decode", orientation = "stored" }'
    as_stored = OF_COLUMNS["image"].replace(upright, stored)
    monkeypatch.setitem(FIELDS, "image", as_stored)
    of.build("image", "caption")
    monkeypatch.setitem(FIELDS, "image", OF_COLUMNS["image"])
    whole = of.build("image", "caption", "mask")
    assert [row for row in whole.values() if isinstance(row, str)] == []
    monkeypatch.setitem(FIELDS, "image", as_stored)
    found = of.build("image", "caption", "mask")
    assert of.decoded == 0
    fresh = of.build("image", "caption", "mask", store="fresh")
    assert ["does not lie" in row for row in fresh.values() if isinstance(row, str)] == [True]
    assert_equal(found, fresh)
