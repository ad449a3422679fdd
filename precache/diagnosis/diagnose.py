"""`diagnose`: find the bottleneck of a training loop, and predict the gain of remedies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from precache.diagnosis.judgement import Remedy, Verdict, find_flags, find_remedies, find_verdict
from precache.diagnosis.loop_model import LoopModel
from precache.diagnosis.loop_probes import Limits, Probes, restored
from precache.diagnosis.measurements import Measurements, TimedRun
from precache.errors import UsageError
from precache.html.charts import Bars, Dots, Panel
from precache.loading.options import find_device
from precache.messages import Table, as_text, plain_data
from precache.runtime.integers import whole
from precache.runtime.spread import Spread
from precache.runtime.terminal import Terminal
from precache.simulation.model import Simulation
from precache.units import in_ms, number, plain

CONFIDENCE_TEXT = {"high": "sure", "medium": "fairly sure", "low": "a guess"}
HELPFUL_GAIN = 1.05
"""Gain from which a remedy is reported as helpful."""
SAME_SHARE = 0.02
"""Difference of two shares below which they are reported as one."""


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck of a training loop; ``str()`` gives the text for people.

    Attributes
    ----------
    verdict
        The bottleneck. ``compute-bound``: the step, not the data. ``CPU-bound``: preprocessing.
        ``storage-bound``: waiting for a disk, a network or the like. ``contention-bound``: workers
        wait for each other. ``startup-bound``: starting workers in each epoch.
        ``transfer-bound``: copies to the device. ``variance-bound``: rare slow batches.
    reason
        One sentence that explains the verdict.
    remedies
        Possible changes with predicted gains, largest first; a gain of 1 means no improvement.
    flags
        Other problems, one sentence each.
    batches_per_s
        Current speed of the loop, the start of each epoch included.
    without_waiting
        Batches/s if the step never waited for data; no remedy exceeds it.
    simulation
        Timeline of the loop, from the measured times.
    measurements
        Everything that was measured.
    """

    verdict: Verdict
    reason: str
    remedies: tuple[Remedy, ...]
    flags: tuple[str, ...]
    batches_per_s: float
    without_waiting: float
    simulation: Simulation
    measurements: Measurements

    @classmethod
    def of(cls, measurements: Measurements) -> Diagnosis:
        """Judge measurements; the result depends on nothing else."""
        model = LoopModel(measurements)
        verdict, reason = find_verdict(model)
        return cls(
            verdict=verdict,
            reason=reason,
            remedies=find_remedies(model),
            flags=tuple(find_flags(model)),
            batches_per_s=model.now,
            without_waiting=1 / model.step,
            simulation=model.run(),
            measurements=measurements,
        )

    @property
    def lost_share(self) -> float:
        """Share of its time that the loop would save if it never waited for data."""
        return max(0.0, 1 - self.batches_per_s / self.without_waiting)

    @property
    def helpful(self) -> list[Remedy]:
        """Remedies that are worth the change, largest gain first."""
        return [remedy for remedy in self.remedies if remedy.gain >= HELPFUL_GAIN]

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement, the setup and the figures of each run, for JSON."""
        names = "verdict", "reason", "remedies", "flags", "batches_per_s", "without_waiting"
        data = {name: plain_data(getattr(self, name)) for name in names}
        runs = {name: run_figures(run) for name, run in self.measurements.runs.items()}
        return {**data, "runs": runs, "setup": plain_data(self.measurements.setup)}

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write a page: one file that needs no network; ``pip install "precache[report]"``.

        Raises
        ------
        UsageError
            If jinja2 is not installed.
        StorageError
            If the file cannot be written.
        """
        from precache.html.pages import save

        save(render_diagnosis(self), os.fspath(path))

    def __str__(self) -> str:
        return as_text(_lines(self))


def run_figures(run: TimedRun) -> dict[str, float]:
    """Return seconds per batch, and busy cores and bytes/s read from a disk where known."""
    usage, spread = run.usage, Spread.of(run.seconds)
    figures = {"mean": run.mean, "p50": spread.median, "p95": spread.p95, "max": spread.max}
    known = {"cores": usage.cpu, "read_bytes_per_s": usage.read_bytes}
    return figures | {name: run.share(value) for name, value in known.items() if value is not None}


def runs_table(measured: Measurements) -> Table:
    """Return the figures of each run as text."""
    table = Table(("per batch", "mean", "p50", "p95", "max", "CPU cores", "disk MB/s"), [])
    for name, run in measured.runs.items():
        figures = run_figures(run)
        times = (in_ms(figures[key]) for key in ("mean", "p50", "p95", "max"))
        cores = f"{figures['cores']:.2f}" if "cores" in figures else ""
        read = figures.get("read_bytes_per_s")
        table.add_row(name, *times, cores, plain(read / 1e6, 3) if read else "")
    return table


def diagnose(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    *,
    seconds: float = 5.0,
    steps: int = 200,
    device: str | torch.device | None = None,
    restore: Sequence[Any] = (),
    progress: bool = False,
) -> Diagnosis:
    """Find the bottleneck of a training loop, and predict the gain of remedies.

    Short runs measure the step alone (on one batch on the device), the loader alone, both together,
    and one worker alone if there are several. The step really trains: pass the objects that it
    changes as `restore`. Of several ranks, each has its own diagnosis: a step that waits for other
    ranks counts as a long step.

    Parameters
    ----------
    loader
        A torch `DataLoader`, a `precache.Loader`, a `Mixture`, or any iterable of batches. An
        iterator continues from its position.
    step
        Function that takes a batch as the loader yields it, and runs one training step.
    seconds, steps
        Limits of each run. A run ends at the first limit that it reaches, but not before three
        batches (or `steps`, if fewer), nor at `seconds` before the fourth slow batch if these take
        a tenth of the time; at the latest it ends after three times `seconds`.
    device
        Device of the step; by default the current CUDA device if the step uses CUDA.
    restore
        Objects with a `state_dict` to restore afterwards, such as models and optimizers. Random
        states and the position of a `Loader` or a `Mixture` are always restored.
    progress
        Print each measurement on standard error.

    Raises
    ------
    UsageError
        A limit is not positive, the loader has no batches, the device does not exist, or an object
        in `restore` has no state.

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
    if not isinstance(restore, Sequence):
        raise UsageError(f"restore is a {type(restore).__name__}; give a list, such as [model]")
    console = Terminal(stderr=True, quiet=not progress)
    probes = Probes(
        loader=loader,
        step=step,
        limits=Limits(seconds, steps),
        device=None if device is None else find_device(device),
        tick=lambda name: console.print(f"measuring {name} …"),
    )
    with restored(loader, restore):
        measured = probes.run()
    return Diagnosis.of(measured)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{diagnosis.verdict}: {diagnosis.reason}"
    yield (
        f"{number(diagnosis.batches_per_s)} batches/s; {number(diagnosis.without_waiting)} without "
        f"waiting for data, so {diagnosis.lost_share:.0%} of the time is lost to data."
    )
    yield from waiting_notes(diagnosis)
    yield from ("", *runs_table(diagnosis.measurements).lines(), "")
    if diagnosis.helpful:
        yield "predicted gains"
    for remedy in diagnosis.helpful:
        yield f"  {remedy.gain:.2f}x  {remedy.what} ({CONFIDENCE_TEXT[remedy.confidence]})"
        yield f"         {number(remedy.batches_per_s)} batches/s: {remedy.why}"
    if others := diagnosis.remedies[len(diagnosis.helpful) :]:
        yield f"no gain from: {', '.join(remedy.name for remedy in others)}"
    yield from (f"note: {flag}" for flag in diagnosis.flags)


def waiting_notes(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield notes: the wait for transforms, and why the wait differs from the time lost to data."""
    measured, lost = diagnosis.measurements, diagnosis.lost_share
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
    elif measured.setup.workers and measured.setup.epoch:
        why = "that leaves out the start of each epoch, and how much loading slows the step"
    else:
        why = "loading also slows the step down, as they share the cores"
    yield f"The loop waited for data {stall:.0%} of the measured time: {why}."


# --- the page -----------------------------------------------------------------------------------


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """Render a self-contained HTML page, for light and dark mode."""
    from precache.html.pages import render
    from precache.simulation.page import player_values

    played, stall = diagnosis.simulation.stall_share, diagnosis.measurements.together.stall
    names, shares, rates = zip(*loops(diagnosis), strict=True)
    free = diagnosis.without_waiting, "without waiting"
    panels = [
        Panel("lost to data", shares, [f"{share:.0%}" for share in shares], top=1),
        Panel("batches/s", rates, [*map(number, rates)], free),
    ]
    colours = ["blue"] + ["green"] * (len(names) - 1)
    note = "Predictions, in green, are of the loop with a remedy."
    times = {name: 1e3 * run.times for name, run in diagnosis.measurements.runs.items()}
    return render(
        "diagnosis.html",
        title=f"{diagnosis.verdict}: {diagnosis.reason}",
        tiles=[
            ("batches/s", number(diagnosis.batches_per_s)),
            ("without waiting", number(diagnosis.without_waiting)),
            ("lost to data", f"{diagnosis.lost_share:.0%}"),
            *(("best remedy", f"{best.gain:.2f} x") for best in diagnosis.helpful[:1]),
        ],
        bars=Bars("Before and after", names, panels, colours, note),
        dots=Dots("Time per batch", times, "Each dot is a batch."),
        remedies=[
            (f"{r.gain:.2f} x: {r.what}", f"{r.why} ({CONFIDENCE_TEXT[r.confidence]})")
            for r in diagnosis.remedies
        ],
        flags=[*waiting_notes(diagnosis), *diagnosis.flags],
        replay_note=(
            f"The loop as the model has it, from the measured load and step times: it waits "
            f"{played:.0%} of the time; the measured loop waited {stall:.0%}."
        ),
        **player_values(diagnosis.simulation),
    )


def loops(diagnosis: Diagnosis) -> list[tuple[str, float, float]]:
    """List the loop as it is, and with each helpful remedy: name, share lost to data, batches/s."""
    result = [("now, measured", diagnosis.lost_share, diagnosis.batches_per_s)]
    for remedy in diagnosis.helpful:
        lost = max(0.0, 1 - remedy.batches_per_s / diagnosis.without_waiting)
        result.append((f"{remedy.name}, predicted", lost, remedy.batches_per_s))
    return result
