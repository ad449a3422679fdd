"""Rows into a batch: compiled (`_rows.c`), or by NumPy where no C compiler was at hand.

A batch that is larger than what caches hold is written past them: its memory then need not be read
before it is overwritten, which halves the time to copy it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from types import ModuleType

import google_crc32c
import numpy as np
from numcodecs import zstd

log = logging.getLogger(__name__)

MISSING = (
    "precache's compiled code is missing, without which reading takes up to twice the CPU time: "
    "with a C compiler and Python's headers at hand, install precache again "
    "(pip install --force-reinstall --no-deps --no-cache-dir)"
)

ZSTD_MISSING = (
    "precache's compiled code finds no zstd in numcodecs, without which decoding takes up to twice "
    "the CPU time: install numcodecs' wheel from PyPI"
)

compiled: ModuleType | None
"""The compiled functions, or None."""

try:
    compiled = importlib.import_module("precache.codecs._rows")
except ImportError:
    compiled = None

decodes = compiled is not None and compiled.load_zstd(zstd.__file__)
"""Whether `decode` can be called: numcodecs' own zstd is found, too."""

checks = compiled is not None and compiled.has_crc32c()
"""Whether `gather` can check CRC32C: the processor has an instruction for it."""

PAST_CACHES_NBYTES = 8 << 20
"""Batches of so many bytes are written past the caches; smaller ones may be found in them."""


@functools.cache
def tell_if_missing() -> None:
    """Say so once, where nothing is compiled, or cannot decode."""
    if compiled is None:
        log.warning(MISSING)
    elif not decodes:
        log.warning(ZSTD_MISSING)


def gather(
    sources: list[memoryview],
    numbers: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    out: np.ndarray,
    batch_nbytes: int,
    checked: np.ndarray | None = None,
) -> int:
    """Copy pieces of sources, one after another.

    Parameters
    ----------
    sources
        Bytes.
    numbers, starts, lengths
        (n,) int64: of each piece its source, and its place there in bytes.
    out
        Contiguous, of as many bytes as all pieces have.
    batch_nbytes
        Of the batch that `out` is part of.
    checked
        (n,) bool: the pieces whose CRC32C, stored behind them, is checked meanwhile; only where
        this module `checks`.

    Returns
    -------
    int
        How many were copied before one whose CRC32C does not hold.

    Raises
    ------
    ValueError
        A piece does not lie in its source, or all do not fill `out`.
    """
    if compiled is not None:
        past = batch_nbytes >= PAST_CACHES_NBYTES
        whole: int = compiled.gather(sources, numbers, starts, lengths, checked, out, past)
        return whole
    assert checked is None
    arrays = {n: np.frombuffer(sources[n], np.uint8) for n in np.unique(numbers).tolist()}
    places = zip(numbers.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
    pieces = [arrays[number][start:end] for number, start, end in places]
    if pieces:
        np.concatenate(pieces, out=out.reshape(-1).view(np.uint8))
    return len(pieces)


def crc32c(data: bytes | memoryview) -> int:
    """CRC32C of bytes; compiled, without the interpreter lock, which page faults would hold."""
    if checks:
        assert compiled is not None
        value: int = compiled.crc32c(data)
        return value
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def join(sources: list[memoryview], out: np.ndarray) -> None:
    """Copy sources whole, one after another, to contiguous memory of as many bytes."""
    lengths = np.array([len(source) for source in sources], np.int64)
    numbers = np.arange(len(sources), dtype=np.int64)
    gather(sources, numbers, np.zeros_like(numbers), lengths, out, out.nbytes)


def take(values: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """``np.take(values, rows, axis=0, out=out)``, past the caches where the batch is large.

    Parameters
    ----------
    values
        (rows, ...) contiguous.
    rows
        (n,) int64 row numbers.
    out
        (n, ...) contiguous, of the same dtype.
    """
    if compiled is None or out.nbytes < PAST_CACHES_NBYTES:
        np.take(values, rows, axis=0, out=out, mode="clip")
        return
    nbytes = out.nbytes // len(rows)
    source = values.reshape(-1).view(np.uint8).data
    starts = rows.astype(np.int64) * nbytes
    gather([source], np.zeros_like(starts), starts, np.full_like(starts, nbytes), out, out.nbytes)


def decode(
    frames: Sequence[memoryview],
    out: np.ndarray,
    *,
    filtered: bool,
    batch_nbytes: int,
    checked: np.ndarray | None = None,
) -> int:
    """Decompress zstd frames; only where this module `decodes`.

    Parameters
    ----------
    out
        Contiguous (n, ...), of which each frame fills one.
    filtered
        Whether these are (..., C, H, W) uint8, and the filter of `image` is undone.
    batch_nbytes
        Of the batch that `out` is part of.
    checked
        (n,) bool: the frames whose content checksum is checked; by default all.

    Returns
    -------
    int
        How many frames came out whole before one did not.
    """
    assert compiled is not None
    channels, height, width = out.shape[-3:] if filtered else (1, 1, 1)
    past = batch_nbytes >= PAST_CACHES_NBYTES
    shape = channels, height, width
    whole: int = compiled.decode(list(frames), checked, out, filtered, *shape, past)
    return whole
