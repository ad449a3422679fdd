"""The plan of a build: its actions, their reasons and their cost, before anything is written."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from precache.errors import UsageError
from precache.recipe.recipe import draws_in_words
from precache.runtime.usage import cores
from precache.storage.base import Folder
from precache.store.build_status import DESCRIPTION
from precache.store.commit_log import ROOT, read_log, short
from precache_workers.cluster.executor import RunTasks, executor, is_joined
from precache_workers.driver.plan_text import plan_text
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.sample_probe import SampleProbe
from precache_workers.driver.totals import Totals
from precache_workers.ops.behaviour import cleared_on_mismatch
from precache_workers.planning.assembly import FieldRows
from precache_workers.planning.diff import BuildDifferences, compare_with_committed
from precache_workers.planning.listing import list_rows
from precache_workers.planning.request import Request, check_request
from precache_workers.planning.rows import samples_read
from precache_workers.planning.shard_plan import ShardPlan, plan_shards
from precache_workers.planning.stored_versions import UNREADABLE, stored_versions
from precache_workers.planning.target_version import find_target, lost_roots
from precache_workers.planning.work_plan import (
    Work,
    compact_shards,
    find_work,
    remaining,
)
from precache_workers.profiling.estimate import FILE_SECONDS, Estimate, ShardWork, estimate

if TYPE_CHECKING:
    from precache_workers.doctor.report import DoctorReport

PlanState = Literal["nothing", "repair", "continue", "build"]


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """Actions of a build, as of this moment.

    Attributes
    ----------
    version
        Id of the version that it builds, or finishes.
    state
        ``nothing``: the version is complete; ``repair``: objects of it were lost; ``continue``: a
        build of it began; ``build``.
    current
        Id of the current version; None if there is none.
    differences
        To the current version; None if there is none that can be read.
    keeps_rows
        Samples keep the rows that they have in the current version.
    base, base_reason
        Id of the version of which most rows are reused, and the reason; or why there is none.
    samples, removed
        Samples of the source; rows whose samples it no longer has.
    ignored, left_out
        As a build's result has them.
    examples
        Name of one that is left out, by reason.
    shards, shards_skipped, shards_reused
        Shards of the version; those that are done; those that are linked.
    rows_retried, rows_failed
        Samples that failed before: those that are tried again, and those that stay holes.
    rows_reused, rows_computed, rows_compared
        Rows reused without their samples, holes among them; rows whose samples are fetched; those
        of the latter that are reused after all if their content is what it was.
    fields
        Rows by action, of the shards that are to be built.
    bytes_fetched, bytes_read, bytes_linked, bytes_written
        Of samples; of stored objects that are read, or linked; of new objects. None if
        that is unknown without timing.
    estimate
        None if nothing is to be computed, or timing was not requested.
    hard_links
        Linked objects take no space; in a bucket the service copies them.
    row_types
        By field, dtype and shape of a row, such as ``uint8 (3, 224, 224)``.
    fails
        More of the samples that were measured failed than the build allows; or all of them did, and
        it stops if all that are to be computed do.
    pixels
        Lines on random draws that all epochs share, and on defaults that decided pixels of the
        samples measured.
    shards_compact
        Shards that ``--compact`` would give; None where it would not give far fewer.
    compares
        False for a Python dataset of which a change of the data is not seen.
    gain
        What a cache would bring, if that was asked for.
    """

    version: str
    state: PlanState
    current: str | None
    differences: BuildDifferences | None
    keeps_rows: bool
    base: str | None
    base_reason: str
    samples: int
    ignored: Mapping[str, int]
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
    hard_links: bool = True
    rows_failed: int = 0
    fails: bool = False
    shards_compact: int | None = None
    compares: bool = True
    left_out: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    row_types: Mapping[str, str] = field(default_factory=dict)
    pixels: tuple[str, ...] = ()
    gain: DoctorReport | None = None

    @property
    def shards_to_make(self) -> int:
        """Shards with rows that are computed, or copied from other versions."""
        return self.shards - self.shards_skipped - self.shards_reused

    def __str__(self) -> str:
        return plan_text(self) if self.gain is None else f"{plan_text(self)}\n\n{self.gain}"

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `gain`.

        Raises
        ------
        UsageError
            There is no `gain`, or jinja2 is not installed.
        StorageError
            The file cannot be written.
        """
        if self.gain is None:
            raise UsageError("the page says what a cache would bring; give a rate with it")
        self.gain.html(path)


def run_plan(request: Request, timing: bool, shown: bool) -> BuildPlan:
    """Plan the build that the request describes; nothing is written.

    Parameters
    ----------
    timing
        Build a few dozen rows in memory, to estimate time and bytes.
    shown
        Show progress on standard error.

    Raises
    ------
    UsageError, SourceError, RecipeError
        The build would raise it.
    """
    check_request(request)
    with BuildProgress(shown) as progress, contextlib.ExitStack() as stack, cleared_on_mismatch():
        planner = _Planner(request, progress, stack, timing)
        store, source = planner.store, planner.source
        for folder, _ in lost_roots(store):
            progress.note(
                f"{folder.path('')} lost its {ROOT}, which a build puts back before all else; here "
                "it counts as not built, so that a build makes less than this plan says"
            )
        listed = planner.listed = list_rows(request, store, source, progress.listed, progress.say)
        listed.announce(progress.note, labels_given=request.labels is not None)
        progress.phase("Comparing")
        per_shard, anew = request.shard_samples, request.recompute
        target = find_target(store, listed.spec, per_shard, recompute=anew)
        work = remaining(find_work(request, store, listed, target, planner))
        shards = list(plan_shards(work))
        plan = planner.plan(work, shards, planner.estimate(work, shards) if timing else None)
        progress.finish("Nothing was written")
    return plan


class _Planner(SampleProbe):
    """Measures a few rows; the executor for them starts with the first."""

    def __init__(
        self,
        request: Request,
        progress: BuildProgress,
        stack: contextlib.ExitStack,
        timing: bool,
    ) -> None:
        super().__init__(request, progress)
        self._stack, self.declared = stack, not timing
        self.pixels: list[str] = []

    def note_pixels(self, line: str) -> None:
        self.pixels.append(line)

    @functools.cached_property
    def run_tasks(self) -> RunTasks:  # type: ignore[override]
        """Tasks run where those of the build will run, one at a time."""
        from precache_workers.profiling.rates import start_worker

        request, say = self.request, self.progress.say
        self.progress.phase("Measuring a few samples")
        began = time.perf_counter()
        run = self._stack.enter_context(executor(request.address, 1, request, say))
        start_worker(run, self.job())
        self._start_seconds = time.perf_counter() - began
        return run

    def estimate(self, work: Work, shards: Sequence[ShardPlan]) -> Estimate | None:
        """Estimate the cost of the shards; returns None if none is built, or all are linked."""
        target, table = work.target, work.target.table
        built = [shard for shard in shards if not shard.linked]
        if not built:
            return None
        from precache_workers.profiling.rates import RatesTask, time_rows

        fetches = [target.rows_of(s.shard).start + s.fetched for s in built]
        old = max(built, key=lambda shard: shard.reused)
        task = RatesTask.some_of(
            self.job(),
            table,
            np.concatenate(fetches),
            shapes=target.shapes,
            rows_per_shard=target.rows_per_shard,
            stored=old.stored if old.reused else None,
            barred=self.barred,
        )
        times = time_rows(self.run_tasks, task)
        return estimate(
            list(map(ShardWork.of, built, samples_read(table, fetches))),
            times,
            planned_cpus(self.request),
            listing=self.listed.seconds + self.probe_seconds,
            start=self._start_seconds,
            round_trip=_round_trip(self.store),
        )

    def plan(self, work: Work, shards: Sequence[ShardPlan], cost: Estimate | None) -> BuildPlan:
        """Count what the build does with the shards that are not done."""
        listed, target, table = self.listed, work.target, work.target.table
        current = read_log(self.store, newest=True).current
        reused = any(shard.read_nbytes + shard.linked_nbytes for shard in shards)
        versions = work.found.versions if reused else []
        if work.lost is not None:
            failed = len(target.committed().failures)
        else:
            failed = sum(shard.stay_failed for shard in shards)
            failed += Totals.of(work.receipts.values()).failed
        fresh = 0 if cost is None else len(cost.failed)
        if cost is not None and 0 < fresh == cost.samples:  # then all others may fail as well
            fresh = sum(len(shard.fetched) for shard in shards)
        return BuildPlan(
            version=target.version,
            state=_state(work),
            current=None if current is None else current.version,
            differences=self._differences(versions[0] if versions else None),
            keeps_rows=listed.placed.rows_per_shard is not None,
            base=versions[0] if versions else None,
            base_reason=self._base_reason(work, versions) if shards else "",
            samples=table.samples,
            ignored=listed.ignored,
            removed=len(table.removed),
            shards=target.shards,
            shards_skipped=target.shards - len(shards),
            shards_reused=sum(shard.linked for shard in shards),
            rows_retried=sum(shard.retried for shard in shards),
            rows_reused=sum(shard.rows_reused for shard in shards),
            rows_computed=sum(len(shard.fetched) for shard in shards),
            rows_compared=sum(shard.compared for shard in shards),
            fields={n: FieldRows.total(shard.fields[n] for shard in shards) for n in target.shapes},
            bytes_fetched=_fetched(work, shards, cost),
            bytes_read=sum(shard.read_nbytes for shard in shards),
            bytes_linked=sum(shard.linked_nbytes for shard in shards),
            bytes_written=_written(work, shards, cost),
            estimate=cost,
            hard_links=self.store.local("") is not None,
            rows_failed=failed,
            fails=fresh > 0 and failed + fresh > self.request.allowed_failures(table.samples),
            shards_compact=compact_shards(self.request, listed, target),
            compares=listed.compares,
            left_out=listed.left_out,
            examples=listed.examples,
            row_types=target.row_types,
            pixels=(*draws_in_words(listed.spec.declared), *self.pixels),
        )

    def _differences(self, base: str | None) -> BuildDifferences | None:
        """Compare to the current version; libraries are compared to those of the base."""
        versions, spec = list(stored_versions(self.store)), self.listed.spec
        if not versions:
            return None
        current, table = versions[0], None
        if current.attributes.rows_digest != spec.rows_digest:
            with contextlib.suppress(*UNREADABLE):
                table, *_ = current.read_rows()
        of_base = next((stored for stored in versions if stored.folder.name == base), current)
        return compare_with_committed(spec, current.attributes, table, of_base.attributes.libraries)

    def _base_reason(self, work: Work, versions: Sequence[str]) -> str:
        """Return the reason for the version of most reused rows, or why there is none."""
        if versions:
            others = ", ".join(map(short, versions[1:]))
            most = f"it has most of the rows; others are of {others}"
            return most if others else "all reused rows are of it"
        if work.lost is not None:
            return "lost objects are built again, with the same rows"
        if self.request.recompute:
            return "--recompute"
        if not any(stored_versions(self.store)):
            return "the store has no version yet"
        if not work.found.arrays:
            return "no version has a field by these ops, code and libraries, or the first of them"
        if self.listed.fetches_labels:
            return (
                "labels come with the samples, and no version has those that they bring for this "
                "recipe; an attribute `targets` of the dataset has them all"
            )
        return "no version has these samples"


def planned_cpus(request: Request) -> int:
    """Return how many tasks of the build run at a time, on the cluster that this process joined."""
    if request.address == "serial":
        return 1
    if is_joined(request.address):
        from precache_workers.cluster.nodes import cluster_cpus

        return max(1, int(cluster_cpus() / request.cpus_per_task))
    return request.cpus or cores()


def _round_trip(store: Folder) -> float:
    """Return the seconds of a request to a store, or of a small file on a local disk."""
    if store.local("") is not None:
        return FILE_SECONDS
    began = time.perf_counter()
    store.size(ROOT)
    return time.perf_counter() - began


def _state(work: Work) -> PlanState:
    if work.lost is not None:
        return "repair" if work.todo else "nothing"
    return "build" if work.target.folder.size(DESCRIPTION) is None else "continue"


def _fetched(work: Work, shards: Sequence[ShardPlan], cost: Estimate | None) -> int | None:
    """Bytes of the samples, as listed, else by the estimate."""
    target = work.target
    listed = [target.table.sizes[target.rows_of(s.shard).start + s.fetched] for s in shards]
    sizes = np.concatenate([*listed, np.zeros(0, np.int64)])
    if (sizes >= 0).all():
        return int(sizes.sum())
    return None if cost is None else cost.fetched


def _written(work: Work, shards: Sequence[ShardPlan], cost: Estimate | None) -> int | None:
    if work.lost is not None:
        return sum(leaf.size for leaf in work.lost.values())
    if all(shard.linked for shard in shards):
        return 0
    return None if cost is None else cost.written
