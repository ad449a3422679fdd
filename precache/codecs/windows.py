"""Windows of images: the pixels that are looked at, and the size that they are resized to.

By compiled code (`_rows.c`) alone: antialiased bilinear, by 16-bit weights, at most 0.52 levels
from the result in double precision. Masks are not blended: `pick_pixels` takes some of their
pixels, by NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precache.codecs import kernels
from precache.recipe.resampling import nearest_pixels


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
    UsageError
        Nothing is compiled.
    """
    planes = image.transpose(2, 0, 1) if interleaved else image
    if len(planes) != out.shape[1]:
        raise ValueError(f"an image of {len(planes)} channels, and room for {out.shape[1]}")
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
    """Resize a window of each image, as `resize_window`, by one call.

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
    functions = kernels.required("crops of rows with shapes of their own, and codec raw420,")
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
