"""The `image` codec: a filter whose residue compresses well, then zstd with parameters to suit it.

Without compiled code, the filter is undone after decompression, over many rows at once, which is
several times cheaper than row by row.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.errors import UsageError, missing_library

IMAGE_FILTER = "precache.image"
IMAGE_FILTER_VERSION = 1

ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
"""Python's own zstd or its backport: builds need parameters that numcodecs does not offer."""

LITERAL_COMPRESSION_MODE, MAX_BLOCK_SIZE = 1002, 1015
"""``ZSTD_c_literalCompressionMode``, ``ZSTD_c_maxBlockSize`` (zstd.h 1.5.7): unnamed in Python."""

_LEAST_BLOCK, _MOST_BLOCK = 20 << 10, 64 << 10
"""Bytes of the smallest channel worth blocks of its own, and of the largest block."""

_UNDONE_ROWS, _UNDONE_NBYTES = 128, 4800 << 10
"""Limits of rows undone at once, by number and by bytes: what the CPU caches hold."""


# --- the filter ---------------------------------------------------------------------------------


def filter_image(
    rows: np.ndarray, plain: np.ndarray | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """Apply the `image` codec's filter, version 1.

    Parameters
    ----------
    rows
        (..., C, H, W) uint8; not modified.
    plain, out
        (..., H, W) scratch, and the result, of the shape of `rows`; to be reused, since fresh
        memory costs more than the work.

    Returns
    -------
    np.ndarray
        Same shape and dtype, modulo 256: if C = 3, (R - G, G, B - G); then each line of pixels
        minus the line above it.
    """
    plain = np.empty(rows[..., 0, :, :].shape, np.uint8) if plain is None else plain
    out = np.empty(rows.shape, np.uint8) if out is None else out
    # Channel by channel, so that the caches hold what is worked on.
    for channel in range(rows.shape[-3]):
        lines, residue = rows[..., channel, :, :], out[..., channel, :, :]
        if rows.shape[-3] == 3 and channel != 1:
            lines = np.subtract(lines, rows[..., 1, :, :], out=plain)
        residue[..., 0, :] = lines[..., 0, :]
        np.subtract(lines[..., 1:, :], lines[..., :-1, :], out=residue[..., 1:, :])
    return out


def undo_image(rows: np.ndarray) -> None:
    """Undo `filter_image` in place on contiguous (..., C, H, W) uint8."""
    if not rows.flags.c_contiguous:  # `reshape` would copy
        raise ValueError("rows that are not contiguous cannot be undone in place")
    if not rows.size:
        return
    channels, height, width = rows.shape[-3:]
    functions = kernels.compiled().functions
    if functions is not None:
        functions.undo_image(rows, channels, height, width)
        return
    images = rows.reshape(-1, channels, height, width)
    batch = max(1, min(_UNDONE_ROWS, _UNDONE_NBYTES // images[0].size))
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        lines = part.reshape(-1, height, width).swapaxes(0, 1)
        # In buffers of their own: where W is a power of two, lines share few cache sets.
        above, below = lines[0].copy(), np.empty_like(lines[0])
        for line in lines[1:]:
            np.add(above, line, out=below)
            line[...] = below
            above, below = below, above
        if channels == 3:
            part[:, 0] += part[:, 1]
            part[:, 2] += part[:, 1]


# --- zstd ---------------------------------------------------------------------------------------


def import_zstd() -> ModuleType:
    """Import `ZSTD_MODULE`, which a training node need not have.

    Raises
    ------
    UsageError
        It is not installed, or Python was built without it.
    """
    try:
        return importlib.import_module(ZSTD_MODULE)
    except ImportError:
        if ZSTD_MODULE.startswith("backports"):
            raise missing_library("building", ZSTD_MODULE) from None
        raise UsageError(f"building needs {ZSTD_MODULE}: use a Python built with libzstd") from None


def _block_size(channel: int) -> int:
    """Bytes of a zstd block for filtered channels of `channel` bytes; 0 leaves it to zstd.

    Blocks that end about where channels do hold literals of one distribution each, which are
    smaller and decode faster. For small channels, the tables of so many blocks would cost more.
    """
    if channel < _LEAST_BLOCK:
        return 0
    return -(-channel // -(-channel // _MOST_BLOCK))


def image_parameters(channel: int) -> dict[int, int]:
    """Zstd parameters, by number, for filtered channels of `channel` bytes."""
    named = import_zstd().CompressionParameter
    parameters = {
        named.compression_level: 1,
        named.checksum_flag: 1,
        # The residue hardly repeats; the repeats it has (borders, flat areas) are long. zstd
        # steps over 64 bytes at a time, and matches extend back over what it skipped.
        named.min_match: 7,
        named.hash_log: 6,
        named.target_length: 64,
        LITERAL_COMPRESSION_MODE: 1,  # off by default if a target length is set
    }
    block = _block_size(channel)
    return parameters | ({MAX_BLOCK_SIZE: block} if block else {})


class ImageEncoder:
    """Encodes chunks (…, C, H, W) uint8 to bytes: the filter, then zstd. Not thread-safe.

    Scratch memory and compressor are kept for chunks of the same shape.
    """

    def __init__(self) -> None:
        self._plain = self._out = np.empty(0, np.uint8)
        self._compressor: Any = None

    def _prepare(self, shape: tuple[int, ...]) -> None:
        parameters = image_parameters(shape[-2] * shape[-1])
        self._compressor = import_zstd().ZstdCompressor(options=parameters)
        self._plain = np.empty((*shape[:-3], *shape[-2:]), np.uint8)
        self._out = np.empty(shape, np.uint8)

    def __call__(self, chunk: np.ndarray, head: bytes = b"") -> bytes:
        """Encode a chunk, with bytes before it that are not filtered."""
        if chunk.shape != self._out.shape:
            self._prepare(chunk.shape)
        filtered = filter_image(chunk, self._plain, self._out)
        data = b"".join((head, filtered.data)) if head else filtered.data
        frame: bytes = self._compressor.compress(data, self._compressor.FLUSH_FRAME)
        return frame
