"""Decide how the rows of a shard come about: linked, copied, resumed or computed. Pure.

The decision is a list of runs of rows with an action for each field. Shard tasks execute it, and
the dry run prints it. A task decides again where an object of the base version turns out to be
missing or damaged, and settles by `with_sample` what depends on the content of a fetched sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from precache.recipe.recipe import Recipe
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache.store.row_table import REMOVED
from precache_workers.planning.base_shard import BaseShard
from precache_workers.planning.field_match import FieldMatch

if TYPE_CHECKING:  # loads the decoders
    from precache_workers.shards.field_writer import FieldWriter
    from precache_workers.shards.reusing_writer import ReusingWriter
    from precache_workers.sources.base import Sample


class Action(Protocol):
    """One way in which the rows of a field come about."""

    def make_row(self, writer: Any, place: int, key: str, sample: Sample | None) -> None:
        """Stage a row; the writer's `keep` appends it once all fields of the row are staged.

        Rows of a base version need a `ReusingWriter`, which a field has of which the base has rows.

        Raises
        ------
        SampleError
            The row cannot be made.
        """


@dataclass(frozen=True)
class Copy:
    """Take a row of the base version as it is; whole chunks are copied without decoding."""

    def make_row(self, writer: ReusingWriter, place: int, key: str, sample: Sample | None) -> None:
        writer.stage_copy()


@dataclass(frozen=True)
class Link(Copy):
    """Take all rows of the base version as they are, by a link to the object."""


@dataclass(frozen=True)
class Resume:
    """Apply the ops after the first `applied` to a row of the base version."""

    applied: int

    def make_row(self, writer: ReusingWriter, place: int, key: str, sample: Sample | None) -> None:
        assert writer.ops is not None  # else all rows are copied
        writer.stage(writer.ops.resume(writer.base_row(place), self.applied, key))


@dataclass(frozen=True)
class Compute:
    """Apply all ops to the sample, which has to be fetched."""

    def make_row(self, writer: FieldWriter, place: int, key: str, sample: Sample | None) -> None:
        assert sample is not None  # as the row is fetched
        assert writer.ops is not None
        writer.stage(writer.ops(sample, key))


def reuse_action(match: FieldMatch) -> Action:
    """Return the action for a row of which the base version has these ops applied."""
    return Copy() if match.finished else Resume(match.applied)


@dataclass(frozen=True)
class RowActions:
    """The actions that make a row, or the reason why it is a hole.

    Attributes
    ----------
    fields
        Field -> action; empty for a hole.
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

    def with_sample(self, place: int, content: str, hole: str = "") -> RowActions:
        """Settle how a row is made whose sample was fetched, by the sample's content.

        Parameters
        ----------
        hole
            Reason, where the sample must not be decoded, or could not be fetched.
        """
        base, unchanged = self.base, content != "" and content == self.content[place]
        unchanged = unchanged and (base.same[place] or base.content_decides)
        base_hole = base.holes.get(place, "") if unchanged else ""
        if hole or (base_hole and self.finished):
            return RowActions({}, hole or base_hole, unchanged)
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
    compute = RowActions(computed, fetches=True)
    if base is None or not base.fields:
        base = BaseShard.empty()
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
    reused = dict(computed)
    for name, field in base.fields.items():
        reused[name] = Link() if all_stay and name in linkable else reuse_action(field.match)
    reuse = RowActions(reused, reuses=True, fetches=not complete)
    ways = [compute] * rows
    for place, (same, content) in enumerate(zip(base.same, base.content, strict=True)):
        base_hole = base.holes.get(place, "")
        if same and content and (finished or not base_hole):
            reason = (complete and barred.get(place)) or base_hole
            ways[place] = RowActions({}, reason, reuses=True) if reason else reuse
    contents = [*base.content, *[""] * (rows - len(base.content))]
    for place in removed:
        ways[place], contents[place] = RowActions({}, REMOVED), ""
    return ShardActions(
        runs=tuple(_runs(ways)),
        fetched=[place for place, way in enumerate(ways) if way.fetches],
        reused=[place for place, way in enumerate(ways) if way.reuses and not way.hole],
        base=base,
        content=contents,
        linked=linked,
        finished=finished,
        reuse=reuse,
        compute=compute,
    )


def _runs(ways: Sequence[RowActions]) -> Iterator[tuple[range, RowActions]]:
    """Join consecutive rows that come about in the same way."""
    start = 0
    for place, way in enumerate(ways):
        if place + 1 == len(ways) or ways[place + 1] is not way:
            yield range(start, place + 1), way
            start = place + 1
