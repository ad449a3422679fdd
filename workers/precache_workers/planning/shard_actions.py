"""Decide how the rows of a shard come about: linked, copied, resumed or computed. Pure.

The decision is a list of runs of rows with an action for each field. Shard tasks execute it, the
dry run counts it. A task decides again where an object of the base version turns out to be missing
or damaged, and settles by `with_sample` what depends on the content of a sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from precache.recipe.recipe import Field, Recipe
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache.store.row_table import REMOVED
from precache_workers.planning.base_shard import BaseShard
from precache_workers.planning.field_match import FieldMatch


@dataclass(frozen=True)
class Link:
    """Take the row by a link to the base version's object, if all of its rows are taken so."""


@dataclass(frozen=True)
class Copy:
    """Copy the row of the base version; whole chunks are copied as they are stored."""


@dataclass(frozen=True)
class Resume:
    """Apply the ops after the first `applied` to the row of the base version, and encode it.

    Attributes
    ----------
    part
        What these ops leave of a row if they only crop it; all of it if there is none.
    """

    applied: int
    part: tuple[slice, ...] | None = None

    @property
    def is_crop(self) -> bool:
        """True if these ops only crop the row."""
        return self.part is not None


@dataclass(frozen=True)
class Compute:
    """Apply all ops to the sample, which has to be fetched."""


@dataclass(frozen=True)
class Zeros:
    """Leave a hole."""


Action = Link | Copy | Resume | Compute | Zeros
"""One way in which rows of a field come about."""


def in_runs(action: Action) -> bool:
    """Return whether several rows can be made at once, as none of them can fail."""
    return not (isinstance(action, Compute) or (isinstance(action, Resume) and not action.is_crop))


def reuse_action(field: Field, match: FieldMatch) -> Action:
    """Return the action for a row of which the base version has some ops applied."""
    return Copy() if match.encoded else Resume(match.applied, _part_left(field, match))


def _part_left(field: Field, match: FieldMatch) -> tuple[slice, ...] | None:
    """Return what a field's remaining ops leave of a row if all of them crop it."""
    if match.finished:
        return ()
    if not field.decodes or len(match.shape.shape) != 3 or match.shape.ragged:
        return None
    top, left, size = 0, 0, match.shape.shape[1:]
    for op in field.ops[match.applied :]:
        part = op.part(*size)
        if part is None:
            return None
        rows, columns = part
        top, left = top + rows.start, left + columns.start
        size = rows.stop - rows.start, columns.stop - columns.start
    return slice(None), slice(top, top + size[0]), slice(left, left + size[1])


@dataclass(frozen=True)
class RowActions:
    """The actions that make a row, one for each field.

    Attributes
    ----------
    hole
        Reason, where the row is known to be a hole.
    reuses
        Whether a field is made of the base version's row, or its hole stays.
    fetches
        Whether the sample is fetched, as a field is computed of it.
    """

    fields: Mapping[str, Action]
    hole: str = ""
    reuses: bool = False
    fetches: bool = False

    @property
    def in_runs(self) -> bool:
        """True if the rows of a run can be made at once."""
        return not (self.fetches or self.hole) and all(map(in_runs, self.fields.values()))


@dataclass(frozen=True)
class ShardActions:
    """The actions that make each row of a shard.

    Attributes
    ----------
    runs
        Runs of rows by their places, and the actions of each of these rows.
    fetched
        Places of rows whose samples are fetched.
    reused
        Places of rows of which some field is made of the base version.
    content
        XXH3-128 (hex) of the sample that the base has for each row; empty where it is unknown.
    linked
        Whether all objects are links: nothing is read, decoded or encoded.
    finished
        Whether the base has all fields with all ops applied, so that its holes stay holes.
    reuse, compute
        Actions of a row whose sample is that of the base, and of any other row.
    stay
        Field -> action of a hole that the base has, too.
    """

    runs: tuple[tuple[range, RowActions], ...]
    fetched: Sequence[int]
    reused: Sequence[int]
    base: BaseShard
    content: Sequence[str]
    linked: bool
    finished: bool
    reuse: RowActions
    compute: RowActions
    stay: Mapping[str, Action]

    def hole(self, place: int, reason: str, reuses: bool = False) -> RowActions:
        """Return the actions of a row that is a hole."""
        fields = self.stay if place in self.base.holes else dict.fromkeys(self.stay, Zeros())
        return RowActions(fields, reason, reuses)

    def with_sample(self, place: int, content: str, hole: str = "") -> RowActions:
        """Settle how a row is made whose sample was fetched, by the sample's content.

        Parameters
        ----------
        hole
            Reason, where the sample must not be decoded, or could not be fetched.
        """
        unchanged = content != "" and content == self.content[place]
        base_hole = self.base.holes.get(place, "") if unchanged else ""
        if hole or (base_hole and self.finished):
            return self.hole(place, hole or base_hole, unchanged)
        return self.reuse if unchanged and not base_hole else self.compute


def decide_actions(
    recipe: Recipe,
    shapes: Mapping[str, RowShape],
    rows: int,
    base: BaseShard | None,
    removed: Collection[int] = (),
    barred: Mapping[int, str] = MappingProxyType({}),
) -> ShardActions:
    """Decide how each row of a shard comes about.

    Parameters
    ----------
    rows
        Rows of the shard.
    base
        What the base version has of it, of objects that are there.
    removed
        Places of rows whose samples the source has no more.
    barred
        Place -> reason, of rows whose samples must not be decoded.
    """
    computed: dict[str, Action] = dict.fromkeys(recipe.fields, Compute())
    if base is None or not base.fields:
        base = BaseShard.empty()
    complete = base.fields.keys() == recipe.fields.keys()
    finished = complete and all(field.match.finished for field in base.fields.values())
    linkable = _linkable(recipe, shapes, rows, base, removed)
    stay: dict[str, Action] = dict.fromkeys(recipe.fields, Zeros())
    reused = dict(computed)
    for name, field in base.fields.items():
        action = Link() if name in linkable else reuse_action(recipe.fields[name], field.match)
        reused[name] = action
        if field.match.encoded:
            stay[name] = action
    unknown = [place for place, content in enumerate(base.content) if not content]
    linked = (
        linkable == recipe.fields.keys()
        and all(base.same)
        and all(place in removed for place in unknown)
        and not barred
    )
    actions = ShardActions(
        runs=(),
        fetched=(),
        reused=(),
        base=base,
        content=["" if p in removed else c for p, c in enumerate(_padded(base.content, rows))],
        linked=linked,
        finished=finished,
        reuse=RowActions(reused, reuses=True, fetches=not complete),
        compute=RowActions(computed, fetches=True),
        stay=stay,
    )
    ways = [actions.compute] * rows
    for place, (same, content) in enumerate(zip(base.same, base.content, strict=True)):
        base_hole = base.holes.get(place, "")
        if same and content and (finished or not base_hole):
            reason = (complete and barred.get(place)) or base_hole
            ways[place] = actions.hole(place, reason, reuses=True) if reason else actions.reuse
    for place in removed:
        ways[place] = actions.hole(place, REMOVED)
    return replace(
        actions,
        runs=tuple(_runs(ways)),
        fetched=[place for place, way in enumerate(ways) if way.fetches],
        reused=[place for place, way in enumerate(ways) if way.reuses and not way.hole],
    )


def _linkable(
    recipe: Recipe,
    shapes: Mapping[str, RowShape],
    rows: int,
    base: BaseShard,
    removed: Collection[int],
) -> set[str]:
    """Return the fields whose objects can be links, unless a sample turns out to be another."""
    if len(base.same) < rows or any(place not in base.holes for place in removed):
        return set()
    return {
        name
        for name, field in base.fields.items()
        if field.match.encoded and (field.sums or not is_summed(recipe.fields[name], shapes[name]))
    }


def _padded(content: Sequence[str], rows: int) -> list[str]:
    return [*content, *[""] * (rows - len(content))]


def _runs(ways: Sequence[RowActions]) -> Iterator[tuple[range, RowActions]]:
    """Join consecutive rows that come about in the same way."""
    start = 0
    for place, way in enumerate(ways):
        if place + 1 == len(ways) or ways[place + 1] is not way:
            yield range(start, place + 1), way
            start = place + 1
