"""Decoding: an image file -> upright pixels, within the limit of pixels.

Only the formats named here are decoded. Their decoders start no program, and know the size of a
picture before they allocate its memory. Unless a recipe keeps them unchanged, pictures with values
of more than 8 bits are refused, except those of 16 bits, which keep the highest 8 of the bits that
`Decode.bits` names; so are TIFFs with bands beside colours and alpha. Those of several pages are
always refused.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import reprlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageCms,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
    features,
)

from precache.codecs.jpeg import jpeg_header
from precache.errors import SampleError
from precache.messages import printable
from precache.recipe.ops import Decode
from precache_workers.ops.segments import cut, has_one_scan, is_exif, is_lossy_webp, jpeg_tags

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

_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_AVIF_BRANDS = frozenset((b"avif", b"avis"))
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"))
"""Brands of a file of ISO/IEC 23008-12 in its first box."""

STRIP_PIXELS = 1 << 20
"""Pixels of a Pillow image that are converted at a time, since each step makes a copy."""

MOST_RUN_LENGTH_PIXELS = 16 << 20
"""Most pixels of a run-length encoded BMP."""

MOST_BYTES_A_PIXEL = 64
"""Most bytes of a TIFF's values, for each pixel of the limit."""

_ORIENTATION = 0x0112
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC, _SAMPLE_FORMAT = 0x0106, 0x0153
_TILE_WIDTH, _TILE_LENGTH = 322, 323
_SAMPLES_PER_PIXEL, _EXTRA_SAMPLES, _DEPTH = 277, 338, 32997
_ALPHA = (1, 2, 999)  # the last one as by CorelDRAW
_WIDTH, _LENGTH, _PLANAR = 256, 257, 284
_NEW_SUBFILE_TYPE, _REDUCED_OR_MASK = 254, 1 | 4
_BIG = 43  # in the header of a TIFF with offsets of 64 bits
_MOST_PAGES = 32
_EIGHT_BITS = frozenset(
    ("1", "L", "P", "LA", "PA", "La", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV")
)
_LOSSY = {"JPEG": "JPEG", "MPO": "JPEG", "AVIF": "AVIF", "HEIF": "HEIC"}
_JPEG_IN_TIFF = frozenset(("jpeg", "tiff_jpeg"))
_SOS, _EOI = b"\xff\xda", b"\xff\xd9"
_PNG_EXIF = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
_ICC_PROFILE = b"ICC_PROFILE\0"
_BY_TIFFFILE = frozenset((1, 8, 32946, 32773, 34925))  # none, Deflate, PackBits, LZMA
_PREDICTORS = frozenset((1, 2))
_STORED = frozenset(("L", "LA", "RGB", "RGBA", "CMYK", "I;16", "I;16B", "I;16N", "I;32S", "F;32F"))
"""Pillow's names of layouts of compressed TIFFs whose values it keeps."""
_SIXTEEN_BITS = ";16B", ";16L", ";16N"
"""Ends of Pillow's names of layouts of 16 bits."""
_SWAPPED = {"16B": "16L", "16L": "16B", "16N": "16B" if sys.byteorder == "little" else "16L"}
_LOW_BYTES = {"LA;16B": ""} | {
    f"{colours};{order}": f"{colours};{swapped}"
    for colours in ("RGB", "RGBA")
    for order, swapped in _SWAPPED.items()
}
"""Layout of 16 bits of which Pillow keeps the high bytes -> the one that reads the low ones, which
are the high ones in the other byte order; empty where Pillow has none."""
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


def decode(data: Any, op: Decode, scratch: Scratch | None = None) -> np.ndarray:
    """Decode an image file, a Pillow image or a uint8 array to (H, W, C) uint8.

    In mode ``unchanged`` the dtype is that of the file, image or array.

    Parameters
    ----------
    scratch
        Buffer that may hold the result until the next decode; None for new memory.

    Raises
    ------
    SampleError
        The image cannot be decoded, or has more pixels than allowed.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        data = bytes(data)
        if data.startswith(b"\xff\xd8"):
            ended = _with_end(data)
            fast = _decode_jpeg(ended, op, scratch or Scratch())
            if fast is not None:
                return fast
            if ended is not data and _is_whole(ended, op):
                data = ended
        if op.mode == "unchanged" and data.startswith((b"II", b"MM")):
            return _decode_tiff(data, op)
        return _decode_pillow(data, op)
    if isinstance(data, Image.Image):
        _require_one_page(data)
        return _to_array(data, op)
    array = np.asarray(_channels_last(data))
    if op.mode == "unchanged" and array.ndim in (2, 3) and array.dtype.kind in "buif":
        return array if array.ndim == 3 else array[..., None]
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        numbers = f"{array.dtype} {array.shape}"  # else such as a path or an object
        given = printable(reprlib.repr(data)) if array.dtype.kind in "UO" else numbers
        raise SampleError(
            f"decode was given {given}; it takes bytes, a Pillow image, "
            "(H, W, C) uint8 or a (C, H, W) uint8 tensor. Return the image without transforms such "
            "as ToTensor, or leave decode out of the recipe for other arrays"
        )
    channels = array.shape[2] if array.ndim == 3 else 1
    if channels not in (1, 3) and (channels, op.mode) != (4, "RGBA"):
        keeps = " or decode 4 channels with " + _mode("RGBA") if channels == 4 else ""
        raise SampleError(
            f"decode was given an array {array.shape}, (H, W, C), and takes 1 or 3 channels, since "
            "those of an array are no alpha; return these,"
            f"{keeps} or store all as (C, H, W) by a field without decode, which may have "
            'ops = [] and codec = "zstd"'
        )
    image = Image.fromarray(array[..., 0] if array.ndim == 3 and channels == 1 else array)
    return _to_array(image, op)


def _channels_last(data: Any) -> Any:
    """View a (C, H, W) tensor as (H, W, C); without torch loaded, `data` cannot be a tensor."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor) and data.ndim == 3:
        return data.permute(1, 2, 0)
    return data


def _with_end(data: bytes) -> bytes:
    """Return a JPEG with an end marker, unless others of its scans may be missing."""
    if data.rfind(_EOI, -64) >= 0 or data.rfind(_EOI) > data.rfind(_SOS):
        return data
    return data + _EOI if has_one_scan(data) else data


def _is_whole(data: bytes, op: Decode) -> bool:
    """Return True if a JPEG has all of its pixels; of those over the limit, the answer is False."""
    try:
        height, width, colours = jpeg_header(data)
        if width * height <= op.max_pixels:
            jpeg_tags(data)
            colourspace = "CMYK" if colours in ("CMYK", "YCCK") else "RGB"
            simplejpeg.decode_jpeg(data, colourspace, strict=True)
            return True
    except ValueError:
        pass
    return False


def _decode_jpeg(data: bytes, op: Decode, scratch: Scratch) -> np.ndarray | None:
    """Decode with libjpeg-turbo, bit for bit like Pillow; returns None if only Pillow can."""
    if op.mode == "RGBA" or (op.icc is not None and _ICC_PROFILE in data):
        return None
    if op.mode == "P":
        raise _changed_by_jpeg()
    try:
        height, width, colours = jpeg_header(data)
        _check_pixels(width, height, op.max_pixels)
        tags = jpeg_tags(data)
        if colours not in ("YCbCr", "Gray") or (op.mode == "L" and colours != "Gray"):
            return None
        limits, side = {}, op.shrinks_to
        if side is not None and min(height, width) >= 2 * side:
            limits = {"min_height": side, "min_width": side}
        grey = op.mode == "L" or (op.mode == "unchanged" and colours == "Gray")
        wanted, channels = ("GRAY", 1) if grey else ("RGB", 3)
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
    if not tags or op.orientation == "stored":
        return array
    return _turned(array, _orientation(data, tags, op))


def _changed_by_jpeg() -> SampleError:
    return SampleError(
        "is a JPEG, whose compression changes values, and mode P keeps them; save masks as PNG, or "
        f"decode it with {_mode('L')}"
    )


def _few_bits(bits: int | str, op: Decode) -> SampleError:
    return SampleError(
        f"is grey of {bits} bits, whose values mode {op.mode} would have to guess; save it with 8 "
        "bits"
    )


def _turned(array: np.ndarray, orientation: int) -> np.ndarray:
    if orientation not in range(2, 9):
        return array
    rows, columns = (
        -1 if orientation in flipped else 1 for flipped in ((3, 4, 6, 7), (2, 3, 7, 8))
    )
    turned = array[::rows, ::columns]
    return np.ascontiguousarray(turned if orientation < 5 else turned.transpose(1, 0, 2))


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
            with _opened(data, op) as image:
                return int(image.getexif().get(_ORIENTATION, 1))
        except Exception:
            return 1


def _check_pixels(width: int, height: int, limit: int, of: str = "decode's max_pixels") -> None:
    if width * height > limit:
        raise SampleError(f"{width} x {height} px is over the limit of {limit} ({of})")


def _require_decodable(image: ImageFile.ImageFile, limit: int) -> None:
    """Raise `SampleError` if a file has too many pixels, several pages, or parts of more work than
    its number of pixels suggests.

    A TIFF may name the same strip many times, and tiles larger than the picture. Pillow decodes
    run lengths of a BMP in Python.
    """
    _check_pixels(image.width, image.height, limit)
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
    _require_one_page(image)


def _require_one_page(image: Image.Image) -> None:
    """Raise `SampleError` for a TIFF of which decoding would drop pages or bands.

    Alpha, and pages that show the first one smaller or mask it, are none of these.
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile) or image.tell():
        return
    way_out = (
        "read it by a function in place of decode, which is given the bytes of the file, as by "
        "tifffile.imread(io.BytesIO(data))"
    )
    bits = image.tag_v2.get(_BITS_PER_SAMPLE, (1,))
    if image.tag_v2.get(_PLANAR, 1) == 2 and len(bits) > 1 and max(bits) > 8:
        raise SampleError(  # Pillow takes their bytes for values
            f"has colours of {max(bits)} bits in planes of their own; keep their values with "
            f"{_mode('unchanged')}, {way_out}, or save it with the colours of a pixel together"
        )
    extra = image.tag_v2.get(_EXTRA_SAMPLES, ())
    dropped = max(sum(kind not in _ALPHA for kind in extra), len(extra) - 1)
    if dropped > 0:
        bands = image.tag_v2.get(_SAMPLES_PER_PIXEL, 1)
        raise SampleError(
            f"has {bands} bands, of which {dropped} are neither colours nor alpha, and decode "
            f"would drop them; keep all with {_mode('unchanged')}, {way_out}, or save it without "
            "them"
        )
    if image.tag_v2.get(_DEPTH, 1) > 1 or (image.is_animated and _has_other_page(image)):
        raise SampleError(
            "has several pages, such as slices or channels, of which decode would keep the first; "
            f"{way_out}, or save one a file"
        )


def _has_other_page(image: TiffImagePlugin.TiffImageFile) -> bool:
    """Return True if another page than the first is neither a mask nor smaller by half."""
    file = image.fp
    if file is None:
        return False  # of an image that was closed
    width, height = _stored_size(image)
    place = file.tell()
    try:
        # `image.seek` would forget what is known of the first page if a later one is damaged.
        file.seek(0)
        header = file.read(8)
        page = TiffImagePlugin.ImageFileDirectory_v2(
            header + file.read(8) if header[2] == _BIG else header
        )
        file.seek(page.next)
        page.load(file)
        for _ in range(_MOST_PAGES):
            if not page.next:
                return False
            file.seek(page.next)
            page.load(file)
            small = 2 * page[_WIDTH] <= width and 2 * page[_LENGTH] <= height
            if not small and not page.get(_NEW_SUBFILE_TYPE, 0) & _REDUCED_OR_MASK:
                return True
    except Exception:  # of a damaged page
        return False
    finally:
        file.seek(place)
    return False


@contextlib.contextmanager
def _opened(data: bytes, op: Decode) -> Iterator[ImageFile.ImageFile]:
    """Open an image file, with Pillow's limit of pixels, frames and canvases as the op has it.

    Pillow warns above its limit and refuses above twice its limit, so half of it is set.
    """
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS = -(-op.max_pixels // 2)
    ImageFile.LOAD_TRUNCATED_IMAGES = op.truncated == "fill"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(cut(data, profile=op.icc is not None)) as image:
                yield image
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def _open(data: bytes) -> ImageFile.ImageFile:
    return Image.open(io.BytesIO(data), formats=_formats(data))


def _formats(data: bytes) -> tuple[str, ...]:
    """Return the formats that a file may have; loads the decoders of AVIF and HEIC.

    Raises
    ------
    SampleError
        Such a decoder is not installed.
    """
    length = int.from_bytes(data[:4])
    brands = {data[at : at + 4] for at in (8, *range(16, min(length, 256), 4))}
    if data[4:8] != b"ftyp" or not brands & (_AVIF_BRANDS | _HEIF_BRANDS):
        return FORMATS
    if brands & _AVIF_BRANDS:
        if not features.check("avif"):
            raise SampleError("is an AVIF image, which Pillow decodes from 11.3 on: upgrade pillow")
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
        return ("AVIF",)
    _load_heif()
    return ("HEIF",)


@functools.cache
def _load_heif() -> None:
    try:
        import pillow_heif
    except ImportError as error:
        raise SampleError(
            f"is a HEIC image, which decode reads by pillow-heif ({error}): "
            "pip install 'precache[heif]' on all nodes, then build with --retry-failed"
        ) from None
    pillow_heif.register_heif_opener(thumbnails=False, decode_threads=1)


def _decode_pillow(data: bytes, op: Decode) -> np.ndarray:
    try:
        with _opened(data, op) as image:
            _require_decodable(image, op.max_pixels)
            raw = _raw_mode(image)
            if op.keeps_values and raw in ("L;2", "L;4"):
                raise _few_bits(raw[2:], op)
            turned_by = 1
            if op.orientation == "stored" and isinstance(image, TiffImagePlugin.TiffImageFile):
                turned_by = int(image.tag_v2.get(_ORIENTATION, 1))  # by Pillow, as it loads it
            wide = image.mode in _EIGHT_BITS and raw.endswith(_SIXTEEN_BITS)
            narrows = wide and not op.keeps_values
            if narrows:
                _require_bits(op, high_alone="" if raw in _LOW_BYTES else image.mode)
            if op.mode == "unchanged" and raw in _LOW_BYTES:
                array = np.concatenate([*_wide_values(data, image, raw, op)])
            elif narrows and op.bits != 16:
                array = _to_array(_narrowed(image, data, op), op)
            else:
                _turn(image, op)
                array = _to_array(image, op)
            return _turned(array, {6: 8, 8: 6}.get(turned_by, turned_by))
    except UnidentifiedImageError:
        unread_tiff = (
            "a TIFF that Pillow does not read, as of float16 and of RGB with fractions, or damaged:"
            f" save it with 8 or 16 bits, or keep its values with {_mode('unchanged')}"
        )
        raise SampleError(
            _truncated(data)
            or ("the file is empty" if not data else "")
            or (unread_tiff if data[:4] in _TIFF_STARTS else "")
            or "not an image that decode reads, whatever its name: "
            f"{', '.join(FORMATS)}, AVIF, HEIC"
        ) from None
    except Image.DecompressionBombError:
        raise SampleError(
            f"a picture in it is over the limit of {op.max_pixels} px (decode's max_pixels)"
        ) from None
    except (SampleError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise many kinds on broken files
        keep = '; to keep it: truncated = "fill" in decode (--truncated fill)'
        raise SampleError(
            _truncated(data)
            or f"cannot be decoded: {type(error).__name__}: {error}"
            + (keep if "truncated" in str(error) else "")
        ) from None


def _truncated(data: bytes) -> str:
    """Say that a file of RIFF (WEBP) or boxes (AVIF, HEIC) is shorter than its headers say."""
    at = 8 + int.from_bytes(data[4:8], "little") if data[:4] == b"RIFF" else 0
    if len(_formats(data)) == 1:
        while at + 8 <= len(data) and (length := int.from_bytes(data[at : at + 4])) >= 8:
            at += length
    return f"is truncated: it has {len(data):,} of {at:,} or more bytes" if at > len(data) else ""


def _mode(mode: str) -> str:
    """Format an option of decode, as a recipe and as the command line have it."""
    return f'mode = "{mode}" (--mode {mode})'


def _nearest(mode: str) -> str:
    """Format options that keep the values of a mask."""
    return (
        f'mode = "{mode}" and where it is resized interpolation = "nearest" (--mode {mode} '
        "--interpolation nearest)"
    )


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height of an image as its file stores it."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # whose size is that of the turned one
        return image.tag_v2[_WIDTH], image.tag_v2[_LENGTH]
    return image.size


def _turn(image: Image.Image, op: Decode) -> None:
    """Turn an image as EXIF says, unless its stored pixels are wanted."""
    if op.orientation == "exif":
        ImageOps.exif_transpose(image, in_place=True)  # no copy of an upright image


def _narrowed(image: ImageFile.ImageFile, data: bytes, op: Decode) -> Image.Image:
    """Return an image with 8 bits whose colours have 16, of which fewer are significant."""
    strips = []
    for values in _wide_values(data, image, _raw_mode(image), op):
        colours, alpha = np.split(values, [_colours(values)], axis=2)
        alpha = (alpha >> 8).astype(np.uint8)
        strips.append(np.concatenate([_highest(colours, op.bits or 16), alpha], axis=2))
    narrow = Image.fromarray(np.concatenate(strips))
    narrow.info = image.info
    return narrow


def _to_array(image: Image.Image, op: Decode) -> np.ndarray:
    """Return (H, W, C) uint8 in the op's mode; alpha is dropped unless that has it.

    Raises
    ------
    SampleError
        Its values have more than 8 bits and are not of 16, or are signed; or its mode and the op's
        are two readings of a mask.
    """
    if op.mode == "unchanged":
        return _values(image)
    wide = _is_wide(image)
    if not wide and image.mode not in _EIGHT_BITS:
        raise SampleError(
            f"has values of Pillow's mode {image.mode}, whose black and white are not known; "
            f"save it with 8 or 16 bits, or keep its values with {_mode('unchanged')}"
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
    profile = (op.icc and image.info.get("icc_profile")) or b""
    rows = max(1, STRIP_PIXELS // image.width)
    tops = range(0, image.height, rows)
    boxes = [(0, top, image.width, min(top + rows, image.height)) for top in tops]
    if wide:
        _require_bits(op)
    if len(boxes) == 1:
        return _strip(image, op, wide, inverted, profile)
    array = np.empty((image.height, image.width, op.channels or 0), np.uint8)
    for box in boxes:
        array[box[1] : box[3]] = _strip(image.crop(box), op, wide, inverted, profile)
    return array


def _is_wide(image: Image.Image) -> bool:
    """Return True for 16-bit grey, but not for a 12-bit TIFF: its high byte would be nearly 0."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits: tuple[int, ...] = image.tag_v2.get(_BITS_PER_SAMPLE, ())
        return image.mode.startswith("I;16") and bits == (16,)
    png = isinstance(image, PngImagePlugin.PngImageFile)  # mode I: of Pillow before 11.3
    return image.mode.startswith("I;16") or (image.mode == "I" and png)


def _strip(
    image: Image.Image, op: Decode, wide: bool, inverted: bool, profile: bytes
) -> np.ndarray:
    if wide:
        high = _highest(np.asarray(image), op.bits or 16)
        image = Image.fromarray(~high if inverted else high)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in _UNMULTIPLIED:
        image = image.convert(_UNMULTIPLIED[image.mode])
    if profile:
        image = _in_srgb(image, profile)
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


def _require_bits(op: Decode, *, high_alone: str = "") -> None:
    """Raise `SampleError` where nobody stated which of 16 bits are kept.

    Of an image of the mode `high_alone` only the highest 8 are read.
    """
    if high_alone and op.bits != 16:
        raise SampleError(
            f"has 16 bits, in {high_alone} as of TIFFs for print or with premultiplied "
            "alpha, of which decode keeps the highest 8 by bits = 16 (--bits 16) alone; or "
            f"keep its values with {_mode('unchanged')}"
        )
    if op.bits is None:
        raise SampleError(
            "has 16 bits, of which decode would keep 8; state how many count: 12 by bits = 12 in "
            "decode (--bits 12), or 16 by bits = 16 (--bits 16); or keep its values with "
            f"{_mode('unchanged')}"
        )


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert the colours of an image with an ICC profile to sRGB; alpha is kept."""
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = opened.profile.xcolor_space.strip()
        own = {"L": "GRAY", "LA": "GRAY", "CMYK": "CMYK"}.get(image.mode, "RGB")
        if space != own and (own, space) != ("GRAY", "RGB"):
            raise OSError(f"of {space}, in an image of {own}")
        mode = {"GRAY": "L"}.get(space, space)
        alpha = image.getchannel("A") if "A" in image.getbands() else None
        converted = ImageCms.profileToProfile(
            image if image.mode == mode else image.convert(mode),
            opened,
            ImageCms.createProfile("sRGB"),
            outputMode="RGB",
        )
    except (OSError, ImageCms.PyCMSError) as error:
        raise SampleError(
            f"has an ICC profile that cannot be applied ({error}); save it without, or leave icc "
            "out of decode"
        ) from None
    assert converted is not None
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


def _values(image: Image.Image) -> np.ndarray:
    """Return the values of an image as they are, (H, W, C), in native byte order."""
    if image.mode in ("P", "PA", "1"):
        way_out = f"its colours decode it with {_mode('RGB')}, for its indices with {_nearest('P')}"
        if image.mode == "1":
            way_out = f"0 and 255 decode it with {_nearest('L')}"
        raise SampleError(
            f"is of Pillow's mode {image.mode}, and mode unchanged keeps values of 8 bits and more "
            f"that are no indices; for {way_out}"
        )
    array = np.asarray(image)
    if image.mode == "I" and _is_wide(image):
        array = array.astype(np.uint16)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.ndim == 3 else array[..., None]


def _indices(image: Image.Image) -> np.ndarray:
    """Return the indices of a palette image, or the values of a grey one, (H, W, 1) uint8."""
    if "JPEG" in _lossy_format(image):
        raise _changed_by_jpeg()
    if image.mode in ("P", "L"):
        return np.asarray(image)[..., None]
    way_out = f"decode it with {_mode('RGB')}"
    if image.mode == "1":
        way_out = f"for 0 and 255 decode it with {_nearest('L')}"
    elif image.mode.startswith("I"):
        way_out = f"keep its values with {_mode('unchanged')}"
    raise SampleError(
        f"is of Pillow's mode {image.mode}, and mode P keeps the values of palette images and of "
        f"grey ones of 8 bits; {way_out}"
    )


# --- colours of 16 bits --------------------------------------------------------------------------


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """Return Pillow's name of the layout of an image's values; empty if it has several."""
    names = {args if isinstance(args, str) else args[0] for *_, args in image.tile if args}
    return str(names.pop()) if len(names) == 1 else ""


def _colours(values: np.ndarray) -> int:
    """Return how many channels of an array (H, W, C) are no alpha."""
    channels: int = values.shape[2]
    return channels - (channels in (2, 4))


def _wide_values(data: bytes, image: Image.Image, raw: str, op: Decode) -> Iterator[np.ndarray]:
    """Yield the values of an image that Pillow narrows, (n, W, C) uint16, a strip at a time."""
    swapped = _LOW_BYTES.get(raw)
    if not swapped:
        yield _wide_grey_alpha(data, image, op)
        return
    with _open(cut(data)) as high, _open(cut(data)) as low:
        low.tile = [
            part._replace(
                args=(swapped, *part.args[1:]) if isinstance(part.args, tuple) else swapped
            )
            for part in low.tile
        ]
        for image in (high, low):
            _turn(image, op)
        rows = max(1, STRIP_PIXELS // high.width)
        for top in range(0, high.height, rows):
            end = min(top + rows, high.height)
            of_strip = (np.asarray(i.crop((0, top, i.width, end))) for i in (high, low))
            yield next(of_strip).astype(np.uint16) << 8 | next(of_strip)


def _wide_grey_alpha(data: bytes, image: Image.Image, op: Decode) -> np.ndarray:
    """Return the values of a PNG of grey and alpha with 16 bits, (H, W, 2) uint16."""
    import cv2

    values = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if values is None:
        raise SampleError("cannot be decoded by OpenCV, which reads grey and alpha of 16 bits")
    grey_alpha: np.ndarray = values[..., [0, 3]]
    if op.orientation == "stored":
        return grey_alpha
    return _turned(grey_alpha, image.getexif().get(_ORIENTATION, 1))


# --- TIFF, unchanged -----------------------------------------------------------------------------


def _decode_tiff(data: bytes, op: Decode) -> np.ndarray:
    """Return the values of a TIFF as they are, (H, W, C) of any dtype, by tifffile."""
    try:
        import tifffile
    except ImportError as error:
        raise SampleError(
            f"is a TIFF, which mode unchanged reads by tifffile ({error}): "
            "pip install 'precache[tiff]' on all nodes, then build with --retry-failed"
        ) from None
    cut(data)
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # of a damaged file the reason is kept
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            height, width = page.imagelength, page.imagewidth
            _check_pixels(width, height, op.max_pixels)
            if page.nbytes > MOST_BYTES_A_PIXEL * op.max_pixels:
                raise SampleError(f"has {page.nbytes:,} bytes of values, over the limit of decode")
            others = list(itertools.islice(file.pages, 1, _MOST_PAGES))
            if page.imagedepth > 1 or any(
                not (other.is_reduced or other.is_mask)
                and (2 * other.imagewidth > width or 2 * other.imagelength > height)
                for other in others
            ):
                raise SampleError(
                    "has several pages, such as slices or channels, of which decode would keep the "
                    "first; save one a file"
                )
            if page.photometric == tifffile.PHOTOMETRIC.PALETTE:
                return _values(Image.new("P", (1, 1)))
            if page.compression not in _BY_TIFFFILE or page.predictor not in _PREDICTORS:
                return _from_black(_as_stored(data, op, page), page)
            array = page.asarray()
            if page.axes == "SYX":
                array = np.moveaxis(array, 0, 2)
            array = _from_black(array.reshape(height, width, -1), page)
            if array.dtype == np.bool_:
                return _values(Image.new("1", (1, 1)))
            if page.bitspersample < 8:
                raise _few_bits(page.bitspersample, op)
            stored = op.orientation == "stored"
            orientation = 1 if stored else page.tags.valueof(_ORIENTATION, 1)
    except (SampleError, MemoryError):
        raise
    except Exception as error:  # tifffile raises many kinds on broken files
        raise SampleError(f"cannot be decoded: {type(error).__name__}: {error}") from None
    return _turned(array, orientation)


def _from_black(array: np.ndarray, page: Any) -> np.ndarray:
    """Turn values around of which 0 is white, as all modes do."""
    if page.photometric != 0 or array.dtype == np.bool_:
        return array
    if array.dtype.kind != "u":
        raise SampleError(
            f"is a TIFF whose 0 is white, of {array.dtype}, which names no black; save it with 0 "
            "as black"
        )
    return array.dtype.type(2**page.bitspersample - 1) - array  # type: ignore[no-any-return]


def _as_stored(data: bytes, op: Decode, page: Any) -> np.ndarray:
    """Return the values of a TIFF whose compression Pillow decodes, where it keeps them.

    The library by which tifffile would decode it, imagecodecs, crashes on damaged files.
    """
    kept = False
    with contextlib.suppress(UnidentifiedImageError), _opened(data, op) as image:
        raw, bands = _raw_mode(image), len(image.getbands())
        kept = bands == page.samplesperpixel and (raw in _STORED or bool(_LOW_BYTES.get(raw)))
    if kept and page.planarconfig == 1:
        array = _decode_pillow(data, op)
        if array.dtype == page.dtype:
            return array
    name = getattr(page.compression, "name", page.compression)
    raise SampleError(
        f"is compressed ({name}, predictor {int(page.predictor)}), by which values such as its own "
        f"({page.dtype}, {page.samplesperpixel} bands) cannot be read; save it with deflate and "
        "no predictor"
    )


class Frame(NamedTuple):
    """Width and height in pixels that a file stores, and EXIF's orientation of it."""

    width: int
    height: int
    orientation: int = 1

    def decoded(self, op: Decode) -> tuple[int, int]:
        """Return width and height of the image as it is decoded."""
        turned = op.orientation != "stored" and 5 <= self.orientation <= 8
        return (self.height, self.width) if turned else (self.width, self.height)


def frame_of(data: Any, op: Decode) -> Frame:
    """Read the frame of an image file, a Pillow image or an array; raises if it has none."""
    if isinstance(data, Image.Image):
        return Frame(*data.size)
    if not isinstance(data, bytes | bytearray | memoryview):
        height, width = np.shape(_channels_last(data))[:2]
        return Frame(width, height)
    data = bytes(data)
    if data.startswith(b"\xff\xd8"):
        with contextlib.suppress(ValueError):
            height, width, _ = jpeg_header(data)
            tags = jpeg_tags(data)
            return Frame(width, height, _orientation(data, tags, op) if tags else 1)
    with _opened(data, op) as image:
        # Of a PNG, Pillow decodes all pixels to look for EXIF behind them.
        if image.format == "PNG" and not any(mark in cut(data) for mark in _PNG_EXIF):
            return Frame(*image.size)
        return Frame(*_stored_size(image), int(image.getexif().get(_ORIENTATION, 1)))


def is_turned(image: Image.Image) -> bool:
    """Return True if EXIF says that an open image is not upright."""
    return image.getexif().get(_ORIENTATION, 1) in range(2, 9)


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
    animated
        It has other frames behind its first.
    lossy
        Name of its format where that does not keep values, or may not, as AVIF; else empty.
    """

    mode: str = ""
    widest: int | None = None
    transparent: bool = False
    animated: bool = False
    lossy: str = ""


def picture_facts(data: Any, op: Decode) -> PictureFacts:
    """Look at an image file, or an image of Pillow; raises if it cannot be decoded."""
    if isinstance(data, Image.Image):
        return _facts(data)
    if not isinstance(data, bytes | bytearray | memoryview):
        return PictureFacts()
    data = bytes(data)
    if op.mode == "unchanged" and data.startswith((b"II", b"MM")):
        return PictureFacts()  # Pillow does not open all that tifffile reads
    with _opened(data, op) as image:
        _require_decodable(image, op.max_pixels)
        raw = _raw_mode(image)
        facts = _facts(image)
        if image.format == "PNG":  # whose other frames were cut
            before_pixels = data.partition(b"IDAT")[0]
            facts = replace(facts, animated=b"acTL" in before_pixels)
        elif image.format == "WEBP" and is_lossy_webp(data):
            facts = replace(facts, lossy="lossy WebP")
        if raw not in _LOW_BYTES:
            return facts
        strips = _wide_values(data, image, raw, op)
        return replace(facts, widest=max(int(s[..., : _colours(s)].max()) for s in strips))


def _lossy_format(image: Image.Image) -> str:
    """Return `PictureFacts.lossy`, which WebP tells by its bytes alone."""
    if image.format == "TIFF":
        return "TIFF with JPEG" if image.info.get("compression") in _JPEG_IN_TIFF else ""
    return _LOSSY.get(image.format or "", "")


def _facts(image: Image.Image) -> PictureFacts:
    transparent = False
    if image.has_transparency_data:
        alpha = image if "A" in image.getbands() else image.convert("RGBA")
        transparent = bool((np.asarray(alpha.getchannel("A")) < 255).any())
    facts = PictureFacts(image.mode, transparent=transparent, lossy=_lossy_format(image))
    if _is_wide(image):
        facts = replace(facts, widest=int(np.asarray(image).max()))
    return replace(facts, animated=getattr(image, "is_animated", False) and not image.tell())
