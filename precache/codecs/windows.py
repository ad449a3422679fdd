"""Windows of images: the pixels that are looked at, and the size that they are resized to.

Compiled (`_rows.c`), or NumPy where that is missing, to the same bytes: antialiased bilinear, by
16-bit weights, at most 0.52 levels from the result in double precision. Masks are not blended:
`pick_pixels` takes some of their pixels, by NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precache.codecs import kernels
from precache.recipe.resampling import nearest_pixels

MOST_TAPS = 128
"""Most pixels along an axis that 16 bits can sum up; above, sums are exact, and slower."""

_ONE = 2**16 - 1
"""Sum of the weights of an output pixel."""


@dataclass(frozen=True)
class Windows:
    """Windows of n images.

    Attributes
    ----------
    boxes
        (n, 4) int64 top, left, height and width, within each image: no other pixel is used.
    starts, scales
        (n, 2) float64, down and across: the centre of pixel i of the result lies at
        ``start + (i + 0.5) * scale`` in its box.
    mirrored
        (n,) bool: left and right are exchanged.
    turned
        (n,) bool: they were exchanged before the box was resized, which decides the pixels that are
        taken of it.
    """

    boxes: np.ndarray
    starts: np.ndarray
    scales: np.ndarray
    mirrored: np.ndarray
    turned: np.ndarray

    def part(self, rows: slice) -> Windows:
        """Return the windows of some of the images."""
        return Windows(*(array[rows] for array in vars(self).values()))

    def nearest(self, axis: int, count: int) -> np.ndarray:
        """Return the pixels of an axis that become `count` of the result, as `nearest_pixels`.

        (n, count) int64, by the places in each image. Mirroring is not applied.
        """
        scales, sizes = self.scales[:, axis, None], self.boxes[:, 2 + axis, None].astype(np.int64)
        resized = np.rint(sizes / scales)
        numbers = np.rint(self.starts[:, axis, None] / scales) + np.arange(count)
        turned = self.turned[:, None] & (axis == 1)
        pixels = nearest_pixels(np.where(turned, resized - 1 - numbers, numbers), sizes, resized)
        inside = np.where(turned, sizes - 1 - pixels, pixels)
        return self.boxes[:, axis, None].astype(np.int64) + inside


def resize_window(
    image: np.ndarray, window: Windows, out: np.ndarray, *, interleaved: bool = False
) -> None:
    """Resize a window of one image.

    Parameters
    ----------
    image
        Contiguous (C, H, W) uint8, or (H, W, C) if `interleaved`.
    out
        (1, C, height, width) uint8, contiguous.

    Raises
    ------
    ValueError
        The window does not lie in the image, or the image has other channels than `out`.
    """
    planes = image.transpose(2, 0, 1) if interleaved else image
    if len(planes) != out.shape[1]:
        raise ValueError(f"an image of {len(planes)} channels, and room for {out.shape[1]}")
    if kernels.compiled().functions is None:
        _resize(planes, window, out[0])
        return
    source, zero, shape = [image.reshape(-1).data], np.zeros(1, np.int64), np.array([planes.shape])
    resize_pieces(source, zero, zero, shape, window, out, interleaved=interleaved)


def resize_pieces(
    sources: Sequence[memoryview],
    numbers: np.ndarray,
    starts: np.ndarray,
    shapes: np.ndarray,
    windows: Windows,
    out: np.ndarray,
    *,
    interleaved: bool = False,
    checks: np.ndarray | None = None,
    filtered: bool = False,
    halves: bool = False,
    jpeg: bool = False,
) -> int:
    """Resize a window of each image, as `resize_window`, by one call; needs compiled functions.

    Parameters
    ----------
    numbers, starts
        (n,) int64: the source that each image lies in, and its offset there in bytes.
    shapes
        (n, 3) int64: channels, height and width of each.
    checks
        (n,) int64, as `kernels.decode_frames` takes it, of sources that are the zstd frames of
        ragged rows, or their chunks.
    filtered
        Such rows are of the codec `image`.
    halves
        Images are of the codec `raw420`, and not compressed.
    jpeg
        Sources are chunks of the codec `jpeg`, of which the windows alone are decoded; needs
        `kernels.has_turbojpeg`.

    Returns
    -------
    int
        Number of images before the first damaged one, or JPEG that cannot be decoded in part.
    """
    functions = kernels.compiled().functions
    assert functions is not None
    resized: int = functions.resize(
        list(sources),
        np.ascontiguousarray(numbers),
        np.ascontiguousarray(starts),
        np.ascontiguousarray(shapes),
        np.ascontiguousarray(windows.boxes, np.int64),
        np.concatenate([windows.starts, windows.scales], axis=1, dtype=np.float64),
        np.ascontiguousarray(windows.mirrored, np.bool_),
        interleaved or jpeg,
        out,
        *out.shape[2:],
        checks,
        filtered,
        halves,
        jpeg,
    )
    return resized


def pick_pixels(image: np.ndarray, window: Windows, out: np.ndarray) -> None:
    """Resize a window of one image by taking pixels, as `Windows.nearest`.

    Parameters
    ----------
    image
        (C, H, W), as large as the window demands.
    out
        (1, C, height, width) of its dtype.
    """
    [rows], [columns] = (window.nearest(axis, out.shape[2 + axis]) for axis in (0, 1))
    columns = columns[::-1] if window.mirrored[0] else columns
    # With "clip", `take` needs no buffer to write into `out`.
    image.take(rows, axis=1).take(columns, axis=2, out=out[0], mode="clip")


def _resize(image: np.ndarray, window: Windows, out: np.ndarray) -> None:
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
