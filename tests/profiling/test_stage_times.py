"""Samples taken through a recipe, stage by stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import SampleError
from precache.recipe.recipe import Codec, ImageCodec, RawCodec, ZstdCodec
from precache.storage.local import LocalFolder
from precache.store.layout import RowShape
from precache_workers.profiling.stage_times import (
    StageTimes,
    _Coder,
    codec_for,
    frozen_after,
    measure_stages,
    step_names,
)
from precache_workers.shards.samples import FetchAllTask, Job, recipes_of
from precache_workers.sources.folder import FolderSource
from tests.support.building import cut, encoded, write, write_jpegs

RECIPE = precache.Recipe.image(resize=40, crop=32)


def through(
    root: Path, recipe: precache.Recipe = RECIPE, seconds: float = 60.0
) -> tuple[StageTimes, Job]:
    job = Job(FolderSource(LocalFolder(root)), recipe)
    table = job.source.list(lambda count: None).table
    codecs = ["raw", "zstd", "image"]
    task = FetchAllTask.of(job, table, range(len(table)))
    return measure_stages(task, codecs=codecs, seconds=seconds), job


def test_every_stage_of_every_sample_is_timed(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 6)
    found, _ = through(tmp_path)
    assert found.steps == ("decode", "resize", "center_crop")
    assert not found.failures
    for name in ("fetch", *found.steps, "encode"):
        stage = found.stage(name)
        assert stage.cpu.shape == stage.wall.shape == (6,)
        assert (stage.cpu >= 0).all()
        assert (stage.wall > 0).all()
    for each in found.samples:
        assert each.nbytes == (tmp_path / each.key).stat().st_size
        assert each.encode_cpu.keys() == {"raw", "zstd", "image"}


def test_the_rows_are_those_of_a_build(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 3)
    found, job = through(tmp_path)
    [recipe] = recipes_of(job).values()
    for each in found.samples:
        [sample] = job.source.fetch([each.key], [each.nbytes])
        assert np.array_equal(each.rows["image"], recipe(sample, each.key))
    assert found.shapes == {"image": RowShape((3, 32, 32), "uint8")}


def test_what_is_stored_after_each_step_has_its_own_size(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 4, (64, 48))
    write(tmp_path / "cat/wide.jpg", encoded(cut(9, (90, 48))))
    found, _ = through(tmp_path, precache.Recipe.image(resize=40, crop=32, codec="raw"))
    decoded, resized, cropped = found.cuts()
    assert sorted(decoded.nbytes) == [48 * 64 * 3 + 4] * 4 + [48 * 90 * 3 + 4]
    assert (cropped.nbytes == 32 * 32 * 3 + 4).all()
    assert [each.one_shape for each in (decoded, resized, cropped)] == [False, False, True]
    assert (decoded.decode_cpu > 0).all()


def test_broken_files_are_counted_and_cost_nothing(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 3)
    write(tmp_path / "cat/broken.jpg", b"none")
    found, _ = through(tmp_path)
    assert [key for key, _ in found.failures] == ["cat/broken.jpg"]
    assert len(found.samples) == 3


def test_rows_of_other_shapes_are_told_apart(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 3)
    write(tmp_path / "cat/wide.jpg", encoded(cut(9, (90, 48))))
    found, _ = through(tmp_path, precache.Recipe.image())
    [(key, why)] = found.misfits()
    assert key == "cat/wide.jpg"
    assert why == "its row is uint8 (3, 48, 90), most are uint8 (3, 48, 64)"
    assert len(found.usual) == 3
    assert not found.cuts()[-1].one_shape


def test_nothing_but_broken_files(tmp_path: Path) -> None:
    write(tmp_path / "broken.jpg", b"none")
    with pytest.raises(SampleError, match=r"none of 1 samples has a row: broken\.jpg"):
        through(tmp_path)


def test_when_the_time_is_up_a_few_are_measured_all_the_same(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 12)
    found, _ = through(tmp_path, seconds=0.0)
    assert len(found.samples) == 8


def test_fields_take_their_steps_together(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 2)
    decode, resize = {"op": "decode"}, {"op": "resize", "size": [8, 8]}
    fields = {
        "image": {"ops": [decode, resize, {"op": "horizontal_flip"}]},
        "thumb": {"ops": [decode, {"op": "to_dtype", "dtype": "float32"}, resize, resize]},
    }
    recipe = precache.Recipe.from_dict({"fields": fields})
    assert step_names(recipe) == (
        "decode", "resize+to_dtype", "horizontal_flip+resize", "resize",
    )  # fmt: skip
    assert frozen_after(recipe) == [False, False, True, True]


def test_a_recipe_of_several_fields_and_one_without_ops(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 2)
    decode = [{"op": "decode"}, {"op": "resize", "size": [20, 24]}]
    small = [*decode, {"op": "to_dtype", "dtype": "float32"}]
    recipe = precache.Recipe.from_dict(
        {"fields": {"image": {"ops": decode}, "small": {"ops": small}}}
    )
    found, _ = through(tmp_path, recipe)
    assert found.shapes == {
        "image": RowShape((3, 20, 24), "uint8"),
        "small": RowShape((3, 20, 24), "float32"),
    }
    assert found.cuts()[0].nbytes.shape == (2,)


def test_the_same_op_twice_has_two_names() -> None:
    ops = [{"op": "decode"}, {"op": "resize", "size": 90}, {"op": "resize", "size": [8, 8]}]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    assert step_names(recipe) == ("decode", "resize", "resize 2")
    plain = precache.Recipe.from_dict({"fields": {"image": {}}})
    assert step_names(plain) == ("no op",)


def test_a_codec_that_cannot_hold_rows_gives_way() -> None:
    pixels, floats = RowShape((3, 8, 8), "uint8"), RowShape((3, 8, 8), "float32")
    assert codec_for(ImageCodec(), pixels) == ImageCodec()
    assert codec_for(ImageCodec(), floats) == ZstdCodec()
    assert codec_for(RawCodec(), floats) == RawCodec()


@pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec(), ImageCodec()])
@pytest.mark.parametrize("pixels", [8, 700])
def test_a_row_is_decoded_as_often_as_its_time_is_divided_by(codec: Codec, pixels: int) -> None:
    row = np.random.default_rng(0).integers(0, 256, (3, pixels, pixels), np.uint8)
    coder = _Coder(codec, RowShape(row.shape, "uint8"))
    coder.decode(coder.encode(row))
    assert coder.together == (256 if pixels == 8 else 1)
    assert (coder._out == row).all()
    assert len(coder._out) == coder.together
