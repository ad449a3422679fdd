"""`precache bench`: that it measures what it says; not how fast this machine is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.diagnosis.bench import BenchResult, ReadCost
from precache.errors import StoreError, UsageError
from tests.conftest import BuiltStore
from tests.support.building import build_here, write, write_jpegs


def assert_sane(result: BenchResult) -> None:
    for cost in (result.first_epoch, result.warm, result.copy_limit):
        assert isinstance(cost, ReadCost)
        assert 0 < cost.samples_per_s < math.inf
        assert 0 < cost.cpu_ms_per_1000 < math.inf
    assert result.cpu_ratio == pytest.approx(
        result.warm.cpu_ms_per_1000 / result.copy_limit.cpu_ms_per_1000
    )


def test_every_codec_is_measured(store: BuiltStore) -> None:
    result = precache.bench(store.path, batch_size=8, epochs=2)
    assert_sane(result)
    assert result.version == store.result.version
    assert result.samples == 21, "holes are not read"
    assert result.batch_size == 8
    assert result.row_nbytes == 112 * 112 * 3
    assert result.codec == store.recipe.fields["image"].codec.name


def test_a_batch_is_no_larger_than_the_store(store: BuiltStore) -> None:
    assert precache.bench(store.path, epochs=1).batch_size == 21


def test_the_whole_store_is_read_whatever_rank_this_process_has(
    store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_RANK", "1")
    result = precache.bench(store.path, batch_size=8, epochs=1)
    assert (result.batch_size, result.samples) == (8, 21)


def test_rows_count_all_their_fields(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 6)
    fields = {
        "image": {"ops": [{"op": "decode"}, {"op": "resize", "size": [20, 24]}], "codec": "raw"},
        "thumb": {
            "ops": [
                {"op": "decode"},
                {"op": "resize", "size": [8, 8]},
                {"op": "to_dtype", "dtype": "float32"},
            ]
        },
    }
    recipe = precache.Recipe.from_dict({"fields": fields})
    build_here(tmp_path / "in", tmp_path / "store", recipe)
    result = precache.bench(tmp_path / "store", epochs=1)
    assert result.row_nbytes == 3 * 20 * 24 + 3 * 8 * 8 * 4
    assert result.codec == "raw+zstd"


def test_progress_names_each_epoch(store: BuiltStore) -> None:
    heard: list[str] = []
    precache.bench(store.path, epochs=2, tick=heard.append)
    assert heard == ["first epoch", "epoch 1 of 2", "epoch 2 of 2"]


def test_the_result_is_plain_data(store: BuiltStore) -> None:
    plain = dataclasses.asdict(precache.bench(store.path, epochs=1))
    assert set(plain) == {
        "version",
        "samples",
        "batch_size",
        "row_nbytes",
        "codec",
        "first_epoch",
        "warm",
        "copy_limit",
        "cpu_ratio",
        "compiled",
    }


def test_reading_costs_more_with_a_filter_to_undo(tmp_path: Path) -> None:
    """By far; so that the ratio is of CPU time, and of the epochs after the first."""
    write_jpegs(tmp_path / "in", 48, (128, 128))
    results = {}
    for codec in ("raw", "image"):
        build_here(tmp_path / "in", tmp_path / codec, precache.Recipe.image(codec=codec))
        results[codec] = precache.bench(tmp_path / codec, batch_size=16, epochs=3)
        assert_sane(results[codec])
    assert results["image"].warm.cpu_ms_per_1000 > results["raw"].warm.cpu_ms_per_1000


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"epochs": 0}, {"num_threads": 0}])
def test_numbers_that_make_no_sense_are_named(store: BuiltStore, options: dict[str, int]) -> None:
    [name] = options
    with pytest.raises(UsageError, match=name):
        precache.bench(store.path, **options)


@pytest.mark.parametrize(
    "options", [{"device": "cpu"}, {"output": "tuple"}, {"rows": [0, 1]}, {"fields": 3}]
)
def test_options_that_it_cannot_use_are_named(store: BuiltStore, options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(UsageError, match=rf"option {name}: it reads all rows|{name} is 3; give"):
        precache.bench(store.path, **options)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        precache.bench(tmp_path / "nowhere")


def test_a_store_of_holes_alone(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 1, classes=())
    for number in range(3):
        write(tmp_path / f"in/x{number}.jpg", b"none")
    build_here(tmp_path / "in", tmp_path / "store", precache.Recipe.image())
    assert precache.bench(tmp_path / "store", epochs=1).samples == 1
