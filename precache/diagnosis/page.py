"""A diagnosis as a page and a PNG, alone or beside a second one of the remedied loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from precache.diagnosis.diagnose import (
    CONFIDENCE_TEXT,
    HELPFUL_GAIN,
    Diagnosis,
    headline,
    in_ms,
    timed_runs,
)
from precache.diagnosis.remedies import LoopTimes
from precache.diagnosis.replay import recorded, replay
from precache.html.charts import Chart, Panel, bars, distributions, draw_png
from precache.html.pages import render
from precache.simulation.model import Simulation
from precache.simulation.page import statistics, timeline
from precache.simulation.player import player_values
from precache.units import number

RECORDED = "Replayed as recorded: the loop itself loads, and its steps wait meanwhile."
SIMULATED = (
    "The loaders are simulated, since the workers were not recorded: they take the times measured "
    "for one worker in turn, and the steps take the times recorded beside the workers."
)


class Loop(NamedTuple):
    """Speed of a loop, and the share of its time that the step waits for data."""

    name: str
    stall: float
    batches_per_s: float
    predicted: bool


def render_diagnosis(diagnosis: Diagnosis, after: Diagnosis | None = None) -> str:
    """Render a page: one file, no network, light and dark."""
    simulation = replay(diagnosis.measurements)
    return render(
        "diagnosis.html",
        styles="player.css",
        script="player.js",
        title=headline(diagnosis),
        tiles=list(_tiles(diagnosis, after)),
        charts=_charts(diagnosis, after, simulation),
        loops=[
            (loop.name, f"{loop.stall:.0%}", number(loop.batches_per_s))
            for loop in loops(diagnosis, after, simulation)
        ],
        runs=[
            (name, *(in_ms(ms / 1e3) for ms in statistics(1e3 * np.array(run.seconds))))
            for name, run in timed_runs(diagnosis).items()
        ],
        remedies=[
            (f"{r.gain:.2f} x: {r.what}", f"{r.why} ({CONFIDENCE_TEXT[r.confidence]})")
            for r in diagnosis.remedies
        ],
        evidence=[(fig.name, f"{fig.value:.4g} {fig.unit}") for fig in diagnosis.evidence],
        flags=diagnosis.flags,
        replay_note=RECORDED if recorded(diagnosis.measurements) else SIMULATED,
        **player_values(simulation),
    )


def draw_diagnosis(
    diagnosis: Diagnosis, path: str | os.PathLike[str], after: Diagnosis | None = None
) -> None:
    """Draw the charts and the timeline into a PNG, 1,600 pixels wide.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    StorageError
        If the file cannot be written.
    """
    simulation = replay(diagnosis.measurements)
    charts = _charts(diagnosis, after, simulation)
    charts.insert(2, _timeline(diagnosis, simulation))
    draw_png(headline(diagnosis), charts, os.fspath(path))


def loops(diagnosis: Diagnosis, after: Diagnosis | None, simulation: Simulation) -> list[Loop]:
    """List the loop as measured, as predicted from its parts, and with each helpful remedy.

    The predicted stall is 1 - batches/s / batches/s with data for free.
    """
    measured, free = diagnosis.measurements, diagnosis.without_waiting

    def predicted(name: str, rate: float) -> Loop:
        return Loop(name, max(0.0, 1 - rate / free), rate, predicted=True)

    together = measured.together
    result = [Loop("measured", together.stall, 1 / together.mean, predicted=False)]
    result.append(predicted("predicted, unchanged", 1 / LoopTimes.of(measured).together()))
    if not recorded(measured):
        result.append(
            Loop("simulated, as replayed", simulation.stall_share, simulation.rate, predicted=True)
        )
    helpful = [remedy for remedy in diagnosis.remedies if remedy.gain >= HELPFUL_GAIN]
    result += [predicted(f"predicted: {r.name}", r.batches_per_s) for r in helpful]
    if after is not None:
        remedied = after.measurements.together
        result.append(Loop("measured after", remedied.stall, 1 / remedied.mean, predicted=False))
    return result


def _tiles(diagnosis: Diagnosis, after: Diagnosis | None) -> Iterator[tuple[str, str]]:
    now = diagnosis.measurements.together
    yield "batches/s", number(diagnosis.batches_per_s)
    yield "without waiting", number(diagnosis.without_waiting)
    yield "waiting for data", f"{now.stall:.0%}"
    if after is not None:
        yield "batches/s after", number(after.batches_per_s)
        yield "waiting after", f"{after.measurements.together.stall:.0%}"
    best = max((remedy.gain for remedy in diagnosis.remedies), default=1.0)
    if best >= HELPFUL_GAIN:
        yield "best remedy", f"{best:.2f} x"


def _charts(diagnosis: Diagnosis, after: Diagnosis | None, simulation: Simulation) -> list[Chart]:
    times_ms = {name: 1e3 * np.array(run.seconds) for name, run in timed_runs(diagnosis).items()}
    if after is not None:
        times_ms |= {
            f"{name}, after": 1e3 * np.array(run.seconds) for name, run in timed_runs(after).items()
        }
    note = "Each dot is a batch. The step alone repeats one batch."
    charts = [
        _gains(diagnosis, loops(diagnosis, after, simulation)),
        distributions("runs", "Time per batch, ms", times_ms, note),
    ]
    if after is not None:
        charts.append(_timeline(after, replay(after.measurements), "Timeline after"))
    return charts


def _timeline(diagnosis: Diagnosis, simulation: Simulation, title: str = "Timeline") -> Chart:
    simulated = "" if recorded(diagnosis.measurements) else ", loaders simulated"
    return timeline(simulation, title + simulated)


def _gains(diagnosis: Diagnosis, loops: Sequence[Loop]) -> Chart:
    stalls, rates = [loop.stall for loop in loops], [loop.batches_per_s for loop in loops]
    panels = [
        Panel("stall", stalls, [f"{stall:.0%}" for stall in stalls], top=1),
        Panel(
            "batches/s",
            rates,
            list(map(number, rates)),
            (diagnosis.without_waiting, "without waiting"),
        ),
    ]
    return bars(
        "gains",
        "Before and after",
        [loop.name for loop in loops],
        panels,
        ["green" if loop.predicted else "blue" for loop in loops],
        "Stall is the share of time spent waiting for data. Blue is measured, green is predicted.",
    )
