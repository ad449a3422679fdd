"""A build's figures as Prometheus metrics, through Ray's own exporter.

Sent by the driver, from receipts: each shard counts once, however often it was tried, and tasks
have no more to do. A driver at ``ray://`` is no process of the cluster, and tells a small actor on
the head, which ends with its connection. Labels are few: the store's name, the version's first
digits, and the node.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from precache.store.receipts import Receipt
from precache_workers.cluster.nodes import actor_on_head, is_connected, wait_for

BOUNDARIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Seconds that tell shards apart."""

EVERY = 1.0
"""Seconds at least between two times that Ray is told: telling it costs as much as a task."""

_COUNTERS = {
    "shards": "Shards made",
    "images": "Rows of the shards made, holes included",
    "failed_images": "Holes among them",
    "fetched_bytes": "Bytes of raw samples",
    "stored_bytes": "Bytes put",
    "cpu_seconds": "CPU time of tasks",
}


@dataclass
class Figures:
    """What is added to those that Ray has.

    Attributes
    ----------
    planned
        Shards to be made.
    made, spent
        (node, counter) -> value, and (node, stage) -> seconds.
    walls
        Node and seconds of each shard.
    """

    planned: int = 0
    made: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    spent: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    walls: list[tuple[str, float]] = field(default_factory=list)


class Exporter:
    """Counters and one histogram of a build; lives in a process that joined Ray."""

    def __init__(self, store: str, version: str) -> None:
        from ray.util.metrics import Counter, Histogram

        common, by_node = ("store", "version"), ("store", "version", "node")
        self._counters = {
            name: Counter(f"precache_build_{name}", text, by_node)
            for name, text in _COUNTERS.items()
        }
        self._stages = Counter(
            "precache_build_stage_seconds", "Wall time of tasks by stage", (*by_node, "stage")
        )
        self._shard = Histogram(
            "precache_build_shard_seconds", "Wall time of a shard", list(BOUNDARIES), by_node
        )
        # No gauge of those left: Ray forgets a gauge once it was scraped.
        self._planned = Counter("precache_build_planned_shards", "Shards to be made", common)
        for each in (*self._counters.values(), self._stages, self._shard, self._planned):
            each.set_default_tags({"store": store, "version": version[:8]})

    def tell(self, figures: Figures) -> None:
        """Tell Ray."""
        if figures.planned:  # Ray refuses to add nothing
            self._planned.inc(figures.planned)
        for (node, name), value in figures.made.items():
            if value > 0:
                self._counters[name].inc(value, {"node": node})
        for (node, stage), seconds in figures.spent.items():
            if seconds > 0:
                self._stages.inc(seconds, {"node": node, "stage": stage})
        for node, seconds in figures.walls:
            self._shard.observe(seconds, {"node": node})


class BuildMetrics:
    """Adds up what a build makes, and now and then has it told."""

    def __init__(
        self, tell: Callable[[Figures], Any], wait_for: Callable[[Any], None] | None = None
    ) -> None:
        self._tell, self._wait_for = tell, wait_for
        self._told = time.monotonic()
        self._figures = Figures()

    def plan(self, shards: int) -> None:
        """So many shards are to be made."""
        self._figures.planned += shards
        self.tell()

    def add(self, receipt: Receipt) -> None:
        """A shard is made; Ray hears of it now and then."""
        made = {
            "shards": 1,
            "images": len(receipt.content),
            "failed_images": len(receipt.holes),
            "fetched_bytes": receipt.fetched,
            "stored_bytes": receipt.stored,
            "cpu_seconds": receipt.cpu_seconds,
        }
        for name, value in made.items():
            self._figures.made[receipt.host, name] += value
        for stage, seconds in receipt.seconds.items():
            self._figures.spent[receipt.host, stage] += seconds
        self._figures.walls.append((receipt.host, receipt.wall_seconds))
        if time.monotonic() - self._told >= EVERY:
            self.tell()

    def tell(self, last: bool = False) -> None:
        """Tell Ray what it has not heard of."""
        self._told = time.monotonic()
        figures, self._figures = self._figures, Figures()
        told = self._tell(figures)
        if last and self._wait_for:
            self._wait_for(told)


def build_metrics(store: str, version: str, address: str) -> BuildMetrics | None:
    """Return the metrics of a build at an address; None if this process has joined no Ray."""
    if not is_connected():
        return None
    if address.startswith("ray://"):
        return BuildMetrics(actor_on_head(Exporter, store, version).tell.remote, wait_for)
    return BuildMetrics(Exporter(store, version).tell)
