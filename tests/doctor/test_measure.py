"""Examinations of whole sources."""

from __future__ import annotations

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
from tests.support.building import build_here, put_photos, write, write_jpegs
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=40, crop=32)


def test_a_folder_is_examined(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 30)
    write(tmp_path / "cat/broken.jpg", b"none")
    heard: list[str] = []
    found = precache.doctor(tmp_path, RECIPE, seconds=8, rate=500, cores=3, tick=heard.append)
    assert (found.samples, found.sampled, found.failed) == (31, 31, 1)
    assert [key for key, _ in found.failures] == ["cat/broken.jpg"]
    assert found.source_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*.jpg"))
    assert (found.rate, found.cores, found.complete) == (500, 3, True)
    names = ["fetch", "decode", "resize", "center_crop"]
    assert [each.name for each in found.stages] == [*names, "encode"]
    assert [each.after for each in found.cuts] == names
    assert [each.codec for each in found.codecs] == ["image", "raw", "zstd"]
    assert found.cut in ("resize", "center_crop"), "such small rows cost nearly the same"
    assert 0 < found.build.error < math.inf, "one is left: the broken one"
    assert "listing, 31 samples" in heard
    assert heard[-1] == "training from zstd"


def test_what_is_not_asked_for_is_of_this_machine(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 12)
    found = precache.doctor(tmp_path, RECIPE, samples=5, seconds=5)
    assert found.sampled == 5
    assert found.cores == found.host.cores == usage.cores() >= 1
    assert 0 < found.host.memory_free <= found.host.memory


def test_stored_bytes_are_those_of_a_build(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 32)
    found = precache.doctor(tmp_path / "in", RECIPE, seconds=8)
    for each in found.codecs:
        recipe = precache.Recipe.image(resize=40, crop=32, codec=each.codec)
        built = build_here(tmp_path / "in", tmp_path / each.codec, recipe)
        assert each.bytes_total == pytest.approx(built.stored_bytes, rel=0.02)


def test_bytes_are_of_all_samples_where_only_a_few_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jpegs(tmp_path / "in", 12, (200, 150))
    recipe = precache.Recipe.image()
    built = build_here(tmp_path / "in", tmp_path / "store", recipe)
    monkeypatch.setattr(doctor, "READ_RATE", 200 * 150 * 3)
    found = precache.doctor(tmp_path / "in", seconds=12)
    assert found.codecs[0].bytes_total == pytest.approx(built.stored_bytes, rel=0.01)


def test_a_listing_that_takes_too_long_is_cut_short(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 4)
    found = precache.doctor(tmp_path, RECIPE, seconds=1e-9)
    assert not found.complete
    assert found.samples == 1


def test_a_bucket(s3: S3Server) -> None:
    put_photos(open_folder("s3://bucket/examined", s3.options()))
    found = precache.doctor(
        "s3://bucket/examined", RECIPE, seconds=10, storage_options=s3.options()
    )
    assert (found.samples, found.failed) == (13, 1)
    assert found.source == "s3://bucket/examined"
    assert max(each.depth for each in found.storage) == 64
    assert found.cut in ("resize", "center_crop"), "such small rows cost nearly the same"
    assert s3.options()["secret"] not in repr(found)


class Squares:
    """Arrays of random pixels; one item cannot be had."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if number == 7:
            raise ValueError("number 7 is lost")
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        return pixels, number % 3


def squares() -> Squares:
    return Squares()


def test_a_dataset() -> None:
    found = precache.doctor(f"python:{__name__}:squares", RECIPE, seconds=5)
    assert (found.samples, found.failed) == (12, 1)
    assert "number 7 is lost" in found.failures[0][1]
    assert found.storage == []
    assert found.source_bytes == 12 * 40 * 40 * 3


def test_rows_of_different_shapes_have_no_store(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "a", 6)
    write_jpegs(tmp_path / "b", 4, (50, 50))
    found = precache.doctor(tmp_path, seconds=5)
    assert len(found.misfits) == 4
    assert found.cut == "fetch"


def test_random_ops_are_left_to_training(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 6)
    ops: list[dict[str, Any]] = [
        {"op": "decode"},
        {"op": "resize", "size": [40, 40]},
        {"op": "random_resized_crop", "size": 32},
    ]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    found = precache.doctor(tmp_path, recipe, seconds=5)
    assert [each.frozen for each in found.cuts] == [False, False, False, True]
    assert found.cut != "random_resized_crop"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"cores": -1}, "cores is -1"),
        ({"rate": 0.0}, "rate is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        precache.doctor(tmp_path, **options)


def test_sources_that_cannot_be_examined(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        precache.doctor(tmp_path / "nowhere")
    write(tmp_path / "broken.jpg", b"none")
    with pytest.raises(SourceError, match=r"none of 1 samples has a row: broken\.jpg"):
        precache.doctor(tmp_path)


@pytest.mark.heavy
def test_without_decoders_it_says_what_to_install(run_python: Callable[..., Any]) -> None:
    code = """
import sys
sys.modules["simplejpeg"] = None
import precache
try:
    precache.doctor("photos")
except precache.UsageError as error:
    print(error)
"""
    told = run_python(code).stdout
    assert told == "doctor decodes samples and needs simplejpeg: pip install 'precache[workers]'\n"
