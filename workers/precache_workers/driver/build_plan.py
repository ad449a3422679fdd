"""What a build would do, and why, said before it does anything."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from precache.errors import (
    DamageError,
    PrecacheError,
    StorageError,
    StoreError,
)
from precache.runtime.usage import cores
from precache.storage.base import Folder
from precache.storage.open import open_folder
from precache.store.build_status import DESCRIPTION
from precache.store.commit_log import read_commits
from precache.store.layout import RowShape
from precache.store.open import unchecked
from precache.store.row_table import RowTable
from precache.store.version import ROW_TABLE
from precache_workers.cluster.executor import Run, executor, is_joined, node_cpus
from precache_workers.driver.progress import BuildProgress
from precache_workers.ops.behaviour import forgetting
from precache_workers.ops.identity import behaviours
from precache_workers.planning.diff import Differences, compare
from precache_workers.planning.field_match import made_of
from precache_workers.planning.listing import ListedSource, list_rows
from precache_workers.planning.request import Request, check_request
from precache_workers.planning.reuse import BaseVersion, committed
from precache_workers.planning.shard_plan import FieldRows, ShardPlan, plan_shards
from precache_workers.planning.target_version import VersionSpec
from precache_workers.planning.work import MeasuredRows, Work, find_work, goal_of, remaining
from precache_workers.profiling.estimate import Estimate, UnitTimes, estimate
from precache_workers.sources.base import Source, open_source

if TYPE_CHECKING:  # loads torch and the decoders, which a plan may have no use for
    from precache_workers.profiling.op_costs import FieldCosts
    from precache_workers.shards.shard_task import Job

TIMED = 32
"""Rows of each kind that are made to be timed."""

_BY_OPS = "with a field by these ops, the first of them, or a wider crop"

State = Literal["nothing", "repair", "continue", "build"]


@dataclass(frozen=True)
class BuildPlan:
    """What the same build would do at this moment.

    Attributes
    ----------
    version
        Id of the version that it makes, or finishes.
    state
        ``nothing``: the version is complete; ``repair``: objects of it were lost; ``continue``: a
        build of it began; ``build``.
    current
        Id of the current version; None where there is none.
    differences
        To the current version; None where there is none that can be read.
    keeps_rows
        Whether samples keep the rows that they have in the current version.
    base, base_reason
        Id of the version of which rows are taken over, and why that one; or why there is none.
    samples, ignored, removed
        Of the source; its files that are not images by suffix; rows whose samples it has no more.
    left_out
        As a build's result has it.
    shards, shards_skipped, shards_reused
        Of the version; those that are there; those whose objects will be the base's.
    rows_retried
        Samples that failed before, and are tried again.
    rows_reused, rows_computed, rows_compared
        Rows taken over without their samples, holes among them; rows whose samples are fetched;
        those of the latter that are taken over after all, where their content is what it was.
    fields
        Rows by how they come about, of the shards that are to be made.
    bytes_fetched, bytes_read, bytes_linked, bytes_written
        Of samples; of the base's objects, read, or taken over unread; of new objects. None where
        that is unknown without timing.
    estimate
        None where nothing is to be computed, or timing was not asked for.
    ops
        Of each field, where they are better done; none where no sample is to be fetched, or timing
        was not asked for.
    hard_links
        Whether what is linked takes no room; in a bucket the service copies it.
    """

    version: str
    state: State
    current: str | None
    differences: Differences | None
    keeps_rows: bool
    base: str | None
    base_reason: str
    samples: int
    ignored: int
    removed: int
    shards: int
    shards_skipped: int
    shards_reused: int
    rows_retried: int
    rows_reused: int
    rows_computed: int
    rows_compared: int
    fields: Mapping[str, FieldRows]
    bytes_fetched: int | None
    bytes_read: int
    bytes_linked: int
    bytes_written: int | None
    estimate: Estimate | None
    ops: tuple[FieldCosts, ...] = ()
    hard_links: bool = True
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def shards_to_make(self) -> int:
        """Shards of which something is computed, or put together from the base's rows."""
        return self.shards - self.shards_skipped - self.shards_reused


def run_plan(request: Request, timing: bool, shown: bool) -> BuildPlan:
    """Plan the build that the request describes; nothing is written.

    Parameters
    ----------
    timing
        Make a few dozen rows, to tell time and bytes.
    shown
        Whether progress goes to standard error.

    Raises
    ------
    UsageError, SourceError, RecipeError
        The build would end so.
    """
    check_request(request)
    store = open_folder(request.store, request.storage_options)
    source = open_source(
        request.source,
        request.storage_options,
        follow_links=request.follow_links,
        most_bytes=request.max_sample_bytes,
    )
    with BuildProgress(shown) as progress, contextlib.ExitStack() as stack, forgetting():
        listed = list_rows(request, store, source, progress.listed)
        for line in listed.unfollowed():
            progress.say(line)
        progress.phase("Comparing")
        trials = _Trials(request, source, listed, progress, stack)
        goal = goal_of(request, store, listed.spec)
        measure = trials.measure if timing else trials.measure_unless_declared
        work = find_work(request, store, listed, goal, measure)
        work = work if work.committed else remaining(work)
        shards = list(plan_shards(work, source.content_decides))
        took = trials.estimate(work, shards) if shards and timing else None
        plan = _plan(request, store, listed, work, shards, took)
        if took is not None:
            plan = replace(plan, ops=trials.time_ops(work, shards))
        progress.finish("Nothing was written")
    return plan


class _Trials:
    """Rows made to see what they are like; what makes them starts with the first."""

    def __init__(
        self,
        request: Request,
        source: Source,
        listed: ListedSource,
        progress: BuildProgress,
        stack: contextlib.ExitStack,
    ) -> None:
        self._request = request
        self._source = source
        self._listed = listed
        self._progress = progress
        self._stack = stack

    @functools.cached_property
    def _run(self) -> Run:
        """Tasks run on a cluster that is joined, else in this process, without Ray."""
        request, say = self._request, self._progress.say
        self._progress.phase("Measuring a few samples")
        address = request.address if is_joined(request.address) else "serial"
        return self._stack.enter_context(executor(address, None, request.placement, say))

    @functools.cached_property
    def _job(self) -> Job:
        from precache_workers.shards.shard_task import Job

        request, listed = self._request, self._listed
        return Job(
            self._source,
            listed.spec.recipe,
            request.import_path,
            listed.digests,
            behaviours(listed.spec.recipe),
            listed.fetches_labels,
            sample_seconds=request.sample_timeout,
        )

    def measure(self, spec: VersionSpec) -> MeasuredRows:
        """Row shapes and stored bytes, from a few samples."""
        from precache_workers.profiling.probe import probe_task, probed_rows, run_probe

        [(_, outcome)] = self._run(run_probe, [probe_task(self._job, spec.table)])
        return probed_rows(outcome, self._request.source)

    def measure_unless_declared(self, spec: VersionSpec) -> MeasuredRows:
        """Row shapes as the ops tell them, where they do; nothing of stored bytes then."""
        shapes = {}
        for name, each in spec.recipe.fields.items():
            if each.shape is None or each.dtype is None:
                return self.measure(spec)
            shapes[name] = RowShape(each.shape, each.dtype)
        return MeasuredRows(shapes, 0.0)

    def time_ops(self, work: Work, shards: Sequence[ShardPlan]) -> tuple[FieldCosts, ...]:
        """What the ops take of samples that are to be fetched."""
        from precache_workers.profiling.op_costs import OpsTask, time_ops

        table, rows = work.goal.table, _some_fetched(work, shards)
        if not len(rows):
            return ()
        job = replace(self._job, recipe=self._listed.spec.declared)
        keys, sizes = [table.keys[row] for row in rows], [int(table.sizes[row]) for row in rows]
        [(_, found)] = self._run(time_ops, [OpsTask(job, keys, sizes)])
        if isinstance(found, PrecacheError):
            raise found
        costs: tuple[FieldCosts, ...] = found
        return costs

    def estimate(self, work: Work, shards: Sequence[ShardPlan]) -> Estimate | None:
        """What the shards will take; None where all of them are taken over whole."""
        from precache_workers.profiling.rates import RatesTask, measure_rates

        goal, table = work.goal, work.goal.table
        made = [each for each in shards if not each.linked]
        if not made:
            return None
        rows = _some_fetched(work, made)
        old = next((each for each in made if len(each.taken) and each.offer is not None), None)
        task = RatesTask(
            self._job,
            goal.shapes,
            goal.rows_per_shard,
            [table.keys[row] for row in rows],
            [int(table.sizes[row]) for row in rows],
            old.offer if old else None,
            _some_taken(work, old).tolist() if old else [],
        )
        [(_, rates)] = self._run(measure_rates, [task])
        if isinstance(rates, PrecacheError):
            raise rates
        found: UnitTimes = rates
        return estimate(shards, found, self._cpus(), self._listed.seconds)

    def _cpus(self) -> int:
        request = self._request
        if request.address == "serial":
            return 1
        if is_joined(request.address):
            return max(1, int(sum(node_cpus().values()) / request.placement.cpus))
        return request.cpus or cores()


def _some_fetched(work: Work, shards: Sequence[ShardPlan]) -> np.ndarray:
    """An even spread of the rows whose samples are to be fetched."""
    rows = np.concatenate([work.goal.rows_of(s.shard).start + s.fetched for s in shards])
    spread = np.linspace(0, max(0, len(rows) - 1), TIMED).astype(int)
    chosen: np.ndarray = rows[np.unique(spread)[: len(rows)]]
    return chosen


def _some_taken(work: Work, shard: ShardPlan) -> np.ndarray:
    """Places of rows that are taken over, all of those that share a chunk."""
    goal = work.goal
    step = max(shape.chunk_rows(goal.rows_per_shard) for shape in goal.shapes.values())
    last: int = shard.taken[:TIMED][-1]
    places: np.ndarray = shard.taken[shard.taken < (last // step + 1) * step]
    return places


def _plan(
    request: Request,
    store: Folder,
    listed: ListedSource,
    work: Work,
    shards: Sequence[ShardPlan],
    took: Estimate | None,
) -> BuildPlan:
    goal, table = work.goal, work.goal.table
    commits = read_commits(store)
    base = work.origin if any(each.read_nbytes + each.linked_nbytes for each in shards) else None
    state: State = "build"
    if work.committed:
        state = "repair" if work.todo else "nothing"
    elif goal.folder.size(DESCRIPTION) is not None:
        state = "continue"
    fetched = [table.sizes[goal.rows_of(s.shard).start + s.fetched] for s in shards]
    sizes = np.concatenate([*fetched, np.zeros(0, np.int64)])
    guessed = None if took is None else took.fetched
    return BuildPlan(
        goal.version,
        state,
        commits[-1].version if commits else None,
        _differences(store, listed, base),
        listed.placed.rows_per_shard is not None,
        None if base is None else base.version.id,
        _base_reason(request, store, listed, work, base) if shards else "",
        len(table) - len(table.removed),
        listed.ignored,
        len(table.removed),
        goal.shards,
        goal.shards - len(shards),
        sum(each.reused for each in shards),
        sum(each.retried for each in shards),
        sum(each.rows_reused for each in shards),
        sum(len(each.fetched) for each in shards),
        sum(each.compared for each in shards),
        {name: FieldRows.total(each.fields[name] for each in shards) for name in goal.shapes},
        int(sizes.sum()) if (sizes >= 0).all() else guessed,
        sum(each.read_nbytes for each in shards),
        sum(each.linked_nbytes for each in shards),
        _written(work, shards, took),
        took,
        hard_links=store.local("") is not None,
        left_out=listed.left_out,
    )


def _written(work: Work, shards: Sequence[ShardPlan], took: Estimate | None) -> int | None:
    if work.lost is not None:
        return sum(nbytes for nbytes, _ in work.lost.values())
    if all(each.reused for each in shards):
        return 0
    return None if took is None else took.written


def _differences(
    store: Folder, listed: ListedSource, base: BaseVersion | None
) -> Differences | None:
    """To the current version; of libraries, to that of which rows are taken over."""
    current = next(committed(store), None)
    if current is None:
        return None
    folder, attributes = current
    table = None
    if attributes.rows_digest != listed.spec.rows_digest:
        with contextlib.suppress(DamageError, StorageError, StoreError):
            data = unchecked(folder).read_checked(ROW_TABLE)
            table = RowTable.from_parquet(data, folder.path(ROW_TABLE))
    of_base = base.version.attributes if base is not None else None
    return compare(listed.spec, attributes, table, (of_base or attributes).libraries)


def _base_reason(
    request: Request, store: Folder, listed: ListedSource, work: Work, base: BaseVersion | None
) -> str:
    """Why rows of this version are taken over, or of none."""
    recipe = listed.spec.recipe
    if base is not None:
        if base.rivals == 1:
            return f"the only one {_BY_OPS}"
        return f"of {base.rivals} {_BY_OPS}, it spares most"
    if work.committed:
        return "what was lost is made again as it was"
    if request.recompute:
        return "--recompute"
    if listed.fetches_labels:
        return "labels come with the samples"
    versions = [attributes for _, attributes in committed(store)]
    if not versions:
        return "the store has no version yet"
    if not any(made_of(recipe, each) for each in versions):
        return "no version has a field by these ops, code and libraries, or the first of them"
    if work.origin is not None and work.origin.rows_per_shard != work.goal.rows_per_shard:
        return (
            f"shards are to have {work.goal.rows_per_shard} rows, and those of version "
            f"{work.origin.version.id[:8]} have {work.origin.rows_per_shard}"
        )
    return "rows are laid down anew: no version has these samples in the same places"
