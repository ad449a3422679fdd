"""The `raw420` codec: rows of Y, Cb and Cr, of which the last two have half the height and width.

Colours: ITU-T T.871 (JFIF), section 7, which is BT.601 with all 256 levels. Cb and Cr are means of
two by two pixels, and are interpolated as libjpeg does, by 9/16, 3/16, 3/16 and 1/16.
"""

from __future__ import annotations

import numpy as np

from precache.codecs.windows import Windows, resize_pieces

_LUMA = 19595, 38470, 7471
"""Weights of R, G and B in Y, in 65536ths."""

_CB = -11058, -21710, 32768
_CR = 32768, -27439, -5329


def planes_nbytes(shapes: np.ndarray) -> np.ndarray:
    """Return the bytes of rows of shapes (..., 3) as they are stored."""
    height, width = shapes[..., 1], shapes[..., 2]
    nbytes: np.ndarray = height * width + (height + 1) // 2 * ((width + 1) // 2) * 2
    return nbytes


def planes_of(row: np.ndarray) -> np.ndarray:
    """Return (3, H, W) uint8 as the planes that are stored, one after another: (n,) uint8.

    At an odd height or width, the last line or column is taken twice for Cb and Cr.
    """
    pixels = row.astype(np.int32)
    luma = (sum(w * p for w, p in zip(_LUMA, pixels, strict=True)) + (1 << 15)) >> 16
    height, width = row.shape[1:]
    even = np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2)), "edge")
    lines = even[:, ::2] + even[:, 1::2]
    fours = lines[:, :, ::2] + lines[:, :, 1::2]
    half = (128 << 18) + (1 << 17) - 1
    colours = [
        (sum(w * p for w, p in zip(weights, fours, strict=True)) + half) >> 18
        for weights in (_CB, _CR)
    ]
    return np.concatenate([plane.reshape(-1).astype(np.uint8) for plane in (luma, *colours)])


def rgb_of(planes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the pixels (3, H, W) uint8 of contiguous planes, in memory of their own.

    Raises
    ------
    UsageError
        Nothing is compiled.
    """
    height, width = shape[1:]
    rgb = np.empty(shape, np.uint8)
    box, ones, no = np.array([[0, 0, height, width]]), np.ones((1, 2)), np.zeros(1, bool)
    whole = Windows(box, 0 * ones, ones, no, no)
    zero, shapes = np.zeros(1, np.int64), np.array([shape])
    resize_pieces([planes.data], zero, zero, shapes, whole, rgb[np.newaxis], halves=True)
    return rgb
