"""Twins in NumPy of compiled functions, to the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precache.codecs.windows import Windows

MOST_TAPS = 128
"""Most pixels along an axis that 16 bits can sum up; above, sums are exact, and slower."""

_ONE = 2**16 - 1
"""Sum of the weights of an output pixel."""


def resize(image: np.ndarray, window: Windows, out: np.ndarray) -> None:
    """Resize a window of one (C, H, W) image, to the same bytes as the compiled function."""
    top, left, height, width = window.boxes[0].astype(int).tolist()
    starts, scales = window.starts[0], window.scales[0]
    inside = 0 <= top <= image.shape[1] - height and 0 <= left <= image.shape[2] - width
    if not inside or height < 1 or width < 1 or (scales <= 0).any():
        raise ValueError("windows that do not lie in their images")
    down = _taps(height, starts[0], scales[0], out.shape[1])
    across = _taps(width, starts[1], scales[1], out.shape[2])
    box = image[:, top : top + height, left : left + width]
    if int(2 * max(1.0, *scales)) + 3 > MOST_TAPS:
        sums = _add_up(_add_up(box.astype(np.uint64), down), across)
        resized = (sums + _ONE * _ONE // 2) // (_ONE * _ONE)
    else:
        lines = _add_up(box.astype(np.uint64) << 8, down, rounds=True)
        resized = (_add_up(lines, across, rounds=True) + 128) >> 8
    pixels = resized.astype(np.uint8)
    out[...] = pixels[:, :, ::-1] if window.mirrored[0] else pixels


def _taps(size: int, start: float, scale: float, count: int) -> list[tuple[int, np.ndarray]]:
    """Return for each of `count` pixels the first that it is made of, and uint64 weights."""
    support, taps = max(1.0, scale), []
    for number in range(count):
        centre = start + (number + 0.5) * scale
        first = min(int(max(0.0, centre - support + 0.5)), size - 1)
        end = max(min(int(centre + support + 0.5), size), first + 1)
        values = np.maximum(0, 1 - np.abs(np.arange(first, end) + 0.5 - centre) / support)
        sums = values.cumsum()  # rounded, not weights: what is lost of many does not add up
        upto = sums * _ONE / sums[-1] + 0.5 if sums[-1] > 0 else np.full(end - first, float(_ONE))
        taps.append((first, np.diff(upto.astype(np.uint64), prepend=np.uint64(0))))
    return taps


def _add_up(
    lines: np.ndarray, taps: Sequence[tuple[int, np.ndarray]], *, rounds: bool = False
) -> np.ndarray:
    """Add up (C, lines, n) by weights: (C, n, taps). If it `rounds`, to 16 bits."""
    sums = np.empty((len(lines), lines.shape[2], len(taps)), np.uint64)
    for number, (first, weights) in enumerate(taps):
        products = lines[:, first : first + len(weights)] * weights[:, None]
        if rounds:
            products >>= np.uint64(16)
        sums[:, :, number] = products.sum(axis=1) + np.uint64(len(weights) // 2 * rounds)
    return sums


def rgb(planes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The pixels (3, H, W) uint8 of planes of `raw420`."""
    height, width = shape[1:]
    luma, halves = planes[: height * width], planes[height * width :]
    halves = halves.reshape(2, (height + 1) // 2, (width + 1) // 2)
    blue, red = (_at_full_size(half)[:height, :width] for half in halves)
    sixteenths = luma.reshape(height, width).astype(np.int32) * 16 + 8
    colours = [
        sixteenths + _scaled(red, 11485),  # 1.402
        sixteenths - _scaled(blue, 2819) - _scaled(red, 5850),  # 0.344136 and 0.714136
        sixteenths + _scaled(blue, 14516),  # 1.772
    ]
    pixels: np.ndarray = (np.stack(colours) >> 4).clip(0, 255).astype(np.uint8)
    return pixels


def _at_full_size(half: np.ndarray) -> np.ndarray:
    """Interpolate Cb or Cr, in sixteenths less 128."""
    values = np.pad(half.astype(np.int32), 1, "edge")
    for _ in range(2):
        near, sums = 3 * values[1:-1], np.empty((2 * len(half), values.shape[1]), np.int32)
        sums[::2], sums[1::2] = near + values[:-2], near + values[2:]
        values, half = sums.T, half.T
    return values - 2048


def _scaled(values: np.ndarray, factor: int) -> np.ndarray:
    """Multiply by a factor in 8192ths, rounded down."""
    return values * 8 * factor >> 16
