"""Sums over receipts, of a version, of a run and by node: for report, plan and commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from precache.errors import Hole
from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED


def holes(receipts: Iterable[Receipt]) -> dict[int, Hole]:
    """Return every hole by its row, in row order."""
    return dict(sorted(hole for receipt in receipts for hole in receipt.holes.items()))


def failures(receipts: Iterable[Receipt]) -> dict[int, Hole]:
    """Return the holes whose samples failed, in row order, without those of removed samples."""
    return {row: hole for row, hole in holes(receipts).items() if hole != REMOVED}


def failed_samples(keys: Sequence[str], receipts: Iterable[Receipt]) -> list[tuple[str, str]]:
    """Return key and reason of every sample that failed, in row order; `keys` of all rows."""
    return [(keys[row], hole.reason) for row, hole in failures(receipts).items()]


@dataclass(frozen=True, kw_only=True)
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

    shards: int
    images: int
    failed: int
    fetched: int
    reused: int
    rows_reused: int
    cpu_seconds: float
    raw_of: Mapping[str, int]
    stored_of: Mapping[str, int]
    stages: Mapping[str, float]

    @property
    def raw(self) -> int:
        """Bytes of rows before compression."""
        return sum(self.raw_of.values())

    @property
    def stored(self) -> int:
        """Bytes of objects."""
        return sum(self.stored_of.values())

    @classmethod
    def of(cls, receipts: Collection[Receipt]) -> Totals:
        """The sums of receipts."""
        raw_of, stored_of, stages = (Counter[str]() for _ in range(3))
        for receipt in receipts:
            raw_of.update({name: made.raw_nbytes for name, made in receipt.objects.items()})
            stored_of.update({name: made.size for name, made in receipt.objects.items()})
            stages.update(receipt.seconds)
        removed = sum(hole == REMOVED for r in receipts for hole in r.holes.values())
        return cls(
            shards=len(receipts),
            images=sum(len(r.content) for r in receipts) - removed,
            failed=sum(len(r.holes) for r in receipts) - removed,
            fetched=sum(r.fetched for r in receipts),
            reused=sum(r.reused for r in receipts),
            rows_reused=sum(r.rows_reused for r in receipts),
            cpu_seconds=sum(r.cpu_seconds for r in receipts),
            raw_of=raw_of,
            stored_of=stored_of,
            stages=stages,
        )
