"""Render a diagnosis as an HTML page or a PNG, optionally with a second one after a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from precache.diagnosis.diagnose import (
    CONFIDENCE_TEXT,
    HELPFUL_GAIN,
    Diagnosis,
    headline,
    lost_share,
    timed_runs,
    waiting_notes,
)
from precache.diagnosis.measurements import Measurements
from precache.diagnosis.replay import recorded, replay
from precache.html.charts import Chart, Panel, bars, distributions
from precache.html.pages import render
from precache.simulation.model import Simulation
from precache.simulation.page import time_summary, timeline
from precache.simulation.player import player_values
from precache.units import in_ms, number

RECORDED = "Replayed as recorded: the loop itself loads, and its steps wait meanwhile."
SIMULATED = (
    "The loaders are simulated, since the workers were not recorded: they use the times measured "
    "for one worker, and the steps use the times recorded while the workers ran."
)


class Loop(NamedTuple):
    """Speed of a loop, and the share of its time that is lost to data."""

    name: str
    lost_share: float
    batches_per_s: float
    predicted: bool


def render_diagnosis(diagnosis: Diagnosis, after: Diagnosis | None = None) -> str:
    """Render a self-contained HTML page, for light and dark mode."""
    simulation = replay(diagnosis.measurements)
    return render(
        "diagnosis.html",
        styles="player.css",
        script="player.js",
        title=headline(diagnosis),
        tiles=list(_tiles(diagnosis, after)),
        charts=_charts(diagnosis, after),
        loops=[
            (
                loop.name,
                "predicted" if loop.predicted else "measured",
                f"{loop.lost_share:.0%}",
                number(loop.batches_per_s),
            )
            for loop in loops(diagnosis, after)
        ],
        runs=[
            (name, *(in_ms(ms / 1e3) for ms in time_summary(1e3 * np.array(run.seconds))))
            for name, run in timed_runs(diagnosis).items()
        ],
        remedies=[
            (f"{r.gain:.2f} x: {r.what}", f"{r.why} ({CONFIDENCE_TEXT[r.confidence]})")
            for r in diagnosis.remedies
        ],
        evidence=[(fig.name, f"{fig.value:.4g} {fig.unit}") for fig in diagnosis.evidence],
        flags=[*waiting_notes(diagnosis), *diagnosis.flags],
        replay_note=_replay_note(diagnosis.measurements, simulation),
        **player_values(simulation),
    )


def loops(diagnosis: Diagnosis, after: Diagnosis | None) -> list[Loop]:
    """List the current loop, a prediction per helpful remedy, and the loop measured after one."""
    free, rate = diagnosis.without_waiting, diagnosis.batches_per_s
    result = [Loop("now", lost_share(diagnosis), rate, predicted=False)]
    result += [
        Loop(remedy.name, max(0.0, 1 - remedy.batches_per_s / free), remedy.batches_per_s, True)
        for remedy in diagnosis.remedies
        if remedy.gain >= HELPFUL_GAIN
    ]
    if after is not None:
        result.append(Loop("after", lost_share(after), after.batches_per_s, predicted=False))
    return result


def _replay_note(measured: Measurements, simulation: Simulation) -> str:
    if recorded(measured):
        return RECORDED
    played, stall = simulation.stall_share, measured.together.stall
    waits = f"The replayed loop waits {played:.0%} of the time; the measured one waited {stall:.0%}"
    return f"{SIMULATED} {waits}."


def _tiles(diagnosis: Diagnosis, after: Diagnosis | None) -> Iterator[tuple[str, str]]:
    yield "batches/s", number(diagnosis.batches_per_s)
    yield "without waiting", number(diagnosis.without_waiting)
    yield "lost to data", f"{lost_share(diagnosis):.0%}"
    if after is not None:
        yield "batches/s after", number(after.batches_per_s)
        yield "lost after", f"{lost_share(after):.0%}"
    best = max((remedy.gain for remedy in diagnosis.remedies), default=1.0)
    if best >= HELPFUL_GAIN:
        yield "best remedy", f"{best:.2f} x"


def _charts(diagnosis: Diagnosis, after: Diagnosis | None) -> list[Chart]:
    times_ms = {name: 1e3 * np.array(run.seconds) for name, run in timed_runs(diagnosis).items()}
    if after is not None:
        times_ms |= {
            f"{name}, after": 1e3 * np.array(run.seconds) for name, run in timed_runs(after).items()
        }
    note = "Each dot is a batch. The step alone repeats one batch."
    charts = [
        _gains(diagnosis, loops(diagnosis, after)),
        distributions("runs", "Time per batch, ms", times_ms, note),
    ]
    if after is not None:
        charts.append(_timeline(after, replay(after.measurements), "Timeline after"))
    return charts


def _timeline(diagnosis: Diagnosis, simulation: Simulation, title: str = "Timeline") -> Chart:
    simulated = "" if recorded(diagnosis.measurements) else ", loaders simulated"
    return timeline(simulation, title + simulated)


def _gains(diagnosis: Diagnosis, loops: Sequence[Loop]) -> Chart:
    shares, rates = [loop.lost_share for loop in loops], [loop.batches_per_s for loop in loops]
    panels = [
        Panel("lost to data", shares, [f"{share:.0%}" for share in shares], top=1),
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
        "The share of its time that the loop would save if it never waited for data; its speed. "
        "Blue is measured, green is predicted with a remedy.",
    )
