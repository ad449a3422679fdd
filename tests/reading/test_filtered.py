"""The filter of `image` belongs to a chunk: arrays of zarr-python by our plug-in, however cut."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import precache
from precache.codecs import kernels
from precache.codecs.zarr_plugin import ImageFilter
from precache.errors import StoreError
from precache.loading.gpu.device_slots import DeviceSlots
from precache.reading import version_reader
from precache.reading.array_reader import ArrayReader
from precache.reading.shard_files import MappedShardFiles, RangedShardFiles
from precache.store.open import open_version
from tests.support.device import unpacked

COMPRESSORS: dict[str, Any] = {
    "none": None,
    "zstd": ZstdCodec(checksum=True),
    "zstd and crc32c": [ZstdCodec(), Crc32cCodec()],
    "gzip": GzipCodec(),
    "blosc": BloscCodec(cname="lz4"),
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Images:
    """An array (rows, ..., C, H, W) in parts: chunks in shards, some of which are not written."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    compressor: str
    fill_value: int
    written: tuple[slice, ...]
    seed: int

    def write(self, folder: Path) -> np.ndarray:
        """The values that zarr-python says it has."""
        array = zarr.create_array(
            folder, name="x", shape=self.shape, chunks=self.chunks, shards=self.shards,
            dtype="uint8", filters=[ImageFilter()], compressors=COMPRESSORS[self.compressor],
            fill_value=self.fill_value,
        )  # fmt: skip
        values = np.full(self.shape, self.fill_value, np.uint8)
        part = values[self.written]
        part[...] = np.random.default_rng(self.seed).integers(0, 256, part.shape)
        array[self.written] = part
        np.testing.assert_array_equal(array[:], values)
        return values


@st.composite
def any_images(draw: st.DrawFn) -> Images:
    frames = draw(st.lists(st.integers(1, 3), max_size=1))
    channels = draw(st.sampled_from([1, 2, 3, 3, 3, 4, 6]))
    shape = (draw(st.integers(1, 9)), *frames, channels, *draw(st.tuples(SIDES, SIDES)))
    # As long as the axis, which most are, or shorter, or longer.
    chunks = tuple(draw(st.just(n) | st.integers(1, n + 2)) for n in shape)
    shards = tuple(draw(st.integers(1, 3)) * n for n in chunks) if draw(st.booleans()) else None
    written = tuple(draw(st.just(slice(None)) | st.just(slice(n // 2))) for n in shape)
    compressor = draw(st.sampled_from(list(COMPRESSORS)))
    seed, fill_value = draw(st.integers(0, 99)), draw(st.integers(0, 255))
    return Images(shape, chunks, shards, compressor, fill_value, written, seed)


SIDES = st.integers(1, 6)


@contextmanager
def interpreted(compiled: bool) -> Iterator[None]:
    """Undo the filter as where no C compiler was at hand."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(kernels, "compiled", kernels.Compiled)
        yield


def on_a_device(folder: str, rows: np.ndarray) -> np.ndarray:
    """What a device makes of a slot that it is sent, on the one that is always there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version_reader, "SMALL_ROW_NBYTES", 0)
        columns = version_reader.VersionReader(folder, {"x": "x"})
        return unpacked(DeviceSlots(columns, len(rows), {}, ()), columns, rows)["x"].numpy()


@given(any_images(), st.booleans(), st.data())
def test_every_array_is_what_zarr_python_says(
    images: Images, compiled: bool, data: st.DataObject
) -> None:
    order = data.draw(st.lists(st.integers(0, images.shape[0] - 1), min_size=1, max_size=20))
    rows = np.array(order)
    with tempfile.TemporaryDirectory() as folder, interpreted(compiled):
        values = images.write(Path(folder))
        version = open_version(folder, {"x": "x"})
        for objects in (MappedShardFiles, RangedShardFiles):
            reader = ArrayReader(version, "x", objects=objects(version, "x"))
            for _ in range(2):  # from what it keeps, the second time
                out = np.full((len(rows), *images.shape[1:]), 77, np.uint8)
                reader.read(rows, out)
                np.testing.assert_array_equal(out, values[rows])
        with precache.Loader(folder, 1, shuffle=False, fields={"x": "x"}) as loader:
            loaded = np.concatenate([batch["x"].numpy() for batch in loader])
        np.testing.assert_array_equal(loaded, values)
        np.testing.assert_array_equal(on_a_device(folder, rows), values[rows])


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    zarr.create_array(
        tmp_path,
        name="x",
        shape=(3, 5, 5),
        chunks=(3, 5, 5),
        dtype="uint8",
        filters=[ImageFilter()],
    )
    with pytest.raises(StoreError, match=r"filters uint8 \(3, 5, 5\) by precache.image: no uint8"):
        open_version(tmp_path, {"x": "x"})
