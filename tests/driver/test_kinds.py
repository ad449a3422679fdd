"""Builds of texts, bytes, and arrays that differ in length: contents, reuse, kills, refusals."""

import re
import resource
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import ConcatDataset, DataLoader

import precache
from precache.errors import BuildError, RecipeError, SourceError, UsageError
from precache.recipe.recipe import Field
from precache.viewer.cards import page_cards
from precache.viewer.search import Catalogue
from tests.support import kinds
from tests.support.building import ask, flip
from tests.support.kinds import expected, put_rows, recipe, row

FUNCTION = "tests.support.kinds:"
OPTIONS: dict[str, Any] = {"address": "serial", "shard_samples": 4, "progress": False}


def build(rows: list[dict[str, Any]], store: Path, built: Any = None, **options: Any) -> Any:
    source = put_rows(store.parent / "rows.pickle", rows)
    return precache.build(source, store, built or recipe(), **{**OPTIONS, **options})


def function(name: str, **options: Any) -> dict[str, Any]:
    return {"op": "function", "function": FUNCTION + name, **options}


def assert_row(read: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if isinstance(value, str | bytes):
            assert read[name] == value
        else:
            assert isinstance(read[name], torch.Tensor)
            assert read[name].numpy().dtype == value.dtype
            np.testing.assert_array_equal(read[name].numpy(), value, err_msg=name)


def assert_holds(store: Path, rows: list[dict[str, Any]]) -> None:
    """Compare all rows, as a dataset, a loader and zarr-python read them."""
    wanted = {given["key"]: expected(given) for given in rows}
    dataset = precache.CachedDataset(store)
    assert sorted(dataset.keys) == sorted(wanted)
    for number, key in enumerate(dataset.keys):
        assert_row(dataset[number], wanted[key])
    seen = []
    with precache.Loader(store, 3, device="cpu") as loader:
        for batch in loader:
            for place, key in enumerate(loader.keys(batch["row"])):
                lengths = {
                    n: int(batch[f"{n}.length"][place]) for n in batch if f"{n}.length" in batch
                }
                read = {
                    n: v[place][: lengths[n]] if n in lengths else v[place]
                    for n, v in batch.items()
                }
                assert_row(read, wanted[key])
                rest = [batch[n][place, length:] for n, length in lengths.items()]
                assert not any(part.any() for part in rest)
                seen.append(key)
    assert sorted(seen) == sorted(wanted)
    version = precache.open(store)
    group: Any = zarr.open_group(version.path, mode="r")
    for name in set(version.fields) - {"image"}:
        stored = [bytes(value) for value in group[name][:]]
        for number, key in enumerate(version.keys):
            value = wanted.get(key, {}).get(name, b"")
            value = value.encode() if isinstance(value, str) else value
            assert stored[number] == (value if isinstance(value, bytes) else value.tobytes())


# --- one contract for all kinds -----------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
floats = st.floats(width=32, allow_nan=True)
boxes = st.tuples(*[st.integers(0, 99)] * 2, *[st.integers(2, 40)] * 2).map(
    lambda box: [box[0], box[1], box[0] + box[2] / 2, box[1] + box[3]]
)
"""Boxes inside the pictures of `row`."""

some_rows = st.lists(
    st.fixed_dictionaries(
        {
            "caption": texts,
            "blob": st.binary(max_size=40),
            "tokens": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9),
            "points": hnp.arrays(
                "float32", st.tuples(st.integers(0, 4), st.just(3)), elements=floats
            ),
            "boxes": st.lists(boxes, max_size=3),
            "joints": hnp.arrays(
                "float32",
                st.tuples(st.integers(0, 2), st.just(5), st.just(3)),
                elements=st.floats(2, 2**99, width=32),  # below are fractions
            ),
        }
    ),
    min_size=1,
    max_size=9,
)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=some_rows, codec=st.sampled_from(["raw", "zstd"]))
def test_rows_are_those_of_the_dataset(
    drawn: list[dict[str, Any]], codec: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where some of a row are empty, hold nothing but NaN, or characters of four bytes."""
    # The first has values, by which rows are known.
    first = row(11, tokens=[1])
    rows = [first, *({"key": f"{n}", "image": row(n)["image"], **r} for n, r in enumerate(drawn))]
    rows = [{name: v for name, v in given.items() if name != "label"} for given in rows]
    changes = {name: {"codec": codec} for name in kinds.FIELDS if name != "image"}
    store = tmp_path_factory.mktemp("kinds") / "store"
    build(rows, store, recipe(**changes))
    assert_holds(store, rows)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("built") / "store"
    build([row(number) for number in range(20)], store)
    return store


def test_added_and_changed_rows_are_made_and_others_linked(tmp_path: Path) -> None:
    store, rows = tmp_path / "store", [row(number) for number in range(20)]
    build(rows, store)
    rows = [*rows[:18], row(18, caption="another"), row(19, tokens=[1] * 30), row(20), row(21)]
    again = build(rows, store)
    assert_holds(store, rows)
    assert again.rows_reused == 18
    build(rows[3:], store)
    assert_holds(store, rows[3:])


def test_ops_and_codecs_are_applied_to_stored_rows(tmp_path: Path) -> None:
    store, rows = tmp_path / "store", [row(number) for number in range(12)]
    ops = {"caption": [function("shout")], "tokens": [{"op": "to_dtype", "dtype": "int32"}]}
    build(rows, store, recipe(caption={"ops": ops["caption"]}, tokens={"ops": ops["tokens"]}))
    more = {
        "caption": {"ops": [*ops["caption"], function("twice")], "codec": "raw"},
        "tokens": {
            "ops": [*ops["tokens"], function("longer"), {"op": "to_dtype", "dtype": "int32"}]
        },
        "points": {"codec": "raw"},
    }
    kept = build(rows, store, recipe(**more))
    assert kept.rows_reused == 12, "no sample was fetched"
    for number, key in enumerate((dataset := precache.CachedDataset(store)).keys):
        given = rows[int(key.split()[1])]
        assert dataset[number]["caption"] == 2 * given["caption"].upper()
        assert dataset[number]["tokens"].tolist() == [*given["tokens"], 7]
        assert dataset[number]["tokens"].dtype == torch.int32
        np.testing.assert_array_equal(dataset[number]["points"], given["points"])


def test_variants_are_read_by_epoch_and_refreshed(tmp_path: Path) -> None:
    ops = [{"op": "to_dtype", "dtype": "int16"}, function("dropped", random=True)]
    rows = [row(number, tokens=list(range(30 + number))) for number in range(12)]
    store = tmp_path / "store"
    build(rows, store, recipe("tokens", tokens={"ops": ops, "variants": 2}))

    def epochs(count: int) -> list[dict[int, list[int]]]:
        with precache.Loader(store, 5, device="cpu", output={"tokens": "list"}) as loader:
            return [
                {
                    r: t.tolist()
                    for b in loader
                    for r, t in zip(b["row"].tolist(), b["tokens"], strict=True)
                }
                for _ in range(count)
            ]

    first, second, third = epochs(3)
    assert first == third != second
    precache.refresh(store, address="serial", run_functions=True)
    assert [first in epochs(2), second in epochs(2)] == [False, True]


def test_a_missing_part_is_one_hole(tmp_path: Path) -> None:
    rows = [row(number) for number in range(12)]
    rows[3]["caption"] = None
    rows[5]["tokens"] = [[1, 2], [3]]
    rows[7]["boxes"] = "none"
    rows[8]["caption"] = "\ud800"
    del rows[9]["tokens"]
    rows[10]["tokens"], rows[11]["tokens"] = 7, np.array([5, -6], ">i8")
    rows[4]["image"] = b""
    result = build(rows, tmp_path / "store", max_failures=7)
    reasons = dict(result.holes)
    assert {key: reasons[f"row {key}"] for key in (3, 4, 5, 7, 8, 9, 10)} == {
        3: "its caption: it is None, and its field is of kind text",
        4: "its image: the file is empty",
        5: "its tokens: it is the list [[1, 2], [3]], and no array of one dtype and shape",
        7: "its boxes: it is the text 'none', and no array or list of numbers",
        8: reasons["row 8"],
        9: reasons["row 9"],
        10: "its tokens: it is the int 7, and no array or list of numbers; of one number for each "
        'sample, state ops = [] and codec = "zstd", and no kind',
    }
    rows[11]["tokens"] = [5, -6]
    assert "no text of valid Unicode" in reasons["row 8"]
    assert "it has no 'tokens'" in reasons["row 9"]
    assert_holds(
        tmp_path / "store", [r for n, r in enumerate(rows) if n not in (3, 4, 5, 7, 8, 9, 10)]
    )


def test_damage_is_found_and_repaired(built: Path, tmp_path: Path) -> None:
    store, rows = tmp_path / "store", [row(number) for number in range(20)]
    shutil.copytree(built, store)
    version = Path(precache.open(store).path)
    for name in ("caption/c/1", "tokens/c/0"):
        flip(version / name, 0.2)
    (version / "boxes/c/2").unlink()
    damage = {damaged.shard for damaged in precache.verify(store).damage}
    assert damage == {"caption/c/1", "tokens/c/0", "boxes/c/2"}
    build(rows, store, verify=True)
    precache.push(store, tmp_path / "pushed")
    assert_holds(tmp_path / "pushed", rows)


def test_the_viewer_and_info_show_kinds_texts_and_lengths(built: Path) -> None:
    [card] = page_cards(Catalogue(str(built)), [2])
    given = row(int(card.key.split()[1]))
    shown = dict(card.numbers)
    assert shown["caption"] == given["caption"]
    assert shown["tokens"].startswith(f"int64 ({len(given['tokens'])},)")
    text = str(precache.info(built))
    assert "caption          text, codec zstd" in text
    assert "points           ragged float32 (n, 3), codec zstd" in text


# --- batches of a DataLoader --------------------------------------------------------------------


class Changing(precache.CachedDataset):
    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        sample["row"] = sample["row"] + 0
        return sample


def as_they_are(samples: Any) -> Any:
    return samples


@pytest.mark.parametrize("way", ["default", "collate", "workers", "kept", "joined", "changed"])
def test_a_dataloader_pads_as_a_loader_does(way: str, built: Path) -> None:
    dataset: Any = (Changing if way == "changed" else precache.CachedDataset)(built)
    options: dict[str, Any] = {"num_workers": 2 * (way in ("workers", "kept"))}
    if way in ("collate", "kept"):
        options["collate_fn"] = dataset.collate if way == "collate" else as_they_are
    source = ConcatDataset([dataset]) if way == "joined" else dataset
    batches: Iterable[Any] = DataLoader(source, 5, **options)
    if way == "kept":
        batches = map(dataset.collate, batches)
    with precache.Loader(built, 5, shuffle=False, device="cpu") as loader:
        for one, other in zip(batches, loader, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                if isinstance(one[name], list):
                    assert one[name] == other[name]
                else:
                    assert torch.equal(one[name], other[name])


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (lambda tokens, row: tokens.int() if row % 2 else tokens, "a batch has one"),
        (lambda tokens, row: tokens.view(-1, 1) if row % 2 else tokens, "a batch has one"),
        (lambda tokens, row: tokens.sum(), (5,)),
        (lambda tokens, row: tokens.bfloat16(), (5, 12)),
        (lambda tokens, row: tokens[:2], (5, 2)),
    ],
)
def test_rows_that_a_subclass_made_unlike_are_not_joined_byte_by_byte(
    change: Any, result: Any, built: Path
) -> None:
    class Changed(precache.CachedDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return {**sample, "tokens": change(sample["tokens"], index)}

    dataset = Changed(built)
    batches = iter(DataLoader(dataset, 5, collate_fn=dataset.collate))
    if isinstance(result, str):
        with pytest.raises(UsageError, match=result):
            next(batches)
    else:
        batch = next(batches)
        assert batch["tokens"].shape == result
        assert len(batch["caption"]) == 5
        if result == (5, 2):
            assert batch["tokens.length"].max() == 2


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"kind": "text", "ops": [{"op": "decode"}]}, "kind 'text' takes functions, not decode"),
        ({"kind": "bytes", "ops": [{"op": "to_dtype", "dtype": "int8"}]}, "not to_dtype"),
        ({"kind": "ragged", "ops": [{"op": "horizontal_flip"}]}, "functions and to_dtype, not"),
        ({"kind": "ragged", "codec": "image"}, "codec 'image' stores images, not ragged"),
        ({"kind": "ragged", "ops": [function("longer", shape=[3])]}, "need no shape of"),
        ({"kind": "text", "ops": [function("shout", dtype="uint8")]}, "need no dtype and shape of"),
        ({"kind": "list"}, "kind is 'list'; choose 'text', 'bytes', 'ragged'"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Field(**field)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ({}, ["a"] * 6, 'values of type str.*kind = "text" in \\[fields.value\\]'),
        ({}, [b"a"] * 6, 'or give the field kind = "bytes"'),
        (
            {},
            [[1] * n for n in range(1, 7)],
            '5 of 6 samples tried have other rows, such as 1: .* give the field kind = "ragged"',
        ),
        ({"kind": "bytes"}, ["a"] * 6, "the text 'a', .* of kind bytes; kind = \"text\" takes it"),
        ({"kind": "text"}, [1] * 6, "it is the int 1, and its field is of kind text"),
        ({"kind": "ragged"}, ["abc"] * 6, "no array or list of numbers"),
        (
            {"kind": "ragged"},
            [np.array([1], object)] * 6,
            r"ndarray object \(1,\), and no array or list of numbers",
        ),
        ({"kind": "ragged"}, [np.ma.masked_equal([1, 2], 2)] * 6, "it has masked values"),
        ({}, [torch.ones(2).bfloat16()] * 6, r"it is Tensor bfloat16 \(2,\), and no NumPy array"),
        ({}, [np.ma.masked_equal([1, 2], 2)] * 6, "it has masked values"),
        *[
            (field, [[b"a", b"b"]] * 6, r"bytes \(1 B\), .*: give each of several images")
            for field in ({}, {"kind": "ragged"}, {"ops": [{"op": "decode"}]})
        ],
        ({}, [[np.ones(2), np.ones(3)]] * 6, "and no array of one dtype and shape"),
        ({}, [[2**63, -1]] * 6, "a list with 9223372036854775808, which no int64 holds"),
        (
            {"kind": "ragged"},
            [[7, -(2**64)]] * 6,
            "a list with -18446744073709551616, which no int",
        ),
        *[
            ({"ops": [{"op": "to_dtype", "dtype": "float32"}]}, [value] * 6, f"values of {of}, wh")
            for value, of in (([300, None], "object"), (np.array([1 + 2j]), "complex128"))
        ],
        ({"kind": "ragged"}, [[]] * 6, "all rows of value that were tried are empty.*to_dtype"),
        ({"kind": "ragged"}, [[], "a", []], r"unknown \(others failed: 1: .*the text 'a'"),
        ({"kind": "ragged"}, [[1], [[2]], [1]], r"int64 \(1, 1\), .* int64 \(n,\); let .* first"),
    ],
)
def test_rows_that_are_no_such_kind_are_refused(
    field: dict[str, Any], values: list[Any], message: str, tmp_path: Path
) -> None:
    rows = [{"key": n, "value": value, "label": 0} for n, value in enumerate(values)]
    built = precache.Recipe.from_dict({"fields": {"value": field}})
    with pytest.raises((RecipeError, SourceError, BuildError), match=message):
        build(rows, tmp_path / "store", built, max_failures=0)
    assert not (tmp_path / "store").exists(), "nothing was computed"


def test_rows_of_which_all_that_are_tried_are_empty_are_built_as_the_refusal_says(
    tmp_path: Path,
) -> None:
    def of(number: int, listed: bool) -> dict[str, Any]:
        full = int(number == 177)
        tags, joints = [3] * full, np.ones((full, 17, 3))
        given = {"tags": tags, "joints": [] if listed and not full else joints}
        return {"key": number, "image": np.zeros((8, 8, 3), np.uint8), "label": 0, **given}

    def fields(*names: str, **tags: Any) -> precache.Recipe:
        known = {
            "image": {"ops": [{"op": "decode"}]},
            "tags": {"kind": "ragged", **tags},
            "joints": {"kind": "keypoints", "of": "image"},
        }
        return precache.Recipe.from_dict({"fields": {name: known[name] for name in names}})

    rows, store = [of(number, listed=True) for number in range(200)], tmp_path / "store"
    with pytest.raises(RecipeError, match=r"state ops = \[\{ op = \"to_dtype\"") as refused:
        build(rows, store, fields("tags"))
    [stated] = tomllib.loads(str(refused.value).partition("state ")[2].partition(", and let")[0])[
        "ops"
    ]
    with pytest.raises(RecipeError, match=r"unknown: let rows .* numpy.zeros\(\(0, 17, 3\)\)"):
        build(rows, store, fields("image", "joints"))
    rows = [of(number, listed=False) for number in range(200)]
    build(rows, store, fields("image", "tags", "joints", ops=[stated]))
    dataset = precache.CachedDataset(store)
    for number, key in enumerate(dataset.keys):
        full = key == "177"
        assert dataset[number]["tags"].tolist() == [3] * full
        assert dataset[number]["tags"].dtype == torch.int64
        assert dataset[number]["joints"].shape == (full, 17, 3)


def test_a_dataset_may_reuse_its_memory(tmp_path: Path) -> None:
    rows = [row(number, points=[[number + 0.5] * 3] * (1 + number % 4)) for number in range(40)]
    put_rows(tmp_path / "rows.pickle", rows)
    precache.build(
        "python:tests.support.kinds:ReusedMemory",
        tmp_path / "store",
        recipe("image", "tokens", "blob", "points", blob={"input": "blob"}),
        address="serial",
    )
    dataset = precache.CachedDataset(tmp_path / "store")
    for number, key in enumerate(dataset.keys):
        read, given = dataset[number], rows[int(key.split()[1])]
        np.testing.assert_array_equal(read["image"], given["image"].transpose(2, 0, 1))
        for name, value in expected(given).items():
            if name in read:
                np.testing.assert_array_equal(read[name], value)


def test_a_number_that_its_dtype_cannot_hold_makes_a_hole(tmp_path: Path) -> None:
    tokens: list[Any] = [[number, -number] for number in range(12)]
    tokens[3], tokens[5], tokens[7] = [1, 32768], [-32769], np.array([2.5, np.nan])
    tokens[8] = np.array([32767.9, -2.5])  # fractions are cut off
    tokens[9] = torch.tensor([4.0], requires_grad=True)
    rows = [row(number, tokens=values) for number, values in enumerate(tokens)]
    ops = [{"op": "to_dtype", "dtype": "int16"}]
    store = tmp_path / "store"
    result = build(rows, store, recipe("tokens", tokens={"ops": ops}), max_failures=3)
    assert dict(result.holes) == {
        f"row {number}": f"its tokens: to_dtype was given {value}, and int16 does not hold it"
        for number, value in ((3, 32768), (5, -32769), (7, "nan"))
    }
    dataset = precache.CachedDataset(store)
    read = {key: dataset[number]["tokens"].tolist() for number, key in enumerate(dataset.keys)}
    assert read["row 8"] == [32767, -2]
    assert read["row 9"] == [4]
    assert read["row 11"] == [11, -11]


def test_doctor_says_that_it_measures_rows_of_one_shape(tmp_path: Path) -> None:
    source = put_rows(tmp_path / "rows.pickle", [row(number) for number in range(8)])
    way = r"leave \[fields.caption\] out of its recipe, or .* plan without --rate"
    with pytest.raises(UsageError, match=way):
        precache.doctor(source, recipe("image", "caption"), samples=8, seconds=1)
    precache.plan(source, tmp_path / "store", recipe("image", "caption"), address="serial")


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_bytes_to_be_stored_are_those_of_the_rows_that_were_tried(
    codec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever length its shards are sized for: a build is refused where they do not fit."""
    random = np.random.default_rng(0)
    rows = [row(n, blob=random.bytes(100_000 + 1000 * n)) for n in range(16)]
    names = "image", "blob", "caption"
    result = build(rows, tmp_path / "store", recipe(*names, blob={"codec": codec}), progress=True)
    [said] = re.findall(r"About (\S+) MB to be stored", capfd.readouterr().err)
    assert float(said) == pytest.approx(result.stored_bytes / 1e6, rel=0.05)


# --- large rows ---------------------------------------------------------------------------------


def _peak_of_reading(store: Path) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with precache.Loader(store, 4, device="cpu") as loader:
        [batch] = loader
    assert max(map(len, batch["caption"])) == 100_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_a_row_of_100_megabytes_takes_three_times_its_memory(tmp_path: Path) -> None:
    digits = np.random.default_rng(0).integers(48, 58, 100_000_000, np.uint8).tobytes().decode()
    rows = [row(1), row(2), row(3), row(4, caption=digits)]
    build(rows, tmp_path / "store", recipe("caption", caption={"variants": 1}))  # made once
    assert ask(_peak_of_reading, tmp_path / "store") < 320 << 10  # in KiB


def test_a_row_that_no_reader_would_believe_is_a_hole_and_raw_stores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("precache.codecs.chunk", "precache_workers.shards.field_writer"):
        monkeypatch.setattr(f"{module}.MAX_EXPANDED", 1 << 20)
    rows = [row(1), row(2), row(3), row(4, caption="0" * (2 << 20))]
    result = build(rows, tmp_path / "store", recipe("caption"), max_failures=1)
    assert 'take for forged; give the field codec = "raw"' in result.holes[0][1]
    raw = recipe("caption", caption={"codec": "raw"})
    build(rows, tmp_path / "store", raw, retry_failed=True)
    assert_holds(tmp_path / "store", [{"key": r["key"], "caption": r["caption"]} for r in rows])
