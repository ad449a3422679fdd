"""The report of a build as a page: no script, no network, light and dark."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from precache.html.pages import TABLE_ROWS, bar, render
from precache.units import duration, size

STAGE_COLOURS = {"fetch": "blue", "ops": "orange", "encode": "green", "put": "purple"}


def page(figures: Mapping[str, Any]) -> str:
    """Render the figures of `precache_workers.driver.report.summary` as a page."""
    return render(
        "build.html",
        **{name: figures[name] for name in ("source", "store", "address", "state", "version")},
        **{name: figures[name] for name in ("error", "rows", "shards")},
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(figures["began"])),
        tiles=_tiles(figures),
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
