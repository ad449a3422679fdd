"""Shard by shard, what a build is to compute, and what it takes over. Nothing is read for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from precache.recipe.recipe import Field
from precache.store.array_metadata import is_summed
from precache.store.layout import RowShape
from precache_workers.planning.reusable_rows import ReusableRows, is_linked
from precache_workers.planning.reuse import BaseShard, BaseVersion, OfferedField
from precache_workers.planning.target_version import TargetVersion
from precache_workers.planning.work import Work


@dataclass(frozen=True)
class FieldRows:
    """Rows of one field, by how they come about; of holes that stay, those in whole shards alone.

    Attributes
    ----------
    linked
        Of objects that are taken over whole, unread.
    copied
        Taken over one by one, as they are stored.
    resumed
        Made of an earlier version's rows, by the ops that these lack and the codec.
    computed
        Made of their samples.
    """

    linked: int = 0
    copied: int = 0
    resumed: int = 0
    computed: int = 0

    @classmethod
    def total(cls, parts: Iterable[FieldRows]) -> FieldRows:
        """Of several shards."""
        found = list(parts)
        names = cls.__dataclass_fields__
        return cls(**{name: sum(getattr(each, name) for each in found) for name in names})


@dataclass(frozen=True)
class ShardPlan:
    """One shard that a build is to make.

    Attributes
    ----------
    linked
        Whether it is taken over whole, unread.
    reused
        Whether its objects will be those of the earlier version, linked or not.
    fetched, taken
        Places of rows whose samples are fetched; of rows of which some field is taken over.
    compared
        Fetched rows that are taken over all the same where the content is what it was.
    rows_reused
        Rows that are taken over without their samples, holes among them.
    retried
        Holes that are tried again.
    read_nbytes, linked_nbytes
        Of the earlier version's objects, that are read, or linked unread.
    """

    shard: int
    offer: BaseShard | None
    linked: bool
    reused: bool
    fetched: np.ndarray
    taken: np.ndarray
    compared: int
    rows_reused: int
    retried: int
    read_nbytes: int
    linked_nbytes: int
    fields: Mapping[str, FieldRows]


def plan_shards(work: Work, content_decides: bool) -> Iterator[ShardPlan]:
    """The shards that are to be made, in order."""
    origin = work.origin
    there = {} if origin is None else _sizes(origin)
    for shard in work.todo:
        offer = None if origin is None else origin.offer(work.goal, shard, content_decides)
        yield _plan_shard(work.goal, shard, offer, there)


def _sizes(origin: BaseVersion) -> dict[tuple[str, str], int]:
    """Bytes of earlier versions' objects, by version and name."""
    folders = {n: origin.bases.get(n, origin.version.folder) for n in origin.fields}
    arrays = {(folders[n].name, made.array): folders[n] for n, made in origin.fields.items()}
    return {
        (version, name): size
        for (version, array), folder in arrays.items()
        for name, size in folder.sizes(array).items()
    }


def _plan_shard(
    goal: TargetVersion, shard: int, offer: BaseShard | None, there: Mapping[tuple[str, str], int]
) -> ShardPlan:
    recipe, rows = goal.spec.recipe, goal.rows_of(shard)
    count = len(rows)
    gone = [row - rows.start for row in goal.table.removed if row in rows]
    whole = {
        name: each
        for name, each in (offer.fields.items() if offer else ())
        if offer and there.get(offer.place_of(each)) == each.size
    }
    spared = ReusableRows(recipe, count, gone, offer, whole, rows.start)
    linked = (
        offer is not None
        and whole.keys() == offer.fields.keys()
        and is_linked(recipe, goal.shapes, count, offer, gone)
    )
    known = np.array([bool(each) for each in spared.content])
    needs = spared.needs_sample & (not linked)
    taken = spared.same & known
    taken[list(spared.holes)] = False
    kept = ~needs
    kept[gone] = False
    reused = linked or (
        bool(spared.count == count and spared.finished and not needs.any())
        and all(each.made.encoded for each in whole.values())
        and set(gone) <= spared.holes.keys()
    )
    holes = list(spared.holes)
    staying = taken.copy()
    staying[holes] = spared.same[holes] & (not (offer and offer.retries))
    unmoved = spared.count == count and bool(staying.all())
    stay = [
        name
        for name, each in whole.items()
        if linked or (unmoved and _stays(recipe.fields[name], goal.shapes[name], each))
    ]
    linked_nbytes = sum(whole[name].size for name in stay)
    fields = {
        name: FieldRows(linked=count)
        if name in stay
        else _made(needs, taken, whole.get(name), shape.chunk_rows(goal.rows_per_shard))
        for name, shape in goal.shapes.items()
    }
    decides = offer is not None and offer.content_decides
    return ShardPlan(
        shard,
        offer,
        linked,
        reused,
        np.flatnonzero(needs),
        np.flatnonzero(taken),
        int((needs & known & ~spared.same).sum()) if decides else 0,
        int(kept.sum()),
        len(spared.holes.keys() - set(gone)) if offer is not None and offer.retries else 0,
        (offer.nbytes_of(whole) if offer else 0) - linked_nbytes,
        linked_nbytes,
        fields,
    )


def _stays(field: Field, shape: RowShape, old: OfferedField) -> bool:
    """Whether an object is linked where all its rows stay, as far as can be told before."""
    return old.made.encoded and (old.sums is not None or not is_summed(field, shape))


def _made(
    needs: np.ndarray, taken: np.ndarray, old: OfferedField | None, chunk_rows: int
) -> FieldRows:
    """Rows of a field whose object is not linked."""
    if old is None:
        return FieldRows(computed=int(needs.sum()))
    computed, over = int((needs & ~taken).sum()), int(taken.sum())
    if old.made.encoded and chunk_rows == 1:
        return FieldRows(copied=over, computed=computed)
    return FieldRows(resumed=over, computed=computed)
