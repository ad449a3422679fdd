"""Sum up, shard by shard, what a build computes and reuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from precache.store.row_table import REMOVED
from precache_workers.planning.assembly import FieldRows, assemble, count_rows, taken_rows
from precache_workers.planning.catalogue import WHOLE, StoredArray, StoredRows, open_stored
from precache_workers.planning.stored_versions import UNREADABLE
from precache_workers.planning.work_plan import Work


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Summary of the assembly of one shard that is to be built.

    Attributes
    ----------
    stored
        What other versions have of its rows.
    linked
        Whether the shard is linked as a whole, unread.
    fetched
        Places of rows whose samples are fetched.
    compared
        Fetched rows that are reused all the same where the content is one that was guessed.
    rows_reused
        Rows that are reused without their samples, holes among them.
    retried, stay_failed
        Samples that failed before: those that are tried again, and those that are not.
    read_nbytes, linked_nbytes
        Bytes of stored objects that are read, and that are linked unread.
    """

    shard: int
    stored: StoredRows
    linked: bool
    fetched: np.ndarray
    compared: int
    rows_reused: int
    retried: int
    stay_failed: int
    read_nbytes: int
    linked_nbytes: int
    fields: Mapping[str, FieldRows]

    @property
    def reused(self) -> int:
        """Rows that are copied or resumed, of all fields."""
        return sum(rows.reused for rows in self.fields.values())


def plan_shards(work: Work) -> Iterator[ShardPlan]:
    """Summarise the shards that are to be built, in order."""
    sizes: dict[tuple[str, str], Mapping[str, int]] = {}

    def nbytes_of(array: StoredArray, shard: int) -> int | None:
        """Return the bytes of an object; None if it is not there, or not as large as it was."""
        if array.place not in sizes:
            sizes[array.place] = array.folder.sizes(array.name)
        try:
            leaf = open_stored(array, shard).shard_leaves(array.name)[shard]
        except UNREADABLE:
            return None  # it was removed meanwhile
        return leaf.size if sizes[array.place].get(leaf.name) == leaf.size else None

    for shard in work.todo:
        yield _plan_shard(work, shard, nbytes_of)


def _plan_shard(
    work: Work, shard: int, nbytes_of: Callable[[StoredArray, int], int | None]
) -> ShardPlan:
    target = work.target
    rows = target.rows_of(shard)
    stored, recipe = work.found.shard(rows), target.spec.recipe
    for (place, number), (array, _) in taken_rows(stored).items():
        if nbytes_of(array, number) is None:
            stored = stored.without(place, number)
    assembly = assemble(recipe, stored)
    links, fetched = assembly.links, assembly.fetched
    fields = {name: count_rows(name, assembly) for name in target.shapes}
    linked = {(links[n][0].place, links[n][1]) for n, counts in fields.items() if counts.linked}
    linked_nbytes = read_nbytes = 0
    for (place, number), (array, taken) in taken_rows(stored).items():
        nbytes, share = nbytes_of(array, number) or 0, len(taken) / len(array.rows_of(number))
        if (place, number) in linked:
            linked_nbytes += nbytes
        else:
            read_nbytes += nbytes if share >= WHOLE else int(nbytes * share)
    guesses = (stored, *stored.others)
    guessed = [place for place in fetched if stored.contents[place] and not stored.known[place]]
    return ShardPlan(
        shard=shard,
        stored=stored,
        linked=assembly.linked,
        fetched=np.array(fetched, np.int64),
        compared=sum(
            any(assembly.with_sample(place, rows.contents[place]).reuses for rows in guesses)
            for place in guessed
        ),
        rows_reused=target.samples_of(shard) - len(fetched),
        retried=len(work.retried.intersection(rows)),
        stay_failed=sum(run.hole not in (None, REMOVED) for run in assembly.runs),
        read_nbytes=read_nbytes,
        linked_nbytes=linked_nbytes,
        fields=fields,
    )
