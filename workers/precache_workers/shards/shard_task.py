"""One shard, made whole: fetch -> ops -> encode -> put. Idempotent, and no Ray in it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from precache.errors import BuildError, FetchError, HangError, SampleError
from precache.recipe.recipe import Recipe
from precache.recipe.variants import field_of
from precache.runtime.ordered_map import prefetch
from precache.storage.base import Folder
from precache.store.layout import RowShape
from precache.store.receipts import Receipt, ShardObject
from precache_workers.ops.behaviour import Outputs
from precache_workers.ops.field_recipe import Common, FieldRecipe
from precache_workers.ops.identity import installed_versions, require_same
from precache_workers.planning.base_shard import SpoiledBaseShard
from precache_workers.planning.reuse import BaseShard
from precache_workers.runtime.node import node_name
from precache_workers.runtime.time_limit import (
    DECODING,
    FETCHING,
    SAMPLE_SECONDS,
    notes,
    run_in_time,
)
from precache_workers.shards.rows import ShardRows
from precache_workers.shards.shard_objects import (
    DoneElsewhere,
    Recorded,
    create_objects,
    create_receipt,
    replace_lost,
    require_lease,
)
from precache_workers.shards.timing import Timing
from precache_workers.sources.base import Fetched, Sample, Source

FETCH_BYTES = 4 << 20
FETCH_SAMPLES = 16
"""A fetch is a run of samples up to either limit; three are in the making at a time."""
BASE_MEMORY = 1 << 30
"""Bytes of a worker's process: 350 MB of libraries, the rest for photos of 90 million pixels."""
LARGE_FILE = 16 << 20
LARGE_MEMORY = 768 << 20
"""Bytes more where a file is larger than that: for pictures at the default limit of pixels."""
UNFETCHED = "could not be fetched"
"""How the reason of a hole begins whose sample was not to be had."""
_tasks_before = itertools.count()
"""Shards this process has made: what it burnt before the first one went into imports."""


@dataclass(frozen=True)
class Job:
    """What all shards of a build share; the recipe has a field for each stored array.

    Where it is `pinned`, samples must be what an offered version's rows were made of. `behaviours`
    is what its ops must make of their probes, and `code` the digests of its functions' code.
    """

    source: Source
    recipe: Recipe
    import_path: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    behaviours: Mapping[str, Outputs] = field(default_factory=dict)
    fetch_labels: bool = False
    pinned: bool = False
    sample_seconds: float = SAMPLE_SECONDS
    """That fetching or decoding a sample may take."""


@dataclass(frozen=True, kw_only=True)
class SampleTask:
    """What tasks on samples have in common.

    Attributes
    ----------
    barred
        Key -> why, of samples that must not be decoded: they become holes. Those that took too long
        to fetch are not fetched again.
    alone
        Samples that may hang: while one is fetched or decoded, nothing else is.
    """

    barred: Mapping[str, str] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()

    def retried(self) -> Self:
        return self

    def after(self, hang: HangError) -> Self:
        if len(hang.late) > 1 and not hang.late.keys() <= self.alone:
            return replace(self, alone=self.alone | hang.late.keys())
        return replace(self, barred={**self.barred, **hang.late})


@dataclass(frozen=True)
class ShardTask(SampleTask):
    """One shard to make: the samples of its rows, in order.

    Attributes
    ----------
    folder
        Of the version.
    objects
        Field -> name of the object to be put, below the folder.
    lost
        What is recorded of the shard, where its objects replace lost ones.
    offer
        The same shard of an earlier version.
    accept_missing
        Make a hole of a sample that cannot be fetched.
    removed
        Places of rows whose samples are no more.
    lease
        Object below the folder that is there as long as the build may write; its worker must see
        it.
    store
        Of the version; needed where other builds may make the same shard.
    again
        The shard may be there already: another task was given it before.
    """

    job: Job
    folder: Folder
    shapes: Mapping[str, RowShape]
    objects: Mapping[str, str]
    rows_per_shard: int
    shard: int
    keys: Sequence[str]
    sizes: Sequence[int]
    accept_missing: bool = False
    lost: Recorded | None = None
    offer: BaseShard | None = None
    removed: frozenset[int] = frozenset()
    lease: str | None = None
    store: Folder | None = None
    again: bool = False
    may_fail: frozenset[int] = frozenset()

    @property
    def first_row(self) -> int:
        return self.shard * self.rows_per_shard

    @property
    def memory(self) -> int:
        """Bytes its process may need: libraries and a large photograph, and whole shards."""
        made = self.rows_per_shard * sum(row.nbytes for row in self.shapes.values())
        offered = self.offer.nbytes_of(self.offer.fields) if self.offer else 0
        large = LARGE_MEMORY * (max(self.sizes, default=0) > LARGE_FILE)
        return BASE_MEMORY + large + made + offered

    def retried(self) -> Self:
        return replace(self, again=True)


# --- the stages ---------------------------------------------------------------------------------


def _runs(
    keys: Sequence[str], sizes: Sequence[int], alone: Collection[str]
) -> Iterator[list[tuple[str, int]]]:
    """Runs of samples to be fetched together; some keys are alone in theirs."""
    run: list[tuple[str, int]] = []
    weight = 0
    for key, size in zip(keys, sizes, strict=True):
        apart = alone and (key in alone or (run[-1:] and run[-1][0] in alone))
        if run and (apart or weight + size > FETCH_BYTES or len(run) == FETCH_SAMPLES):
            yield run
            run, weight = [], 0
        run.append((key, size))
        weight += max(0, size)
    if run:
        yield run


def fetch_ahead(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    barred: Mapping[str, str] = MappingProxyType({}),
    alone: Collection[str] = (),
) -> Generator[tuple[str, Fetched], None, None]:
    """Samples in order, the next ones being fetched while the caller works.

    Parameters
    ----------
    barred, alone
        As in `SampleTask`.
    """
    kept = notes()
    hung = {key for key, why in barred.items() if why.startswith(FETCHING)}

    def fetch_run(run: list[tuple[str, int]]) -> list[tuple[str, Fetched]]:
        names, expected = zip(*run, strict=True)
        if run[0][0] in hung:
            return [(key, SampleError(barred[key])) for key in names]
        with kept.kept():
            return list(zip(names, source.fetch(names, expected), strict=True))

    several = _runs(keys, sizes, hung.union(alone))
    threads = source.fetch_threads
    runs = (
        (fetch_run(run) for run in several)
        if alone
        else prefetch(fetch_run, several, threads, threads + 1)
    )
    with contextlib.closing(runs):
        for run in runs:
            yield from run


def recipes_of(job: Job) -> dict[str, FieldRecipe]:
    """The ops of every field, ready to be applied to samples; all that they need is loaded."""
    import torch  # noqa: F401 - here, lest it count as the work of whoever uses it first

    for path in job.import_path:
        if path not in sys.path:
            sys.path.append(path)
    require_same(job.recipe, job.behaviours)
    fields, seed = job.recipe.fields, job.recipe.seed
    several = Counter(map(field_of, fields))
    common = {name: Common() for name, arrays in several.items() if arrays > 1}
    return {
        name: FieldRecipe(name, each, seed, job.code, common.get(field_of(name)))
        for name, each in fields.items()
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Parallelism is one task a core; torch's own threads would only get in its way."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_shard(task: ShardTask) -> Receipt:
    """Make one shard of every field, put its objects, then its receipt.

    Raises
    ------
    FetchError
        Samples that could not be fetched, by key; nothing was put.
    StorageError
        An object could not be written.
    BuildError
        The build has ended meanwhile.
    HangError
        A sample takes too long; nothing was put.
    """

    def work() -> Receipt:
        part = task
        while True:
            try:
                return _run_shard(part)
            except SpoiledBaseShard as spoiled:
                assert part.offer is not None
                part = replace(part, offer=part.offer.without(spoiled.field))

    return run_in_time(work, task.job.sample_seconds)


def _run_shard(task: ShardTask) -> Receipt:
    recipes = recipes_of(task.job)
    timing = Timing()
    rows = ShardRows(
        task.job.recipe,
        recipes,
        task.shapes,
        task.rows_per_shard,
        len(task.keys),
        task.removed,
        task.offer,
        task.first_row,
        [place for place, key in enumerate(task.keys) if key in task.barred] if task.barred else (),
    )
    wanted = list(filter(rows.needs_sample, range(len(task.keys))))
    needed = frozenset(wanted)
    holes: dict[int, str] = {}
    labels = [-1] * len(task.keys)
    unfetched: list[FetchError] = []
    at = notes()
    with one_thread(), contextlib.closing(_fetch(task, wanted)) as samples:
        carried = 0
        for place, key in enumerate(task.keys):
            if not carried:
                carried = rows.carry(place)
                timing.charge("encode")
            if carried:
                carried -= 1
                continue
            fetched = next(samples) if place in needed else None
            timing.charge("fetch")
            sample = fetched if isinstance(fetched, Sample) else None
            reason = task.barred.get(key, "")
            if isinstance(fetched, FetchError):
                if place not in task.may_fail:
                    unfetched.append(fetched)
                sample, reason = Sample({}), f"{UNFETCHED}: {fetched}"
            elif isinstance(fetched, SampleError):
                sample, reason = Sample({}), str(fetched)
            _require_unchanged(task, place, key, sample)
            at.begin(DECODING, key)
            reason = rows.make(place, key, sample, reason)
            if sample is not None and sample.label is not None:
                labels[place] = sample.label
            if reason:
                holes[task.first_row + place] = reason
            spent = timing.charge("ops")
            rows.keep()
            at.end()
            spent += timing.charge("encode")
            if sample is not None:
                timing.note(task.first_row + place, spent, timing.count(sample))
    if unfetched and not task.accept_missing:
        raise _unfetched(task.shard, unfetched)
    objects = rows.objects()
    require_lease(task)
    wanted_objects = {name: objects[name] for name in task.objects}
    reused = all(each.is_old for each in wanted_objects.values())
    if task.lost is not None:
        remade = {name: each.made for name, each in wanted_objects.items()}
        receipt = _receipt(task, rows, remade, holes, labels, reused, timing)
        replace_lost(task, task.lost, wanted_objects, receipt)
        return receipt
    try:
        made = create_objects(task, wanted_objects)
    except DoneElsewhere as other:
        return other.receipt
    timing.charge("put")
    return create_receipt(task, _receipt(task, rows, made, holes, labels, reused, timing))


def _receipt(
    task: ShardTask,
    rows: ShardRows,
    made: dict[str, ShardObject],
    holes: dict[int, str],
    labels: list[int],
    reused: bool,
    timing: Timing,
) -> Receipt:
    sums = {name: each.sums() for name, each in rows.outputs.items()}
    return Receipt(
        task.shard,
        made,
        holes,
        rows.content,
        {name: each for name, each in sums.items() if each is not None},
        timing.seconds,
        timing.cpu_seconds,
        timing.cpu_before if next(_tasks_before) == 0 else 0.0,
        labels=labels if task.job.fetch_labels else None,
        reused=reused,
        rows_reused=rows.taken,
        host=node_name(),
        began=timing.began,
        fetched=timing.nbytes,
        slowest=timing.slowest(),
        libraries=installed_versions(),
    )


def _fetch(task: ShardTask, wanted: Sequence[int]) -> Generator[Fetched, None, None]:
    keys, sizes = [task.keys[at] for at in wanted], [task.sizes[at] for at in wanted]
    with contextlib.closing(
        fetch_ahead(task.job.source, keys, sizes, task.barred, task.alone)
    ) as samples:
        yield from (fetched for _, fetched in samples)


def _require_unchanged(task: ShardTask, place: int, key: str, sample: Sample | None) -> None:
    """Where rows are pinned: raise if a sample is not what an earlier version's was."""
    if not task.job.pinned or task.offer is None or not task.job.source.content_decides:
        return
    known = task.offer.content[place] if place < len(task.offer.content) else ""
    if sample is not None and known and sample.content and sample.content != known:
        raise BuildError(
            f"{key} is not what it was when this version was built; have the change built first, "
            "by the same precache build as then"
        )


def _unfetched(shard: int, errors: Sequence[FetchError]) -> FetchError:
    shown = "; ".join(map(str, errors[:5]))
    more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
    return FetchError(f"shard {shard}: {len(errors)} samples could not be fetched: {shown}{more}")
