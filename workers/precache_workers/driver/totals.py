"""Sums over receipts, of a version, of a run and by node: for report, plan and commit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED


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
        Shards that are objects of other versions; rows taken over from these.
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
        sums: dict[str, Any] = {}
        for spec in dataclasses.fields(self):
            one, two = getattr(self, spec.name), getattr(other, spec.name)
            if isinstance(one, Mapping):
                names = dict.fromkeys([*one, *two])
                sums[spec.name] = {n: one.get(n, 0) + two.get(n, 0) for n in names}
            else:
                sums[spec.name] = one + two
        return Totals(**sums)


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

    def add(self, receipt: Receipt) -> None:
        """Count a shard that is done."""
        self.total += Totals.of(receipt)
        self.began = min(self.began, receipt.began)
        self.ended = max(self.ended, receipt.began + receipt.wall_seconds)


@dataclass
class BuildTotals:
    """Sums over the receipts of one run: of each node, and of all.

    Attributes
    ----------
    planned
        Shards that the run is to make.
    """

    planned: int = 0
    total: Totals = Totals()
    nodes: dict[str, NodeTotals] = field(default_factory=dict)

    def add(self, receipt: Receipt) -> None:
        """Count a shard that is done."""
        self.total += Totals.of(receipt)
        self.nodes.setdefault(receipt.host, NodeTotals()).add(receipt)
