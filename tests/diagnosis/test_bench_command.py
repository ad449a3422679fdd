"""`precache bench`: that it measures what it says; not how fast this machine is."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import UsageError
from tests.conftest import BuiltStore
from tests.support.building import build_here, write_jpegs


def test_every_codec_is_measured_in_a_whole_epoch_whatever_rank_this_process_has(
    store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_RANK", "1")
    heard: list[str] = []
    result = precache.bench(store.path, batch_size=80, epochs=2, tick=heard.append)
    assert heard == ["first epoch", "epoch 1 of 2", "epoch 2 of 2"]
    assert (result.version, result.samples) == (store.result.version, 21), "holes are not read"
    assert (result.batch_size, result.row_nbytes) == (21, 112 * 112 * 3)
    assert result.codec == store.recipe.fields["image"].codec.name
    for cost in (result.first_epoch, result.warm, result.copy_limit):
        assert 0 < cost.samples_per_s < math.inf
        assert 0 < cost.cpu_ms_per_1000 < math.inf
    ratio = result.warm.cpu_ms_per_1000 / result.copy_limit.cpu_ms_per_1000
    assert result.cpu_ratio == pytest.approx(ratio)
    assert json.loads(json.dumps(dataclasses.asdict(result)))["warm"].keys() == {
        "samples_per_s", "cpu_ms_per_1000",
    }  # fmt: skip


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"num_threads": 0}, "num_threads"),
        ({"device": "cpu"}, "option device: it reads all rows"),
        ({"output": "tuple"}, "option output: it reads all rows"),
        ({"rows": [0, 1]}, "option rows: it reads all rows"),
        ({"fields": 3}, "fields is 3; give"),
    ],
)
def test_options_that_make_no_sense_are_named(
    store: BuiltStore, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        precache.bench(store.path, **options)
