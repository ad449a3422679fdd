"""Sums over the receipts of a build, by node, and the rates at which they grow.

Progress, metrics and the report read these sums.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED

WINDOW = 30.0
"""Seconds that rates are averaged over; at least this, and `SHARDS` times the time of a shard."""
SHARDS = 4


def by_number(name: str) -> list[str | int]:
    """Sort key that puts node-2 before node-10."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


@dataclass(frozen=True)
class Totals:
    """Sums over receipts.

    Attributes
    ----------
    images, failed
        Samples of the shards, failed ones included; failed ones.
    fetched, raw, stored
        Bytes of samples, of rows before compression, and of objects.
    reused, rows_reused
        Shards that are a base version's objects; rows taken over from it.
    stages
        Wall seconds by stage.
    """

    shards: int = 0
    images: int = 0
    failed: int = 0
    fetched: int = 0
    raw: int = 0
    stored: int = 0
    reused: int = 0
    rows_reused: int = 0
    cpu_seconds: float = 0.0
    import_seconds: float = 0.0
    wall_seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, receipt: Receipt) -> Totals:
        """The figures of one receipt."""
        removed = sum(why == REMOVED for why in receipt.holes.values())
        return cls(
            shards=1,
            images=len(receipt.content) - removed,
            failed=len(receipt.holes) - removed,
            fetched=receipt.fetched,
            raw=sum(stored.raw_nbytes for stored in receipt.objects.values()),
            stored=receipt.stored,
            reused=int(receipt.reused),
            rows_reused=receipt.rows_reused,
            cpu_seconds=receipt.cpu_seconds,
            import_seconds=receipt.import_seconds,
            wall_seconds=receipt.wall_seconds,
            stages=receipt.seconds,
        )

    def __add__(self, other: Totals) -> Totals:
        return self._combined(other, 1)

    def __sub__(self, other: Totals) -> Totals:
        return self._combined(other, -1)

    def _combined(self, other: Totals, sign: int) -> Totals:
        names = [spec.name for spec in dataclasses.fields(self) if spec.name != "stages"]
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in names}
        stages = {
            name: self.stages.get(name, 0.0) + sign * other.stages.get(name, 0.0)
            for name in dict.fromkeys([*self.stages, *other.stages])
        }
        return Totals(**sums, stages=stages)


@dataclass(frozen=True)
class BuildRates:
    """Images, bytes fetched and bytes stored per second; cores in use: mean of tasks at once."""

    images: float = 0.0
    fetched: float = 0.0
    stored: float = 0.0
    cores: float = 0.0

    def __add__(self, other: BuildRates) -> BuildRates:
        both = dataclasses.astuple(self), dataclasses.astuple(other)
        return BuildRates(*map(sum, zip(*both, strict=True)))


@dataclass
class NodeTotals:
    """Sums over the receipts of one node.

    Attributes
    ----------
    began, ended
        Unix time by the node's clock: of its first shard's begin and of its last one's end.
    """

    total: Totals = Totals()
    began: float = math.inf
    ended: float = -math.inf
    _since: float = 0.0
    _recent: deque[tuple[float, Totals]] = field(default_factory=deque)
    _window: Totals = Totals()

    def add(self, receipt: Receipt, now: float) -> None:
        """Count a shard whose receipt arrived at `now`, in seconds of the driver's own clock."""
        if not self.total.shards:
            self._since = now - receipt.wall_seconds
        shard = Totals.of(receipt)
        self.total += shard
        self.began = min(self.began, receipt.began)
        self.ended = max(self.ended, receipt.began + receipt.wall_seconds)
        self._recent.append((now, shard))
        self._window += shard

    def rates(self, now: float) -> BuildRates:
        """Means over the last window.

        A shard counts when its receipt arrives, all at once; so the time since the last one is no
        lull before twice the time of a shard.
        """
        if not self._recent:
            return BuildRates()
        shard = self.total.wall_seconds / self.total.shards
        window = max(WINDOW, SHARDS * shard)
        until = max(self._recent[-1][0], now - 2 * shard)
        while self._recent and self._recent[0][0] <= until - window:
            self._window -= self._recent.popleft()[1]
        span = max(1e-3, until - max(self._since, until - window))
        sums = self._window
        return BuildRates(
            sums.images / span, sums.fetched / span, sums.stored / span, sums.wall_seconds / span
        )


@dataclass
class BuildTotals:
    """Sums over the receipts of one run: of each node, and of all.

    Attributes
    ----------
    planned
        Shards that the run is to make.
    lock
        Held by whoever reads `nodes` on another thread than the one that adds.
    """

    planned: int = 0
    total: Totals = Totals()
    nodes: dict[str, NodeTotals] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def left(self) -> int:
        """Shards that are still to be made."""
        return self.planned - self.total.shards

    def add(self, receipt: Receipt, now: float) -> None:
        """Count a shard whose receipt arrived at `now`, in seconds of the driver's own clock."""
        with self.lock:
            self.total += Totals.of(receipt)
            self.nodes.setdefault(receipt.host, NodeTotals()).add(receipt, now)
