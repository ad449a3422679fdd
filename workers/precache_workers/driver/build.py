"""A build, from the listing to the commit; the driver never touches a pixel."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from precache.errors import (
    BuildError,
    CrashError,
    DamageError,
    FetchError,
    GoneError,
    Hole,
    PrecacheError,
    StorageError,
    StoreError,
)
from precache.messages import first_ones, shown
from precache.recipe.recipe import draws_in_words
from precache.recipe.variants import pool_statistics
from precache.runtime.operating_system import is_on_network
from precache.storage.base import left_out_text
from precache.store.build_status import (
    DESCRIPTION,
    remove_abandoned_scratch,
    remove_folder,
    remove_scratch,
)
from precache.store.commit_log import (
    ROOT,
    make_current,
    read_log,
    record_removal,
    recordable_source,
    require_create_only,
    short,
)
from precache.store.json_documents import LeaseDocument, LogEntry
from precache.store.labels import has_label
from precache.store.lease import Lease, Leases, remove_ended_leases
from precache.store.open import open_own
from precache.store.receipts import Receipt, receipt_name
from precache.store.tree import SPARE, Leaf, seal_of, spare_objects, spare_root
from precache.units import counted, local_time, size
from precache_workers.cluster.executor import executor, is_joined
from precache_workers.cluster.nodes import require_shared
from precache_workers.driver.build_result import BuildResult
from precache_workers.driver.commit import commit, tidy_current, was_committed
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.report import (
    check_reports,
    report_failure,
    write_reports,
)
from precache_workers.driver.sample_probe import SampleProbe
from precache_workers.driver.totals import Totals, failed_samples, failures
from precache_workers.ops.behaviour import cleared_on_mismatch
from precache_workers.planning.catalogue import Catalogue
from precache_workers.planning.listing import ListedSource, forget_index, list_rows
from precache_workers.planning.request import Request, check_request
from precache_workers.planning.stored_versions import stored_versions
from precache_workers.planning.target_version import (
    SCRATCH,
    StoredObjects,
    TargetVersion,
    compare_objects,
    description_of,
    find_target,
    is_committed,
    is_recomputed,
    is_whole,
    new_target,
    restore_roots,
)
from precache_workers.planning.work_plan import (
    Work,
    find_work,
    is_tried_again,
    remaining,
)
from precache_workers.sources.base import ignored_text
from precache_workers.sources.containers import CHANGED
from precache_workers.sources.dataset import DatasetSource


def run_build(request: Request, shown: bool, listed: ListedSource | None = None) -> BuildResult:
    """Build, or finish, the version that the request describes, and make it current.

    Parameters
    ----------
    shown
        Show progress on standard error.
    listed
        The listing of the source, if the caller has it already.

    Raises
    ------
    UsageError
        The request cannot be met; nothing was written.
    BuildError
        Too many samples failed, or some could not be fetched; finished shards are kept.
    """
    started = time.perf_counter()
    check_request(request)
    check_reports(request.report, request.store)
    with BuildProgress(shown) as progress, cleared_on_mismatch():
        build = Build(request, progress, listed)
        try:
            result = build.run()
        except BaseException as error:
            report_failure(build, error, progress.say)
            if isinstance(error, PrecacheError) and CHANGED in str(error):
                with contextlib.suppress(StorageError):
                    forget_index(request, build.store, build.source)
            raise
        timings = {**build.timings, **result.timings}
        result = replace(result, seconds=time.perf_counter() - started, timings=timings)
        try:
            write_reports(build, result)
        except StorageError as error:
            raise StorageError(
                f"version {short(result.version)} is complete and current, but has no report: "
                f"{error}"
            ) from None
    return result


class Build(SampleProbe):
    """One run of a build; its steps share the request, the store and the progress display.

    Attributes
    ----------
    began
        Unix time.
    target
        None before the version is known.
    planned
        Shards that the run is to make.
    new_receipts, receipts
        Receipts of this run; of all finished shards of the version, by number.
    """

    def __init__(
        self,
        request: Request,
        progress: BuildProgress,
        listed: ListedSource | None = None,
    ) -> None:
        super().__init__(request, progress)
        self.began = time.time()
        self.target: TargetVersion | None = None
        self.planned = 0
        self.new_receipts: list[Receipt] = []
        self.receipts: dict[int, Receipt] = {}
        if isinstance(self.source, DatasetSource) and listed is not None:
            refreshes = listed.labels is not None  # and keeps the labels
            self.source = replace(self.source, labels_given=refreshes or self.source.labels_given)
        self.joined = is_joined(request.address)
        self._given_listing = listed
        self.barred |= listed.barred if listed else {}
        self.timings: dict[str, float] = {}
        self.retried: frozenset[int] = frozenset()
        self.mended: list[str] = []
        path = self.store.local("")
        here = path is not None and not is_on_network(path)
        self.verifies = here if request.verify is None else request.verify
        self.checked: int | None = None
        self.waited = False
        self.before: LogEntry | None = None

    def run(self) -> BuildResult:
        restore_roots(self.store)
        self.before = read_log(self.store, newest=True, appends=True).current
        self.listed = listed = self._list()
        spec = listed.spec
        request = self.request
        target = find_target(self.store, spec, request.shard_samples, recompute=request.recompute)
        damaged: StoredObjects | None = None
        if target is not None and is_whole(target) and not is_tried_again(self.request, target):
            with contextlib.suppress(GoneError):  # then it is built again
                damaged = self._find_damage(target)
            if damaged is not None and not damaged:
                return self._nothing_to_do(target)
        began = time.perf_counter()
        self.progress.phase("Starting")
        how = request.address, request.cpus, request, self.progress.say
        with executor(*how) as self.run_tasks:
            self.timings["start"] = time.perf_counter() - began
            if self.joined:
                row = int(spec.table.is_removed.argmin())
                location = spec.table.locations_of([row])
                file = self.source.file_of(spec.table.keys[row], location)
                if file is not None:
                    require_shared(request, *file)
            with contextlib.suppress(GoneError):  # then it is built again
                if target is not None and is_committed(target):
                    target = self._mend(target)
            while True:
                is_done = target is not None and is_committed(target)
                if target is not None and is_done and not is_tried_again(request, target):
                    damaged = self._find_damage(target) if damaged is None else damaged
                work = find_work(request, self.store, listed, target, self, damaged or {})
                if (result := self._make(work)) is not None:
                    return result
                target = work.target

    def _find_damage(self, target: TargetVersion) -> StoredObjects:
        """Compare the bytes of a committed version with its records, if this build verifies."""
        if not self.verifies:
            return {}
        version = target.committed()
        recorded = {
            (name, shard): leaf
            for name in version.stored
            for shard, leaf in enumerate(version.shard_leaves(name))
        }
        damaged: dict[tuple[str, int], Leaf] = {}
        total = sum(leaf.size for leaf in recorded.values())
        self.checked = 0
        self.progress.checked(0, total)
        for item, same in compare_objects(target, recorded):
            self.checked += recorded[item].size
            self.progress.checked(self.checked, total)
            if not same:
                damaged[item] = recorded[item]
        if damaged:
            names = first_ones([target.object_name(*item) for item in damaged])
            self.progress.say(
                f"Version {short(target.version)} is damaged in {len(damaged)} of {len(recorded)} "
                f"shards: {names}"
            )
        return damaged

    def _mend(self, target: TargetVersion) -> TargetVersion:
        """Restore the small objects of a committed version that are damaged or missing, of the
        spare copy.

        Returns the version, or a new generation of it if the copy is damaged, too.
        """
        version = target.committed()
        flawed = [*version.flaws()]
        if not flawed:
            return target
        self.progress.phase(f"Mending {', '.join(flawed)}")
        try:
            objects = version.small_objects(list(version.leaves))
        except DamageError:
            anew = new_target(self.store, target)
            self.progress.say(
                f"{first_ones(flawed)} of version {short(target.version)} cannot be mended, as the "
                f"copy in {SPARE} is damaged, too: version {short(anew.version)} takes its place"
            )
            return anew
        root = target.folder.get(ROOT) or b""
        if seal_of(root) != version.digest:
            root = spare_root(target.folder) or b""
        objects |= {**spare_objects(root, objects.values()), ROOT: root}  # the root comes last
        for name in (name for name in objects if name in flawed):
            target.folder.put(name, [objects[name]], scratch=SCRATCH)
        self.mended = flawed
        return target

    def _nothing_to_do(self, target: TargetVersion) -> BuildResult:
        self.target = target
        self._check_failures(_reasons(open_own(target.folder).failures.values()), target)
        entry = self._make_current(target)
        self.listed.keep(self.store)
        remove_abandoned_scratch(target.folder)
        remove_ended_leases(self.store)
        version = f"version {short(target.version)} is complete"
        if self.mended:
            line = f"V{version[1:]} again: {', '.join(self.mended)} mended"
        else:
            line = f"Nothing to do: {version}"
        if self.checked is not None:
            line += f"; {size(self.checked)} checked"
        elif not self.waited:
            line += "; the bytes of its shards were not checked (--verify reads them)"
        if entry.version != target.version:
            line += f". Version {short(entry.version)} has replaced it meanwhile, and is current"
        else:
            line += self._in_place_of(target)
        self.progress.finish(line)
        return self._result(target)

    def _in_place_of(self, target: TargetVersion) -> str:
        """Return the sentence about the version that was current before, if that is another one."""
        if self.before is None or self.before.version == target.version:
            return ""
        return f". It is current, in place of version {short(self.before.version)}"

    def _result(self, target: TargetVersion, **counts: Any) -> BuildResult:
        """Return the result for a committed version; `counts` is of what the run made."""
        version, total = open_own(target.folder), Totals.of(self.new_receipts)
        failed = _reasons(version.failures.values())
        arrays = version.attributes.fields.values()
        statistics = pool_statistics(version.attributes.mean, version.attributes.std)
        made = {"shards_skipped": target.shards - total.shards, "cpu_seconds": total.cpu_seconds}
        return BuildResult(
            version=target.version,
            path=str(target.folder),
            samples=target.table.samples,
            failed=len(failed),
            removed=len(target.table.removed),
            shards=target.shards,
            raw_bytes=sum(array.raw for array in arrays),
            stored_bytes=sum(array.stored for array in arrays),
            holes=failed,
            ignored=self.listed.ignored,
            left_out=self.listed.left_out,
            classes=tuple(target.table.classes),
            mean={name: mean for name, (mean, _) in statistics.items()},
            std={name: std for name, (_, std) in statistics.items()},
            row_types=target.row_types,
            **{**made, **counts},
        )

    def _make_current(self, target: TargetVersion) -> LogEntry:
        """Append a committed version to the commit log, and return the entry that is current."""
        return make_current(
            self.store,
            target.version,
            source=recordable_source(self.request.source),
            replaces=self.listed.refreshes,
            since=self.before.number if self.before else 0,
        )

    def _list(self) -> ListedSource:
        listed = self._given_listing or list_rows(
            self.request, self.store, self.source, self.progress.listed, self.progress.say
        )
        table = listed.spec.table
        if listed.placed.changed:
            self.progress.say(listed.placed.changed)
        classes = f" in {counted(len(table.classes), 'class')}" if table.classes else ""
        if not listed.fetches_labels and not has_label(listed.known_labels).any():
            classes = " without labels (--labels)"
        left_out = left_out_text(listed.left_out, listed.examples)
        place = shown(self.request.source)
        tell = self.progress.note if left_out else self.progress.say
        tell(f"{counted(table.samples, 'sample')}{classes} in {place}{left_out}")
        if listed.ignored:
            unused = ignored_text(listed.ignored)
            self.progress.note(f"Not used, as they are no images and no field names them: {unused}")
        listed.announce(self.progress.note, labels_given=self.request.labels is not None)
        for line in draws_in_words(listed.spec.declared):
            self.progress.note(line)
        self.timings["list"] = listed.seconds
        return listed

    def _make(self, work: Work) -> BuildResult | None:
        """Make the shards of a version that are not done, and commit it unless it was committed.

        Returns None if another build committed it, and its holes are to be retried.
        """
        if work.lost is not None and not work.todo:
            return self._nothing_to_do(work.target)
        if (needed := work.needed) is not None:
            free = self.store.free_bytes()
            rest = "" if free is None else f"; {size(free)} free"
            self.progress.say(f"About {size(needed)} to be stored{rest}")
            if free is not None and needed > free and self.request.check_space:
                raise StorageError(
                    f"{shown(self.request.store)} needs about {size(needed)} and its disk has "
                    f"{size(free)} free; choose another disk, a smaller --resize or --codec image, "
                    "or go ahead with --no-check-space"
                )
        self.find_starts()
        target = work.target
        require_create_only(target.folder, SCRATCH)
        tidy_current(self.store)
        self.listed.keep(self.store)  # a build that is refused writes nothing
        with contextlib.ExitStack() as stack:
            try:
                lease, left = self._start(stack, work)
                target = left.target
                if lease is not None:
                    receipts = self._announce(left)
                    self._run_shards(left, lease, receipts)
                    return self._conclude(lease, left, receipts)
            except BuildError:
                if work.lost is not None or not is_whole(target):
                    raise
        if is_tried_again(self.request, target):
            if work.failed is None:
                return None
            self.progress.say("The other build has tried the failed samples again")
        return self._nothing_to_do(target)

    def _start(self, stack: contextlib.ExitStack, work: Work) -> tuple[Lease | None, Work]:
        """Begin the version once no other build holds it, or a new one if it was removed meanwhile.

        Returns the build's lease, which lasts as long as `stack`, and the remaining work; None for
        the lease if the version was committed meanwhile. Leftovers of builds that were cut off are
        removed from the shards that are to be made.
        """
        recompute = self.request.recompute
        while True:
            target = work.target
            lease = stack.enter_context(self._take_lease(target))
            log = read_log(self.store, appends=True)
            if target.version not in log.removed:
                break
            # By a build that mended nothing, or by gc, while this one looked or waited.
            lease.end()
            remove_folder(self.store, target.version)
            anew = new_target(self.store, target, recompute=recompute)
            found = work.found if work.lost is None else Catalogue.empty(target.spec).find()
            work = replace(work, target=anew, found=found, lost=None)
        if work.lost is not None:
            return lease, work
        if was_committed(target) and (self.waited or not recompute):
            return None, work
        begun = target.folder.size(DESCRIPTION) is not None
        if target.folder.size(ROOT) is not None or (begun and is_recomputed(target) != recompute):
            raise _taken_by_another(target)
        lease.require()
        target.begin(refreshes=self.listed.refreshes, recompute=recompute)
        left = remaining(work)
        there = target.folder.sizes() if left.todo else {}
        for shard in left.todo:
            names = [target.object_name(field, shard) for field in target.shapes]
            for name in there.keys() & {receipt_name(shard), *names}:
                lease.require()
                target.folder.remove(name)
        return lease, left

    def _take_lease(self, target: TargetVersion) -> Lease:
        """Take the lease of a version, once other builds of it end or are silent."""

        note = "recompute" if self.request.recompute else ""

        def say(lease: LeaseDocument) -> None:
            if lease.note != note:
                raise _taken_by_another(target)
            self.waited = True
            begun = description_of(target)
            since = "" if begun is None else f", since {local_time(begun.begun)}"
            self.progress.say(
                f"The same build is running already ({lease.holder}{since}): waiting for its end; "
                "this one takes over if that one leaves shards undone or is silent"
            )
            self.progress.phase("Waiting for the same build")

        return Leases(target.folder).wait(say, note)

    def _announce(self, work: Work) -> dict[int, Receipt]:
        """Find what is tried again, say what is there; returns the receipts of finished shards."""
        target = work.target
        receipts, keys = dict(work.receipts), target.table.keys
        self.retried = frozenset(row for row in work.retried if keys[row] not in self.barred)
        if self.retried:
            already = sum(row // target.rows_per_shard in receipts for row in self.retried)
            more = f"; {already:,} more are in shards that were done before this run"
            self.progress.say(
                f"Tried again: {counted(len(self.retried) - already, 'sample')} that failed before"
                + more * bool(already)
            )
        done = target.table.samples - sum(map(target.samples_of, work.todo))
        self.progress.begin(done, target.table.samples)
        if there := target.shards - len(work.todo):
            self.progress.say(f"{there} of {target.shards} shards are there already")
        for stored in itertools.islice(stored_versions(self.store), 1):
            from precache_workers.planning.diff import edited_functions

            for function in edited_functions(stored.attributes, target.spec):
                self.progress.say(
                    f"The code of {function} was edited since version {short(stored.folder.name)}: "
                    f"{target.table.samples - done:,} rows are computed again"
                )
        return receipts

    def _conclude(self, lease: Lease, work: Work, receipts: Mapping[int, Receipt]) -> BuildResult:
        """Commit a version whose shards are all there, unless it was, or it would mend nothing."""
        target, found = work.target, work.found
        total = Totals.of(self.new_receipts)
        if total.rows_reused:
            unread = ", whose bytes were not checked (--verify reads them)"
            names = list(map(short, found.versions))
            self.progress.say(
                f"{total.rows_reused:,} rows and {total.reused} whole shards were taken over from "
                f"version{'s' * (len(names) > 1)} {first_ones(names)}"
                + (unread if total.reused and not self.verifies else "")
            )
        mended = len(self.retried - failures(receipts.values()).keys())
        if work.failed is not None and not mended:
            return self._nothing_mended(lease, target, work.failed)
        tidy, line = remove_abandoned_scratch, f"again: {counted(len(work.todo), 'shard')} built"
        line += "".join(f", {name} mended" for name in self.mended)
        if work.lost is None:
            self.progress.phase("Committing")
            commit(target, receipts, self.listed.labels, lease)
            tidy, line = remove_scratch, ""
        elif is_tried_again(self.request, target):
            self.progress.say(
                "Damage is mended first: to try failed samples again, run the same command again"
            )
        self._make_current(target)
        self._say_spoiled({name for receipt in receipts.values() for name in receipt.spoiled})
        lease.end()
        try:
            tidy(target.folder)
        except StorageError as error:  # `gc` removes it
            self.progress.say(f"The version is committed, but {error}")
        if self.listed.fetches_labels:
            built = replace(self.listed, labels=open_own(target.folder).labels)
            built.warn_of_fetched_labels()
        line = " ".join(filter(None, (f"Version {short(target.version)} is complete", line)))
        self.progress.finish(line + self._in_place_of(target))
        return self._result(
            target,
            shards_reused=total.reused,
            rows_reused=total.rows_reused,
            timings=total.stages,
            mended=mended,
        )

    def _say_spoiled(self, names: Collection[str]) -> None:
        """Print which objects of other versions were missing or damaged."""
        for version, own in itertools.groupby(sorted(names), lambda name: name.partition("/")[0]):
            if self.store.exists(f"{version}/{ROOT}"):
                places = first_ones([name.removeprefix(f"{version}/") for name in own])
                this = f"{shown(self.request.store)}@{short(version)}"
                self.progress.say(
                    f"Version {short(version)} is damaged in {places}: nothing of this was taken "
                    "over. Once it is not needed, precache gc removes it; to keep it, see "
                    f"precache verify {this}"
                )

    def _nothing_mended(
        self, lease: Lease, target: TargetVersion, before: TargetVersion
    ) -> BuildResult:
        if was_committed(target):  # by a build that took over and mended something
            lease.end()
            return self._nothing_to_do(target)
        lease.require()
        record_removal(self.store, [target.version], [target.version])
        lease.end()
        remove_folder(self.store, target.version)
        self._make_current(before)
        self.progress.finish(f"Nothing was mended: version {short(before.version)} stays as it is")
        return self._result(before, shards_skipped=before.shards)

    def _run_shards(self, work: Work, lease: Lease, receipts: dict[int, Receipt]) -> None:
        """Run shard tasks until all are done; adds to `receipts`."""
        from precache_workers.shards.shard_task import ShardTask, run_shard

        target, todo, lost, found = work.target, work.todo, work.lost, work.found
        self.target, self.planned, self.receipts = target, len(todo), receipts
        failed = failed_samples(target.table.keys, receipts.values())
        self._check_failures(failed, target)
        if self.joined:
            require_shared(self.request, target.folder, lease.name)
        table, job = target.table, self.job()

        def task_of(shard: int) -> ShardTask:
            rows = target.rows_of(shard)
            part = slice(rows.start, rows.stop)
            contents = self.listed.contents[part]
            stored = found.shard(rows)
            return ShardTask.of(
                job,
                table,
                rows,
                folder=target.folder,
                shapes=target.shapes,
                rows_per_shard=target.rows_per_shard,
                shard=shard,
                accept_missing=self.request.accept_missing,
                lost=None if lost is None else {f: lost[f, s] for f, s in lost if s == shard},
                stored=stored,
                check_stored=self.verifies,
                pinned=stored.contents if self.listed.refreshes else contents,
                lease=lease.name,
                barred={key: self.barred[key] for key in self.barred.keys() & table.keys[part]},
                may_fail=frozenset(r - rows.start for r in self.retried.intersection(rows)),
            )

        errors: dict[int, FetchError | CrashError] = {}
        for task, outcome in self.run_tasks(run_shard, map(task_of, todo), len(todo)):
            self.barred |= task.barred
            if isinstance(outcome, FetchError | CrashError):
                errors[task.shard] = outcome
                self._check_failures([*failed, *_reasons(task.barred.items())], target)
            elif isinstance(outcome, PrecacheError):
                raise outcome
            else:
                receipts[task.shard] = outcome
                self.new_receipts.append(outcome)
                failed += failed_samples(target.table.keys, [outcome])
                self._check_failures(failed, target)
                self.progress.advance(target.samples_of(task.shard), len(failed))
        if errors:
            rest = "not kept, as with --recompute" if self.request.recompute else "kept"
            raise BuildError(
                f"{len(errors)} of {target.shards} shards are not done: {errors[min(errors)]}; run "
                "the same command again, or with --accept-missing to leave holes for what cannot "
                f"be fetched (the rest is {rest})"
            )

    def _check_failures(self, failed: Sequence[tuple[str, str]], target: TargetVersion) -> None:
        """Raise `BuildError` if more samples of a version failed than allowed."""
        samples = target.table.samples
        allowed = self.request.allowed_failures(samples)
        if len(failed) <= allowed:
            return
        shown = "; ".join(f"{key}: {reason}" for key, reason in failed[:5])
        way_out = (
            f"the limit is {allowed}: mend them, or raise --max-failures"
            if self.request.on_error == "skip"
            else "mend or remove it, or use --on-error skip"
        )
        raise BuildError(f"{len(failed)} of {samples} samples failed ({shown}); {way_out}")


def _reasons(holes: Iterable[tuple[str, Hole]]) -> list[tuple[str, str]]:
    return [(key, hole.reason) for key, hole in holes]


def _taken_by_another(target: TargetVersion) -> StoreError:
    return StoreError(
        f"another build took version {short(target.version)} meanwhile, and may not recompute what "
        "this one does; run the same command again"
    )
