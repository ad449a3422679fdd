"""The `image` codec: a filter that leaves little to store, then zstd with what suits its residue.

Where nothing is compiled, the filter is undone apart from decompression, over many rows at once,
which is several times cheaper than row by row.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.errors import UsageError

IMAGE_FILTER = "precache.image"
IMAGE_FILTER_VERSION = 1

ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
"""Python's own zstd or its backport, with parameters that numcodecs has not; for who builds."""

LITERAL_COMPRESSION_MODE, MAX_BLOCK_SIZE = 1002, 1015
"""``ZSTD_c_literalCompressionMode``, ``ZSTD_c_maxBlockSize`` (zstd.h 1.5.7): unnamed in Python."""

_LEAST_BLOCK, _MOST_BLOCK = 20 << 10, 64 << 10
"""The smallest channel that is worth blocks of its own, and the largest block; bytes."""

_WIDE = 300
"""Lines of so many bytes are added up one by one, shorter ones in runs of four."""

_WIDE_ROWS = 64
"""Rows of wide lines whose filter is undone at once: enough to spread the calls."""

_NARROW_ROWS, _NARROW_BYTES = 128, 4800 << 10
"""Other rows, at most so many and of so many bytes together, which the caches hold."""

_scratch = threading.local()


# --- the filter ---------------------------------------------------------------------------------


def filter_image(
    rows: np.ndarray, plain: np.ndarray | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """The `image` codec's filter, version 1.

    Parameters
    ----------
    rows
        (..., C, H, W) uint8; stays as it is.
    plain, out
        (..., H, W) scratch, and the result, of the shape of `rows`, to reuse, since fresh memory
        costs more than the work.

    Returns
    -------
    np.ndarray
        Same shape and dtype, modulo 256: where C = 3, (R - G, G, B - G); then each line of pixels
        less the line above it.
    """
    plain = np.empty(rows[..., 0, :, :].shape, np.uint8) if plain is None else plain
    out = np.empty(rows.shape, np.uint8) if out is None else out
    # Channel by channel: what the caches hold is dear.
    for channel in range(rows.shape[-3]):
        lines, residue = rows[..., channel, :, :], out[..., channel, :, :]
        if rows.shape[-3] == 3 and channel != 1:
            lines = np.subtract(lines, rows[..., 1, :, :], out=plain)
        residue[..., 0, :] = lines[..., 0, :]
        np.subtract(lines[..., 1:, :], lines[..., :-1, :], out=residue[..., 1:, :])
    return out


def undone_together(row_shape: tuple[int, ...]) -> int:
    """How many (C, H, W) rows `undo_image` takes at once; it costs least right after decoding."""
    fitting = max(1, _NARROW_BYTES // max(1, math.prod(row_shape)))
    return min(_NARROW_ROWS, fitting) if row_shape[-1] < _WIDE else _WIDE_ROWS


def undo_image(rows: np.ndarray) -> None:
    """Undo `filter_image` in place on contiguous (..., C, H, W) uint8."""
    if not rows.flags.c_contiguous:  # `reshape` would copy
        raise ValueError("rows that are not contiguous cannot be undone in place")
    if not rows.size:
        return
    channels, height, width = rows.shape[-3:]
    if kernels.compiled is not None:
        kernels.compiled.undo_image(rows, channels, height, width)
        return
    images = rows.reshape(-1, channels, height, width)
    together = undone_together(images.shape[1:])
    add_up = _add_up_fours if width < _WIDE else _add_up
    for start in range(0, len(images), together):
        part = images[start : start + together]
        add_up(part.reshape(-1, height, width))
        if channels == 3:
            part[:, 0] += part[:, 1]
            part[:, 2] += part[:, 1]


def _add_up(planes: np.ndarray) -> None:
    """Prefix sums along H of (M, H, W), in place."""
    lines = planes.swapaxes(0, 1)
    # Apart from the planes, whose lines share few sets of a cache where W is a power of two.
    above, below = lines[0].copy(), np.empty_like(lines[0])
    for line in lines[1:]:
        np.add(above, line, out=below)
        line[...] = below
        above, below = below, above


def _add_up_fours(planes: np.ndarray) -> None:
    """Prefix sums along H of (M, H, W), in place, four lines at a time.

    Each line becomes the sum of itself and the three above, in two additions of whole planes; of
    these, each run of four lines, one piece of memory, needs what the run above it has come to.
    """
    if not hasattr(_scratch, "sums") or _scratch.sums.size < planes.size:
        _scratch.sums = np.empty(planes.size, np.uint8)
    twos = _scratch.sums[: planes.size].reshape(planes.shape)
    for step, lines, sums in ((1, planes, twos), (2, twos, planes)):
        np.add(lines[:, step:], lines[:, :-step], out=sums[:, step:])
        sums[:, :step] = lines[:, :step]
    count, height, width = planes.shape
    whole = height // 4 * 4
    if whole:
        _add_up(planes[:, :whole].reshape(count, -1, 4 * width))
        planes[:, whole:] += planes[:, whole - 4 : height - 4]


# --- zstd ---------------------------------------------------------------------------------------


def load_zstd() -> ModuleType:
    """`ZSTD_MODULE`, which a training node need not have.

    Raises
    ------
    UsageError
        It is not installed, or Python was built without it.
    """
    try:
        return importlib.import_module(ZSTD_MODULE)
    except ImportError:
        ours = ZSTD_MODULE.startswith("backports")
        way_out = "pip install 'precache[workers]'" if ours else "use a Python built with libzstd"
        raise UsageError(f"building needs {ZSTD_MODULE}: {way_out}") from None


def _block_size(channel: int) -> int:
    """Bytes of a zstd block for filtered channels of so many bytes; 0 leaves it to zstd.

    Blocks that end about where channels do have literals of one distribution each: smaller, and
    decoded faster. Of small channels, the tables of so many blocks would cost more than that.
    """
    if channel < _LEAST_BLOCK:
        return 0
    return -(-channel // -(-channel // _MOST_BLOCK))


def image_parameters(channel: int) -> dict[int, int]:
    """What zstd compresses filtered channels of so many bytes with: its parameters by number."""
    named = load_zstd().CompressionParameter
    parameters = {
        named.compression_level: 1,
        named.checksum_flag: 1,
        # The residue hardly repeats. What there is to find, borders and flat areas, is long: zstd
        # steps over 64 bytes at a time, and matches reach back over what it stepped over.
        named.min_match: 7,
        named.hash_log: 6,
        named.target_length: 64,
        LITERAL_COMPRESSION_MODE: 1,  # which with a target length would be off
    }
    block = _block_size(channel)
    return parameters | ({MAX_BLOCK_SIZE: block} if block else {})


class ImageEncoder:
    """The filter and then zstd, of chunks (N, C, H, W) uint8 to bytes; not thread-safe.

    Scratch and compressor are those of the last chunk's shape.
    """

    def __init__(self) -> None:
        self._plain = self._out = np.empty(0, np.uint8)
        self._compressor: Any = None

    def _prepare(self, shape: tuple[int, ...]) -> None:
        parameters = image_parameters(shape[-2] * shape[-1])
        self._compressor = load_zstd().ZstdCompressor(options=parameters)
        self._plain = np.empty((*shape[:-3], *shape[-2:]), np.uint8)
        self._out = np.empty(shape, np.uint8)

    def __call__(self, chunk: np.ndarray) -> bytes:
        if chunk.shape != self._out.shape:
            self._prepare(chunk.shape)
        filtered = filter_image(chunk, self._plain, self._out)
        frame: bytes = self._compressor.compress(filtered.data, self._compressor.FLUSH_FRAME)
        return frame
