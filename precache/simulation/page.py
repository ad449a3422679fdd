"""Render a simulation as an HTML page that replays it, or its charts as a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from precache.html.charts import Chart, Palette, distributions
from precache.html.pages import bar, render
from precache.simulation import text
from precache.simulation.model import MOST_LOADERS, Nanoseconds, Simulation, simulate_scenario
from precache.simulation.player import player_values

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

MAX_LANES = 24
"""Maximum number of loaders that have a lane in a chart."""
SPAN_NAMES = {
    "blue": "loading",
    "orange": "blocked by a full queue",
    "green": "training step",
    "bad": "waiting for data",
}
"""Colour -> meaning of a span in the timeline."""
MAX_WAITS = 2_000
"""Maximum number of batches whose waits the PNG shows."""


def render_simulation(simulation: Simulation) -> str:
    """Render a self-contained HTML page that replays a simulation, for light and dark mode."""
    spans = spans_ms(simulation)
    return render(
        "simulation.html",
        styles="player.css",
        script="player.js",
        title=text.scenario_title(simulation),
        verdict=text.verdict(simulation),
        tiles=text.figures(simulation),
        stalls=[
            (name, f"{predicted:.1%}", f"{simulated:.1%}", bar(simulated))
            for name, predicted, simulated in _stalls_with_more(simulation)
        ],
        charts=[_spans_chart(spans)] if spans and find_spec("matplotlib") else [],
        times=[(name, *map(text.milliseconds, time_summary(ms))) for name, ms in spans.items()],
        replay_note="",
        positions=[
            (position, text.milliseconds(wait))
            for position, wait in enumerate(simulation.stall_by_place_ms, 1)
        ],
        **player_values(simulation),
    )


def _stalls_with_more(simulation: Simulation) -> Iterator[tuple[str, float, float]]:
    """Yield the stall with these loaders, with one more, and with enough to keep up with the step.

    Each item is a name, the stall predicted from the mean times (1 - loaders / load time x step
    time), and the simulated stall.
    """
    scenario = simulation.scenario
    enough = math.ceil(scenario.load.mean_ms / scenario.step.mean_ms)
    loaders = [scenario.loaders, scenario.loaders + 1]
    if scenario.loaders + 1 < enough <= MOST_LOADERS:
        loaders.append(enough)
    for count in loaders:
        other = replace(scenario, loaders=count)
        result = simulation if count == scenario.loaders else simulate_scenario(other)
        predicted = max(0.0, 1 - other.loading_limit / other.step_limit)
        yield text.count(count, "loader"), predicted, result.stall_share


def spans_ms(simulation: Simulation) -> dict[str, npt.NDArray[np.float64]]:
    """Return the lengths in ms of the spans that ended in time, by kind; without empty kinds."""
    end = simulation.end
    begun, ready, queued = simulation.begun, simulation.ready, simulation.queued
    spans = {
        "load": (ready - begun)[ready <= end] / 1e6,
        "blocked by a full queue": (queued - ready)[queued <= end] / 1e6,
        "in the queue": (simulation.taken - queued)[simulation.taken <= end] / 1e6,
        "wait before a step": simulation.stalls_ms[1:],
        "step": (simulation.done - simulation.taken)[simulation.done <= end] / 1e6,
    }
    return {name: ms for name, ms in spans.items() if len(ms)}


def time_summary(ms: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Return the median, mean, 95th percentile and maximum."""
    return (np.median(ms), ms.mean(), np.percentile(ms, 95), ms.max())


# --- charts -------------------------------------------------------------------------------------


def _spans_chart(spans: Mapping[str, npt.NDArray[np.float64]]) -> Chart:
    note = "Each dot is a batch; spans of no time are at the left end."
    return distributions("times", "Times of a batch, ms", spans, note)


def timeline(simulation: Simulation, title: str = "Timeline") -> Chart:
    """Chart a lane per loader, one for the training loop, and the length of the queue."""
    loaders, until = simulation.scenario.loaders, _timeline_end(simulation)
    lanes = min(loaders, MAX_LANES)
    limits = [f"{lanes} of {loaders} loaders"] if lanes < loaders else []
    limits += [f"the first {until / 1e9:.3g} s"] if until < simulation.end else []
    title = ", ".join([title, *limits])

    def draw(figure: FigureBase, palette: Palette, wide: bool) -> None:
        if simulation.scenario.capacity:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[lanes + 1, 3])
            _draw_queue(lower, simulation, until, palette)
        else:
            upper = figure.subplots()
            upper.set_xlabel("time, s")
        _draw_lanes(upper, simulation, until, palette)
        upper.legend(
            handles=_legend_handles(upper),
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=4 if wide else 2,
            handlelength=1.2,
            columnspacing=1,
        )

    height = 80 + max(60, 22 * (lanes + 1)) + (80 if simulation.scenario.capacity else 0)
    alt = (
        f"{title}: loaders are blocked {simulation.blocked_share:.1%} of their time, the training "
        f"loop waits {simulation.stall_share:.1%} of its time after start-up"
    )
    return Chart("lanes", title, alt, (height, height), draw)


def _timeline_end(simulation: Simulation) -> int:
    """Return the end of the lanes in nanoseconds, early enough that single steps are visible."""
    scenario = simulation.scenario
    shown_ms = max(6 * scenario.load.mean_ms, 60 * scenario.step.mean_ms)
    return min(simulation.end, round(1e6 * shown_ms))


def _draw_lanes(axes: Axes, simulation: Simulation, until: int, palette: Palette) -> None:
    lanes = min(simulation.scenario.loaders, MAX_LANES)
    times = (simulation.begun, simulation.ready, simulation.queued)
    begun, ready, queued = (np.minimum(column, until) for column in times)
    for loader in range(lanes):
        own = (simulation.loader == loader) & (simulation.begun < until)
        blocked = own & (ready < queued)
        _draw_spans(axes, begun[own], ready[own], loader, "blue", palette)
        _draw_spans(axes, ready[blocked], queued[blocked], loader, "orange", palette)
    taken = np.minimum(simulation.taken[simulation.order], until)
    done = np.minimum(simulation.done[simulation.order], until)
    _draw_spans(axes, taken, done, lanes, "green", palette)
    wait_begins, wait_ends = np.append(0, done), np.append(taken, until)
    _draw_spans(axes, wait_begins, wait_ends, lanes, "bad", palette)
    names = [*(f"loader {n + 1}" for n in range(lanes)), "training"]
    axes.set_yticks(range(lanes + 1), names, fontsize=12 if lanes < 12 else 9)
    axes.set_ylim(lanes + 0.6, -0.6)
    axes.set_xlim(0, until / 1e9)


def _legend_handles(axes: Axes) -> list[Artist]:
    """Return one artist of each kind of span."""
    return list({artist.get_label(): artist for artist in axes.collections}.values())


def _draw_spans(
    axes: Axes, begin: Nanoseconds, end: Nanoseconds, lane: int, colour: str, palette: Palette
) -> None:
    spans = np.column_stack([begin, end - begin])[end > begin]
    if not len(spans):
        return
    hatch = "" if colour in ("blue", "green") else "////"
    # An edge in the background colour separates spans that are wide enough for it.
    wide = np.median(spans[:, 1]) > end.max() / 200
    axes.broken_barh(
        list(map(tuple, (spans / 1e9).tolist())),
        (lane - 0.4, 0.8),
        facecolor="none" if hatch else palette[colour],
        edgecolor=palette["bg"] if wide and not hatch else palette[colour],
        linewidth=0.4,
        hatch=hatch,
        label=SPAN_NAMES[colour],
    )


def _draw_queue(axes: Axes, simulation: Simulation, until: int, palette: Palette) -> None:
    from matplotlib.ticker import MaxNLocator

    times, depth = simulation.queue_depth
    kept = times <= until
    times, depth = np.append(times[kept], until), np.append(depth[kept], 0)
    axes.fill_between(times / 1e9, depth, step="post", color=palette["blue"], linewidth=0)
    axes.set_ylim(0, max(1, depth.max()) * 1.05)
    axes.set_xlabel("time, s")
    axes.set_ylabel("queue")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(axis="x")
