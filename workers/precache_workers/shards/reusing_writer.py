"""Write a field of a shard that has rows of a base version: linked, copied, cropped or resumed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from precache.recipe.recipe import Field
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.shards.base_rows import BaseRows
from precache_workers.shards.field_writer import FieldWriter, Sums
from precache_workers.shards.linked_object import LinkedObject
from precache_workers.shards.shard_objects import FinishedObject


class ReusingWriter(FieldWriter):
    """Writes rows of a base version among computed ones.

    A row of the base is staged by `stage_copy`; `copy` appends several of them at once. As long as
    all rows are those of the base version nothing is read, and `finish` returns a link to its
    object.

    Parameters
    ----------
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
        base: BaseRows,
        ops: FieldRecipe | None = None,
        holes: Collection[int] = (),
        reused: Sequence[int] = (),
    ) -> None:
        super().__init__(name, field, shape, rows_per_shard, ops=ops)
        self._base = base
        self._holes = holes
        match = base.field.match
        self._finished, self._copies_chunks = match.finished, match.encoded
        self._by_difference = False
        self._cut: tuple[slice, slice] | None = None
        if self._sums is not None and match.finished and shape.dtype == "uint8":
            self._by_difference = base.field.sums is not None
            self._sums = Sums(shape.shape, base.field.sums)
        if ops and not match.finished and (shape.dtype == "uint8" or self._sums is None):
            self._cut = ops.cut_of(base.row_shape, match.applied)
        self.copies_runs = match.finished or self._cut is not None
        if self._copies_chunks:
            base.announce(np.setdiff1d(np.arange(base.count), np.array(reused, np.int64)))
        self._is_copy = False
        self._untouched = 0 if self._copies_chunks else -1
        self._pending: list[int] = []

    # --- one row --------------------------------------------------------------------------------

    def base_row(self, place: int) -> np.ndarray:
        """Decode a row of the base version; valid until the next call."""
        return self._base.row(place)

    def stage(self, row: np.ndarray) -> None:
        super().stage(row)
        self._is_copy = False

    def _begin_row(self) -> None:
        self.start_writing()
        self._write_pending()

    def stage_copy(self) -> None:
        """Stage the row of the base version at the same place."""
        self._is_copy = True

    def keep(self, place: int) -> None:
        if self._is_copy:
            self._is_copy = False
            self.copy(range(place, place + 1))
            return
        self._subtract(place)
        super().keep(place)

    def leave_hole(self, place: int) -> None:
        self._is_copy = False
        if self._finished and place in self._holes:
            self._copy_unsummed(range(place, place + 1))
            return
        self._subtract(place)
        super().leave_hole(place)

    def _subtract(self, place: int) -> None:
        """Subtract the row that the base version has at a place from sums that start from its."""
        if self._sums is None or not self._by_difference:
            return
        if place < self._base.count and place not in self._holes:
            self._sums.subtract(self._base.row(place))

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
                    self._sums.add(self._base.row(place))

    def _copy_chunks(self, rows: range) -> None:
        """Copy chunks of which all rows are copied as they are stored."""
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
        for block in self._base.blocks(rows):
            part = block[:, :, *cut]
            self._writer.extend(part)
            if self._sums is not None:
                self._sums.extend(part)

    def _put_chunks(self, place: int, count: int) -> None:
        """Append whole chunks of the base version, encoded anew where its codec is another."""
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
            np.copyto(self._writer.row, self._base.row(place))
            self._writer.advance()
        self._pending.clear()

    # --- the object -----------------------------------------------------------------------------

    @property
    def _is_link(self) -> bool:
        """True if all rows are those of the base version."""
        return self._untouched == self._base.count

    def finish(self) -> FinishedObject:
        """Finish the object: a link where all rows are those of the base version."""
        base = self._base.field
        if self._is_link:
            return LinkedObject((), base.stored, self._name, base)
        self.start_writing()
        if self._pending:  # the last chunk of the base version, with all of its rows
            self._put_chunks(self._pending[0], 1)
            self._pending.clear()
        own = super().finish()
        if (own.stored.size, own.stored.xxh3) == (base.stored.size, base.stored.xxh3):
            return LinkedObject(own.parts, own.stored, self._name, base)
        return own

    def sums(self) -> ChannelSums | None:
        if self._is_link and self._sums is not None:
            if self._base.field.sums is not None:
                return self._base.field.sums
            self._add_sums(range(self._base.count))
        return super().sums()
