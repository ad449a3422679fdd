"""A build from listing to commit; the driver never touches a pixel."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from precache.codecs.image import load_zstd
from precache.errors import (
    BuildError,
    CrashError,
    FetchError,
    GoneError,
    PrecacheError,
    StorageError,
    UsageError,
)
from precache.maintenance.gc import remove_version
from precache.maintenance.scan import recorded_version
from precache.messages import shown
from precache.storage.base import left_out_text
from precache.storage.open import open_folder
from precache.store.build_status import remove_left_scratch, remove_scratch
from precache.store.commit_log import ROOT, Code, append_commit, require_create_only, source_to_keep
from precache.store.lease import deciding, remove_ended
from precache.store.open import open_own
from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED
from precache.units import size
from precache_workers.cluster.executor import Run, executor, is_joined
from precache_workers.cluster.shared_disks import require_shared
from precache_workers.driver.commit import commit, failures, tidy_current
from precache_workers.driver.heartbeat import BuildLease
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.repair import (
    give_to_twins,
    is_other_encoder,
    mend_small,
    objects_of,
    recorded_of,
    restate,
    take_from_twins,
)
from precache_workers.driver.report import check_reports, report_failure, write_reports
from precache_workers.driver.results import committed_result, result_of
from precache_workers.driver.run_monitor import RunMonitor
from precache_workers.driver.shard_log_writer import keep_followed
from precache_workers.ops.behaviour import forgetting
from precache_workers.ops.identity import behaviours
from precache_workers.planning.committed import flaws_of, is_committed, is_whole
from precache_workers.planning.listing import ListedSource, list_rows
from precache_workers.planning.request import BuildResult, Request, check_request
from precache_workers.planning.reuse import BaseShard, BaseVersion
from precache_workers.planning.rows import default_max_failures
from precache_workers.planning.target_version import (
    SCRATCH,
    TargetVersion,
    VersionSpec,
    receipt_name,
)
from precache_workers.planning.work import (
    MeasuredRows,
    Work,
    failed_rows,
    find_work,
    goal_of,
    is_tried_again,
    remaining,
)
from precache_workers.sources import base as sources

if TYPE_CHECKING:  # loads torch and the decoders, which a build with nothing to do has no use for
    from precache_workers.shards.probe import ProbeTask
    from precache_workers.shards.shard_objects import Recorded
    from precache_workers.shards.shard_task import Job, ShardTask

LIBRARIES = ("PIL", "cv2", "simplejpeg")
"""Modules that tasks load and the driver does not."""

ATTEMPTS = 3
"""At a shard whose samples could not be fetched."""


def run_build(request: Request, shown: bool, listed: ListedSource | None = None) -> BuildResult:
    """Build, or finish, the version that the request describes, and make it current.

    Parameters
    ----------
    shown
        Whether progress goes to standard error.
    listed
        The source, where it was listed a moment ago or need not be for its rows.

    Raises
    ------
    UsageError
        The request cannot be met, found before anything is written.
    BuildError
        Too many samples failed, or some could not be fetched; what was done is kept.
    """
    started = time.perf_counter()
    check_request(request)
    check_reports(request.reports)
    with BuildProgress(shown) as progress, forgetting():
        account = RunMonitor(request, progress)
        build = _Build(request, progress, account, listed)
        try:
            result = replace(build.run(), left_out=build.listed.left_out)
        except BaseException as error:
            report_failure(account, error, progress.say)
            raise
        timings = {**build.timings, **result.timings}
        result = replace(result, seconds=time.perf_counter() - started, timings=timings)
        try:
            write_reports(account, result)
        except StorageError as error:
            raise StorageError(
                f"version {result.version[:8]} is complete and current; what is missing: {error}"
            ) from None
    return result


class _Build:
    """One run of a build; its steps share the request, the store and the progress display."""

    def __init__(
        self,
        request: Request,
        progress: BuildProgress,
        account: RunMonitor,
        listed: ListedSource | None = None,
    ) -> None:
        self.request = request
        self.progress = progress
        self.account = account
        self.store = open_folder(request.store, request.storage_options)
        self.source = sources.open_source(
            request.source,
            request.storage_options,
            follow_links=request.follow_links,
            most_bytes=request.max_sample_bytes,
        )
        self.joined = is_joined(request.address)
        self.given = listed
        self.listed: ListedSource
        self.barred: dict[str, str] = dict(listed.barred) if listed else {}
        self.timings: dict[str, float] = {}
        self.again: set[int] = set()

    def run(self) -> BuildResult:
        self.listed = listed = self._list()
        spec = listed.spec
        goal = goal_of(self.request, self.store, spec)
        if goal is not None and is_whole(goal) and not is_tried_again(self.request, goal):
            return self._nothing_to_do(goal)
        began = time.perf_counter()
        self.progress.phase("Starting")
        request = self.request
        how = request.address, request.cpus, request.placement, self.progress.say
        with executor(*how) as run, contextlib.ExitStack() as stack:
            stack.callback(self.account.end)  # while Ray, if it is joined, can be told
            self.timings["start"] = time.perf_counter() - began
            if self.joined and isinstance(self.source, sources.FolderSource):
                first = next(spec.table.present_keys())
                require_shared(request.placement, self.source.folder, first)
            with contextlib.suppress(GoneError):  # then it is made
                if goal is not None and is_committed(goal):
                    self._mend(run, goal)
            measure = functools.partial(self._measure, run)
            work = find_work(request, self.store, listed, goal, measure)
            if not work.committed:
                return self._make(run, work)
            return self._repair(run, work) if work.todo else self._nothing_to_do(work.goal)

    def _mend(self, run: Run, goal: TargetVersion) -> None:
        """Have the small objects of a committed version as they were."""
        flaws = flaws_of(goal)
        if flaws:
            self.progress.say(f"Mending {', '.join(flaw.name for flaw in flaws)}")
            mend_small(self.store, goal, flaws, self._job(), run)

    def _nothing_to_do(self, goal: TargetVersion) -> BuildResult:
        failed = open_own(goal.folder).holes.values()
        self._judge([each for each in failed if each[1] != REMOVED], len(goal.table))
        append_commit(
            self.store, goal.version, source_to_keep(self.request.source), self.listed.code
        )
        remove_left_scratch(goal.folder)
        remove_ended(self.store)
        self.progress.finish(f"Nothing to do: version {goal.version[:8]} is complete")
        return committed_result(goal, self.listed.ignored)

    def _made_by(self) -> tuple[str | None, Code]:
        """Source and code, as the commit log has them."""
        return source_to_keep(self.request.source), self.listed.code

    def _list(self) -> ListedSource:
        listed = self.given or list_rows(
            self.request, self.store, self.source, self.progress.listed
        )
        table = listed.spec.table
        if listed.placed.changed:
            self.progress.say(listed.placed.changed)
        classes = f" in {len(table.classes)} classes" if table.classes else ""
        ignored = f"; {listed.ignored} not images by suffix" if listed.ignored else ""
        ignored += left_out_text(listed.left_out)
        place = shown(self.request.source)
        self.progress.say(f"{len(table):,} samples{classes} in {place}{ignored}")
        for line in listed.unfollowed():
            self.progress.say(line)
        self.timings["list"] = listed.seconds
        return listed

    def _measure(self, run: Run, spec: VersionSpec) -> MeasuredRows:
        """Row shapes and stored bytes, from a few samples."""
        if missing := next((name for name in LIBRARIES if find_spec(name) is None), None):
            raise UsageError(f"building needs {missing}: pip install 'precache[workers]'")
        load_zstd()
        from precache_workers.shards.probe import measured, probe_task, run_probe

        self.progress.phase("Measuring a few samples")
        task = probe_task(self._job(), spec.table)
        [(asked, probe)] = run(run_probe, [task])
        self.barred |= asked.barred
        if isinstance(probe, CrashError):
            self._bar_killers(run, [task])
            [(_, probe)] = run(run_probe, [replace(task, barred=self.barred)])
        return measured(probe, self.request.source)

    def _bar_killers(self, run: Run, tasks: Sequence[ShardTask | ProbeTask]) -> None:
        from precache_workers.driver.suspects import Trial, find_killers

        self.progress.say("Workers died: looking for samples that kill them")
        trials = [Trial(task.job, task.keys, task.sizes) for task in tasks]
        self.barred |= find_killers(run, trials)

    def _job(self) -> Job:
        from precache_workers.shards.shard_task import Job

        request, listed = self.request, self.listed
        path = request.import_path
        recipe = listed.spec.recipe
        labels, pinned = listed.fetches_labels, listed.pinned
        same = listed.digests, behaviours(recipe)
        return Job(self.source, recipe, path, *same, labels, pinned, request.sample_timeout)

    def _check_space(self, needed: int) -> None:
        free = self.store.free_bytes()
        left = "" if free is None else f"; {size(free)} free"
        self.progress.say(f"About {size(needed)} to be stored{left}")
        if free is not None and needed > free and self.request.check_space:
            raise StorageError(
                f"{shown(self.request.store)} needs about {size(needed)} and its disk has "
                f"{size(free)} free; choose another disk, a smaller --resize or --codec image, or "
                "go ahead with --no-space-check"
            )

    def _make(self, run: Run, work: Work) -> BuildResult:
        if work.needed is not None:
            self._check_space(work.needed)
        goal = work.goal
        require_create_only(goal.folder, SCRATCH)
        tidy_current(self.store)
        with contextlib.ExitStack() as stack:
            try:
                with deciding(self.store, goal.version):
                    lease = stack.enter_context(BuildLease(goal.folder))
                    started = self._start(lease, work)
                if started is not None:
                    return self._make_under(lease, run, started)
            except BuildError:
                if not is_whole(goal):
                    raise
        self.account.end()
        return self._nothing_to_do(goal)  # another build was first

    def _start(self, lease: BuildLease, work: Work) -> Work | None:
        """What is left to do, as the version stands now; None where it was committed meanwhile.

        A build that makes a version alone removes first what builds that were cut off left of the
        shards that it will make.
        """
        goal = work.goal
        document = goal.folder.get(ROOT)
        if document is not None:
            if recorded_version(document) == goal.version:
                return None
            goal.folder.remove(ROOT)  # it is damaged
        goal.begin(refreshes=self.listed.refreshes, recompute=self.request.recompute)
        left = remaining(work)
        if others := lease.others():
            who = ", ".join(str(each.holder) for each in others.values())
            self.progress.say(f"Another build makes the same version ({who}): both go on")
        else:
            _remove_shards(goal, left.todo)
        return left

    def _make_under(self, lease: BuildLease, run: Run, work: Work) -> BuildResult:
        goal, origin = work.goal, work.origin
        self.again = _tried_again(work)
        if self.again:
            self.progress.say(_retry_line(work, self.again))
        receipts = dict(work.receipts)
        skipped = len(receipts)
        done = sum(len(goal.rows_of(shard)) for shard in receipts)
        self.progress.begin(done, len(goal.table))
        if skipped:
            self.progress.say(f"{skipped} of {goal.shards} shards are there already")
        made = self._run_shards(run, goal, lease, work.todo, receipts, origin=origin)
        self.account.end()
        rows = sum(receipt.rows_reused for receipt in made)
        if rows and origin is not None:
            self.progress.say(
                f"{rows:,} rows and {sum(receipt.reused for receipt in made)} whole shards were "
                f"taken over from version {origin.version.id[:8]}"
            )
        mended = len(self.again - failures(receipts.values()).keys())
        if work.failed is not None and not mended:
            return self._nothing_mended(lease, goal, work.failed, made)
        self.progress.phase("Committing")
        keep_followed(self.store, goal, receipts)
        commit(self.store, goal, receipts, *self._made_by())
        self._clean_up(lease, goal)
        self.progress.finish(f"Version {goal.version[:8]} is complete")
        return replace(result_of(goal, receipts, made, self.listed.ignored), mended=mended)

    def _clean_up(self, lease: BuildLease, goal: TargetVersion) -> None:
        """Remove what served the build alone; what cannot be removed now, `gc` removes."""
        lease.end()
        try:
            remove_scratch(goal.folder)
        except StorageError as error:
            self.progress.say(f"The version is committed, but {error}")

    def _nothing_mended(
        self, lease: BuildLease, goal: TargetVersion, before: TargetVersion, made: Sequence[Receipt]
    ) -> BuildResult:
        with deciding(self.store, goal.version):
            lease.end()  # of two that mended nothing, the second removes the version
            if goal.folder.size(ROOT) is None and not lease.others():
                remove_version(self.store, goal.version)
        append_commit(
            self.store, before.version, source_to_keep(self.request.source), self.listed.code
        )
        self.progress.finish(f"Nothing was mended: version {before.version[:8]} stays as it is")
        result = committed_result(before, self.listed.ignored)
        return replace(result, cpu_seconds=sum(receipt.cpu_seconds for receipt in made))

    def _repair(self, run: Run, work: Work) -> BuildResult:
        """Have missing objects of a committed version again, in all versions that share them.

        Their rows must be what they were.
        """
        goal, lost = work.goal, dict(work.lost or {})
        for each in take_from_twins(self.store, goal, lost):
            del lost[each]
        todo = sorted({shard for _, shard in lost})
        recorded = recorded_of(goal, lost)
        if any(is_other_encoder(goal, field) for field in {field for field, _ in lost}):
            self.progress.say(
                f"Version {goal.version[:8]} was encoded by another release of a library than the "
                "one here, which may make other bytes: rows are compared instead"
            )
        self.progress.begin(0, sum(len(goal.rows_of(shard)) for shard in todo))
        with BuildLease(goal.folder) as lease:
            receipts: dict[int, Receipt] = {}
            try:
                made = self._run_shards(run, goal, lease, todo, receipts, recorded)
            finally:  # also of those that were made before one failed
                remade = objects_of(receipts.values())
                others = give_to_twins(self.store, goal, lost, remade)
                restate(self.store, goal.folder, lost, remade)
            self._mend(run, goal)
        if others:
            names = ", ".join(name[:8] for name in others)
            self.progress.say(f"Mended in versions that share what was lost, too: {names}")
        append_commit(
            self.store, goal.version, source_to_keep(self.request.source), self.listed.code
        )
        remove_left_scratch(goal.folder)
        self.progress.finish(f"Version {goal.version[:8]} is complete again")
        result = committed_result(goal, self.listed.ignored)
        burnt = sum(receipt.cpu_seconds for receipt in made)
        return replace(result, shards_skipped=goal.shards - len(made), cpu_seconds=burnt)

    def _run_shards(
        self,
        run: Run,
        goal: TargetVersion,
        lease: BuildLease,
        todo: Sequence[int],
        receipts: dict[int, Receipt],
        lost: Mapping[int, Recorded] | None = None,
        origin: BaseVersion | None = None,
    ) -> list[Receipt]:
        """Make shards until all are there; adds to `receipts` and returns the new ones.

        Parameters
        ----------
        lost
            Shard -> what is recorded of it, where only lost objects are to be made again.
        origin
            A version whose rows are taken over where the samples are the same.
        """
        from precache_workers.shards.takeover import make_shard

        made: list[Receipt] = []
        self.account.begin(goal, todo, receipts, followed=lost is None)
        failed = _failed(goal, receipts.values())
        self._judge(failed, len(goal.table))
        if self.joined:
            require_shared(self.request.placement, goal.folder, lease.name)
        task_of = functools.partial(self._task, self._job(), goal, lost, origin, lease.name)
        for attempt in range(1, ATTEMPTS + 1):
            errors: dict[int, FetchError | CrashError] = {}
            crashed: list[ShardTask] = []
            accept = self.request.accept_missing and attempt == ATTEMPTS
            tasks = (task_of(shard, accept) for shard in todo)
            for task, outcome in run(make_shard, tasks, None, len(todo)):
                self.barred |= task.barred  # of what hung
                if isinstance(outcome, FetchError | CrashError):
                    errors[task.shard] = outcome
                    crashed += [task] * isinstance(outcome, CrashError)
                elif isinstance(outcome, PrecacheError):
                    raise outcome
                else:
                    receipts[task.shard] = outcome
                    made.append(outcome)
                    self.account.add(outcome)
                    failed += _failed(goal, [outcome])
                    self._judge(failed, len(goal.table))
                    self.progress.advance(len(goal.rows_of(task.shard)), len(failed))
            if not errors:
                return made
            todo = sorted(errors)
            if crashed and attempt < ATTEMPTS:
                self._bar_killers(run, crashed)
        kept = "all is computed again by" if self.request.recompute else "the rest is kept:"
        raise BuildError(
            f"{len(todo)} of {goal.shards} shards are not done: {errors[todo[0]]}; {kept} run the "
            "same command again, or with --accept-missing to leave holes for what cannot be fetched"
        )

    def _task(
        self,
        job: Job,
        goal: TargetVersion,
        lost: Mapping[int, Recorded] | None,
        origin: BaseVersion | None,
        lease: str,
        shard: int,
        accept_missing: bool,
    ) -> ShardTask:
        from precache_workers.shards.shard_task import ShardTask

        names = goal.shapes if lost is None else lost[shard].objects
        rows = goal.rows_of(shard)
        part = slice(rows.start, rows.stop)
        return ShardTask(
            job,
            goal.folder,
            goal.shapes,
            {name: goal.object_name(name, shard) for name in names},
            goal.rows_per_shard,
            shard,
            list(goal.table.keys[part]),
            goal.table.sizes[part].tolist(),
            accept_missing,
            None if lost is None else lost[shard],
            self._offer(goal, shard, origin),
            frozenset(row - rows.start for row in goal.table.removed.intersection(rows)),
            lease,
            self.store,
            barred={key: self.barred[key] for key in self.barred.keys() & goal.table.keys[part]},
            may_fail=frozenset(row - rows.start for row in self.again.intersection(rows)),
        )

    def _offer(
        self, goal: TargetVersion, shard: int, origin: BaseVersion | None
    ) -> BaseShard | None:
        decides = self.source.content_decides
        return None if origin is None else origin.offer(goal, shard, decides)

    def _judge(self, failed: Sequence[tuple[str, str]], samples: int) -> None:
        """Raise where more samples failed than allowed."""
        skip, limit = self.request.on_error == "skip", self.request.max_failures
        allowed = (default_max_failures(samples) if limit is None else limit) * skip
        if len(failed) <= allowed:
            return
        shown = "; ".join(f"{key}: {reason}" for key, reason in failed[:5])
        way_out = (
            f"the limit is {allowed}: mend them, or raise --max-failures"
            if skip
            else "mend or remove it, or use --on-error skip"
        )
        raise BuildError(f"{len(failed)} of {samples} samples failed ({shown}); {way_out}")


def _remove_shards(goal: TargetVersion, shards: Sequence[int]) -> None:
    left = goal.folder.sizes() if shards else {}
    for shard in shards:
        names = [receipt_name(shard), *(goal.object_name(each, shard) for each in goal.shapes)]
        for name in left.keys() & set(names):
            goal.folder.remove(name)


def _tried_again(work: Work) -> set[int]:
    """Rows of samples that had failed, and are tried again."""
    if work.failed is not None:
        return failed_rows(work.failed)
    origin = work.origin
    if origin is None or not origin.retries:
        return set()
    return {row for row, why in origin.holes.items() if why != REMOVED} - work.goal.table.removed


def _retry_line(work: Work, again: Collection[int]) -> str:
    """How many samples that had failed are tried in this run, and how many are not."""
    done = sum(row // work.goal.rows_per_shard in work.receipts for row in again)
    more = f"; {done:,} more are in shards that were done before this run" if done else ""
    return f"{len(again) - done:,} samples that failed before are tried again{more}"


def _failed(goal: TargetVersion, receipts: Iterable[Receipt]) -> list[tuple[str, str]]:
    """Key and reason of every sample that failed, in row order."""
    return [(goal.table.keys[row], why) for row, why in failures(receipts).items()]
