"""Rows as JPEG files, or as Y and half-size Cb and Cr: pixels, layout; hostile bytes of every codec
of ragged rows."""

import json
import re
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import simplejpeg
import xxhash
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd
from PIL import Image

from precache.codecs import jpeg, kernels
from precache.codecs.chunk import decoder, encoder, ragged_encoder
from precache.codecs.jpeg import decode_jpeg, encode_jpeg
from precache.codecs.raw420 import planes_nbytes, planes_of, rgb_of
from precache.codecs.windows import Windows, resize_pieces, resize_window
from precache.errors import DamageError, RecipeError, SampleError, UsageError
from precache.recipe.ops import Decode
from precache.recipe.recipe import Field, ImageCodec, JpegCodec, Raw420Codec, RawCodec, ZstdCodec
from precache.store.arrays import field_document
from precache.store.layout import RowShape
from precache.store.shard_writer import LossyWriter, jpeg_of
from precache_workers.ops.decoding import decode
from tests.codecs.test_windows import cases, compiled, window
from tests.conftest import photo
from tests.support import numpy_pixels
from tests.support.building import encoded

GOLDEN = Path(__file__).parents[1] / "golden"
CODECS = {"jpeg": JpegCodec(), "raw420": Raw420Codec()}
EXACT = {"raw": RawCodec(), "zstd": ZstdCodec(level=3), "image": ImageCodec()}

Shape = tuple[int, ...]


def row_of(number: int, height: int, width: int) -> np.ndarray:
    return photo(number, height, width).transpose(2, 0, 1).copy()


def chunk_of(codec: str, stored: bytes | np.ndarray) -> bytes:
    return ragged_encoder(CODECS[codec])(np.frombuffer(stored, np.uint8))


def read(codec: str, chunk: bytes | bytearray, shape: Shape) -> np.ndarray:
    reader = decoder({**CODECS, **EXACT}[codec], "uint8", ragged=True)
    return reader.decode_ragged(memoryview(chunk), shape, "uint8")


def by_pillow(number: int, height: int, width: int, mode: str, **options: Any) -> bytes:
    return encoded(Image.fromarray(photo(number, height, width)).convert(mode), **options)


def by_simplejpeg(number: int, height: int, width: int, **options: Any) -> bytes:
    file: bytes = simplejpeg.encode_jpeg(photo(number, height, width), **options)
    return file


NOISE = np.random.default_rng(18).integers(0, 2, (3, 300, 300), np.uint8) * 255

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
RESTARTING = {
    "encoded": encode_jpeg(row_of(10, 70, 141), 90),
    "encoded, of a prime number of blocks": encode_jpeg(row_of(11, 45, 103), 90),
    "encoded, narrow": encode_jpeg(row_of(12, 90, 19), 90),
    "encoded, grey": encode_jpeg(row_of(13, 61, 217)[:1], 90),
    "encoded, of noise": encode_jpeg(NOISE, 92),
    "4:4:4, each block": by_pillow(14, 40, 57, "RGB", subsampling=0, restart_marker_blocks=1),
    "4:2:2, lines": by_pillow(15, 41, 55, "RGB", subsampling=1, restart_marker_rows=1),
    "grey, each other block": by_pillow(16, 35, 64, "L", restart_marker_blocks=2),
    "across lines": by_pillow(17, 61, 70, "RGB", restart_marker_blocks=3),
}
FILES |= RESTARTING


def first_scans(file: bytes, count: int) -> bytes:
    """The first scans of a progressive JPEG."""
    return b"".join(re.split(rb"(?=\xff\xda)", file[:-2])[: count + 1]) + file[-2:]


LACKING = {
    f"{name}, of {count} scans": first_scans(FILES[name], count)
    for name in FILES
    if "progressive" in name
    for count in range(1, FILES[name].count(b"\xff\xda"))
}


def decoded(file: bytes, mode: Any = "RGB") -> np.ndarray:
    """The row that a build makes of a file."""
    return decode(file, Decode(mode=mode)).transpose(2, 0, 1).copy()


# --- JPEG files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_kept_gives_the_pixels_that_the_build_decodes(name: str) -> None:
    for mode in ("RGB", "L"):
        row = decoded(FILES[name], mode)
        file, pixels = jpeg_of(row, FILES[name], 90)
        chunk = chunk_of("jpeg", file)
        np.testing.assert_array_equal(read("jpeg", chunk, row.shape), pixels)
        assert chunk[-4 - len(file) : -4] == file
        if mode == "RGB" or "grey" in name:
            assert file == FILES[name]
            np.testing.assert_array_equal(pixels, row)


@pytest.mark.parametrize("name", LACKING)
def test_a_file_that_lacks_scans_is_encoded_as_libjpeg_guesses_the_rest_of_its_pixels(
    name: str,
) -> None:
    row = decoded(LACKING[name])
    assert jpeg_of(row, LACKING[name], 90)[0] == encode_jpeg(row, 90)


def test_scans_count_where_a_decoder_finds_them() -> None:
    """Metadata and what follows the end may have others."""
    file, lacking = FILES["progressive"], LACKING["progressive, of 1 scans"]
    at = file.index(b"\xff\xc2")
    for wanted, other in ((file, lacking), (lacking, file)):
        thumbnail = b"\xff\xff\xe1" + struct.pack(">H", len(other) + 2) + other
        nested = wanted[:at] + thumbnail + wanted[at:] + other
        assert (jpeg_of(decoded(nested), nested, 90)[0] == nested) == (wanted is file)


def test_a_scan_that_takes_bits_back_makes_a_file_that_lacks_them() -> None:
    file = FILES["grey, progressive"]
    _, before, rough, *_ = re.split(rb"(?=\xff\xda)", file)
    again = file[:-2] + before[before.rindex(b"\xff\xc4") :] + rough + file[-2:]
    row = decoded(again)
    assert jpeg_of(row, again, 90)[0] == encode_jpeg(row, 90)


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_without_such_a_file_are_encoded_at_the_stated_quality(channels: int) -> None:
    row = row_of(3, 61, 90)[:channels].copy()
    sizes = []
    for quality in (50, 90, 100):
        file, pixels = jpeg_of(row, b"\x89PNG", quality)
        sizes.append(len(file))
        assert pixels.shape == row.shape
        assert np.abs(pixels.astype(int) - row).mean() < 4 - quality / 50
    assert sizes == sorted({*sizes})
    other = FILES["baseline"]
    unnamed = other.replace(b"\1\x22\0", b"\1\x14\0", 1)  # 4:4:1
    for given_file in (None, row, other, unnamed, other[:-20], b"\xff\xd8"):
        assert jpeg_of(row, given_file, 90)[0] == encode_jpeg(row, 90)
    cmyk = encoded(Image.fromarray(photo(1, 40, 50)).convert("CMYK"))
    file, pixels = jpeg_of(decoded(cmyk), cmyk, 95)
    assert file != cmyk
    assert np.abs(pixels.astype(int) - decoded(cmyk)).mean() < 3


def test_a_side_that_no_jpeg_has_is_refused_in_words() -> None:
    with pytest.raises(SampleError, match=r"65501 x 1 px.*--max-size"):
        encode_jpeg(np.zeros((1, 1, 65_501), np.uint8), 90)
    longest = np.zeros((1, 1, 65_500), np.uint8)
    assert not decode_jpeg(encode_jpeg(longest, 90), longest.shape).any()


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpeg.import_simplejpeg.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"codec jpeg needs simplejpeg.*precache\[jpeg\]"):
            decode_jpeg(FILES["baseline"], (3, 61, 47))
    finally:
        jpeg.import_simplejpeg.cache_clear()


# --- Y and half-size Cb and Cr ------------------------------------------------------------------


def noise(number: int, shape: Shape) -> np.ndarray:
    """Planes of any values."""
    nbytes = int(planes_nbytes(np.array(shape)))
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def exact(planes: np.ndarray, shape: Shape) -> np.ndarray:
    """The pixels of planes in double precision, as ITU-T T.871 defines colours."""
    height, width = shape[1:]

    def weights(size: int) -> np.ndarray:
        centres = ((np.arange(size) + 0.5) / 2 - 0.5).clip(0, (size + 1) // 2 - 1)
        values: np.ndarray = np.abs(centres[:, None] - np.arange((size + 1) // 2))
        return np.maximum(0, 1 - values)

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
    np.testing.assert_array_equal(numpy_pixels.rgb(planes, shape), pixels)


@compiled
@settings(max_examples=200, deadline=None)
@given(cases(channels=[3]))
def test_a_window_is_that_of_the_whole_pixels(
    case: tuple[np.ndarray, Windows, tuple[int, int]],
) -> None:
    pixels, window, size = case
    shape, out, wanted = pixels.shape, *np.zeros((2, 1, 3, *size), np.uint8)
    planes, none = noise(int(pixels[0, 0, 0]), shape), np.zeros(1, np.int64)
    places = none, none + 5, np.array([shape])
    source = b"head " + planes.tobytes()
    resize_pieces([memoryview(source)], *places, window, out, halves=True)
    resize_window(rgb_of(planes, shape), window, wanted)
    np.testing.assert_array_equal(out, wanted)
    with pytest.raises(ValueError, match="do not lie in their images"):
        resize_pieces([memoryview(source)[:-1]], *places, window, out, halves=True)


def test_even_greys_stay_as_they_are_and_photos_lose_little() -> None:
    for sides in ((1, 1), (5, 7), (40, 31)):
        for value in range(256):
            row = np.full((3, *sides), value, np.uint8)
            np.testing.assert_array_equal(rgb_of(planes_of(row), row.shape), row)
    row = row_of(3, 61, 90)
    assert 0 < np.abs(rgb_of(planes_of(row), row.shape) - row.astype(int)).mean() < 3


def windows_of(
    file: bytes, shape: Shape, window: Windows, size: tuple[int, int], check: int = kernels.OWN
) -> tuple[int, np.ndarray]:
    """How many of one chunk were decoded in part, and the pixels."""
    out, none = np.zeros((1, shape[0], *size), np.uint8), np.zeros(1, np.int64)
    places, checks = (none, none, np.array([shape])), np.array([check])
    done = resize_pieces([memoryview(file)], *places, window, out, checks=checks, jpeg=True)
    return done, out


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> tuple[int, ...]:
    """Top, left, height and width, often at an edge and small: few columns are decoded."""
    corner, sizes = list[int](), list[int]()
    for side in shape[1:]:
        size = min(side, draw(st.integers(1, 4) | st.integers(1, side)))
        sizes.append(size)
        corner.append(draw(st.sampled_from([0, side - size]) | st.integers(0, side - size)))
    return *corner, *sizes


@compiled
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*FILES]), st.data())
def test_a_part_of_a_jpeg_has_the_pixels_of_the_whole(name: str, data: st.DataObject) -> None:
    file, pixels = FILES[name], decoded(FILES[name])
    top, left, height, width = data.draw(boxes(pixels.shape))
    box = np.array([top, left, height, width])
    part = decode_jpeg(file, pixels.shape, None, box)
    rows, columns = (slice(at, at + size) for at, size in zip(box[:2], box[2:], strict=True))
    wanted = pixels[:, top : top + height, left : left + width]
    np.testing.assert_array_equal(part[:, rows, columns], wanted)
    assert box.tolist()[2:] == [height, width]


@compiled
def test_of_files_that_are_encoded_the_blocks_of_a_box_are_decoded() -> None:
    for name, box, sides in (
        ("encoded", [17, 49, 10, 40], (16, 48)),
        ("encoded", [16, 48, 10, 40], (32, 96)),
        ("encoded", [60, 100, 10, 41], (22, 45)),
        ("encoded, of a prime number of blocks", [20, 50, 5, 5], (16, 103)),
        ("encoded, narrow", [40, 1, 3, 2], (16, 19)),
        ("4:4:4, each block", [9, 9, 6, 6], (8, 8)),
        ("across lines", [20, 20, 6, 6], (61, 70)),
        ("progressive", [9, 9, 6, 6], (33, 70)),
        ("baseline", [9, 9, 6, 6], (61, 47)),
    ):
        shape = decoded(FILES[name]).shape
        assert decode_jpeg(FILES[name], shape, None, np.array(box)).shape[1:] == sides, name


@compiled
@settings(max_examples=400, deadline=None)
@given(st.sampled_from([*RESTARTING]), st.data())
def test_forged_restarts_are_refused_or_make_no_more_than_there_is(
    name: str, data: st.DataObject
) -> None:
    functions: Any = kernels.compiled().functions
    file, shape = bytearray(RESTARTING[name]), decoded(RESTARTING[name]).shape
    markers = [at for at in range(len(file) - 1) if file[at] == 0xFF and file[at + 1]]
    at = data.draw(st.sampled_from(markers)) + data.draw(st.integers(0, 14))
    if at < len(file):
        file[at] = data.draw(st.integers(0, 255) | st.sampled_from([0xC0, 0xD9, 0xDA, 0xDD, 0xFF]))
    cut = bytes(file[: data.draw(st.just(len(file)) | st.integers(0, len(file)))])
    box = data.draw(boxes(shape))
    part = functions.part_of_jpeg(cut, shape, box)
    if part is not None:
        smaller, (_, height, width), top, left = part
        assert len(smaller) <= len(cut)
        assert 0 <= top <= height - box[2]
        assert 0 <= left <= width - box[3]
    for wrong in ((-1, 0, 1, 1), (0, 0, shape[1] + 1, 1), (0, shape[2], 1, 1), (0, 0, 0, 1)):
        assert functions.part_of_jpeg(cut, shape, wrong) is None


@pytest.mark.skipif(not kernels.has_turbojpeg(), reason="libjpeg-turbo 3 is not installed")
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*FILES]), st.data())
def test_a_window_of_a_jpeg_is_that_of_all_its_pixels(name: str, data: st.DataObject) -> None:
    chunk, pixels = chunk_of("jpeg", FILES[name]), decoded(FILES[name])
    box = data.draw(boxes(pixels.shape))
    size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    seen = window(box, size, data.draw(st.booleans()))
    wanted = np.zeros((1, len(pixels), *size), np.uint8)
    resize_window(np.ascontiguousarray(pixels), seen, wanted)
    for check in (kernels.OWN, kernels.UNCHECKED):
        done, out = windows_of(chunk, pixels.shape, seen, size, check)
        assert done == 1
        np.testing.assert_array_equal(out, wanted)
    cut = chunk_of("jpeg", FILES[name][: data.draw(st.integers(0, 100))])
    at = data.draw(st.integers(0, len(chunk) - 1))
    for broken in (cut, chunk[:at], chunk[:at] + bytes([chunk[at] ^ 32]) + chunk[at + 1 :]):
        assert windows_of(broken, pixels.shape, seen, size)[0] == 0
    taller = pixels.shape[0], pixels.shape[1] + 1, pixels.shape[2]
    assert windows_of(chunk, taller, seen, size)[0] == 0


@pytest.mark.skipif(not kernels.has_turbojpeg(), reason="libjpeg-turbo 3 is not installed")
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*LACKING]), st.data())
def test_a_window_of_what_is_stored_for_a_file_is_that_of_all_its_pixels(
    name: str, data: st.DataObject
) -> None:
    file, pixels = jpeg_of(decoded(LACKING[name]), LACKING[name], 90)
    top, left, height, width = box = data.draw(boxes(pixels.shape))
    seen = window(box, (height, width), False)
    done, out = windows_of(chunk_of("jpeg", file), pixels.shape, seen, (height, width))
    assert done == 1
    np.testing.assert_array_equal(out[0], pixels[:, top : top + height, left : left + width])


# --- other readers, and bytes that stay ---------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_zarr_python_reads_what_is_stored_of_each_row(codec: str, tmp_path: Path) -> None:
    files: list[bytes | None] = [*FILES.values()]
    rows = [decoded(file) for file in FILES.values()]
    if codec == "raw420":
        rows = [row_of(n, 20 + n, 50 - 2 * n) for n in range(len(FILES))]
    wanted = [*FILES.values()] if codec == "jpeg" else [planes_of(row).tobytes() for row in rows]
    for listed, hole in ((rows, np.empty((0, 0, 0), np.uint8)), (files, None), (wanted, b"")):
        listed.insert(3, hole)  # type: ignore[arg-type]  # of each its own
    field = Field.model_validate({"ops": [{"op": "decode"}], "codec": codec})
    document = field_document(field, RowShape((3, 20, 20), "uint8", ragged=True), len(rows), 8)
    (tmp_path / "image/c").mkdir(parents=True)
    (tmp_path / "image/zarr.json").write_text(json.dumps(document))
    for number, start in enumerate(range(0, len(rows), 8)):
        writer = LossyWriter(8, CODECS[codec])  # type: ignore[arg-type]  # a lossy one
        for row, file in zip(rows[start : start + 8], files[start : start + 8], strict=True):
            if row.size:
                writer.choose(row, file if codec == "jpeg" else None)
            else:
                writer.room(row.shape)
            if row.size and codec == "raw420":
                np.testing.assert_array_equal(writer.row, rgb_of(planes_of(row), row.shape))
            writer.advance()
        parts, _ = writer.finish()
        (tmp_path / "image/c" / str(number)).write_bytes(b"".join(map(bytes, parts)))
    stored: Any = zarr.open_array(tmp_path / "image", mode="r")
    assert stored.attrs["precache"] == {"dtype": "uint8", "filter": codec}
    assert [bytes(data) for data in stored[:]] == wanted


def test_rows_that_were_stored_are_read_and_encoded_as_they_were() -> None:
    row = row_of(3, 29, 41)
    for name, again, digest in (
        ("jpeg", None, "09f2153516875c9122d265b650612d50"),  # without restart markers
        ("jpeg_restarts", encode_jpeg(row, 90), "2fb320acec81149da0d7e7484272176b"),
        ("raw420", planes_of(row), "cbeec2b61cdd7764bab34ad0a0bc19ce"),
    ):
        codec = name.partition("_")[0]
        stored = (GOLDEN / f"ragged_{name}.stored.bin").read_bytes()
        pixels = read(codec, stored, row.shape)
        assert xxhash.xxh3_128_hexdigest(pixels.tobytes()) == digest
        assert again is None or chunk_of(codec, again) == stored
    for name, exact in EXACT.items():
        stored = (GOLDEN / f"ragged_{name}.stored.bin").read_bytes()
        np.testing.assert_array_equal(read(name, stored, row.shape), row)
        assert name != "raw" or ragged_encoder(exact)(row) == stored


# --- hostile bytes ------------------------------------------------------------------------------


def damaged(chunk: bytes, step: int) -> list[bytes]:
    """A chunk with a byte changed, here and there."""
    places = range(0, len(chunk), step)
    return [chunk[:at] + bytes([chunk[at] ^ 32]) + chunk[at + 1 :] for at in places]


def forged(codec: str, length: tuple[int, int], nbytes: int) -> bytes:
    """A chunk of zeros behind a head of rows and bytes, whose checksum is right."""
    payload = struct.pack("<II", *length) + bytes(nbytes)
    if codec == "raw":
        return payload + struct.pack("<I", google_crc32c.value(payload))
    return bytes(zstd.compress(payload, 19, True))


HEADS = ((0, 300), (2, 300), (200_000_000, 300), (1, 301), (1, 2**32 - 1), (1, 299))


def test_what_is_of_another_shape_or_not_as_it_was_stored_is_damage_and_takes_no_memory() -> None:
    file, grey = FILES["baseline"], FILES["grey"]
    at = file.index(b"\xff\xc0") + 5
    bomb = file[:at] + struct.pack(">HH", 30_000, 30_000) + file[at + 4 :]
    others = [(3, 61, 46), (3, 62, 47), (3, 47, 61), (4, 61, 47), (2, 61, 47), (0, 0, 0)]
    files: list[tuple[bytes, Shape, str | None]] = [
        *((file, shape, None) for shape in [*others, (3, 1 << 14, 1 << 14)]),
        (bomb, (3, 30_000, 30_000), "cannot be"),
        (bomb, (3, 61, 47), "30000 x 30000 pixels where"),
        *((data, (3, 8, 8), None)
          for data in (b"", b"\xff\xd8", b"no picture", bytes(300), grey[:40])),
    ]  # fmt: skip
    shape, planes = (3, 29, 41), chunk_of("raw420", planes_of(row_of(3, 29, 41)))
    others = [(3, 28, 41), (3, 29, 43), (1, 29, 41), (4, 29, 41), (3, 1 << 15, 1 << 15), (0, 0, 0)]
    chunks: list[tuple[str, bytes, Shape, str | None]] = [
        *(("jpeg", chunk_of("jpeg", data), of, said) for data, of, said in files),
        *(("raw420", planes, other, None) for other in others),
        *(("raw420", data, shape, None) for data in damaged(planes, 37)),
        *((codec, forged(codec, (1, 3 << 30), 1 << 20), (3, 1 << 15, 1 << 15), "cannot be")
          for codec in ("zstd", "image")),
    ]  # fmt: skip
    for codec, exact in EXACT.items():
        chunk = ragged_encoder(exact)(row_of(1, *shape[1:]))
        spoilt = [*damaged(chunk, 97), *(chunk[:end] for end in (0, 3, 8, 11, len(chunk) - 1))]
        others = [(3, 29, 40), (3, 30, 41), (0, 0, 0), (3, 29, 410)]
        said = "no single row of 300 bytes"
        chunks += [(codec, forged(codec, head, 300), (3, 10, 10), said) for head in HEADS]
        chunks += [(codec, data, shape, None) for data in spoilt]
        chunks += [(codec, chunk, other, None) for other in others]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for codec, data, claimed, said in chunks:
        with pytest.raises(DamageError, match=said):
            read(codec, data, claimed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("name", FILES)
def test_broken_files_are_damage(name: str) -> None:
    file, chunk = FILES[name], chunk_of("jpeg", FILES[name])
    cuts = range(0, len(file) - 3, 1 + len(file) // 60)
    for data in [
        *(chunk_of("jpeg", file[:cut]) for cut in cuts),
        *damaged(chunk, 1 + len(chunk) // 60),
    ]:
        with pytest.raises(DamageError):
            read("jpeg", data, decoded(file).shape)


def test_chunks_of_several_rows_are_refused() -> None:
    for name, codec in CODECS.items():
        with pytest.raises(RecipeError, match=f"'{name}' stores ragged rows"):
            encoder(codec, "uint8")
