"""Write the rows of one field of a shard: encode them, add up their sums, finish the object."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np

from precache.codecs.chunk import encoder, ragged_encoder
from precache.errors import SampleError
from precache.recipe.recipe import Field
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums
from precache.store.shard_writer import RaggedWriter, ShardWriter
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.shard_actions import Action, Compute
from precache_workers.shards.shard_objects import FinishedObject
from precache_workers.sources.base import Sample

SUMMED = 50_000
"""Pixels of a channel that are summed in one call, as a call costs as much as thousands of them."""


class Sums:
    """Channel sums of one image field; exact for uint8, so that the order of rows is irrelevant."""

    def __init__(self, rows: RowShape, start: ChannelSums | None = None) -> None:
        shape = rows.shape
        channels, self._pixels = shape[0], math.prod(shape[1:])
        self.count = 0 if start is None else start.count
        self.total = np.zeros(channels) if start is None else np.array(start.total)
        self.squares = np.zeros(channels) if start is None else np.array(start.squares)
        self._rows_at_once = 1 if rows.ragged else max(1, SUMMED // self._pixels)
        self._waiting = np.empty((channels, self._rows_at_once, *shape[1:]), np.uint8)
        self._waiting_rows = 0

    def add(self, row: np.ndarray) -> None:
        """Add a row."""
        if row.dtype != np.uint8:
            self._add_wide(row)
            return
        if self._rows_at_once == 1:
            self._add(row, 1)
            return
        self._waiting[:, self._waiting_rows] = row
        self._waiting_rows += 1
        if self._waiting_rows == self._rows_at_once:
            self._add_waiting()

    def subtract(self, row: np.ndarray) -> None:
        """Subtract a row of uint8 that was added before."""
        self._add(row, -1)

    def extend(self, rows: np.ndarray) -> None:
        """Add rows of uint8."""
        if self._rows_at_once == 1:
            for row in rows:
                self._add(row, 1)
            return
        for first in range(0, len(rows), self._rows_at_once):
            self._add_waiting()
            some = rows[first : first + self._rows_at_once]
            self._waiting[:, : len(some)] = some.swapaxes(0, 1)
            self._waiting_rows = len(some)

    def _add_waiting(self) -> None:
        if self._waiting_rows:
            self._add(self._waiting[:, : self._waiting_rows], 1)
            self._waiting_rows = 0

    def _add(self, channels: np.ndarray, sign: int) -> None:
        """Add pixels of uint8, a plane for each channel."""
        self.count += sign * channels[0].size
        for number, values in enumerate(channels):
            plane = values if values.ndim == 2 else values.reshape(1, -1)
            self.total[number] += sign * cv2.sumElems(plane)[0]
            # With NORM_L2SQR, `norm` returns the sum of squares, of whole numbers exactly.
            self.squares[number] += sign * round(cv2.norm(plane, cv2.NORM_L2SQR))

    def _add_wide(self, row: np.ndarray) -> None:
        values = row.reshape(len(row), -1).astype(np.float64)
        self.count += self._pixels
        self.total += values.sum(axis=1)
        self.squares += np.square(values).sum(axis=1)

    def result(self) -> ChannelSums:
        self._add_waiting()
        return ChannelSums(self.count, self.total.tolist(), self.squares.tolist())


def copy_row(row: np.ndarray, out: np.ndarray) -> None:
    """Copy a row to where it is encoded from."""
    pixels = row.dtype == np.uint8 and row.ndim == 3 and (len(row), *row.strides[::2]) == (3, 1, 3)
    # OpenCV splits the channels of pixels seven times as fast, but not into unaligned lines.
    if pixels and out.shape[2] % 32 == 0 and out.ctypes.data % 32 == 0:
        cv2.split(row.transpose(1, 2, 0), list(out))
    else:
        np.copyto(out, row)


class FieldWriter:
    """Writes the rows of one field of one shard, in order.

    Parameters
    ----------
    ops
        Ops of the field, ready to be applied; None if no row is computed or resumed.
    """

    def __init__(
        self,
        name: str,
        field: Field,
        shape: RowShape,
        rows_per_shard: int,
        *,
        ops: FieldRecipe | None = None,
    ) -> None:
        self._name = name
        self._field = field
        self._shape = shape
        self._chunk_rows = shape.chunk_rows(rows_per_shard)
        self._chunks = rows_per_shard // self._chunk_rows
        self._ops = ops
        self._sums = Sums(shape) if is_summed(field, shape) else None
        places = rows_per_shard if shape.ragged else 0
        self._row_shapes = np.zeros((places, len(shape.shape)), np.int64)
        # Not bound: in a cycle, the shard would stay in memory until the collector finds it.
        self._append: Callable[[Any, range], None] = type(self)._append_zeros

    @functools.cached_property
    def _writer(self) -> ShardWriter:
        if self._shape.ragged:
            encode = ragged_encoder(self._field.stored_as)
            return RaggedWriter(self._shape.dtype, self._chunks, encode)
        encode = encoder(self._field.stored_as, self._shape.dtype)
        chunk_shape = (self._chunk_rows, *self._shape.shape)
        return ShardWriter(chunk_shape, self._shape.dtype, self._chunks, encode)

    # --- one row --------------------------------------------------------------------------------

    def stage(
        self, action: Action, place: int, key: str = "", sample: Sample | None = None
    ) -> None:
        """Stage the row at a place, or a run of rows from it on, for `keep` to append.

        Raises
        ------
        SampleError
            The row cannot be made.
        """
        if isinstance(action, Compute):
            assert self._ops is not None
            assert sample is not None  # as the row is fetched
            self._stage(self._ops(sample, key))
        else:
            self._append = type(self)._append_zeros

    def keep(self, rows: range) -> None:
        """Append what was staged last, for these rows."""
        self._append(self, rows)

    def _stage(self, row: np.ndarray) -> None:
        """Stage a row.

        Raises
        ------
        SampleError
            It is of another shape or type than the rows of the store.
        """
        if not self._shape.admits(row):
            way = "bring all to one shape and type, by a function in its ops, or in the dataset"
            if self._shape.dtype == row.dtype.name == "uint8" and row.ndim == 3:
                way = (
                    "give --resize and --crop, or resize and center_crop in its ops; or --max-size "
                    "to store rows of many shapes"
                )
            raise SampleError(
                f"its {self._name} is {row.dtype.name} {row.shape}, and the rows of this "
                f"store are {self._shape}; {way}"
            )
        self._interrupt()
        copy_row(row, self._writer.room(row.shape))
        self._append = type(self)._append_row

    def _interrupt(self) -> None:
        """Write what has to come before a row that is encoded."""

    def _append_row(self, rows: range) -> None:
        if self._shape.ragged:
            self._row_shapes[rows.start] = self._writer.row.shape
        if self._sums is not None:
            self._sums.add(self._writer.row)
        self._writer.advance()

    def _append_zeros(self, rows: range) -> None:
        self._interrupt()
        for _ in rows:
            self._writer.room(self._shape.hole)[...] = 0
            self._writer.advance()

    # --- the object -----------------------------------------------------------------------------

    def finish(self) -> FinishedObject:
        """Finish the object."""
        parts, stored = self._writer.finish()
        if self._shape.ragged:
            itemsize = np.dtype(self._shape.dtype).itemsize
            stored = replace(stored, raw_nbytes=int(self._row_shapes.prod(1).sum()) * itemsize)
        return FinishedObject(parts, stored)

    def row_shapes(self, rows: int) -> list[list[int]] | None:
        """Shapes of the first rows, if they are ragged."""
        shapes: list[list[int]] = self._row_shapes[:rows].tolist()
        return shapes if self._shape.ragged else None

    def sums(self) -> ChannelSums | None:
        """Sums by channel of all rows that are no holes; None for other fields than images."""
        return None if self._sums is None else self._sums.result()
