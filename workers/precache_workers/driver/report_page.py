"""The report of a build as one page of HTML: no script, no network, light and dark."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import FigureBase

from precache.html.charts import PAGE, Chart, Inks, plain
from precache.html.pages import environment, policy, style
from precache_workers.driver.report import done_until, span_edges

BARS = 400
"""Shards that have a bar each; more are drawn as how many were in the making."""
ROWS = 40
"""Nodes in the timeline."""
LISTED = 200
"""Nodes and failures in a table."""

_BLUE, _ORANGE, _GREEN, _BACKGROUND = (PAGE[name] for name in ("blue", "orange", "green", "bg"))

Draw = Callable[[Axes], None]


def page(figures: Mapping[str, Any]) -> str:
    """The page of a `precache_workers.driver.report.summary`."""
    templates = environment(Path(__file__).parent)
    templates.filters |= {"duration": duration, "when": _when}
    return templates.get_template("report_page.html").render(
        **figures,
        css=style(),
        policy=policy(),
        charts=_charts(figures),
        curve=_thinned(figures["throughput"]),
        listed=LISTED,
        rows_drawn=ROWS,
        bars=len(figures["timeline"]) <= BARS,
    )


def duration(seconds: float) -> str:
    """Seconds for people: 8.31 s, 4 min 10 s, 3 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))


def _thinned(curve: Mapping[str, Sequence[float]], points: int = 12) -> list[tuple[float, ...]]:
    """Means of the curve over a few longer spans, for a table."""
    columns = [np.array(values).reshape(points, -1).mean(axis=1) for values in curve.values()]
    return list(zip(*(column.tolist() for column in columns), strict=True))


# --- charts -------------------------------------------------------------------------------------


def _charts(figures: Mapping[str, Any]) -> dict[str, Markup]:
    if not figures["timeline"]:
        return {}
    curve = figures["throughput"]
    images, span = curve["images_per_second"], duration(_end(figures))
    nodes = figures["nodes"][:ROWS]
    named = f"Shards by node over {span}: {len(figures['timeline'])} on {len(nodes)} nodes"
    speed = f"Images per second over {span}: highest {max(images):,.0f}"
    traffic = f"Megabytes per second over {span}: fetched and stored"
    return {
        "images": _both("images", speed, 200, _curves(figures, {"images_per_second": _BLUE}, 1)),
        "traffic": _both(
            "traffic",
            traffic,
            200,
            _curves(figures, {"fetched_per_second": _BLUE, "stored_per_second": _ORANGE}, 1e-6),
        ),
        "timeline": _both("timeline", named, *_timeline(figures, nodes)),
    }


def _end(figures: Mapping[str, Any]) -> float:
    return max(float(node["ended"]) for node in figures["nodes"])


def _both(name: str, label: str, height: float, draw: Draw) -> Markup:
    def on_figure(figure: FigureBase, inks: Inks, wide: bool) -> None:
        draw(figure.subplots())

    return Chart(name, label, label, (height, height), on_figure).svg


def _time_axis(axes: Axes, end: float) -> float:
    """Label the time axis; returns the seconds of its unit."""
    unit, seconds = ("s", 1) if end < 180 else ("min", 60) if end < 10800 else ("h", 3600)
    axes.set_xlim(0, end / seconds)
    axes.set_xlabel(f"time, {unit}")
    return seconds


def _curves(figures: Mapping[str, Any], colours: Mapping[str, str], factor: float) -> Draw:
    def draw(axes: Axes) -> None:
        unit = _time_axis(axes, _end(figures))
        times = np.array(figures["throughput"]["seconds"]) / unit
        for name, colour in colours.items():
            values = np.array(figures["throughput"][name]) * factor
            axes.plot(times, values, color=colour, linewidth=1.8)
            if len(colours) == 1:
                axes.fill_between(times, values, color=colour, alpha=0.2, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.12g}")
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)

    return draw


def _timeline(figures: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> tuple[float, Draw]:
    """The height and the drawing: a bar a shard, or how many were in the making."""
    by_node: dict[str, list[Mapping[str, Any]]] = {node["node"]: [] for node in nodes}
    for line in figures["timeline"]:
        if line["node"] in by_node:
            by_node[line["node"]].append(line)
    few = len(figures["timeline"]) <= BARS
    lanes = {name: _lanes(lines) for name, lines in by_node.items()}
    depth = max(max(each, default=0) + 1 for each in lanes.values())
    row = min(9 * depth, 60) + 8 if few else 36

    def draw(axes: Axes) -> None:
        unit = _time_axis(axes, _end(figures))
        for at, (name, lines) in enumerate(by_node.items()):
            (_draw_bars if few else _draw_making)(axes, at, lines, lanes[name], unit)
        axes.set_ylim(len(by_node) - 0.45, -0.55)
        axes.set_yticks(range(len(by_node)), [plain(name) for name in by_node])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")

    return 60 + row * len(by_node), draw


def _lanes(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each shard the first lane that is free when it begins; they come in that order."""
    free: list[float] = []
    found = []
    for line in lines:
        lane = next((n for n, end in enumerate(free) if end <= line["began"] + 1e-3), len(free))
        end = line["began"] + sum(line["seconds"].values())
        free[lane : lane + 1] = [end]
        found.append(lane)
    return found


def _draw_bars(
    axes: Axes, at: int, lines: Sequence[Mapping[str, Any]], lanes: Sequence[int], unit: float
) -> None:
    high = 0.9 / (max(lanes) + 1)
    for colour, reused in ((_BLUE, False), (_GREEN, True)):
        boxes = []
        for line, lane in zip(lines, lanes, strict=True):
            if line["reused"] == reused:
                left, width = line["began"] / unit, sum(line["seconds"].values()) / unit
                top = at - 0.45 + lane * high
                low = top + high * 0.85
                boxes.append([(left, top), (left + width, top), (left + width, low), (left, low)])
        if boxes:
            axes.add_collection(
                PolyCollection(boxes, facecolors=colour, edgecolors=_BACKGROUND, linewidths=0.8)
            )


def _draw_making(
    axes: Axes, at: int, lines: Sequence[Mapping[str, Any]], lanes: Sequence[int], unit: float
) -> None:
    starts = np.array([line["began"] for line in lines])
    walls = np.array([sum(line["seconds"].values()) for line in lines])
    edges = span_edges(starts, walls)[::2]
    making = done_until(edges, starts, walls, walls[:, None])[:, 0]
    top = at + 0.4 - 0.8 * making / max(making.max(), 1e-9)
    axes.fill_between(
        edges[:-1] / unit, top, at + 0.4, step="post", color=_BLUE, linewidth=0, clip_on=False
    )
