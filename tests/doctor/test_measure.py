"""Examinations of whole sources; stages of samples; stores that are written and read."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import UsageError
from precache.recipe.recipe import ImageCodec, RawCodec, ZstdCodec
from precache.runtime import usage
from precache.storage import local
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.store.layout import RowShape
from precache_workers.doctor import measure as doctor
from precache_workers.doctor.measure import DEPTHS, REMOTE_DEPTHS, probe_source
from precache_workers.doctor.report import DoctorReport
from precache_workers.doctor.stages import StageTimes, measure_stages, steps_of
from precache_workers.doctor.trials import rows_to_read, try_codec
from precache_workers.shards.samples import FetchAllTask, Job, recipes_of
from precache_workers.sources.folder import FolderSource
from tests.support.building import build_here, cut, encoded, put_photos, write, write_jpegs
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=40, crop=32)


def examine(source: object, recipe: precache.Recipe | None = RECIPE, **more: Any) -> DoctorReport:
    return precache.doctor(source, recipe, **{"seconds": 5, "address": "serial", **more})


def test_a_folder_is_examined(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "FILES_AT_ONCE", 4)
        cut_short = examine(tmp_path, seconds=1e-9)
    assert (cut_short.complete, cut_short.samples) == (False, 4), "its listing takes too long"
    write(tmp_path / "cat/broken.jpg", b"none")
    heard: list[str] = []
    found = precache.doctor(tmp_path, RECIPE, seconds=8, rate=500, cores=3, tick=heard.append)
    assert (found.samples, found.sampled, found.failed) == (31, 31, 1)
    assert [key for key, _ in found.failures] == ["cat/broken.jpg"]
    assert found.source_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*.jpg"))
    assert (found.rate, found.cores, found.complete) == (500, 3, True)
    names = ["fetch", "decode", "resize", "center_crop", "encode"]
    assert [stage.name for stage in found.stages] == names
    assert [codec.codec for codec in found.codecs] == ["image", "raw", "zstd"]
    assert found.worthwhile
    assert 0 < found.error < math.inf, "one is left: the broken one"
    assert "listing, 31 samples" in heard
    assert heard[-1] == "training from zstd"


def test_stored_bytes_are_those_of_a_build_of_all_samples_if_only_a_few_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jpegs(tmp_path / "in", 32)
    found = [examine(tmp_path / "in", seconds=8)]
    monkeypatch.setattr(doctor, "READ_RATE", 200)
    found.append(examine(tmp_path / "in", seconds=8))
    for number, figures in enumerate(found[0].codecs):
        recipe = precache.Recipe.image(resize=40, crop=32, codec=figures.codec)
        built = build_here(tmp_path / "in", tmp_path / figures.codec, recipe)
        within = 0 if figures.codec == "raw" else 0.02  # which depends on the rows beside a row
        for report in found:
            trial = report.codecs[number]
            assert trial.stored * 32 == pytest.approx(built.stored_bytes, rel=within)
            assert min(trial.samples_per_s, trial.cpu_ms_per_1000) > 0
            assert (0 < trial.write_cpu < 1, trial.raw) == (True, 3 * 32 * 32)


def test_a_plan_without_a_store_predicts_the_same_build_also_of_a_bucket(
    tmp_path: Path, s3: S3Server
) -> None:
    """And with a rate it has the same figures beside its own; with neither, they are its own."""
    source, store, page = "s3://bucket/examined", tmp_path / "store", tmp_path / "page.html"
    put_photos(open_folder(source, s3.options()))
    how: dict[str, Any] = {"seconds": 4, "address": "serial", "storage_options": s3.options()}
    found = precache.plan(source, None, RECIPE, **how)
    assert isinstance(found, DoctorReport)
    assert (found.source, found.samples, found.failed, found.rate) == (source, 13, 1, 1000)
    assert [reading.depth for reading in found.storage] == [*REMOTE_DEPTHS]
    assert all(reading.requests >= 1 for reading in found.storage)
    assert found.worthwhile
    assert s3.options()["secret"] not in repr(found)
    planned: Any = precache.plan(source, store, RECIPE, rate=500, **how)
    assert (planned.gain.build, planned.gain.rate) == (planned.estimate, 500)
    assert str(planned).endswith(str(planned.gain))
    planned.html(page)
    assert "Would caching help?" in page.read_text("utf-8")
    precache.build(source, store, RECIPE, address="serial", storage_options=s3.options())
    rest: Any = precache.plan(source, store, RECIPE, rate=500, **how)
    assert (rest.state, rest.estimate) == ("nothing", None)
    assert rest.gain.build.fetched > 0, "of a new store"
    with pytest.raises(UsageError, match="give a rate"):
        precache.plan(source, store, RECIPE, **how).html(page)


class Squares:
    """Arrays of random pixels; one item cannot be had."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if number == 7:
            raise ValueError("number 7 is lost")
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        return pixels, number % 3


def test_a_dataset() -> None:
    found = examine(f"python:{__name__}:Squares")
    assert (found.samples, found.failed, found.storage) == (12, 1, [])
    assert "number 7 is lost" in found.failures[0][1]
    assert found.source_bytes == 12 * 40 * 40 * 3


def test_rows_of_different_shapes_have_no_store_and_random_ops_are_named(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "a", 6)
    write_jpegs(tmp_path / "b", 4, (50, 50))
    found = examine(tmp_path, None, samples=9)
    assert (found.sampled, len(found.misfits), found.worthwhile) == (9, 4, False)
    reason = "its row is uint8 (3, 50, 50), most are uint8 (3, 48, 64)"
    assert {why for _, why in found.misfits} == {reason}
    assert found.cores == found.host.cores == usage.cores() >= 1
    assert 0 < found.host.memory_free <= found.host.memory
    crop = {"op": "random_resized_crop", "size": 32}
    recipe = recipe_of(image=[{"op": "decode"}, {"op": "resize", "size": [40, 40]}, crop])
    assert examine(tmp_path, recipe).random == "random_resized_crop"


@pytest.mark.heavy
def test_without_decoders_it_says_what_to_install(run_python: Callable[..., Any]) -> None:
    code = "import sys\nsys.modules['simplejpeg'] = None\nimport precache\n"
    code += "try:\n    precache.doctor('photos')\nexcept precache.UsageError as e:\n    print(e)"
    told = run_python(code).stdout
    assert told == "doctor decodes samples and needs simplejpeg: pip install 'precache[workers]'\n"


RAW = precache.Recipe.image(resize=40, crop=32, codec="raw")


def recipe_of(**ops: Any) -> precache.Recipe:
    return precache.Recipe.from_dict({"fields": {name: {"ops": o} for name, o in ops.items()}})


def through(root: Path, recipe: precache.Recipe = RAW, seconds: float = 60.0) -> StageTimes:
    job = Job(FolderSource(LocalFolder(root)), recipe)
    table = job.source.list(lambda count: None).table
    return measure_stages(FetchAllTask.of(job, table, range(len(table))), seconds=seconds)


def test_stages_and_rows_are_those_of_a_build(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 9, (64, 48))
    write(tmp_path / "cat/wide.jpg", encoded(cut(9, (90, 48))))
    write(tmp_path / "cat/broken.jpg", b"none")
    found = through(tmp_path)
    assert tuple(found.steps) == ("decode", "resize", "center_crop")
    assert [key for key, _ in found.failures] == ["cat/broken.jpg"]
    for name in ("fetch", *found.steps, "encode"):
        stage = found.stage(name)
        assert len(stage.each_ms) == len(stage.each_cpu_ms) == 10
        assert min(stage.each_cpu_ms) >= 0
        assert stage.ms.mean > 0
    source = FolderSource(LocalFolder(tmp_path))
    [recipe] = recipes_of(Job(source, RAW)).values()
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
    assert tuple(steps_of(recipe)) == names
    assert [name for name, random in steps_of(recipe).items() if random] == [names[2]]
    assert not any(steps_of(RAW).values())
    assert [*steps_of(recipe_of(image=[decode, resize, resize]))][-1] == "resize 2"
    found = through(tmp_path, recipe_of(image=[decode, resize], small=[decode, resize, floats]))
    assert [row.dtype for row in found.shapes.values()] == ["uint8", "float32"]
    assert tuple(steps_of(recipe_of(image=[]))) == ("no op",)


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
