"""The probe of a build and of a plan: a few samples, tried where the tasks run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from precache.codecs.image import import_zstd
from precache.errors import PrecacheError, SampleError, SourceError
from precache.messages import shown
from precache.store.layout import RowShape
from precache_workers.cluster.executor import RunTasks
from precache_workers.driver.progress import BuildProgress
from precache_workers.planning.request import Request
from precache_workers.planning.target_version import VersionSpec
from precache_workers.planning.work_plan import MeasuredRows, may_draw
from precache_workers.sources.dataset_items import Starts

if TYPE_CHECKING:  # loads torch and the decoders, which a build with nothing to do does not need
    from precache_workers.shards.samples import Job

REQUIRED_MODULES = ("PIL", "cv2", "simplejpeg", "pyarrow")
"""Modules that are loaded late; the driver checks them before it writes anything."""


class SampleProbe:
    """Tries samples of a job by the functions of `row_probe`: a `planning.work_plan.Probe`.

    Parameters
    ----------
    run
        Returns what runs tasks.
    job
        Returns the job, with the starts that were found so far.
    barred
        Key -> reason, of samples that are left out, as they end workers; it grows.
    note_pixels
        Takes a line about defaults that decide the pixels of samples.
    declared
        Take row shapes that the recipe declares, without stored bytes, where samples need not be
        read to decide whether a build is refused.

    Attributes
    ----------
    starts
        The parts of a dataset's samples that fields start from, once they were found.
    seconds
        Time that the trials took.
    """

    def __init__(
        self,
        request: Request,
        run: Callable[[], RunTasks],
        job: Callable[[], Job],
        barred: dict[str, str],
        progress: BuildProgress,
        note_pixels: Callable[[str], None],
        *,
        declared: bool = False,
    ) -> None:
        self._request, self._run, self._job, self._barred = request, run, job, barred
        self._progress, self._note_pixels, self._declared = progress, note_pixels, declared
        self.starts: Starts | None = None
        self.seconds = 0.0

    def measure(self, spec: VersionSpec) -> MeasuredRows:
        from precache_workers.profiling.row_probe import run_probe

        fields, open_ = spec.recipe.fields, spec.recipe.leaves_pixels_open
        if self._declared and not (open_ or may_draw(self._request, spec.recipe)):
            known = {
                n: RowShape(f.shape, f.dtype) for n, f in fields.items() if f.shape and f.dtype
            }
            if known.keys() == fields.keys():
                return MeasuredRows(known, {})
        measured: MeasuredRows = self._try(run_probe, spec)
        self.starts = measured.starts
        for line in measured.notes:
            self._progress.note(line)
        for line in measured.pixels:
            self._note_pixels(line)
        return measured

    def read_pixels(self, spec: VersionSpec, rows: list[int], twice: bool) -> None:
        from precache_workers.profiling.row_probe import run_readings

        for line in self._try(functools.partial(run_readings, twice=twice), spec, rows):
            self._note_pixels(line)

    def find_starts(self, spec: VersionSpec) -> None:
        """Find the parts that fields start from in all samples."""
        from precache_workers.profiling.row_probe import run_starts

        self.starts = self._try(run_starts, spec)

    def _try(
        self, function: Callable[[Any], Any], spec: VersionSpec, rows: list[int] | None = None
    ) -> Any:
        """Return the outcome of a function of `row_probe` on samples of some rows, or of all."""
        from precache_workers.planning.rows import sample_for_probe
        from precache_workers.profiling.row_probe import PROBE_SAMPLES
        from precache_workers.shards.samples import FetchAllTask

        for name in REQUIRED_MODULES:
            import_module(name)
        import_zstd()
        chosen = sample_for_probe(spec.table, PROBE_SAMPLES, rows)
        task = FetchAllTask.of(self._job(), spec.table, chosen)
        run, began = self._run(), time.perf_counter()
        self._progress.phase("Measuring a few samples")
        [(task, outcome)] = run(function, [replace(task, barred=self._barred)])
        self.seconds += time.perf_counter() - began
        self._barred |= task.barred
        if isinstance(outcome, SampleError):
            raise SourceError(f"{shown(self._request.source)}: {outcome}") from None
        if isinstance(outcome, PrecacheError):
            raise outcome
        return outcome
