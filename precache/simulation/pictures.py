"""Pictures of a simulation: a page that plays it, and a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from precache.html import pages
from precache.html.charts import Chart, Inks, Panel, bars, distributions, draw_png
from precache.simulation import text
from precache.simulation.model import MOST_LOADERS, Simulation, Times, run
from precache.simulation.player import played

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

LANES = 24
"""Loaders with a lane of their own in a picture."""
KINDS = {
    "blue": "loading",
    "orange": "blocked by a full queue",
    "green": "training step",
    "bad": "waiting for data",
}
"""Of spans in the time line, by their colours."""
BARS = 2_000
"""Batches whose waits the PNG shows."""


def page(found: Simulation) -> str:
    """A page of HTML that plays a simulation: one file, no network, light and dark."""
    return pages.render(
        "simulation.html",
        styles="player.css",
        script="player.js",
        title=text.title(found),
        verdict=text.verdict(found),
        tiles=text.summary(found),
        remedied=[(name, by_law(each), each.stall_share) for name, each in with_more(found)],
        charts=[spreads(found)] if times(found) and find_spec("matplotlib") else [],
        times=[(name, *map(text.number, described(ms))) for name, ms in times(found).items()],
        how="",
        places=[(n, text.number(wait)) for n, wait in enumerate(found.stall_by_place_ms, 1)],
        **played(found),
    )


def with_more(found: Simulation) -> Iterator[tuple[str, Simulation]]:
    """The same as it is, with one more loader, and with as many as keep up with the step."""
    setting = found.setting
    yield f"as simulated, {text.count(setting.loaders, 'loader')}", found
    yield "with one more", found.with_one_more()
    enough = math.ceil(setting.load.mean_ms / setting.step.mean_ms)
    if setting.loaders + 1 < enough <= MOST_LOADERS:
        yield f"with {enough:,}, load / step time", run(replace(setting, loaders=enough))


def by_law(found: Simulation) -> float:
    """Share of waiting that the mean times alone make: 1 - loaders / load time x step time."""
    return max(0.0, 1 - found.setting.loading_limit / found.setting.step_limit)


def times(found: Simulation) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds of what was done up to the end, where there is some."""
    end = found.end
    spans = {
        "load": (found.ready - found.begun)[found.ready <= end] / 1e6,
        "blocked by a full queue": (found.queued - found.ready)[found.queued <= end] / 1e6,
        "in the queue": (found.taken - found.queued)[found.taken <= end] / 1e6,
        "wait before a step": found.stalls_ms[1:],
        "step": (found.done - found.taken)[found.done <= end] / 1e6,
    }
    return {name: ms for name, ms in spans.items() if len(ms)}


def spreads(found: Simulation) -> Chart:
    """How the times differ from batch to batch."""
    note = "Each dot is a batch; what took no time is at the left end."
    return distributions("times", "Times of a batch, ms", times(found), note)


def described(ms: npt.NDArray[np.float64]) -> tuple[float, ...]:
    return (*np.percentile(ms, 50, keepdims=True), ms.mean(), np.percentile(ms, 95), ms.max())


def write_page(found: Simulation, path: str | Path) -> None:
    """Write the page that `page` makes.

    Raises
    ------
    StorageError
        If the file cannot be written.
    """
    pages.save(page(found), path)


def write_png(found: Simulation, path: str | Path) -> None:
    """Draw loaders, queue, waits and stall into a PNG, 1,600 pixels wide, with matplotlib.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    StorageError
        If the file cannot be written.
    """
    more = list(with_more(found))
    names, shares = [name for name, _ in more], [each.stall_share for _, each in more]
    laws = [by_law(each) for _, each in more]
    stall = [
        Panel("by the law", laws, [f"{each:.1%}" for each in laws], top=1),
        Panel("simulated, after start-up", shares, [f"{each:.1%}" for each in shares], top=1),
    ]
    charts = [
        time_line(found),
        waits(found),
        *([spreads(found)] if times(found) else []),
        bars("stall", "Stall with more loaders", names, stall, ["blue"] * len(more)),
    ]
    draw_png(text.title(found), charts, path)


# --- charts -------------------------------------------------------------------------------------


def time_line(found: Simulation, what: str = "Time line") -> Chart:
    """A lane for each loader and one for the training loop, and the length of the queue."""
    lanes, until = min(found.setting.loaders, LANES), _window(found)
    shown = [f"{lanes} of {found.setting.loaders} loaders"] if lanes < found.setting.loaders else []
    shown += [f"the first {until / 1e9:.3g} s"] if until < found.end else []
    title = ", ".join([what, *shown])

    def draw(figure: FigureBase, inks: Inks, wide: bool) -> None:
        if found.setting.room:
            over, under = figure.subplots(2, 1, sharex=True, height_ratios=[lanes + 1, 3])
            _draw_queue(under, found, until, inks)
        else:
            over = figure.subplots()
            over.set_xlabel("time, s")
        _draw_lanes(over, found, until, inks)
        over.legend(
            handles=_kinds(over),
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=4 if wide else 2,
            handlelength=1.2,
            columnspacing=1,
        )

    height = 80 + max(60, 22 * (lanes + 1)) + (80 if found.setting.room else 0)
    alt = (
        f"{title}: loaders are blocked {found.blocked_share:.1%} of their time, the training loop "
        f"waits {found.stall_share:.1%} of its time after start-up"
    )
    return Chart("lanes", title, alt, (height, height), draw)


def _window(found: Simulation) -> int:
    """Nanoseconds that the lanes show: some rounds and steps, so that each can be seen."""
    setting = found.setting
    return min(found.end, round(1e6 * max(6 * setting.load.mean_ms, 60 * setting.step.mean_ms)))


def _draw_lanes(axes: Axes, found: Simulation, until: int, inks: Inks) -> None:
    lanes = min(found.setting.loaders, LANES)
    begun, ready, queued = (np.minimum(t, until) for t in (found.begun, found.ready, found.queued))
    for loader in range(lanes):
        mine = (found.loader == loader) & (found.begun < until)
        held = mine & (ready < queued)
        _bars(axes, begun[mine], ready[mine], loader, "blue", inks)
        _bars(axes, ready[held], queued[held], loader, "orange", inks)
    taken, done = (np.minimum(t[found.order], until) for t in (found.taken, found.done))
    free = np.concatenate([[0], done])
    wanted = np.concatenate([taken, [until]])
    _bars(axes, taken, done, lanes, "green", inks)
    _bars(axes, free, wanted, lanes, "bad", inks)
    names = [*(f"loader {n + 1}" for n in range(lanes)), "training"]
    axes.set_yticks(range(lanes + 1), names, fontsize=12 if lanes < 12 else 9)
    axes.set_ylim(lanes + 0.6, -0.6)
    axes.set_xlim(0, until / 1e9)


def _kinds(axes: Axes) -> list[Artist]:
    """One of each kind of spans that were drawn."""
    return list({each.get_label(): each for each in axes.collections}.values())


def _bars(axes: Axes, begin: Times, end: Times, lane: int, ink: str, inks: Inks) -> None:
    spans = np.column_stack([begin, end - begin])[end > begin]
    if not len(spans):
        return
    hatch = "" if ink in ("blue", "green") else "////"
    # A line around each bar tells it from the next, where it would not cover it.
    wide = np.median(spans[:, 1]) > end.max() / 200
    axes.broken_barh(
        list(map(tuple, (spans / 1e9).tolist())),
        (lane - 0.4, 0.8),
        facecolor="none" if hatch else inks[ink],
        edgecolor=inks["bg"] if wide and not hatch else inks[ink],
        linewidth=0.4,
        hatch=hatch,
        label=KINDS[ink],
    )


def _draw_queue(axes: Axes, found: Simulation, until: int, inks: Inks) -> None:
    from matplotlib.ticker import MaxNLocator

    times, depth = found.queue_depth
    shown = times <= until
    times, depth = np.append(times[shown], until), np.append(depth[shown], 0)
    axes.fill_between(times / 1e9, depth, step="post", color=inks["blue"], linewidth=0)
    axes.set_ylim(0, max(1, depth.max()) * 1.05)
    axes.set_xlabel("time, s")
    axes.set_ylabel("queue")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(axis="x")


def waits(found: Simulation) -> Chart:
    """The wait before each batch but the first."""
    which = f"the first {BARS:,} batches" if len(found.stalls_ms) > BARS else "each batch"
    title = f"Wait before {which}, ms; {found.stall_share:.1%} of the time, start-up left out"

    def draw(figure: FigureBase, inks: Inks, wide: bool) -> None:
        axes, waits = figure.subplots(), found.stalls_ms[1:BARS]
        width = max(0.3, min(3, 600 / (len(waits) + 1)))
        axes.vlines(np.arange(2, len(waits) + 2), 0, waits, color=inks["bad"], linewidth=width)
        axes.set_xlim(1, max(3, len(waits) + 2))
        axes.set_ylim(0, 1.05 * float(waits.max(initial=0)) or 1.0)
        axes.set_xlabel("batch")
        if not waits.any():
            axes.set_yticks([0])

    return Chart("waits", title, title, (150, 150), draw)
