"""The report of a build as a page: no script, no network, light and dark."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import FigureBase

from precache.html.charts import Chart, Palette, ascii_text
from precache.html.pages import TABLE_ROWS, bar, render
from precache.units import duration, size
from precache_workers.driver.report import done_until, span_edges

MAX_SHARD_BARS = 400
"""Most shards that have a bar each; of more, the number in progress is drawn over time."""
TIMELINE_NODES = 40
"""Nodes in the timeline."""
TABLE_POINTS = 12
"""Spans of the table of throughput."""
STAGE_COLOURS = {"fetch": "blue", "ops": "orange", "encode": "green", "put": "purple"}


def page(figures: Mapping[str, Any]) -> str:
    """Render the figures of `precache_workers.driver.report.summary` as a page."""
    curve = figures["throughput"]
    return render(
        "build.html",
        **{name: figures[name] for name in ("source", "store", "address", "state", "version")},
        **{name: figures[name] for name in ("error", "rows", "shards")},
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(figures["began"])),
        tiles=_tiles(figures),
        charts=_charts(figures),
        timeline_legend=_timeline_legend(figures),
        throughput=[
            (
                duration(seconds),
                f"{speed:,.0f}",
                f"{fetched / 1e6:,.1f}",
                f"{stored / 1e6:,.1f}",
            )
            for seconds, speed, fetched, stored in _thin(curve)
        ],
        stages=list(_stages(figures["stages"])),
        nodes=[_node(node) for node in figures["nodes"][:TABLE_ROWS]],
        node_count=len(figures["nodes"]),
        slowest=[
            (one["key"], f"{one['seconds']:.3f}", size(one["bytes"]), one["shard"], one["node"])
            for one in figures["slowest"]
        ],
        failures=[(one["key"], one["reason"]) for one in figures["failures"][:TABLE_ROWS]],
        failure_count=len(figures["failures"]),
    )


# --- tables -------------------------------------------------------------------------------------


def _tiles(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    shards, nbytes = figures["shards"], figures["bytes"]
    return [
        ("images processed", f"{figures['images']:,}"),
        ("failed", f"{figures['images_failed']:,}"),
        ("time", duration(figures["seconds"])),
        ("CPU time of tasks", duration(figures["cpu_seconds"])),
        ("images per CPU-s", f"{figures['images_per_cpu_second']:,.0f}"),
        ("fetched", size(nbytes["fetched"])),
        ("stored", size(nbytes["stored"])),
        ("raw / stored", f"{figures['ratio']:.2f}"),
        ("shards finished", f"{shards['made']:,} of {shards['to_make']:,}"),
    ]


def _thin(curve: Mapping[str, Sequence[float]]) -> list[tuple[float, ...]]:
    """Average the curve over a few longer spans, for a table."""
    columns = [np.array(values).reshape(TABLE_POINTS, -1).mean(axis=1) for values in curve.values()]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _stages(stages: Mapping[str, float]) -> list[tuple[str, str, str, Markup]]:
    total = max(sum(stages.values()), 1e-9)
    return [
        (
            stage,
            duration(spent),
            f"{spent / total:.0%}",
            bar(spent / total, STAGE_COLOURS[stage]),
        )
        for stage, spent in stages.items()
    ]


def _node(node: Mapping[str, Any]) -> tuple[str, ...]:
    span = max(node["ended"] - node["began"], 1e-9)
    return (
        node["node"] or "unknown",
        f"{node['shards']:,}",
        f"{node['images']:,}",
        f"{node['images'] / span:,.0f}",
        f"{node['failed']:,}",
        size(node["fetched"]),
        size(node["stored"]),
        duration(node["cpu_seconds"]),
        f"{node['wall_seconds'] / span:.1f}",
    )


# --- charts -------------------------------------------------------------------------------------


def _charts(figures: Mapping[str, Any]) -> dict[str, Chart]:
    if not figures["timeline"]:
        return {}
    highest = max(figures["throughput"]["images_per_second"])
    return {
        "images": _curves(
            "images",
            "Images per second",
            f"highest {highest:,.0f}",
            figures,
            {"images_per_second": "blue"},
            1,
        ),
        "traffic": _curves(
            "traffic",
            "Megabytes per second",
            "fetched and stored",
            figures,
            {"fetched_per_second": "blue", "stored_per_second": "orange"},
            1e-6,
        ),
        "timeline": _timeline(figures),
    }


def _end(figures: Mapping[str, Any]) -> float:
    return max(float(node["ended"]) for node in figures["nodes"])


def _time_axis(axes: Axes, end: float) -> float:
    """Label the time axis; returns the seconds of its unit."""
    unit, seconds = ("s", 1) if end < 180 else ("min", 60) if end < 10800 else ("h", 3600)
    axes.set_xlim(0, end / seconds)
    axes.set_xlabel(f"time, {unit}")
    return seconds


def _curves(
    name: str,
    title: str,
    shown: str,
    figures: Mapping[str, Any],
    colours: Mapping[str, str],
    factor: float,
) -> Chart:
    def draw(figure: FigureBase, palette: Palette, wide: bool) -> None:
        axes = figure.subplots()
        times = np.array(figures["throughput"]["seconds"]) / _time_axis(axes, _end(figures))
        for series, colour in colours.items():
            values = np.array(figures["throughput"][series]) * factor
            axes.plot(times, values, color=palette[colour], linewidth=1.8)
            if len(colours) == 1:
                axes.fill_between(times, values, color=palette[colour], alpha=0.2, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.12g}")
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)

    return Chart(name, title, f"{title} over {duration(_end(figures))}: {shown}", (200, 200), draw)


def _has_shard_bars(figures: Mapping[str, Any]) -> bool:
    return len(figures["timeline"]) <= MAX_SHARD_BARS


def _timeline_legend(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not _has_shard_bars(figures):
        return [("blue", "shards in progress, relative to the node's own maximum")]
    reused = [("green", "reused from an earlier version")] if figures["shards"]["reused"] else []
    return [("blue", "a shard in progress"), *reused]


def _timeline(figures: Mapping[str, Any]) -> Chart:
    """Chart a bar per shard, or over time how many were in progress."""
    nodes = figures["nodes"][:TIMELINE_NODES]
    by_node: dict[str, list[Mapping[str, Any]]] = {node["node"]: [] for node in nodes}
    for shard in figures["timeline"]:
        if shard["node"] in by_node:
            by_node[shard["node"]].append(shard)
    shard_bars = _has_shard_bars(figures)
    lanes = {name: _assign_lanes(shards) for name, shards in by_node.items()}
    depth = max(max(numbers, default=0) + 1 for numbers in lanes.values())
    row_height = min(9 * depth, 60) + 8 if shard_bars else 36

    def draw(figure: FigureBase, palette: Palette, wide: bool) -> None:
        axes = figure.subplots()
        unit = _time_axis(axes, _end(figures))
        for row, (name, shards) in enumerate(by_node.items()):
            if shard_bars:
                _draw_shard_bars(axes, row, shards, lanes[name], unit, palette)
            else:
                _draw_shards_in_progress(axes, row, shards, unit, palette)
        axes.set_ylim(len(by_node) - 0.45, -0.55)
        axes.set_yticks(range(len(by_node)), [ascii_text(name) for name in by_node])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")

    height = 60 + row_height * len(by_node)
    alt = (
        f"Shards by node over {duration(_end(figures))}: {len(figures['timeline'])} on "
        f"{len(nodes)} nodes"
    )
    note = "Times are those of each node's own clock."
    if len(figures["nodes"]) > TIMELINE_NODES:
        note += f" The first {TIMELINE_NODES} nodes of {len(figures['nodes'])}."
    return Chart("timeline", "Shards by node", alt, (height, height), draw, note)


def _assign_lanes(shards: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each shard, in order of their start, the first lane that is free then."""
    lane_ends: list[float] = []
    lanes = []
    for shard in shards:
        start = shard["began"] + 1e-3
        lane = next((n for n, end in enumerate(lane_ends) if end <= start), len(lane_ends))
        lane_ends[lane : lane + 1] = [shard["began"] + sum(shard["seconds"].values())]
        lanes.append(lane)
    return lanes


def _draw_shard_bars(
    axes: Axes,
    row: int,
    shards: Sequence[Mapping[str, Any]],
    lanes: Sequence[int],
    unit: float,
    palette: Palette,
) -> None:
    lane_height = 0.9 / (max(lanes) + 1)
    for colour, reused in (("blue", False), ("green", True)):
        boxes = []
        for shard, lane in zip(shards, lanes, strict=True):
            if shard["reused"] == reused:
                left, width = shard["began"] / unit, sum(shard["seconds"].values()) / unit
                top = row - 0.45 + lane * lane_height
                low = top + lane_height * 0.85
                boxes.append([(left, top), (left + width, top), (left + width, low), (left, low)])
        if boxes:
            axes.add_collection(
                PolyCollection(
                    boxes, facecolors=palette[colour], edgecolors=palette["bg"], linewidths=0.8
                )
            )


def _draw_shards_in_progress(
    axes: Axes, row: int, shards: Sequence[Mapping[str, Any]], unit: float, palette: Palette
) -> None:
    starts = np.array([shard["began"] for shard in shards])
    walls = np.array([sum(shard["seconds"].values()) for shard in shards])
    edges = span_edges(starts, walls)[::2]
    progress = done_until(edges, starts, walls, walls[:, None])[:, 0]
    top = row + 0.4 - 0.8 * progress / max(progress.max(), 1e-9)
    axes.fill_between(
        edges[:-1] / unit,
        top,
        row + 0.4,
        step="post",
        color=palette["blue"],
        linewidth=0,
        clip_on=False,
    )
