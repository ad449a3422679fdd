"""Trial stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import precache
from precache.recipe.recipe import ImageCodec, RawCodec, ZstdCodec
from precache_workers.doctor.trials import rows_to_read, try_codec
from tests.support.building import build_here, write_jpegs


def test_a_trial_store_holds_what_a_build_would(tmp_path: Path) -> None:
    """Of the same rows, it takes the same bytes; the codec asked for where it can hold them."""
    write_jpegs(tmp_path / "in", 8)
    result = build_here(tmp_path / "in", tmp_path / "store", precache.Recipe.image(codec="raw"))
    with precache.Loader(tmp_path / "store", 8, shuffle=False, device="cpu") as loader:
        [batch] = list(loader)
    rows = [{"image": row.numpy()} for row in batch["image"]]
    raw = try_codec("raw", {"image": RawCodec()}, rows, 8, tmp_path / "raw")
    assert raw.stored * 8 == result.stored_bytes
    assert raw.raw == rows[0]["image"].nbytes
    assert precache.open(tmp_path / "raw").rows == 8
    assert raw.samples_per_s > 0
    assert 0 < raw.write_cpu < 1
    own = try_codec("own", {"image": ImageCodec()}, rows, 16, tmp_path / "own")
    assert own.codec == "own"
    assert precache.open(tmp_path / "own").fields["image"].codec == "image"
    assert own.stored < raw.stored


def test_other_fields_keep_what_can_hold_them(tmp_path: Path) -> None:
    rows = [{"image": np.zeros((3, 4, 4), np.uint8), "depth": np.zeros((3, 4, 4), np.float32)}] * 3
    codecs = dict.fromkeys(rows[0], ImageCodec())
    try_codec("image", codecs, rows, 3, tmp_path / "trial")
    version = precache.open(tmp_path / "trial")
    assert {name: field.codec for name, field in version.fields.items()} == {
        "image": "image",
        "depth": "zstd",
    }


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
