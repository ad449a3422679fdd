"""The log that a build's driver writes for those who follow it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from precache.storage.local import LocalFolder
from precache.store.receipts import Receipt, ShardObject
from precache.store.shard_log import FinishedShard, read_entries
from precache_workers.driver import shard_log_writer
from precache_workers.driver.shard_log_writer import ShardLogWriter
from tests.support.building import poll


def receipt(shard: int) -> Receipt:
    objects = {"image": ShardObject(100 + shard, 2**63 + shard, 400)}
    return Receipt(
        shard=shard,
        objects=objects,
        holes={shard * 10: "broken"},
        content=["00", "11"],
        sums={},
        seconds={},
        cpu_seconds=0.0,
    )


def logged(folder: LocalFolder) -> list[list[int]]:
    return [[each.shard for each in entry] for entry in read_entries(folder, 0)]


def test_an_entry_has_all_that_came_within_a_second(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    log = ShardLogWriter(folder, [])
    log.add(receipt(7))
    poll(lambda: logged(folder) == [[7]], "the first one is logged at once")
    for shard in (3, 9, 1):
        log.add(receipt(shard))
    log.end()
    log.end()
    assert [shard for entry in logged(folder) for shard in entry] == [7, 3, 9, 1]
    assert len(logged(folder)) < 4
    [first, *_] = read_entries(folder, 0)
    assert first == [
        FinishedShard(
            shard=7, objects={"image": (107, 2**63 + 7)}, holes={70: "broken"}, labels=None
        )
    ]
    assert not [t for t in threading.enumerate() if t.name == "precache-finished"]


def test_another_driver_goes_on_where_the_log_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_log_writer, "EVERY_SECONDS", 0.0)
    folder = LocalFolder(tmp_path)
    one = ShardLogWriter(folder, [])
    one.add(receipt(2))
    poll(lambda: logged(folder) == [[2]], "it is logged")
    other = ShardLogWriter(folder, [receipt(n) for n in (4, 2, 0)])  # killed before 0 and 4 were
    poll(lambda: logged(folder) == [[2], [0, 4]], "what was missing is added")
    one.add(receipt(4))  # of a second copy of its task
    one.add(receipt(1))
    poll(lambda: logged(folder) == [[2], [0, 4], [1]], "a shard comes once")
    for log in (one, other):
        log.end()
    assert logged(folder) == [[2], [0, 4], [1]]


def test_a_store_that_cannot_be_written_ends_no_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "_build").write_text("no folder")
    log = ShardLogWriter(LocalFolder(tmp_path), [receipt(1)])
    poll(lambda: "followers of this build wait" in caplog.text, "a line in the log")
    (tmp_path / "_build").unlink()
    log.end()
    assert logged(LocalFolder(tmp_path)) == [[1]]


def test_of_no_shards_no_log_is_made(tmp_path: Path) -> None:
    ShardLogWriter(LocalFolder(tmp_path), []).end()
    assert list(tmp_path.iterdir()) == []
