"""Where the rows of one field go: computed, or taken over from an earlier version, and summed."""

from __future__ import annotations

import math

import cv2
import numpy as np

from precache.errors import SampleError
from precache.storage.base import Buffer
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums, ShardObject
from precache.store.shard_writer import ShardWriter
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.base_shard import BaseShardRows
from precache_workers.sources.base import Sample

SUMMED = 50_000
"""Pixels of a channel, or a row's, that are summed at a time: a call costs as much as some."""


class Sums:
    """Channel sums of one image field; exact for uint8, so that their order does not matter."""

    def __init__(self, shape: tuple[int, ...], start: ChannelSums | None = None) -> None:
        channels, self._pixels = shape[0], math.prod(shape[1:])
        self.count = 0 if start is None else start.count
        self.total = np.zeros(channels) if start is None else np.array(start.total)
        self.squares = np.zeros(channels) if start is None else np.array(start.squares)
        self._together = max(1, SUMMED // self._pixels)
        self._waiting = np.empty((channels, self._together, *shape[1:]), np.uint8)
        self._count = 0

    def add(self, row: np.ndarray) -> None:
        """Add a row."""
        if row.dtype != np.uint8:
            self._add_wide(row)
            return
        if self._together == 1:
            self._add(row, 1)
            return
        self._waiting[:, self._count] = row
        self._count += 1
        if self._count == self._together:
            self._add_waiting()

    def subtract(self, row: np.ndarray) -> None:
        """Take a row of uint8 away that was added."""
        self._add(row, -1)

    def extend(self, rows: np.ndarray) -> None:
        """Add rows of uint8."""
        if self._together == 1:
            for row in rows:
                self._add(row, 1)
            return
        for first in range(0, len(rows), self._together):
            self._add_waiting()
            some = rows[first : first + self._together]
            self._waiting[:, : len(some)] = some.swapaxes(0, 1)
            self._count = len(some)

    def _add_waiting(self) -> None:
        if self._count:
            self._add(self._waiting[:, : self._count], 1)
            self._count = 0

    def _add(self, channels: np.ndarray, sign: int) -> None:
        """Add pixels of uint8, a plane for each channel."""
        self.count += sign * channels[0].size
        for number, values in enumerate(channels):
            plane = values if values.ndim == 2 else values.reshape(1, -1)
            self.total[number] += sign * cv2.sumElems(plane)[0]
            # It sums whole numbers, and gives the square of a root.
            self.squares[number] += sign * round(cv2.norm(plane, cv2.NORM_L2SQR))

    def _add_wide(self, row: np.ndarray) -> None:
        values = row.reshape(len(row), -1).astype(np.float64)
        self.count += self._pixels
        self.total += values.sum(axis=1)
        self.squares += np.square(values).sum(axis=1)

    def result(self) -> ChannelSums:
        self._add_waiting()
        return ChannelSums(self.count, self.total.tolist(), self.squares.tolist())


def _lay(row: np.ndarray, place: np.ndarray) -> None:
    """Copy a row into its place."""
    apart = row.dtype == np.uint8 and row.ndim == 3 and (len(row), *row.strides[::2]) == (3, 1, 3)
    # OpenCV parts the channels of pixels seven times as fast, but not into lines at odd addresses.
    if apart and place.shape[2] % 32 == 0 and place.ctypes.data % 32 == 0:
        cv2.split(row.transpose(1, 2, 0), list(place))
    else:
        np.copyto(place, row)


class FieldOutput:
    """The rows of one field of one shard, in order.

    Parameters
    ----------
    summed
        Whether channel sums are kept.
    old
        Rows of an earlier version, for as many as it has.
    counted
        Which of its rows are in the old sums: those that are no holes.
    """

    def __init__(
        self,
        recipe: FieldRecipe,
        shape: RowShape,
        writer: ShardWriter,
        summed: bool,
        old: BaseShardRows | None,
        counted: np.ndarray,
    ) -> None:
        self.recipe = recipe
        self.writer = writer
        self.old = old
        self._shape = shape
        self._counted = counted
        known = old.offered if old and old.offered.made.finished else None
        start = known.sums if known and shape.dtype == "uint8" else None
        self._by_difference = start is not None
        self._sums = Sums(shape.shape, start) if summed else None
        self._finished = known is not None
        self._copies = known is not None and known.made.encoded
        self._cut = self._cut_of_old(shape.dtype == "uint8" or not summed)
        self._taken = False
        self._untouched = 0 if self._copies else -1
        self._waiting: list[int] = []

    def _cut_of_old(self, exact: bool) -> tuple[slice, slice] | None:
        """What is left of the earlier version's rows, if the ops that these lack are crops."""
        if self.old is None or self._finished or not exact:
            return None
        return self.recipe.cut_of(self.old.row_shape, self.old.offered.made.applied)

    @property
    def carries(self) -> bool:
        """Whether rows whose samples are what they were go over in runs, unseen one by one."""
        if self._cut is not None:
            return True
        return self._finished and (self._sums is None or self._by_difference)

    def expect(self, plain: np.ndarray) -> None:
        """Tell which of the earlier version's rows will be carried, (rows,) bool."""
        if self.old is not None and self._copies and self.carries:
            self.old.expect(np.flatnonzero(~plain[: self.old.count]))

    @property
    def unchanged(self) -> bool:
        """Whether what is taken over is in the sums already."""
        return self._by_difference

    def compute(self, sample: Sample, key: str) -> None:
        """Compute a row from its sample into the writer's next place."""
        self._place(self.recipe(sample, key))

    def take(self, row: int, key: str) -> None:
        """Have a row of the earlier version, and apply the ops that it lacks."""
        assert self.old is not None
        if self._finished:
            self._taken = True
        else:
            self._place(self.recipe.resume(self.old.row(row), self.old.offered.made.applied, key))

    def _place(self, row: np.ndarray) -> None:
        if row.shape != self._shape.shape or row.dtype != self._shape.dtype:
            raise SampleError(
                f"its {self.recipe.name} is {row.dtype.name} {row.shape}, and the rows of this "
                f"store are {self._shape.dtype} {self._shape.shape}; add a resize and a crop"
            )
        self.touch()
        self._decode_waiting()
        _lay(row, self.writer.row)
        self._taken = False

    def keep(self, row: int, same: bool) -> None:
        """Go on to the next row with what `compute` or `take` left there.

        Parameters
        ----------
        row
            Its place in the shard.
        same
            Whether it is what the earlier version has there.
        """
        if self._sums is not None:
            if not self._by_difference:
                self._sums.add(self._current(row))
            elif not same:
                self._forget(row)
                self._sums.add(self.writer.row)
        if self._taken:
            self.carry(range(row, row + 1))
        else:
            self.writer.advance()
        self._taken = False

    def leave_hole(self, row: int) -> None:
        """A row of zeros."""
        if self._sums is not None and self._by_difference:
            self._forget(row)
        self._taken = False
        if self._finished and row < len(self._counted) and not self._counted[row]:
            self.carry(range(row, row + 1))
            return
        self.touch()
        self._decode_waiting()
        self.writer.row[...] = 0
        self.writer.advance()

    def finish(self) -> tuple[list[Buffer], ShardObject]:
        """The object's bytes in parts, none where it is the earlier version's unread; and what
        the receipt says of it.
        """
        if self.old is not None and self._untouched == self.old.count:
            return [], self.old.offered.stored
        self.touch()
        if self._waiting:  # the earlier version's last chunk, and all of its rows
            self._put_chunks(self._waiting[0], 1)
            self._waiting.clear()
        return self.writer.finish()

    def carry(self, rows: range) -> None:
        """The next rows, where the earlier version has them; read only if not all of it stays."""
        if self._cut is not None:
            self._carry_cut(rows, self._cut)
        elif self._untouched == rows.start:
            self._untouched = rows.stop
        else:
            self._carry(rows)

    def touch(self) -> None:
        """Begin to write, with what was carried so far."""
        carried, self._untouched = self._untouched, -1
        if carried > 0:
            self._carry(range(carried))

    def _carry(self, rows: range) -> None:
        """Chunks of which all rows are carried go over whole."""
        assert self.old is not None
        step = self.old.chunk_rows
        while rows:
            begun = self.writer.filled + len(self._waiting)
            whole = 0 if begun else len(rows) // step
            if whole:
                self._put_chunks(rows.start, whole)
                rows = rows[whole * step :]
                continue
            self._waiting += rows[: step - begun]
            rows = rows[step - begun :]
            if self.writer.filled:
                self._decode_waiting()
            elif len(self._waiting) == step:
                self._put_chunks(self._waiting[0], 1)
                self._waiting.clear()

    def _carry_cut(self, rows: range, cut: tuple[slice, slice]) -> None:
        assert self.old is not None
        for block in self.old.blocks(rows):
            part = block[:, :, *cut]
            self.writer.extend(part)
            if self._sums is not None:
                self._sums.extend(part)

    def _put_chunks(self, row: int, count: int) -> None:
        """Chunks of the earlier version from a row's on, in the codec of the field."""
        assert self.old is not None
        first = row // self.old.chunk_rows
        if self._copies:
            data, lengths = self.old.chunks(first, count)
            self.writer.put_chunks(data, lengths.tolist())
            return
        for number in range(first, first + count):
            self.writer.encode_chunk(self.old.decoded(number))

    def _decode_waiting(self) -> None:
        """Rows of a chunk that is to be encoded anew."""
        for row in self._waiting:
            assert self.old is not None
            np.copyto(self.writer.row, self.old.row(row))
            self.writer.advance()
        self._waiting.clear()

    def sums(self) -> ChannelSums | None:
        return None if self._sums is None else self._sums.result()

    def _current(self, row: int) -> np.ndarray:
        if self._taken:
            assert self.old is not None
            return self.old.row(row)
        return self.writer.row

    def _forget(self, row: int) -> None:
        """Take what the earlier version had there out of the sums."""
        counted = row < len(self._counted) and self._counted[row]
        if counted and self._sums is not None and self.old is not None:
            self._sums.subtract(self.old.row(row))
