"""The `jpeg` codec: rows that are JPEG files, by libjpeg-turbo.

Format: ITU-T T.81. Decoding is that of a build, so that a file whose pixels are a row's is the row.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType

import numpy as np

from precache.errors import DamageError, SampleError, needs

SUBSAMPLING = "420"
"""Of colours, for files that are encoded here. At equal bytes as good as 4:4:4 at a lower quality,
and a fifth cheaper to decode."""

MOST_SIDE = 65_500
"""libjpeg's limit of pixels of a side."""

CHANNELS = {1: ("GRAY", "Gray"), 3: ("RGB", SUBSAMPLING)}
"""Channels of rows -> simplejpeg's names of their colours, and of the subsampling of a file."""


@functools.cache
@needs("codec jpeg", "jpeg")
def import_simplejpeg() -> ModuleType:
    """Import simplejpeg, which a training node need not have; raises `UsageError` without it."""
    import simplejpeg

    return simplejpeg  # type: ignore[no-any-return]


def encode_jpeg(row: np.ndarray, quality: int) -> bytes:
    """Encode (C, H, W) uint8 of 1 or 3 channels as a JPEG file.

    Raises
    ------
    SampleError
        The row is larger than a file can be.
    """
    channels, height, width = row.shape
    if max(height, width) > MOST_SIDE:
        raise SampleError(
            f"is {width} x {height} px, and a JPEG has up to {MOST_SIDE} on a side; give --max-size"
        )
    colours, subsampling = CHANNELS[channels]
    pixels = np.ascontiguousarray(row.transpose(1, 2, 0))
    file: bytes = import_simplejpeg().encode_jpeg(
        pixels, quality, colours, subsampling, fastdct=False
    )
    return file


def decode_jpeg(
    file: bytes | np.ndarray, shape: tuple[int, ...], room: np.ndarray | None = None
) -> np.ndarray:
    """Decode a JPEG file.

    Parameters
    ----------
    file
        Its bytes; an array is uint8.
    shape
        (C, H, W) of the pixels: no memory is taken for others, whatever the file claims.
    room
        (n,) uint8 for the pixels, if there are no more than n; else they get memory of their own.

    Returns
    -------
    np.ndarray
        uint8 of this shape; in memory the channels of a pixel are beside each other.

    Raises
    ------
    DamageError
        It is no such JPEG, or broken.
    """
    simplejpeg = import_simplejpeg()
    try:
        size = simplejpeg.decode_jpeg_header(file)[:2]
        if shape[0] not in CHANNELS or size != shape[1:]:
            raise ValueError(f"{size[1]} x {size[0]} pixels where {tuple(shape)} belong")
        fits = room is not None and math.prod(shape) <= len(room)
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            file, CHANNELS[shape[0]][0], fastdct=False, fastupsample=False, strict=True,
            buffer=room if fits else None,
        )  # fmt: skip
    except ValueError as error:
        raise DamageError(f"its JPEG does not decode: {error}") from None
    return pixels.transpose(2, 0, 1)
