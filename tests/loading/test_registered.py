"""`gather="device"`, as far as it can be told without a device."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precache
from precache.codecs import nvcomp
from precache.errors import DamageError, UsageError
from precache.loading.gpu import registered as room
from precache.loading.gpu.device_slots import DeviceSlots, FrameFailures
from precache.loading.gpu.gathering import RowOffsets, gather
from precache.loading.gpu.registered import DEVICEMAP, READ_ONLY, MappedFiles
from precache.reading.version_reader import VersionReader
from tests.conftest import BuiltStore
from tests.loading.test_decompress import stand_in_for_nvcomp
from tests.support.device import host_tensor, unpacked

CPU = torch.device("cpu")
SHARED, COPIED = DEVICEMAP | READ_ONLY, DEVICEMAP


# --- the range of addresses ---------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True])
def test_files_lie_one_behind_another_and_go_again(tmp_path: Path, private: bool) -> None:
    contents = [os.urandom(n) for n in (1, 4096, 10_000)]
    files = []
    for number, content in enumerate(contents):
        path = tmp_path / str(number)
        path.write_bytes(content)
        path.chmod(0o400)  # a store may be read-only
        files.append((path, len(content)))
    span = MappedFiles(files, private=private)
    seen = host_tensor(span).numpy()
    assert span.starts() == [0, 4096, 8192]
    assert [nbytes for _, nbytes in span.pieces] == [4096, 4096, 12288]
    for start, content in zip(span.starts(), contents, strict=True):
        assert seen[start : start + len(content)].tobytes() == content
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    span.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_file_that_is_gone_leaves_nothing_mapped(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"here")
    with pytest.raises(precache.PrecacheError, match=r"cannot map .*/gone"):
        MappedFiles([(tmp_path / "there", 4), (tmp_path / "gone", 4)], private=False)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_places_reach_beyond_four_gigabytes(tmp_path: Path) -> None:
    path, row, far = tmp_path / "sparse", 100, 5 << 30
    with path.open("wb") as file:
        file.seek(far + 4)
        file.write(bytes(range(row)))
    places = RowOffsets(np.array([4]), 1 << 40, 1, row, 1 << 20)
    span = MappedFiles([(path, far + 4 + row)], private=False)
    rows = torch.from_numpy(places.of(np.array([far >> 20])))
    found = gather(host_tensor(span), rows, row, places.unit)
    assert found.tolist() == [list(range(row))]
    span.close()


# --- the driver ---------------------------------------------------------------------------------


class Recorder:
    """Stands in for the driver: keeps what is registered, and refuses by flag or by number."""

    def __init__(self, *, refused: tuple[int, ...] = (), room: int = 100) -> None:
        self.refused, self.room = refused, room
        self.held: dict[int, tuple[int, int]] = {}

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        yield

    def register(self, address: int, nbytes: int, flags: int) -> None:
        if flags in self.refused or len(self.held) >= self.room:
            raise room._RefusedError(f"cuMemHostRegister_v2 gives NO ({flags})")
        assert address % 4096 == nbytes % 4096 == 0
        self.held[address] = (nbytes, flags)

    def unregister(self, address: int) -> None:
        del self.held[address]


class Library:
    """Stands in for libcuda: keeps the calls, and answers with a status by name."""

    def __init__(self, statuses: dict[str, int], moved: int = 0) -> None:
        self.statuses, self.moved = statuses, moved
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
            if name == "cuMemHostGetDevicePointer_v2":
                arguments[0]._obj.value = arguments[1].value + self.moved
            if name == "cuMemHostRegister_v2":
                assert [each.value for each in arguments[:2]] == [8192, 4096]
            return self.statuses.get(name, 0)

        return call


AROUND = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
AFTER = ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
REGISTER = ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"]


@pytest.mark.parametrize(
    ("statuses", "moved", "calls", "why"),
    [
        ({}, 0, [*AROUND, *REGISTER, "cuMemHostUnregister", *AFTER], None),
        (
            {"cuMemHostRegister_v2": 801},
            0,
            [*AROUND, REGISTER[0], "cuGetErrorName", *AFTER],
            r"cuMemHostRegister_v2 gives CUDA_ERROR_NOT_SUPPORTED \(801\)",
        ),
        ({}, 64, [*AROUND, *REGISTER, "cuMemHostUnregister", *AFTER], "another address"),
        ({"cuInit": 100}, 0, ["cuInit", "cuGetErrorName"], "cuInit gives"),
        (
            {"cuCtxPushCurrent_v2": 201},
            0,
            [*AROUND, "cuGetErrorName", "cuDevicePrimaryCtxRelease_v2"],
            "cuCtxPushCurrent_v2 gives",
        ),
    ],
)
def test_the_driver_is_left_as_it_was_found(
    statuses: dict[str, int],
    moved: int,
    calls: list[str],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library(statuses, moved)
    monkeypatch.setattr(room.ctypes, "CDLL", lambda name: library)
    driver = room.Driver(torch.device("cuda", 0))
    refused = pytest.raises(room._RefusedError, match=why) if why else contextlib.nullcontext()
    with refused, driver.context():
        driver.register(8192, 4096, COPIED)
        driver.unregister(8192)
    assert library.calls == calls


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Recorder], Callable[[Any], Any]]:
    """Register with a stand-in, and see what it would show a device on the host."""

    def use(driver: Recorder) -> Callable[[Any], Any]:
        monkeypatch.setattr(room, "Driver", lambda device: driver)
        monkeypatch.setattr(MappedFiles, "device_tensor", lambda span, device: host_tensor(span))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return functools.partial(room.register_shards, device=torch.device("cuda", 0))

    return use


@pytest.mark.parametrize(
    ("refused", "flags", "said"),
    [
        ((), SHARED, []),
        ((SHARED,), COPIED, ["cuMemHostRegister_v2 gives NO (10): shards are copied into "]),
        ((SHARED, COPIED), None, ["reading rows on the host: cuMemHostRegister_v2 giv"]),
    ],
)
def test_what_the_driver_refuses_is_done_another_way_and_said_once(
    refused: tuple[int, ...],
    flags: int | None,
    said: list[str],
    stores: dict[str, BuiltStore],
    as_device: Callable[[Recorder], Callable[[Any], Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Recorder(refused=refused)
    found = as_device(driver)(VersionReader(str(stores["raw"].path)))
    assert {each for _, each in driver.held.values()} == ({flags} if flags else set())
    assert len(driver.held) == (3 if flags else 0)
    assert (found is not None) == (flags is not None)
    for record, line in zip(caplog.records, said, strict=True):
        assert record.message.startswith(line)
    if found:
        found.close()
    assert not driver.held


def test_a_span_is_registered_whole_or_not_at_all(
    stores: dict[str, BuiltStore], as_device: Callable[[Recorder], Callable[[Any], Any]]
) -> None:
    driver = Recorder(room=2)
    path = stores["raw"].path
    columns = VersionReader(str(path))
    assert columns.readers["image"].plain_objects()  # mapped for the host
    gc.collect()  # a reader of another test would go meanwhile
    before = _maps_of(path)
    assert as_device(driver)(columns) is None
    assert not driver.held
    assert _maps_of(path) == before


def _maps_of(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def test_what_nobody_closes_goes_with_its_last_reference(
    stores: dict[str, BuiltStore], as_device: Callable[[Recorder], Callable[[Any], Any]]
) -> None:
    driver = Recorder()
    found = as_device(driver)(VersionReader(str(stores["raw"].path)))
    assert len(driver.held) == 3
    del found
    assert not driver.held


def test_a_forked_process_leaves_it_to_its_parent(
    stores: dict[str, BuiltStore],
    as_device: Callable[[Recorder], Callable[[Any], Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Recorder()
    found = as_device(driver)(VersionReader(str(stores["raw"].path)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        found.close()
    assert len(driver.held) == 3


# --- batches ------------------------------------------------------------------------------------


def ignoring_damage(
    memory: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, row_nbytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As nvCOMP does, which checks no checksum."""
    none = torch.zeros(len(lengths), dtype=torch.bool)
    return torch.zeros((len(lengths), row_nbytes), dtype=torch.uint8), none


@pytest.fixture
def gathering(
    as_device: Callable[[Recorder], Callable[[Any], Any]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[VersionReader], DeviceSlots]:
    """Slots whose rows are gathered from registered shards."""
    register = as_device(Recorder())
    monkeypatch.setattr(nvcomp, "decompress", stand_in_for_nvcomp)
    monkeypatch.setattr(FrameFailures, "add", lambda *arguments: None)

    def slots(columns: VersionReader) -> DeviceSlots:
        framed = {name: reader for name, reader in columns.readers.items() if reader.framed}
        return DeviceSlots(columns, 8, framed, register(columns, frames=bool(framed)), ())

    return slots


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("stores", "raw"), ("tile_stores", "raw"), ("stores", "zstd"), ("stores", "image")],
)
def test_batches_are_those_of_the_host(
    kind: str,
    codec: str,
    request: pytest.FixtureRequest,
    gathering: Callable[[VersionReader], DeviceSlots],
) -> None:
    store = request.getfixturevalue(kind)[codec]
    columns = VersionReader(str(store.path))
    slots = gathering(columns)
    assert slots.nbytes < 1000  # no pixel, and no frame, goes through a slot
    rows = columns.valid(np.array([20, 0, 7, 8, 15, 16, 20]))
    found = unpacked(slots, columns, rows)
    assert list(found) == ["image", "label", "row"]
    np.testing.assert_array_equal(found["image"], store.rows()[rows])
    assert found["label"].tolist() == columns.small["label"][rows].tolist()
    assert found["row"].tolist() == rows.tolist()
    slots.close()
    with pytest.raises(UsageError, match="this loader is closed"):
        unpacked(slots, columns, rows)


def test_each_epoch_gathers_from_its_variant(
    photos: Path,
    make_store: Callable[..., BuiltStore],
    gathering: Callable[[VersionReader], DeviceSlots],
) -> None:
    field = {
        "ops": [{"op": "decode"}, {"op": "random_resized_crop", "size": 90}],
        "codec": "raw",
        "variants": 2,
    }
    store = make_store(photos, precache.Recipe.from_dict({"fields": {"image": field}}))
    columns, rows = VersionReader(str(store.path)), np.array([3, 1])
    slots = gathering(columns)
    for epoch in range(3):
        turn = columns.at_epoch(epoch)
        expected = np.empty((2, 3, 90, 90), np.uint8)
        turn.readers["image"].read(rows, expected)
        np.testing.assert_array_equal(unpacked(slots, turn, rows)["image"], expected)
    slots.close()


@pytest.mark.parametrize(
    ("codec", "reason"), [("raw", "its CRC32C does not hold"), ("image", "a chunk does not decode")]
)
def test_rows_are_checked_on_the_host_the_first_time(
    codec: str,
    reason: str,
    stores: dict[str, BuiltStore],
    copy_store: Callable[[BuiltStore], BuiltStore],
    gathering: Callable[[VersionReader], DeviceSlots],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = copy_store(stores[codec])
    columns, row = VersionReader(str(store.path)), np.array([2])
    slots = gathering(columns)
    unpacked(slots, columns, row)
    monkeypatch.setattr(nvcomp, "decompress", ignoring_damage)
    start = int(columns.readers["image"]._objects.get(0, (0, 0, 0), 2).index[2, 0])
    with store.shard_path(0).open("r+b") as file:
        file.seek(start + 1000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert len(unpacked(slots, columns, row)["image"]) == 1
    again = VersionReader(str(store.path))
    with pytest.raises(DamageError, match=rf"is damaged at row 2 \(.*{reason}"):
        unpacked(gathering(again), again, row)


def test_too_much_is_refused_before_anything_is_mapped(
    stores: dict[str, BuiltStore],
    as_device: Callable[[Recorder], Callable[[Any], Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: 1_000_000)
    monkeypatch.setattr(room, "MappedFiles", None)
    register = as_device(Recorder())
    with pytest.raises(UsageError, match=r"has 866 KB of shards, and 1 MB of memory are"):
        register(VersionReader(str(stores["raw"].path)))


@pytest.mark.parametrize("refused", [(), (SHARED,)], ids=["shared", "copied"])
def test_copies_count_once_for_each_rank_of_the_node(
    stores: dict[str, BuiltStore],
    as_device: Callable[[Recorder], Callable[[Any], Any]],
    monkeypatch: pytest.MonkeyPatch,
    refused: tuple[int, ...],
) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: 4_000_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    driver = Recorder(refused=refused)
    columns = VersionReader(str(stores["raw"].path))
    if not refused:
        as_device(driver)(columns).close()
        return
    with pytest.raises(UsageError, match=r"of shards, which each of 3 ranks would copy, and 4 MB"):
        as_device(driver)(columns)
    assert not driver.held
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    as_device(driver)(columns).close()


# --- through the loader -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "device", "why"),
    [
        ("raw", None, "batches go to the cpu"),
        ("image", "cuda", "no field has plain rows; codec 'raw' stores such"),
    ],
)
def test_where_it_cannot_be_the_log_says_once_why(
    codec: str,
    device: str | None,
    why: str,
    stores: dict[str, BuiltStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if device is None:
        with precache.Loader(stores[codec].path, 4, device="cpu", gather="device") as loader:
            assert sum(len(batch["row"]) for batch in loader) == 21
    else:
        assert (
            room.register_shards(VersionReader(str(stores[codec].path)), torch.device(device))
            is None
        )
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == f"reading rows on the host: {why}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather": "gpu"}, "gather is 'gpu'; choose one of host, device"),
        ({"resident": "host"}, "gather='device' maps shards; leave out resident and access"),
        ({"access": "pread"}, "gather='device' maps shards; leave out resident and access"),
        ({"refresh": "epoch"}, "rows, weights, resident and gather need one version"),
    ],
)
def test_what_contradicts_it_is_refused(
    options: dict[str, Any], message: str, stores: dict[str, BuiltStore]
) -> None:
    with pytest.raises(UsageError, match=message):
        precache.Loader(stores["raw"].path, 4, **{"gather": "device", **options})
