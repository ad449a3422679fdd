"""On a CUDA device: the same pixels by every way, memory that stays valid, a right clock."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import precache
from precache import nvcomp
from precache import transforms as T
from precache.codecs import filter_image, undo_image
from precache.errors import DamageError
from precache.slots import undo_image_tensor
from tests.conftest import BuiltStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
needs_nvcomp = pytest.mark.skipif(not nvcomp.available(), reason="nvCOMP is not installed")

Epoch = list[dict[str, np.ndarray]]


def _epoch(loader: precache.Loader) -> Epoch:
    return [{name: each.cpu().numpy() for name, each in batch.items()} for batch in loader]


def _assert_same(found: Epoch, expected: Epoch) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def on_host(store: BuiltStore) -> Iterator[Epoch]:
    with precache.Loader(store.path, 4, seed=2, device="cpu") as loader:
        yield _epoch(loader)


def test_batches_on_the_device_are_those_of_the_host(store: BuiltStore, on_host: Epoch) -> None:
    with precache.Loader(store.path, 4, seed=2, device="cuda") as loader:
        assert all(each.is_cuda for batch in loader for each in batch.values())
        loader.set_epoch(0)
        _assert_same(_epoch(loader), on_host)


def test_a_resident_version_gives_the_same_batches(store: BuiltStore, on_host: Epoch) -> None:
    with precache.Loader(store.path, 4, seed=2, device="cuda", resident="device") as loader:
        _assert_same(_epoch(loader), on_host)


@needs_nvcomp
@pytest.mark.parametrize("codec", ["zstd", "image"])
def test_frames_decompressed_on_the_device_give_the_same_batches(
    codec: str, stores: dict[str, BuiltStore], caplog: pytest.LogCaptureFixture
) -> None:
    path = stores[codec].path
    with precache.Loader(path, 4, seed=2, device="cpu") as loader:
        expected = [_epoch(loader) for _ in range(3)]
    with precache.Loader(path, 4, seed=2, device="cuda", decompress="device") as loader:
        for each in expected:
            _assert_same(_epoch(loader), each)
    assert not caplog.records


@needs_nvcomp
def test_a_damaged_frame_is_named_before_it_reaches_the_device(
    stores: dict[str, BuiltStore], copy_store: Callable[[BuiltStore], BuiltStore]
) -> None:
    store = copy_store(stores["image"])
    path = store.shard_path(0)
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    loader = precache.Loader(store.path, 4, device="cuda", decompress="device")
    with loader, pytest.raises(DamageError, match=r"shard .* is damaged at row \d+ \("):
        list(loader)


def test_without_nvcomp_frames_are_decompressed_on_the_host_and_the_log_says_so(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvcomp, "available", lambda: False)
    with caplog.at_level(logging.WARNING, "precache"):
        loader = precache.Loader(stores["image"].path, 4, device="cuda", decompress="device")
    with loader:
        assert len(_epoch(loader)) == 6
    [record] = caplog.records
    assert record.message.startswith("decompressing on the host after all: nvCOMP is not inst")


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_filter_is_undone_exactly(channels: int) -> None:
    random = np.random.default_rng(channels)
    rows = random.integers(0, 256, (5, channels, 37, 41)).astype(np.uint8)
    filtered = filter_image(rows)
    found = undo_image_tensor(torch.from_numpy(filtered).cuda()).cpu().numpy()
    undo_image(filtered)
    assert np.array_equal(found, rows)
    assert np.array_equal(filtered, rows)


def test_batches_that_are_kept_stay_what_they_were(store: BuiltStore, on_host: Epoch) -> None:
    with precache.Loader(store.path, 4, seed=2, device="cuda") as loader:
        kept = list(loader)
        for _ in range(3):
            for batch in loader:
                torch.full_like(batch["image"], 7)  # takes freed memory, were there any
        found = [{name: each.cpu().numpy() for name, each in batch.items()} for batch in kept]
    _assert_same(found, on_host)


def test_a_step_that_reads_its_batch_late_reads_the_right_one(
    store: BuiltStore, on_host: Epoch
) -> None:
    """The host runs ahead of a slow device; no slot and no block may be used again too early."""
    sums = []
    with precache.Loader(store.path, 4, seed=2, device="cuda") as loader:
        for batch in loader:
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            sums.append(batch["image"].long().sum())
            del batch
    expected = [int(batch["image"].astype(np.int64).sum()) for batch in on_host]
    assert [int(each) for each in sums] == expected


def test_transforms_on_the_device_draw_as_on_the_host(stores: dict[str, BuiltStore]) -> None:
    chosen = T.Compose(T.RandomCrop(96, padding=8), T.HorizontalFlip(), T.Normalize())
    epochs = []
    for device in ("cpu", "cuda"):
        with precache.Loader(stores["image"].path, 4, device=device, transform=chosen) as loader:
            epochs.append([batch["image"].float().cpu() for batch in loader])
    for one, other in zip(*epochs, strict=True):
        torch.testing.assert_close(one, other)


def test_the_clock_tells_the_devices_time_from_the_hosts(store: BuiltStore) -> None:
    """A step that only launches work returns at once; what counts is how long the work takes."""
    with precache.Loader(store.path, 4, device="cuda") as loader:
        _epoch(loader)
        torch.cuda.synchronize()
        loader.stats()
        for _ in loader:
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        stats = loader.stats()
    assert stats.step.median > 0.01
    assert stats.stall_ratio < 0.5


def test_page_locked_memory_does_not_grow_with_epochs(store: BuiltStore) -> None:
    def held() -> int:
        gc.collect()
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    with precache.Loader(store.path, 4, device="cuda") as loader:
        _epoch(loader)
        before = held()
        for epoch in range(50):
            for number, _ in enumerate(loader):
                if number == epoch % 4:
                    break
        assert held() <= before
