"""Differences between two versions: all of them, and nothing else."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import StoreError
from precache.maintenance.diff import Change, Samples, compare_samples
from precache.store.columns import find, strings
from precache.store.row_table import halves_of
from tests.support.building import build_here, cut, encoded, write, write_jpegs
from tests.support.forging import edit_root

PLAIN = precache.Recipe.image(resize=32, crop=28)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 12)


def recipe(ops: list[dict[str, Any]], **field: Any) -> precache.Recipe:
    return precache.Recipe.from_dict(
        {"fields": {"image": {"ops": [{"op": "decode"}, *ops], "variants": 1, **field}}}
    )


def test_the_recipe_op_by_op_fields_seed_and_shapes(source: Path) -> None:
    stores = [source.parent / "one", source.parent / "other"]
    ops = [[{"op": "resize", "size": size}, {"op": "center_crop", "size": 24}] for size in (32, 40)]
    build_here(source, stores[0], recipe(ops[0]))
    second = {"ops": [{"op": "decode", "mode": "L"}, {"op": "resize", "size": [20, 20]}]}
    other = recipe([{"op": "horizontal_flip"}, *ops[1]], codec="raw").to_dict()
    fields = {**other["fields"], "small": second}
    build_here(source, stores[1], precache.Recipe.from_dict({"fields": fields, "seed": 3}))
    found = precache.diff(*stores)
    assert set(found.recipe) == {
        Change("image op 2", None, "horizontal_flip"),
        Change("image op 3 resize size", 32, 40),
        Change("image codec name", "image", "raw"),
        Change("field small", None, "decode(mode=L) → resize(size=(20, 20))"),
        Change("seed", 0, 3),
    }
    assert Change("small shape", None, [1, 20, 20]) in found.layout
    assert Change("small dtype", None, "uint8") in found.layout
    assert "image bytes stored" in {change.what for change in found.layout}
    assert "\n  image op 3 resize size: 32 → 40\n" in str(found)


def test_samples_and_classes_or_none(source: Path, many_touched: None) -> None:
    store = source.parent / "store"
    first = build_here(source, store, PLAIN, {"keep_order": True}).version
    (source / "cat/0000.jpg").unlink()
    write(source / "dog/0013.jpg", encoded(cut(50)))
    write(source / "dog/0001.jpg", encoded(cut(51)))
    write(source / "dog/0004.jpg", b"none")
    (source / "eel").rename(source / "ant")
    os.utime(source / "cat/0003.jpg", (1, 1))
    build_here(source, store, PLAIN, {"keep_order": True})
    found = precache.diff(f"{store}@{first}", store)
    samples = found.samples
    assert f"\n  5 added: {', '.join(samples.added.examples)}\n" in str(found)
    assert "\nclasses\n  added: ant" in str(found)
    assert samples.added.examples == (*(f"ant/{n:04d}.jpg" for n in (2, 5, 8, 11)), "dog/0013.jpg")
    assert samples.removed.count == 5
    assert samples.removed.examples[0] == "cat/0000.jpg"
    assert samples.changed.examples == ("dog/0001.jpg", "dog/0004.jpg")
    assert samples.touched.examples == ("cat/0003.jpg",)
    assert samples.failed.examples == ("dog/0004.jpg",)
    assert samples.mended.count == samples.relabelled.count == 0
    assert found.classes_added == ("ant",)
    assert found.classes_removed == ("eel",)
    assert found.classes_renumbered == ("cat", "dog")
    assert found.recipe == ()
    assert Change("holes", 0, 1) in found.layout
    none = precache.diff(store, store)
    assert str(none).endswith("\nno differences")
    assert (none.recipe, none.layout, none.libraries) == ((), (), ())
    assert {getattr(none.samples, name).count for name in vars(none.samples)} == {0}
    with pytest.raises(StoreError, match="there is no store at"):
        precache.diff(source / "none", store)


def test_another_version_of_a_library_and_a_sample_whose_row_is_kept_as_a_hole(
    source: Path,
) -> None:
    one, other = source.parent / "one", source.parent / "other"
    version = build_here(source, one, PLAIN).version
    shutil.copytree(one, other)
    (source / "cat/0003.jpg").unlink()
    build_here(source, one, PLAIN)
    assert len(precache.open(one).holes) == 1
    samples = precache.diff(f"{one}@{version}", one).samples
    assert samples.removed.examples == ("cat/0003.jpg",)
    assert samples.failed.count == samples.moved.count == samples.changed.count == 0
    back = precache.diff(one, f"{one}@{version}").samples
    assert back.added.examples == ("cat/0003.jpg",)
    assert back.mended.count == 0
    one = f"{one}@{version}"
    before = dict(precache.info(one).libraries)
    after = {**before, "pillow": "99"}
    del after["simplejpeg"]
    edit_root(other / version, lambda own: own.update(libraries=after, fingerprint="f" * 64))
    found = precache.diff(one, other)
    assert [change.what for change in found.recipe] == ["fingerprint"]
    assert set(found.libraries) == {
        Change("pillow", before["pillow"], "99"),
        Change("simplejpeg", before["simplejpeg"], None),
    }


LABELS = ("", "x", "y")
ORIGINS = st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 1), st.integers(0, 1))
"""Content of a sample, and size and time that its source lists."""

SAMPLES = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(LABELS), st.booleans(), ORIGINS),
    unique_by=lambda each: each[0],
)


def samples_of(rows: list[Any]) -> Samples:
    keys, labels, valid, raw = zip(*rows, strict=True) if rows else ((), (), (), ())
    content, *listed = zip(*raw, strict=True) if rows else ((), (), ())
    sizes, mtimes = np.array(listed, np.int64)
    classes, is_valid = np.array([*map(LABELS.index, labels)], np.int64), np.array(valid, np.bool_)
    return Samples(
        keys=strings([keys]),
        rows=np.arange(len(rows)),
        labels=classes - 1,
        classes=LABELS[1:],
        valid=is_valid,
        listed=(sizes, mtimes, strings([[""] * len(rows)])),
        content=halves_of(text and text * 32 for text in content),
    )


@given(st.lists(st.text(), unique=True), st.lists(st.text(), unique=True), st.randoms())
def test_texts_are_found_by_arrays(values: list[str], others: list[str], draw: Any) -> None:
    kept = draw.sample(values, draw.randint(0, len(values)))
    wanted = list(dict.fromkeys(draw.choice([kept, values[: len(kept)]]) + others))
    places = {value: place for place, value in enumerate(values)}
    found = find(strings([values]), strings([wanted[:2], wanted[2:]]))
    assert found.tolist() == [places.get(value, -1) for value in wanted]


@given(SAMPLES, SAMPLES)
def test_every_sample_is_told_of_once_by_each_kind(one: list[Any], other: list[Any]) -> None:
    found = compare_samples(samples_of(one), samples_of(other))
    mine, theirs = {r[0]: r for r in one}, {r[0]: r for r in other}
    both = mine.keys() & theirs.keys()
    assert found.added.count == len(theirs.keys() - both)
    assert found.removed.count == len(mine.keys() - both)
    relabelled = [k for k in theirs if k in both and mine[k][1] != theirs[k][1]]
    assert found.relabelled.count == len(relabelled)
    assert list(found.relabelled.examples) == [
        f"{k}: {mine[k][1] or 'none'} → {theirs[k][1] or 'none'}" for k in relabelled[:5]
    ]
    assert found.failed.count == sum(mine[k][2] and not theirs[k][2] for k in both)
    assert found.mended.count == sum(theirs[k][2] and not mine[k][2] for k in both)
    known = [k for k in both if mine[k][3][0] and theirs[k][3][0]]
    other_bytes = {k for k in known if mine[k][3][0] != theirs[k][3][0]}
    told_apart = {k for k in both - set(known) if mine[k][3][1:] != theirs[k][3][1:]}
    assert found.changed.count == len(other_bytes | told_apart)
    same = [k for k in known if k not in other_bytes]
    assert found.touched.count == sum(mine[k][3] != theirs[k][3] for k in same)
    back = compare_samples(samples_of(other), samples_of(one))
    assert (back.added.count, back.removed.count) == (found.removed.count, found.added.count)
    assert (back.failed.count, back.moved.count) == (found.mended.count, found.moved.count)
