"""Rows read by ranges: the same as from a map, with few requests, and damage named."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache import Reading
from precache.errors import DamageError, StorageError, StoreError
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import RangedShardFiles
from precache.runtime import threads
from precache.storage.base import Range
from precache.storage.local import LocalFolder
from tests.conftest import BuiltStore
from tests.reading.test_array_reader import read_rows
from tests.reading.test_shard_prefetch import in_use
from tests.support.building import flip, poll
from tests.support.loaders import opened, rows_as_stored, valid_rows
from tests.support.servers import Fault, FaultProxy, S3Server, reset, status, truncated


def _reader(version: precache.Version) -> ArrayReader:
    return ArrayReader(version, "image", objects=RangedShardFiles(version, "image"))


@dataclass(frozen=True)
class CountedFolder(LocalFolder):
    """Keeps what is read of it."""

    asked: tuple[list[Range], ...] = ([],)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        self.asked[0].extend(ranges)
        return super().read_ranges(ranges)


def test_an_index_is_read_once_and_neighbours_together(stores: dict[str, BuiltStore]) -> None:
    version = stores["raw"].open()
    folder = CountedFolder(Path(version.path), asked=([],))
    version.folder = folder
    reader = _reader(version)
    read_rows(reader, [3, 1, 2, 1, 9])
    pitch = reader.array.row_nbytes + 4
    size = 8 * pitch
    assert folder.asked[0] == [
        ("image/c/0/0/0/0", size, 132),
        ("image/c/1/0/0/0", size, 132),
        ("image/c/0/0/0/0", pitch, 3 * pitch),
        ("image/c/1/0/0/0", pitch, pitch),
    ]
    folder.asked[0].clear()
    read_rows(reader, [0, 4])
    assert folder.asked[0] == [("image/c/0/0/0/0", 0, pitch), ("image/c/0/0/0/0", 4 * pitch, pitch)]


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture
def own(
    stores: dict[str, BuiltStore], copy_store: Callable[[BuiltStore], BuiltStore]
) -> BuiltStore:
    """A store whose bytes a test may change."""
    return copy_store(stores["image"])


HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a chunk": (lambda path: flip(path, 100, 0x10), "is damaged"),
    "the index": (lambda path: flip(path, -9, 0x10), "index fails its CRC32C"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:50]), "index fails its CRC32C"),
    "empty": (lambda path: path.write_bytes(b""), "index fails"),
    "missing": (Path.unlink, "is missing at row .* has lost it, or is being removed; open"),
}


@pytest.mark.parametrize("case", HARMS)
def test_damage_is_named_by_shard_and_key(case: str, own: BuiltStore) -> None:
    harm, reason = HARMS[case]
    harm(own.shard_path(1))
    version = own.open()
    reader = _reader(version)
    with pytest.raises(DamageError, match=reason) as caught:
        read_rows(reader, list(range(8, 16)))
    assert "image/c/1/0/0/0" in str(caught.value)
    assert any(repr(key) in str(caught.value) for key in version.keys[8:16])
    expected = own.rows()
    np.testing.assert_array_equal(read_rows(reader, [0, 20]), expected[[0, 20]])


def test_a_file_that_is_cut_while_it_is_read_is_an_error(own: BuiltStore) -> None:
    reader = _reader(own.open())
    read_rows(reader, [8])
    path = own.shard_path(1)
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(DamageError, match="shorter than its index says"):
        read_rows(reader, [9])


@pytest.mark.parametrize("mapped", [False, True])
def test_a_version_that_is_removed_while_it_is_read_says_so(mapped: bool, own: BuiltStore) -> None:
    """What a map holds is read on."""
    reader = ArrayReader(own.open(), "image") if mapped else _reader(own.open())
    expected = own.rows()
    read_rows(reader, [0])
    shutil.rmtree(own.path)
    if mapped:
        np.testing.assert_array_equal(read_rows(reader, [0, 3]), expected[[0, 3]])
    with pytest.raises(StoreError, match=r"was removed; open the store's"):
        read_rows(reader, [8])


# --- from afar ----------------------------------------------------------------------------------


def test_an_epoch_by_range_through_a_bad_network_is_right(
    stores: dict[str, BuiltStore], s3: S3Server, proxy: FaultProxy
) -> None:
    """A request in twenty fails, by a seeded choice."""
    store, url = stores["raw"], "s3://bucket/unsteady"
    precache.pull(store.path, url, storage_options=s3.options())
    random, faults = np.random.default_rng(5), [status(503), status(429), reset, truncated]
    failed = []

    def choose(method: str, path: str) -> Fault | None:
        if method != "GET" or random.random() >= 0.05:
            return None
        failed.append(path)
        return faults[len(failed) % len(faults)]

    proxy.choose = choose
    while len(failed) < len(faults):
        with opened(url, 4, storage_options=s3.options(proxy.port)) as loader:
            assert sorted(rows_as_stored(loader, store)) == valid_rows(store)


@pytest.mark.parametrize("cached", [False, True])
def test_an_early_end_does_not_wait_for_a_server_that_hangs(
    stores: dict[str, BuiltStore],
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_collection: None,
    *,
    cached: bool,
) -> None:
    monkeypatch.setattr(threads, "GRACE", 0.05)
    store = stores["raw"]
    precache.pull(store.path, f"s3://bucket/hangs{cached}", storage_options=s3.options())
    how: dict[str, Any] = {
        "storage_options": s3.options(proxy.port),
        "cache": tmp_path / "cache" if cached else None,
        "reading": Reading(num_threads=2),
    }
    with opened(f"s3://bucket/hangs{cached}", 4, False, **how) as loader:
        before = threading.active_count()
        asked, answer = threading.Event(), threading.Event()

        def hang(method: str, path: str) -> None:
            if path.endswith("/image/c/1/0/0/0"):
                asked.set()
                assert answer.wait(60)

        proxy.before = hang
        for _ in loader:
            assert asked.wait(60)
            break
        [left] = [r.message for r in caplog.records if r.name == "precache.runtime.threads"]
        assert left == f"a request to {loader.version.path} is left behind: it is not answered"
        assert not answer.is_set()
        answer.set()
        rows_as_stored(loader, store)
        proxy.stop()
        poll(lambda: threading.active_count() <= before, "what was left behind ends")
    if cached:
        poll(lambda: in_use(tmp_path / "cache") == [], "what was left behind lets go")


def test_ctrl_c_does_not_wait_for_a_server_that_hangs(
    stores: dict[str, BuiltStore], s3: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "GRACE", 60)
    precache.pull(stores["raw"].path, "s3://bucket/pressed", storage_options=s3.options())
    main, answer = threading.main_thread().ident, threading.Event()
    assert main is not None
    not_pressed = threading.Semaphore()

    def hang(method: str, path: str) -> None:
        if path.endswith("/image/c/0/0/0/0"):
            if not_pressed.acquire(blocking=False):  # a shard may be several requests
                time.sleep(1)  # a signal as the main thread begins to wait is seen after the wait
                signal.pthread_kill(main, signal.SIGINT)
            assert answer.wait(90)

    proxy.before = hang
    options = s3.options(proxy.port)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            precache.Loader("s3://bucket/pressed", 4, storage_options=options) as loader,
            pytest.raises(KeyboardInterrupt),
        ):
            list(loader)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not answer.is_set()
    answer.set()
