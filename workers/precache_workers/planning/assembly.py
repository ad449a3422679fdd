"""Assemble a shard: how each of its rows comes about, as runs. Pure.

Each field of a row is taken from a stored row, computed of the sample, or left as a hole. Shard
tasks execute the runs, plans count them. A task assembles again where a stored object turns out
to be missing or damaged, and settles by `Assembly.with_sample` what depends on a sample's content.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from precache.errors import Hole
from precache.recipe.recipe import Field, Recipe
from precache.store.row_table import REMOVED
from precache_workers.planning.catalogue import StoredArray, StoredRows, has_row

Parts = Mapping[str, str]
"""Part of a sample -> its content."""

ObjectId = tuple[tuple[str, str], int]
"""Version and name of an array, and number of its shard."""


@dataclass(frozen=True)
class Take:
    """Take rows that are stored; whole chunks are copied as they are, if they have all ops.

    Attributes
    ----------
    array, shift
        Number of the array, and the row in its version of a place in the shard, less that place.
    part
        What the ops that are left keep of a row, if they only crop it; None if they are applied.
    """

    array: int
    shift: int
    part: tuple[slice, ...] | None = ()


@dataclass(frozen=True)
class Compute:
    """Apply all ops to the sample, which has to be fetched."""


@dataclass(frozen=True)
class Zeros:
    """Leave a hole."""


Action = Take | Compute | Zeros
"""One way in which rows of a field come about."""


def part_left(field: Field, array: StoredArray) -> tuple[slice, ...] | None:
    """Return what a field's remaining ops leave of a stored row if all of them crop it."""
    if array.finished:
        return ()
    if not field.decodes or len(array.shape.shape) != 3 or array.shape.ragged:
        return None
    top, left, size = 0, 0, array.shape.shape[1:]
    for op in field.ops[array.applied :]:
        part = op.part(*size)
        if part is None:
            return None
        rows, columns = part
        top, left = top + rows.start, left + columns.start
        size = rows.stop - rows.start, columns.stop - columns.start
    return slice(None), slice(top, top + size[0]), slice(left, left + size[1])


@dataclass(frozen=True)
class Run:
    """Consecutive rows that come about in the same way.

    Attributes
    ----------
    places
        Their places in the shard.
    hole
        Kind and reason, where they are known to be holes.
    reuses
        Whether a field is taken from a stored row, or a hole stays.
    fetches
        Whether samples are fetched, as a field is computed, or the content is not known.
    """

    places: range
    fields: Mapping[str, Action]
    hole: Hole | None = None
    reuses: bool = False
    fetches: bool = False

    @property
    def at_once(self) -> bool:
        """True if the rows can be made at once, as stored ones are taken, and none can fail."""
        return not (self.fetches or self.hole) and all(
            isinstance(action, Take) and action.part is not None for action in self.fields.values()
        )


@dataclass(frozen=True)
class Assembly:
    """Rows of a shard, each as a link, a copy, a computation or a hole.

    Attributes
    ----------
    recipe
        Has a field for each stored array.
    rows
        What is stored of them.
    runs
        All rows, in order.
    """

    recipe: Recipe
    rows: StoredRows
    runs: tuple[Run, ...]

    @property
    def fetched(self) -> list[int]:
        """Places of rows whose samples are fetched."""
        return [place for run in self.runs if run.fetches for place in run.places]

    @property
    def links(self) -> dict[str, tuple[StoredArray, int]]:
        """Field -> array and shard of an object that has all of its rows, and no others."""
        whole = {}
        for name, held in self.rows.fields.items():
            array, first = held[0, :2].tolist()
            if array < 0 or not self.rows.arrays[array].encoded:
                continue
            stored, count = self.rows.arrays[array], len(held)
            shard = first // stored.rows_per_shard
            if (
                stored.rows_of(shard) == range(first, first + count)
                and (held[:, 0] == array).all()
                and (held[:, 1] == np.arange(first, first + count)).all()
            ):
                whole[name] = stored, shard
        return whole

    @property
    def linked(self) -> bool:
        """True if all objects are links, which nothing reads."""
        return self.links.keys() == self.rows.fields.keys() and not any(
            run.fetches or any(not isinstance(a, Take) for a in run.fields.values())
            for run in self.runs
        )

    def with_sample(
        self, place: int, content: str, hole: Hole | None = None, parts: Parts | None = None
    ) -> Run:
        """Settle how a row is made whose sample was fetched, by the sample's content.

        Parameters
        ----------
        hole
            Kind and reason, where the sample must not be decoded, or could not be fetched.
        parts
            Part of the sample -> its content; None if they are as the content is.
        """
        places = range(place, place + 1)
        guesses = (self.rows, *self.rows.others)
        same = next((rows for rows in guesses if content and content == rows.contents[place]), None)
        stored_hole = same.holes.get(place) if same else None
        if hole or stored_hole:
            return Run(places, self.hole_at(place), hole or stored_hole, reuses=same is not None)
        actions: dict[str, Action] = dict.fromkeys(self.rows.fields, Compute())
        for rows, name in itertools.product(reversed(guesses), actions):
            if parts is None or not rows.parts:
                alike = rows is same
            else:
                stored = rows.parts_of_rows[place]
                alike = all(parts[start] == stored[start] for start in rows.starts[name])
            array, row, is_hole = rows.fields[name][place].tolist()
            if alike and array >= 0 and not is_hole:
                part = part_left(self.recipe.fields[name], rows.arrays[array])
                actions[name] = Take(array, row - place, part)
        computes = [isinstance(action, Compute) for action in actions.values()]
        return Run(places, actions, reuses=not all(computes), fetches=any(computes))

    def hole_at(self, place: int) -> dict[str, Action]:
        """Return the actions of a row that is a hole: zeros, stored ones if there are such."""
        actions: dict[str, Action] = {}
        for name, held in self.rows.fields.items():
            array, row, is_hole = held[place].tolist()
            stored = array >= 0 and is_hole and self.rows.arrays[array].encoded
            actions[name] = Take(array, row - place) if stored else Zeros()
        return actions


def assemble(
    recipe: Recipe,
    rows: StoredRows,
    barred: Mapping[int, Hole] = MappingProxyType({}),
) -> Assembly:
    """Decide how each row of a shard comes about.

    Parameters
    ----------
    barred
        Place -> hole, of rows whose samples must not be decoded.
    """
    bare = Assembly(recipe, rows, ())
    holes = {place: hole for place, hole in rows.holes.items() if rows.known[place]}
    complete = np.logical_and.reduce([has_row(held) for held in rows.fields.values()])
    holes |= {p: hole for p, hole in barred.items() if rows.known[p] and complete[p]}
    return Assembly(recipe, rows, tuple(_runs(bare, holes)))


def _runs(assembly: Assembly, holes: Mapping[int, Hole]) -> Iterator[Run]:
    rows = assembly.rows
    count = len(rows.known)
    columns = [rows.known]
    for held in rows.fields.values():
        shifts = np.where(held[:, 0] < 0, 0, held[:, 1] - np.arange(count))
        columns += [held[:, 0], shifts, held[:, 2]]
    table = np.stack(columns, axis=1)
    starts = {0, *(np.flatnonzero((table[1:] != table[:-1]).any(1)) + 1).tolist()}
    starts |= {place + 1 for place in holes} | holes.keys()
    bounds = [*sorted(start for start in starts if start < count), count]
    for start, stop in itertools.pairwise(bounds):
        places = range(start, stop)
        if hole := holes.get(start):
            yield Run(places, assembly.hole_at(start), hole, reuses=hole != REMOVED)
        elif rows.known[start]:
            yield replace(assembly.with_sample(start, rows.contents[start]), places=places)
        else:
            yield Run(places, dict.fromkeys(assembly.recipe.fields, Compute()), fetches=True)


# --- counting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldRows:
    """Rows of one field, by how they come about; holes that stay count in whole shards alone.

    Attributes
    ----------
    linked
        Rows of objects that are linked unread.
    copied
        Rows that are copied as they are stored; those of a chunk that gets other rows, too, are
        decoded and encoded again.
    resumed
        Stored rows that get their remaining ops, or another codec.
    computed
        Rows that are computed of samples.
    """

    linked: int = 0
    copied: int = 0
    resumed: int = 0
    computed: int = 0

    @property
    def reused(self) -> int:
        """Rows that are copied or resumed."""
        return self.copied + self.resumed

    @classmethod
    def total(cls, parts: Iterable[FieldRows]) -> FieldRows:
        """Add up the rows of several shards."""
        shards = list(parts)
        names = cls.__dataclass_fields__
        return cls(**{name: sum(getattr(rows, name) for rows in shards) for name in names})


def count_rows(name: str, assembly: Assembly) -> FieldRows:
    """Count the rows of a field by how they come about.

    A sample of the same content that failed before is expected to fail again.
    """
    rows, held = assembly.rows, assembly.rows.fields[name]
    counts: Counter[str] = Counter()
    for run in assembly.runs:
        action = run.fields[name]
        if isinstance(action, Compute):
            part = slice(run.places.start, run.places.stop)
            again = int((rows.known[part] & (held[part, 2] == 1)).sum())
            counts["computed"] += len(run.places) - again
            counts["holes"] += again
        elif run.hole:
            counts["holes"] += isinstance(action, Take)
        elif isinstance(action, Take):
            encoded = rows.arrays[action.array].encoded
            counts["copied" if encoded else "resumed"] += len(run.places)
    if name in assembly.links and counts["copied"] + counts["holes"] == len(held):
        return FieldRows(linked=len(held))
    return FieldRows(0, counts["copied"], counts["resumed"], counts["computed"])


def taken_rows(rows: StoredRows) -> dict[ObjectId, tuple[StoredArray, np.ndarray]]:
    """Return the objects that rows may be taken of: the array of each, and its rows, sorted, by
    their numbers in the object; holes are left out."""
    taken: dict[ObjectId, tuple[StoredArray, np.ndarray]] = {}
    every = [held for some in (rows, *rows.others) for held in some.fields.values()]
    for held in every:
        for number in np.unique(held[has_row(held), 0]).tolist():
            array = rows.arrays[number]
            own = held[has_row(held) & (held[:, 0] == number), 1]
            shards = own // array.rows_per_shard
            for shard in np.unique(shards).tolist():
                within = own[shards == shard] - shard * array.rows_per_shard
                _, before = taken.get((array.place, shard), (array, within[:0]))
                taken[array.place, shard] = array, np.union1d(before, within)
    return taken
