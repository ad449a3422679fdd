"""Offsets of rows in a range of memory, and a gather of rows at offsets, on any device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from precache.store.layout import align

ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes -> dtype of the elements that are gathered: a device reads larger ones faster."""


@dataclass(frozen=True)
class RowOffsets:
    """Offsets of the rows of an array in a range of memory.

    Attributes
    ----------
    starts
        (shards,) int64: first byte of each shard's rows.
    shard_rows, chunk_rows
        Rows of a shard, and of a chunk in it.
    row_nbytes, pitch
        Bytes of a row, and from one chunk to the next.
    """

    starts: np.ndarray
    shard_rows: int
    chunk_rows: int
    row_nbytes: int
    pitch: int

    @functools.cached_property
    def unit(self) -> int:
        """The largest element, in bytes, that divides rows and their offsets."""
        return math.gcd(8, self.row_nbytes, self.pitch, *self.starts.tolist())

    def of(self, rows: np.ndarray) -> np.ndarray:
        """(n,) int64 offsets of rows, in units."""
        shards, inside = np.divmod(rows, self.shard_rows)
        chunks, within = np.divmod(inside, self.chunk_rows)
        offsets: np.ndarray = self.starts[shards] + chunks * self.pitch + within * self.row_nbytes
        return offsets // self.unit


def gather(memory: torch.Tensor, offsets: torch.Tensor, row_nbytes: int, unit: int) -> torch.Tensor:
    """Gather the rows that begin at `offsets`, in units, of uint8 `memory`.

    One operation on any device: all possible rows are a view of `memory` whose rows overlap.

    Returns
    -------
    torch.Tensor
        (n, row_nbytes) uint8.
    """
    elements = memory.view(ELEMENTS[unit])
    width = row_nbytes // unit
    rows = elements.as_strided((len(elements) - width + 1, width), (1, 1))
    return rows.index_select(0, offsets).view(torch.uint8)


@dataclass(frozen=True)
class FrameOffsets:
    """Offsets of the frames of an array's rows in a range of memory.

    Attributes
    ----------
    starts, lengths
        (rows,) int64, in bytes.
    """

    starts: np.ndarray
    lengths: np.ndarray


def gather_frames(
    memory: torch.Tensor, starts: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather frames of up to `longest` bytes that begin at `starts` (n,) of `memory`.

    Returns
    -------
    tuple of torch.Tensor
        Memory (uint8) that holds the frames, and (n,) int64: offset of each frame in it.
    """
    unit = max(ELEMENTS)
    width = align(longest + unit - 1, unit)
    offsets = (starts // unit).clamp(max=(len(memory) - width) // unit)
    rows = gather(memory, offsets, width, unit)
    number = torch.arange(len(starts), device=starts.device)
    return rows.view(-1), starts - offsets * unit + number * width


Offsets = RowOffsets | FrameOffsets
