"""Write the rows of one field of a shard: computed, resumed, copied, or holes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from precache.codecs.chunk import MAX_EXPANDED, encoder, ragged_encoder, require_plausible
from precache.errors import DamageError, SampleError
from precache.recipe.recipe import Field, LossyCodec
from precache.storage.base import Buffer
from precache.store.arrays import is_summed
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums
from precache.store.shard_writer import LossyWriter, RaggedWriter, ShardWriter
from precache.units import size
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.assembly import Action, Compute, ObjectId, Take, Zeros
from precache_workers.planning.catalogue import StoredArray
from precache_workers.shards.shard_objects import DamagedObjectError, FinishedObject
from precache_workers.sources.base import Sample

if TYPE_CHECKING:
    from precache_workers.shards.stored_rows import StoredObject, StoredObjects

SUMMED = 50_000
"""Pixels of a channel that are summed in one call, as a call costs as much as thousands of them."""


class Sums:
    """Channel sums of one image field; exact for uint8, so that the order of rows is irrelevant."""

    def __init__(self, rows: RowShape) -> None:
        channels, pixels = rows.shape[0], math.prod(rows.shape[1:])
        self.count = 0
        self.total, self.squares = np.zeros(channels), np.zeros(channels)
        self._at_once = 1 if rows.ragged else max(1, SUMMED // pixels)
        self._waiting: list[np.ndarray] = []

    def add(self, row: np.ndarray) -> None:
        """Add a row, once there are enough of them."""
        if self._at_once == 1:
            self.extend(row[np.newaxis])
            return
        self._waiting.append(row.copy())
        if len(self._waiting) == self._at_once:
            self._add_waiting()

    def _add_waiting(self) -> None:
        if self._waiting:
            self.extend(np.stack(self._waiting))
            self._waiting = []

    def include(self, sums: ChannelSums) -> None:
        """Add the sums of other rows."""
        self.count += sums.count
        self.total += sums.total
        self.squares += sums.squares

    def extend(self, rows: np.ndarray, sign: int = 1) -> None:
        """Add rows; of uint8, also subtract ones that were added before, with a sign of -1."""
        self.count += sign * rows[:, 0].size
        if rows.dtype != np.uint8:
            for row in rows:
                values = row.reshape(len(row), -1).astype(np.float64)
                self.total += values.sum(axis=1)
                self.squares += np.square(values).sum(axis=1)
            return
        for first in range(0, len(rows), self._at_once):
            some = rows[first : first + self._at_once]
            for channel in range(some.shape[1]):
                plane = np.ascontiguousarray(some[:, channel]).reshape(1, -1)
                self.total[channel] += sign * cv2.sumElems(plane)[0]
                # With NORM_L2SQR, `norm` returns the sum of squares, of whole numbers exactly.
                self.squares[channel] += sign * round(cv2.norm(plane, cv2.NORM_L2SQR))

    def result(self) -> ChannelSums:
        self._add_waiting()
        return ChannelSums(self.count, self.total.tolist(), self.squares.tolist())


def fault_of(row: np.ndarray, name: str, field: Field, shape: RowShape) -> str:
    """Return why a row cannot be one of a field's, with the way out; empty if it can."""
    by_length = field.kind is not None
    if shape.admits(row, by_length=by_length) or (by_length and row.ndim and not len(row)):
        return ""
    way = "bring all to one shape and type, by a function in its ops, or in the dataset"
    if by_length:
        way = "bring all to one dtype by to_dtype in its ops, or in the dataset"
        if row.dtype.name == shape.dtype:
            way = "let only the first axis differ, by a function in its ops, or in the dataset"
    elif row.ndim and RowShape(shape.shape, shape.dtype, ragged=True).admits(row, by_length=True):
        way += '; or give the field kind = "ragged", if rows are to differ in length'
    if shape.dtype == row.dtype.name == "uint8" and row.ndim == 3:
        way = "give --resize and --crop, or resize and center_crop in its ops"
        if field.ragged_size is not None:
            way += "; or --max-size to store rows of many shapes"
    return (
        f"its {name} is {row.dtype.name} {row.shape}, and the rows of this store are "
        f"{shape.described(field.kind)}; {way}"
    )


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

    Copies are put off until another row comes: if all rows are copies, and all of one object, the
    object is a link, and nothing is read.

    Parameters
    ----------
    ops
        Ops of the field, ready to be applied; None if no row is computed or resumed.
    arrays, objects
        Where stored rows are taken from.
    """

    def __init__(
        self,
        name: str,
        field: Field,
        shape: RowShape,
        rows_per_shard: int,
        *,
        ops: FieldRecipe | None = None,
        arrays: Sequence[StoredArray] = (),
        objects: StoredObjects | None = None,
    ) -> None:
        self._name = name
        self._field = field
        self._shape = shape
        self._chunk_rows = shape.chunk_rows(rows_per_shard)
        self._chunks = rows_per_shard // self._chunk_rows
        self._ops = ops
        self._arrays, self._objects = arrays, objects
        self._sums = Sums(shape) if is_summed(field, shape) else None
        places = rows_per_shard if shape.ragged else 0
        self._row_shapes = np.zeros((places, len(shape.shape)), np.int64)
        self._staged: Take | Zeros | None = Zeros()
        self._copies: list[tuple[StoredArray, range]] = []
        self._taken: dict[ObjectId, tuple[StoredObject, np.ndarray]] = {}

    @functools.cached_property
    def _writer(self) -> ShardWriter:
        codec = self._field.stored_as
        if isinstance(codec, LossyCodec):
            return LossyWriter(self._chunks, codec)
        if self._shape.ragged:
            return RaggedWriter(self._shape.dtype, self._chunks, ragged_encoder(codec))
        encode = encoder(codec, self._shape.dtype)
        chunk_shape = (self._chunk_rows, *self._shape.shape)
        return ShardWriter(chunk_shape, self._shape.dtype, self._chunks, encode)

    # --- one row, or a run of them --------------------------------------------------------------

    def stage(
        self, action: Action, place: int, key: str = "", sample: Sample | None = None
    ) -> None:
        """Stage the row at a place, or a run of rows from it on, for `keep` to append.

        Raises
        ------
        SampleError
            The row cannot be made.
        """
        match action:
            case Compute():
                assert self._ops is not None
                assert sample is not None  # as the row is fetched
                lossy = isinstance(self._field.stored_as, LossyCodec)
                self._stage(self._ops(sample, key), self._ops.input(sample) if lossy else None)
            case Take(number, shift, None):
                assert self._ops is not None
                array = self._arrays[number]
                [(stored, [row])] = self._stored(array, range(place + shift, place + shift + 1))
                self._stage(self._ops.resume(stored.row(row), array.applied, key))
            case _:
                self._staged = action

    def staged_shape(self, place: int) -> Sequence[int] | None:
        """Shape of the row that was staged for a place; None if it is a hole, or all are alike."""
        if not self._shape.ragged or isinstance(self._staged, Zeros):
            return None
        if self._staged is None:
            return self._writer.row.shape
        row = place + self._staged.shift
        [(stored, [within])] = self._stored(self._arrays[self._staged.array], range(row, row + 1))
        assert stored.row_shapes is not None  # as the field's rows are ragged
        shape: list[int] = stored.row_shapes[within].tolist()
        return shape

    def keep(self, rows: range) -> None:
        """Append what was staged last, for the rows at these places."""
        match self._staged:
            case None:
                if self._shape.ragged:
                    self._row_shapes[rows.start] = self._writer.row.shape
                if self._sums is not None:
                    self._sums.add(self._writer.row)
                self._writer.advance()
            case Take(number, shift, part):
                array, stored = self._arrays[number], range(rows.start + shift, rows.stop + shift)
                if self._shape.ragged:
                    self._take_shapes(array, stored, rows.start)
                if array.encoded:
                    self._put_off(array, stored)
                else:
                    self._append_parts(array, stored, part or ())
            case _:
                self._copy_now()
                for _ in rows:
                    self._writer.room(self._shape.hole)[...] = 0
                    self._writer.advance()

    def _stage(self, row: np.ndarray, given: Any = None) -> None:
        """Stage a row, and what its ops were given, if that is known.

        Raises
        ------
        SampleError
            It is of another shape or type than the rows of the store.
        """
        if self._field.kind is not None and row.ndim and not len(row):
            row = np.empty((0, *self._shape.shape[1:]), self._shape.dtype)  # of whatever dtype
        elif fault := fault_of(row, self._name, self._field, self._shape):
            raise SampleError(fault)
        self._copy_now()
        if isinstance(self._writer, LossyWriter):
            self._writer.choose(row, given)
        else:
            if self._shape.ragged and row.nbytes > MAX_EXPANDED:
                self._require_plausible(row)
            copy_row(row, self._writer.room(row.shape))
        self._staged = None

    def _require_plausible(self, row: np.ndarray) -> None:
        """Raise `SampleError` if readers would take a large row for forged, as it shrinks much."""
        encoded = ragged_encoder(self._field.stored_as)(np.ascontiguousarray(row))
        try:
            require_plausible(len(encoded), row.nbytes)
        except DamageError:
            raise SampleError(
                f"its {self._name} of {size(row.nbytes)} would be stored in {size(len(encoded))}, "
                'which readers take for forged; give the field codec = "raw", and build with '
                "--retry-failed"
            ) from None

    # --- stored rows ----------------------------------------------------------------------------

    def _stored(self, array: StoredArray, rows: range) -> Iterator[tuple[StoredObject, range]]:
        """Yield the objects that have rows of a version, and their rows in these."""
        assert self._objects is not None
        while rows:
            stored = self._objects.object(array, rows.start // array.rows_per_shard)
            part = rows[: stored.first + stored.count - rows.start]
            yield stored, range(part.start - stored.first, part.stop - stored.first)
            rows = rows[len(part) :]

    def _take_shapes(self, array: StoredArray, rows: range, place: int) -> None:
        for stored, within in self._stored(array, rows):
            assert stored.row_shapes is not None  # as the field's rows are ragged
            part = stored.row_shapes[within.start : within.stop]
            self._row_shapes[place : place + len(part)] = part
            place += len(part)

    def _append_parts(self, array: StoredArray, rows: range, part: tuple[slice, ...]) -> None:
        """Append stored rows, or parts of them, encoded anew."""
        self._copy_now()
        for stored, within in self._stored(array, rows):
            counted = array.finished and stored.whole
            for block in stored.blocks(within):
                kept = block[:, *part]
                self._writer.extend(kept)
                if self._sums is not None and not counted:
                    self._sums.extend(kept)
            if counted:
                self._count(stored, within)

    def _put_off(self, array: StoredArray, rows: range) -> None:
        if self._copies:
            last, before = self._copies[-1]
            if last is array and before.stop == rows.start:
                self._copies[-1] = array, range(before.start, rows.stop)
                return
        self._copies.append((array, rows))

    def _copy_now(self, last: bool = False) -> None:
        """Append the copies that were put off; the last rows of the shard are among them."""
        copies, self._copies = self._copies, []
        for number, (array, rows) in enumerate(copies):
            ends = last and number + 1 == len(copies)
            for stored, within in self._stored(array, rows):
                self._copy(stored, within, ends and within.stop + stored.first == rows.stop)
                self._count(stored, within)

    def _copy(self, stored: StoredObject, rows: range, last: bool) -> None:
        """Append rows of an object: whole chunks as they are stored, others encoded anew."""
        step = self._chunk_rows
        while rows:
            chunks = len(rows) // step
            if last and rows.stop == stored.count:
                chunks = -(-len(rows) // step)  # both end in a chunk that is padded
            aligned = not (self._writer.filled or rows.start % step) and stored.chunk_rows == step
            if aligned and chunks:
                part = rows[: chunks * step]
                for data, lengths in stored.chunks(part.start // step, chunks):
                    self._writer.put_chunks(data, lengths)
            else:
                part = rows[: step - self._writer.filled]
                for block in stored.blocks(part):
                    self._writer.extend(block)
            rows = rows[len(part) :]

    def _count(self, stored: StoredObject, rows: range) -> None:
        """Note rows that were taken unchanged, for their sums."""
        key = stored.array.place, stored.shard
        none = np.zeros(stored.count, np.int64)
        _, taken = self._taken.setdefault(key, (stored, none))
        taken[rows.start : rows.stop] += 1

    # --- the object -----------------------------------------------------------------------------

    def finish(self, rows: int = 0) -> FinishedObject:
        """Finish the object of so many rows: a link, if a stored object has just these."""
        parts: list[Buffer] = []
        if (other := self._link()) is not None:
            self._count(other, range(other.count))
            made = other.stored
        else:
            self._copy_now(last=True)
            parts, made = self._writer.finish()
            if self._shape.ragged:
                itemsize = np.dtype(self._shape.dtype).itemsize
                made = replace(made, raw_nbytes=int(self._row_shapes.prod(1).sum()) * itemsize)
            alike = (
                stored
                for stored, _ in self._taken.values()
                if stored.array.encoded
                and (made.size, made.xxh3) == (stored.leaf.size, stored.leaf.xxh3)
            )
            other = next(alike, None)
        shapes = self._row_shapes[:rows].tolist() if self._shape.ragged else None
        return FinishedObject(parts, made, other, self._summed(), shapes)

    def _link(self) -> StoredObject | None:
        """Return the object that has all rows, and no others; None if there is none."""
        if "_writer" in self.__dict__ or len(self._copies) != 1:
            return None
        [(array, rows)] = self._copies
        shard = rows.start // array.rows_per_shard
        same_shards = array.rows_per_shard == self._chunks * self._chunk_rows
        if not same_shards or array.rows_of(shard) != rows:
            return None
        assert self._objects is not None
        return self._objects.object(array, shard)

    def _summed(self) -> ChannelSums | None:
        """Sums by channel of all rows that are no holes; None for other fields than images."""
        if self._sums is None:
            return None
        for stored, taken in self._taken.values():
            times = np.where(stored.is_hole, 0, taken)  # samples of one content share a row
            others = np.flatnonzero((times == 0) & ~stored.is_hole)
            # Rows of uint8 are summed exactly, so that sums less other rows do as well.
            exact = self._shape.dtype == "uint8" or not len(others)
            if stored.sums is not None and exact and len(others) <= np.count_nonzero(times):
                self._sums.include(stored.sums)
                for block in stored.blocks(others):
                    self._sums.extend(block, -1)
                times = np.maximum(times - 1, 0)
            for block in stored.blocks(np.repeat(np.arange(stored.count), times)):
                self._sums.extend(block)
        return self._sums.result()


# --- a row of every field ----------------------------------------------------------------------


def stage_rows(
    actions: Mapping[str, Action],
    writers: Mapping[str, FieldWriter],
    place: int,
    key: str = "",
    sample: Sample | None = None,
) -> str:
    """Stage a row of every field, or a run of rows from a place on, for `keep_rows` to append.

    Returns the reason where the row is a hole, else an empty text.
    """
    try:
        for name, action in actions.items():
            writers[name].stage(action, place, key, sample)
    except SampleError as error:
        return str(error)
    except DamagedObjectError:
        raise
    except MemoryError:
        nbytes = 0 if sample is None else sample.nbytes
        return f"decoding it, of {size(nbytes)}, takes more memory than its process gets"
    except Exception as error:  # whatever a decoder raises on a hostile file concerns that file
        return f"{type(error).__name__}: {error}"
    return ""


def keep_rows(writers: Mapping[str, FieldWriter], rows: range) -> None:
    """Append to every field what was staged last."""
    for writer in writers.values():
        writer.keep(rows)
