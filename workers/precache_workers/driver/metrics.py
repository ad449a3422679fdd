"""A build's figures as Prometheus metrics, through Ray's own exporter.

The driver exports them, from receipts: each shard counts once, however often it was tried, and
tasks have no more to do. A driver at ``ray://`` is no process of the cluster; it exports through a
small actor on the head, which ends with its connection. Labels are few: the store's name, the
version's first digits, and the node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from precache_workers.cluster.nodes import actor_on_head, is_connected, wait_for
from precache_workers.driver.totals import BuildTotals, Totals

BOUNDARIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Seconds: bounds of the histogram of shards."""

EXPORT_EVERY = 1.0
"""Least seconds between two exports, each of which costs as much as a task."""

_COUNTERS = {
    "shards": ("shards", "Shards made"),
    "images": ("images", "Samples of the shards made, failed ones included"),
    "failed_images": ("failed", "Failed samples among them"),
    "fetched_bytes": ("fetched", "Bytes of raw samples"),
    "stored_bytes": ("stored", "Bytes put"),
    "cpu_seconds": ("cpu_seconds", "CPU time of tasks"),
}
"""Counter -> its field in `Totals`, and its description."""


@dataclass(frozen=True)
class Figures:
    """Increments since the last export.

    Attributes
    ----------
    planned
        Shards to be made.
    nodes
        By node.
    walls
        Node and seconds of each shard.
    """

    planned: int
    nodes: Mapping[str, Totals]
    walls: list[tuple[str, float]]


class Exporter:
    """Counters and one histogram of a build; lives in a process that joined Ray."""

    def __init__(self, store: str, version: str) -> None:
        from ray.util.metrics import Counter, Histogram

        common, by_node = ("store", "version"), ("store", "version", "node")
        self._counters = {
            name: Counter(f"precache_build_{name}", text, by_node)
            for name, (_, text) in _COUNTERS.items()
        }
        self._stages = Counter(
            "precache_build_stage_seconds", "Wall time of tasks by stage", (*by_node, "stage")
        )
        self._shard = Histogram(
            "precache_build_shard_seconds", "Wall time of a shard", list(BOUNDARIES), by_node
        )
        # No gauge of those left: Ray forgets a gauge once it was scraped.
        self._planned = Counter("precache_build_planned_shards", "Shards to be made", common)
        for metric in (*self._counters.values(), self._stages, self._shard, self._planned):
            metric.set_default_tags({"store": store, "version": version[:8]})

    def export(self, figures: Figures) -> None:
        """Add the increments to Ray's metrics."""
        if figures.planned:  # Ray refuses to add nothing
            self._planned.inc(figures.planned)
        for node, totals in figures.nodes.items():
            for name, (attribute, _) in _COUNTERS.items():
                if (value := getattr(totals, attribute)) > 0:
                    self._counters[name].inc(value, {"node": node})
            for stage, seconds in totals.stages.items():
                if seconds > 0:
                    self._stages.inc(seconds, {"node": node, "stage": stage})
        for node, seconds in figures.walls:
            self._shard.observe(seconds, {"node": node})


class BuildMetrics:
    """Exports what was added to the totals of a build, now and then."""

    def __init__(
        self,
        totals: BuildTotals,
        export: Callable[[Figures], Any],
        wait_for: Callable[[Any], None] | None = None,
    ) -> None:
        self._totals, self._export, self._wait_for = totals, export, wait_for
        self._planned = 0
        self._nodes: dict[str, Totals] = {}
        self._walls: list[tuple[str, float]] = []
        self.export()

    def shard_done(self, node: str, seconds: float) -> None:
        """Note the wall time of a shard; exports if it is time."""
        self._walls.append((node, seconds))
        if time.monotonic() - self._exported >= EXPORT_EVERY:
            self.export()

    def export(self, last: bool = False) -> None:
        """Export what was not exported before."""
        self._exported = time.monotonic()
        nodes = {name: node.total for name, node in self._totals.nodes.items()}
        planned, walls = self._totals.planned, self._walls
        sent = self._export(
            Figures(
                planned - self._planned,
                {name: total - self._nodes.get(name, Totals()) for name, total in nodes.items()},
                walls,
            )
        )
        self._planned, self._nodes, self._walls = planned, nodes, []
        if last and self._wait_for:
            self._wait_for(sent)


def build_metrics(
    store: str, version: str, address: str, totals: BuildTotals
) -> BuildMetrics | None:
    """Return the metrics of a build at an address; None if this process has joined no Ray."""
    if not is_connected():
        return None
    if address.startswith("ray://"):
        return BuildMetrics(totals, actor_on_head(Exporter, store, version).export.remote, wait_for)
    return BuildMetrics(totals, Exporter(store, version).export)
