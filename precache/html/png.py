"""Encode arrays as PNG for pages: training nodes have no Pillow, and the format is simple."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np

from precache.messages import printable

COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}
"""Channels -> PNG colour type: grey, grey with alpha, RGB, RGBA."""

SHOWN_CLASSES = 12
"""Most values of a mask that are listed."""

LINES_SIDE = 48
"""Longer side of a smaller copy of a picture in which the lines of boxes are still seen."""

PICTURE_SIDE = 16
"""Minimum side of a two-dimensional array that is shown as a picture, not as numbers."""

TEXT_SHOWN, BYTES_SHOWN = 500, 16
"""Most characters of a text, and bytes of others, that are shown."""


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode (H, W, C) uint8 pixels with 1 to 4 channels as a PNG file.

    Format: W3C, Portable Network Graphics, sections 5 and 11; every line uses the filter `Up`.
    """
    height, width, channels = pixels.shape
    flat = pixels.reshape(height, width * channels)
    lines = np.full((height, 1 + flat.shape[1]), 2, np.uint8)
    lines[:, 1:] = flat
    lines[1:, 1:] -= flat[:-1]
    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class Preview(NamedTuple):
    """An array for a screen.

    Attributes
    ----------
    pixels
        (H, W, C) uint8; None if the array does not have the shape of a picture.
    note
        Size and dtype of a picture, and what was done to its values; the values of other arrays.
    """

    pixels: np.ndarray | None
    note: str


def preview(array: np.ndarray | str | bytes, *, kind: str | None = None) -> Preview:
    """Convert an array to a picture, or to text if it does not have the shape of one.

    Parameters
    ----------
    array
        (C, H, W), (H, W, C) or (H, W) of any dtype. uint8 is unchanged, bool becomes black and
        white, other dtypes are scaled from their least to their greatest finite value. A text
        stays, as far as it is not too long.
    kind
        Kind of rows that differ in length, which are no pictures.
    """
    if isinstance(array, bytes):
        return Preview(None, f"{len(array):,} bytes, which begin with {array[:BYTES_SHOWN].hex()}")
    if isinstance(array, str):
        rest = f"… ({len(array):,} characters)" if len(array) > TEXT_SHOWN else ""
        return Preview(None, printable(array[:TEXT_SHOWN]) + rest)
    image = _channels_last(array) if kind is None else None
    if image is None or 0 in image.shape:
        return Preview(None, _summary(array))
    note = f"{image.shape[1]} x {image.shape[0]}, {image.dtype.name}"
    if image.dtype == np.uint8:
        return Preview(image, note)
    if image.dtype == np.bool_:
        return Preview(image.astype(np.uint8) * np.uint8(255), note)
    values = image.astype(np.float64)
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    # Halved, since the difference of two float64 can overflow.
    scale = (high / 2 - low / 2) or 1.0
    scaled = np.where(finite, (values / 2 - low / 2) / scale, 0.0)
    note += f"; scaled: {image.dtype.name} {low:.4g} is black, {high:.4g} is white"
    if not finite.all():
        note += f"; {np.count_nonzero(~finite)} values are not finite, shown black"
    return Preview((scaled * 255).round().clip(0, 255).astype(np.uint8), note)


def overlay(mask: np.ndarray, image: np.ndarray) -> tuple[np.ndarray, str]:
    """Colour the classes of a mask (1, H, W) other than 0 in an image (C, H, W), both uint8.

    Returns (H, W, 3) uint8, and the values of the mask as text.

    The colours are those of Pascal VOC: three bits of a class number after another, from the lowest
    on, are bits of red, green and blue, from the highest on.
    """
    numbers, colours = np.arange(256), np.zeros((256, 3), int)
    for bit in range(8):
        colours[:, bit % 3] |= (numbers >> bit & 1) << (7 - bit // 3)
    classes, pixels = mask[0], _coloured(image)
    blended = (pixels + colours[classes]) // 2
    shown = np.where(classes[..., None] == 0, pixels, blended).astype(np.uint8)
    values = np.unique(classes).tolist()
    more = f" and {len(values) - SHOWN_CLASSES} more" if len(values) > SHOWN_CLASSES else ""
    return shown, f"values {', '.join(map(str, values[:SHOWN_CLASSES]))}{more}"


def outline(kind: str, entries: np.ndarray, image: np.ndarray) -> tuple[np.ndarray, str]:
    """Draw boxes (n, 4), or keypoints (n, …, 2 or more) as squares, into an image (C, H, W) uint8.

    Lines are thick enough for `LINES_SIDE`. Returns (H, W, 3) uint8, and the number of entries as
    text.
    """
    pixels = _coloured(image).copy()
    thick = -(-max(pixels.shape[:2]) // LINES_SIDE)
    boxes = entries
    if kind == "keypoints":
        points = np.floor(entries.reshape(-1, entries.shape[-1])[:, :2])
        points = points.clip(-thick, thick + max(pixels.shape))  # no whole number holds some
        boxes = np.hstack([points - thick // 2, points + thick // 2 + 1])
    for left, top, right, bottom in boxes.round().astype(int).tolist():
        box = pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)]
        inside = box[thick:-thick, thick:-thick].copy()
        box[:] = 255, 0, 0
        box[thick:-thick, thick:-thick] = inside
    return pixels, f"{len(entries)} {kind}"


def _coloured(image: np.ndarray) -> np.ndarray:
    """Return (C, H, W) as (H, W, 3): without alpha, and grey three times."""
    return np.moveaxis(image[:3] if len(image) > 2 else image[[0, 0, 0]], 0, 2)


def _channels_last(array: np.ndarray) -> np.ndarray | None:
    if array.ndim == 2:
        return array[..., None] if min(array.shape) >= PICTURE_SIDE else None
    if array.ndim != 3:
        return None
    for axis in (0, 2):
        if array.shape[axis] in COLOURS:
            return np.moveaxis(array, axis, 2)
    return None


def downsample(pixels: np.ndarray, side: int) -> np.ndarray:
    """Reduce a picture to at most `side` pixels either way by keeping every k-th pixel."""
    step = -(-max(pixels.shape[:2]) // side)
    return pixels[::step, ::step]


def _summary(array: np.ndarray) -> str:
    """Describe an array: dtype, shape, and its values, or their range if there are many."""
    if array.size == 1:
        return f"{array.dtype.name}: {_number(array.reshape(-1)[0])}"
    head = f"{array.dtype.name} {tuple(array.shape)}"
    if array.size <= 16:
        return f"{head}: {' '.join(map(_number, array.reshape(-1)))}"
    values = array.astype(np.float64)
    first = " ".join(map(_number, array.reshape(-1)[:6]))
    with np.errstate(all="ignore"):
        spread = f"{values.min():.4g} … {values.max():.4g}, mean {values.mean():.4g}"
    return f"{head}: {spread}; starts with {first}"


def _number(value: np.generic) -> str:
    return f"{value:.4g}" if value.dtype.kind == "f" else str(value)
