"""What the receipts of a build add up to, by node, and how fast that grows; sums only."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from precache.store.receipts import Receipt

WINDOW = 30.0
"""Seconds that rates are means over; at least this, and `SHARDS` times what a shard takes."""
SHARDS = 4


def by_number(name: str) -> list[str | int]:
    """Sorts node-2 before node-10."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


@dataclass(frozen=True)
class BuildRates:
    """Per second: images, bytes fetched, bytes put; and cores in use, the mean of tasks at once."""

    images: float = 0.0
    fetched: float = 0.0
    stored: float = 0.0
    cores: float = 0.0

    def plus(self, other: BuildRates, times: float = 1) -> BuildRates:
        """The sum of this and so many of the other."""
        return BuildRates(
            self.images + times * other.images,
            self.fetched + times * other.fetched,
            self.stored + times * other.stored,
            self.cores + times * other.cores,
        )


@dataclass
class NodeTally:
    """What one node made. Times are the driver's own clock, in seconds."""

    shards: int = 0
    images: int = 0
    failed: int = 0
    fetched: int = 0
    stored: int = 0
    wall_seconds: float = 0.0
    _since: float = 0.0
    _recent: deque[tuple[float, BuildRates]] = field(default_factory=deque)
    _sums: BuildRates = BuildRates()

    def add(self, receipt: Receipt, now: float) -> None:
        """Count a shard whose receipt has come."""
        if not self.shards:
            self._since = now - receipt.wall_seconds
        self.shards += 1
        self.images += len(receipt.content)
        self.failed += len(receipt.holes)
        self.fetched += receipt.fetched
        self.stored += receipt.stored
        self.wall_seconds += receipt.wall_seconds
        made = BuildRates(
            len(receipt.content), receipt.fetched, receipt.stored, receipt.wall_seconds
        )
        self._recent.append((now, made))
        self._sums = self._sums.plus(made)

    def rates(self, now: float) -> BuildRates:
        """Means over the last while.

        A shard counts when its receipt comes, all at once; so the time since the last one is no
        lull before twice what a shard takes.
        """
        if not self._recent:
            return BuildRates()
        shard = self.wall_seconds / self.shards
        window = max(WINDOW, SHARDS * shard)
        until = max(self._recent[-1][0], now - 2 * shard)
        while self._recent and self._recent[0][0] <= until - window:
            self._sums = self._sums.plus(self._recent.popleft()[1], -1)
        span = max(1e-3, until - max(self._since, until - window))
        return BuildRates().plus(self._sums, 1 / span)


@dataclass
class Tally:
    """Nodes by name, and the shards that are left."""

    left: int = 0
    nodes: dict[str, NodeTally] = field(default_factory=dict)

    def add(self, receipt: Receipt, now: float) -> NodeTally:
        """Count a shard whose receipt has come; returns its node."""
        self.left -= 1
        node = self.nodes.setdefault(receipt.host, NodeTally())
        node.add(receipt, now)
        return node
