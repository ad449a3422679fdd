"""Decoding: every format, held against Pillow doing the same."""

from __future__ import annotations

import io
import resource
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import precache_workers.ops.decoding
from precache.errors import SampleError
from precache.recipe.ops import Decode
from precache_workers.ops.decoding import Scratch, decode
from tests.support.building import ask, encoded, photograph
from tests.support.pictures import (
    ORIENTATION,
    PHOTOGRAPHS,
    by_pillow,
    half_transparent,
    oriented,
    plugins_after_decoding,
)

# --- JPEG ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(451, 300), (450, 299), (17, 33), (1, 1), (8, 2000)])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4", "4:1:1"])
def test_jpegs_are_decoded_as_by_pillow(
    subsampling: str, progressive: bool, size: tuple[int, int]
) -> None:
    image = photograph().resize(size)
    data = encoded(image, quality=85, subsampling=subsampling, progressive=progressive)
    assert np.array_equal(decode(data, Decode()), by_pillow(data))


@pytest.mark.parametrize("quality", [1, 30, 75, 100])
def test_any_quality(quality: int) -> None:
    data = encoded(photograph("coffee.png"), quality=quality)
    assert np.array_equal(decode(data, Decode()), by_pillow(data))


@pytest.mark.parametrize("limit", [Scratch.LIMIT, 1000])
def test_memory_decoded_into_is_used_again_and_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(Scratch, "LIMIT", limit)
    scratch = Scratch()
    photos = [photograph().resize(size) for size in [(90, 60), (300, 200), (40, 50), (300, 200)]]
    held = []
    for data in [encoded(photo, quality=90) for photo in photos]:
        found = decode(data, Decode(), scratch=scratch)
        assert np.array_equal(found, by_pillow(data))
        held.append(found)
    assert np.shares_memory(held[1], held[3]) is (limit > 1000)


def test_restart_markers_and_optimised_tables() -> None:
    data = encoded(photograph(), quality=80, optimize=True, restart_marker_rows=1)
    assert np.array_equal(decode(data, Decode()), by_pillow(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("stored", ["RGB", "L", "CMYK"])
def test_colours_are_what_was_asked_for(stored: str, mode: str) -> None:
    data = encoded(photograph().convert(stored), quality=90)
    found = decode(data, Decode(mode=mode))
    assert found.dtype == np.uint8
    assert np.array_equal(found, by_pillow(data, mode))
    assert found.shape[2] == {"RGB": 3, "L": 1, "RGBA": 4}[mode]


def test_cmyk_looks_like_the_photograph() -> None:
    data = encoded(photograph().convert("CMYK"), quality=95)
    difference = np.abs(decode(data, Decode()).astype(int) - np.asarray(photograph()))
    assert difference.mean() < 4


def test_ycck() -> None:
    cmyk = encoded(photograph().convert("CMYK"), quality=95)
    marker = cmyk.index(b"Adobe") + len(b"Adobe") + 6
    ycck = cmyk[:marker] + b"\x02" + cmyk[marker + 1 :]  # the transform: 2 says YCCK
    found = decode(ycck, Decode())
    assert np.array_equal(found, by_pillow(ycck))
    assert not np.array_equal(found, decode(cmyk, Decode()))


def test_jpegs_stored_as_rgb() -> None:
    data = encoded(photograph(), quality=95, keep_rgb=True)
    assert np.array_equal(decode(data, Decode()), by_pillow(data))


def test_bytes_behind_the_end_do_not_count() -> None:
    data = encoded(photograph(), quality=90)
    assert np.array_equal(decode(data + b"\0 trailing" * 50, Decode()), by_pillow(data))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer(kind: Callable[[bytes], Any]) -> None:
    data = encoded(photograph(), quality=90)
    assert np.array_equal(decode(kind(data), Decode()), by_pillow(data))


# --- other formats ------------------------------------------------------------------------------


def palette(**options: Any) -> bytes:
    return encoded(photograph().quantize(64), "PNG", **options)


FORMATS: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: encoded(photograph(), "PNG"),
    "PNG interlaced bits": lambda: encoded(photograph().convert("1"), "PNG"),
    "PNG grey": lambda: encoded(photograph().convert("L"), "PNG"),
    "PNG palette": palette,
    "PNG palette with one transparent colour": lambda: palette(transparency=3),
    "PNG alpha": lambda: encoded(half_transparent(), "PNG"),
    "PNG grey with alpha": lambda: encoded(half_transparent().convert("LA"), "PNG"),
    "PNG transparent colour": lambda: encoded(photograph(), "PNG", transparency=(9, 9, 9)),
    "WebP": lambda: encoded(photograph(), "WEBP", quality=80),
    "WebP lossless alpha": lambda: encoded(half_transparent(), "WEBP", lossless=True),
    "BMP": lambda: encoded(photograph(), "BMP"),
    "BMP bits": lambda: encoded(photograph().convert("1"), "BMP"),
    "GIF": lambda: encoded(photograph().quantize(32), "GIF"),
    "TIFF": lambda: encoded(photograph(), "TIFF"),
    "TIFF LZW": lambda: encoded(photograph(), "TIFF", compression="tiff_lzw"),
    "TIFF JPEG": lambda: encoded(photograph(), "TIFF", compression="jpeg"),
    "TIFF CMYK": lambda: encoded(photograph().convert("CMYK"), "TIFF"),
    "TIFF grey": lambda: encoded(photograph().convert("L"), "TIFF"),
}


PALETTES = ("PNG palette", "PNG palette with one transparent colour", "GIF")


def cases(*modes: str) -> list[tuple[str, str]]:
    """Formats and modes; grey levels of a palette's colours are refused."""
    return [(n, m) for n in FORMATS for m in modes if m != "L" or n not in PALETTES]


@pytest.mark.parametrize(("name", "mode"), cases("RGB", "L"))
def test_formats_are_decoded_as_by_pillow(name: str, mode: str) -> None:
    data = FORMATS[name]()
    assert np.array_equal(decode(data, Decode(mode=mode)), by_pillow(data, mode))


@pytest.mark.parametrize(("name", "mode"), cases("RGB", "L", "RGBA"))
def test_strips_make_no_difference(monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    data = FORMATS[name]()
    whole = decode(data, Decode(mode=mode))
    monkeypatch.setattr(precache_workers.ops.decoding, "STRIP_PIXELS", 5000)
    assert np.array_equal(decode(data, Decode(mode=mode)), whole)


def test_a_large_picture_is_in_memory_twice_at_most() -> None:
    pixels = 50_000_000
    data = encoded(Image.new("RGB", (10_000, pixels // 10_000)), "PNG", compress_level=1)
    assert ask(memory_to_decode, data) < 10 * pixels, "Pillow takes 4 bytes a pixel, we take 3"


def memory_to_decode(data: bytes) -> int:
    """Bytes by which the peak of this process grows."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decode(data, Decode())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_a_palette_with_a_transparency_for_each_colour() -> None:
    data = palette(transparency=bytes(range(0, 256, 4)))
    with Image.open(io.BytesIO(data)) as image:
        expected = image.convert("RGBA")
    assert np.array_equal(decode(data, Decode(mode="RGBA")), np.asarray(expected))
    assert np.array_equal(decode(data, Decode()), np.asarray(expected)[..., :3])


@pytest.mark.parametrize("strip", [5000, 1 << 20])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_high_byte(
    monkeypatch: pytest.MonkeyPatch, kind: str, strip: int
) -> None:
    monkeypatch.setattr(precache_workers.ops.decoding, "STRIP_PIXELS", strip)
    grey = np.asarray(photograph().convert("L"))
    wide = grey.astype(np.uint16) << 8 | np.random.default_rng(0).integers(
        0, 256, grey.shape, np.uint16
    )
    data = encoded(Image.fromarray(wide), kind)
    found = decode(data, Decode())
    assert found.shape == (*grey.shape, 3)
    assert all(np.array_equal(found[..., channel], grey) for channel in range(3))
    assert np.array_equal(decode(data, Decode(mode="L"))[..., 0], grey)


WIDE = {
    "I": np.arange(12, dtype=np.int32).reshape(3, 4) << 20,
    "F": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
}


@pytest.mark.parametrize("mode", WIDE)
def test_values_of_32_bits_are_refused_in_words(mode: str) -> None:
    """They had become black."""
    image = Image.fromarray(WIDE[mode])
    assert image.mode == mode
    for value in (encoded(image, "TIFF"), image):
        with pytest.raises(SampleError, match=f"Pillow's mode {mode}, .*save it with 8 or 16 bits"):
            decode(value, Decode())


def test_a_tiff_of_12_bits_is_refused() -> None:
    """Pillow opens it as one of 16 bits, whose high byte is nearly black."""
    data = encoded(Image.fromarray(np.full((2, 2), 4095, np.uint16)), "TIFF")
    entry = struct.pack("<HHLHH", 258, 3, 1, 16, 0)
    assert data.count(entry) == 1
    twelve = data.replace(entry, struct.pack("<HHLHH", 258, 3, 1, 12, 0))
    with Image.open(io.BytesIO(twelve)) as image:
        assert image.mode == "I;16"
    with pytest.raises(SampleError, match="Pillow's mode I;16"):
        decode(twelve, Decode())


EIGHT_BITS = ("LA", "PA", "La", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV")


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [(m, w) for m in EIGHT_BITS for w in ("RGB", "L", "RGBA") if (m, w) != ("PA", "L")],
)
def test_every_mode_of_8_bits_keeps_its_colour(mode: str, wanted: str) -> None:
    colour = (200, 100, 50)
    step = {"La": "LA", "RGBa": "RGBA"}.get(mode, mode)
    image = Image.new("RGB", (2, 2), colour).convert(step).convert(mode)
    expected = np.asarray(Image.new("RGB", (1, 1), colour).convert("L" if "L" in mode else "RGB"))
    expected = np.asarray(Image.fromarray(expected).convert(wanted)).reshape(-1)
    found = decode(image, Decode(mode=wanted))[0, 0]
    assert np.abs(found.astype(int) - expected).max() <= (4 if mode != "PA" else 8)


# --- values as they are --------------------------------------------------------------------------


def indexed() -> Image.Image:
    """A mask of the classes 0 to 20 and 255, in the colours of a palette."""
    values = np.kron(np.arange(24).reshape(4, 6) % 22, np.ones((9, 11), int)).astype(np.uint8)
    values[values == 21] = 255
    image = Image.fromarray(values)
    image.putpalette([(number * 37 + 11) % 256 for number in range(768)])
    return image


VALUES: dict[str, Callable[[], Any]] = {
    "PNG palette": lambda: encoded(indexed(), "PNG"),
    "PNG palette of few bits": lambda: encoded(indexed().point(lambda value: value % 13), "PNG"),
    "PNG palette with alpha": lambda: encoded(indexed(), "PNG", transparency=bytes(range(256))),
    "PNG grey": lambda: encoded(Image.fromarray(np.asarray(indexed())), "PNG"),
    "GIF": lambda: encoded(indexed(), "GIF", optimize=False),
    "TIFF": lambda: encoded(indexed(), "TIFF"),
    "BMP": lambda: encoded(indexed(), "BMP"),
    "image": indexed,
    "array": lambda: np.asarray(indexed()),
}


@pytest.mark.parametrize("name", VALUES)
def test_indices_are_kept(name: str) -> None:
    found = decode(VALUES[name](), Decode(mode="P"))
    expected = np.asarray(indexed())
    expected = expected % 13 if "few bits" in name else expected
    assert (found.dtype, found.shape) == (np.uint8, (*expected.shape, 1))
    assert np.array_equal(found[..., 0], expected)


def grey_of_bits(bits: int) -> bytes:
    return png((8, 1, bits, 0), zlib.compress(b"\0" + b"\x1b" * bits))


NO_VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "RGB": (lambda: encoded(photograph(), "PNG"), r"mode RGB, .*--mode RGB"),
    "RGBA": (lambda: encoded(half_transparent(), "PNG"), "mode RGBA, .*--mode RGB"),
    "bits": (
        lambda: encoded(photograph().convert("1"), "PNG"),
        "mode 1, .*0 and 255.*--mode L --interpolation nearest",
    ),
    "grey of 2 bits": (lambda: grey_of_bits(2), "grey of 2 bits"),
    "grey of 4 bits": (lambda: grey_of_bits(4), "grey of 4 bits"),
    "16 bits": (lambda: encoded(Image.fromarray(np.ones((2, 2), np.uint16)), "PNG"), "I;16.*func"),
    "JPEG": (lambda: encoded(photograph().convert("L")), "is a JPEG, .*save masks as PNG"),
}


@pytest.mark.parametrize("name", NO_VALUES)
def test_other_images_have_no_indices(name: str) -> None:
    make, reason = NO_VALUES[name]
    with pytest.raises(SampleError, match=reason):
        decode(make(), Decode(mode="P"))


@pytest.mark.parametrize("name", [*PALETTES, "image"])
def test_a_palette_has_no_grey_levels(name: str) -> None:
    data = FORMATS[name]() if name in FORMATS else indexed()
    with pytest.raises(SampleError, match=r"palette image, .*--mode P .*--mode RGB"):
        decode(data, Decode(mode="L"))


def in_sixteen_bits(values: np.ndarray) -> dict[str, bytes]:
    """Name -> file of (H, W) or (H, W, C) values; those of colour are written by hand."""
    height, width, *channels = values.shape
    if not channels:
        return {kind: encoded(Image.fromarray(values), kind) for kind in ("PNG", "TIFF")}
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    kind = {3: 2, 4: 6}[channels[0]]
    files = {"PNG": png((width, height, 16, kind), zlib.compress(lines))}
    return files | {
        f"TIFF {order}": tiff_of_colours(values, order) for order in "<>" if channels == [3]
    }


def tiff_of_colours(values: np.ndarray, order: str) -> bytes:
    """An uncompressed TIFF of (H, W, 3) uint16 in one strip."""
    height, width, _ = values.shape
    body = values.astype(f"{order}u2").tobytes()
    bits = struct.pack(f"{order}HHH", 16, 16, 16)
    at = 8
    entries = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, 3, at + len(body)),
        (259, 3, 1, 1),
        (262, 3, 1, 2),
        (273, 4, 1, at),
        (277, 3, 1, 3),
        (278, 3, 1, height),
        (279, 4, 1, len(body)),
    ]
    start = at + len(body) + len(bits)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HL", 42, start)
    tags = struct.pack(f"{order}H", len(entries))
    for tag, kind, count, value in entries:
        short = kind == 3 and count == 1
        tags += struct.pack(f"{order}HHL", tag, kind, count)
        tags += struct.pack(
            f"{order}{'HH' if short else 'L'}", *((value, 0) if short else (value,))
        )
    return head + body + bits + tags + bytes(4)


@pytest.mark.parametrize("strip", [50, 1 << 20])
@pytest.mark.parametrize("bits", [8, 10, 12, 14])
@pytest.mark.parametrize("channels", [(), (3,), (4,)])
def test_fewer_bits_in_sixteen_keep_their_highest(
    monkeypatch: pytest.MonkeyPatch, channels: tuple[int, ...], bits: int, strip: int
) -> None:
    monkeypatch.setattr(precache_workers.ops.decoding, "STRIP_PIXELS", strip)
    random = np.random.default_rng(bits)
    values = random.integers(0, 1 << bits, (13, 9, *channels)).astype(np.uint16)
    values[0, 0] = (1 << bits) - 1
    expected = (values >> (bits - 8)).astype(np.uint8)
    if channels == (4,):  # alpha always has all of its bits
        values[..., 3] = random.integers(0, 1 << 16, (13, 9))
        expected[..., 3] = values[..., 3] >> 8
    mode = {(): "L", (3,): "RGB", (4,): "RGBA"}[channels]
    for name, data in in_sixteen_bits(values).items():
        found = decode(data, Decode(mode=mode, bits=bits))
        assert np.array_equal(found.reshape(expected.shape), expected), name
        if channels != (4,):
            facts = precache_workers.ops.decoding.picture_facts(data, Decode())
            assert facts.widest == values.max(), name
        if bits > 8:
            with pytest.raises(SampleError, match=r"which is more than 8 bits hold.*--bits"):
                decode(data, Decode(mode=mode, bits=8))


def test_bits_are_those_of_sixteen_bit_images_alone() -> None:
    for data in (encoded(photograph(), "PNG"), encoded(photograph()), photograph()):
        assert np.array_equal(decode(data, Decode(bits=12)), decode(data, Decode()))


def test_sixteen_bits_of_colour() -> None:
    """A hand-made PNG, as Pillow writes none: 2 x 1 pixels."""
    pixels = np.array([[[0x1234, 0x80FF, 0xFF00], [0, 0x0100, 0xFFFF]]], ">u2")
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    data = png((2, 1, 16, 2), zlib.compress(lines))
    assert decode(data, Decode()).tolist() == [[[0x12, 0x80, 0xFF], [0, 0x01, 0xFF]]]


def png(header: tuple[int, int, int, int], body: bytes) -> bytes:
    """A PNG of (width, height, bits, colour type) with the given compressed lines."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", *header, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_the_first_frame_of_an_animation() -> None:
    frames = [photograph(name).resize((60, 40)).quantize(64) for name in PHOTOGRAPHS]
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        images = [f.convert("RGB") for f in frames] if kind == "WEBP" else frames
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(images[0], kind, save_all=True, append_images=images[1:], **options)
        assert np.array_equal(decode(data, Decode()), by_pillow(data)), kind
        assert np.array_equal(decode(data, Decode()), np.asarray(frames[0].convert("RGB"))), kind


def test_pillow_images_arrays_and_tensors_are_taken_as_they_are() -> None:
    pixels = np.asarray(photograph())
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    for value in (photograph(), pixels, tensor, pixels[:, ::-1][:, ::-1]):
        assert np.array_equal(decode(value, Decode()), pixels)
    grey = pixels[..., 1]
    for value in (grey, grey[..., None], Image.fromarray(grey)):
        assert np.array_equal(decode(value, Decode(mode="L"))[..., 0], grey)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "photo.jpg",
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 3, 1), np.uint8),
        np.zeros(4, np.uint8),
        torch.zeros(3, 4, 4),
    ],
)
def test_values_that_are_no_image(value: Any) -> None:
    with pytest.raises(SampleError, match=r"decode was given .*; it takes bytes"):
        decode(value, Decode())


# --- EXIF ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "grey JPEG", "CMYK JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_are_applied_as_by_pillow(orientation: int, kind: str) -> None:
    mode = {"grey JPEG": "L", "CMYK JPEG": "CMYK"}.get(kind, "RGB")
    options: dict[str, Any] = {"exif": oriented(orientation)}
    if kind == "TIFF":
        options = {"tiffinfo": {ORIENTATION: orientation}}
    if kind == "WEBP":
        options["lossless"] = True
    data = encoded(photograph().convert(mode), kind.rsplit(maxsplit=1)[-1], **options)
    found = decode(data, Decode())
    assert np.array_equal(found, by_pillow(data))
    assert (found.shape[0] > found.shape[1]) is (orientation > 4)


def test_an_orientation_behind_a_large_colour_profile() -> None:
    data = encoded(photograph(), exif=oriented(6), icc_profile=bytes(200_000))
    assert np.array_equal(decode(data, Decode()), by_pillow(data))


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0no TIFF at all", b"Exif\0\0", oriented(0).tobytes(), oriented(9).tobytes()]
)
def test_an_orientation_that_cannot_be_read_turns_nothing(exif: bytes) -> None:
    data = encoded(photograph(), exif=exif)
    assert np.array_equal(decode(data, Decode()), by_pillow(encoded(photograph())))


def with_segments(*segments: bytes) -> bytes:
    """A JPEG whose first segments are these, each of APP1."""
    data = encoded(photograph())
    parts = (b"\xff\xe1" + (len(each) + 2).to_bytes(2, "big") + each for each in segments)
    return data[:2] + b"".join(parts) + data[2:]


EXIF_6, EXIF_WITHOUT = oriented(6).tobytes(), b"Exif\0\0II*\0\x08\0\0\0" + bytes(6)
XMP_3 = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="3"/>'


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # Pillow's, of what it is to compare with
@pytest.mark.parametrize(
    "segments",
    [
        [EXIF_6, XMP_3],
        [XMP_3, EXIF_6],
        [XMP_3],
        [EXIF_WITHOUT],
        [EXIF_WITHOUT, XMP_3],
        [EXIF_6[:20], EXIF_6[20:]],
        [EXIF_6[:20], b"Exif\0\0" + EXIF_6[20:]],
        [EXIF_6, EXIF_6],
        [b"Exif\0\0broken", XMP_3],
        [b"something else", EXIF_6],
    ],
)
def test_an_orientation_among_several_segments(segments: list[bytes]) -> None:
    data = with_segments(*segments)
    assert np.array_equal(decode(data, Decode()), by_pillow(data))


def test_exif_that_is_cut_short_neither_loses_the_photo_nor_warns() -> None:
    """Pillow warns of it; a build says nothing of a photo that it can decode."""
    cut_short = oriented(6).tobytes()[:17]
    data = encoded(photograph(), exif=cut_short)
    assert np.array_equal(decode(data, Decode()), by_pillow(encoded(photograph())))


# --- hostile files ------------------------------------------------------------------------------


def test_a_bomb_is_refused_by_its_header() -> None:
    giant = png((60_000, 60_000, 1, 0), zlib.compress(bytes(100)))
    with pytest.raises(SampleError, match="over the limit of 178956970 px"):
        decode(giant, Decode())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_the_limit_of_pixels_is_the_users_own(kind: str) -> None:
    image = photograph().quantize(16) if kind == "GIF" else photograph()
    data = encoded(image, kind)
    limit = image.width * image.height
    assert decode(data, Decode(max_pixels=limit)).shape == (300, 451, 3)
    with pytest.raises(SampleError, match=rf"451 x 300 px is over the limit of {limit - 1} "):
        decode(data, Decode(max_pixels=limit - 1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_the_limit_of_pixels_takes_the_place_of_pillows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tiffinfo": {ORIENTATION: 6}} if kind == "TIFF" else {"exif": oriented(6)}
    data = encoded(photograph(), kind, **options)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert decode(data, Decode()).shape == (451, 300, 3)
    assert Image.MAX_IMAGE_PIXELS == 1000


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.6, 0.97])
@pytest.mark.parametrize("name", ["JPEG", *FORMATS])
def test_truncated_files_are_samples_that_fail(name: str, share: float) -> None:
    data = encoded(photograph()) if name == "JPEG" else FORMATS[name]()
    try:
        found = decode(data[: int(len(data) * share)], Decode())
    except SampleError:
        return
    assert name in ("TIFF LZW", "TIFF JPEG"), f"{name} was decoded: {found.shape}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xd9",
        b"GIF89a",
        b"BM" + bytes(60),
        b"RIFF\0\0\0\0WEBPVP8 ",
        b"II*\0\x08\0\0\0\xff\xff",
        b"\x89PNG\r\n\x1a\n",
        b"<html><body>404</body></html>",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        bytes(4096),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    ],
)
def test_garbage_is_a_sample_that_fails(data: bytes) -> None:
    with pytest.raises(SampleError) as caught:
        decode(data, Decode())
    assert str(caught.value)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    "data",
    [
        POSTSCRIPT,
        *(
            encoded(Image.new("RGB", (32, 32)).convert(mode), kind)
            for kind, mode in [
                *(("PPM", "RGB"), ("ICO", "RGB"), ("ICNS", "RGB"), ("BLP", "P"), ("TGA", "RGB")),
                *(
                    ("PCX", "RGB"),
                    ("SGI", "RGB"),
                    ("DDS", "RGB"),
                    ("JPEG2000", "RGB"),
                    ("PDF", "RGB"),
                ),
            ]
        ),
    ],
)
def test_formats_that_are_not_promised_are_not_opened(data: bytes) -> None:
    """Pillow would start Ghostscript for some, and decode a picture within a picture of others."""
    with pytest.raises(
        SampleError, match="decode reads, whatever its name: JPEG, PNG, WEBP, BMP, GIF, TIFF"
    ):
        decode(data, Decode())


def test_no_other_decoder_of_pillow_is_loaded() -> None:
    loaded = ask(plugins_after_decoding, [POSTSCRIPT, *(make() for make in FORMATS.values())])
    others = {"Bmp", "Gif", "Jpeg", "Png", "Tiff", "WebP", "Ppm", "Mpo"}  # Ppm: always, by Pillow
    assert loaded <= {f"PIL.{name}ImagePlugin" for name in others}


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_a_jpeg_of_several_pictures_is_its_first(mode: str) -> None:
    """As telephones write them."""
    first, second = (photograph(name).resize((80, 60)) for name in PHOTOGRAPHS[:2])
    data = encoded(first, "MPO", save_all=True, append_images=[second], exif=oriented(6))
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "MPO"
    assert np.array_equal(decode(data, Decode(mode=mode)), by_pillow(data, mode))
