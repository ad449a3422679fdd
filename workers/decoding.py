"""Decoding: an image file of any format -> pixels, upright, within the limit of pixels."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from precache.errors import SampleError
from precache.operations import Decode

STRIP_PIXELS = 4 << 20
"""Of Pillow's images that are converted at a time: each step makes a copy."""

_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/"
_ORIENTATION = 0x0112


class Scratch:
    """Memory to decode into again and again, since fresh memory costs a page fault each 4 KiB."""

    LIMIT = 64 << 20

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """A uint8 buffer of `nbytes` or more; up to the limit the one given before, if it does."""
        if nbytes > self.LIMIT:
            return np.empty(nbytes, np.uint8)
        if len(self._held) < nbytes:
            self._held = np.empty(nbytes, np.uint8)
        return self._held


def decode(
    data: Any, op: Decode, shrink_to: int | None = None, scratch: Scratch | None = None
) -> np.ndarray:
    """An image file, a Pillow image or a uint8 array -> (H, W, C) uint8.

    Parameters
    ----------
    shrink_to
        Shorter side below which DCT-scaled decoding must not go; None for a full decode.
    scratch
        Where the result may lie, valid until the next one is decoded; None for memory of its own.

    Raises
    ------
    SampleError
        It cannot be decoded, or has more pixels than allowed.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        jpeg = bytes(data[:2]) == b"\xff\xd8"
        fast = _decode_jpeg(bytes(data), op, shrink_to, scratch or Scratch()) if jpeg else None
        return _decode_pillow(bytes(data), op) if fast is None else fast
    if isinstance(data, Image.Image):
        return _to_array(data, op.mode)
    import torch

    if isinstance(data, torch.Tensor) and data.ndim == 3:
        data = data.permute(1, 2, 0).numpy()
    array = np.asarray(data)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise SampleError(
            f"decode was given {array.dtype} {array.shape}; it takes bytes, a Pillow image, "
            "(H, W, C) uint8 or a (C, H, W) uint8 tensor: leave decode out for other arrays"
        )
    image = Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    return _to_array(image, op.mode)


def _decode_jpeg(
    data: bytes, op: Decode, shrink_to: int | None, scratch: Scratch
) -> np.ndarray | None:
    """By libjpeg-turbo, bit for bit as Pillow; None for what Pillow must see to."""
    if op.mode == "RGBA":
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _check_pixels(width, height, op)
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
    segments = _metadata(data)
    return _turned(array, _orientation(data, segments)) if segments else array


def _metadata(data: bytes) -> list[bytes]:
    """The segments before the picture that may tell an orientation, EXIF and XMP.

    Source: ITU-T T.81, B.1 (segments, after any number of fill bytes); JEITA CP-3451, 4.5.4.
    """
    found = []
    at, end = 2, len(data) - 4
    while at < end and data[at] == 0xFF and (marker := data[at + 1]) != 0xDA:
        if marker == 0xFF:
            at += 1
            continue
        length = max(2, data[at + 2] << 8 | data[at + 3])
        if marker == 0xE1 and data.startswith((_EXIF, _XMP), at + 4):
            found.append(data[at + 4 : at + 2 + length])
        at += 2 + length
    return found


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


def _orientation(data: bytes, segments: Sequence[bytes]) -> int:
    """EXIF's orientation, 1 where it is broken: a photograph is worth more than its tags."""
    with warnings.catch_warnings(), _without_pillow_limit():
        warnings.simplefilter("ignore")
        try:
            first, *others = segments
            if first.startswith(_EXIF) and not any(each.startswith(_EXIF) for each in others):
                # To open the file costs three times as much as to read its one segment.
                exif = Image.Exif()
                exif.load(first)
                if not others or _ORIENTATION in exif:
                    return int(exif.get(_ORIENTATION, 1))
            return int(Image.open(io.BytesIO(data)).getexif().get(_ORIENTATION, 1))
        except Exception:
            return 1


def _check_pixels(width: int, height: int, op: Decode) -> None:
    if width * height > op.max_pixels:
        raise SampleError(
            f"{width} x {height} px is over the limit of {op.max_pixels} (decode's max_pixels)"
        )


@contextlib.contextmanager
def _without_pillow_limit() -> Iterator[None]:
    """`max_pixels` is the limit; Pillow's own would stand in the way of a higher one."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _decode_pillow(data: bytes, op: Decode) -> np.ndarray:
    with warnings.catch_warnings(), _without_pillow_limit():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                _check_pixels(image.width, image.height, op)
                ImageOps.exif_transpose(image, in_place=True)  # else it copies what is upright
                return _to_array(image, op.mode)
        except UnidentifiedImageError:
            raise SampleError("not an image that Pillow knows, whatever its name") from None
        except (SampleError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise many kinds on broken files
            raise SampleError(f"cannot be decoded: {type(error).__name__}: {error}") from None


def _to_array(image: Image.Image, mode: str) -> np.ndarray:
    """(H, W, C) uint8 in `mode`; 16-bit grey keeps its high byte, an alpha channel is dropped."""
    rows = max(1, STRIP_PIXELS // image.width)
    if image.height <= rows:
        return _strip(image, mode)
    array = np.empty((image.height, image.width, len(mode)), np.uint8)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        array[top : top + rows] = _strip(image.crop(box), mode)
    return array


def _strip(image: Image.Image, mode: str) -> np.ndarray:
    if image.mode.startswith("I;16") or image.mode == "I":
        wide = np.asarray(image).astype(np.int64)
        image = Image.fromarray(np.clip(wide >> 8, 0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    array = np.asarray(image.convert(mode))
    return array if array.ndim == 3 else array[..., None]
