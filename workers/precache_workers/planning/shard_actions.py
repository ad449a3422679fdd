"""Decide how the rows of a shard come about: linked, copied, resumed or computed. Pure.

The decision is a list of runs of rows with an action for each field. Shard tasks execute it, and
the dry run prints it. A task decides again where an object of the base version turns out to be
missing or damaged, and settles by `with_sample` what depends on the content of a fetched sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from precache.recipe.recipe import Recipe
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache.store.row_table import REMOVED
from precache_workers.planning.base_shard import BaseShard
from precache_workers.planning.field_match import FieldMatch

if TYPE_CHECKING:  # loads the decoders
    from precache_workers.shards.field_writer import FieldWriter
    from precache_workers.sources.base import Sample


class Action(Protocol):
    """One way in which the rows of a field come about."""

    def make_row(self, writer: FieldWriter, place: int, key: str, sample: Sample | None) -> None:
        """Stage a row; the writer's `keep` appends it once all fields of the row are staged.

        Raises
        ------
        SampleError
            The row cannot be made.
        """


@dataclass(frozen=True)
class Copy:
    """Take a row of the base version as it is; whole chunks are copied without decoding."""

    def make_row(self, writer: FieldWriter, place: int, key: str, sample: Sample | None) -> None:
        writer.stage_copy()


@dataclass(frozen=True)
class Link(Copy):
    """Take all rows of the base version as they are, by a link to the object."""


@dataclass(frozen=True)
class Resume:
    """Apply the ops after the first `applied` to a row of the base version."""

    applied: int

    def make_row(self, writer: FieldWriter, place: int, key: str, sample: Sample | None) -> None:
        writer.stage(writer.ops.resume(writer.base_row(place), self.applied, key))


@dataclass(frozen=True)
class Compute:
    """Apply all ops to the sample, which has to be fetched."""

    def make_row(self, writer: FieldWriter, place: int, key: str, sample: Sample | None) -> None:
        assert sample is not None  # its run is fetched
        writer.stage(writer.ops(sample, key))


def reuse_action(match: FieldMatch) -> Action:
    """Return the action for a row of which the base version has these ops applied."""
    return Copy() if match.finished else Resume(match.applied)


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows that come about in the same way.

    Attributes
    ----------
    rows
        Places in the shard.
    actions
        Field -> action; empty for holes.
    hole
        Reason, where the rows are known to be holes.
    """

    rows: range
    actions: Mapping[str, Action]
    hole: str = ""

    @property
    def fetches(self) -> bool:
        """Return whether the samples are fetched, as a field is computed of them."""
        return any(isinstance(action, Compute) for action in self.actions.values())

    @property
    def reuses(self) -> bool:
        """Return whether a field reuses rows of the base version."""
        return any(not isinstance(action, Compute) for action in self.actions.values())

    @property
    def from_base(self) -> bool:
        """Return whether the rows are those of the base version, or holes as they were there."""
        return self.reuses or self.hole != ""


@dataclass(frozen=True)
class ShardActions:
    """The actions that make each row of a shard.

    Attributes
    ----------
    base
        The base shard, with the fields that it can give; None where nothing is reused.
    linked
        Whether all objects are links: nothing is read, decoded or encoded.
    finished
        Whether the base has all fields with all ops applied, so that its holes stay holes.
    reuse, compute
        Field -> action, of a row whose sample is that of the base, and of any other row.
    """

    runs: tuple[RowRun, ...]
    base: BaseShard | None
    linked: bool
    finished: bool
    reuse: Mapping[str, Action]
    compute: Mapping[str, Action]

    @property
    def fetched(self) -> list[int]:
        """Places of rows whose samples are fetched."""
        return [place for run in self.runs if run.fetches for place in run.rows]

    @property
    def reused(self) -> list[int]:
        """Places of rows of which some field is made of the base version."""
        return [place for run in self.runs if run.reuses for place in run.rows]

    def is_unchanged(self, place: int, content: str) -> bool:
        """Return whether a sample of this content is the one that the base's row was made of."""
        base = self.base
        if base is None or not content or content != base.content_at(place):
            return False
        return base.same[place] or base.content_decides

    def with_sample(self, place: int, content: str) -> RowRun:
        """Settle how a row is made whose sample was fetched, by the sample's content."""
        row = range(place, place + 1)
        if self.base is None or not self.is_unchanged(place, content):
            return RowRun(row, self.compute)
        if place not in self.base.holes:
            return RowRun(row, self.reuse)
        if self.finished:
            return RowRun(row, {}, self.base.holes[place])
        return RowRun(row, self.compute)


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
    compute: dict[str, Action] = dict.fromkeys(recipe.fields, Compute())
    ways: list[Mapping[str, Action] | str] = [compute] * rows
    if base is None or not base.fields:
        for place in removed:
            ways[place] = REMOVED
        return ShardActions(tuple(_runs(ways)), None, False, False, compute, compute)
    complete = base.fields.keys() == recipe.fields.keys()
    finished = complete and all(field.match.finished for field in base.fields.values())
    linkable = {
        name
        for name, field in base.fields.items()
        if field.match.encoded and (field.sums or not is_summed(recipe.fields[name], shapes[name]))
    }
    all_same = len(base.same) == rows and all(base.same)
    unknown = [place for place, content in enumerate(base.content) if not content]
    linked = (
        all_same
        and all(place in removed for place in unknown)
        and linkable == recipe.fields.keys()
        and not barred
    )
    holes_stay = all(place in base.holes for place in unknown) and not (base.holes and base.retries)
    all_stay = linked or (all_same and holes_stay)
    reuse = dict(compute)
    for name, field in base.fields.items():
        reuse[name] = Link() if all_stay and name in linkable else reuse_action(field.match)
    for place, (same, content) in enumerate(zip(base.same, base.content, strict=True)):
        hole = base.holes.get(place, "")
        if same and content and (finished or not hole):
            ways[place] = (complete and barred.get(place)) or hole or reuse
    for place in removed:
        ways[place] = REMOVED
    return ShardActions(tuple(_runs(ways)), base, linked, finished, reuse, compute)


def _runs(ways: list[Mapping[str, Action] | str]) -> Iterator[RowRun]:
    """Join rows that come about in the same way; a text is the reason of a hole."""
    start = 0
    for place, way in enumerate(ways):
        if place + 1 == len(ways) or ways[place + 1] is not way:
            run = range(start, place + 1)
            yield RowRun(run, {}, way) if isinstance(way, str) else RowRun(run, way)
            start = place + 1
