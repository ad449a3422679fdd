"""Copy, check and decode the rows of a batch: compiled (`_rows.c`), or NumPy where that is missing.

Batches larger than the CPU caches are written past them: their memory then need not be read before
it is overwritten, which halves the time to copy it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from precache.errors import UsageError
from precache.runtime.operating_system import library_places

log = logging.getLogger(__name__)

COMPILING = (
    "with a C compiler and Python's headers at hand, install precache again "
    "(pip install --force-reinstall --no-deps --no-cache-dir)"
)

NO_COMPILED_CODE = (
    "precache's compiled code is missing, without which reading takes up to twice the CPU time: "
    f"{COMPILING}"
)

NO_LIBZSTD = (
    "precache's compiled code finds no libzstd, without which decoding takes up to twice the CPU "
    "time: install zstd's library (apt install libzstd1, dnf install libzstd, brew install zstd, "
    "conda install zstd)"
)

UNCHECKED, OWN = -1, -2
"""In place of a checksum: none is checked; the one that is stored behind the bytes is checked."""

PAST_CACHES_NBYTES = 8 << 20
"""Batches of this many bytes are written past the caches; smaller ones may be found in them."""


@dataclass(frozen=True)
class Compiled:
    """The compiled functions, and which of them work on this machine.

    Attributes
    ----------
    functions
        The extension module; None if it is not compiled.
    has_zstd
        `decode_frames` works: libzstd is installed.
    """

    functions: ModuleType | None = None
    has_zstd: bool = False


@functools.cache
def compiled() -> Compiled:
    """Import the compiled functions and load libzstd for them, once per process."""
    try:
        functions = importlib.import_module("precache.codecs._rows")
    except ImportError:
        return Compiled()
    has_zstd = any(map(functions.load_zstd, library_places("zstd", 1)))
    return Compiled(functions, has_zstd)


def required(what: str) -> ModuleType:
    """Return the compiled functions; raise `UsageError` if there are none, with what needs them."""
    functions = compiled().functions
    if functions is None:
        raise UsageError(f"{what} need precache's compiled code, which is missing: {COMPILING}")
    return functions


@functools.cache
def has_turbojpeg() -> bool:
    """Load libjpeg-turbo 3 or later for the compiled functions; return whether it is there."""
    functions = compiled().functions
    return functions is not None and any(
        map(functions.load_turbojpeg, library_places("turbojpeg", 0))
    )


@functools.cache
def warn_if_slow() -> None:
    """Log once that a slower fallback is used: nothing is compiled, or libzstd is missing."""
    if compiled().functions is None:
        log.warning(NO_COMPILED_CODE)
    elif not compiled().has_zstd:
        log.warning(NO_LIBZSTD)


def copy_pieces(
    sources: list[memoryview],
    numbers: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    out: np.ndarray,
    batch_nbytes: int,
    checks: np.ndarray | None = None,
) -> int:
    """Copy pieces of sources, one after another.

    Parameters
    ----------
    sources
        Buffers that the pieces are copied from.
    numbers, starts, lengths
        (n,) int64: the source of each piece, and its offset and length there in bytes.
    out
        Contiguous, as long as all pieces together.
    batch_nbytes
        Size of the batch that `out` is part of.
    checks
        (n,) int64: CRC32C of each piece, which is compared while it is copied, `UNCHECKED` or
        `OWN`; needs compiled functions.

    Returns
    -------
    int
        Number of pieces copied before the first whose CRC32C does not match.

    Raises
    ------
    ValueError
        A piece lies outside its source, or the pieces do not fill `out`.
    """
    functions = compiled().functions
    if functions is not None:
        past = batch_nbytes >= PAST_CACHES_NBYTES
        copied: int = functions.gather(sources, numbers, starts, lengths, checks, out, past)
        return copied
    assert checks is None
    arrays = {n: np.frombuffer(sources[n], np.uint8) for n in np.unique(numbers).tolist()}
    places = zip(numbers.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
    pieces = [arrays[number][start:end] for number, start, end in places]
    if pieces:
        np.concatenate(pieces, out=out.reshape(-1).view(np.uint8))
    return len(pieces)


def crc32c(data: bytes | memoryview) -> int:
    """Compute the CRC32C of bytes.

    The compiled function releases the interpreter lock, which page faults would hold.
    """
    functions = compiled().functions
    if functions is not None:
        return int(functions.crc32c(data))
    import google_crc32c  # of free-threaded Pythons, it would turn the interpreter lock on

    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def join(sources: list[memoryview], out: np.ndarray) -> None:
    """Copy whole sources, one after another, into contiguous memory of the same size."""
    lengths = np.array([len(source) for source in sources], np.int64)
    numbers = np.arange(len(sources), dtype=np.int64)
    copy_pieces(sources, numbers, np.zeros_like(numbers), lengths, out, out.nbytes)


def take(values: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Take rows as ``np.take(values, rows, axis=0, out=out)``; large batches past the caches.

    Parameters
    ----------
    values
        (rows, ...) contiguous.
    rows
        (n,) int64 row numbers.
    out
        (n, ...) contiguous, of the same dtype.
    """
    if compiled().functions is None or out.nbytes < PAST_CACHES_NBYTES:
        values.take(rows, 0, out, "clip")
        return
    nbytes = out.nbytes // len(rows)
    source = values.reshape(-1).view(np.uint8).data
    starts = rows.astype(np.int64) * nbytes
    copy_pieces(
        [source], np.zeros_like(starts), starts, np.full_like(starts, nbytes), out, out.nbytes
    )


def decode_frames(
    frames: Sequence[memoryview],
    out: np.ndarray,
    *,
    filtered: bool,
    batch_nbytes: int,
    checks: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
) -> int:
    """Decompress zstd frames; needs `Compiled.has_zstd`.

    Parameters
    ----------
    out
        Contiguous (n, ...); each frame fills one row.
    filtered
        Rows are (..., C, H, W) uint8, and the filter of `image` is undone.
    batch_nbytes
        Size of the batch that `out` is part of.
    checks
        (n,) int64: last four bytes of each frame, `UNCHECKED` or `OWN`, which is the default. A
        libzstd that is too old to skip a checksum checks it.
    sizes
        (n,) int64: bytes of each frame's contents, which fill `out` one after another.

    Returns
    -------
    int
        Number of frames decoded before the first damaged one.
    """
    functions = compiled().functions
    assert functions is not None
    channels, height, width = out.shape[-3:] if filtered else (1, 1, 1)
    past = batch_nbytes >= PAST_CACHES_NBYTES
    shape = channels, height, width
    decoded: int = functions.decode(list(frames), checks, out, filtered, *shape, past, sizes)
    return decoded
