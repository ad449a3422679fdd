"""`decompress="device"`, as far as it can be told without a device."""

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numcodecs import zstd

import precache
from precache import Reading
from precache.codecs import nvcomp
from precache.errors import DamageError
from precache.loading.gpu.device_slots import DeviceSlots, FrameFailures
from precache.reading.version_reader import VersionReader
from tests.conftest import BuiltStore
from tests.support.building import flip
from tests.support.device import unpacked

CPU = torch.device("cpu")


@pytest.mark.parametrize("codec", ["zstd", "image"])
def test_frames_come_one_after_another_as_they_are_stored(
    codec: str, stores: dict[str, BuiltStore], tile_stores: dict[str, BuiltStore]
) -> None:
    [reader] = VersionReader(str(stores[codec].path)).readers.values()
    [raw] = VersionReader(str(stores["raw"].path)).readers.values()
    [of_tiles] = VersionReader(str(tile_stores[codec].path)).readers.values()
    # Rows that are a frame each.
    assert [each.framed for each in (reader, raw, of_tiles)] == [True, False, False]
    rows = np.array([4, 0, 20, 4])
    out = np.full(len(rows) * reader.frame_bound, 255, np.uint8)
    lengths = reader.read_frames(rows, out)
    expected = np.empty((len(rows), *reader.array.row_shape), np.uint8)
    reader.read(rows, expected, undo=False)
    start = 0
    for length, row in zip(lengths.tolist(), expected, strict=True):
        frame = out[start : start + length].tobytes()
        assert zstd.decompress(frame) == row.tobytes()
        start += length
    assert (out[start:] == 255).all()


def stand_in_for_nvcomp(
    memory: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, row_nbytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What nvCOMP does, on the host."""
    rows = torch.empty((len(lengths), row_nbytes), dtype=torch.uint8)
    for row, start, length in zip(rows, offsets.tolist(), lengths.tolist(), strict=True):
        zstd.decompress(memory[start : start + length].numpy(), row.numpy())
    return rows, torch.zeros(len(lengths), dtype=torch.bool)


@pytest.mark.parametrize("codec", ["zstd", "image"])
def test_a_slot_of_frames_unpacks_to_the_batch(
    codec: str, stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores[codec]
    columns = VersionReader(str(store.path))
    monkeypatch.setattr(nvcomp, "decompress", stand_in_for_nvcomp)
    monkeypatch.setattr(FrameFailures, "add", lambda *arguments: None)
    rows = np.array([7, 1, 19])
    found = unpacked(DeviceSlots(columns, 4, columns.readers, ()), columns, rows)
    assert list(found) == ["image", "label", "row"]
    assert found["row"].tolist() == rows.tolist()
    assert found["label"].tolist() == columns.small["label"][rows].tolist()
    np.testing.assert_array_equal(found["image"], store.rows()[rows])


@pytest.mark.parametrize("codec", ["raw", "image"])
def test_slots_of_each_epoch_have_its_variant(
    codec: str, photos: Path, make_store: Callable[..., BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    field = {
        "ops": [{"op": "decode"}, {"op": "random_resized_crop", "size": 90}],
        "codec": codec,
        "variants": 2,
    }
    store = make_store(photos, precache.Recipe.from_dict({"fields": {"image": field}}))
    columns, rows = VersionReader(str(store.path)), np.array([3, 1])
    monkeypatch.setattr(nvcomp, "decompress", stand_in_for_nvcomp)
    monkeypatch.setattr(FrameFailures, "add", lambda *arguments: None)
    framed = {name: reader for name, reader in columns.readers.items() if reader.framed}
    slots = DeviceSlots(columns, 4, framed, ())
    for epoch in range(3):
        turn = columns.at_epoch(epoch)
        expected = np.empty((2, 3, 90, 90), np.uint8)
        turn.readers["image"].read(rows, expected)
        np.testing.assert_array_equal(unpacked(slots, turn, rows)["image"], expected)


@pytest.mark.skipif(not nvcomp.available(), reason="nvCOMP is not installed")
def test_nvcomp_takes_frames_that_follow_each_other() -> None:
    """At any address, as rows do, which needs no device to tell; temporary memory is torch's."""

    class Alignments(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_size_t) for name in ("input", "output", "temporary"))

    found, ask = (Alignments(), nvcomp._library().nvcompBatchedZstdDecompressGetRequiredAlignments)
    ask.argtypes = (nvcomp._Options, ctypes.POINTER(Alignments))
    assert ask(nvcomp._Options(), ctypes.byref(found)) == 0
    assert (found.input, found.output) == (1, 1)
    assert 512 % found.temporary == 0
    assert nvcomp.temporary_nbytes(256, 3 * 224 * 224) > 0


def test_a_damaged_frame_is_found_before_it_is_handed_out(
    stores: dict[str, BuiltStore], copy_store: Callable[[BuiltStore], BuiltStore]
) -> None:
    store = copy_store(stores["image"])
    flip(store.shard_path(0), 1000)
    [reader] = VersionReader(str(store.path)).readers.values()
    rows = np.arange(min(4, reader.array.object_rows))
    with pytest.raises(DamageError, match=r"is damaged at row \d+ \(.*png"):
        reader.read_frames(rows, np.empty(len(rows) * reader.frame_bound, np.uint8))


def test_on_the_host_the_log_says_once_why_it_decompresses_there(
    stores: dict[str, BuiltStore], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "precache"):
        loader = precache.Loader(
            stores["image"].path, 4, device="cpu", reading=Reading(decompress="device")
        )
    with loader:
        assert sum(len(batch["row"]) for batch in loader) == 21
    [record] = caplog.records
    assert record.message == "decompressing on the host: batches go to the cpu"
