"""`diagnose`: whether the data loader limits a training loop, why, and what would help."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from precache.diagnosis.measurements import Measurements, Run
from precache.diagnosis.probes import Limits, measure
from precache.diagnosis.remedies import Remedy
from precache.diagnosis.verdict import Figure, Verdict, judge
from precache.errors import UsageError
from precache.runtime.integers import whole
from precache.runtime.terminal import Terminal

SURE = {"high": "sure", "medium": "fairly sure", "low": "a guess"}
HELPS = 1.05
"""Gain from which a remedy is one."""


@dataclass(frozen=True)
class Diagnosis:
    """What limits a training loop; ``str()`` is the text for people.

    Attributes
    ----------
    verdict
        What limits it. ``compute-bound``: the step, not the data. ``CPU-bound``: preprocessing.
        ``storage-bound``: waiting for a disk, a network or the like. ``transfer-bound``: copies to
        the device. ``variance-bound``: rare slow batches.
    reason
        How that shows, in a sentence.
    evidence
        The figures behind it.
    remedies
        With predicted gains, largest first; a gain of 1 means that it would not help.
    flags
        What else is amiss, a sentence each.
    batches_per_s
        Of the loop as it is.
    without_waiting
        Batches/s with data for free, which no remedy exceeds.
    measurements
        All that was measured.
    """

    verdict: Verdict
    reason: str
    evidence: tuple[Figure, ...]
    remedies: tuple[Remedy, ...]
    flags: tuple[str, ...]
    batches_per_s: float
    without_waiting: float
    measurements: Measurements

    @classmethod
    def of(cls, measurements: Measurements) -> Diagnosis:
        """The verdict on measurements, which are all that it depends on."""
        return cls(**vars(judge(measurements)), measurements=measurements)

    def to_dict(self) -> dict[str, Any]:
        """All but the single batches' times, for JSON."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        measured: Measurements = found.pop("measurements")
        found["evidence"] = [vars(each) for each in self.evidence]
        found["remedies"] = [vars(each) for each in self.remedies]
        found["flags"] = list(self.flags)
        found["setup"] = dataclasses.asdict(measured.setup)
        found["cold_note"] = measured.cold_note
        return found

    def html(self, path: str | os.PathLike[str], after: Diagnosis | None = None) -> None:
        """Write it as a page, one file that needs no network; ``pip install "precache[report]"``.

        Parameters
        ----------
        after
            Another diagnosis of the same loop, with a remedy in place, to be held against this one.

        Raises
        ------
        UsageError
            If matplotlib is not installed.
        StorageError
            If the file cannot be written.
        """
        from precache.diagnosis.page import write_page

        write_page(self, path, after)

    def png(self, path: str | os.PathLike[str], after: Diagnosis | None = None) -> None:
        """Draw it; takes, needs and raises the same."""
        from precache.diagnosis.page import write_png

        write_png(self, path, after)

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
    """Find out whether a loader limits training, at which stage, and what would help.

    Short runs: the step alone on one batch that lies on the device, the loader alone (first from
    the disk, where its files are known and can be dropped from the page cache), both together, and
    one worker alone where there are several. The step really runs: give `restore` what it trains.

    Parameters
    ----------
    loader
        A torch `DataLoader`, a `precache.Loader`, or any iterable of batches. An iterator goes on
        from where it is.
    step
        Called with each batch as the loader gives it; does what training does with it.
    seconds, steps
        Each of the runs ends when either is reached, but not before three batches.
    device
        Where the step computes; by default the current CUDA device if the step uses CUDA.
    files
        That the loader reads, to measure it from the disk; by default those of a store of
        precache, or the paths that a `DataLoader`'s dataset lists, as torchvision's do.
    restore
        Models, optimizers and the like, whose `state_dict` is put back afterwards; so are random
        states and a `Loader`'s position, anyway.
    progress
        Tell on standard error what is being measured.

    Raises
    ------
    UsageError
        A limit is not positive, the loader has no batches, a file or device is not there, or
        something to restore has no state.

    Examples
    --------
    >>> print(diagnose(loader, step, restore=[model, optimizer]))  # doctest: +SKIP
    """
    if not seconds > 0:
        raise UsageError(f"seconds is {seconds}; give a number above 0")
    steps = whole("steps", steps, 1)
    if not isinstance(loader, Iterable):
        raise UsageError(f"loader is a {type(loader).__name__}; give an iterable of batches")
    if not callable(step):
        raise UsageError(f"step is a {type(step).__name__}; give a function of a batch")
    paths = None if files is None else [Path(each) for each in files]
    missing = [path for path in paths or [] if not path.is_file()]
    if missing:
        raise UsageError(f"files has {missing[0]}, which is no file here; name those that are read")
    console = Terminal(stderr=True, quiet=not progress)
    limits = Limits(seconds, steps)

    def tick(what: str) -> None:
        console.print(f"measuring {what} …")

    return Diagnosis.of(measure(loader, step, limits, _device(device), paths, restore, tick))


def _device(device: str | torch.device | None) -> torch.device | None:
    try:
        chosen = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not one torch knows: {error}") from None
    if chosen is not None and chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for, and torch sees no CUDA device")
    return chosen


def _lines(found: Diagnosis) -> Iterator[str]:
    measured = found.measurements
    yield headline(found)
    yield (
        f"{number(found.batches_per_s)} batches/s; {number(found.without_waiting)} if data were "
        f"free. {measured.together.stall:.0%} of the time is spent waiting for data."
    )
    yield "a batch takes"
    yield from (f"  {name:14}{_run(run)}" for name, run in runs(found).items())
    if measured.copies:
        copies = measured.copies
        yield f"  {'copy':14}{in_ms(copies.as_given)}, page-locked {in_ms(copies.from_pinned)}"
    if measured.cold_note:
        yield f"  not measured from the disk: {measured.cold_note}"
    helpful = [each for each in found.remedies if each.gain >= HELPS]
    if helpful:
        yield "what would help"
    for each in helpful:
        yield f"  {each.gain:.2f}x  {each.what} ({SURE[each.confidence]})"
        yield f"         {number(each.batches_per_s)} batches/s: {each.why}"
    others = ", ".join(each.name for each in found.remedies if each.gain < HELPS)
    if others:
        yield f"would not help: {others}"
    yield from (f"note: {flag}" for flag in found.flags)


def headline(found: Diagnosis) -> str:
    """The verdict and its reason."""
    return f"{found.verdict}: {found.reason}"


def runs(found: Diagnosis) -> dict[str, Run]:
    """What was timed, by its name."""
    measured = found.measurements
    timed = {
        "step alone": measured.step,
        "loader alone": measured.loader,
        "one worker": measured.lane,
        "loader, cold": measured.cold,
        "both together": measured.together,
    }
    return {name: run for name, run in timed.items() if run}


def _run(run: Run) -> str:
    text = f"{in_ms(run.mean):>9}  (p50 {in_ms(run.median)}"
    text += f", p95 {in_ms(run.p95)}, max {in_ms(run.max)}"
    if run.cores is not None:
        text += f"; CPU {run.cores:.2f} cores"
    if run.usage.read_bytes:
        text += f"; {run.usage.read_bytes / run.usage.wall / 1e6:,.3g} MB/s from the disk"
    return text + ")"


def in_ms(seconds: float) -> str:
    """Seconds, for people."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
