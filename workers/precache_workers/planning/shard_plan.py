"""Sum up, shard by shard, what a build computes and reuses: its actions, executed on counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from precache_workers.planning.base_shard import BaseShard
from precache_workers.planning.base_version import BaseVersion
from precache_workers.planning.copied_rows import CopiedRows
from precache_workers.planning.shard_actions import (
    Action,
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
        Rows of chunks that are copied as they are stored.
    resumed
        Rows of the base version that are decoded and get their remaining ops, another codec, or
        other rows in their chunks.
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
    folders = {name: base.folder_of(name) for name in base.fields}
    arrays = {(folders[n].name, match.array): folders[n] for n, match in base.fields.items()}
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
    fields = {
        name: count_rows(name, actions, shape.chunk_rows(target.rows_per_shard))
        for name, shape in target.shapes.items()
    }
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


def count_rows(name: str, actions: ShardActions, chunk_rows: int) -> FieldRows:
    """Execute the actions of a field on counters.

    A hole of the base that is tried again with the same sample is expected to stay a hole; if it is
    not known whether a field that is gone was its reason, only where all samples are the same.
    """
    base, stay = actions.base, actions.stay[name]
    counter = _RowCounter(len(actions.content), chunk_rows, base.holes)
    unknown_stay = all(base.same) and not base.retries
    known = [p for p in sorted(base.holes) if base.same[p] and (actions.content[p] or unknown_stay)]
    staying = [] if isinstance(stay, Zeros) else known
    for rows, row in actions.runs:
        start = rows.start
        first = bisect_left(staying, rows.start)
        for place in staying[first : bisect_left(staying, rows.stop)] if row.fetches else ():
            counter.count(row.fields[name], range(start, place))
            counter.count(stay, range(place, place + 1))
            start = place + 1
        counter.count(row.fields[name], range(start, rows.stop))
    return counter.finish()


class _RowCounter:
    """Counts rows by their actions: a `BaseRowWriter`, and a `Copier`, that writes nothing."""

    def __init__(self, rows: int, chunk_rows: int, holes: Collection[int]) -> None:
        self._rows, self._holes = rows, holes
        self._copied = CopiedRows(rows, chunk_rows, self)
        self._counts = dict.fromkeys(FieldRows.__dataclass_fields__, 0)
        self._append: Callable[[range], None]

    def count(self, action: Action, rows: range) -> None:
        """Execute an action for a run of rows."""
        if rows:
            action.stage(self, rows.start, "", None)
            self.keep(rows)

    def zeros(self) -> None:
        self._append = self._interrupt

    def compute(self, sample: object, key: str) -> None:
        self._append = self._count_computed

    def link(self) -> None:
        self._append = self._copied.link

    def copy(self) -> None:
        self._append = self._copied.copy

    def crop(self, part: tuple[slice, ...]) -> None:
        self._append = self._count_resumed

    def resume(self, place: int, applied: int, key: str) -> None:
        self._append = self._count_resumed

    def keep(self, rows: range) -> None:
        self._append(rows)

    def copy_chunks(self, rows: range) -> None:
        self._counts["copied"] += sum(place not in self._holes for place in rows)

    def copy_rows(self, rows: range) -> None:
        self._counts["resumed"] += sum(place not in self._holes for place in rows)

    def _interrupt(self, rows: range) -> None:
        self._copied.interrupt()

    def _count_computed(self, rows: range) -> None:
        self._interrupt(rows)
        self._counts["computed"] += len(rows)

    def _count_resumed(self, rows: range) -> None:
        self._interrupt(rows)
        self._counts["resumed"] += len(rows)

    def finish(self) -> FieldRows:
        self._copied.finish()
        if self._copied.linked:
            return FieldRows(linked=self._rows)
        return FieldRows(**self._counts)
