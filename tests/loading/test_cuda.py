"""On a CUDA device: the same pixels by every way, memory that stays valid, a right clock."""

import contextlib
import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precache
from precache import Reading
from precache import transforms as T
from precache.codecs import nvcomp
from precache.codecs.image import filter_image, undo_image
from precache.errors import DamageError
from precache.loading.slots import STEPS_AHEAD, slots_of_a_block, undo_image_tensor
from precache.runtime.machine import MachineReader
from precache.store.layout import align
from tests.conftest import BuiltStore
from tests.support.building import flip
from tests.support.kinds import put_rows, recipe, row
from tests.support.loaders import arrays_of, assert_same_arrays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
needs_nvcomp = pytest.mark.skipif(not nvcomp.available(), reason="nvCOMP is not installed")

WAYS: dict[str, dict[str, Any]] = {
    "copied": {},
    "decompressed there": {"reading": Reading(decompress="device")},
}
"""Each where it can be had; else the host does it, and the log says so."""

Epoch = list[dict[str, np.ndarray]]


@pytest.fixture
def on_host(store: BuiltStore) -> Iterator[Epoch]:
    with precache.Loader(store.path, 4, seed=2, device="cpu") as loader:
        yield arrays_of(loader)


@pytest.mark.parametrize("resident", [None, "device"])
def test_batches_on_the_device_are_those_of_the_host(
    resident: Any, store: BuiltStore, on_host: Epoch
) -> None:
    with precache.Loader(
        store.path, 4, seed=2, device="cuda", reading=Reading(resident=resident)
    ) as loader:
        assert all(each.is_cuda for batch in loader for each in batch.values())
        loader.set_epoch(0)
        assert_same_arrays(arrays_of(loader), on_host)


@pytest.mark.parametrize("form", ["padded", "jagged", "list"])
def test_rows_that_differ_in_length_are_those_of_the_host(form: Any, tmp_path: Path) -> None:
    source = put_rows(tmp_path / "rows.pickle", [row(number) for number in range(23)])
    precache.build(source, tmp_path / "store", recipe(), address="serial", shard_samples=4)
    options: Any = {"seed": 2, "output": {"tokens": form, "points": form}}
    epochs = []
    for device in ("cpu", "cuda"):
        with precache.Loader(tmp_path / "store", 5, device=device, **options) as loader:
            epoch = []
            for batch in loader:
                parts = {n: v for n, v in batch.items() if n not in ("caption", "blob")}
                lists = {n: list(v.unbind()) if torch.is_tensor(v) else v for n, v in parts.items()}
                tensors = [v for part in lists.values() for v in part]
                assert all(v.device.type == device for v in tensors)
                epoch.append((batch["caption"], batch["blob"], [v.tolist() for v in tensors]))
            epochs.append(epoch)
    assert epochs[0] == epochs[1]


@needs_nvcomp
@pytest.mark.parametrize("codec", ["zstd", "image"])
def test_frames_decompressed_on_the_device_give_the_same_batches(
    codec: str, stores: dict[str, BuiltStore], caplog: pytest.LogCaptureFixture
) -> None:
    path = stores[codec].path
    with precache.Loader(path, 4, seed=2, device="cpu") as loader:
        expected = [arrays_of(loader) for _ in range(3)]
    with precache.Loader(
        path, 4, seed=2, device="cuda", reading=Reading(decompress="device")
    ) as loader:
        for each in expected:
            assert_same_arrays(arrays_of(loader), each)
    assert not caplog.records


@needs_nvcomp
def test_a_damaged_frame_is_named_before_it_reaches_the_device(
    stores: dict[str, BuiltStore], copy_store: Callable[[BuiltStore], BuiltStore]
) -> None:
    store = copy_store(stores["image"])
    flip(store.shard_path(0), 1000)
    loader = precache.Loader(store.path, 4, device="cuda", reading=Reading(decompress="device"))
    with loader, pytest.raises(DamageError, match=r"shard .* is damaged at row \d+ \("):
        list(loader)


def test_without_nvcomp_frames_are_decompressed_on_the_host_and_the_log_says_so(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvcomp, "available", lambda: False)
    with caplog.at_level(logging.WARNING, "precache"):
        loader = precache.Loader(
            stores["image"].path, 4, device="cuda", reading=Reading(decompress="device")
        )
    with loader:
        assert len(arrays_of(loader)) == 6
    [record] = caplog.records
    assert record.message.startswith("decompressing on the host: nvCOMP is not inst")


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_filter_is_undone_exactly(channels: int) -> None:
    random = np.random.default_rng(channels)
    rows = random.integers(0, 256, (5, channels, 37, 41)).astype(np.uint8)
    filtered = filter_image(rows)
    found = undo_image_tensor(torch.from_numpy(filtered).cuda()).cpu().numpy()
    undo_image(filtered)
    assert np.array_equal(found, rows)
    assert np.array_equal(filtered, rows)


@pytest.mark.parametrize("name", WAYS)
def test_batches_that_are_kept_stay_what_they_were_and_a_late_step_reads_the_right_one(
    name: str, store: BuiltStore, on_host: Epoch
) -> None:
    """The host runs ahead of a slow device; no slot and no block may be used again too early."""
    sums = []
    with precache.Loader(store.path, 4, seed=2, device="cuda", **WAYS[name]) as loader:
        kept = list(loader)
        for _ in range(3):
            for batch in loader:
                torch.full_like(batch["image"], 7)  # takes freed memory, were there any
        assert_same_arrays(arrays_of(kept), on_host)
        loader.set_epoch(0)
        for batch in loader:
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # torch's own
            sums.append(batch["image"].long().sum())
            del batch
    expected = [int(batch["image"].astype(np.int64).sum()) for batch in on_host]
    assert [int(each) for each in sums] == expected


def test_transforms_on_the_device_draw_as_on_the_host(stores: dict[str, BuiltStore]) -> None:
    normalize = T.Normalize([120, 110, 100], [60, 60, 60], channels_last=True)
    chosen = T.Compose([T.RandomCrop(96, padding=8), T.HorizontalFlip(), normalize])
    epochs = []
    for device in ("cpu", "cuda"):
        with precache.Loader(stores["image"].path, 4, device=device, transform=chosen) as loader:
            epochs.append([batch["image"].float().cpu() for batch in loader])
    for one, other in zip(*epochs, strict=True):
        torch.testing.assert_close(one, other)


def test_the_host_is_few_steps_ahead_of_the_device(store: BuiltStore) -> None:
    done: list[torch.cuda.Event] = []
    with precache.Loader(store.path, 1, device="cuda") as loader:
        for number, _ in enumerate(loader):
            assert all(each.query() for each in done[: max(0, number - STEPS_AHEAD)])
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # torch's own
            done.append(torch.cuda.Event())
            done[-1].record()
        assert not done[-1].query()  # else the host waited for each step


@contextlib.contextmanager
def no_waiting(loader: precache.Loader) -> Iterator[None]:
    """The host waits for nothing, after an epoch: what is made once may wait."""
    for _ in loader:
        pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# It says of itself that it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", WAYS)
def test_the_host_never_waits_for_the_device_where_marks_of_repeated_rows_are_too(
    name: str, store: BuiltStore
) -> None:
    steps = [
        T.RandomCrop(96, padding=8), T.RandomResizedCrop(64), T.HorizontalFlip(),
        T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.MixUp(10),
        T.Normalize([120, 110, 100], [60, 60, 60], torch.bfloat16, channels_last=True),
    ]  # fmt: skip
    options = {"device": "cuda", "transform": T.Compose(steps), **WAYS[name]}
    with precache.Loader(store.path, 4, **options) as loader, no_waiting(loader):
        assert len(list(loader)) == 6
    ranks: dict[str, Any] = {"rank": 1, "world_size": 2}
    with precache.Loader(store.path, 4, device="cpu", **ranks) as loader:
        expected = [batch["repeated"].tolist() for batch in loader]
    assert any(expected[-1])
    with precache.Loader(store.path, 4, device="cuda", **ranks, **WAYS[name]) as loader:
        with no_waiting(loader):
            loader.set_epoch(0)
            marks = [batch["repeated"] for batch in loader]
        assert all(mark.is_cuda for mark in marks)
        assert [mark.cpu().tolist() for mark in marks] == expected


def test_a_list_of_labels_keeps_no_images(store: BuiltStore) -> None:
    with precache.Loader(store.path, 4, device="cuda") as loader:
        arrays_of(loader)
        before = torch.cuda.memory_allocated()
        labels = [batch["label"] for batch in loader]
        torch.cuda.synchronize()
        gc.collect()
        assert torch.cuda.memory_allocated() - before < len(labels) * 112 * 112


def test_the_clock_tells_the_devices_time_from_the_hosts(store: BuiltStore) -> None:
    """A step that only launches work returns at once; what counts is how long the work takes."""
    with precache.Loader(store.path, 4, device="cuda") as loader:
        arrays_of(loader)
        torch.cuda.synchronize()
        loader.stats()
        for _ in loader:
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # torch's own
        torch.cuda.synchronize()
        stats = loader.stats()
    assert stats.step.median > 0.01
    assert stats.stall_ratio < 0.5


def _page_locked() -> int:
    """Bytes that torch has page-locked in this process, whether they are in use or cached."""
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def test_page_locked_memory_does_not_grow_with_epochs(store: BuiltStore) -> None:
    before = _page_locked()
    with precache.Loader(store.path, 4, device="cuda") as loader:
        for epoch in range(200):
            for number, _ in enumerate(loader):
                if number == epoch % 4:
                    break
        pool = loader._source.stream._pool
        block = slots_of_a_block(align(pool.nbytes), pool._keep)
        rounded = 1 << (block * align(pool.nbytes) - 1).bit_length()  # as torch does it
        after = _page_locked()
        assert after - before <= (-(-pool._keep // block) + 1) * rounded
    with precache.Loader(store.path, 4, device="cuda") as loader:
        arrays_of(loader)
    assert _page_locked() <= after  # it took what the first had given back


@pytest.mark.parametrize("name", WAYS)
def test_loops_that_end_in_any_way_leave_nothing(name: str, store: BuiltStore) -> None:
    def loop(loader: precache.Loader, epoch: int) -> None:
        for number, batch in enumerate(loader):
            batch["image"].float().mean()
            if number == epoch % 4:
                if epoch % 2:
                    raise ValueError
                break
        for one, other in zip(loader, loader, strict=False):  # two at a time
            assert one["row"].is_cuda
            assert other["row"].is_cuda

    def held() -> tuple[int, int, int]:
        with precache.Loader(store.path, 4, device="cuda", **WAYS[name]) as loader:
            for epoch in range(7):
                with contextlib.suppress(ValueError):
                    loop(loader, epoch)
        return _page_locked(), torch.cuda.memory_allocated(), threading.active_count()

    found = [held() for _ in range(5)]
    # How many batches are on their way differs; what loops left would be more after each.
    assert any(one == other for one, other in itertools.pairwise(found[1:])), found


def test_a_graph_is_captured_while_batches_are_made(store: BuiltStore, on_host: Epoch) -> None:
    """What other threads do on the device is no part of a capture, and does not end it."""
    with precache.Loader(
        store.path, 4, seed=2, device="cuda", reading=Reading(num_threads=4)
    ) as loader:
        batches, found = iter(loader), []
        first = next(batches)
        held, graph = first["image"].float(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            doubled = held * 2
        found.append({name: each.cpu().numpy() for name, each in first.items()})
        for batch in batches:
            held[: len(batch["image"])].copy_(batch["image"])
            graph.replay()
            assert torch.equal(doubled[: len(batch["image"])], batch["image"].float() * 2)
            found.append({name: each.cpu().numpy() for name, each in batch.items()})
    assert_same_arrays(found, on_host)


def _slept_on_device(seconds: float) -> Callable[[], None]:
    """A step that keeps the device busy for so long, and the host not at all."""
    cycles = 50_000_000
    # torch's own class has no types.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # the first one starts it all
    start.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch's own
    end.record()
    end.synchronize()
    wanted = int(cycles * seconds * 1e3 / start.elapsed_time(end))
    return lambda: torch.cuda._sleep(wanted)  # type: ignore[no-untyped-call]  # torch's own


def test_the_machines_gpu_is_the_one_in_use() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    torch.zeros(1, device="cuda")
    found = MachineReader().read().gpu_utilization
    assert found is not None
    assert 0 <= found <= 1


METERED = {
    "steady, shorter than a step": [0.01] * 60,
    "steady, longer than a step": [0.04] * 60,
    "bursty": [0.2 if number % 10 == 9 else 0.0 for number in range(60)],
    "long-tailed": [0.005 * (1 + number % 7) ** 1.5 for number in range(60)],
}


@pytest.mark.parametrize("waits", [False, True], ids=["queued", "waited for"])
@pytest.mark.parametrize("delays", METERED.values(), ids=METERED)
def test_the_meter_tells_how_long_the_device_had_nothing_to_do(
    delays: list[float], waits: bool
) -> None:
    """The truth: all the device's time, less what it spent in steps by events around each."""

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        made.record()
        return made

    def loader() -> Iterator[int]:
        for number, delay in enumerate(delays):
            time.sleep(delay)
            yield number

    step = _slept_on_device(0.02)
    steps = []
    metered = precache.meter(loader(), every=1000, to=[])
    first = event()
    for number in metered:
        before = event()
        step()
        steps.append((before, event()))
        if waits:
            steps[-1][1].synchronize()
        if number == len(delays) - 1:
            torch.cuda.synchronize()
            report = metered.report()
    # The last step was not over when the report was asked for, so its wait does not count either.
    busy = sum(before.elapsed_time(after) for before, after in steps[:-1])
    truth = 1 - busy / first.elapsed_time(steps[-2][1])
    assert report.stall_ratio == pytest.approx(truth, abs=0.02)
