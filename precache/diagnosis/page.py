"""A diagnosis as a page and as a picture, alone or beside one of the remedied loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from precache.diagnosis.diagnose import HELPS, SURE, Diagnosis, headline, in_ms, number, runs
from precache.diagnosis.remedies import Rates
from precache.diagnosis.replay import recorded, replay
from precache.html import pages
from precache.html.charts import Chart, Panel, bars, distributions, draw_png, need_matplotlib
from precache.simulation.model import Simulation
from precache.simulation.pictures import described, time_line
from precache.simulation.player import played

RECORDED = "As it was recorded: the loop itself loads, and its steps wait meanwhile."
MODELLED = (
    "The loaders are a model: what workers did at any time was not recorded. They take the times "
    "that were measured of one, in turn, and the steps those recorded beside them."
)


class Loop(NamedTuple):
    """How fast a loop is, and the share of its time in which the step waits for data."""

    name: str
    stall: float
    batches_per_s: float
    predicted: bool


def page(found: Diagnosis, after: Diagnosis | None = None) -> str:
    """A page of HTML: one file, no network, light and dark."""
    shown = replay(found.measurements)
    return pages.render(
        "diagnosis.html",
        styles="player.css",
        script="player.js",
        title=headline(found),
        tiles=list(_tiles(found, after)),
        charts=_charts(found, after, shown),
        loops=[
            (each.name, f"{each.stall:.0%}", number(each.batches_per_s))
            for each in loops(found, after, shown)
        ],
        runs=[
            (name, *(in_ms(ms / 1e3) for ms in described(1e3 * np.array(run.seconds))))
            for name, run in runs(found).items()
        ],
        remedies=[
            (f"{each.gain:.2f} x: {each.what}", f"{each.why} ({SURE[each.confidence]})")
            for each in found.remedies
        ],
        evidence=[(each.name, f"{each.value:.4g} {each.unit}") for each in found.evidence],
        flags=found.flags,
        how=RECORDED if recorded(found.measurements) else MODELLED,
        **played(shown),
    )


def write_page(
    found: Diagnosis, path: str | os.PathLike[str], after: Diagnosis | None = None
) -> None:
    """Write the page that `page` makes.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    StorageError
        If the file cannot be written.
    """
    need_matplotlib(os.fspath(path))
    pages.save(page(found, after), os.fspath(path))


def write_png(
    found: Diagnosis, path: str | os.PathLike[str], after: Diagnosis | None = None
) -> None:
    """Draw its charts and its time line into a PNG, 1,600 pixels wide; raises the same."""
    shown = replay(found.measurements)
    charts = _charts(found, after, shown)
    charts.insert(2, _time_line(found, shown))
    draw_png(headline(found), charts, os.fspath(path))


def loops(found: Diagnosis, after: Diagnosis | None, shown: Simulation) -> list[Loop]:
    """The loop as measured, as predicted from its parts, and with each remedy that helps.

    The predicted stall is 1 - batches/s / batches/s with data for free.
    """
    measured, free = found.measurements, found.without_waiting

    def predicted(name: str, rate: float) -> Loop:
        return Loop(name, max(0.0, 1 - rate / free), rate, predicted=True)

    together = measured.together
    made = [Loop("measured", together.stall, 1 / together.mean, predicted=False)]
    made.append(predicted("predicted, as it is", 1 / Rates.of(measured).together()))
    if not recorded(measured):
        made.append(Loop("modelled, as played", shown.stall_share, shown.rate, predicted=True))
    helpful = [each for each in found.remedies if each.gain >= HELPS]
    made += [predicted(f"predicted: {each.name}", each.batches_per_s) for each in helpful]
    if after is not None:
        then = after.measurements.together
        made.append(Loop("measured after", then.stall, 1 / then.mean, predicted=False))
    return made


def _tiles(found: Diagnosis, after: Diagnosis | None) -> Iterator[tuple[str, str]]:
    now = found.measurements.together
    yield "batches/s", number(found.batches_per_s)
    yield "if data were free", number(found.without_waiting)
    yield "waiting for data", f"{now.stall:.0%}"
    if after is not None:
        yield "batches/s after", number(after.batches_per_s)
        yield "waiting after", f"{after.measurements.together.stall:.0%}"
    best = max((each.gain for each in found.remedies), default=1.0)
    if best >= HELPS:
        yield "best remedy", f"{best:.2f} x"


def _charts(found: Diagnosis, after: Diagnosis | None, shown: Simulation) -> list[Chart]:
    timed = {name: 1e3 * np.array(run.seconds) for name, run in runs(found).items()}
    if after is not None:
        timed |= {
            f"{name}, after": 1e3 * np.array(run.seconds) for name, run in runs(after).items()
        }
    note = "Each dot is a batch: of the step alone on one batch, the loader alone, and both."
    charts = [
        _gains(found, loops(found, after, shown)),
        distributions("runs", "Time of a batch, ms", timed, note),
    ]
    if after is not None:
        charts.append(_time_line(after, replay(after.measurements), "Time line after"))
    return charts


def _time_line(found: Diagnosis, shown: Simulation, what: str = "Time line") -> Chart:
    return time_line(shown, what if recorded(found.measurements) else f"{what}, loaders modelled")


def _gains(found: Diagnosis, made: Sequence[Loop]) -> Chart:
    stalls, rates = [each.stall for each in made], [each.batches_per_s for each in made]
    panels = [
        Panel("stall", stalls, [f"{each:.0%}" for each in stalls], top=1),
        Panel(
            "batches/s", rates, list(map(number, rates)), (found.without_waiting, "data for free")
        ),
    ]
    return bars(
        "gains",
        "Before and after",
        [each.name for each in made],
        panels,
        ["green" if each.predicted else "blue" for each in made],
        "The step's share of waiting for data, and the speed: measured blue, predicted green.",
    )
