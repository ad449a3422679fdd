"""Write the rows of one field of a shard: encode them, add up their sums, finish the object."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence

import cv2
import numpy as np

from precache.codecs.chunk import encoder
from precache.errors import SampleError
from precache.recipe.recipe import Field
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums
from precache.store.shard_writer import ShardWriter
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.shards.base_rows import BaseRows
from precache_workers.shards.shard_objects import FinishedObject

SUMMED = 50_000
"""Pixels of a channel that are summed in one call, as a call costs as much as thousands of them."""


class Sums:
    """Channel sums of one image field; exact for uint8, so that the order of rows is irrelevant."""

    def __init__(self, shape: tuple[int, ...], start: ChannelSums | None = None) -> None:
        channels, self._pixels = shape[0], math.prod(shape[1:])
        self.count = 0 if start is None else start.count
        self.total = np.zeros(channels) if start is None else np.array(start.total)
        self.squares = np.zeros(channels) if start is None else np.array(start.squares)
        self._rows_at_once = max(1, SUMMED // self._pixels)
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

    A row is staged, by `stage` or `stage_copy`, and then appended by `keep`; or it is left as a
    hole. `copy` appends several rows of the base version at once. As long as all rows are those of
    the base version nothing is read, and `finish` returns a link to its object.

    Parameters
    ----------
    ops
        Ops of the field, ready to be applied; None where all rows are copied.
    base
        Rows of the base version; the shard may have more.
    holes
        Places of the holes among them: their rows are not in the base's sums.
    reused
        Places of those that will be reused, as far as is known.

    Attributes
    ----------
    copies_runs
        Whether `copy` may append rows of the base version, as no op is left that could fail.
    """

    def __init__(
        self,
        name: str,
        field: Field,
        shape: RowShape,
        rows_per_shard: int,
        *,
        ops: FieldRecipe | None = None,
        base: BaseRows | None = None,
        holes: Collection[int] = (),
        reused: Sequence[int] = (),
    ) -> None:
        self.ops = ops
        self._name = name
        self._field = field
        self._shape = shape
        self._rows_per_shard = rows_per_shard
        self._base = base
        self._holes = holes
        summed = is_summed(field, shape)
        match = base.field.match if base else None
        self._finished = match is not None and match.finished
        known = base.field.sums if base and self._finished and shape.dtype == "uint8" else None
        self._by_difference = known is not None
        self._sums = Sums(shape.shape, known) if summed else None
        self._copies_chunks = match is not None and match.encoded
        self._cut: tuple[slice, slice] | None = None
        if ops and base and match and not self._finished and (shape.dtype == "uint8" or not summed):
            self._cut = ops.cut_of(base.row_shape, match.applied)
        self.copies_runs = self._finished or self._cut is not None
        if base and self._copies_chunks:
            base.announce(np.setdiff1d(np.arange(base.count), np.array(reused, np.int64)))
        self._is_copy = False
        self._untouched = 0 if self._copies_chunks else -1
        self._pending: list[int] = []

    @functools.cached_property
    def _writer(self) -> ShardWriter:
        chunk_rows = self._shape.chunk_rows(self._rows_per_shard)
        encode = encoder(self._field.stored_as, self._shape.dtype)
        chunk_shape = (chunk_rows, *self._shape.shape)
        chunks = self._rows_per_shard // chunk_rows
        return ShardWriter(chunk_shape, self._shape.dtype, chunks, encode)

    # --- one row --------------------------------------------------------------------------------

    def base_row(self, place: int) -> np.ndarray:
        """Decode a row of the base version; valid until the next call."""
        assert self._base is not None  # else no action asks for it
        return self._base.row(place)

    def stage(self, row: np.ndarray) -> None:
        """Stage a computed row, for `keep` to append.

        Raises
        ------
        SampleError
            It is of another shape or type than the rows of the store.
        """
        if row.shape != self._shape.shape or row.dtype != self._shape.dtype:
            raise SampleError(
                f"its {self._name} is {row.dtype.name} {row.shape}, and the rows of this "
                f"store are {self._shape.dtype} {self._shape.shape}; add a resize and a crop"
            )
        self.start_writing()
        self._write_pending()
        copy_row(row, self._writer.row)
        self._is_copy = False

    def stage_copy(self) -> None:
        """Stage the row of the base version at the same place."""
        self._is_copy = True

    def keep(self, place: int) -> None:
        """Append the row that was staged."""
        if self._is_copy:
            self._is_copy = False
            self.copy(range(place, place + 1))
            return
        if self._sums is not None:
            if self._by_difference:
                self._subtract(place)
            self._sums.add(self._writer.row)
        self._writer.advance()

    def leave_hole(self, place: int) -> None:
        """Append a row of zeros."""
        self._is_copy = False
        if self._finished and place in self._holes:
            self._copy_unsummed(range(place, place + 1))
            return
        if self._by_difference:
            self._subtract(place)
        self.start_writing()
        self._write_pending()
        self._writer.row[...] = 0
        self._writer.advance()

    def _subtract(self, place: int) -> None:
        """Subtract the row that the base version has at a place from the sums."""
        base, sums = self._base, self._sums
        had_row = base is not None and place < base.count and place not in self._holes
        if sums is not None and base is not None and had_row:
            sums.subtract(base.row(place))

    # --- rows of the base version ---------------------------------------------------------------

    def copy(self, rows: range) -> None:
        """Append rows of the base version; they are read only if the object is not linked."""
        if self._cut is not None:
            self._copy_cut(rows, self._cut)
            return
        if self._untouched != rows.start:
            self._add_sums(rows)
        self._copy_unsummed(rows)

    def _copy_unsummed(self, rows: range) -> None:
        if self._untouched == rows.start:
            self._untouched = rows.stop
        else:
            self._copy_chunks(rows)

    def start_writing(self) -> None:
        """Write the rows that were copied so far, as the object will be no link."""
        copied, self._untouched = self._untouched, -1
        if copied > 0:
            self._add_sums(range(copied))
            self._copy_chunks(range(copied))

    def _add_sums(self, rows: range) -> None:
        """Add rows of the base version to sums that do not start from its sums."""
        if self._sums is not None and not self._by_difference:
            for place in rows:
                if place not in self._holes:
                    self._sums.add(self.base_row(place))

    def _copy_chunks(self, rows: range) -> None:
        """Copy chunks of which all rows are copied as they are stored."""
        assert self._base is not None
        step = self._base.chunk_rows
        while rows:
            begun = self._writer.filled + len(self._pending)
            whole = 0 if begun else len(rows) // step
            if whole:
                self._put_chunks(rows.start, whole)
                rows = rows[whole * step :]
                continue
            self._pending += rows[: step - begun]
            rows = rows[step - begun :]
            if self._writer.filled:
                self._write_pending()
            elif len(self._pending) == step:
                self._put_chunks(self._pending[0], 1)
                self._pending.clear()

    def _copy_cut(self, rows: range, cut: tuple[slice, slice]) -> None:
        """Append what is left of rows when all remaining ops are crops."""
        assert self._base is not None
        for block in self._base.blocks(rows):
            part = block[:, :, *cut]
            self._writer.extend(part)
            if self._sums is not None:
                self._sums.extend(part)

    def _put_chunks(self, place: int, count: int) -> None:
        """Append whole chunks of the base version, encoded anew where its codec is another."""
        assert self._base is not None
        first = place // self._base.chunk_rows
        if self._copies_chunks:
            data, lengths = self._base.chunks(first, count)
            self._writer.put_chunks(data, lengths.tolist())
            return
        for number in range(first, first + count):
            self._writer.encode_chunk(self._base.decoded(number))

    def _write_pending(self) -> None:
        """Append the copied rows of a chunk that has to be encoded anew."""
        for place in self._pending:
            np.copyto(self._writer.row, self.base_row(place))
            self._writer.advance()
        self._pending.clear()

    # --- the object -----------------------------------------------------------------------------

    def finish(self) -> FinishedObject:
        """Finish the object: a link where all rows are those of the base version."""
        base = self._base
        if base is not None and self._untouched == base.count:
            return FinishedObject(self._name, (), base.field.stored, base.field)
        self.start_writing()
        if self._pending:  # the last chunk of the base version, with all of its rows
            self._put_chunks(self._pending[0], 1)
            self._pending.clear()
        parts, stored = self._writer.finish()
        return FinishedObject(self._name, parts, stored, base.field if base else None)

    def sums(self) -> ChannelSums | None:
        """Sums by channel of all rows that are no holes; None for other fields than images."""
        base = self._base
        if self._sums is None:
            return None
        if base is not None and self._untouched == base.count:
            if base.field.sums is not None:
                return base.field.sums
            self._add_sums(range(base.count))
        return self._sums.result()
