"""Rows as JPEG files: pixels of the build's decoder, agreement with zarr-python, hostile files."""

from __future__ import annotations

import json
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import xxhash
import zarr
from PIL import Image

from precache.codecs import jpeg
from precache.codecs.chunk import decoder, ragged_encoder
from precache.codecs.jpeg import decode_jpeg, encode_jpeg
from precache.errors import DamageError, SampleError, UsageError
from precache.recipe.ops import Decode
from precache.recipe.recipe import Field, JpegCodec
from precache.store.arrays import field_document
from precache.store.layout import RowShape
from precache.store.shard_writer import LossyWriter, jpeg_of
from precache_workers.ops.decoding import decode
from tests.conftest import photo
from tests.support.building import encoded

GOLDEN = Path(__file__).parents[1] / "golden"


def document_of(rows: int, channels: int = 3) -> dict[str, Any]:
    mode = "RGB" if channels == 3 else "L"
    field = Field.model_validate({"ops": [{"op": "decode", "mode": mode}], "codec": "jpeg"})
    return field_document(field, RowShape((channels, 20, 20), "uint8", ragged=True), rows, 8)


DECODER = decoder(JpegCodec(), "uint8", ragged=True)


def chunk_of(file: bytes) -> bytes:
    return ragged_encoder(JpegCodec())(np.frombuffer(file, np.uint8))


def by_pillow(number: int, height: int, width: int, mode: str, **options: Any) -> bytes:
    return encoded(Image.fromarray(photo(number, height, width)).convert(mode), **options)


def by_simplejpeg(number: int, height: int, width: int, **options: Any) -> bytes:
    file: bytes = simplejpeg.encode_jpeg(photo(number, height, width), **options)
    return file


FILES = {
    "baseline": by_pillow(0, 61, 47, "RGB", quality=92),
    "4:4:4": by_pillow(1, 40, 57, "RGB", subsampling=0),
    "4:2:2": by_pillow(2, 41, 55, "RGB", subsampling=1),
    "progressive": by_pillow(3, 33, 70, "RGB", progressive=True),
    "optimised, with restarts": by_pillow(4, 50, 50, "RGB", optimize=True, restart_marker_rows=1),
    "grey": by_pillow(5, 35, 64, "L"),
    "grey, progressive": by_pillow(6, 64, 35, "L", progressive=True),
    "one pixel": by_pillow(7, 1, 1, "RGB"),
    "simplejpeg": by_simplejpeg(8, 47, 31, quality=97),
    "simplejpeg 4:4:0": by_simplejpeg(9, 47, 31, colorsubsampling="440"),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_kept_gives_the_pixels_that_the_build_decodes(name: str, mode: Any) -> None:
    row = decode(FILES[name], Decode(mode=mode)).transpose(2, 0, 1).copy()
    file, pixels = jpeg_of(row, FILES[name], 90)
    chunk = memoryview(chunk_of(file))
    np.testing.assert_array_equal(DECODER.decode_ragged(chunk, row.shape, "uint8"), pixels)
    assert chunk[-4 - len(file) : -4] == file
    if mode == "RGB" or "grey" in name:
        assert file == FILES[name]
        np.testing.assert_array_equal(pixels, row)


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_without_such_a_file_are_encoded_at_the_stated_quality(channels: int) -> None:
    row = photo(3, 61, 90).transpose(2, 0, 1)[:channels].copy()
    sizes = {}
    for quality in (50, 90, 100):
        file, pixels = jpeg_of(row, b"\x89PNG", quality)
        sizes[quality] = len(file)
        assert pixels.shape == row.shape
        error = np.abs(pixels.astype(int) - row).mean()
        assert error < 4 - quality / 50
    assert sizes[50] < sizes[90] < sizes[100]
    other = FILES["baseline"]
    for given in (None, row, other, other[:-20], b"\xff\xd8"):
        assert jpeg_of(row, given, 90)[0] == encode_jpeg(row, 90)


def test_what_is_no_jpeg_of_one_or_three_channels_is_encoded_anew() -> None:
    cmyk = encoded(Image.fromarray(photo(1, 40, 50)).convert("CMYK"))
    row = decode(cmyk, Decode()).transpose(2, 0, 1).copy()
    file, pixels = jpeg_of(row, cmyk, 95)
    assert file != cmyk
    assert np.abs(pixels.astype(int) - row).mean() < 3


def test_a_side_that_no_jpeg_has_is_refused_in_words() -> None:
    with pytest.raises(SampleError, match=r"65501 x 1 px.*--max-size"):
        encode_jpeg(np.zeros((1, 1, 65_501), np.uint8), 90)
    assert (
        decode_jpeg(encode_jpeg(np.zeros((1, 1, 65_500), np.uint8), 90), (1, 1, 65_500)).any() < 1
    )


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpeg.import_simplejpeg.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"codec jpeg needs simplejpeg.*precache\[jpeg\]"):
            decode_jpeg(FILES["baseline"], (3, 61, 47))
    finally:
        jpeg.import_simplejpeg.cache_clear()


# --- other readers, and bytes that stay ---------------------------------------------------------


def test_zarr_python_reads_the_files_themselves(tmp_path: Path) -> None:
    names = [*FILES]
    rows = [decode(FILES[name], Decode()).transpose(2, 0, 1).copy() for name in names]
    rows.insert(3, np.empty((0, 0, 0), np.uint8))
    names.insert(3, "")
    (tmp_path / "image/c").mkdir(parents=True)
    (tmp_path / "image/zarr.json").write_text(json.dumps(document_of(len(rows))))
    for number, start in enumerate(range(0, len(rows), 8)):
        writer = LossyWriter(8, JpegCodec())
        for name, row in zip(names[start : start + 8], rows[start : start + 8], strict=True):
            if name:
                writer.choose(row, FILES[name])
            else:
                writer.room(row.shape)
            writer.advance()
        parts, _ = writer.finish()
        (tmp_path / "image/c" / str(number)).write_bytes(b"".join(map(bytes, parts)))
    stored: Any = zarr.open_array(tmp_path / "image", mode="r")
    assert stored.attrs["precache"] == {"dtype": "uint8", "filter": "jpeg"}
    assert [bytes(file) for file in stored[:]] == [FILES.get(name, b"") for name in names]


def test_rows_that_were_stored_are_read_and_encoded_as_they_were() -> None:
    row = photo(3, 29, 41).transpose(2, 0, 1)
    stored = (GOLDEN / "ragged_jpeg.stored.bin").read_bytes()
    read = DECODER.decode_ragged(memoryview(stored), row.shape, "uint8")
    assert xxhash.xxh3_128_hexdigest(read.tobytes()) == "09f2153516875c9122d265b650612d50"
    assert chunk_of(encode_jpeg(row, 90)) == stored


# --- hostile files ------------------------------------------------------------------------------


def forged_size(file: bytes, height: int, width: int) -> bytes:
    """A JPEG whose header claims a size."""
    at = file.index(b"\xff\xc0") + 5
    return file[:at] + struct.pack(">HH", height, width) + file[at + 4 :]


def test_what_is_of_another_shape_or_no_jpeg_is_damage_and_takes_no_memory() -> None:
    file = FILES["baseline"]
    bomb = forged_size(file, 30_000, 30_000)
    others = [(3, 61, 46), (3, 62, 47), (3, 47, 61), (4, 61, 47), (2, 61, 47), (0, 0, 0)]
    cases: list[tuple[bytes, tuple[int, ...], str | None]] = [
        *((file, shape, None) for shape in [*others, (3, 1 << 14, 1 << 14)]),
        (bomb, (3, 30_000, 30_000), "cannot be"),
        (bomb, (3, 61, 47), "30000 x 30000 pixels where"),
        *((data, (3, 8, 8), None)
          for data in (b"", b"\xff\xd8", b"no picture", bytes(300), FILES["grey"][:40])),
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, shape, said in cases:
        with pytest.raises(DamageError, match=said):
            DECODER.decode_ragged(memoryview(chunk_of(data)), shape, "uint8")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("name", FILES)
def test_broken_files_are_damage(name: str) -> None:
    file = FILES[name]
    shape = decode(file, Decode()).transpose(2, 0, 1).shape
    for cut in range(0, len(file) - 3, 1 + len(file) // 60):
        with pytest.raises(DamageError):
            DECODER.decode_ragged(memoryview(chunk_of(file[:cut])), shape, "uint8")
    chunk = chunk_of(file)
    for place in range(0, len(chunk), 1 + len(chunk) // 60):
        damaged = bytearray(chunk)
        damaged[place] ^= 32
        with pytest.raises(DamageError):
            DECODER.decode_ragged(memoryview(damaged), shape, "uint8")
