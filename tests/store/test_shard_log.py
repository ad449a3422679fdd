"""The log of finished shards, as it lies in a version's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import StoreError
from precache.storage.base import Folder
from precache.storage.open import open_folder
from precache.store.shard_log import (
    LOG_STATE,
    FinishedShard,
    close_log,
    entry_name,
    follow_log,
    from_entry,
    read_entries,
    to_entry,
)

sizes = st.tuples(st.integers(0, 2**63), st.integers(0, 2**64 - 1))
shards = st.builds(
    FinishedShard,
    shard=st.integers(0, 10**6),
    objects=st.dictionaries(st.sampled_from(["image", "mask"]), sizes),
    holes=st.dictionaries(st.integers(0, 10**9), st.text()),
    labels=st.none() | st.lists(st.integers(-1, 999)).map(tuple),
)


@pytest.fixture(params=["disk", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    name = request.node.name.replace("[", "-").strip("]")
    return open_folder(tmp_path if request.param == "disk" else f"memory://finished/{name}")


@given(st.lists(shards))
def test_an_entry_comes_back_as_it_was(entry: list[FinishedShard]) -> None:
    assert from_entry(to_entry(entry), "x") == entry


@pytest.mark.parametrize(
    "data", [b" ", b"{}", b"[1]", b'[{"shard": -1, "objects": {}}]', b'[{"objects": {}}]']
)
def test_what_is_damaged_is_told(data: bytes) -> None:
    with pytest.raises(StoreError, match="log is damaged or forged"):
        from_entry(data, "log")


def test_entries_are_read_from_a_number_on(folder: Folder) -> None:
    assert read_entries(folder, 0) == []
    entries = [[FinishedShard(shard=n, objects={"image": (n, n)})] for n in range(5)]
    for number, entry in enumerate(entries):
        assert folder.create(entry_name(number), [to_entry(entry)])
    assert read_entries(folder, 0) == entries
    assert read_entries(folder, 3) == entries[3:]
    assert read_entries(folder, 5) == []


def test_an_entry_that_is_being_created_lists_nothing_yet(folder: Folder) -> None:
    entry = [FinishedShard(shard=1, objects={"image": (1, 1)})]
    folder.put(entry_name(0), [b""])
    folder.put(entry_name(1), [to_entry(entry)])
    assert read_entries(folder, 0) == [[], entry]


def test_whoever_is_first_decides_whether_a_log_is_followed(folder: Folder) -> None:
    assert follow_log(folder)
    assert follow_log(folder)
    assert close_log(folder, "tmp")
    folder.remove(LOG_STATE)
    assert not close_log(folder, "tmp")
    assert not close_log(folder, "tmp")
    assert not follow_log(folder)
