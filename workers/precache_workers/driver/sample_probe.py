"""The probe of a build and of a plan: a few samples, tried where the tasks run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from precache.codecs.image import import_zstd
from precache_workers.planning.target_version import VersionSpec
from precache_workers.planning.work_plan import MeasuredRows, Probe
from precache_workers.sources.dataset_items import Starts

if TYPE_CHECKING:
    from precache_workers.shards.samples import FetchAllTask, Job

REQUIRED_MODULES = ("PIL", "cv2", "simplejpeg", "pyarrow")
"""Modules that are loaded late; the driver checks them before it writes anything."""

Try = Callable[[Callable[[Any], Any], "FetchAllTask"], Any]
"""Runs a function on a task, without the samples that are barred; returns the outcome."""


def sample_probe(
    attempt: Try,
    job: Callable[[], Job],
    source: str,
    take: Callable[[MeasuredRows], None],
    note_pixels: Callable[[str], None],
) -> Probe:
    """Return the probe that tries samples of a job, by the functions of `row_probe`.

    Parameters
    ----------
    take
        Takes what was measured, with its lines for the user.
    note_pixels
        Takes a line about defaults that decide the pixels of samples that are read alone.
    """

    def measure(spec: VersionSpec) -> MeasuredRows:
        _require_modules()
        from precache_workers.profiling.row_probe import run_probe

        measured: MeasuredRows = _probed(attempt, job, source, run_probe, spec)
        take(measured)
        return measured

    def read_pixels(spec: VersionSpec, rows: list[int], twice: bool) -> None:
        _require_modules()
        from precache_workers.profiling.row_probe import run_readings

        read = functools.partial(run_readings, twice=twice)
        for line in _probed(attempt, job, source, read, spec, rows):
            note_pixels(line)

    return Probe(measure, read_pixels)


def find_starts(attempt: Try, job: Callable[[], Job], source: str, spec: VersionSpec) -> Starts:
    """Find the parts that fields start from in samples; parameters as of `sample_probe`."""
    from precache_workers.profiling.row_probe import run_starts

    starts: Starts = _probed(attempt, job, source, run_starts, spec)
    return starts


def _probed(
    attempt: Try,
    job: Callable[[], Job],
    source: str,
    function: Callable[[Any], Any],
    spec: VersionSpec,
    rows: list[int] | None = None,
) -> Any:
    """Return the outcome of a function of `row_probe` on samples of some rows, or of all."""
    from precache_workers.profiling import row_probe

    task = row_probe.probe_task(job(), spec.table, rows)
    return row_probe.probed(attempt(function, task), source)


def _require_modules() -> None:
    """Raise `ImportError` or `UsageError` if a module cannot be imported that building needs."""
    for name in REQUIRED_MODULES:
        import_module(name)
    import_zstd()
