"""Examinations of whole sources."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import SourceError, UsageError
from precache.runtime import usage
from precache.storage.open import open_folder
from precache_workers.doctor import measure as doctor
from precache_workers.doctor.report import DoctorReport
from precache_workers.doctor.source_throughput import REMOTE_DEPTHS
from precache_workers.driver.build_plan import BuildPlan
from tests.support.building import build_here, cli, put_photos, write, write_jpegs
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=40, crop=32)


def examine(source: object, recipe: precache.Recipe | None = RECIPE, **more: Any) -> DoctorReport:
    return precache.doctor(source, recipe, **{"seconds": 5, "address": "serial", **more})


def test_a_folder_is_examined(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 30)
    cut_short = examine(tmp_path, seconds=1e-9)
    assert (cut_short.complete, cut_short.samples) == (False, 1), "its listing takes too long"
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


def test_a_bucket(s3: S3Server) -> None:
    put_photos(open_folder("s3://bucket/examined", s3.options()))
    found = examine("s3://bucket/examined", seconds=10, storage_options=s3.options())
    assert (found.source, found.samples, found.failed) == ("s3://bucket/examined", 13, 1)
    assert [reading.depth for reading in found.storage] == [*REMOTE_DEPTHS]
    assert all(reading.requests >= 1 for reading in found.storage)
    assert found.worthwhile
    assert s3.options()["secret"] not in repr(found)


def test_a_plan_without_a_store_predicts_the_same_build(tmp_path: Path) -> None:
    """And with a rate it has the same figures beside its own; with neither, they are its own."""
    source, store, page = (tmp_path / name for name in ("in", "store", "page.html"))
    write_jpegs(source, 12)
    how: dict[str, Any] = {"seconds": 2, "address": "serial"}
    found = precache.plan(source, None, RECIPE, **how)
    assert isinstance(found, DoctorReport)
    assert found.rate == 1000
    planned = precache.plan(source, store, RECIPE, rate=500, **how)
    assert isinstance(planned, BuildPlan)
    assert planned.gain is not None
    assert (planned.gain.build, planned.gain.rate) == (planned.estimate, 500)
    assert str(planned).endswith(str(planned.gain))
    planned.html(page)
    assert "Would caching help?" in page.read_text("utf-8")
    build_here(source, store, RECIPE)
    rest = precache.plan(source, store, RECIPE, rate=500, **how)
    assert isinstance(rest, BuildPlan)
    assert (rest.state, rest.estimate) == ("nothing", None)
    assert rest.gain is not None
    assert rest.gain.build.fetched > 0, "of a new store"
    with pytest.raises(UsageError, match="give a rate"):
        precache.plan(source, store, RECIPE).html(page)
    with pytest.raises(UsageError, match="without a store is all measured"):
        precache.plan(source, None, RECIPE, timing=False)


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


@pytest.mark.heavy
def test_as_an_object_and_a_page(tmp_path: Path) -> None:
    """With a function of the user's own, which makes rows of one shape."""
    write_jpegs(tmp_path / "in", 12)
    write(tmp_path / "in/cat/broken.jpg", b"none")
    write(tmp_path / "mine.py", b"def half(array):\n    return array[:32, :32]\n")
    (tmp_path / "recipe.toml").write_text(
        '[fields.image]\nops = [{ op = "decode" }, { op = "function", function = "mine:half" }]\n'
    )
    words = "doctor in --recipe recipe.toml --seconds 5 --json --html a.html"
    ran = cli(*words.split(), cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert (found["samples"], found["sampled"], found["failed"]) == (13, 13, 1)
    assert [stage["name"] for stage in found["stages"][1:3]] == ["decode", "mine:half"]
    assert set(found["stages"][0]["ms"]) == {"mean", "median", "p95", "max"}
    assert {len(stage["each_ms"]) for stage in found["stages"]} == {12}
    text = (tmp_path / "a.html").read_text("utf-8")
    assert "broken: cat/broken.jpg" in text
    assert found["slowest"][0]["key"] in text


def test_rows_of_different_shapes_have_no_store_and_random_ops_are_named(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "a", 6)
    write_jpegs(tmp_path / "b", 4, (50, 50))
    found = examine(tmp_path, None, samples=9)
    assert (found.sampled, len(found.misfits), found.worthwhile) == (9, 4, False)
    reason = "its row is uint8 (3, 50, 50), most are uint8 (3, 48, 64)"
    assert {why for _, why in found.misfits} == {reason}
    assert found.cores == found.host.cores == usage.cores() >= 1
    assert 0 < found.host.memory_free <= found.host.memory
    names = {"decode": {}, "resize": {"size": [40, 40]}, "random_resized_crop": {"size": 32}}
    ops = [{"op": name, **settings} for name, settings in names.items()]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    assert examine(tmp_path, recipe).random == "random_resized_crop"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"cores": -1}, "cores is -1"),
        ({"rate": 0.0}, "rate is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"source": "nowhere"}, "does not exist"),
        ({}, r"none of 1 samples has a row: broken\.jpg"),
    ],
)
def test_what_cannot_be_examined_is_refused(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    write(tmp_path / "broken.jpg", b"none")
    with pytest.raises((UsageError, SourceError), match=text):
        precache.doctor(**{"source": tmp_path, **options})


@pytest.mark.heavy
def test_without_decoders_it_says_what_to_install(run_python: Callable[..., Any]) -> None:
    code = "import sys\nsys.modules['simplejpeg'] = None\nimport precache\n"
    code += "try:\n    precache.doctor('photos')\nexcept precache.UsageError as e:\n    print(e)"
    told = run_python(code).stdout
    assert told == "doctor decodes samples and needs simplejpeg: pip install 'precache[workers]'\n"
