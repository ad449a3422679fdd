"""The report of a build as a page: no script, no network, light and dark."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from precache.html.charts import Box, Chart, Curves, Lanes, TimeAxis
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
    axis = TimeAxis(max(float(node["ended"]) for node in figures["nodes"]))
    curve, during = figures["throughput"], f"over {duration(axis.end)}"
    speed = curve["images_per_second"]
    traffic = {"blue": "fetched", "orange": "stored"}
    megabytes = {
        colour: [value / 1e6 for value in curve[f"{name}_per_second"]]
        for colour, name in traffic.items()
    }
    alt = f"Images per second {during}: highest {max(speed):,.0f}"
    return {
        "images": Curves("Images per second", alt, axis, curve["seconds"], {"blue": speed}),
        "traffic": Curves(
            "Megabytes per second",
            f"Megabytes per second {during}: fetched and stored",
            axis,
            curve["seconds"],
            megabytes,
            list(traffic.items()),
        ),
        "timeline": _timeline(figures, axis, during),
    }


def _timeline(figures: Mapping[str, Any], axis: TimeAxis, during: str) -> Lanes:
    """Chart a bar per shard, or over time how many were in progress."""
    nodes = figures["nodes"][:TIMELINE_NODES]
    by_node: dict[str, list[Mapping[str, Any]]] = {node["node"]: [] for node in nodes}
    for shard in figures["timeline"]:
        if shard["node"] in by_node:
            by_node[shard["node"]].append(shard)
    height, rows = 36, {name: _in_progress(shards, axis) for name, shards in by_node.items()}
    legend = [("blue", "shards in progress, relative to the node's own maximum")]
    if len(figures["timeline"]) <= MAX_SHARD_BARS:
        lanes = {name: _assign_lanes(shards) for name, shards in by_node.items()}
        height = min(9 * max(max(numbers, default=0) + 1 for numbers in lanes.values()), 60)
        rows = {name: _shards(shards, lanes[name], axis) for name, shards in by_node.items()}
        reused = (
            [("green", "reused from an earlier version")] if figures["shards"]["reused"] else []
        )
        legend = [("blue", "a shard in progress"), *reused]
    note = "Times are those of each node's own clock."
    if len(figures["nodes"]) > TIMELINE_NODES:
        note += f" The first {TIMELINE_NODES} nodes of {len(figures['nodes'])}."
    alt = f"Shards by node {during}: {len(figures['timeline'])} on {len(nodes)} nodes"
    return Lanes("Shards by node", alt, axis, rows, height, legend, note)


def _seconds(shard: Mapping[str, Any]) -> float:
    return float(sum(shard["seconds"].values()))


def _assign_lanes(shards: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each shard, in order of their start, the first lane that is free then."""
    lane_ends: list[float] = []
    lanes = []
    for shard in shards:
        start = shard["began"] + 1e-3
        lane = next((n for n, end in enumerate(lane_ends) if end <= start), len(lane_ends))
        lane_ends[lane : lane + 1] = [shard["began"] + _seconds(shard)]
        lanes.append(lane)
    return lanes


def _shards(shards: Sequence[Mapping[str, Any]], lanes: Sequence[int], axis: TimeAxis) -> list[Box]:
    height = 100 / (max(lanes, default=0) + 1)
    return [
        Box(
            "green" if shard["reused"] else "blue",
            axis.at(shard["began"]), lane * height, axis.at(_seconds(shard)), 0.85 * height,
        )
        for shard, lane in zip(shards, lanes, strict=True)
    ]  # fmt: skip


def _in_progress(shards: Sequence[Mapping[str, Any]], axis: TimeAxis) -> list[Box]:
    starts = np.array([shard["began"] for shard in shards])
    walls = np.array(list(map(_seconds, shards)))
    edges = span_edges(starts, walls)[::2]
    progress = done_until(edges, starts, walls, walls[:, None])[:, 0]
    heights = 100 * progress / max(progress.max(), 1e-9)
    width = axis.at(edges[1])
    spans = zip(edges.tolist(), heights.tolist(), strict=False)
    return [Box("blue", axis.at(start), 100 - high, width, high) for start, high in spans if high]
