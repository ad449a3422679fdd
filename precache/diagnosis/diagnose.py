"""`diagnose`: find the bottleneck of a training loop, and predict the gain of remedies."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from precache.diagnosis.loop_probes import Limits, measure
from precache.diagnosis.measurements import Measurements, TimedRun
from precache.diagnosis.verdict import Judgement, judge
from precache.errors import UsageError
from precache.loading.options import named_device
from precache.runtime.integers import whole
from precache.runtime.terminal import Terminal
from precache.units import in_ms, number, plain

CONFIDENCE_TEXT = {"high": "sure", "medium": "fairly sure", "low": "a guess"}
HELPFUL_GAIN = 1.05
"""Gain from which a remedy is reported as helpful."""

SAME_SHARE = 0.02
"""Difference of two shares below which they are reported as one."""


@dataclass(frozen=True)
class Diagnosis(Judgement):
    """The bottleneck of a training loop; ``str()`` gives the text for people.

    Attributes
    ----------
    verdict
        The bottleneck. ``compute-bound``: the step, not the data. ``CPU-bound``: preprocessing.
        ``storage-bound``: waiting for a disk, a network or the like. ``transfer-bound``: copies to
        the device. ``variance-bound``: rare slow batches.
    reason
        One sentence that explains the verdict.
    evidence
        Figures that support the verdict.
    remedies
        Possible changes with predicted gains, largest first; a gain of 1 means no improvement.
    flags
        Other problems, one sentence each.
    batches_per_s
        Current speed of the loop.
    without_waiting
        Batches/s if the step never waited for data; no remedy exceeds it.
    measurements
        Everything that was measured.
    """

    measurements: Measurements

    @classmethod
    def of(cls, measurements: Measurements) -> Diagnosis:
        """Judge measurements; the verdict depends on nothing else."""
        return cls(**vars(judge(measurements)), measurements=measurements)

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement, the setup and the note on cold files, for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        measured: Measurements = values.pop("measurements")
        values["evidence"] = list(map(vars, self.evidence))
        values["remedies"] = list(map(vars, self.remedies))
        values["flags"] = list(self.flags)
        values["setup"] = dataclasses.asdict(measured.setup)
        values["cold_note"] = measured.cold_note
        return values

    def html(self, path: str | os.PathLike[str], after: Diagnosis | None = None) -> None:
        """Write a page: one file that needs no network; ``pip install "precache[report]"``.

        Parameters
        ----------
        after
            A second diagnosis of the same loop with a remedy in place, to compare.

        Raises
        ------
        UsageError
            If matplotlib is not installed.
        StorageError
            If the file cannot be written.
        """
        from precache.diagnosis.page import render_diagnosis
        from precache.html.charts import need_matplotlib
        from precache.html.pages import save

        need_matplotlib(os.fspath(path))
        save(render_diagnosis(self, after), os.fspath(path))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def diagnose(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    *,
    seconds: float = 5.0,
    steps: int = 200,
    device: str | torch.device | None = None,
    files: Iterable[str | os.PathLike[str]] | None = None,
    restore: Sequence[Any] = (),
    progress: bool = False,
) -> Diagnosis:
    """Find the bottleneck of a training loop, and predict the gain of remedies.

    Short runs measure the step alone (on one batch on the device), the loader alone, both together,
    and one worker alone if there are several. If the loader's files are known and can be dropped
    from the page cache, the loader is first measured from the disk. The step really trains: pass
    the objects that it changes as `restore`.

    Parameters
    ----------
    loader
        A torch `DataLoader`, a `precache.Loader`, a `Mixture`, or any iterable of batches. An
        iterator continues from its position.
    step
        Function that takes a batch as the loader yields it, and runs one training step.
    seconds, steps
        Limits of each run. A run ends at the first limit that it reaches, but not before three
        batches (or `steps`, if fewer) unless these take over three times `seconds`.
    device
        Device of the step; by default the current CUDA device if the step uses CUDA.
    files
        Files that the loader reads, to measure it from the disk. By default, the files of a
        precache store, or the paths that a `DataLoader`'s dataset lists, as torchvision's do.
    restore
        Objects with a `state_dict` to restore afterwards, such as models and optimizers. Random
        states and the position of a `Loader` or a `Mixture` are always restored.
    progress
        Print each measurement on standard error.

    Raises
    ------
    UsageError
        A limit is not positive, the loader has no batches, a file or device does not exist, or an
        object in `restore` has no state.

    Examples
    --------
    >>> print(diagnose(loader, step, restore=[model, optimizer]))  # doctest: +SKIP
    """
    limit: Any = seconds  # unchecked user input
    if not isinstance(limit, Real) or not float(limit) > 0:
        raise UsageError(f"seconds is {seconds!r}; give a number above 0")
    steps = whole("steps", steps, 1)
    if not isinstance(loader, Iterable):
        raise UsageError(f"loader is a {type(loader).__name__}; give an iterable of batches")
    if not callable(step):
        raise UsageError(f"step is a {type(step).__name__}; give a function of a batch")
    if isinstance(files, str | os.PathLike) or not isinstance(files, Iterable | None):
        raise UsageError(f"files is {files!r}; give a list of paths")
    if not isinstance(restore, Sequence):
        raise UsageError(f"restore is a {type(restore).__name__}; give a list, such as [model]")
    paths = None if files is None else [Path(file) for file in files]
    missing = [path for path in paths or [] if not path.is_file()]
    if missing:
        raise UsageError(
            f"files has {missing[0]}, which is not a file; give the files that the loader reads"
        )
    console = Terminal(stderr=True, quiet=not progress)
    limits = Limits(seconds, steps)

    def tick(name: str) -> None:
        console.print(f"measuring {name} …")

    return Diagnosis.of(
        measure(
            loader,
            step,
            limits=limits,
            device=_device(device),
            files=paths,
            restore=restore,
            tick=tick,
        )
    )


def _device(device: str | torch.device | None) -> torch.device | None:
    chosen = None if device is None else named_device(device)
    if chosen is not None and chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {device!r}, but torch finds no CUDA device")
    return chosen


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    measured = diagnosis.measurements
    yield headline(diagnosis)
    yield (
        f"{number(diagnosis.batches_per_s)} batches/s; {number(diagnosis.without_waiting)} without "
        f"waiting for data, so {lost_share(diagnosis):.0%} of the time is lost to data."
    )
    yield from waiting_notes(diagnosis)
    yield "mean time per batch"
    yield from (f"  {name:14}{_describe(run)}" for name, run in timed_runs(diagnosis).items())
    if measured.copies:
        copies = measured.copies
        pinned = in_ms(copies.from_pinned)
        yield f"  {'copy':14}{in_ms(copies.as_given):>9}  (from page-locked memory {pinned})"
    if measured.cold_note:
        yield f"  the loader was not measured from the disk: {measured.cold_note}"
    helpful = [remedy for remedy in diagnosis.remedies if remedy.gain >= HELPFUL_GAIN]
    if helpful:
        yield "predicted gains"
    for remedy in helpful:
        yield f"  {remedy.gain:.2f}x  {remedy.what} ({CONFIDENCE_TEXT[remedy.confidence]})"
        yield f"         {number(remedy.batches_per_s)} batches/s: {remedy.why}"
    others = ", ".join(remedy.name for remedy in diagnosis.remedies if remedy.gain < HELPFUL_GAIN)
    if others:
        yield f"no gain from: {others}"
    yield from (f"note: {flag}" for flag in diagnosis.flags)


def headline(diagnosis: Diagnosis) -> str:
    """Return the verdict and its reason."""
    return f"{diagnosis.verdict}: {diagnosis.reason}"


def lost_share(diagnosis: Diagnosis) -> float:
    """Return the share of its time that the loop would save if it never waited for data."""
    return max(0.0, 1 - diagnosis.batches_per_s / diagnosis.without_waiting)


def waiting_notes(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield notes: the wait for transforms, and why the wait differs from the time lost to data."""
    measured, lost = diagnosis.measurements, lost_share(diagnosis)
    stall = measured.together.stall
    transforms = stall * measured.together.transform_share
    if transforms >= SAME_SHARE:
        yield (
            f"The loop waits {stall:.0%} of the time: {transforms:.0%} for transforms on the CPU, "
            f"{stall - transforms:.0%} for loading."
        )
    if abs(lost - stall) < SAME_SHARE:
        return
    if measured.setup.cuda:
        why = "the host runs ahead of the device, and only idle time of the device is lost"
    elif measured.cold is not None and not measured.fits:
        why = "its files were in memory, but training would read them from the disk"
    else:
        why = "loading also slows the step down, as they share the cores"
    yield f"The loop waited for data {stall:.0%} of the measured time: {why}."


def timed_runs(diagnosis: Diagnosis) -> dict[str, TimedRun]:
    """Return the runs by name."""
    measured = diagnosis.measurements
    runs = {
        "step alone": measured.step,
        "loader alone": measured.loader,
        "one worker": measured.single_worker,
        "loader, cold": measured.cold,
        "both together": measured.together,
    }
    return {name: run for name, run in runs.items() if run}


def _describe(run: TimedRun) -> str:
    text = f"{in_ms(run.mean):>9}  (p50 {in_ms(run.median)}"
    text += f", p95 {in_ms(run.p95)}, max {in_ms(run.max)}"
    if run.cores is not None:
        text += f"; CPU {run.cores:.2f} cores"
    if run.usage.read_bytes:
        text += f"; {plain(run.usage.read_bytes / run.usage.wall / 1e6, 3)} MB/s from the disk"
    return text + ")"
