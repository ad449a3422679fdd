"""Rows of Y and half-size Cb and Cr: their pixels and layout, and windows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.codecs import kernels
from precache.codecs.chunk import decoder, encoder, ragged_encoder
from precache.codecs.raw420 import planes_nbytes, planes_of, rgb_of
from precache.codecs.windows import Windows, resize_pieces, resize_windows
from precache.errors import DamageError, RecipeError
from precache.recipe.recipe import Field, Raw420Codec
from precache.store.arrays import field_document
from precache.store.layout import RowShape
from precache.store.shard_writer import LossyWriter
from tests.conftest import photo

GOLDEN = Path(__file__).parents[1] / "golden"
DECODER = decoder(Raw420Codec(), "uint8", ragged=True)
compiled = pytest.mark.skipif(kernels.compiled().functions is None, reason="nothing is compiled")


def row_of(number: int, height: int, width: int) -> np.ndarray:
    return photo(number, height, width).transpose(2, 0, 1).copy()


def noise(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Planes of any values."""
    nbytes = int(planes_nbytes(np.array(shape)))
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def chunk_of(planes: np.ndarray) -> bytes:
    return ragged_encoder(Raw420Codec())(planes)


def exact(planes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The pixels of planes in double precision, as ITU-T T.871 defines colours."""
    height, width = shape[1:]

    def weights(size: int) -> np.ndarray:
        centres = ((np.arange(size) + 0.5) / 2 - 0.5).clip(0, (size + 1) // 2 - 1)
        distances = np.abs(centres[:, None] - np.arange((size + 1) // 2))
        values: np.ndarray = np.maximum(0, 1 - distances)
        return values

    luma = planes[: height * width].reshape(height, width).astype(np.float64)
    halves = planes[height * width :].reshape(2, (height + 1) // 2, (width + 1) // 2)
    blue, red = weights(height) @ (halves - 128.0) @ weights(width).T
    green = -(0.114 * 1.772 * blue + 0.299 * 1.402 * red) / 0.587
    pixels: np.ndarray = np.stack([luma + 1.402 * red, luma + green, luma + 1.772 * blue])
    return pixels.clip(0, 255)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 99))
def test_pixels_are_the_exact_ones_rounded(height: int, width: int, number: int) -> None:
    shape = 3, height, width
    planes = noise(number, shape)
    pixels = rgb_of(planes, shape)
    assert np.abs(pixels - exact(planes, shape)).max() <= 0.7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled", kernels.Compiled)
        np.testing.assert_array_equal(rgb_of(planes, shape), pixels)


@compiled
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_window_is_that_of_the_whole_pixels(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 300))
    h, w = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    box = data.draw(st.integers(0, height - h)), data.draw(st.integers(0, width - w)), h, w
    size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 150))
    scales, mirrored = np.array([[h / size[0], w / size[1]]]), np.array([data.draw(st.booleans())])
    windows = Windows(np.array([box]), np.zeros((1, 2)), scales, mirrored)
    shape, out, wanted = (3, height, width), *np.zeros((2, 1, 3, *size), np.uint8)
    planes, none = noise(data.draw(st.integers(0, 9)), shape), np.zeros(1, np.int64)
    places = none, none + 5, np.array([shape])
    source = b"head " + planes.tobytes()
    resize_pieces([memoryview(source)], *places, windows, out, halves=True)
    resize_windows([rgb_of(planes, shape)], windows, wanted)
    np.testing.assert_array_equal(out, wanted)
    with pytest.raises(ValueError, match="do not lie in their images"):
        resize_pieces([memoryview(source)[:-1]], *places, windows, out, halves=True)


@pytest.mark.parametrize("sides", [(1, 1), (5, 7), (40, 31)])
def test_even_greys_stay_as_they_are(sides: tuple[int, int]) -> None:
    for value in range(256):
        row = np.full((3, *sides), value, np.uint8)
        np.testing.assert_array_equal(rgb_of(planes_of(row), row.shape), row)


def test_photos_lose_little() -> None:
    row = row_of(3, 61, 90)
    error = np.abs(rgb_of(planes_of(row), row.shape) - row.astype(int))
    assert 0 < error.mean() < 3


def test_zarr_python_reads_the_planes(tmp_path: Path) -> None:
    rows = [row_of(n, 20 + n, 31 - 2 * n) for n in range(10)]
    rows.insert(3, np.empty((0, 0, 0), np.uint8))
    field = Field.model_validate({"ops": [{"op": "decode"}], "codec": "raw420"})
    document = field_document(field, RowShape((3, 20, 20), "uint8", ragged=True), len(rows), 8)
    (tmp_path / "image/c").mkdir(parents=True)
    (tmp_path / "image/zarr.json").write_text(json.dumps(document))
    for number, start in enumerate(range(0, len(rows), 8)):
        writer = LossyWriter(8, Raw420Codec())
        for row in rows[start : start + 8]:
            if row.size:
                writer.choose(row, None)
                np.testing.assert_array_equal(writer.row, rgb_of(planes_of(row), row.shape))
            else:
                writer.room(row.shape)
            writer.advance()
        parts, _ = writer.finish()
        (tmp_path / "image/c" / str(number)).write_bytes(b"".join(map(bytes, parts)))
    stored: Any = zarr.open_array(tmp_path / "image", mode="r")
    assert stored.attrs["precache"] == {"dtype": "uint8", "filter": "raw420"}
    for data, row in zip(stored[:], rows, strict=True):
        planes = np.frombuffer(data, np.uint8)
        assert len(planes) == planes_nbytes(np.array(row.shape))
        if row.size:
            np.testing.assert_array_equal(planes, planes_of(row))


def test_rows_that_were_stored_are_read_and_encoded_as_they_were() -> None:
    row = row_of(3, 29, 41)
    stored = (GOLDEN / "ragged_raw420.stored.bin").read_bytes()
    read = DECODER.decode_ragged(memoryview(stored), row.shape, "uint8")
    assert xxhash.xxh3_128_hexdigest(read.tobytes()) == "cbeec2b61cdd7764bab34ad0a0bc19ce"
    assert chunk_of(planes_of(row)) == stored


def test_a_changed_byte_or_a_row_of_another_shape_is_damage() -> None:
    shape = (3, 29, 41)
    chunk = chunk_of(planes_of(row_of(*shape)))
    others = [(3, 28, 41), (3, 29, 43), (1, 29, 41), (4, 29, 41), (3, 1 << 15, 1 << 15), (0, 0, 0)]
    cases = [(chunk, other) for other in others]
    for place in range(0, len(chunk), 37):
        damaged = bytearray(chunk)
        damaged[place] ^= 32
        cases.append((bytes(damaged), shape))
    for data, claimed in cases:
        with pytest.raises(DamageError):
            DECODER.decode_ragged(memoryview(data), claimed, "uint8")


def test_chunks_of_several_rows_are_refused() -> None:
    with pytest.raises(RecipeError, match="'raw420' stores ragged rows"):
        encoder(Raw420Codec(), "uint8")
