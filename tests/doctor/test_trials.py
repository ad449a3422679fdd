"""Trial stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import precache
from precache.recipe.recipe import RawCodec
from precache_workers.doctor.trials import rows_to_read, try_codec
from tests.support.building import build_here, write_jpegs

RECIPE = precache.Recipe.image(resize=40, crop=32)


def test_a_trial_store_holds_what_a_build_would(tmp_path: Path) -> None:
    """Of the same rows, it takes the same bytes; the codec asked for where it can hold them."""
    write_jpegs(tmp_path / "in", 8)
    result = build_here(tmp_path / "in", tmp_path / "store", precache.Recipe.image(codec="raw"))
    with precache.Loader(tmp_path / "store", 8, shuffle=False, device="cpu") as loader:
        [batch] = list(loader)
    rows = [{"image": row.numpy()} for row in batch["image"]]
    read = try_codec(RawCodec(), RECIPE, rows, 8, tmp_path / "trial")
    assert read.stored * 8 == result.stored_bytes
    assert read.raw == rows[0]["image"].nbytes
    assert read.cost.samples == 8
    assert read.cost.warm.samples_per_s > 0
    assert 0 < read.write_cpu < 1
    own = try_codec(None, RECIPE, rows, 16, tmp_path / "own")
    assert own.cost.codec == "image"
    assert own.stored < read.stored


def test_other_fields_keep_what_can_hold_them(tmp_path: Path) -> None:
    fields = {
        "image": {"ops": [{"op": "decode"}]},
        "depth": {"ops": [{"op": "decode"}, {"op": "to_dtype", "dtype": "float32"}]},
    }
    recipe = precache.Recipe.from_dict({"fields": fields})
    rows = [{"image": np.zeros((3, 4, 4), np.uint8), "depth": np.zeros((3, 4, 4), np.float32)}] * 3
    try_codec(recipe.fields["image"].stored_as, recipe, rows, 3, tmp_path / "trial")
    version = precache.open(tmp_path / "trial")
    assert {name: field.codec for name, field in version.fields.items()} == {
        "image": "image",
        "depth": "zstd",
    }


def test_repeated_rows_do_not_make_a_row_smaller(tmp_path: Path) -> None:
    """Though they share a chunk, which a codec then compresses to a third."""
    ops = [{"op": "decode"}, {"op": "to_dtype", "dtype": "float32"}]
    recipe = precache.Recipe.from_dict({"fields": {"depth": {"ops": ops, "codec": "zstd"}}})
    noise = np.random.default_rng(0).random((3, 3, 16, 16)).astype(np.float32)
    rows = [{"depth": row} for row in noise]
    once, often = (try_codec(None, recipe, rows, n, tmp_path / f"{n}") for n in (3, 30))
    assert often.stored == once.stored
    assert often.cost.samples == 30
    part = try_codec(None, recipe, rows, 2, tmp_path / "2")
    assert (part.stored, part.cost.samples) == (once.stored, 2), "bytes are of all, not of the read"


@pytest.mark.parametrize(
    ("population", "sampled", "row", "most", "rows"),
    [
        (160, 160, 150_528, 1e12, 160),  # as many as there are
        (320, 200, 150_528, 1e12, 400),  # or a little more: each sample as often as the others
        (10_000, 200, 150_528, 1e12, 1600),  # whole samples, within 256 MiB
        (1_000_000, 200, 3072, 1e12, 87_200),
        (10_000, 200, 150_528, 1e6, 6),  # less than the sample, where time is short
        (10_000, 200, 150_528, 1e3, 1),
    ],
)
def test_rows_of_a_store_to_read(
    population: int, sampled: int, row: int, most: float, rows: int
) -> None:
    assert rows_to_read(population, sampled, row, most) == rows
