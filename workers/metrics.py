"""A build's figures as Prometheus metrics, through Ray's own exporter.

Sent by the driver, from receipts: each shard counts once, however often it was tried, and tasks
have no more to do. A driver at ``ray://`` is no process of the cluster, and Ray exports nothing of
it. Labels are few: the store's name, the version's first digits, and the node.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

from precache.receipts import Receipt

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


class BuildMetrics:
    """Counters and one histogram of a build; needs a Ray that this process joined."""

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
        self._told = time.monotonic()
        self._made: dict[tuple[str, str], float] = defaultdict(float)
        self._spent: dict[tuple[str, str], float] = defaultdict(float)
        self._walls: list[tuple[str, float]] = []

    def plan(self, shards: int) -> None:
        """So many shards are to be made."""
        if shards:
            self._planned.inc(shards)

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
            self._made[receipt.host, name] += value
        for stage, seconds in receipt.seconds.items():
            self._spent[receipt.host, stage] += seconds
        self._walls.append((receipt.host, receipt.wall_seconds))
        if time.monotonic() - self._told >= EVERY:
            self.tell()

    def tell(self) -> None:
        """Tell Ray what it has not heard of."""
        self._told = time.monotonic()
        for (node, name), value in self._made.items():
            if value > 0:  # Ray refuses to add nothing
                self._counters[name].inc(value, {"node": node})
        for (node, stage), seconds in self._spent.items():
            if seconds > 0:
                self._stages.inc(seconds, {"node": node, "stage": stage})
        for node, seconds in self._walls:
            self._shard.observe(seconds, {"node": node})
        self._made.clear()
        self._spent.clear()
        self._walls.clear()


def build_metrics(store: str, version: str) -> BuildMetrics | None:
    """None where this process has joined no Ray, or only as a client."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.util.client.ray.is_connected():
        return None
    return BuildMetrics(store, version)
