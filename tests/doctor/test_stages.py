"""Samples read, taken through a recipe stage by stage, and written to stores that are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.recipe.recipe import ImageCodec, RawCodec, ZstdCodec
from precache.storage.local import LocalFolder
from precache.store.layout import RowShape
from precache_workers.doctor.source_throughput import DEPTHS, probe_source
from precache_workers.doctor.stages import StageTimes, measure_stages, random_step, step_names
from precache_workers.doctor.trials import rows_to_read, try_codec
from precache_workers.shards.samples import FetchAllTask, Job, recipes_of
from precache_workers.sources.folder import FolderSource
from tests.support.building import cut, encoded, write, write_jpegs

RECIPE = precache.Recipe.image(resize=40, crop=32, codec="raw")


def recipe_of(**ops: Any) -> precache.Recipe:
    return precache.Recipe.from_dict({"fields": {name: {"ops": o} for name, o in ops.items()}})


def through(root: Path, recipe: precache.Recipe = RECIPE, seconds: float = 60.0) -> StageTimes:
    job = Job(FolderSource(LocalFolder(root)), recipe)
    table = job.source.list(lambda count: None).table
    return measure_stages(FetchAllTask.of(job, table, range(len(table))), seconds=seconds)


def test_stages_and_rows_are_those_of_a_build(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 9, (64, 48))
    write(tmp_path / "cat/wide.jpg", encoded(cut(9, (90, 48))))
    write(tmp_path / "cat/broken.jpg", b"none")
    found = through(tmp_path)
    assert found.steps == ("decode", "resize", "center_crop")
    assert [key for key, _ in found.failures] == ["cat/broken.jpg"]
    for name in ("fetch", *found.steps, "encode"):
        stage = found.stage(name)
        assert len(stage.each_ms) == len(stage.each_cpu_ms) == 10
        assert min(stage.each_cpu_ms) >= 0
        assert stage.ms.mean > 0
    source = FolderSource(LocalFolder(tmp_path))
    [recipe] = recipes_of(Job(source, RECIPE)).values()
    for each in found.samples:
        [sample] = source.fetch([each.key], [each.nbytes])
        assert np.array_equal(each.rows["image"], recipe(sample, each.key))
        assert each.nbytes == (tmp_path / each.key).stat().st_size
    assert found.shapes == {"image": RowShape((3, 32, 32), "uint8")}
    few = through(tmp_path, seconds=0.0)
    assert len(few.samples) + len(few.failures) == 8, "in any case"


def test_fields_take_their_steps_together(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 2)
    decode, resize = {"op": "decode"}, {"op": "resize", "size": [8, 8]}
    floats, flip = {"op": "to_dtype", "dtype": "float32"}, {"op": "horizontal_flip"}
    recipe = recipe_of(image=[decode, resize, flip], thumb=[decode, floats, resize, resize])
    names = ("decode", "resize+to_dtype", "horizontal_flip+resize", "resize")
    assert step_names(recipe) == names
    assert random_step(recipe) == "horizontal_flip+resize"
    assert random_step(RECIPE) == ""
    assert step_names(recipe_of(image=[decode, resize, resize]))[-1] == "resize 2"
    found = through(tmp_path, recipe_of(image=[decode, resize], small=[decode, resize, floats]))
    assert [row.dtype for row in found.shapes.values()] == ["uint8", "float32"]
    assert step_names(recipe_of(image=[])) == ("no op",)


def test_a_local_folder_is_read_at_several_depths(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 20)
    source = FolderSource(LocalFolder(tmp_path))
    table = source.list(lambda count: None).table
    found, io_wait = probe_source(source, table, 5.0)
    assert [each.depth for each in found] == [*DEPTHS]
    for each in found:
        assert each.requests == 20
        assert 0 < each.median_ms <= each.p95_ms
        mean = table.sizes.mean()
        assert each.bytes_per_s == pytest.approx(each.requests_per_s * mean)
    assert io_wait is None or io_wait >= 0
    found, _ = probe_source(source, table, 0.0)  # when the time is up, each has read something
    assert len(found) == len(DEPTHS)
    assert all(1 <= each.requests <= each.depth for each in found)
    for key in table.keys[1:]:  # files that are gone are no requests
        (tmp_path / key).unlink()
    assert {each.requests for each in probe_source(source, table, 5.0)[0]} == {1}
    (tmp_path / table.keys[0]).unlink()
    assert probe_source(source, table, 5.0)[0] == []


# --- trial stores -------------------------------------------------------------------------------


def test_other_fields_keep_what_can_hold_them(tmp_path: Path) -> None:
    pixels, depth = np.zeros((3, 4, 4), np.uint8), np.zeros((3, 4, 4), np.float32)
    codecs = {"image": ImageCodec(), "depth": ImageCodec(), "near": RawCodec()}
    rows = [{"image": pixels, "depth": depth, "near": depth}] * 3
    try_codec("image", codecs, rows, 3, tmp_path / "trial")
    fields = precache.open(tmp_path / "trial").fields.values()
    assert [field.codec for field in fields] == ["image", "zstd", "raw"]


def test_repeated_rows_do_not_make_a_row_smaller(tmp_path: Path) -> None:
    """Though they share a chunk, which a codec then compresses to a third."""
    noise = np.random.default_rng(0).random((3, 3, 16, 16)).astype(np.float32)
    rows = [{"depth": row} for row in noise]
    once, often, part = (
        try_codec("zstd", {"depth": ZstdCodec()}, rows, count, tmp_path / f"{count}")
        for count in (3, 30, 2)
    )
    assert once.stored == often.stored == part.stored, "bytes are of all, not of those read"
    assert [precache.open(tmp_path / f"{count}").rows for count in (30, 2)] == [30, 2]


def test_rows_of_a_store_to_read() -> None:
    for population, sampled, row, most, rows in (
        (160, 160, 150_528, 1e12, 160),  # as many as there are
        (320, 200, 150_528, 1e12, 400),  # or a little more: each sample as often as the others
        (10_000, 200, 150_528, 1e12, 1600),  # whole samples, within 256 MiB
        (1_000_000, 200, 3072, 1e12, 87_200),
        (10_000, 200, 150_528, 1e6, 6),  # less than the sample, where time is short
        (10_000, 200, 150_528, 1e3, 1),
    ):
        assert rows_to_read(population, sampled, row, most) == rows
