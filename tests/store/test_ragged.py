"""Ragged rows at the lowest level: agreement with zarr-python, and shapes that no row can have."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from precache.codecs.chunk import Decoder, decoder, ragged_encoder
from precache.codecs.image import IMAGE_FILTER, undo_image
from precache.errors import DamageError
from precache.recipe.recipe import Codec, Field, ImageCodec, RawCodec, ZstdCodec
from precache.store.arrays import field_document
from precache.store.layout import MISSING, RowShape, decode_index
from precache.store.shard_writer import RaggedWriter
from precache.store.version import require_row_shapes
from tests.conftest import photo
from tests.support.stored import checks_of

CODECS: dict[str, Codec] = {"raw": RawCodec(), "zstd": ZstdCodec(level=3), "image": ImageCodec()}
every_codec = pytest.mark.parametrize("codec", CODECS)
PER_SHARD = 8


def decoder_of(codec: str) -> Decoder:
    return decoder(CODECS[codec], "uint8", ragged=True)


def photos(count: int = 21) -> list[np.ndarray]:
    """Photos (3, H, W) of many shapes; every seventh is a hole."""
    sizes = [(5 + 7 * n % 40, 4 + 11 * n % 50) for n in range(count)]
    rows = [
        np.ascontiguousarray(photo(n, *size).transpose(2, 0, 1)) for n, size in enumerate(sizes)
    ]
    rows[::7] = [np.empty((0, 0, 0), np.uint8)] * len(rows[::7])
    return rows


def write(folder: Path, rows: list[np.ndarray], codec: str) -> None:
    """Write an array of ragged rows as a field of a version is written."""
    field = Field.model_validate({"ops": [{"op": "decode"}], "codec": codec})
    row = RowShape((3, 20, 20), "uint8", ragged=True)
    document = field_document(field, row, len(rows), PER_SHARD)
    (folder / "c").mkdir(parents=True)
    (folder / "zarr.json").write_text(json.dumps(document))
    for number, start in enumerate(range(0, len(rows), PER_SHARD)):
        writer = RaggedWriter("uint8", PER_SHARD, ragged_encoder(CODECS[codec]))
        for row in rows[start : start + PER_SHARD]:
            writer.room(row.shape)[...] = row
            writer.advance()
        parts, stored = writer.finish()
        data = b"".join(map(bytes, parts))
        assert checks_of(data, PER_SHARD).tolist() == stored.ends.tolist()
        (folder / "c" / str(number)).write_bytes(data)


def chunks(shard: bytes, count: int) -> list[memoryview]:
    index = decode_index(shard[-(16 * count + 4) :], count)
    return [memoryview(shard)[o : o + n] for o, n in index.tolist() if n != MISSING]


@every_codec
def test_zarr_python_reads_rows_that_are_written_and_the_other_way(
    codec: str, tmp_path: Path
) -> None:
    rows = photos()
    write(tmp_path / "image", rows, codec)
    array: Any = zarr.open_array(tmp_path / "image", mode="r")
    filtered = array.attrs["precache"].get("filter") == IMAGE_FILTER
    assert filtered == (codec == "image")
    for row, stored in zip(rows, array[:], strict=True):
        pixels = np.frombuffer(stored, np.uint8).reshape(row.shape).copy()
        if filtered:
            undo_image(pixels)
        np.testing.assert_array_equal(pixels, row)
    assert bytes(array[13:14][0]) == bytes(array[:][13])
    if filtered:
        return
    shutil.rmtree(tmp_path / "image/c")
    array = zarr.open_array(tmp_path / "image", mode="r+")
    array[:] = np.array([row.tobytes() for row in rows], object)
    for start in range(0, len(rows), PER_SHARD):
        part = rows[start : start + PER_SHARD]
        shard = (tmp_path / f"image/c/{start // PER_SHARD}").read_bytes()
        part = [row for row in part if row.size]  # chunks of the fill value are left out
        for row, chunk in zip(part, chunks(shard, PER_SHARD), strict=True):
            read = decoder_of(codec).decode_ragged(chunk, row.shape, "uint8")
            np.testing.assert_array_equal(read, row)


@given(
    hnp.arrays(
        st.sampled_from(["uint8", "int16", "float64"]), hnp.array_shapes(min_dims=0, min_side=0)
    ),
    hnp.arrays("uint8", hnp.array_shapes(min_dims=3, max_dims=3, min_side=0)),
)
def test_any_values_and_shapes_come_back(values: np.ndarray, image: np.ndarray) -> None:
    for row, codec in ((values, "raw"), (values, "zstd"), (image, "image")):
        data = memoryview(ragged_encoder(CODECS[codec])(row))
        read = decoder_of(codec).decode_ragged(data, row.shape, row.dtype.name)
        assert (read.shape, read.tobytes()) == (row.shape, row.tobytes())


@pytest.mark.parametrize("shape", [(-1, 4, 4), (3, -2, -2), (3, 2**31 - 1, 2**31 - 1)])
def test_shapes_that_no_row_can_have_are_refused(shape: tuple[int, ...]) -> None:
    shapes = np.array([(3, 4, 5), shape, (0, 0, 0)], np.int64)
    with pytest.raises(DamageError, match="row 1 has the shape"):
        require_row_shapes(shapes, "uint8", "somewhere/image")
