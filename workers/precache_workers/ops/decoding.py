"""Decoding: an image file -> upright pixels, within the limit of pixels.

Only the formats named here are decoded. Their decoders start no program, and know the size of a
picture before they allocate its memory. Pictures with values of more than 8 bits are refused,
except those of 16 bits, which keep the highest 8 of the bits that `Decode.bits` names.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simplejpeg
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from precache.errors import SampleError
from precache.recipe.ops import CHANNELS, Decode
from precache_workers.ops.segments import cut, is_exif, jpeg_tags

FORMATS = tuple(
    opener.format
    for opener in (
        JpegImagePlugin.JpegImageFile,  # of several pictures (MPO), too
        PngImagePlugin.PngImageFile,
        WebPImagePlugin.WebPImageFile,
        BmpImagePlugin.BmpImageFile,
        GifImagePlugin.GifImageFile,
        TiffImagePlugin.TiffImageFile,
    )
)
"""Formats that are opened. Their plugins are imported here, so that Pillow does not import all."""

STRIP_PIXELS = 1 << 20
"""Pixels of a Pillow image that are converted at a time, since each step makes a copy."""

MOST_RUN_LENGTH_PIXELS = 16 << 20
"""Most pixels of a run-length encoded BMP."""

_ORIENTATION = 0x0112
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC, _SAMPLE_FORMAT = 0x0106, 0x0153
_TILE_WIDTH, _TILE_LENGTH = 322, 323
_EIGHT_BITS = frozenset(
    ("1", "L", "P", "LA", "PA", "La", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV")
)
_UNMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
"""Mode with premultiplied alpha -> the mode that Pillow can convert it to."""


class Scratch:
    """A reusable buffer to decode into: fresh memory costs a page fault for every 4 KiB."""

    LIMIT = 64 << 20

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """Return a uint8 buffer of at least `nbytes`: the previous one if it is large enough."""
        if len(self._held) >= nbytes:
            return self._held
        buffer = np.empty(nbytes, np.uint8)
        self._held = buffer if nbytes <= self.LIMIT else self._held
        return buffer


def decode(
    data: Any, op: Decode, shrink_to: int | None = None, scratch: Scratch | None = None
) -> np.ndarray:
    """Decode an image file, a Pillow image or a uint8 array to (H, W, C) uint8.

    Parameters
    ----------
    shrink_to
        Shorter side below which DCT-scaled decoding must not go; None for a full decode.
    scratch
        Buffer that may hold the result until the next decode; None for new memory.

    Raises
    ------
    SampleError
        The image cannot be decoded, or has more pixels than allowed.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        jpeg = bytes(data[:2]) == b"\xff\xd8"
        fast = _decode_jpeg(bytes(data), op, shrink_to, scratch or Scratch()) if jpeg else None
        return _decode_pillow(bytes(data), op) if fast is None else fast
    if isinstance(data, Image.Image):
        return _to_array(data, op)
    array = np.asarray(_channels_last(data))
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise SampleError(
            f"decode was given {array.dtype} {array.shape}; it takes bytes, a Pillow image, "
            "(H, W, C) uint8 or a (C, H, W) uint8 tensor. Return the image without transforms such "
            "as ToTensor, or leave decode out of the recipe for other arrays"
        )
    image = Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    return _to_array(image, op)


def _channels_last(data: Any) -> Any:
    """View a (C, H, W) tensor as (H, W, C); without torch loaded, `data` cannot be a tensor."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor) and data.ndim == 3:
        return data.permute(1, 2, 0)
    return data


def _decode_jpeg(
    data: bytes, op: Decode, shrink_to: int | None, scratch: Scratch
) -> np.ndarray | None:
    """Decode with libjpeg-turbo, bit for bit like Pillow; returns None if only Pillow can."""
    if op.mode == "RGBA":
        return None
    if op.mode == "P":
        raise SampleError(
            "is a JPEG, whose compression changes values, and mode P keeps them; save masks as "
            f"PNG, or decode it with {_mode('L')}"
        )
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _check_pixels(width, height, op.max_pixels)
        tags = jpeg_tags(data)
        if colours not in ("YCbCr", "Gray") or (op.mode == "L" and colours != "Gray"):
            return None
        limits = {}
        if shrink_to is not None and min(height, width) >= 2 * shrink_to:
            limits = {"min_height": shrink_to, "min_width": shrink_to}
        wanted, channels = ("GRAY", 1) if op.mode == "L" else ("RGB", 3)
        array: np.ndarray = simplejpeg.decode_jpeg(
            data,
            wanted,
            fastdct=False,
            fastupsample=False,
            strict=True,
            buffer=scratch.take(height * width * channels),
            **limits,
        )
    except ValueError:
        return None
    return _turned(array, _orientation(data, tags, op)) if tags else array


def _turned(array: np.ndarray, orientation: int) -> np.ndarray:
    turned = {
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: a[::-1].transpose(1, 0, 2),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: a[:, ::-1].transpose(1, 0, 2),
    }.get(orientation)
    return array if turned is None else np.ascontiguousarray(turned(array))


def _orientation(data: bytes, tags: Sequence[bytes], op: Decode) -> int:
    """Return the orientation in EXIF or XMP; 1 if it is damaged, so that the photograph is kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first, *others = tags
            if is_exif(first) and not any(map(is_exif, others)):
                # Opening the file takes three times as long as parsing its one segment.
                exif = Image.Exif()
                exif.load(first)
                if not others or _ORIENTATION in exif:
                    return int(exif.get(_ORIENTATION, 1))
            with _pillow_limit(op.max_pixels), _open(cut(data)) as image:
                return int(image.getexif().get(_ORIENTATION, 1))
        except Exception:
            return 1


def _check_pixels(width: int, height: int, limit: int, of: str = "decode's max_pixels") -> None:
    if width * height > limit:
        raise SampleError(f"{width} x {height} px is over the limit of {limit} ({of})")


def _check_parts(image: ImageFile.ImageFile, limit: int) -> None:
    """Raise `SampleError` if decoding is more work than the number of pixels suggests.

    A TIFF may name the same strip many times, and tiles larger than the picture. Pillow decodes
    run lengths of a BMP in Python.
    """
    boxes = [tile.extents for tile in image.tile if tile.extents is not None]
    area = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
    if area > 2 * len(image.getbands()) * image.width * image.height:
        raise SampleError("its strips or tiles overlap; save it anew with an image editor")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        width, length = (image.tag_v2.get(tag, 0) for tag in (_TILE_WIDTH, _TILE_LENGTH))
        _check_pixels(width, length, max(limit, STRIP_PIXELS), "of a TIFF's tiles")
    if any(tile.codec_name == "bmp_rle" for tile in image.tile):
        most = min(limit, MOST_RUN_LENGTH_PIXELS)
        _check_pixels(image.width, image.height, most, "of a BMP of run lengths")


@contextlib.contextmanager
def _pillow_limit(pixels: int) -> Iterator[None]:
    """Set Pillow's limit of pixels for pictures, frames and canvases.

    Pillow warns above its limit and refuses above twice its limit, so half of `pixels` is set.
    """
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, -(-pixels // 2)
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _open(data: bytes) -> ImageFile.ImageFile:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _decode_pillow(data: bytes, op: Decode) -> np.ndarray:
    with warnings.catch_warnings(), _pillow_limit(op.max_pixels):
        warnings.simplefilter("ignore")
        try:
            with _open(cut(data)) as image:
                _check_pixels(image.width, image.height, op.max_pixels)
                _check_parts(image, op.max_pixels)
                raw = _raw_mode(image)
                if op.mode == "P" and raw in ("L;2", "L;4"):
                    raise SampleError(
                        f"is grey of {raw[2:]} bits, whose values mode P would have to guess; save "
                        "it with 8 bits"
                    )
                if op.bits < 16 and op.mode != "P" and _low_bytes(raw):
                    return _narrowed(data, op)
                ImageOps.exif_transpose(image, in_place=True)  # no copy of an upright image
                return _to_array(image, op)
        except UnidentifiedImageError:
            raise SampleError(
                f"not an image that decode reads, whatever its name: {', '.join(FORMATS)}"
            ) from None
        except Image.DecompressionBombError:
            raise SampleError(
                f"a picture in it is over the limit of {op.max_pixels} px (decode's max_pixels)"
            ) from None
        except (SampleError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise many kinds on broken files
            raise SampleError(f"cannot be decoded: {type(error).__name__}: {error}") from None


def _mode(mode: str) -> str:
    """Format an option of decode, as a recipe and as the command line have it."""
    return f'mode = "{mode}" (--mode {mode})'


def _nearest(mode: str) -> str:
    """Format options that keep the values of a mask."""
    return (
        f'mode = "{mode}" and where it is resized interpolation = "nearest" (--mode {mode} '
        "--interpolation nearest)"
    )


def _narrowed(data: bytes, op: Decode) -> np.ndarray:
    """Decode colours of 16 bits, of which fewer are significant."""
    strips = []
    for values in _wide_colours(data):
        colours = _highest(values[..., :3], op.bits)
        alpha = (values[..., 3:] >> 8).astype(np.uint8)
        strips.append(np.concatenate([colours, alpha], axis=2))
    return _to_array(Image.fromarray(np.concatenate(strips)), op)


def _to_array(image: Image.Image, op: Decode) -> np.ndarray:
    """Return (H, W, C) uint8 in the op's mode; alpha is dropped unless that has it.

    Raises
    ------
    SampleError
        Its values have more than 8 bits and are not of 16, or are signed; or its mode and the op's
        are two readings of a mask.
    """
    wide = _is_wide(image)
    if not wide and image.mode not in _EIGHT_BITS:
        raise SampleError(
            f"has values of Pillow's mode {image.mode}, whose black and white are not known; save "
            "it with 8 or 16 bits, or read it by a function in place of decode"
        )
    if isinstance(image, TiffImagePlugin.TiffImageFile) and {
        *image.tag_v2.get(_SAMPLE_FORMAT, (1,))
    } != {1}:
        raise SampleError("has signed values; save it with unsigned ones of 8 or 16 bits")
    if op.mode == "P":
        return _indices(image)
    if image.mode in ("P", "PA") and op.mode == "L":
        raise SampleError(
            "is a palette image, whose grey levels are those of its palette's colours; decode it "
            f"with {_nearest('P')} for its indices, as of a mask, or with {_mode('RGB')} for its "
            "colours"
        )
    # Pillow itself inverts values of up to 8 bits.
    inverted = wide and getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0
    rows = max(1, STRIP_PIXELS // image.width)
    if image.height <= rows:
        return _strip(image, op, wide, inverted)
    array = np.empty((image.height, image.width, CHANNELS[op.mode]), np.uint8)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        array[top : top + rows] = _strip(image.crop(box), op, wide, inverted)
    return array


def _is_wide(image: Image.Image) -> bool:
    """Return True for 16-bit grey, but not for a 12-bit TIFF: its high byte would be nearly 0."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits: tuple[int, ...] = image.tag_v2.get(_BITS_PER_SAMPLE, ())
        return image.mode.startswith("I;16") and bits == (16,)
    png = isinstance(image, PngImagePlugin.PngImageFile)  # mode I: of Pillow before 11.3
    return image.mode.startswith("I;16") or (image.mode == "I" and png)


def _strip(image: Image.Image, op: Decode, wide: bool, inverted: bool) -> np.ndarray:
    if wide:
        high = _highest(np.asarray(image), op.bits)
        image = Image.fromarray(~high if inverted else high)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in _UNMULTIPLIED:
        image = image.convert(_UNMULTIPLIED[image.mode])
    array = np.asarray(image.convert(op.mode))
    return array if array.ndim == 3 else array[..., None]


def _highest(values: np.ndarray, bits: int) -> np.ndarray:
    """Return the highest 8 of so many bits, as uint8; raises `SampleError` if a value has more."""
    if bits < 16 and int(values.max()) >> bits:
        raise SampleError(
            f"has the value {values.max()}, which is more than {bits} bits hold; give decode "
            "another bits (--bits)"
        )
    # Of mode I, values may be out of range.
    high: np.ndarray = np.clip(values.astype(np.int64) >> (bits - 8), 0, 255).astype(np.uint8)
    return high


def _indices(image: Image.Image) -> np.ndarray:
    """Return the indices of a palette image, or the values of a grey one, (H, W, 1) uint8."""
    if image.mode in ("P", "L"):
        return np.asarray(image)[..., None]
    way_out = f"decode it with {_mode('RGB')}"
    if image.mode == "1":
        way_out = f"for 0 and 255 decode it with {_nearest('L')}"
    elif image.mode.startswith("I"):
        way_out = "read it by a function in place of decode"
    raise SampleError(
        f"is of Pillow's mode {image.mode}, and mode P keeps the values of palette images and of "
        f"grey ones of 8 bits; {way_out}"
    )


# --- colours of 16 bits --------------------------------------------------------------------------


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """Return Pillow's name of the layout of an image's values; empty if it has several."""
    names = {args if isinstance(args, str) else args[0] for *_, args in image.tile if args}
    return str(names.pop()) if len(names) == 1 else ""


def _low_bytes(raw: str) -> str | None:
    """Return the layout that reads the low bytes of colours of 16 bits; None for other layouts.

    Pillow keeps their high bytes. In the other byte order these are the low ones.
    """
    colours, _, order = raw.partition(";")
    if colours not in ("RGB", "RGBA") or order not in ("16B", "16L", "16N"):
        return None
    big = order == "16B" or (order == "16N" and sys.byteorder == "big")
    return f"{colours};16{'L' if big else 'B'}"


def _wide_colours(data: bytes) -> Iterator[np.ndarray]:
    """Yield the values of colours of 16 bits, (n, W, C) uint16, a strip of rows at a time."""
    with _open(cut(data)) as high, _open(cut(data)) as low:
        raw = _low_bytes(_raw_mode(high))
        assert raw is not None
        low.tile = [
            part._replace(args=(raw, *part.args[1:]) if isinstance(part.args, tuple) else raw)
            for part in low.tile
        ]
        for image in (high, low):
            ImageOps.exif_transpose(image, in_place=True)
        rows = max(1, STRIP_PIXELS // high.width)
        for top in range(0, high.height, rows):
            end = min(top + rows, high.height)
            of_strip = (np.asarray(i.crop((0, top, i.width, end))) for i in (high, low))
            yield next(of_strip).astype(np.uint16) << 8 | next(of_strip)


@dataclass(frozen=True)
class PictureFacts:
    """Properties of an image that its decoded pixels do not show.

    Attributes
    ----------
    mode
        Pillow's name of its mode; empty if it is no image.
    widest
        Largest value of an image of 16 bits, without its alpha; None for other images.
    transparent
        Some of its pixels are not opaque.
    """

    mode: str = ""
    widest: int | None = None
    transparent: bool = False


def picture_facts(data: Any, op: Decode) -> PictureFacts:
    """Look at an image file, or an image of Pillow; raises if it cannot be decoded."""
    if isinstance(data, Image.Image):
        return _facts(data)
    if not isinstance(data, bytes | bytearray | memoryview):
        return PictureFacts()
    with warnings.catch_warnings(), _pillow_limit(op.max_pixels):
        warnings.simplefilter("ignore")
        with _open(cut(bytes(data))) as image:
            _check_pixels(image.width, image.height, op.max_pixels)
            _check_parts(image, op.max_pixels)
            low = _low_bytes(_raw_mode(image))
            facts = _facts(image)
        if low is None:
            return facts
        widest = max(int(values[..., :3].max()) for values in _wide_colours(bytes(data)))
    return replace(facts, widest=widest)


def _facts(image: Image.Image) -> PictureFacts:
    transparent = False
    if image.has_transparency_data:
        alpha = image if "A" in image.getbands() else image.convert("RGBA")
        transparent = bool((np.asarray(alpha.getchannel("A")) < 255).any())
    widest = int(np.asarray(image).max()) if _is_wide(image) else None
    return PictureFacts(image.mode, widest, transparent)
