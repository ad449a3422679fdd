"""Sum up, shard by shard, what a build computes and reuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from precache_workers.planning.base_shard import BaseShard
from precache_workers.planning.base_version import BaseVersion
from precache_workers.planning.shard_actions import (
    Action,
    Compute,
    Copy,
    Link,
    Resume,
    ShardActions,
    Zeros,
    decide_actions,
)
from precache_workers.planning.target_version import TargetVersion
from precache_workers.planning.work_plan import Work


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
        Rows of the base version that get their remaining ops, or another codec.
    computed
        Rows that are computed of samples.
    """

    linked: int = 0
    copied: int = 0
    resumed: int = 0
    computed: int = 0

    @classmethod
    def total(cls, parts: Iterable[FieldRows]) -> FieldRows:
        """Add up the rows of several shards."""
        shards = list(parts)
        names = cls.__dataclass_fields__
        return cls(**{name: sum(getattr(rows, name) for rows in shards) for name in names})


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Summary of the actions of one shard that is to be built.

    Attributes
    ----------
    linked
        Whether the shard is linked as a whole, unread.
    reused
        Whether its objects will be those of the base version, linked or not.
    fetched, taken
        Places of rows whose samples are fetched; of rows of which some field is reused.
    compared
        Fetched rows that are reused all the same where the content is what it was.
    rows_reused
        Rows that are reused without their samples, holes among them.
    retried, stay_failed
        Holes that are tried again; samples that failed before and are not.
    read_nbytes, linked_nbytes
        Bytes of the base version's objects that are read, and that are linked unread.
    """

    shard: int
    base: BaseShard
    linked: bool
    reused: bool
    fetched: np.ndarray
    taken: np.ndarray
    compared: int
    rows_reused: int
    retried: int
    stay_failed: int
    read_nbytes: int
    linked_nbytes: int
    fields: Mapping[str, FieldRows]


def plan_shards(work: Work) -> Iterator[ShardPlan]:
    """Summarise the shards that are to be built, in order."""
    base = work.base
    sizes = {} if base is None else _sizes(base)
    for shard in work.todo:
        part = None if base is None else base.shard(work.target, shard)
        if part is not None:
            fields = part.fields.items()
            part = part.only([n for n, f in fields if sizes.get(f.object_id) == f.stored.size])
        yield _plan_shard(work.target, shard, part)


def _sizes(base: BaseVersion) -> dict[tuple[str, str], int]:
    """Bytes of the objects of base versions, by version and name."""
    arrays = {(a.folder.name, a.match.array): a.folder for a in base.fields.values()}
    return {
        (version, name): size
        for (version, array), folder in arrays.items()
        for name, size in folder.sizes(array).items()
    }


def _plan_shard(target: TargetVersion, shard: int, part: BaseShard | None) -> ShardPlan:
    rows = target.rows_of(shard)
    removed = {row - rows.start for row in target.table.removed if row in rows}
    actions = decide_actions(target.spec.recipe, target.shapes, len(rows), part, removed)
    base, fetched = actions.base, actions.fetched
    fields = {name: count_rows(name, actions) for name in target.shapes}
    linked_nbytes = base.nbytes_of([n for n in base.fields if fields[n].linked])
    other = [place for place in fetched if actions.content[place] and not base.same[place]]
    return ShardPlan(
        shard=shard,
        base=base,
        linked=actions.linked,
        reused=_is_reused(actions, len(rows), removed),
        fetched=np.array(fetched, np.int64),
        taken=np.array(actions.reused, np.int64),
        compared=len(other),
        rows_reused=len(rows) - len(fetched) - len(removed),
        retried=len(base.holes.keys() - removed) if base.retries else 0,
        stay_failed=len(base.holes.keys() - removed - set(fetched)),
        read_nbytes=base.nbytes_of(base.fields) - linked_nbytes,
        linked_nbytes=linked_nbytes,
        fields=fields,
    )


def _is_reused(actions: ShardActions, rows: int, removed: set[int]) -> bool:
    """Return whether all objects will be those of the base, as far as can be known before."""
    base = actions.base
    return actions.linked or (
        len(base.same) == rows
        and actions.finished
        and not actions.fetched
        and all(field.match.encoded for field in base.fields.values())
        and removed <= base.holes.keys()
    )


def count_rows(name: str, actions: ShardActions) -> FieldRows:
    """Count the rows of a field by their actions.

    A hole of the base that is tried again with the same sample is expected to stay a hole; if it is
    not known whether a field that is gone was its reason, only where all samples are the same.
    """
    base, stay = actions.base, actions.stay[name]
    unknown_stay = all(base.same) and not base.retries
    known = [p for p in base.holes if base.same[p] and (actions.content[p] or unknown_stay)]
    staying = set() if isinstance(stay, Zeros) else set(known)
    counts: Counter[type[Action]] = Counter()
    kept_holes = 0
    for rows, row in actions.runs:
        stays = staying.intersection(rows) if row.fetches else set()
        for action, places in ((row.fields[name], {*rows} - stays), (stay, stays)):
            counts[type(action)] += len(places)
            if isinstance(action, Link | Copy):
                kept_holes += len(places & base.holes.keys())
    if counts[Link] == len(actions.content):
        return FieldRows(linked=counts[Link])
    copied = counts[Link] + counts[Copy] - kept_holes
    return FieldRows(copied=copied, resumed=counts[Resume], computed=counts[Compute])
