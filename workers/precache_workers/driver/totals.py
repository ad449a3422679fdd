"""Sums over receipts: of a version, of a run and by node, and the rates at which they grow.

Progress, metrics, the report, the plan and the commit read these sums.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED

WINDOW = 30.0
"""Seconds that rates are averaged over; at least this, and `SHARDS` times the time of a shard."""
SHARDS = 4


def by_number(name: str) -> list[str | int]:
    """Sort key that puts node-2 before node-10."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


def holes(receipts: Iterable[Receipt]) -> dict[int, str]:
    """Return row -> reason of every hole, in row order."""
    return dict(sorted(hole for receipt in receipts for hole in receipt.holes.items()))


def failures(receipts: Iterable[Receipt]) -> dict[int, str]:
    """Return the holes whose samples failed, in row order, without those of removed samples."""
    return {row: why for row, why in holes(receipts).items() if why != REMOVED}


def failed_samples(keys: Sequence[str], receipts: Iterable[Receipt]) -> list[tuple[str, str]]:
    """Return key and reason of every sample that failed, in row order; `keys` of all rows."""
    return [(keys[row], why) for row, why in failures(receipts).items()]


@dataclass(frozen=True)
class Totals:
    """Sums over receipts.

    Attributes
    ----------
    images, failed
        Samples of the shards, failed ones included; failed ones.
    fetched
        Bytes of samples.
    raw_of, stored_of
        Bytes of rows before compression, and of objects, by field.
    reused, rows_reused
        Shards that are a base version's objects; rows taken over from it.
    stages
        Wall seconds by stage.
    """

    shards: int = 0
    images: int = 0
    failed: int = 0
    fetched: int = 0
    reused: int = 0
    rows_reused: int = 0
    cpu_seconds: float = 0.0
    import_seconds: float = 0.0
    wall_seconds: float = 0.0
    raw_of: Mapping[str, int] = field(default_factory=dict)
    stored_of: Mapping[str, int] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def raw(self) -> int:
        """Bytes of rows before compression."""
        return sum(self.raw_of.values())

    @property
    def stored(self) -> int:
        """Bytes of objects."""
        return sum(self.stored_of.values())

    @classmethod
    def of(cls, receipt: Receipt) -> Totals:
        """The figures of one receipt."""
        removed = sum(why == REMOVED for why in receipt.holes.values())
        return cls(
            shards=1,
            images=len(receipt.content) - removed,
            failed=len(receipt.holes) - removed,
            fetched=receipt.fetched,
            reused=int(receipt.reused),
            rows_reused=receipt.rows_reused,
            cpu_seconds=receipt.cpu_seconds,
            import_seconds=receipt.import_seconds,
            wall_seconds=receipt.wall_seconds,
            raw_of={name: stored.raw_nbytes for name, stored in receipt.objects.items()},
            stored_of={name: stored.size for name, stored in receipt.objects.items()},
            stages=receipt.seconds,
        )

    @classmethod
    def of_all(cls, receipts: Iterable[Receipt]) -> Totals:
        """The sums of several receipts."""
        return sum(map(cls.of, receipts), cls())

    def __add__(self, other: Totals) -> Totals:
        return self._combined(other, 1)

    def __sub__(self, other: Totals) -> Totals:
        return self._combined(other, -1)

    def _combined(self, other: Totals, sign: int) -> Totals:
        sums: dict[str, Any] = {}
        for spec in dataclasses.fields(self):
            one, two = getattr(self, spec.name), getattr(other, spec.name)
            if isinstance(one, Mapping):
                names = dict.fromkeys([*one, *two])
                sums[spec.name] = {n: one.get(n, 0) + sign * two.get(n, 0) for n in names}
            else:
                sums[spec.name] = one + sign * two
        return Totals(**sums)


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
