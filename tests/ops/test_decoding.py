"""Decoding: every format, held against Pillow doing the same."""

import contextlib
import io
import itertools
import re
import struct
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageCms, ImageOps

import precache
from precache.errors import PrecacheError, SampleError
from precache.recipe.ops import Decode
from precache.recipe.recipe import Recipe
from precache.recipe.resampling import resize
from precache_workers.ops import decoding
from precache_workers.ops.decoding import Scratch, decode, frame_of
from tests.support.building import ask, build_here, encoded, growth, photograph, write
from tests.support.pictures import (
    ORIENTATION,
    PHOTOGRAPHS,
    by_pillow,
    half_transparent,
    oriented,
    plugins_after_decoding,
    png,
)

# --- as by Pillow -------------------------------------------------------------------------------


def jpeg(mode: str = "RGB", size: tuple[int, int] = (451, 300), **options: Any) -> bytes:
    return encoded(photograph().convert(mode).resize(size), **{"quality": 85, **options})


def ycck() -> bytes:
    cmyk = jpeg("CMYK")
    marker = cmyk.index(b"Adobe") + len(b"Adobe") + 6
    return cmyk[:marker] + b"\x02" + cmyk[marker + 1 :]  # the transform: 2 says YCCK


def palette(**options: Any) -> bytes:
    return encoded(photograph().quantize(64), "PNG", **options)


def with_segments(*segments: bytes) -> bytes:
    """A JPEG whose first segments are these, each of APP1."""
    data = jpeg()
    parts = (b"\xff\xe1" + (len(each) + 2).to_bytes(2, "big") + each for each in segments)
    return data[:2] + b"".join(parts) + data[2:]


def turned(kind: str, orientation: int) -> bytes:
    mode = {"grey JPEG": "L", "CMYK JPEG": "CMYK"}.get(kind, "RGB")
    options: dict[str, Any] = {"exif": oriented(orientation), "lossless": True}
    if kind == "TIFF":
        options = {"tiffinfo": {ORIENTATION: orientation}}
    return encoded(photograph().convert(mode), kind.rsplit(maxsplit=1)[-1], **options)


def animated(kind: str) -> bytes:
    frames = [photograph(name).resize((60, 40)).quantize(64) for name in PHOTOGRAPHS]
    images = [f.convert("RGB") for f in frames] if kind == "WEBP" else frames
    options = {"lossless": True} if kind == "WEBP" else {}
    return encoded(images[0], kind, save_all=True, append_images=images[1:], **options)


def of_a_telephone() -> bytes:
    first, second = (photograph(name).resize((80, 60)) for name in PHOTOGRAPHS[:2])
    return encoded(first, "MPO", save_all=True, append_images=[second], exif=oriented(6))


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
EXIF_6, EXIF_WITHOUT = oriented(6).tobytes(), b"Exif\0\0II*\0\x08\0\0\0" + bytes(6)
XMP_3 = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="3"/>'
SEGMENTS = {
    "EXIF and XMP": [EXIF_6, XMP_3], "XMP and EXIF": [XMP_3, EXIF_6], "XMP": [XMP_3],
    "EXIF without an orientation": [EXIF_WITHOUT],
    "EXIF without an orientation, and XMP": [EXIF_WITHOUT, XMP_3],
    "EXIF in two parts": [EXIF_6[:20], EXIF_6[20:]],
    "EXIF in two marked parts": [EXIF_6[:20], b"Exif\0\0" + EXIF_6[20:]],
    "EXIF twice": [EXIF_6, EXIF_6], "broken EXIF, and XMP": [b"Exif\0\0broken", XMP_3],
    "something else, and EXIF": [b"something else", EXIF_6],
}  # fmt: skip
FILES: dict[str, Callable[[], bytes]] = {
    **{
        f"JPEG {subsampling} {size}{' progressive' * more}": partial(
            jpeg, size=size, subsampling=subsampling, progressive=more
        )
        for size in [(451, 300), (17, 33), (1, 1)]
        for more in (False, True)
        for subsampling in ("4:2:0", "4:2:2", "4:4:4", "4:1:1")
    },
    **{f"JPEG of quality {n}": partial(jpeg, quality=n) for n in (1, 30, 75, 100)},
    "restart markers and optimised tables": lambda: jpeg(optimize=True, restart_marker_rows=1),
    "JPEG 4:4:1": lambda: jpeg(size=(64, 64)).replace(b"\1\x22\0", b"\1\x14\0", 1),
    "grey JPEG": lambda: jpeg("L"),
    "CMYK JPEG": lambda: jpeg("CMYK"),
    "YCCK JPEG": ycck,
    "JPEG stored as RGB": lambda: jpeg(keep_rgb=True),
    "bytes behind the end": lambda: jpeg() + b"\0 trailing" * 50,
    **FORMATS,
    **{
        f"{kind} turned {orientation}": partial(turned, kind, orientation)
        for kind in ("JPEG", "grey JPEG", "CMYK JPEG", "PNG", "WEBP", "TIFF")
        for orientation in (range(1, 9) if kind == "JPEG" else (1, 3, 6))
    },
    "an orientation behind a large profile": lambda: jpeg(
        exif=oriented(6), icc_profile=bytes(200_000)
    ),
    **{f"{name} of a JPEG": partial(with_segments, *of) for name, of in SEGMENTS.items()},
    **{f"animated {kind}": partial(animated, kind) for kind in ("GIF", "WEBP", "PNG")},
    "a JPEG of several pictures": of_a_telephone,
}
PALETTES = ("PNG palette", "PNG palette with one transparent colour", "GIF")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # Pillow's, of what it is to compare with
@pytest.mark.parametrize("name", FILES)
def test_files_are_decoded_as_by_pillow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = FILES[name]()
    for mode in ("RGB", "L", "RGBA"):
        if mode == "L" and name in (*PALETTES, "animated GIF", "animated PNG"):
            continue  # refused
        expected = by_pillow(data, mode)
        for strip in (decoding.STRIP_PIXELS, 5000):
            with monkeypatch.context() as cut:
                cut.setattr(decoding, "STRIP_PIXELS", strip)
                found = decode(data, Decode(mode=mode))
            assert found.dtype == np.uint8
            assert np.array_equal(found, expected), mode
        if " turned " in name:
            assert (found.shape[0] > found.shape[1]) is (int(name[-1]) > 4)


@pytest.mark.parametrize("name", [name for name in FILES if " turned " in name])
def test_stored_pixels_and_frames_are_those_of_the_file(name: str) -> None:
    """Pillow turns a TIFF as it loads it, and has its size turned before that."""
    data, upright = FILES[name](), FILES[name[:-1] + "1"]()
    for mode in ("RGB", "unchanged"):
        stored = Decode(mode=mode, orientation="stored")  # type: ignore[arg-type]
        assert np.array_equal(decode(data, stored), decode(upright, stored))
        for op in (stored, Decode(mode=mode)):  # type: ignore[arg-type]
            height, width, _ = decode(data, op).shape
            assert frame_of(data, op).decoded(op) == (width, height)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_stored_pixels_of_a_tiff_of_sixteen_bits(orientation: int) -> None:
    values = random_bytes(48, 64, 3).astype(np.uint16) << 4
    for part, kind in ((values, "rgb"), (values[..., 0], "minisblack")):
        file, tags = io.BytesIO(), [(ORIENTATION, "H", 1, orientation, False)]
        tifffile.imwrite(file, part, photometric=kind, extratags=tags)
        for bits in (12, 16):
            op = Decode(mode="RGB", bits=bits, orientation="stored")
            found = decode(file.getvalue(), op)
            assert np.array_equal(
                found, np.dstack([part >> (bits - 8)] * (1 if kind == "rgb" else 3))
            )


def test_cmyk_looks_like_the_photograph_and_an_animation_like_its_first_frame() -> None:
    difference = np.abs(decode(jpeg("CMYK", quality=95), Decode()).astype(int) - photograph())
    assert difference.mean() < 4
    assert not np.array_equal(decode(ycck(), Decode()), decode(jpeg("CMYK"), Decode()))
    first = photograph(PHOTOGRAPHS[0]).resize((60, 40)).quantize(64).convert("RGB")
    for kind in ("GIF", "WEBP", "PNG"):
        assert np.array_equal(decode(animated(kind), Decode()), np.asarray(first)), kind


@pytest.mark.parametrize("limit", [Scratch.LIMIT, 1000])
def test_memory_decoded_into_is_used_again_and_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(Scratch, "LIMIT", limit)
    scratch, held = Scratch(), []
    kinds: dict[Any, Any] = {(90, 60): bytearray, (300, 200): bytes, (40, 50): memoryview}
    for size in [(90, 60), (300, 200), (40, 50), (300, 200)]:
        data = jpeg(size=size)
        held.append(decode(kinds[size](data), Decode(), scratch=scratch))
        assert np.array_equal(held[-1], by_pillow(data))
    assert np.shares_memory(held[1], held[3]) is (limit > 1000)


def test_a_large_picture_is_in_memory_twice_at_most() -> None:
    pixels = 50_000_000
    data = encoded(Image.new("RGB", (10_000, pixels // 10_000)), "PNG", compress_level=1)
    assert ask(growth, decode, data, Decode()) < 10 * pixels, (
        "Pillow takes 4 bytes a pixel, we take 3"
    )


def test_a_palette_with_a_transparency_for_each_colour() -> None:
    data = palette(transparency=bytes(range(0, 256, 4)))
    with Image.open(io.BytesIO(data)) as image:
        expected = image.convert("RGBA")
    assert np.array_equal(decode(data, Decode(mode="RGBA")), np.asarray(expected))
    assert np.array_equal(decode(data, Decode()), np.asarray(expected)[..., :3])


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_colours_of_16_bits_in_planes_are_refused_but_where_values_are_kept(
    compression: str | None,
) -> None:
    """Pillow takes each byte of uncompressed ones for a value."""
    values = np.random.default_rng(0).integers(0, 1 << 12, (20, 30, 3), np.uint16)
    data = tiff(
        values.transpose(2, 0, 1),
        photometric="rgb",
        planarconfig="separate",
        compression=compression,
    )
    assert np.array_equal(decode(data, Decode(mode="unchanged")), values)
    for op in (Decode(bits=12), Decode(mode="L", bits=16)):
        with pytest.raises(SampleError, match=r"16 bits in planes of their own.*--mode unchanged"):
            decode(data, op)


@pytest.mark.parametrize(
    "kinds", [{"photometric": "separated"}, {"photometric": "rgb", "extrasamples": [1]}]
)
def test_inks_and_premultiplied_alpha_of_16_bits_have_no_fewer(kinds: dict[str, Any]) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 12, (20, 30, 4), np.uint16)
    data = tiff(values, **kinds)
    assert np.array_equal(decode(data, Decode(mode="unchanged")), values)
    assert decode(data, Decode(bits=16)).shape == (20, 30, 3)
    for op in (Decode(), Decode(bits=12)):
        with pytest.raises(SampleError, match=r"16 bits, in .*--bits 16. alone.*--mode unchanged"):
            decode(data, op)


def by_tifffile(values: np.ndarray, white: bool, **options: Any) -> bytes:
    return tiff(values, photometric="miniswhite" if white else "minisblack", **options)


def tiff_by_pillow(values: np.ndarray, white: bool, **options: Any) -> bytes:
    return encoded(Image.fromarray(values), "TIFF", tiffinfo={262: int(not white)}, **options)


@pytest.mark.parametrize(
    ("write", "compression", "dtype"),
    [
        *((by_tifffile, how, dtype) for how in (None, "zlib") for dtype in ("uint8", "uint16")),
        *((tiff_by_pillow, how, "uint16") for how in (None, "tiff_lzw")),
    ],
)
def test_values_that_count_from_white_are_turned_around(
    write: Callable[..., bytes], compression: str | None, dtype: str
) -> None:
    values = random_bytes(48, 64).astype(dtype) * 7
    for op in (Decode(mode="unchanged"), Decode(mode="L", bits=16)):
        black, white = (
            decode(write(values, of, compression=compression), op)[..., 0] for of in (False, True)
        )
        assert np.array_equal(white, np.iinfo(white.dtype).max - black)
        assert op.mode == "L" or np.array_equal(black, values)


# --- more than one picture -----------------------------------------------------------------------


def tiff(
    *pages: np.ndarray, kinds: tuple[int, ...] = (), big: bool = False, **options: Any
) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file, bigtiff=big) as writer:
        for page, kind in itertools.zip_longest(pages, kinds, fillvalue=0):
            # Without metadata, equal pages would become one series.
            writer.write(page, subfiletype=kind, metadata=None, **options)  # type: ignore[arg-type]
    return file.getvalue()


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


COLOURS, GREY = random_bytes(48, 64, 3), random_bytes(48, 64)
FOUR, FIVE, TWO = random_bytes(48, 64, 4), random_bytes(48, 64, 5), random_bytes(48, 64, 2)
UNSPECIFIED: dict[str, Any] = {"photometric": "rgb", "extrasamples": ["unspecified"]}
WITH_MORE: dict[str, Callable[[], bytes]] = {
    "channels as pages": lambda: tiff(*COLOURS.transpose(2, 0, 1)),
    "slices": lambda: tiff(*[GREY] * 12),
    "pages of a BigTIFF": lambda: tiff(GREY, GREY, big=True),
    "a page behind a thumbnail": lambda: tiff(GREY, GREY[::2, ::2], GREY, kinds=(0, 1, 0)),
    "pages of 16 bits": lambda: tiff(*[GREY.astype(np.uint16) << 8] * 2),
    "a volume": lambda: tiff(random_bytes(16, 48, 64), volumetric=True, tile=(16, 16, 16)),
    "near infrared": lambda: tiff(FOUR, **UNSPECIFIED),
    "near infrared of 16 bits": lambda: tiff(FOUR.astype(np.uint16) << 8, **UNSPECIFIED),
    "two bands more": lambda: tiff(FIVE, photometric="rgb", extrasamples=["unspecified"] * 2),
    "alpha and a band": lambda: tiff(
        FIVE, photometric="rgb", extrasamples=["unassalpha", "unspecified"]
    ),
    "two bands": lambda: tiff(TWO, photometric="minisblack", extrasamples=["unspecified"]),
}


def with_mask() -> bytes:
    data, entry = tiff(COLOURS, COLOURS, kinds=(0, 1), photometric="rgb"), "<HHLL"
    assert data.count(struct.pack(entry, 254, 4, 1, 1)) == 1
    return data.replace(struct.pack(entry, 254, 4, 1, 1), struct.pack(entry, 254, 4, 1, 4))


def missing_page() -> bytes:
    """A TIFF whose only page names another one, behind the end of the file."""
    data = bytearray(tiff(COLOURS, photometric="rgb"))
    at = struct.unpack_from("<I", data, 4)[0]
    count = struct.unpack_from("<H", data, at)[0]
    struct.pack_into("<I", data, at + 2 + 12 * count, len(data) + 99)
    return bytes(data)


ALONE: dict[str, Callable[[], bytes]] = {
    "overviews": lambda: tiff(
        COLOURS, COLOURS[::2, ::2], COLOURS[::4, ::4], kinds=(0, 1, 1), photometric="rgb"
    ),
    "overviews that are not named": lambda: tiff(
        COLOURS, COLOURS[::2, ::2], COLOURS[::4, ::4], photometric="rgb", big=True
    ),
    "a mask": with_mask,
    "alpha": lambda: tiff(FOUR, photometric="rgb", extrasamples=["unassalpha"]),
    "alpha that is not named": cv2.imencode(".tif", FOUR)[1].tobytes,
    "a damaged second page": lambda: tiff(COLOURS, COLOURS, photometric="rgb")[:9470],
    "a second page that is missing": missing_page,
}


@pytest.mark.parametrize("name", ALONE)
def test_overviews_masks_and_alpha_are_no_other_pictures(name: str) -> None:
    data = ALONE[name]()
    for mode in ("RGB", "L"):
        assert np.array_equal(decode(data, Decode(mode=mode)), by_pillow(data, mode))
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decode(image, Decode()), by_pillow(data))


def test_a_page_that_was_chosen_is_taken() -> None:
    with Image.open(io.BytesIO(tiff(GREY, 255 - GREY))) as image:
        image.seek(1)
        assert np.array_equal(decode(image, Decode(mode="L"))[..., 0], 255 - GREY)


@pytest.mark.parametrize("channels", [2, 4, 5, 64])
@pytest.mark.parametrize("tensor", [False, True])
def test_channels_of_an_array_are_no_alpha(channels: int, tensor: bool) -> None:
    """The last one of 2 and 4 was dropped."""
    array = random_bytes(48, 64, channels)
    data = torch.from_numpy(array.transpose(2, 0, 1).copy()) if tensor else array
    for mode in ("RGB", "L", "P", "RGBA"):
        if (channels, mode) == (4, "RGBA"):
            assert np.array_equal(decode(data, Decode(mode=mode)), array)
            continue
        with pytest.raises(SampleError, match=rf"\(48, 64, {channels}\), .*takes 1 or 3") as caught:
            decode(data, Decode(mode=mode))
        assert ("--mode RGBA" in str(caught.value)) == (channels == 4)


WIDE = {
    "I": Image.fromarray(np.arange(12, dtype=np.int32).reshape(3, 4) << 20),
    "F": Image.fromarray(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)),
}


def of_12_bits() -> bytes:
    """A TIFF that Pillow opens as one of 16 bits, whose high byte is nearly black."""
    data = encoded(Image.fromarray(np.full((2, 2), 4095, np.uint16)), "TIFF")
    entry = struct.pack("<HHLHH", 258, 3, 1, 16, 0)
    assert data.count(entry) == 1
    twelve = data.replace(entry, struct.pack("<HHLHH", 258, 3, 1, 12, 0))
    with Image.open(io.BytesIO(twelve)) as image:
        assert image.mode == "I;16"
    return twelve


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


def in_sixteen_bits(values: np.ndarray) -> dict[str, bytes]:
    """Name -> file of (H, W) or (H, W, C) values."""
    if values.ndim == 2:
        return {kind: encoded(Image.fromarray(values), kind) for kind in ("PNG", "TIFF")}
    if values.shape[2] == 2:
        return {"PNG": grey_alpha_png(values)}
    orders = "<>" if values.shape[2] == 3 else ""
    return {"PNG": by_cv2(values)} | {f"TIFF {o}": tiff_of(values, o, "rgb") for o in orders}


def tiff_of(values: np.ndarray, order: str, photometric: str) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, values, byteorder=order, photometric=photometric, metadata=None)  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("strip", [50, 1 << 20])
@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("channels", [(), (2,), (3,), (4,)])
def test_fewer_bits_in_sixteen_keep_their_highest(
    monkeypatch: pytest.MonkeyPatch, channels: tuple[int, ...], bits: int, strip: int
) -> None:
    monkeypatch.setattr(decoding, "STRIP_PIXELS", strip)
    random = np.random.default_rng(bits)
    values = random.integers(0, 1 << bits, (13, 9, *channels)).astype(np.uint16)
    values[0, 0] = (1 << bits) - 1
    expected = (values >> (bits - 8)).astype(np.uint8)
    has_alpha = channels in ((2,), (4,))
    if has_alpha:  # which always has all of its bits
        values[..., -1] = random.integers(0, 1 << 16, (13, 9))
        expected[..., -1] = values[..., -1] >> 8
    mode = {(): "L", (3,): "RGB"}.get(channels, "RGBA")
    for name, data in in_sixteen_bits(values).items():
        found = decode(data, Decode(mode=mode, bits=bits))
        found = found[..., [0, 3]] if channels == (2,) else found
        assert np.array_equal(found.reshape(expected.shape), expected), name
        with pytest.raises(SampleError, match=r"16 bits, of which decode would keep 8.*--bits 16"):
            decode(data, Decode())
        if not has_alpha:
            facts = decoding.picture_facts(data, Decode())
            assert facts.widest == values.max(), name
        if bits > 8:
            with pytest.raises(SampleError, match=r"which is more than 8 bits hold.*--bits"):
                decode(data, Decode(mode=mode, bits=8))
        if channels == ():
            assert np.array_equal(decode(data, Decode(bits=bits)), np.dstack([expected] * 3))
        with pytest.raises(SampleError, match=r"16 bits, of which decode would keep 8.*--bits"):
            decode(data, Decode(mode=mode))
    for data in (encoded(photograph(), "PNG"), encoded(photograph()), photograph()):
        assert np.array_equal(decode(data, Decode(bits=bits)), decode(data, Decode()))


def test_pillow_images_arrays_and_tensors_are_taken_as_they_are() -> None:
    pixels = np.asarray(photograph())
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    for value in (photograph(), pixels, tensor, pixels[:, ::-1][:, ::-1]):
        assert np.array_equal(decode(value, Decode()), pixels)
    grey = pixels[..., 1]
    for value in (grey, grey[..., None], Image.fromarray(grey)):
        assert np.array_equal(decode(value, Decode(mode="L"))[..., 0], grey)


# --- AVIF and HEIC -------------------------------------------------------------------------------


def heif(image: Image.Image, kind: str = "HEIF", **options: Any) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    return encoded(image, kind, **options)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_avif_and_heic_are_decoded_upright(kind: str, mode: str, orientation: int) -> None:
    image = half_transparent() if mode == "RGBA" else photograph()
    data = (heif if kind == "HEIF" else encoded)(image, kind, exif=oriented(orientation).tobytes())
    found = decode(data, Decode(mode=mode))
    assert np.array_equal(found, by_pillow(data, mode))
    assert found.shape[:2] == ((300, 451) if orientation == 1 else (451, 300))
    for share in (0.02, 0.3, 0.9):
        with pytest.raises(SampleError):
            decode(data[: int(len(data) * share)], Decode(mode=mode))
    with pytest.raises(SampleError, match="is over the limit of 1000 px"):
        decode(data, Decode(mode=mode, max_pixels=1000))


def test_without_its_library_a_heic_image_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = heif(photograph())
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    decoding._load_heif.cache_clear()
    with pytest.raises(SampleError, match=r"pip install 'precache\[heif\]'"):
        decode(data, Decode())
    write(tmp_path / "in/cat/a.heic", data)
    with pytest.raises(PrecacheError, match=r"(?s)a\.heic.*pip install 'precache\[heif\]'"):
        build_here(tmp_path / "in", tmp_path / "store", Recipe.image())
    monkeypatch.undo()
    build_here(tmp_path / "in", tmp_path / "store", Recipe.image(resize=40))
    assert precache.open(tmp_path / "store").rows == 1


def test_a_pillow_that_lacks_avif_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(photograph(), "AVIF")
    monkeypatch.setattr(decoding.features, "check", lambda name: False)
    with pytest.raises(SampleError, match=r"AVIF image, .* from 11\.3 on: upgrade pillow"):
        decode(data, Decode())


# --- files that are cut off ----------------------------------------------------------------------

JPEGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "restarts": {"restart_marker_rows": 1},
    "4:4:4": {"subsampling": "4:4:4"},
}


@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize("stored", ["RGB", "L", "CMYK"])
def test_a_jpeg_that_lacks_only_its_end_marker_is_an_image(
    stored: str, options: dict[str, Any]
) -> None:
    data = encoded(photograph().convert(stored), **options)
    assert data.endswith(b"\xff\xd9")
    for mode in ("RGB", "L", "RGBA", "unchanged"):
        whole = decode(data, Decode(mode=mode))
        for cut in (data[:-1], data[:-2]):
            assert np.array_equal(decode(cut, Decode(mode=mode)), whole)
        for cut in (data[:-300], data[: len(data) // 2]):
            with pytest.raises(SampleError):
                decode(cut, Decode(mode=mode))
            filled = decode(cut, Decode(mode=mode, truncated="fill"))
            assert filled.shape == whole.shape
            assert np.array_equal(filled[:100], whole[:100])
            assert not np.array_equal(filled, whole)


@pytest.mark.parametrize("stored", ["RGB", "L", "CMYK"])
def test_a_progressive_jpeg_may_lack_scans_wherever_it_is_cut(stored: str) -> None:
    data = encoded(photograph().convert(stored), progressive=True)
    scans = [found.start() for found in re.finditer(rb"\xff\xda", data)]
    assert len(scans) > 2
    tables = [data.rfind(b"\xff\xc4", 0, start) for start in scans[1:]]
    for end in (len(data) - 1, len(data) - 2, len(data) // 2, *scans[1:], *tables):
        for mode in ("RGB", "L", "RGBA", "unchanged"):
            with pytest.raises(SampleError, match="truncated"):
                decode(data[:end], Decode(mode=mode))
        filled = decode(data[:end], Decode(truncated="fill"))
        assert filled.shape == (300, 451, 3)


def test_an_end_marker_of_a_thumbnail_is_not_that_of_the_picture() -> None:
    thumbnail = encoded(photograph().resize((8, 8)))
    data = encoded(photograph(), exif=b"Exif\0\0" + thumbnail)
    assert np.array_equal(decode(data[:-2], Decode()), decode(data, Decode()))


def test_other_files_that_are_cut_off_are_filled_if_that_is_stated() -> None:
    data = encoded(photograph(), "PNG")
    filled = decode(data[: len(data) // 2], Decode(truncated="fill"))
    assert filled.shape == (300, 451, 3)
    assert np.array_equal(filled[:100], by_pillow(data)[:100])
    with pytest.raises(SampleError, match="truncated"):
        decode(data[: len(data) // 2], Decode())


# --- unchanged -----------------------------------------------------------------------------------


def of_dtype(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 200, shape).astype(dtype) * np.dtype(dtype).type(
        20 if np.dtype(dtype).itemsize > 1 else 1
    )


def by_cv2(values: np.ndarray) -> bytes:
    """A PNG of (H, W, C): RGB, or RGBA."""
    order = [2, 1, 0, 3][: values.shape[2]]
    return cv2.imencode(".png", values[..., order])[1].tobytes()


def grey_alpha_png(values: np.ndarray) -> bytes:
    height, width, _ = values.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    return png((width, height, 16, 4), zlib.compress(lines))


UNCHANGED: dict[str, tuple[Callable[[np.ndarray], bytes], np.ndarray]] = {
    "PNG of 12 bits in 16": (
        lambda a: encoded(Image.fromarray(a[..., 0]), "PNG"),
        np.full((3, 4, 1), 4095, np.uint16),
    ),
    "PNG RGB of 16 bits": (by_cv2, of_dtype("uint16", 20, 30, 3)),
    "PNG RGBA of 16 bits": (by_cv2, of_dtype("uint16", 20, 30, 4)),
    "PNG grey and alpha of 16 bits": (grey_alpha_png, of_dtype("uint16", 20, 30, 2)),
    "PNG RGB": (by_cv2, of_dtype("uint8", 20, 30, 3)),
    "PNG grey and alpha": (
        lambda a: encoded(Image.fromarray(a, "LA"), "PNG"),
        of_dtype("uint8", 20, 30, 2),
    ),
    "PNG grey": (
        lambda a: encoded(Image.fromarray(a[..., 0]), "PNG"),
        of_dtype("uint8", 20, 30, 1),
    ),
    **{
        f"TIFF {dtype} x {channels}": (
            lambda a: tiff(
                a[..., 0] if a.shape[2] == 1 else a, photometric="minisblack", planarconfig="contig"
            ),
            of_dtype(dtype, 20, 30, channels),
        )
        for dtype in ("uint8", "uint16", "int16", "float32", "float64")
        for channels in (1, 2, 3, 4, 5, 12)
    },
    "TIFF of planes": (
        lambda a: tiff(
            np.moveaxis(a, 2, 0).copy(),
            photometric="minisblack",
            planarconfig="separate",
            compression="zlib",
        ),
        of_dtype("uint16", 20, 30, 5),
    ),
}


COMPRESSED = {
    "grey": of_dtype("uint8", 20, 30),
    "RGB": of_dtype("uint8", 20, 30, 3),
    "RGBA": of_dtype("uint8", 20, 30, 4),
    "16 bits": of_dtype("uint16", 20, 30),
    "RGB of 16 bits": of_dtype("uint16", 20, 30, 3),
    "integers": of_dtype("int32", 20, 30),
    "floats": of_dtype("float32", 20, 30),
}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("name", COMPRESSED)
def test_tiffs_of_other_compressions_keep_their_values_or_are_refused(
    name: str, order: str
) -> None:
    values = COMPRESSED[name]
    data = lzw(tiff_of(values, order, "rgb" if "RGB" in name else "minisblack"))
    if order == ">" and name in ("integers", "floats"):
        with pytest.raises(SampleError, match=r"compressed \(LZW, .*save it with deflate"):
            decode(data, Decode(mode="unchanged"))
    else:
        found = decode(data, Decode(mode="unchanged"))
        assert found.dtype == values.dtype
        assert np.array_equal(found, values.reshape(20, 30, -1))


def lzw(data: bytes) -> bytes:
    """Compress a TIFF without compression, of one strip, by LZW of 9 bits alone."""
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page, order = file.pages.first, file.byteorder
        [start], [count] = page.dataoffsets, page.databytecounts
        places = {tag.name: tag.valueoffset for tag in page.tags}
    clear, end = [256], [257]
    codes = [*data[start : start + count]]
    parts = [clear + codes[at : at + 200] for at in range(0, count, 200)]
    bits = "".join(f"{code:09b}" for code in itertools.chain(*parts, end))
    strip = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8))
    made = bytearray(data)
    struct.pack_into(f"{order}H", made, places["Compression"], 5)
    struct.pack_into(f"{order}I", made, places["StripOffsets"], len(data))
    struct.pack_into(f"{order}I", made, places["StripByteCounts"], len(strip))
    return bytes(made) + strip


def test_a_damaged_tiff_ends_no_process() -> None:
    """A library by which tifffile decodes LZW crashed on some of these."""
    data = encoded(photograph().resize((53, 37)), "TIFF", compression="tiff_lzw")
    for place in range(8, 200):
        damaged = bytearray(data)
        damaged[place] = 1
        with contextlib.suppress(SampleError):
            decode(bytes(damaged), Decode(mode="unchanged"))


@pytest.mark.parametrize("name", UNCHANGED)
def test_values_are_unchanged_where_that_is_stated(name: str) -> None:
    make, values = UNCHANGED[name]
    found = decode(make(values), Decode(mode="unchanged"))
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)


def test_jpegs_arrays_and_images_are_unchanged() -> None:
    for stored, channels in (("RGB", 3), ("L", 1), ("CMYK", 4)):
        data = encoded(photograph().convert(stored))
        found = decode(data, Decode(mode="unchanged"))
        assert found.shape == (300, 451, channels)
        assert np.array_equal(found, by_pillow(data, stored))
    values = of_dtype("int16", 5, 6, 7)
    assert decode(values, Decode(mode="unchanged")) is values
    tensor = torch.from_numpy(values).permute(2, 0, 1)
    assert np.array_equal(decode(tensor, Decode(mode="unchanged")), values)
    for dtype in ("uint16", "int32", "float32"):
        values = of_dtype(dtype, 5, 6)
        found = decode(Image.fromarray(values), Decode(mode="unchanged"))
        assert (found.dtype, found.tolist()) == (values.dtype, values[..., None].tolist())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_unchanged_images_are_turned(orientation: int) -> None:
    grey = Image.fromarray(of_dtype("uint16", 20, 30))
    files = [
        encoded(grey, "PNG", exif=oriented(orientation)),
        encoded(grey, "TIFF", tiffinfo={ORIENTATION: orientation}),
    ]
    for data in files:
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(ImageOps.exif_transpose(image))
        assert np.array_equal(decode(data, Decode(mode="unchanged"))[..., 0], expected)


def test_without_its_library_a_tiff_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tifffile", None)
    data = encoded(photograph(), "TIFF")
    with pytest.raises(SampleError, match=r"pip install 'precache\[tiff\]'"):
        decode(data, Decode(mode="unchanged"))
    assert np.array_equal(decode(data, Decode()), by_pillow(data))


def test_values_of_sixteen_bits_are_resized_as_floats_are() -> None:
    values = of_dtype("uint16", 60, 80, 5)
    for interpolation in ("bilinear", "bicubic"):
        found = resize(values, (23, 31), interpolation)
        exact = resize(values.astype(np.float64), (23, 31), interpolation)
        assert found.dtype == np.uint16
        assert np.abs(found - exact.clip(0)).max() <= 0.5 + 1e-5
    for level in (0, 65535):
        assert (resize(np.full((9, 9, 1), level, np.uint16), (20, 5), "bicubic") == level).all()


# --- colour profiles -----------------------------------------------------------------------------


def with_profile(space: str) -> tuple[Image.Image, bytes]:
    """An image and a profile whose primaries are swapped, or whose gamma is 1."""
    if space == "RGB":
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        swapped = profile.replace(b"rXYZ", b"?XYZ", 1).replace(b"gXYZ", b"rXYZ", 1)
        return photograph(), swapped.replace(b"?XYZ", b"gXYZ", 1)
    return photograph().convert("L"), grey_profile()


def grey_profile() -> bytes:
    """An ICC profile (version 2) of grey with a linear curve."""
    curve = b"curv" + bytes(4) + struct.pack(">I", 0)
    white = b"XYZ " + bytes(4) + struct.pack(">iii", 0xF6D6, 0x10000, 0xD32D)
    tags, offset = b"", 128 + 4 + 2 * 12
    for name, body in ((b"wtpt", white), (b"kTRC", curve)):
        tags += name + struct.pack(">II", offset, len(body))
        offset += len(body)
    body = struct.pack(">I", 2) + tags + white + curve
    head = struct.pack(">I4sI", 128 + len(body), b"none", 0x02100000)
    head += b"mntrGRAYXYZ " + bytes(12) + b"acsp" + bytes(28)
    head += struct.pack(">iii", 0xF6D6, 0x10000, 0xD32D)
    return head.ljust(128, b"\0") + body


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        *(("RGB", kind) for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")),
        *(("GRAY", kind) for kind in ("JPEG", "PNG", "TIFF")),
    ],
)
def test_colours_of_a_profile_become_srgb_where_that_is_stated(space: str, kind: str) -> None:
    image, profile = with_profile(space)
    data = encoded(image, kind, icc_profile=profile)
    with Image.open(io.BytesIO(data)) as opened:
        converted = ImageCms.profileToProfile(
            opened, io.BytesIO(profile), ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
        plain = np.asarray(opened.convert("RGB"))
    assert converted is not None
    found = decode(data, Decode(icc="srgb"))
    assert np.array_equal(found, np.asarray(converted))
    assert np.abs(found.astype(int) - plain).mean() > 5
    assert np.array_equal(decode(data, Decode()), plain), "profiles are ignored by default"
    grey = decode(data, Decode(mode="L", icc="srgb"))
    assert np.array_equal(grey[..., 0], np.asarray(converted.convert("L")))


def test_alpha_and_images_without_a_profile_stay_as_they_are() -> None:
    _, profile = with_profile("RGB")
    data = encoded(half_transparent(), "PNG", icc_profile=profile)
    found = decode(data, Decode(mode="RGBA", icc="srgb"))
    assert np.array_equal(found[..., 3], by_pillow(data, "RGBA")[..., 3])
    assert np.array_equal(found[..., :3], decode(data, Decode(icc="srgb")))
    for kind in ("JPEG", "PNG"):
        data = encoded(photograph(), kind)
        assert np.array_equal(decode(data, Decode(icc="srgb")), decode(data, Decode()))


# --- EXIF ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0no TIFF at all", b"Exif\0\0", *(oriented(n).tobytes() for n in (0, 9)), EXIF_6[:17]],
)
def test_an_orientation_that_cannot_be_read_neither_turns_the_photo_nor_warns(exif: bytes) -> None:
    assert np.array_equal(decode(jpeg(exif=exif), Decode()), by_pillow(jpeg()))


# --- hostile files ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_the_limit_of_pixels_is_the_users_own_and_not_pillows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = photograph().quantize(16) if kind == "GIF" else photograph()
    options = {"tiffinfo": {ORIENTATION: 6}} if kind == "TIFF" else {"exif": oriented(6)}
    data = encoded(image, kind, **options)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    limit = image.width * image.height
    assert decode(data, Decode(max_pixels=limit)).size == 3 * limit
    size = "300 x 451" if kind == "TIFF" else "451 x 300"
    with pytest.raises(SampleError, match=rf"{size} px is over the limit of {limit - 1} "):
        decode(data, Decode(max_pixels=limit - 1))
    if kind == "JPEG":
        with pytest.raises(SampleError, match="a picture in it is over the limit of 1000 px"):
            decode(data[:-2], Decode(mode="RGBA", max_pixels=1000))
    assert Image.MAX_IMAGE_PIXELS == 1000


@pytest.mark.parametrize("name", ["JPEG", *FORMATS])
def test_truncated_files_are_samples_that_fail(name: str) -> None:
    data = encoded(photograph()) if name == "JPEG" else FORMATS[name]()
    for share in (0.0, 0.01, 0.2, 0.6, 0.97):
        try:
            found = decode(data[: int(len(data) * share)], Decode())
        except SampleError:
            continue
        assert name in ("TIFF LZW", "TIFF JPEG"), f"{share} of it was decoded: {found.shape}"


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
GARBAGE = (
    b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xd9", b"GIF89a", b"BM" + bytes(60),
    b"RIFF\0\0\0\0WEBPVP8 ", b"II*\0\x08\0\0\0\xff\xff", b"\x89PNG\r\n\x1a\n", bytes(4096),
    b"<html><body>404</body></html>", b"<svg xmlns='http://www.w3.org/2000/svg'/>", POSTSCRIPT[:49],
)  # fmt: skip
NO_IMAGES = (
    None, 3, "photo.jpg", np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 3, 1), np.uint8),
    np.zeros(4, np.uint8), torch.zeros(3, 4, 4),
)  # fmt: skip
NOT_PROMISED = ("PPM", "ICO", "ICNS", "BLP", "TGA", "PCX", "SGI", "DDS", "JPEG2000", "PDF")
"""Formats that Pillow opens: for some it starts a program, others have pictures in a picture."""


def cut_off(kind: str, share: float) -> bytes:
    data = (heif if kind == "HEIF" else encoded)(photograph(), kind)
    return data[: int(len(data) * share)]


def not_promised(kind: str) -> bytes:
    return encoded(Image.new("RGB", (32, 32)).convert("P" if kind == "BLP" else "RGB"), kind)


RGB, GREY_LEVELS, INDICES = Decode(), Decode(mode="L"), Decode(mode="P")
SAME, TO_SRGB = Decode(mode="unchanged", max_pixels=200_000), Decode(icc="srgb")
BITS = "mode 1, .*0 and 255.*--mode L --interpolation nearest"
PALETTE = r"palette image, .*--mode P .*--mode RGB"
PROMISED = "decode reads, whatever its name: JPEG, PNG, WEBP, BMP, GIF, TIFF, AVIF, HEIC"
NO_PROFILE = "ICC profile that cannot be applied"
REFUSED: dict[str, tuple[Callable[[], Any], Decode, str]] = {
    **{
        f"{name}{' opened' * opened}, mode {mode}": (
            lambda make=make, opened=opened: Image.open(io.BytesIO(make())) if opened else make(),
            Decode(mode=mode),  # type: ignore[arg-type]  # one of these
            ("has several pages" if "band" not in name and "infra" not in name else r"has \d bands")
            + ", .* a function in place of decode, ",
        )
        for name, make in WITH_MORE.items()
        for opened in (False, True)
        for mode in (("RGB",) if opened else ("RGB", "L", "P", "RGBA"))
    },
    **{
        f"32 bits, {mode}{' in a file' * in_file}": (
            lambda image=image, in_file=in_file: encoded(image, "TIFF") if in_file else image,
            RGB,
            f"Pillow's mode {mode}, .*save it with 8 or 16 bits",
        )
        for mode, image in WIDE.items()
        for in_file in (False, True)
    },
    "empty": (bytes, RGB, "the file is empty"),
    "16 bits, floating point": (
        lambda: tiff_of(np.ones((4, 4), np.float16), "<", "minisblack"), RGB,
        "TIFF that Pillow does not read, .*--mode unchanged",
    ),
    "fractions that count from white": (
        lambda: tiff(np.ones((4, 4), np.float32), photometric="miniswhite"),
        SAME, r"0 is white, of float32.*save it with 0 as black",
    ),
    "12 bits": (of_12_bits, RGB, "Pillow's mode I;16"),
    "no indices, RGB": (lambda: encoded(photograph(), "PNG"), INDICES, "mode RGB, .*--mode RGB"),
    "no indices, RGBA": (
        lambda: encoded(half_transparent(), "PNG"), INDICES, "mode RGBA, .*--mode RGB",
    ),
    "no indices, bits": (lambda: encoded(photograph().convert("1"), "PNG"), INDICES, BITS),
    "no indices, 2 bits": (lambda: grey_of_bits(2), INDICES, "grey of 2 bits"),
    "no indices, 4 bits": (lambda: grey_of_bits(4), INDICES, "grey of 4 bits"),
    "no indices, 16 bits": (
        lambda: encoded(Image.fromarray(np.ones((2, 2), np.uint16)), "PNG"),
        INDICES, r"I;16.*--mode unchanged",
    ),
    "no indices, JPEG": (lambda: jpeg("L"), INDICES, "is a JPEG, .*save masks as PNG"),
    "no indices, JPEG in TIFF": (
        lambda: encoded(photograph().convert("L"), "TIFF", compression="jpeg"),
        INDICES, "is a JPEG, .*save masks as PNG",
    ),
    "no indices, JPEG that was opened": (
        lambda: Image.open(io.BytesIO(jpeg("L"))), INDICES, "is a JPEG, .*save masks as PNG",
    ),
    **{f"grey levels of {name}": (FORMATS[name], GREY_LEVELS, PALETTE) for name in PALETTES},
    "grey levels of an image with a palette": (indexed, GREY_LEVELS, PALETTE),
    "unchanged, palette": (
        lambda: encoded(indexed(), "PNG"), SAME, r"--mode RGB.*--mode P --interpolation nearest",
    ),
    "unchanged, palette TIFF": (
        lambda: encoded(indexed(), "TIFF"), SAME, r"--mode RGB.*--mode P ",
    ),
    "unchanged, bits": (
        lambda: encoded(photograph().convert("1"), "PNG"), SAME, "--mode L --interpolation nearest",
    ),
    "unchanged, bits in a TIFF": (
        lambda: encoded(photograph().convert("1"), "TIFF"), SAME,
        "--mode L --interpolation nearest",
    ),
    "unchanged, grey of 2 bits": (lambda: grey_of_bits(2), SAME, "grey of 2 bits"),
    "unchanged, pages": (lambda: tiff(GREY, GREY), SAME, "has several pages"),
    "unchanged, a volume": (WITH_MORE["a volume"], SAME, "has several pages"),
    "unchanged, no TIFF": (lambda: b"II*\0\x09" + bytes(50), SAME, "cannot be decoded"),
    "unchanged, large": (
        lambda: tiff(np.zeros((30000, 9), np.uint8)), SAME, "over the limit of 200000 ",
    ),
    "unchanged, bands": (
        lambda: tiff(np.zeros((20, 20, 65000), np.uint16), planarconfig="contig"), SAME, "bytes of",
    ),
    "a profile that is none": (
        lambda: encoded(photograph(), "PNG", icc_profile=b"no profile"), TO_SRGB, NO_PROFILE,
    ),
    "a profile of other colours": (
        lambda: encoded(photograph().convert("CMYK"), "TIFF", icc_profile=grey_profile()),
        TO_SRGB, NO_PROFILE,
    ),
    "a bomb": (
        lambda: png((60_000, 60_000, 1, 0), zlib.compress(bytes(100))),
        RGB, "over the limit of 178956970 px",
    ),
    "a film": (lambda: b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(500), RGB, PROMISED),
    "PostScript": (lambda: POSTSCRIPT, RGB, PROMISED),
    **{kind: (partial(not_promised, kind), RGB, PROMISED) for kind in NOT_PROMISED},
    **{f"garbage {n}": (lambda data=data: data, RGB, ".") for n, data in enumerate(GARBAGE)},
    **{
        f"no image {n}": (
            lambda value=value: value, RGB, r"decode was given .*; it takes bytes",
        )
        for n, value in enumerate(NO_IMAGES)
    },
    "a name of a file": (lambda: "in/a.jpg", RGB, r"decode was given 'in/a\.jpg'; it takes bytes"),
    **{
        f"{share} of {kind}": (partial(cut_off, kind, share), RGB, "is truncated: it has ")
        for kind in ("AVIF", "HEIF", "WEBP")
        for share in (0.1, 0.2, 0.6, 0.97)
    },
}  # fmt: skip
"""File, image or value; how it is decoded; and words of the reason."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoded_as_asked_for_is_refused_in_words(name: str) -> None:
    make, op, words = REFUSED[name]
    with pytest.raises(SampleError, match=words):
        decode(make(), op)


def test_no_other_decoder_of_pillow_is_loaded() -> None:
    loaded = ask(plugins_after_decoding, [POSTSCRIPT, *(make() for make in FORMATS.values())])
    others = {"Bmp", "Gif", "Jpeg", "Png", "Tiff", "WebP", "Ppm", "Mpo"}  # Ppm: always, by Pillow
    assert loaded <= {f"PIL.{name}ImagePlugin" for name in others}
