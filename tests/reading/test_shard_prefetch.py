"""Training from a URL: shards fetched ahead of need, once, checked, whatever the network does."""

import contextlib
import errno
import gc
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
import torch.utils.data
import zarr

import precache
from precache import Reading
from precache.errors import DamageError, StorageError, StoreError, UsageError
from precache.loading import stream
from precache.reading import shard_files, shard_prefetch
from precache.reading.disk_cache import OVERHEAD, DiskCache, on_disk
from precache.reading.shard_files import MappedShardFiles
from precache.reading.shard_prefetch import ShardPrefetcher, _Shard
from precache.storage.file_lock import remove_if_free
from precache.storage.open import open_folder
from precache.store.tree import Leaf
from tests.conftest import BuiltStore
from tests.support.building import environment, flip, poll, put_photos, running
from tests.support.loaders import flat, rows_as_stored, valid_rows
from tests.support.servers import FaultProxy, S3Server, stalled, status, wrong_bytes


@dataclass
class Remote:
    """The store `large` in a bucket, read by loaders with a cache in `folder`."""

    store: BuiltStore
    url: str
    s3: S3Server
    proxy: FaultProxy
    folder: Path

    def open(self, cache: Any = None, size: int = 16, **more: Any) -> precache.Loader:
        options = self.s3.options(self.proxy.port)
        return _cached(self.url, options, self.folder if cache is None else cache, size, **more)

    def read(self, loader: precache.Loader) -> None:
        """Read an epoch, which must have every valid row, with its pixels."""
        assert_whole(loader, self.store)


@pytest.fixture(scope="module")
def large(image_folder: Callable[..., Path], make_store: Callable[..., BuiltStore]) -> BuiltStore:
    """160 rows, one of them a hole, in 16 shards of 10."""
    source = image_folder(159, broken=1)
    return make_store(source, precache.Recipe.image(codec="zstd"), shard_samples=10)


@pytest.fixture(scope="module")
def url(large: BuiltStore, s3: S3Server) -> str:
    """The store in a bucket."""
    precache.pull(large.path, "s3://bucket/large", storage_options=s3.options())
    return "s3://bucket/large"


@pytest.fixture
def remote(large: BuiltStore, url: str, s3: S3Server, proxy: FaultProxy, tmp_path: Path) -> Remote:
    return Remote(large, url, s3, proxy, tmp_path)


def cache_bytes(store: BuiltStore, shards: int) -> int:
    """A limit that holds so many shards."""
    return OVERHEAD + shards * max(map(on_disk, _sizes(store)))


def in_use(folder: Path) -> list[str]:
    """Objects of a cache that loaders are about to read, and versions that they read."""
    objects = (folder / "objects").glob("*")
    kept = [path.name for path in objects if path.stat().st_mtime_ns > time.time_ns()]
    versions = [path.name for path in (folder / "versions").glob("*") if not remove_if_free(path)]
    return kept + versions


def _sizes(store: BuiltStore) -> list[int]:
    return [leaf.size for leaf in store.open().shard_leaves("image")]


def _cached(
    url: str, options: dict[str, Any], folder: Any, size: int = 16, **more: Any
) -> precache.Loader:
    return precache.Loader(url, size, device="cpu", cache=folder, storage_options=options, **more)


def assert_whole(batches: Iterable[Any], store: BuiltStore) -> None:
    """Every valid row is there once, with its pixels."""
    assert sorted(rows_as_stored(batches, store)) == valid_rows(store)


def shards_asked(proxy: FaultProxy) -> Counter[str]:
    """Requests for each shard."""
    found: Counter[str] = Counter()
    for (method, path), count in proxy.seen.items():
        if method == "GET" and re.search(r"/image/c/\d+/0/0/0$", path):
            found[path] += count
    return found


# --- what is fetched ----------------------------------------------------------------------------


def test_each_shard_comes_once_and_the_next_epoch_asks_for_nothing(
    remote: Remote, large: BuiltStore, proxy: FaultProxy
) -> None:
    with remote.open(size=32) as loader:
        remote.read(loader)
        fetched = loader.stats().fetched
        assert (fetched.objects, fetched.nbytes) == (16, sum(_sizes(large)))
        assert [*shards_asked(proxy).values()] == [1] * 16
        asked = sum(proxy.seen.values())
        remote.read(loader)
        assert sum(proxy.seen.values()) == asked
        assert loader.stats().fetched.objects == 0
    with remote.open(size=32, shuffle="full") as loader:
        for batches in zip(*zip(loader, loader, strict=True), strict=True):  # at once
            assert_whole(batches, large)
        assert loader.stats().fetched.objects == 0


def test_training_starts_with_the_first_shards(remote: Remote) -> None:
    """The server hands out half of the shards, and no more before the first batch is there."""
    handed, first_batch = set[str](), threading.Event()

    def hold(method: str, path: str) -> None:
        if "/image/c/" in path and path not in handed:
            if len(handed) == 8:  # more than are fetched before any is read, in whatever order
                assert first_batch.wait(60)
            handed.add(path)

    remote.proxy.before = hold
    with remote.open(size=8, shuffle=precache.Block(2)) as loader:
        batches = iter(loader)
        next(batches)
        first_batch.set()
        assert len(list(batches)) == len(loader) - 1


def test_a_cache_of_half_the_store_keeps_some_of_it_over_the_epochs(remote: Remote) -> None:
    cache = precache.Cache(remote.folder, cache_bytes(remote.store, 8))
    with remote.open(cache, 8) as loader:
        for number in range(3):
            remote.read(loader)
            fetched = loader.stats().fetched.objects
            assert fetched == 16 if number == 0 else 4 <= fetched <= 14
        shuffle = {"kind": "block", "block": 10, "window": 2, "nodes": 1}
        assert loader.state_dict()["shuffle"] == shuffle


@pytest.mark.parametrize(
    "number", [*range(16, 24), *(pytest.param(n, marks=pytest.mark.heavy) for n in range(16))]
)
def test_any_order_is_read_within_any_limit(
    number: int, large: BuiltStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first batch that is not read yet goes beyond the limit; it waits for no room.

    What is mixed at a time stays for the batches after it.
    """
    draw = random.Random(number)
    precache.pull(large.path, "memory://any-order")
    nodes = draw.choice([1, 1, 2])
    options: dict[str, Any] = {
        "shuffle": draw.choice([False, "full", "block", "block"]),
        "batch_size": nodes * draw.choice([1, 4, 20, 79]),
        "reading": precache.Reading(draw.choice([1, 4]), draw.choice([None, 1, 9])),
    }
    mixed = draw.choice([1, 3, 9]) if options["shuffle"] == "block" else 0
    if mixed:
        options["shuffle"] = precache.Block(mixed, nodes)
    shards = draw.choice([0, 1, 7])
    limit, taken, obtain = cache_bytes(large, shards) if shards else 0, [0], DiskCache.obtain

    def measured(*given: Any, **more: Any) -> Any:
        found = obtain(*given, **more)
        taken.append(_taken(tmp_path, [os.getpid()]))
        return found

    monkeypatch.setattr(DiskCache, "obtain", measured)
    monkeypatch.setattr(stream, "PART_NBYTES", draw.choice([1, 9 << 20]))
    cache = precache.Cache(tmp_path, limit)
    with _cached("memory://any-order", {}, cache, options.pop("batch_size"), **options) as loader:
        for number in range(2):
            assert_whole(loader, large)
            first = max(len(np.unique(rows // 10)) for rows in loader.order.epoch(number))
            assert max(taken) <= cache_bytes(large, shards + first + mixed)
    assert in_use(tmp_path) == []
    DiskCache(tmp_path, limit).join("other").close()
    kept = sum(on_disk(path.stat().st_size) for path in (tmp_path / "objects").iterdir())
    assert kept <= max(0, limit - OVERHEAD)


def test_a_loader_that_follows_a_build_goes_on_where_most_samples_are_bad(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A batch takes rows of 16 shards there, of two elsewhere."""
    source = image_folder(60, (16, 16))
    photo, last = min(source.glob("*/*")).read_bytes(), max(source.iterdir())
    for number in range(400):
        data = photo if number % 20 == 0 else b"no image"
        (last / f"z{number:03}.jpg").write_bytes(data)
    build: dict[str, Any] = {"address": "serial", "max_failures": 400, "keep_order": True}
    precache.build(source, tmp_path / "built", shard_samples=20, **build)
    precache.pull(tmp_path / "built", "memory://mostly-bad")
    version = precache.open("memory://mostly-bad")
    version.followed = True
    with _cached(version, {}, tmp_path / "cache") as loader:  # type: ignore[arg-type]
        assert len({*flat(loader)}) == 80


def test_the_log_names_what_a_batch_waits_for(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_prefetch, "STALL_SECONDS", 0.05)

    def waits() -> list[str]:
        return [message for message in caplog.messages if "as shard 3 " in message]

    def hang(method: str, path: str) -> None:
        if path.endswith("/image/c/3/0/0/0"):
            poll(waits, "the log says so")

    remote.proxy.before = hang
    with remote.open(shuffle=False) as loader:
        remote.read(loader)
    assert f"{loader.version.path}: nothing was read for 0 s" in waits()[0]
    assert waits()[0].endswith("as shard 3 (image/c/3/0/0/0) is being fetched")


@pytest.mark.parametrize("part", [1, 1 << 30])
def test_an_early_end_leaves_no_thread_and_holds_nothing(
    part: int, url: str, large: BuiltStore, s3: S3Server, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stream, "PART_NBYTES", part)
    before = threading.active_count()
    with _cached(url, s3.options(), tmp_path, 8) as loader:
        threads = threading.active_count()
        for _ in loader:
            break
        poll(lambda: threading.active_count() <= threads, "the threads end")
        assert in_use(tmp_path) == [loader.version.id]
        assert_whole(loader, large)
    assert in_use(tmp_path) == []
    assert threading.active_count() <= before + 1  # fsspec's own


def test_an_iterator_collected_on_a_thread_that_fetches_for_it_ends(
    large: BuiltStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precache.pull(large.path, "memory://collected")
    begun, dropped, first = threading.Event(), threading.Event(), set[int]()
    fetch = shard_prefetch.ShardPrefetcher._fetch

    def collecting(
        self: shard_prefetch.ShardPrefetcher, objects: Any, number: int, target: int
    ) -> None:
        if number not in first and not begun.is_set():  # batches being decoded wait for it
            begun.set()
            dropped.wait(60)
            gc.collect()
        fetch(self, objects, number, target)

    class Trainer:
        def __init__(self, batches: Iterator[Any]) -> None:
            self.batches, self.itself = batches, self

    monkeypatch.setattr(shard_prefetch.ShardPrefetcher, "_fetch", collecting)
    before = threading.active_count()
    how: dict[str, Any] = {
        "shuffle": precache.Block(2),
        "reading": Reading(prefetch_batches=3, num_threads=2),
    }
    loader = _cached("memory://collected", {}, tmp_path, 8, **how)
    first.update((next(loader._source.order.epoch(0)) // 10).tolist())
    gc.disable()
    try:
        trainer = Trainer(iter(loader))
        next(trainer.batches)
        assert begun.wait(60)
        del trainer
        dropped.set()
        poll(lambda: threading.active_count() <= before, "the threads end")
    finally:
        gc.enable()

    def is_left() -> bool:
        """By the threads, of which others may have been counted; and by errors of theirs."""
        gc.collect()
        return in_use(tmp_path) == [loader.version.id]

    poll(is_left, "no object is in use")
    assert_whole(loader, large)
    loader.close()


def _fake_shards(names: str, obtain: Callable[..., bool | None]) -> Any:
    """Shards of one byte in each field, which a function obtains by name."""
    one, rows = [SimpleNamespace(size=1)], SimpleNamespace(rows_per_shard=1)
    return SimpleNamespace(
        arrays={n: Mock(expected=one, cached_name=lambda number, n=n: n) for n in names},
        cache=SimpleNamespace(room=9, obtain=obtain),
        count=lambda size: None,
        nbytes=lambda number: 1,
        version=SimpleNamespace(path="", attributes=rows),
    )


def test_a_shard_that_nobody_waits_for_and_has_room_for_one_field_holds_nothing() -> None:
    """Its batches failed while it was fetched ahead."""
    shards = _fake_shards("ab", lambda name, *_, **__: name == "a" or None)
    prefetcher = ShardPrefetcher(shards, "ab")
    assert not prefetcher._obtain(_Shard(), 0, at_once=False)
    assert [field.end.call_count for field in shards.arrays.values()] == [1, 1]
    prefetcher.close()


def test_a_shard_that_is_refused_before_its_fetch_is_kept_is_asked_for_again() -> None:
    """The fetch thread goes as far as it can before the thread that asks."""
    far, entered, lock, asked = threading.Event(), itertools.count(), threading.Lock(), list[bool]()

    class WatchedLock:
        def __enter__(self) -> None:
            assert next(entered) < 99, "it is asked for ever"
            if threading.current_thread().name.startswith("precache-fetch"):
                far.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def obtain(*_: Any, at_once: bool) -> bool | None:
        asked.append(at_once)
        return False if at_once else None

    prefetcher: Any = ShardPrefetcher(_fake_shards("a", obtain), "a")
    prefetcher._lock, submit = WatchedLock(), prefetcher._pool.submit

    def submit_and_let_run(*work: Any) -> Any:
        far.clear()
        future = submit(*work)
        future.add_done_callback(lambda _: far.set())
        assert far.wait(60)
        return future

    prefetcher._pool.submit = submit_and_let_run
    with contextlib.closing(prefetcher):
        [rows] = prefetcher.around([np.array([0])])
        prefetcher.wait(rows)
    assert asked == [False, True]


def test_a_loader_that_is_refused_holds_nothing(url: str, s3: S3Server, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="label is not among") as kept:
        _cached(url, s3.options(), tmp_path, fields=["image"], output="tuple")
    assert in_use(tmp_path) == []
    del kept
    # A group of other software has no checksums.
    store = zarr.storage.FsspecStore.from_url("memory://foreign.zarr")
    zarr.create_array(store, name="x", data=np.arange(24, dtype="u1").reshape(4, 6))
    with pytest.raises(StoreError, match="no checksums, which a cache needs"):
        _cached("memory://foreign.zarr", {}, tmp_path, 2, fields={"x": "x"})


def test_what_is_free_on_a_disk_does_not_change_the_order(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    for rank, free in enumerate((10**12, int(1.5 * cache_bytes(remote.store, 16)))):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, usage=usage: usage)
        with remote.open(tmp_path / str(rank), rank=rank, world_size=2) as loader:
            rows += flat(loader)
    assert sorted({*rows}) == valid_rows(remote.store)


def test_a_cache_of_a_local_store_changes_nothing(image_store: BuiltStore, tmp_path: Path) -> None:
    with _cached(str(image_store.path), {}, tmp_path / "c", 2) as loader:
        assert loader.state_dict()["shuffle"]["kind"] == "full"  # it is on a local disk


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.heavy)])
def test_a_dataset_reads_by_range_in_any_kind_of_worker(
    context: str, url: str, large: BuiltStore, s3: S3Server
) -> None:
    dataset = precache.CachedDataset(url, storage_options=s3.options())
    assert int(dataset[0]["row"]) == 0  # which starts whatever threads there are, before the fork
    some = torch.utils.data.Subset(dataset, [3, 140, 77, 5, 6, 7])
    loader = torch.utils.data.DataLoader(
        some, 2, num_workers=2, multiprocessing_context=context, collate_fn=dataset.collate
    )
    valid = valid_rows(large)
    assert rows_as_stored(loader, large) == [valid[n] for n in (3, 140, 77, 5, 6, 7)]


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_answers_that_stall_for_half_a_minute_are_waited_for(
    remote: Remote, s3: S3Server, proxy: FaultProxy
) -> None:
    proxy.faults["GET", "/image/c/3/0/0/0"] = [stalled(30.0)]
    with remote.open() as loader:
        remote.read(loader)
    assert proxy.requests("GET", "/image/c/3/0/0/0") == 1
    photos = "s3://bucket/stalled-photos"
    put_photos(open_folder(photos, s3.options()))
    proxy.faults["GET", "/cat/03.jpg"] = [stalled(30.0)]
    how = [("well", s3.options()), ("ill", s3.options(proxy.port))]
    results = [
        precache.build(photos, f"{photos}-{name}", address="serial", storage_options=options)
        for name, options in how
    ]
    assert proxy.faults["GET", "/cat/03.jpg"] == []
    assert [result.failed for result in results] == [1, 1]
    assert results[0].version == results[1].version


def test_wrong_bytes_never_get_into_the_cache(
    remote: Remote, proxy: FaultProxy, tmp_path: Path
) -> None:
    shard, said = "/image/c/3/0/0/0", "is damaged .*its checksum does not hold"
    proxy.faults["GET", shard] = [wrong_bytes] * (shard_prefetch.FETCH_TRIES - 1)
    with remote.open(tmp_path / "some") as loader:
        remote.read(loader)
    proxy.faults["GET", shard] = [wrong_bytes] * 99
    all_wrong = tmp_path / "all"
    with remote.open(all_wrong) as loader, pytest.raises(DamageError, match=f"{shard} {said}"):
        flat(loader)
    assert not list((all_wrong / "objects").glob("*-image-3-*"))
    proxy.faults.clear()
    with remote.open(all_wrong) as loader:
        remote.read(loader)


def test_a_shard_that_cannot_be_had_or_is_gone_is_an_error_at_its_batch(
    url: str, large: BuiltStore, s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.faults["GET", "/image/c/3/0/0/0"] = [status(403)] * 99
    precache.pull(large.path, "memory://gone")
    fsspec.filesystem("memory").rm(f"/gone/{large.result.version}/image/c/3/0/0/0")
    gone = r"memory://gone/.*/c/3/0/0/0 is missing at row .* removed; open"
    for store, options, error, said in (
        (url, s3.options(proxy.port), StorageError, r"cannot read s3://bucket/large/.*/c/3/0/0/0"),
        ("memory://gone", {}, DamageError, gone),
    ):
        with _cached(store, options, tmp_path, shuffle=False) as loader:
            batches = iter(loader)
            assert next(batches)["row"].tolist()[0] == 0
            with pytest.raises(error, match=said):
                list(batches)


def _copy(folder: Path, number: int) -> Path:
    """The copy of a shard in a cache."""
    [path] = (folder / "objects").glob(f"*-image-{number}-*")
    return path


SPOILT: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "at its beginning": (lambda path: flip(path, 0.0), True),
    "in the middle": (lambda path: flip(path, 0.5), True),
    "in its index": (lambda path: flip(path, 1.0), True),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-9]), False),
    "removed": (Path.unlink, False),
}
"""How a copy went bad, and whether that is logged."""


@pytest.mark.parametrize("case", SPOILT)
def test_a_copy_that_went_bad_is_fetched_again_once(
    case: str, remote: Remote, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, is_logged = SPOILT[case]
    with remote.open() as loader:
        flat(loader)
        whole = _copy(tmp_path, 5).read_bytes()
        if not is_logged:  # by the loader that has it mapped
            spoil(_copy(tmp_path, 6))
            remote.read(loader)
            assert loader.stats().fetched.objects == 17
    spoil(_copy(tmp_path, 5))
    for again in (1, 0):
        with remote.open() as loader:
            remote.read(loader)
            assert loader.stats().fetched.objects == again
    said = f"{_copy(tmp_path, 5)} is damaged; it is fetched again"
    assert caplog.messages == [said] * is_logged
    assert _copy(tmp_path, 5).read_bytes() == whole


def test_copies_that_changed_places_are_fetched_again(
    stores: dict[str, BuiltStore], s3: S3Server, tmp_path: Path
) -> None:
    """Both are whole, of one size and in each other's place; a loader that reads stays right."""
    store = stores["raw"]
    precache.pull(store.path, "s3://bucket/swapped", storage_options=s3.options())
    assert _sizes(store)[0] == _sizes(store)[1]

    def open_loader() -> precache.Loader:
        return _cached("s3://bucket/swapped", s3.options(), tmp_path, 1, shuffle=False)

    with open_loader() as running_on:
        assert_whole(running_on, store)
        running_on.stats()
        batches = iter(running_on)
        first = next(batches)
        one, other = _copy(tmp_path, 0), _copy(tmp_path, 1)
        aside = tmp_path / "objects" / "aside"
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
        with open_loader() as loader:
            assert_whole(loader, store)
            fetched = loader.stats().fetched.objects
        assert_whole([first, *batches], store)
        assert_whole(running_on, store)
        assert fetched + running_on.stats().fetched.objects == 2


def test_damage_that_comes_while_a_copy_is_read_is_mended(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every thread that reads it."""
    map_checked, to_spoil = MappedShardFiles.map, {5, 9}
    one_at_a_time = threading.Lock()  # what is mapped is spoilt before anything of it is read

    def map_and_spoil(files: MappedShardFiles, number: int, *rest: Any) -> memoryview:
        with one_at_a_time:
            mapped = map_checked(files, number, *rest)
            if number in to_spoil:
                to_spoil.remove(number)
                flip(_copy(tmp_path, number), 0.5)
        return mapped

    monkeypatch.setattr(MappedShardFiles, "map", map_and_spoil)
    with remote.open(reading=Reading(num_threads=3)) as loader:
        for fetched in (18, 0):
            remote.read(loader)
            assert loader.stats().fetched.objects == fetched


def test_damage_of_the_stores_own_object_is_named(
    large: BuiltStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is what was written: to fetch it once more would bring the same."""
    precache.pull(large.path, "memory://written-badly")
    files = fsspec.filesystem("memory")
    shard = f"/written-badly/{large.result.version}/image/c/3/0/0/0"
    data = bytearray(files.cat(shard))
    data[len(data) // 2] ^= 1
    files.pipe(shard, bytes(data))
    leaves = list(large.open().shard_leaves("image"))
    leaves[3] = Leaf.of(leaves[3].name, bytes(data))
    monkeypatch.setattr(precache.Version, "shard_leaves", lambda self, name: leaves)
    with (
        _cached("memory://written-badly", {}, tmp_path) as loader,
        pytest.raises(
            DamageError, match=rf"^shard memory:/.*{shard} is damaged at row 3\d"
        ) as caught,
    ):
        flat(loader)
    assert "cache" not in str(caught.value).replace("precache", "")
    assert len(list((tmp_path / "objects").glob("*-image-3-*"))) == 1


def test_a_copy_that_cannot_be_mapped_or_reserved_is_an_error_and_no_hang(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_map, no_room = OSError("it cannot be mapped"), StorageError("cannot write to the cache")
    how: dict[str, Any] = {
        "reading": Reading(num_threads=1, prefetch_batches=4),
        "shuffle": precache.Block(1),
    }
    for holder, name, error, said in (
        (shard_files, "map_file", no_map, rf"cannot map {tmp_path}/objects/.*: it cannot be mapp"),
        (DiskCache, "_reserve", no_room, "cannot write to the cache"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, Mock(side_effect=error))
            with remote.open(size=20, **how) as loader, pytest.raises(StorageError, match=said):
                list(loader)


def test_a_full_disk_ends_the_epoch_and_not_the_cache(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, pwrite = iter(range(100)), os.pwrite

    def full(descriptor: int, data: bytes, start: int) -> int:
        if len(data) > 4096 and next(count) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, start)

    with remote.open() as loader:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            said = rf"cannot write to the cache {tmp_path}: No space"
            with pytest.raises(StorageError, match=said):
                flat(loader)
        assert list((tmp_path / "parts").iterdir()) == []
        remote.read(loader)
        assert loader.stats().fetched.objects >= 16


# --- several processes --------------------------------------------------------------------------

_TRAIN = """
import hashlib, json, sys
import numpy as np
import precache
url, cache, limit, seed, options, *window = sys.argv[1:]
with precache.Loader(
    url, 8, seed=int(seed), device="cpu", cache=precache.Cache(cache, int(limit)),
    storage_options=json.loads(options), reading=precache.Reading(num_threads=1),
    shuffle=precache.Block(int(window[0])) if window else True,
) as loader:
    for epoch in range(3):
        rows = {}
        for number, batch in enumerate(loader):
            for row, pixels in zip(batch["row"].tolist(), batch["image"].numpy()):
                rows[row] = hashlib.sha256(pixels.tobytes()).hexdigest()
            if number == 3:
                print("going", flush=True)
        print(json.dumps(rows), flush=True)
"""


def training(
    url: str, cache: Path, limit: int, seed: int, options: dict[str, Any], *window: int
) -> Any:
    """A process that trains for three epochs."""
    settings = [url, cache, limit, seed, json.dumps(options), *window]
    return running([sys.executable, "-c", _TRAIN, *map(str, settings)], environment())


def require_epochs(outputs: list[tuple[str, str]], store: BuiltStore) -> None:
    """Each training must have read every row in each of its epochs."""
    rows = store.rows()
    digests = {
        str(row): hashlib.sha256(rows[row].tobytes()).hexdigest() for row in valid_rows(store)
    }
    for lines, _ in outputs:
        epochs = [json.loads(line) for line in lines.splitlines() if line != "going"]
        assert epochs == [digests] * 3


@pytest.mark.heavy
def test_two_loaders_share_a_small_cache_and_one_is_killed_and_begins_again(
    url: str, large: BuiltStore, s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Half the store fits; the limit is watched from outside, and every fetch counted."""
    limit = cache_bytes(large, 8)
    cache = tmp_path / "cache"

    def train(seed: int) -> Any:
        return training(url, cache, limit, seed, s3.options(proxy.port))

    with train(0) as one:
        pids = [one.pid]
        with watching(cache, pids) as most:
            with train(1) as dead:
                pids.append(dead.pid)
                assert dead.stdout.readline() == "going\n"
                os.kill(dead.pid, signal.SIGKILL)
                dead.wait()
            with train(1) as other:
                pids.append(other.pid)
                outputs = [process.communicate() for process in (one, other)]
    assert [errors for _, errors in outputs] == ["", ""]
    assert limit // 2 < max(most) <= limit
    require_epochs(outputs, large)
    asked = shards_asked(proxy)
    assert len(asked) == 16
    assert max(asked.values()) <= 3 * 3  # no loader fetches a shard twice in an epoch
    shared = precache.Cache(cache, limit)
    with _cached(url, s3.options(), shared, shuffle=precache.Block(2)) as loader:
        assert_whole(loader, large)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(4))
def test_several_processes_keep_to_a_small_limit_but_for_what_they_read(
    seed: int, url: str, large: BuiltStore, s3: S3Server, tmp_path: Path
) -> None:
    dice, cache = random.Random(seed), tmp_path / "cache"
    shards, windows = dice.choice([0, 3, 6]), [dice.choice([1, 2, 3]) for _ in range(2)]
    limit = cache_bytes(large, shards)
    with contextlib.ExitStack() as ends:
        trainings = [training(url, cache, limit, seed, s3.options(), each) for each in windows]
        processes = [ends.enter_context(each) for each in trainings]
        with watching(cache, [process.pid for process in processes]) as most:
            outputs = [process.communicate(timeout=240) for process in processes]
    require_epochs(outputs, large)
    assert shards or all("exceeds its limit" in errors for _, errors in outputs)
    # A batch is of as many shards as are mixed, and of the next ones.
    at_once = sum(2 * window for window in windows)
    assert max(most) <= cache_bytes(large, shards + at_once)


@contextlib.contextmanager
def watching(cache: Path, pids: list[int]) -> Iterator[list[int]]:
    """Collect the bytes that a cache takes on the disk while the block runs.

    Those of shards that were evicted while a process had them mapped are among them.
    """
    sizes, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            sizes.append(_taken(cache, pids))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield sizes
    finally:
        over.set()
        watcher.join()


def _taken(cache: Path, pids: Iterable[int]) -> int:
    """Bytes of a cache, and of what was evicted and stayed mapped while they were counted."""
    before = {entry for pid in pids for entry in _evicted(cache, pid)}
    usage = _disk_usage(cache)
    after = {entry for pid in pids for entry in _evicted(cache, pid)}
    return usage + sum(dict(before & after).values())


def _evicted(cache: Path, pid: int) -> Iterator[tuple[str, int]]:
    """Inode and bytes of what a process has mapped, and is no longer in a cache."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if str(cache) in line and line.endswith("(deleted)"):
                bounds, _, _, _, inode, *_ = line.split()
                start, end = (int(bound, 16) for bound in bounds.split("-"))
                yield inode, end - start


def _disk_usage(folder: Path) -> int:
    blocks = {}
    for root, _, names in os.walk(folder):
        for path in (root, *(f"{root}/{name}" for name in names)):
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                status = os.lstat(path)
                blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def test_two_loaders_at_once_fetch_each_shard_once_where_all_fit(remote: Remote) -> None:
    start = threading.Barrier(2)

    def train(seed: int) -> None:
        with remote.open(seed=seed, shuffle=precache.Block(2)) as loader:
            start.wait()
            remote.read(loader)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    assert set(shards_asked(remote.proxy).values()) == {1}
