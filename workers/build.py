"""A build from listing to commit; the driver never touches a pixel."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precache.errors import (
    BuildError,
    CrashError,
    FetchError,
    PrecacheError,
    SampleError,
    SourceError,
    StorageError,
)
from precache.layout import RowShape, rows_per_shard
from precache.receipts import Receipt
from precache.report import size
from precache.rowtable import REMOVED
from precache.storage import open_folder
from precache.store import BUILD, append_commit, open_own
from workers import sources
from workers.account import Account
from workers.buildreport import check_reports, report_failure, write_reports
from workers.cluster import Run, executor, is_joined
from workers.commit import commit, failures
from workers.goal import SCRATCH, Goal, Recipe, find_goal
from workers.plan import (
    deciding_versions,
    default_max_failures,
    function_hashes,
    sample_for_probe,
    shards_to_do,
)
from workers.progress import BuildProgress
from workers.repair import give_to_twins, take_from_twins
from workers.request import BuildResult, Request, check_request
from workers.results import committed_result, result_of
from workers.reuse import Offer, Origin, find_origin, place_rows
from workers.sharing import require_shared
from workers.standing import is_readable, is_whole, lost_objects, read_receipts

if TYPE_CHECKING:  # loads torch and the decoders, which a build with nothing to do has no use for
    from workers.probe import ProbeTask
    from workers.shard_task import Job, ShardTask

PROBE_SAMPLES = 24
LARGEST_SHARD_BYTES = 512 << 20
"""Raw, of one field: above, rows are laid into shards anew."""
ATTEMPTS = 3
"""At a shard whose samples could not be fetched."""


def run_build(request: Request, shown: bool) -> BuildResult:
    """Build, or finish, the version that the request describes, and make it current.

    Parameters
    ----------
    shown
        Whether progress goes to standard error.

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
    with BuildProgress(shown) as progress:
        account = Account(request, progress)
        build = _Build(request, progress, account)
        try:
            result = build.run()
        except BaseException as error:
            report_failure(account, error, progress.say)
            raise
        timings = {**build.timings, **result.timings}
        result = replace(result, seconds=time.perf_counter() - started, timings=timings)
        write_reports(account, result)
    return result


class _Build:
    """One run of a build; its steps share the request, the store and the progress display."""

    def __init__(self, request: Request, progress: BuildProgress, account: Account) -> None:
        self.request = request
        self.progress = progress
        self.account = account
        self.store = open_folder(request.store, request.storage_options)
        self.source = sources.open_source(request.source, request.storage_options)
        self.joined = is_joined(request.address)
        self.ignored = 0
        self.barred: dict[str, str] = {}
        self.code: Mapping[str, str] = {}
        self.timings: dict[str, float] = {}
        self.inherited: int | None = None

    def run(self) -> BuildResult:
        recipe = self._list()
        goal = find_goal(self.store, recipe, self.request.shard_samples)
        if goal is not None and is_whole(goal):
            return self._nothing_to_do(goal)
        began = time.perf_counter()
        self.progress.phase("Starting")
        request = self.request
        with executor(request.address, request.cpus, request.placement, self.progress.say) as run:
            self.timings["start"] = time.perf_counter() - began
            if self.joined and isinstance(self.source, sources.FolderSource):
                first = next(recipe.table.present_keys())
                require_shared(request.placement, self.source.folder, first)
            origin = self._find_origin(recipe)
            goal = goal or self._goal(run, recipe, origin)
            if is_readable(goal):
                return self._repair(run, goal) if lost_objects(goal) else self._nothing_to_do(goal)
            return self._make(run, goal, origin)

    def _nothing_to_do(self, goal: Goal) -> BuildResult:
        failed = open_own(goal.folder).holes.values()
        self._judge([each for each in failed if each[1] != REMOVED], len(goal.table))
        append_commit(self.store, goal.version)
        goal.folder.remove(BUILD)
        self.progress.finish(f"Nothing to do: version {goal.version[:8]} is complete")
        return committed_result(goal, self.ignored)

    def _list(self) -> Recipe:
        began = time.perf_counter()
        request = self.request
        listing = self.source.list(self.progress.listed)
        self.ignored, table = listing.ignored, listing.table
        if request.labels is not None:
            table = sources.override_labels(table, request.labels)
        if request.classes is not None:
            if self.source.labels_with_samples and (table.labels < 0).all():
                raise SourceError(
                    f"--classes {request.classes} numbers labels before samples are fetched, and "
                    f"{request.source} has no targets; give it targets, or --labels"
                )
            frozen = sources.read_classes(request.classes, request.storage_options)
            table = sources.freeze_classes(table, frozen, request.classes)
        placed = place_rows(self.store, table, request.keep_order, request.compact, self._may_have)
        table, self.inherited = placed.table, placed.rows_per_shard
        if placed.changed:
            self.progress.say(placed.changed)
        classes = f" in {len(table.classes)} classes" if table.classes else ""
        ignored = f"; {self.ignored} not images by suffix" if self.ignored else ""
        self.progress.say(f"{len(table):,} samples{classes} in {request.source}{ignored}")
        self.code = function_hashes(request.pipeline)
        fingerprint = request.pipeline.fingerprint(deciding_versions(request.pipeline))
        recipe = Recipe(request.pipeline, fingerprint, table, table.digest())
        self.timings["list"] = time.perf_counter() - began
        return recipe

    def _find_origin(self, recipe: Recipe) -> Origin | None:
        """A version whose rows may be taken over: samples that bring labels must be fetched."""
        if self.request.recompute or self._job().fetch_labels:
            return None
        return find_origin(self.store, recipe.pipeline, recipe.table)

    def _goal(self, run: Run, recipe: Recipe, origin: Origin | None) -> Goal:
        """The version to be made; one that descends from another keeps its rows a shard."""
        shapes = origin.shapes() if origin else {}
        if origin is None or shapes.keys() != recipe.pipeline.fields.keys():
            return self._probe(run, recipe, shapes)
        self._check_space(origin.nbytes_to_write(len(recipe.table), recipe.pipeline))
        return Goal.of(self.store, recipe, self._per_shard(recipe, shapes), shapes)

    def _per_shard(self, recipe: Recipe, shapes: Mapping[str, RowShape]) -> int:
        """Rows of a shard: as many as before, unless these rows are so large that it bursts."""
        nbytes = [row.nbytes for row in shapes.values()]
        if self.inherited and self.inherited * max(nbytes) <= LARGEST_SHARD_BYTES:
            return self.inherited
        return rows_per_shard(len(recipe.table), nbytes, self.request.shard_samples)

    def _may_have(self, per_shard: int, shapes: Mapping[str, RowShape]) -> bool:
        """Whether shards of an earlier version hold as many rows as are asked for."""
        wanted = self.request.shard_samples
        nbytes = [row.nbytes for row in shapes.values()]
        return wanted is None or wanted <= per_shard <= rows_per_shard(0, nbytes, wanted)

    def _probe(self, run: Run, recipe: Recipe, known: Mapping[str, RowShape]) -> Goal:
        """Learn other row shapes from a few samples, and refuse a disk that is too small."""
        from workers.probe import ProbeTask, run_probe

        table = recipe.table
        rows = sample_for_probe(table, PROBE_SAMPLES)
        keys, sizes = [table.keys[row] for row in rows], table.sizes[rows].tolist()
        self.progress.phase("Measuring a few samples")
        task = ProbeTask(self._job(), keys, sizes)
        [(_, probe)] = run(run_probe, [task])
        if isinstance(probe, CrashError):
            self._bar_killers(run, [task])
            [(_, probe)] = run(run_probe, [task.without(self.barred)])
        if isinstance(probe, SampleError):
            raise SourceError(f"{self.request.source}: {probe}") from None
        if isinstance(probe, PrecacheError):
            raise probe
        self._check_space(int(probe.stored_per_row * len(table)))
        shapes = {**probe.shapes, **known}
        return Goal.of(self.store, recipe, self._per_shard(recipe, shapes), shapes)

    def _bar_killers(self, run: Run, tasks: Sequence[ShardTask | ProbeTask]) -> None:
        from workers.suspects import Trial, find_killers

        self.progress.say("Workers died: looking for samples that kill them")
        trials = [Trial(task.job, task.keys, task.sizes) for task in tasks]
        self.barred |= find_killers(run, trials)

    def _job(self) -> Job:
        from workers.shard_task import Job

        request = self.request
        relabelled = request.labels is not None or request.classes is not None
        fetch_labels = self.source.labels_with_samples and not relabelled
        return Job(self.source, request.pipeline, request.import_path, self.code, fetch_labels)

    def _check_space(self, needed: int) -> None:
        free = self.store.free_bytes()
        left = "" if free is None else f"; {size(free)} free"
        self.progress.say(f"About {size(needed)} to be stored{left}")
        if free is not None and needed > free and self.request.check_space:
            raise StorageError(
                f"{self.request.store} needs about {size(needed)} and its disk has {size(free)} "
                "free; choose another disk, a smaller --resize or --codec image, or go ahead with "
                "--no-space-check"
            )

    def _make(self, run: Run, goal: Goal, origin: Origin | None) -> BuildResult:
        goal.begin()
        receipts = read_receipts(goal)
        if self.request.recompute:
            receipts = {n: each for n, each in receipts.items() if not each.rows_reused}
        todo = shards_to_do(goal.shards, receipts, goal.sizes())
        receipts = {shard: receipts[shard] for shard in set(range(goal.shards)) - set(todo)}
        skipped = len(receipts)
        done = sum(len(goal.rows_of(shard)) for shard in receipts)
        self.progress.begin(done, len(goal.table))
        if skipped:
            self.progress.say(f"{skipped} of {goal.shards} shards are there already")
        made = self._run_shards(run, goal, todo, receipts, origin=origin)
        rows = sum(receipt.rows_reused for receipt in made)
        if rows and origin is not None:
            self.progress.say(
                f"{rows:,} rows and {sum(receipt.reused for receipt in made)} whole shards were "
                f"taken over from version {origin.version.id[:8]}"
            )
        self.progress.phase("Committing")
        commit(self.store, goal, receipts)
        self.progress.finish(f"Version {goal.version[:8]} is complete")
        return result_of(goal, receipts, made, self.ignored)

    def _repair(self, run: Run, goal: Goal) -> BuildResult:
        """Have missing objects of a committed version again, in all versions that share them.

        They must be what they were.
        """
        lost = lost_objects(goal)
        for each in take_from_twins(self.store, goal, lost):
            del lost[each]
        todo = sorted({shard for _, shard in lost})
        self.progress.begin(0, sum(len(goal.rows_of(shard)) for shard in todo))
        made = self._run_shards(run, goal, todo, {}, lost)
        give_to_twins(self.store, goal, lost)
        append_commit(self.store, goal.version)
        goal.folder.remove(BUILD)
        self.progress.finish(f"Version {goal.version[:8]} is complete again")
        result = committed_result(goal, self.ignored)
        burnt = sum(receipt.cpu_seconds for receipt in made)
        return replace(result, shards_skipped=goal.shards - len(made), cpu_seconds=burnt)

    def _run_shards(
        self,
        run: Run,
        goal: Goal,
        todo: Sequence[int],
        receipts: dict[int, Receipt],
        lost: Mapping[tuple[str, int], tuple[int, int]] | None = None,
        origin: Origin | None = None,
    ) -> list[Receipt]:
        """Make shards until all are there; adds to `receipts` and returns the new ones.

        Parameters
        ----------
        lost
            (field, shard) -> size and XXH3-64, where only these are to be made, as they were.
        origin
            A version whose rows are taken over where the samples are the same.
        """
        from workers.takeover import make_shard

        made: list[Receipt] = []
        self.account.begin(goal, todo, receipts)
        self._check_failures(goal, receipts)
        task_of = functools.partial(self._task, goal, lost, origin, self._permit(goal))
        for attempt in range(1, ATTEMPTS + 1):
            errors: dict[int, FetchError | CrashError] = {}
            crashed: list[ShardTask] = []
            accept = self.request.accept_missing and attempt == ATTEMPTS
            tasks = (task_of(shard, accept) for shard in todo)
            for task, outcome in run(make_shard, tasks):
                if isinstance(outcome, FetchError | CrashError):
                    errors[task.shard] = outcome
                    crashed += [task] * isinstance(outcome, CrashError)
                elif isinstance(outcome, PrecacheError):
                    raise outcome
                else:
                    receipts[task.shard] = outcome
                    made.append(outcome)
                    self.account.add(outcome)
                    failed = self._check_failures(goal, receipts)
                    self.progress.advance(len(goal.rows_of(task.shard)), failed)
            if not errors:
                return made
            todo = sorted(errors)
            if crashed and attempt < ATTEMPTS:
                self._bar_killers(run, crashed)
        raise BuildError(
            f"{len(todo)} of {goal.shards} shards are not done: {errors[todo[0]]}. The rest is "
            "kept: run the same command again, or with --accept-missing to leave holes for what "
            "cannot be fetched"
        )

    def _task(
        self,
        goal: Goal,
        lost: Mapping[tuple[str, int], tuple[int, int]] | None,
        origin: Origin | None,
        permit: str | None,
        shard: int,
        accept_missing: bool,
    ) -> ShardTask:
        from workers.shard_task import ShardTask

        names = [name for name in goal.shapes if lost is None or (name, shard) in lost]
        rows = goal.rows_of(shard)
        part = slice(rows.start, rows.stop)
        return ShardTask(
            self._job(),
            goal.folder,
            goal.shapes,
            {name: goal.object_name(name, shard) for name in names},
            goal.rows_per_shard,
            shard,
            list(goal.table.keys[part]),
            goal.table.sizes[part].tolist(),
            accept_missing,
            {name: lost[name, shard] for name in names} if lost else {},
            self._offer(goal, shard, origin),
            {key: self.barred[key] for key in self.barred.keys() & goal.table.keys[part]},
            frozenset(row - rows.start for row in goal.table.removed if row in rows),
            permit,
        )

    def _offer(self, goal: Goal, shard: int, origin: Origin | None) -> Offer | None:
        decides = self.source.content_decides
        return None if origin is None else origin.offer(goal, shard, decides)

    def _permit(self, goal: Goal) -> str | None:
        """On a cluster, an object that is there while this build goes on: without it no task of
        this build writes, on a disk that is not the store's, or when all is done."""
        if not self.joined:
            return None
        name = f"{BUILD}/permits/{uuid.uuid4().hex}"
        goal.folder.put(name, [b"1"], scratch=SCRATCH)
        require_shared(self.request.placement, goal.folder, name)
        return name

    def _check_failures(self, goal: Goal, receipts: Mapping[int, Receipt]) -> int:
        """How many samples failed; raises where that is more than allowed."""
        reasons = failures(list(receipts.values()))
        self._judge([(goal.table.keys[row], why) for row, why in reasons.items()], len(goal.table))
        return len(reasons)

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
