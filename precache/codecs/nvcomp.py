"""Decompress batches of zstd frames on a CUDA device with nvCOMP, if it is installed.

Source: nvCOMP 6, nvcomp/zstd.h, the batched low-level interface. Its Python interface makes an
object for every frame, which costs more than copying the frame.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
from typing import Any

import torch

from precache.errors import PrecacheError

PACKAGE = "nvidia.libnvcomp"
LIBRARY = "lib64/libnvcomp.so.6"


class _Options(ctypes.Structure):
    """nvcompBatchedZstdDecompressOpts_t: all zeros let nvCOMP choose the backend."""

    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_char * 60))


@functools.cache
def _library() -> Any:
    """Load the library and declare its two functions; None if it is not installed."""
    try:
        path = importlib.resources.files(PACKAGE).joinpath(LIBRARY)
        library = ctypes.CDLL(str(path))
    except (ModuleNotFoundError, OSError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.nvcompBatchedZstdDecompressGetTempSize.argtypes = (
        size, size, _Options, ctypes.POINTER(size), size, pointer,
    )  # fmt: skip
    library.nvcompBatchedZstdDecompressAsync.argtypes = (
        pointer, pointer, pointer, pointer, size, pointer, size, pointer, _Options, pointer,
        pointer,
    )  # fmt: skip
    return library


def available() -> bool:
    """Return whether nvCOMP is installed and loads."""
    return _library() is not None


def temporary_nbytes(frames: int, row_nbytes: int, stream: int = 0) -> int:
    """Bytes of temporary device memory that decompressing `frames` frames at once needs."""
    nbytes = ctypes.c_size_t()
    status = _library().nvcompBatchedZstdDecompressGetTempSize(
        frames, row_nbytes, _Options(), ctypes.byref(nbytes), frames * row_nbytes, stream
    )
    _require_success(status)
    return nbytes.value


def decompress(
    memory: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, row_nbytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompress frames on the current stream of their device, without waiting for the result.

    Parameters
    ----------
    memory
        uint8, on a CUDA device: the memory that holds the frames.
    offsets, lengths
        (n,) int64 on the same device: the place of each frame in `memory`.
    row_nbytes
        Bytes that each frame decompresses to.

    Returns
    -------
    tuple of torch.Tensor
        (n, row_nbytes) uint8, and (n,) bool: the frames that failed to decompress. nvCOMP does not
        check the frames' content checksums, so damage may go undetected.
    """
    count, device = len(lengths), memory.device
    stream = torch.cuda.current_stream(device).cuda_stream
    rows = torch.empty((count, row_nbytes), dtype=torch.uint8, device=device)
    sources = offsets + memory.data_ptr()
    targets = torch.arange(count, device=device) * row_nbytes + rows.data_ptr()
    expected = torch.full((count,), row_nbytes, dtype=torch.int64, device=device)
    actual = torch.zeros_like(expected)
    statuses = torch.zeros(count, dtype=torch.int32, device=device)
    size = temporary_nbytes(count, row_nbytes, stream)
    temporary = torch.empty(size, dtype=torch.uint8, device=device)
    status = _library().nvcompBatchedZstdDecompressAsync(
        sources.data_ptr(), lengths.data_ptr(), expected.data_ptr(), actual.data_ptr(), count,
        temporary.data_ptr(), size, targets.data_ptr(), _Options(), statuses.data_ptr(), stream,
    )  # fmt: skip
    _require_success(status)
    return rows, (statuses != 0) | (actual != expected)


def _require_success(status: int) -> None:
    if status:
        raise PrecacheError(f"nvCOMP refused to decompress (status {status}); leave decompress out")
