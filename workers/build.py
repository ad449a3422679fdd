"""A build from listing to commit; the driver never touches a pixel."""

from __future__ import annotations

import functools
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from precache.layout import rows_per_shard
from precache.receipts import Receipt
from precache.report import size
from precache.storage import open_folder
from precache.store import BUILD, append_commit, open_own
from workers import sources
from workers.cluster import Run, executor, is_joined
from workers.commit import channel_statistics, commit, holes
from workers.goal import SCRATCH, Goal, Recipe, find_goal
from workers.plan import (
    deciding_versions,
    default_max_failures,
    function_hashes,
    order_rows,
    sample_for_probe,
    shards_to_do,
)
from workers.progress import BuildProgress
from workers.request import BuildResult, Request, check_request
from workers.reuse import Earlier, find_earlier
from workers.sharing import require_shared
from workers.standing import is_readable, is_whole, lost_objects, read_receipts

if TYPE_CHECKING:  # loads torch and the decoders, which a build with nothing to do has no use for
    from workers.probe import ProbeTask
    from workers.shard_task import Job, ShardTask

PROBE_SAMPLES = 24
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
    with BuildProgress(shown) as progress:
        build = _Build(request, progress)
        result = build.run()
    timings = {**build.timings, **result.timings}
    return replace(result, seconds=time.perf_counter() - started, timings=timings)


class _Build:
    """One run of a build; its steps share the request, the store and the progress display."""

    def __init__(self, request: Request, progress: BuildProgress) -> None:
        self.request = request
        self.progress = progress
        self.store = open_folder(request.store, request.storage_options)
        self.source = sources.open_source(request.source, request.storage_options)
        self.joined = is_joined(request.address)
        self.ignored = 0
        self.barred: dict[str, str] = {}
        self.code: Mapping[str, str] = {}
        self.timings: dict[str, float] = {}

    def run(self) -> BuildResult:
        recipe = self._list()
        goal = find_goal(self.store, recipe, self.request.shard_samples)
        if goal is not None and is_whole(goal):
            self._judge(list(open_own(goal.folder).holes.values()), len(goal.table))
            append_commit(self.store, goal.version)
            goal.folder.remove(BUILD)
            self.progress.finish(f"Nothing to do: version {goal.version[:8]} is complete")
            return _committed_result(goal, self.ignored)
        began = time.perf_counter()
        self.progress.phase("Starting")
        request = self.request
        with executor(request.address, request.cpus, request.placement, self.progress.say) as run:
            self.timings["start"] = time.perf_counter() - began
            if self.joined and isinstance(self.source, sources.FolderSource):
                require_shared(request.placement, self.source.folder, recipe.table.keys[0])
            if goal is not None and is_readable(goal):
                return self._repair(run, goal)
            earlier = self._find_earlier(recipe, goal)
            if goal is None and earlier is not None and self._starts_as(earlier):
                goal = earlier.goal
            return self._make(run, goal or self._probe(run, recipe), earlier)

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
        table = order_rows(table, request.keep_order)
        classes = f" in {len(table.classes)} classes" if table.classes else ""
        ignored = f"; {self.ignored} not images by suffix" if self.ignored else ""
        self.progress.say(f"{len(table):,} samples{classes} in {request.source}{ignored}")
        self.code = function_hashes(request.pipeline)
        fingerprint = request.pipeline.fingerprint(deciding_versions(request.pipeline))
        recipe = Recipe(request.pipeline, fingerprint, table, table.digest())
        self.timings["list"] = time.perf_counter() - began
        return recipe

    def _find_earlier(self, recipe: Recipe, goal: Goal | None) -> Earlier | None:
        """A version that may have been made of the same samples, of a source like this one."""
        if not self.source.content_decides:
            return None
        wanted = self.request.shard_samples if goal is None else goal.rows_per_shard
        return find_earlier(self.store, recipe, wanted)

    def _starts_as(self, earlier: Earlier) -> bool:
        """Whether the sample that gives rows their shape is the one that gave the earlier its."""
        table = earlier.goal.table
        row = sample_for_probe(table, 1)[0]
        [sample] = self.source.fetch([table.keys[row]], [int(table.sizes[row])])
        if isinstance(sample, FetchError) or not earlier.has(row, sample.content):
            return False
        self._check_space(earlier.stored_nbytes)
        return True

    def _probe(self, run: Run, recipe: Recipe) -> Goal:
        """Learn row shapes from a few samples, and refuse a disk that is too small."""
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
        nbytes = [row.nbytes for row in probe.shapes.values()]
        per_shard = rows_per_shard(len(table), nbytes, self.request.shard_samples)
        self._check_space(int(probe.stored_per_row * len(table)))
        return Goal.of(self.store, recipe, per_shard, probe.shapes)

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

    def _make(self, run: Run, goal: Goal, earlier: Earlier | None) -> BuildResult:
        goal.begin()
        receipts = read_receipts(goal)
        todo = shards_to_do(goal.shards, receipts, goal.sizes())
        receipts = {shard: receipts[shard] for shard in set(range(goal.shards)) - set(todo)}
        skipped = len(receipts)
        done = sum(len(goal.rows_of(shard)) for shard in receipts)
        self.progress.begin(done, len(goal.table))
        if skipped:
            self.progress.say(f"{skipped} of {goal.shards} shards are there already")
        if earlier is not None and not earlier.fits(goal):
            earlier = None
        made = self._run_shards(run, goal, todo, receipts, earlier=earlier)
        reused = sum(receipt.reused for receipt in receipts.values())
        if reused and earlier is not None:
            which = f"{earlier.folder.name[:8]}, which has the same samples"
            self.progress.say(f"{reused} of {goal.shards} shards reused from version {which}")
        self.progress.phase("Committing")
        commit(self.store, goal, receipts)
        self.progress.finish(f"Version {goal.version[:8]} is complete")
        return self._result(goal, receipts, made, skipped)

    def _repair(self, run: Run, goal: Goal) -> BuildResult:
        """Make missing objects of a committed version again; they must be what they were."""
        lost = lost_objects(goal)
        todo = sorted({shard for _, shard in lost})
        self.progress.begin(0, sum(len(goal.rows_of(shard)) for shard in todo))
        made = self._run_shards(run, goal, todo, {}, lost)
        append_commit(self.store, goal.version)
        goal.folder.remove(BUILD)
        self.progress.finish(f"Version {goal.version[:8]} is complete again")
        result = _committed_result(goal, self.ignored)
        burnt = sum(receipt.cpu_seconds for receipt in made)
        return replace(result, shards_skipped=goal.shards - len(made), cpu_seconds=burnt)

    def _run_shards(
        self,
        run: Run,
        goal: Goal,
        todo: Sequence[int],
        receipts: dict[int, Receipt],
        lost: Mapping[tuple[str, int], tuple[int, int]] | None = None,
        earlier: Earlier | None = None,
    ) -> list[Receipt]:
        """Make shards until all are there; adds to `receipts` and returns the new ones.

        Parameters
        ----------
        lost
            (field, shard) -> size and XXH3-64, where only these are to be made, as they were.
        earlier
            A version whose shards are taken over where the samples are the same.
        """
        from workers.takeover import make_shard

        made: list[Receipt] = []
        failed = _failed(goal, receipts.values())
        self._judge(failed, len(goal.table))
        task_of = functools.partial(self._task, goal, lost, earlier, self._permit(goal))
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
                    failed += _failed(goal, [outcome])
                    self._judge(failed, len(goal.table))
                    self.progress.advance(len(goal.rows_of(task.shard)), len(failed))
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
        earlier: Earlier | None,
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
            earlier.offer(shard) if earlier else None,
            {key: self.barred[key] for key in self.barred.keys() & goal.table.keys[part]},
            permit,
        )

    def _permit(self, goal: Goal) -> str | None:
        """On a cluster, an object that is there while this build goes on: without it no task of
        this build writes, on a disk that is not the store's, or when all is done."""
        if not self.joined:
            return None
        name = f"{BUILD}/permits/{uuid.uuid4().hex}"
        goal.folder.put(name, [b"1"], scratch=SCRATCH)
        require_shared(self.request.placement, goal.folder, name)
        return name

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

    def _result(
        self, goal: Goal, receipts: Mapping[int, Receipt], made: Sequence[Receipt], skipped: int
    ) -> BuildResult:
        ordered = list(receipts.values())
        failed = _failed(goal, ordered)
        objects = [made for receipt in ordered for made in receipt.objects.values()]
        stages: Counter[str] = Counter()
        for receipt in made:
            stages.update(receipt.seconds)
        mean, std = channel_statistics(ordered)
        return BuildResult(
            version=goal.version,
            path=str(goal.folder),
            samples=len(goal.table),
            failed=len(failed),
            shards=goal.shards,
            shards_skipped=skipped,
            shards_reused=sum(receipt.reused for receipt in made),
            raw_bytes=sum(each.raw_nbytes for each in objects),
            stored_bytes=sum(each.size for each in objects),
            cpu_seconds=sum(receipt.cpu_seconds for receipt in made),
            holes=failed,
            ignored=self.ignored,
            timings={**stages, "imports": sum(receipt.import_seconds for receipt in made)},
            classes=goal.table.classes,
            mean=mean,
            std=std,
        )


def _failed(goal: Goal, receipts: Iterable[Receipt]) -> list[tuple[str, str]]:
    """Key and reason of every hole, in row order."""
    return [(goal.table.keys[row], why) for row, why in holes(receipts).items()]


def _committed_result(goal: Goal, ignored: int) -> BuildResult:
    version = open_own(goal.folder)
    fields = version.fields.values()
    return BuildResult(
        version=goal.version,
        path=version.path,
        samples=version.rows,
        failed=len(version.holes),
        shards=goal.shards,
        shards_skipped=goal.shards,
        raw_bytes=sum(each.raw_nbytes for each in fields),
        stored_bytes=sum(each.stored_nbytes for each in fields),
        holes=[version.holes[row] for row in sorted(version.holes)],
        ignored=ignored,
        classes=version.classes,
        mean=version.mean,
        std=version.std,
    )
