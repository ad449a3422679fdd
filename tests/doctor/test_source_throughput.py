"""Reading a source at several depths."""

from __future__ import annotations

from pathlib import Path

import pytest

from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.store.row_table import RowTable
from precache_workers.doctor.source_throughput import DEPTHS, REMOTE_DEPTHS, probe_source
from precache_workers.sources.base import Source
from precache_workers.sources.folder import FolderSource
from tests.support.building import write_jpegs
from tests.support.servers import S3Server


def listed(source: Source) -> RowTable:
    return source.list(lambda count: None).table


def test_a_local_folder(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 20)
    source = FolderSource(LocalFolder(tmp_path))
    table = listed(source)
    found, io_wait = probe_source(source, table, 5.0)
    assert [each.depth for each in found] == [*DEPTHS]
    for each in found:
        assert each.requests == 20
        assert 0 < each.median_ms <= each.p95_ms
        mean = table.sizes.mean()
        assert each.bytes_per_s == pytest.approx(each.requests_per_s * mean)
    assert io_wait is None or io_wait >= 0


def test_files_that_are_gone_are_no_requests(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 4)
    source = FolderSource(LocalFolder(tmp_path))
    table = listed(source)
    (tmp_path / table.keys[0]).unlink()
    found, _ = probe_source(source, table, 5.0)
    assert {each.requests for each in found} == {3}
    for key in table.keys[1:]:
        (tmp_path / key).unlink()
    assert probe_source(source, table, 5.0)[0] == []


def test_when_the_time_is_up_each_depth_has_read_something(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 40)
    source = FolderSource(LocalFolder(tmp_path))
    found, _ = probe_source(source, listed(source), 0.0)
    assert len(found) == len(DEPTHS)
    for each in found:
        assert 1 <= each.requests <= each.depth


def test_a_bucket_is_asked_more_at_a_time(s3: S3Server, tmp_path: Path) -> None:
    write_jpegs(tmp_path, 6, classes=())
    folder = open_folder("s3://bucket/probed", s3.options())
    for path in tmp_path.iterdir():
        folder.put(path.name, [path.read_bytes()])
    source = FolderSource(folder)
    found, _ = probe_source(source, listed(source), 8.0)
    assert [each.depth for each in found] == [*REMOTE_DEPTHS]
    assert all(each.requests >= 1 for each in found)
