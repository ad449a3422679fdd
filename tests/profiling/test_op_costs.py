"""Where ops are better done, as a plan tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.cli.main import main
from precache.store.layout import RowShape
from precache_workers.profiling.measurements import TimeCost
from precache_workers.profiling.op_costs import field_costs
from precache_workers.profiling.stage_times import Cut, MeasuredSample, StageTimes
from tests.support.building import cut, encoded, write

DECODE: dict[str, Any] = {"op": "decode"}
CROP: dict[str, Any] = {"op": "random_resized_crop", "size": 32}
FLIP: dict[str, Any] = {"op": "horizontal_flip"}
FLOAT: dict[str, Any] = {"op": "to_dtype", "dtype": "float32", "scale": True}


def exact(size: int) -> dict[str, Any]:
    return {"op": "resize", "size": [size, size]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of different shapes."""
    folder = tmp_path_factory.mktemp("opcosts") / "in"
    for number in range(24):
        photo = cut(number, (90 + number, 64))
        write(folder / f"cat/{number:02d}.jpg", encoded(photo))
    return folder


def planned(source: Path, *ops: dict[str, Any], **field: Any) -> Any:
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops, **field}}})
    [found] = precache.plan(source, source.parent / "none", recipe, address="serial").ops
    return found


def test_what_is_not_random_is_done_once(source: Path) -> None:
    found = planned(source, DECODE, exact(48), {"op": "center_crop", "size": 32})
    assert [op.better for op in found.ops] == ["cache"] * 3
    assert all(op.cpu_ms >= 0 for op in found.ops)
    assert found.ops[0].cpu_ms > 0
    assert (found.random, found.left, found.shapes_differ) == (False, None, False)
    assert 8 <= found.samples <= 24


def stage_times(ops: dict[str, float], sizes: list[int], one_shape: bool = True) -> StageTimes:
    """Samples of which each op took so many milliseconds, and rows after it so many bytes; 10,000
    of these take a millisecond to encode, and as long to decode."""
    times = {op: TimeCost(0.0, cpu / 1e3) for op, cpu in ops.items()}
    cpu = [size / 10_000 / 1e3 for size in sizes]
    cuts = [
        Cut(float(size), seconds, seconds, (RowShape((size,), "uint8"),))
        for size, seconds in zip(sizes, cpu, strict=True)
    ]
    other = [replace(cut, shapes=(RowShape((1,), "uint8"),)) for cut in cuts]
    samples = [
        MeasuredSample("", 0, times, cuts),
        MeasuredSample("", 0, times, cuts if one_shape else other),
    ]
    return StageTimes(tuple(ops), samples, [], [False] * len(ops))


@given(st.integers(10_000, 90_000), st.floats(0, 10), st.integers(1, 9), st.booleans())
def test_random_ops_are_left_to_the_device_if_reading_for_them_is_cheap(
    before: int, cpu: float, variants: int, one_shape: bool
) -> None:
    ops = (DECODE, exact(36), CROP, FLIP)
    recipe = {"fields": {"image": {"ops": ops, "variants": variants}}}
    [field] = precache.Recipe.from_dict(recipe).fields.values()
    took = {"decode": 5.0, "resize": 1.0, "random_resized_crop": cpu, "horizontal_flip": 0.0}
    found = field_costs(
        "image", field, stage_times(took, [99_999, before, 10_000, 10_000], one_shape)
    )
    more = (before - 10_000) / 10_000
    if abs(more - cpu) > 1e-6:
        where = "device" if one_shape and more < cpu else "variants"
        assert [op.better for op in found.ops] == ["cache", "cache", where, where]
    assert found.declared.nbytes == variants * 10_000
    assert found.declared.build_cpu_ms == pytest.approx(6 + variants * (cpu + 1))
    assert found.declared.epoch_cpu_ms == pytest.approx(1)
    assert found.shapes_differ is not one_shape
    if found.left is not None:
        assert found.left.build_cpu_ms == pytest.approx(6 + before / 10_000)
        assert found.left.epoch_cpu_ms == pytest.approx(before / 10_000)


def test_they_are_kept_as_variants_where_no_store_holds_the_rows_before(source: Path) -> None:
    found = planned(source, DECODE, CROP, FLIP, variants=4)
    assert [op.better for op in found.ops] == ["cache", "variants", "variants"]
    assert (found.left, found.shapes_differ, found.variants) == (None, True, 4)


def test_a_function_is_not_on_the_device(source: Path) -> None:
    own = {"op": "function", "function": "tests.recipe.test_variants:counted", "version": "1"}
    found = planned(source, DECODE, exact(36), CROP, own, variants=2)
    assert [op.better for op in found.ops] == ["cache", "cache", "variants", "variants"]
    assert (found.left, found.shapes_differ) == (None, False)


def test_floats_cost_more_to_keep_than_to_make(source: Path) -> None:
    found = planned(source, DECODE, exact(32), FLOAT)
    assert found.left.nbytes < found.declared.nbytes


def test_the_costs_grow_with_the_variants(source: Path) -> None:
    one, four = (planned(source, DECODE, exact(36), CROP, variants=n) for n in (1, 4))
    assert four.declared.nbytes == pytest.approx(4 * one.declared.nbytes)
    assert four.left.nbytes == one.left.nbytes


def test_it_is_said_in_words(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [
        "plan",
        str(source),
        str(source.parent / "none"),
        "--address",
        "serial",
        "--no-progress",
    ]
    random = ["--random-resized-crop", "32", "--variants", "3"]
    assert main([*plan, *random]) == 0
    said = capsys.readouterr().out
    assert "image, variants 0 to 2: 24 computed from samples" in said
    assert "image, better cached: decode " in said
    assert "image, better cached, as variants: random_resized_crop " in said
    assert "image, 3 variants: " in said
    assert "rows differ in shape before its last ops" in said
    assert main([*plan, *random, "--no-timing"]) == 0
    assert "better" not in capsys.readouterr().out
