"""Write a field of a shard that has rows of a base version: linked, copied, cropped or resumed."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import numpy as np

from precache.recipe.recipe import Field
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.shard_actions import Action, Copy, Link, Resume
from precache_workers.shards.base_rows import BaseRows
from precache_workers.shards.copied_rows import CopiedRows
from precache_workers.shards.field_writer import FieldWriter, Sums
from precache_workers.shards.linked_object import LinkedObject
from precache_workers.shards.shard_objects import FinishedObject
from precache_workers.sources.base import Sample


class ReusingWriter(FieldWriter):
    """Writes rows of a base version among others.

    Nothing of the base version is read if all rows are linked.

    Parameters
    ----------
    base
        Rows of the base version; the shard may have more.
    holes
        Places of the holes among them: their rows are not in the base's sums.
    reused
        Places of those that will be reused, as far as is known.
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
        # Weak, as a cycle would keep the shard in memory.
        self._copied = CopiedRows(base.count, self._chunk_rows, weakref.proxy(self))
        self._part: tuple[slice, ...] = ()
        match, sums = base.field.match, base.field.sums
        # Rows of uint8 are summed exactly, so that the base's sums less other rows do as well.
        self._by_difference = match.finished and shape.dtype == "uint8" and sums is not None
        if self._sums is not None and self._by_difference:
            self._sums = Sums(shape, sums)
        if match.encoded:
            base.announce(np.setdiff1d(np.arange(base.count), np.array(reused, np.int64)))

    # --- rows -----------------------------------------------------------------------------------

    def stage(
        self, action: Action, place: int, key: str = "", sample: Sample | None = None
    ) -> None:
        match action:
            case Link():
                self._append = type(self)._append_link
            case Copy():
                self._append = type(self)._append_copy
            case Resume(applied, None):
                assert self._ops is not None
                self._stage(self._ops.resume(self._base.row(place), applied, key))
            case Resume(_, tuple() as part):
                self._part, self._append = part, type(self)._append_part
            case _:
                super().stage(action, place, key, sample)

    def _interrupt(self) -> None:
        self._copied.interrupt()

    def _append_row(self, rows: range) -> None:
        self._subtract(rows)
        super()._append_row(rows)

    def _append_zeros(self, rows: range) -> None:
        self._subtract(rows)
        super()._append_zeros(rows)

    def _append_link(self, rows: range) -> None:
        self._take_shapes(rows)
        self._copied.link(rows)

    def _take_shapes(self, rows: range) -> None:
        shapes = self._base.field.row_shapes
        if self._shape.ragged and shapes is not None:
            self._row_shapes[rows.start : rows.stop] = shapes[rows.start : rows.stop]

    def _append_copy(self, rows: range) -> None:
        self._take_shapes(rows)
        self._copied.copy(rows)

    def _append_part(self, rows: range) -> None:
        self._interrupt()
        if self._shape.ragged:
            for place in rows:
                row = self._base.row(place)
                np.copyto(self._writer.room(row.shape), row)
                super()._append_row(range(place, place + 1))
            return
        for block in self._base.blocks(rows):
            part = block[:, *self._part]
            self._writer.extend(part)
            self._add(part)

    # --- copied_rows.Copier ---------------------------------------------------------------------

    def copy_chunks(self, rows: range) -> None:
        chunks = range(rows.start // self._chunk_rows, -(-rows.stop // self._chunk_rows))
        data, lengths = self._base.chunks(chunks.start, len(chunks))
        self._writer.put_chunks(data, lengths.tolist())
        self._add_base(rows)

    def copy_rows(self, rows: range) -> None:
        for place in rows:
            np.copyto(self._writer.row, self._base.row(place))
            self._writer.advance()
        self._add_base(rows)

    # --- sums -----------------------------------------------------------------------------------

    def _add(self, rows: np.ndarray) -> None:
        """Add rows of the base version, or parts of them, unless its sums have them."""
        if self._sums is None or self._by_difference:
            return
        if rows.dtype == np.uint8:
            self._sums.extend(rows)
            return
        for row in rows:
            self._sums.add(row)

    def _add_base(self, rows: range) -> None:
        if self._sums is not None and not self._by_difference:
            for place in rows:
                if place not in self._holes:
                    self._add(self._base.row(place)[np.newaxis])

    def _subtract(self, rows: range) -> None:
        """Subtract the rows that the base version has there from sums that start from its."""
        if self._sums is None or not self._by_difference:
            return
        for place in rows:
            if place < self._base.count and place not in self._holes:
                self._sums.subtract(self._base.row(place))

    # --- the object -----------------------------------------------------------------------------

    def finish(self) -> FinishedObject:
        """Finish the object: a link where all rows were linked, or make the same bytes."""
        base = self._base.field
        self._copied.finish()
        if self._copied.linked:
            return LinkedObject((), base.stored, self._name, base)
        own = super().finish()
        if (own.stored.size, own.stored.xxh3) == (base.stored.size, base.stored.xxh3):
            return LinkedObject(own.parts, own.stored, self._name, base)
        return own

    def sums(self) -> ChannelSums | None:
        base = self._base.field
        return base.sums if self._sums is not None and self._copied.linked else super().sums()
