"""Read-ahead: the right bytes of the right files, and silence once everything is in memory."""

import os
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import precache
from precache.reading import readahead
from precache.reading.readahead import QUIET_BATCHES, ReadAhead
from precache.reading.version_reader import VersionReader
from tests.conftest import BuiltStore


def _read_ahead(store: BuiltStore) -> ReadAhead:
    return ReadAhead(list(VersionReader(str(store.path)).readers.values()))


def test_batches_come_in_order_each_advised_ahead(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised, ahead = list[int](), _read_ahead(image_store)
    monkeypatch.setattr(ahead, "advise", lambda rows: advised.append(int(rows[0])))
    found = []
    for rows in ahead.around((np.array([n]) for n in range(6)), 2):
        found.append(int(rows[0]))
        assert len(advised) >= min(6, len(found))
    assert found == list(range(6))
    assert sorted(advised) == list(range(6))


def test_advice_ends_when_nothing_comes_from_the_disk_and_begins_again(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, advise = 0, Mock()
    monkeypatch.setattr(readahead, "_blocks_read", lambda: blocks)
    monkeypatch.setattr(readahead, "_will_need", advise)
    ahead = _read_ahead(image_store)
    list(ahead.around([np.arange(1)] * 9, 2))
    assert advise.call_count == QUIET_BATCHES
    blocks += 8
    list(ahead.around([np.arange(1)], 2))
    assert advise.call_count == QUIET_BATCHES + 1


def test_the_kernel_is_told_where_each_row_lies(
    store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: told.append(rest))
    with precache.Loader(store.path, 21, shuffle=False) as loader:
        list(loader)
    [reader] = VersionReader(str(store.path)).readers.values()
    rows = loader.version.valid.nonzero()[0]
    extents = reader.extents(np.array([*rows, rows[0]]))
    assert sum(map(len, extents.values())) == len(rows)
    for path, found in extents.items():
        assert (found[:, 0] + found[:, 1] <= Path(path).stat().st_size).all()
        assert (found[:, 1] > 0).all()
    wanted = [(start, nbytes) for found in extents.values() for start, nbytes in found.tolist()]
    assert sorted((start, nbytes) for start, nbytes, _ in told) == sorted(wanted)
    assert {advice for *_, advice in told} == {os.POSIX_FADV_WILLNEED}


def _advising() -> int:
    return sum(each.name.startswith("precache-readahead") for each in threading.enumerate())


def test_closing_early_joins_the_thread(image_store: BuiltStore) -> None:
    before = _advising()
    batches = _read_ahead(image_store).around([np.arange(3)] * 50, 4)
    next(batches)
    assert _advising() == before + 1
    batches.close()
    assert _advising() == before
