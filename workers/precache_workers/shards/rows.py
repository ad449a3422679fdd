"""The rows of one shard, all fields of them: computed, taken over, or left as holes."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from precache.codecs.chunk import encoder
from precache.errors import DamageError, SampleError, StorageError, StoreError
from precache.recipe.recipe import Recipe
from precache.storage.base import Buffer, Folder
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache.store.row_table import REMOVED
from precache.store.shard_writer import ShardWriter
from precache.units import size as in_units
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.planning.base_shard import BaseShardRows, SpoiledBaseShard
from precache_workers.planning.reusable_rows import ReusableRows
from precache_workers.planning.reuse import BaseShard
from precache_workers.planning.target_version import SCRATCH
from precache_workers.shards.outputs import FieldOutput
from precache_workers.sources.base import Sample


class ShardRows:
    """Rows are made in order, each by `make` and then `keep`; `objects` has what comes of it.

    Parameters
    ----------
    recipes, shapes
        By field.
    rows
        Of this shard.
    removed
        Places of rows whose samples are no more.
    offer
        What an earlier version has of the shard.
    first_row
        Number of its first row.
    barred
        Places of rows that must not be carried.

    Attributes
    ----------
    content
        XXH3-128 (hex) of each raw sample so far.
    taken
        Rows so far of which all fields were taken over, holes among them.
    """

    def __init__(
        self,
        recipe: Recipe,
        recipes: Mapping[str, FieldRecipe],
        shapes: Mapping[str, RowShape],
        rows_per_shard: int,
        rows: int,
        removed: frozenset[int],
        offer: BaseShard | None,
        first_row: int,
        barred: Collection[int] = (),
    ) -> None:
        self.content: list[str] = []
        self.taken = 0
        self._made: tuple[int, str, Mapping[str, bool]] = 0, "", {}
        self._offer = offer
        self._removed = removed
        old = open_offered(offer)
        self._spared = spared = ReusableRows(recipe, rows, removed, offer, old, first_row)
        counted = np.ones(spared.count, np.bool_)
        counted[list(spared.holes)] = False
        self.outputs = {
            name: field_output(
                recipe, field_recipe, shapes[name], rows_per_shard, old.get(name), counted
            )
            for name, field_recipe in recipes.items()
        }
        spared.plain[list(barred)] = False
        for each in self.outputs.values():
            each.expect(spared.plain)
        carries = spared.complete and all(each.carries for each in self.outputs.values())
        self._halts = [*np.flatnonzero(~spared.plain).tolist(), rows] if carries else range(rows)

    def carry(self, place: int) -> int:
        """Keep the rows from a place on as they are, as far as that is all there is to do.

        Returns
        -------
        int
            How many.
        """
        stop = self._halts[bisect.bisect_left(self._halts, place)]
        if stop > place:
            for each in self.outputs.values():
                each.carry(range(place, stop))
            self.content += self._spared.content[place:stop]
            self.taken += stop - place
        return stop - place

    def needs_sample(self, place: int) -> bool:
        """Whether a row cannot be made of what the earlier version has."""
        return bool(self._spared.needs_sample[place])

    def make(self, place: int, key: str, sample: Sample | None, barred: str = "") -> str:
        """Make a row of every field; the reason where it is a hole, else empty.

        Parameters
        ----------
        sample
            Where `needs_sample` asked for it; one without inputs was not to be had, and `barred`
            says why.
        """
        spared, before = self._spared, self._spared.content[place]
        content = before if sample is None else sample.content
        alike = bool(before) and (
            bool(spared.same[place]) if sample is None else self._is_alike(place, content)
        )
        taken = dict.fromkeys(self.outputs, False)
        if place in self._removed:
            content, reason = "", REMOVED
        elif barred:
            reason = barred
        elif alike and place in spared.holes and spared.finished:
            reason = spared.holes[place]
        else:
            alike = alike and place not in spared.holes
            taken = {name: alike and each.old is not None for name, each in self.outputs.items()}
            reason = self._row(place, key, sample, taken)
        self.content.append(content)
        self.taken += all(taken.values()) or (alike and bool(reason))
        self._made = place, reason, taken
        return reason

    def keep(self) -> None:
        """Encode what `make` made."""
        place, reason, taken = self._made
        for name, each in self.outputs.items():
            if reason:
                each.leave_hole(place)
            else:
                each.keep(place, taken[name] and each.unchanged)

    def _is_alike(self, place: int, content: str) -> bool:
        assert self._offer is not None
        same = bool(self._spared.same[place]) or self._offer.content_decides
        return same and content == self._spared.content[place]

    def _row(self, place: int, key: str, sample: Sample | None, taken: Mapping[str, bool]) -> str:
        try:
            for name, each in self.outputs.items():
                if taken[name]:
                    each.take(place, key)
                elif sample is not None:
                    each.compute(sample, key)
        except SampleError as error:
            return str(error)
        except SpoiledBaseShard:
            raise
        except MemoryError:
            nbytes = 0 if sample is None else sample.nbytes
            return f"decoding it, of {in_units(nbytes)}, takes more memory than its process gets"
        except Exception as error:  # whatever a decoder raises on a hostile file concerns that file
            return f"{type(error).__name__}: {error}"
        return ""

    def objects(self) -> dict[str, Object]:
        """The finished object of every field."""
        return {name: Object(each, self._offer) for name, each in self.outputs.items()}


class Object:
    """A finished object, its bytes and what a receipt says of it."""

    def __init__(self, output: FieldOutput, offer: BaseShard | None) -> None:
        self._parts, self.made = output.finish()
        self._field, self._offer, self._old = output.recipe.name, offer, output.old

    @property
    def is_old(self) -> bool:
        """Whether it is the earlier version's, byte for byte."""
        old = self._old
        return old is not None and (self.made.size, self.made.xxh3) == (
            old.offered.stored.size,
            old.offered.stored.xxh3,
        )

    def create(self, folder: Folder, name: str) -> bool:
        """Create it, as a link where it is the earlier version's; False where one exists.

        Raises
        ------
        SpoiledBaseShard
            The earlier version's object is gone, and was not read before.
        """
        if self.is_old and self._offer is not None and self._old is not None:
            try:
                old = self._old.offered
                origin = old.base or self._offer.folder
                return folder.copy(name, origin, old.object_name, scratch=SCRATCH, create=True)
            except StorageError as error:
                if not self._parts:
                    raise SpoiledBaseShard(self._field, error) from None
        return folder.create(name, self._parts, scratch=SCRATCH)

    def put(self, folder: Folder, name: str) -> None:
        """Put it in place of one that is damaged."""
        folder.put(name, self.parts(), scratch=SCRATCH)

    def parts(self) -> Sequence[Buffer]:
        """Its bytes, one buffer after another.

        Raises
        ------
        SpoiledBaseShard
            It is the earlier version's, and that is gone.
        """
        if self._parts:
            return self._parts
        assert self._offer is not None  # else it would have parts
        assert self._old is not None
        old = self._old.offered
        try:
            return [(old.base or self._offer.folder).read(old.object_name)]
        except StorageError as error:
            raise SpoiledBaseShard(self._field, error) from None


def open_offered(offer: BaseShard | None, check: bool = False) -> dict[str, BaseShardRows]:
    """Fields of an offer whose objects are there, as large as they were.

    Parameters
    ----------
    check
        Read them at once; by default when they are needed.
    """
    found: dict[str, BaseShardRows] = {}
    bases: dict[tuple[str, str], BaseShardRows] = {}
    for name, each in offer.fields.items() if offer else ():
        with contextlib.suppress(DamageError, StorageError, StoreError):
            assert offer is not None
            # Variants that go on from one base have each of its rows read and decoded once.
            rows = bases.get(offer.place_of(each)) or BaseShardRows(offer, name)
            if check:
                rows.open()
            if not each.made.encoded:
                bases[offer.place_of(each)] = rows
            found[name] = rows
    return found


def field_output(
    recipe: Recipe,
    field_recipe: FieldRecipe,
    shape: RowShape,
    rows_per_shard: int,
    old: BaseShardRows | None,
    counted: np.ndarray,
) -> FieldOutput:
    """Where the rows of a field of a shard go; `FieldOutput` explains `old` and `counted`."""
    field = recipe.fields[field_recipe.name]
    chunk_rows = shape.chunk_rows(rows_per_shard)
    encode = encoder(field.stored_as, shape.dtype)
    chunks = rows_per_shard // chunk_rows
    writer = ShardWriter((chunk_rows, *shape.shape), shape.dtype, chunks, encode)
    return FieldOutput(field_recipe, shape, writer, is_summed(field, shape), old, counted)
