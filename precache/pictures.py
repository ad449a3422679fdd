"""Pictures of a simulation: a page that plays it, and a PNG."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from precache import simulation_text as text
from precache.errors import StorageError, UsageError
from precache.simulation import NEVER, Simulation, Times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAYED = 20_000
"""Batches that a page plays, about a megabyte of it."""
LANES = 24
"""Loaders with a lane of their own in a picture."""
BARS = 2_000
"""Batches whose waits the PNG shows."""
_LOADING, _BLOCKED, _STEP, _WAITING = "#1f6fb8", "#b35900", "#1a7f4b", "#b3261e"
_SOFT, _LINE = "#57606a", "#d0d7de"
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 9, "color": _SOFT}


def page(found: Simulation) -> str:
    """A page of HTML that plays a simulation: one file, no network, light and dark."""
    end = played_until(found)
    depth, waits = found.queue_depth[1], found.stalls_ms[1:]
    longest = float(waits.max(initial=0))
    cut = f"Played and drawn up to {end / 1e9:.3g} s of {found.setting.seconds:g} s."
    texts = {
        "title": text.title(found),
        "verdict": text.verdict(found),
        "cut": cut if end < found.end else "",
        "lanes_alt": (
            f"A lane for each loader and one for the training loop. Loaders are blocked "
            f"{found.blocked_share:.1%} of their time; the training loop waits "
            f"{found.stall_share:.1%} of its time after start-up."
        ),
        "queue_alt": (
            f"Batches in the queue over time: {found.queue_mean:.1f} on average, "
            f"{depth.max()} at most, of {found.setting.room}."
        ),
        "waits_alt": (
            f"Wait before each of {len(waits):,} batches: {np.count_nonzero(waits):,} of them "
            f"waited for, {text.number(longest)} ms at most."
        ),
    }
    filled = {name: html.escape(value) for name, value in texts.items()}
    filled["tiles"] = "\n".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in text.summary(found)
    )
    filled["places"] = "\n".join(
        f"<tr><td>{place}</td><td>{text.number(float(wait))}</td></tr>"
        for place, wait in enumerate(found.stall_by_place_ms, 1)
    )
    # JSON is safe inside a script element but for what could end it.
    filled["data"] = json.dumps(_played(found, end), separators=(",", ":")).replace("<", "\\u003c")
    template = resources.files("precache").joinpath("simulation.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], template)


def played_until(found: Simulation) -> int:
    """Nanoseconds that a page plays: all, or as long as there are not too many batches."""
    return int(found.begun[PLAYED]) if len(found.begun) > PLAYED else found.end


def _played(found: Simulation, end: int) -> dict[str, Any]:
    setting = found.setting
    times, depth = found.queue_depth
    kept = found.begun <= end
    moments = ("begun", "ready", "queued", "taken", "done")
    return {
        "end": end / 1e6,
        "loaders": setting.loaders,
        "room": setting.room,
        "load": setting.load.mean_ms,
        "step": setting.step.mean_ms,
        "batches": {
            "loader": found.loader[kept].tolist(),
            **{moment: _milliseconds(getattr(found, moment)[kept]) for moment in moments},
        },
        "queue": {
            "from": _milliseconds(times[times <= end]),
            "batches": depth[times <= end].tolist(),
        },
        "waits": [round(wait, 3) for wait in found.stalls_ms[:PLAYED].tolist()],
    }


def _milliseconds(times: Times) -> list[float | None]:
    return [round(time / 1e6, 3) if time < NEVER else None for time in times.tolist()]


def write_page(found: Simulation, path: str | Path) -> None:
    """Write the page that `page` makes.

    Raises
    ------
    StorageError
        If the file cannot be written.
    """
    try:
        Path(path).write_text(page(found), "utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the page {path}: {error}") from None


def write_png(found: Simulation, path: str | Path) -> None:
    """Draw loaders, queue and waits into a PNG of 1,600 x 1,200 pixels, with matplotlib.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    StorageError
        If the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            f'drawing {path} needs matplotlib: pip install "precache[report]"'
        ) from None
    figure = Figure(figsize=(10, 7.5), dpi=160, layout="constrained")
    lanes, queue, waits = figure.subplots(3, 1, height_ratios=[3, 1, 1.2])
    figure.suptitle(text.title(found), fontsize=12, wrap=True)
    until = _window(found)
    _draw_lanes(lanes, found, until)
    _draw_queue(queue, found, until)
    _draw_waits(waits, found)
    for axes in (lanes, queue, waits):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_SOFT)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StorageError(f"cannot write the picture {path}: {error}") from None


def _window(found: Simulation) -> int:
    """Nanoseconds that the lanes show: some rounds and steps, so that each can be seen."""
    setting = found.setting
    return min(found.end, round(1e6 * max(6 * setting.load.mean_ms, 60 * setting.step.mean_ms)))


def _draw_lanes(axes: Axes, found: Simulation, until: int) -> None:
    lanes = min(found.setting.loaders, LANES)
    begun, ready, queued = (np.minimum(t, until) for t in (found.begun, found.ready, found.queued))
    for loader in range(lanes):
        mine = (found.loader == loader) & (found.begun < until)
        held = mine & (ready < queued)
        _bars(axes, begun[mine], ready[mine], loader, _LOADING)
        _bars(axes, ready[held], queued[held], loader, _BLOCKED, hatch="////")
    taken, done = (np.minimum(t[found.order], until) for t in (found.taken, found.done))
    free = np.concatenate([[0], done])
    wanted = np.concatenate([taken, [until]])
    _bars(axes, taken, done, lanes, _STEP)
    _bars(axes, free, wanted, lanes, _WAITING, hatch="////")
    names = [*(f"loader {n + 1}" for n in range(lanes)), "training"]
    axes.set_yticks(range(lanes + 1), names, fontsize=10 if lanes < 12 else 7)
    axes.set_ylim(lanes + 0.6, -0.6)
    axes.set_xlim(0, until / 1e9)
    shown = [f"{lanes} of {found.setting.loaders} loaders"] if lanes < found.setting.loaders else []
    shown += [f"the first {until / 1e9:.3g} s"] if until < found.end else []
    key = "loading blue, blocked by a full queue orange, step green, waiting for data red"
    axes.set_title(f"{', '.join(shown)}: {key}" if shown else key, **_TITLE)


def _bars(axes: Axes, begin: Times, end: Times, lane: int, colour: str, hatch: str = "") -> None:
    spans = np.column_stack([begin, end - begin])[end > begin]
    # A white line around each bar tells it from the next, where it would not cover it.
    wide = len(spans) > 0 and np.median(spans[:, 1]) > end.max() / 200
    axes.broken_barh(
        list(map(tuple, (spans / 1e9).tolist())),
        (lane - 0.4, 0.8),
        facecolor="none" if hatch else colour,
        edgecolor="white" if wide and not hatch else colour,
        linewidth=0.4,
        hatch=hatch,
    )


def _draw_queue(axes: Axes, found: Simulation, until: int) -> None:
    from matplotlib.ticker import MaxNLocator

    times, depth = found.queue_depth
    shown = times <= until
    times, depth = np.append(times[shown], until), np.append(depth[shown], 0)
    axes.fill_between(times / 1e9, depth, step="post", color=_LOADING, linewidth=0)
    axes.set_xlim(0, until / 1e9)
    axes.set_ylim(0, max(1, depth.max()) * 1.05)
    axes.set_xlabel("time, s", color=_SOFT)
    axes.set_title("batches in the queue", **_TITLE)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=_LINE)


def _draw_waits(axes: Axes, found: Simulation) -> None:
    waits = found.stalls_ms[1:BARS]
    width = max(0.3, min(3, 600 / (len(waits) + 1)))
    axes.vlines(np.arange(2, len(waits) + 2), 0, waits, color=_WAITING, linewidth=width)
    axes.set_xlim(1, max(3, len(waits) + 2))
    axes.set_ylim(0, 1.05 * float(waits.max(initial=0)) or 1.0)
    axes.set_xlabel("batch", color=_SOFT)
    if not waits.any():
        axes.set_yticks([0])
    which = f"the first {BARS:,} batches" if len(found.stalls_ms) > BARS else "each batch"
    share = f"{found.stall_share:.1%} of the time"
    axes.set_title(f"wait before {which}, ms, start-up left out: {share}", **_TITLE)
