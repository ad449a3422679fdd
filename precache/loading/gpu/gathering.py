"""Which bytes of a range of memory a batch's rows are, and one gather of them, on any device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from precache.store.layout import align

ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What a device gathers at a time, by bytes: of larger elements it reads faster."""


@dataclass(frozen=True)
class Places:
    """Where the rows of an array lie in a range of memory.

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
        """The largest element, in bytes, of which rows and their places are multiples."""
        return math.gcd(8, self.row_nbytes, self.pitch, *self.starts.tolist())

    def of(self, rows: np.ndarray) -> np.ndarray:
        """(n,) int64: where each row begins, in units."""
        numbers, inside = np.divmod(rows, self.shard_rows)
        chunks, within = np.divmod(inside, self.chunk_rows)
        places: np.ndarray = self.starts[numbers] + chunks * self.pitch + within * self.row_nbytes
        return places // self.unit


def gather(memory: torch.Tensor, places: torch.Tensor, row_nbytes: int, unit: int) -> torch.Tensor:
    """(n, row_nbytes) uint8 rows that begin at `places`, counted in units, of uint8 `memory`.

    One operation on any device: rows at all places are a view whose rows overlap.
    """
    elements = memory.view(ELEMENTS[unit])
    width = row_nbytes // unit
    every = elements.as_strided((len(elements) - width + 1, width), (1, 1))
    return every.index_select(0, places).view(torch.uint8)


@dataclass(frozen=True)
class Frames:
    """Where the frames of an array's rows lie in a range of memory.

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
    """Frames of up to `longest` bytes that begin at `starts` (n,) of `memory`, as much of it for
    each.

    Returns
    -------
    tuple of torch.Tensor
        Memory (uint8) that holds the frames, and (n,) int64: where each begins there.
    """
    unit = max(ELEMENTS)
    width = align(longest + unit - 1, unit)
    places = (starts // unit).clamp(max=(len(memory) - width) // unit)
    rows = gather(memory, places, width, unit)
    number = torch.arange(len(starts), device=starts.device)
    return rows.view(-1), starts - places * unit + number * width


Placed = Places | Frames
