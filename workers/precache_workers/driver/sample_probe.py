"""The probe of a build and of a plan: a few samples, tried where the tasks run."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from precache.codecs.image import import_zstd
from precache.errors import Hole, PrecacheError, SampleError, SourceError
from precache.messages import shown
from precache.storage.open import open_folder
from precache.store.layout import RowShape
from precache_workers.cluster.executor import RunTasks
from precache_workers.driver.progress import BuildProgress
from precache_workers.ops.identity import behaviours
from precache_workers.planning.listing import ListedSource
from precache_workers.planning.request import Request, source_of
from precache_workers.planning.target_version import VersionSpec
from precache_workers.planning.work_plan import MeasuredRows, may_draw
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.dataset_items import Starts

if TYPE_CHECKING:  # loads torch and the decoders, which a build with nothing to do does not need
    from precache_workers.shards.samples import Job

REQUIRED_MODULES = ("PIL", "cv2", "simplejpeg", "pyarrow")
"""Modules that are loaded late; the driver checks them before it writes anything."""


class SampleProbe:
    """Tries samples by `row_probe`: the `planning.work_plan.Probe` that a build is, and a plan.

    Attributes
    ----------
    listed
        The listing of the source, once it is known.
    run_tasks
        Runs tasks.
    barred
        Key -> hole, of samples that are left out, as they end workers; it grows.
    declared
        Take row shapes that the recipe declares, without stored bytes, where samples need not be
        read to decide whether a build is refused.
    starts
        The parts of a dataset's samples that fields start from, once they were found.
    probe_seconds
        Time that the trials took.
    """

    listed: ListedSource
    run_tasks: RunTasks
    declared = False

    def __init__(self, request: Request, progress: BuildProgress) -> None:
        self.request, self.progress = request, progress
        self.store = open_folder(request.store, request.storage_options)
        self.source = source_of(request)
        self.barred: dict[str, Hole] = {}
        self.starts: Starts | None = None
        self._job: Job | None = None
        self.probe_seconds = 0.0

    def note_pixels(self, line: str) -> None:
        """Take a line about defaults that decide the pixels of samples."""
        self.progress.note(line)

    def job(self) -> Job:
        """Return the job of tasks, with the starts that were found so far."""
        from precache_workers.shards.samples import Job

        if isinstance(self.source, DatasetSource) and self.source.starts != self.starts:
            self.source = replace(self.source, starts=self.starts)
        if self._job is None or self._job.source is not self.source:
            recipe = self.listed.spec.recipe
            self._job = Job(  # workers get each job once
                self.source,
                recipe,
                self.request.import_path,
                self.listed.code,
                behaviours(recipe),
                self.listed.fetches_labels,
                self.request.sample_timeout,
                self.listed.refreshes is not None,
            )
        return self._job

    def measure(self, spec: VersionSpec) -> MeasuredRows:
        fields, open_ = spec.recipe.fields, spec.recipe.leaves_pixels_open
        if self.declared and not (open_ or may_draw(self.request, spec.recipe)):
            known = {
                n: RowShape(f.shape, f.dtype) for n, f in fields.items() if f.shape and f.dtype
            }
            if known.keys() == fields.keys():
                return MeasuredRows(known, {})
        measured = self._try(spec)
        self.starts = measured.starts
        return measured

    def read_pixels(self, spec: VersionSpec, rows: list[int], twice: bool) -> None:
        self._try(spec, rows, asks="pixels", twice=twice)

    def find_starts(self) -> None:
        """Find the parts that fields start from in all samples, if rows were not measured."""
        is_open = isinstance(self.source, DatasetSource) and self.source.leaves_starts_open
        if is_open and self.starts is None:
            self.starts = self._try(self.listed.spec, asks="starts").starts

    def _try(
        self, spec: VersionSpec, rows: list[int] | None = None, **options: Any
    ) -> MeasuredRows:
        """Try samples of some rows, or of all, and print what is found; `options` are those of
        `ProbeTask`."""
        from precache_workers.planning.rows import sample_for_probe
        from precache_workers.profiling.row_probe import PROBE_SAMPLES, ProbeTask, run_probe

        for name in REQUIRED_MODULES:
            import_module(name)
        import_zstd()
        chosen = sample_for_probe(spec.table, PROBE_SAMPLES, rows)
        task = ProbeTask.of(self.job(), spec.table, chosen, barred=self.barred, **options)
        run, began = self.run_tasks, time.perf_counter()
        self.progress.phase("Measuring a few samples")
        [(task, outcome)] = run(run_probe, [task])
        self.probe_seconds += time.perf_counter() - began
        self.barred |= task.barred
        if isinstance(outcome, SampleError):
            raise SourceError(f"{shown(self.request.source)}: {outcome}") from None
        if isinstance(outcome, PrecacheError):
            raise outcome
        tried: MeasuredRows = outcome
        for line in tried.notes:
            self.progress.note(line)
        for line in tried.pixels:
            self.note_pixels(line)
        return tried
