"""Rows found by key, class and state, whose keys are read only where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache.store import small_arrays, version
from precache.viewer import search
from precache.viewer.search import Catalogue, Query
from tests.conftest import BuiltStore
from tests.support.building import flip


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Chunks of eight keys that were read, in order."""
    read, decode = list[str](), version.decode_strings

    def spy(data: bytes, where: str, count: int) -> Any:
        read.append(where.rpartition("/")[2])
        return decode(data, where, count)

    monkeypatch.setattr(version, "decode_strings", spy)
    for module in (small_arrays, version, search):
        monkeypatch.setattr(module, "KEYS_PER_CHUNK", 8)
    return read


def test_paging_and_searches_read_the_keys_that_they_need_alone(
    tiles: Path, make_store: Callable[..., BuiltStore], chunks_read: list[str]
) -> None:
    """Of 25 cats, 25 dogs and 25 eels, the last dog and eel being holes."""
    store = make_store(tiles, keep_order=True)
    keys = sorted(str(path.relative_to(tiles)) for path in tiles.rglob("*.png"))
    shown = Catalogue(str(store.path))
    found = shown.find(Query(), 60, 5)
    assert (found.rows, found.first, found.later) == ([60, 61, 62, 63, 64], 60, 65)
    counts = [(label, rows) for label, _, rows in shown.counts]
    assert counts == [(0, 25), (1, 24), (2, 24)]
    assert chunks_read == [], "nothing is asked of keys"
    assert shown.key(60) == keys[60]
    assert chunks_read == ["7"]
    [row] = shown.read([60])
    assert isinstance(row, dict)
    assert np.array_equal(row["image"], store.pixels(keys[60]))
    chunks_read.clear()
    found = Catalogue(str(store.path)).find(Query("74", state="holes"), 0, 24)
    assert (found.rows, chunks_read) == ([74], ["6", "9"]), "those of the two holes"
    chunks_read.clear()
    shown = Catalogue(str(store.path))
    found = shown.find(Query("dog/"), 0, 5)
    assert (found.rows, found.later) == ([25, 26, 27, 28, 29], 30)
    assert shown.find(Query("eel/"), 30, 5).rows[0] == 50
    assert chunks_read == list("0123456"), "the last one is kept from the search before"


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
    flip(damaged.shard_path(0), 20)
    read = Catalogue(str(damaged.path)).read(range(8))
    assert [row for row, each in enumerate(read) if isinstance(each, str)] == [0]
    assert "damaged at row 0" in str(read[0])
