"""The `jpeg` codec: rows that are JPEG files, by libjpeg-turbo.

Format: ITU-T T.81. Decoding is that of a build, so that a file whose pixels are a row's is the row.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
from types import ModuleType
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.errors import DamageError, SampleError, needs

SUBSAMPLING = "4:2:0"
"""Of colours, for files that are encoded here. At equal bytes as good as 4:4:4 at a lower quality,
and a fifth cheaper to decode."""

RESTARTS = {1: (8, 8), 3: (16, 2)}
"""Channels of rows -> pixels of a block's side, and the fewest blocks between restart markers, by
which a part of a file is decoded. Markers take 2% of the bytes of quality 90."""

MOST_SIDE = 65_500
"""libjpeg's limit of pixels of a side."""

CHANNELS = {1: "GRAY", 3: "RGB"}
"""Channels of rows -> simplejpeg's names of their colours."""

_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""Starts of segments, and the end."""
_PROGRESSIVE, _SOS, _EOI = (b"\xff\xc2", b"\xff\xca"), b"\xff\xda", b"\xff\xd9"
_SMOOTHED = range(1, 10)
"""Coefficients of a block that libjpeg guesses from the blocks beside if bits are missing."""


@functools.cache
@needs("codec jpeg", "jpeg")
def import_simplejpeg() -> ModuleType:
    """Import simplejpeg, which a training node need not have; raises `UsageError` without it."""
    import simplejpeg

    return simplejpeg  # type: ignore[no-any-return]


def jpeg_header(file: bytes | np.ndarray) -> tuple[int, int, str]:
    """Return height, width and colours of a JPEG file; raises `ValueError` if they are unknown."""
    try:
        height, width, colours, _ = import_simplejpeg().decode_jpeg_header(file)
    except KeyError:
        raise ValueError("its subsampling of colours has no name") from None
    return height, width, colours


def lacks_scans(file: bytes) -> bool:
    """Return True if a progressive JPEG lacks scans, so that libjpeg smooths its blocks.

    Pixels then depend on the blocks that are decoded with them, and on libjpeg's release.
    """
    lacking, at = dict[tuple[int, int], int](), 2  # bits of each component's coefficients
    while (marker := _MARKER.search(file, at)) and marker[0] != _EOI:
        start = marker.end()
        at = start + int.from_bytes(file[start : start + 2])
        if marker[0] in _PROGRESSIVE:
            lacking = dict.fromkeys(itertools.product(file[start + 8 : at : 3], _SMOOTHED), 1)
        elif marker[0] == _SOS:
            first, last, bits = file[at - 3 : at]
            coefficients = _SMOOTHED[max(first - 1, 0) : last]
            scan = itertools.product(file[start + 3 : at - 3 : 2], coefficients)
            lacking |= dict.fromkeys(scan, bits & 15)
    return any(lacking.values())


def encode_jpeg(row: np.ndarray, quality: int) -> bytes:
    """Encode (C, H, W) uint8 of 1 or 3 channels as a JPEG file, by Pillow.

    It has restart markers, the same number in each line of blocks, and Huffman codes of its own.

    Raises
    ------
    SampleError
        The row is larger than a file can be.
    """
    from PIL import Image

    channels, height, width = row.shape
    if max(height, width) > MOST_SIDE:
        raise SampleError(
            f"is {width} x {height} px, and a JPEG has up to {MOST_SIDE} on a side; give --max-size"
        )
    block, fewest = RESTARTS[channels]
    line = -(-width // block)
    interval = next((n for n in range(fewest, line) if line % n == 0), line)
    pixels = np.ascontiguousarray(row.transpose(1, 2, 0))
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    options: dict[str, Any] = {"quality": quality, "restart_marker_blocks": interval}
    if channels == 3:
        options["subsampling"] = SUBSAMPLING
    file = io.BytesIO()
    try:
        image.save(file, "JPEG", optimize=True, **options)
    except OSError:  # more than a byte a pixel, as of noise: Pillow has no room for them at once
        file = io.BytesIO()
        image.save(file, "JPEG", **options)
    return file.getvalue()


def decode_jpeg(
    file: bytes | np.ndarray,
    shape: tuple[int, ...],
    room: np.ndarray | None = None,
    box: np.ndarray | None = None,
) -> np.ndarray:
    """Decode a JPEG file, or a part of it.

    Parameters
    ----------
    file
        Its bytes; an array is uint8.
    shape
        (C, H, W) of the pixels: no memory is taken for others, whatever the file claims.
    room
        (n,) uint8 for the pixels, if there are no more than n; else they get memory of their own.
    box
        (4,) int64 top, left, height and width of the pixels that are wanted: others are left out
        where restart markers and compiled code allow that, and top and left are set to the place
        of the box in what is returned.

    Returns
    -------
    np.ndarray
        uint8 of this shape, or with `box` of a part; in memory the channels of a pixel are beside
        each other.

    Raises
    ------
    DamageError
        It is no such JPEG, or broken.
    """
    simplejpeg, functions = import_simplejpeg(), kernels.compiled().functions
    if box is not None and functions is not None:
        part = functions.part_of_jpeg(file, shape, tuple(box.tolist()))
        if part is not None:
            file, shape, box[0], box[1] = part
    try:
        size = jpeg_header(file)[:2]
        if shape[0] not in CHANNELS or size != shape[1:]:
            raise ValueError(f"{size[1]} x {size[0]} pixels where {tuple(shape)} belong")
        fits = room is not None and math.prod(shape) <= len(room)
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            file, CHANNELS[shape[0]], fastdct=False, fastupsample=False, strict=True,
            buffer=room if fits else None,
        )  # fmt: skip
    except ValueError as error:
        raise DamageError(f"its JPEG does not decode: {error}") from None
    return pixels.transpose(2, 0, 1)
