"""Samples taken through a recipe, stage by stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import precache
from precache.recipe.recipe import ImageCodec, RawCodec, ZstdCodec
from precache.storage.local import LocalFolder
from precache.store.layout import RowShape
from precache_workers.doctor.stages import (
    StageTimes,
    codec_for,
    measure_stages,
    random_step,
    step_names,
)
from precache_workers.shards.samples import FetchAllTask, Job, recipes_of
from precache_workers.sources.folder import FolderSource
from tests.support.building import cut, encoded, write, write_jpegs

RECIPE = precache.Recipe.image(resize=40, crop=32, codec="raw")


def recipe_of(**ops: list[dict[str, object]]) -> precache.Recipe:
    return precache.Recipe.from_dict({"fields": {name: {"ops": o} for name, o in ops.items()}})


def through(root: Path, recipe: precache.Recipe = RECIPE, seconds: float = 60.0) -> StageTimes:
    job = Job(FolderSource(LocalFolder(root)), recipe)
    table = job.source.list(lambda count: None).table
    return measure_stages(FetchAllTask.of(job, table, range(len(table))), seconds=seconds)


def test_stages_and_rows_are_those_of_a_build(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 4, (64, 48))
    write(tmp_path / "cat/wide.jpg", encoded(cut(9, (90, 48))))
    write(tmp_path / "cat/broken.jpg", b"none")
    found = through(tmp_path)
    assert found.steps == ("decode", "resize", "center_crop")
    assert [key for key, _ in found.failures] == ["cat/broken.jpg"]
    for name in ("fetch", *found.steps, "encode"):
        stage = found.stage(name)
        assert len(stage.each_ms) == len(stage.each_cpu_ms) == 5
        assert min(stage.each_cpu_ms) >= 0
        assert stage.ms.mean > 0
    source = FolderSource(LocalFolder(tmp_path))
    [recipe] = recipes_of(Job(source, RECIPE)).values()
    for each in found.samples:
        [sample] = source.fetch([each.key], [each.nbytes])
        assert np.array_equal(each.rows["image"], recipe(sample, each.key))
        assert each.nbytes == (tmp_path / each.key).stat().st_size
    assert found.shapes == {"image": RowShape((3, 32, 32), "uint8")}


def test_rows_of_other_shapes_are_told_apart_and_a_few_are_measured_in_any_case(
    tmp_path: Path,
) -> None:
    write_jpegs(tmp_path, 12)
    write(tmp_path / "cat/wide.jpg", encoded(cut(9, (90, 48))))
    found = through(tmp_path, precache.Recipe.image())
    assert found.misfits() == [
        ("cat/wide.jpg", "its row is uint8 (3, 48, 90), most are uint8 (3, 48, 64)")
    ]
    assert len(found.usual) == 12
    assert len(through(tmp_path, seconds=0.0).samples) == 8


def test_fields_take_their_steps_together(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 2)
    decode: dict[str, object] = {"op": "decode"}
    resize: dict[str, object] = {"op": "resize", "size": [8, 8]}
    floats: dict[str, object] = {"op": "to_dtype", "dtype": "float32"}
    recipe = recipe_of(
        image=[decode, resize, {"op": "horizontal_flip"}], thumb=[decode, floats, resize, resize]
    )
    names = ("decode", "resize+to_dtype", "horizontal_flip+resize", "resize")
    assert step_names(recipe) == names
    assert random_step(recipe) == "horizontal_flip+resize"
    assert random_step(RECIPE) == ""
    assert step_names(recipe_of(image=[decode, resize, resize]))[-1] == "resize 2"
    found = through(tmp_path, recipe_of(image=[decode, resize], small=[decode, resize, floats]))
    assert [row.dtype for row in found.shapes.values()] == ["uint8", "float32"]
    plain = recipe_of(image=[])
    assert step_names(plain) == ("no op",)


def test_a_codec_that_cannot_hold_rows_gives_way() -> None:
    pixels, floats = RowShape((3, 8, 8), "uint8"), RowShape((3, 8, 8), "float32")
    codecs = [codec_for(ImageCodec(), row) for row in (pixels, floats)]
    assert codecs == [ImageCodec(), ZstdCodec()]
    assert codec_for(RawCodec(), floats) == RawCodec()
