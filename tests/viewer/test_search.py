"""Rows found by key, class and state: in bounded memory and time, however many there are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache.errors import UsageError
from precache.store import version
from precache.store.arrays import checks_per_object
from precache.store.small_arrays import KEYS_PER_CHUNK, small_array, string_array
from precache.viewer.search import Catalogue, Query
from tests.conftest import BuiltStore
from tests.support.building import write
from tests.support.forging import settle

ROWS = 1_000_000
FAR = 900_000
"""A row whose shard is there, as are those of the first rows."""


def write_large(built: BuiltStore, to: Path) -> Path:
    """A store that says it has a million rows: real metadata and small arrays, three shards."""
    folder = to / built.result.version
    shutil.copytree(built.path, to)
    document = json.loads((folder / "zarr.json").read_bytes())
    own = document["attributes"]["precache"]
    per_shard = own["rows_per_shard"]
    own.update(rows=ROWS, holes=2)
    (folder / "zarr.json").write_text(json.dumps(document))
    array = json.loads((folder / "image/zarr.json").read_bytes())
    array["shape"][0] = ROWS
    (folder / "image/zarr.json").write_text(json.dumps(array))
    version = built.open()
    leaves = version.shard_leaves("image")
    table = np.zeros((ROWS // per_shard, 3), np.uint64)
    checks = np.zeros((ROWS // per_shard, len(version.checks("image", 0))), np.uint32)
    for number, leaf in enumerate(leaves):
        table[number] = leaf.size, leaf.xxh3 >> 64, leaf.xxh3 & 2**64 - 1
        checks[number] = version.checks("image", number)
    table[FAR // per_shard], checks[FAR // per_shard] = table[0], checks[0]
    shutil.copytree(folder / "image/c/0", folder / f"image/c/{FAR // per_shard}")
    labels = (np.arange(ROWS) % 3).astype(np.int8)
    valid = np.ones(ROWS, np.bool_)
    valid[[5, 777_777]] = False
    keys = [f"{row % 3}/{row:07d}.jpg" for row in range(ROWS)]
    per_object = checks_per_object(checks.shape[1])
    for array_name, files in {
        "label": small_array(labels, ["row"], fill_value=-1),
        "valid": small_array(valid, ["row"], fill_value=False),
        "shards/image": small_array(table, ["shard", "size_xxh3"]),
        "_checks/image": small_array(checks, ["shard", "chunk"], per_chunk=per_object),
        "key": string_array(keys, "row"),
    }.items():
        shutil.rmtree(folder / array_name)
        for name, data in files.items():
            write(folder / array_name / name, data)
    settle(folder)
    return to


@pytest.fixture(scope="module")
def large(stores: dict[str, BuiltStore], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large(stores["raw"], tmp_path_factory.mktemp("large") / "store")


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chunks of keys that were read, in order."""
    read: list[str] = []
    decode = version.decode_strings

    def spy(data: bytes, where: str, count: int) -> Any:
        read.append(where.rpartition("/")[2])
        return decode(data, where, count)

    monkeypatch.setattr(version, "decode_strings", spy)
    return read


def test_paging_and_searches_read_the_keys_that_they_need_alone(
    large: Path, chunks_read: list[str]
) -> None:
    shown = Catalogue(str(large))
    found = shown.find(Query(), FAR, 24)
    assert found.rows == list(range(FAR, FAR + 24))
    assert (found.first, found.later) == (FAR, FAR + 24)
    counts = [(label, rows) for label, _, rows in shown.counts]
    assert counts == [(0, 333_333), (1, 333_333), (2, 333_332)]
    assert chunks_read == [], "nothing is asked of keys"
    assert shown.key(FAR) == "0/0900000.jpg"
    assert chunks_read == [str(FAR // KEYS_PER_CHUNK)]
    [row] = shown.read([FAR])
    [first] = shown.read([0])
    assert isinstance(row, dict)
    assert isinstance(first, dict)
    assert np.array_equal(row["image"], first["image"])
    chunks_read.clear()
    found = Catalogue(str(large)).find(Query("77", state="holes"), 0, 24)
    assert found.rows == [777_777]
    assert chunks_read == ["0", str(777_777 // KEYS_PER_CHUNK)], "those of the two holes"
    chunks_read.clear()
    shown = Catalogue(str(large))
    found = shown.find(Query("1/"), 0, 24)
    assert found.rows == list(range(1, 72, 3))
    assert found.later == 71
    assert shown.find(Query("2/"), found.later, 24).rows[0] == 71
    assert chunks_read == ["0"], "kept from the search before"


@pytest.fixture(scope="module")
def small(stores: dict[str, BuiltStore]) -> Catalogue:
    return Catalogue(str(stores["image"].path))


QUERIES: dict[str, tuple[Query, Callable[[str, bool], bool]]] = {
    "all": (Query(), lambda key, valid: True),
    "class": (Query(label="dog"), lambda key, valid: key.startswith("dog/")),
    "number": (Query(label="1"), lambda key, valid: key.startswith("dog/")),
    "contains": (Query("1"), lambda key, valid: "1" in key),
    "valid": (Query(state="valid"), lambda key, valid: valid),
    "holes": (Query(state="holes"), lambda key, valid: not valid),
    "several": (Query("cat", label="cat", state="valid"), lambda key, v: "cat" in key and v),
    "none": (Query("x", label="cat"), lambda key, valid: False),
    "no label": (Query(label="-1"), lambda key, valid: False),
}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("count", [1, 4, 100])
def test_pages_show_every_row_once(small: Catalogue, name: str, count: int) -> None:
    query, fits = QUERIES[name]
    version = small.version
    pairs = zip(version.keys, version.valid.tolist(), strict=True)
    right = [row for row, (key, valid) in enumerate(pairs) if fits(key, valid)]
    pages, found = [], small.find(query, 0, count)
    while True:
        pages.append(found.rows)
        if found.later is None:
            break
        found = small.find(query, found.later, count)
    assert [row for page in pages for row in page] == right
    assert all(len(page) == count for page in pages[:-1])


def test_one_damaged_row_leaves_the_others(
    stores: dict[str, BuiltStore], copy_store: Callable[[BuiltStore], BuiltStore]
) -> None:
    damaged = copy_store(stores["image"])
    path = damaged.shard_path(0)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    read = Catalogue(str(damaged.path)).read(range(8))
    assert [row for row, each in enumerate(read) if isinstance(each, str)] == [0]
    assert "damaged at row 0" in str(read[0])


def test_what_is_not_there_is_refused(small: Catalogue) -> None:
    with pytest.raises(UsageError, match="no class 'dgo'; did you mean dog"):
        small.find(Query(label="dgo"), 0, 4)
    with pytest.raises(UsageError, match="'some' is not one of all, valid, holes"):
        Query(state="some")
    for row in (-1, 23):
        with pytest.raises(UsageError, match=f"there is no row {row}; rows go from 0 to 22"):
            small.key(row)
