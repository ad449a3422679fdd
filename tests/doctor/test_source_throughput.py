"""Reading a source at several depths."""

from __future__ import annotations

from pathlib import Path

import pytest

from precache.storage.local import LocalFolder
from precache_workers.doctor.source_throughput import DEPTHS, probe_source
from precache_workers.sources.folder import FolderSource
from tests.support.building import write_jpegs


def test_a_local_folder_is_read_at_several_depths(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 20)
    source = FolderSource(LocalFolder(tmp_path))
    table = source.list(lambda count: None).table
    found, io_wait = probe_source(source, table, 5.0)
    assert [each.depth for each in found] == [*DEPTHS]
    for each in found:
        assert each.requests == 20
        assert 0 < each.median_ms <= each.p95_ms
        mean = table.sizes.mean()
        assert each.bytes_per_s == pytest.approx(each.requests_per_s * mean)
    assert io_wait is None or io_wait >= 0
    found, _ = probe_source(source, table, 0.0)  # when the time is up, each has read something
    assert len(found) == len(DEPTHS)
    assert all(1 <= each.requests <= each.depth for each in found)
    for key in table.keys[1:]:  # files that are gone are no requests
        (tmp_path / key).unlink()
    assert {each.requests for each in probe_source(source, table, 5.0)[0]} == {1}
    (tmp_path / table.keys[0]).unlink()
    assert probe_source(source, table, 5.0)[0] == []
