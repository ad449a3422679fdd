"""Read-ahead: the right bytes of the right files, and silence once everything is in memory."""

import mmap
import threading
from collections.abc import Generator, Iterable
from unittest.mock import Mock

import numpy as np
import pytest

import precache
from precache.reading import readahead
from precache.reading.array_reader import ArrayReader
from precache.reading.readahead import ReadAhead
from precache.reading.version_reader import VersionReader
from precache.runtime.step_clock import ThreadTime
from precache.storage import local_files
from tests.conftest import BuiltStore


def _around(
    store: BuiltStore, batches: Iterable[np.ndarray], ahead: ReadAhead
) -> Generator[np.ndarray, None, None]:
    return ahead.around(list(VersionReader(str(store.path)).readers.values()), batches, 2)


def test_batches_come_in_order_each_advised_ahead(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised, ahead = list[int](), ReadAhead(ThreadTime())
    monkeypatch.setattr(ahead, "advise", lambda _, rows: advised.append(int(rows[0])))
    found = []
    for rows in _around(image_store, (np.array([n]) for n in range(6)), ahead):
        found.append(int(rows[0]))
        assert len(advised) >= min(6, len(found))
    assert found == list(range(6))
    assert sorted(advised) == list(range(6))


def test_advice_ends_when_nothing_comes_from_the_disk_and_begins_again(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, advise = 0, Mock()
    monkeypatch.setattr(readahead, "_blocks_read", lambda: blocks)
    monkeypatch.setattr(ArrayReader, "will_need", advise)
    ahead = ReadAhead(ThreadTime())
    list(_around(image_store, [np.arange(1)] * 9, ahead))
    assert advise.call_count == 1
    blocks += 8
    list(_around(image_store, [np.arange(1)] * 9, ahead))
    assert advise.call_count == 2


def test_the_kernel_is_told_where_each_row_lies(
    store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, libc = list[tuple[int, int, int]](), Mock()
    libc.madvise = lambda *call: told.append(call)
    with precache.Loader(store.path, 21, shuffle=False) as loader:
        rows = loader.version.valid.nonzero()[0]
        [reader] = loader._source.reader.readers.values()
        places = reader._objects.locate(rows)
        bases = [reader._objects.sources[n].obj.ctypes.data for n in places.objects.tolist()]
        monkeypatch.setattr(local_files, "_libc", lambda: libc)
        list(loader)
    starts, lengths = bases + places.starts, places.lengths
    sizes = [len(reader._objects.sources[n]) for n in places.objects.tolist()]
    assert (places.starts + lengths <= sizes).all()
    before = starts % mmap.PAGESIZE
    wanted = zip(starts - before, lengths + before, strict=True)
    assert {call[:2] for call in told} == {*wanted}
    assert {advice for *_, advice in told} == {mmap.MADV_WILLNEED}
    assert len(told) == len({*places.chunks})


def _advising() -> int:
    return sum(each.name.startswith("precache-readahead") for each in threading.enumerate())


def test_closing_early_joins_the_thread(image_store: BuiltStore) -> None:
    before = _advising()
    batches = _around(image_store, [np.arange(3)] * 50, ReadAhead(ThreadTime()))
    next(batches)
    assert _advising() == before + 1
    batches.close()
    assert _advising() == before
