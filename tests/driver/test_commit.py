"""Commit: what is written, what it says, and who wins."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import precache
from precache.store.json_documents import FORMAT
from precache.store.labels import narrow
from precache.store.receipts import Receipt
from precache.store.row_table import RowTable
from precache_workers.driver.commit import channel_statistics
from precache_workers.driver.totals import holes
from tests.support.building import (
    build_here,
    pixels,
    remains,
    write,
    write_jpegs,
)

RECIPE = precache.Recipe.image(resize=24, crop=20)


def receipt(shard: int, failed: dict[int, str]) -> Receipt:
    return Receipt(
        shard=shard, objects={}, holes=failed, content=[], sums={}, seconds={}, cpu_seconds=0.0
    )


# --- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "dtype"),
    [
        (-1, "int8"), (127, "int8"), (128, "int16"), (32767, "int16"), (32768, "int32"),
        (2**31 - 1, "int32"), (2**31, "int64"),
    ],
)  # fmt: skip
def test_labels_take_the_narrowest_type_with_room_for_none(top: int, dtype: str) -> None:
    found = narrow(np.array([-1, top], np.int64))
    assert found.dtype.name == dtype
    assert found.tolist() == [-1, top]


def test_holes_come_in_row_order() -> None:
    found = holes([receipt(1, {9: "b", 5: "a"}), receipt(0, {3: "c"})])
    assert list(found.items()) == [(3, "c"), (5, "a"), (9, "b")]


def test_statistics_of_nothing_are_none() -> None:
    assert channel_statistics({"image": np.zeros((1, 3))}) == ({}, {})


# --- a whole version ----------------------------------------------------------------------------


def test_a_version_says_what_it_has_and_what_made_it(tmp_path: Path) -> None:
    """It travels, and is the same wherever its samples lay; the log alone says where."""
    source = write_jpegs(tmp_path / "a-secret-place", 20)
    write(source / "cat/broken.jpg", b"none")
    result = build_here(source, tmp_path / "store", RECIPE, {"shard_samples": 8})
    rows = np.stack(list(pixels(tmp_path / "store").values())).astype(np.float64)
    version = precache.open(tmp_path / "store")
    for found in (result, version):
        assert found.mean["image"] == pytest.approx(rows.mean((0, 2, 3)), rel=1e-6)
        assert found.std["image"] == pytest.approx(rows.std((0, 2, 3)), rel=1e-6)

    [path] = Path(version.path).glob("rows/c/0")
    table = RowTable.from_parquet(path.read_bytes(), str(path))
    assert list(table.keys) == list(version.keys)
    assert table.classes == version.classes == ("cat", "dog", "eel")
    assert table.labels.tolist() == version.labels.tolist()
    for key, size in zip(table.keys, table.sizes.tolist(), strict=True):
        assert (source / key).stat().st_size == size
    content = pq.read_table(path).to_pydict()["content"]
    assert len(set(content)) == 21
    assert {len(digest) for digest in content} == {32}

    attributes = json.loads((Path(result.path) / "zarr.json").read_text())["attributes"]["precache"]
    assert attributes["format"] == FORMAT
    assert f"{attributes['version']}.1" == result.version == Path(result.path).name
    assert (attributes["rows"], attributes["holes"]) == (21, 1)
    assert attributes["classes"] == ["cat", "dog", "eel"]
    assert precache.Recipe.from_dict(attributes["recipe"]) == RECIPE
    assert {"precache", "torch", "pillow", "simplejpeg"} <= set(attributes["libraries"])
    assert attributes["fields"]["image"]["stored"] == result.stored_bytes
    assert remains(tmp_path / "store") == []
    for path in Path(result.path).rglob("*"):
        assert not path.is_file() or b"a-secret-place" not in path.read_bytes()
