"""Receipts: the record that a shard is done, scratch of a build until it is committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter


@dataclass(frozen=True)
class ShardObject:
    """One stored object: bytes on disk, XXH3-64 of all of them, bytes before compression.

    Not a CRC32C: over chunks that end in theirs it would be the same for all contents.
    """

    size: int
    xxh3: int
    raw_nbytes: int


@dataclass(frozen=True)
class ChannelSums:
    """Sums over the valid rows of one image field, by channel; `count` is pixels a channel."""

    count: int
    total: list[float]
    squares: list[float]

    def flat(self) -> list[float]:
        """Count, totals and squares in one list."""
        return [self.count, *self.total, *self.squares]

    @classmethod
    def of(cls, flat: Sequence[float]) -> ChannelSums:
        """What `flat` made a list of."""
        channels = (len(flat) - 1) // 2
        return cls(int(flat[0]), list(flat[1 : 1 + channels]), list(flat[1 + channels :]))


@dataclass(frozen=True)
class SlowSample:
    """A sample by its row: seconds in ops and encoding, bytes fetched."""

    row: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Receipt:
    """What one shard task made.

    Attributes
    ----------
    shard
        Its number.
    objects
        One for each field.
    holes
        Row number -> why.
    content
        XXH3-128 (hex) of each raw sample in row order, empty where it could not be fetched.
    labels
        In row order, where the source tells a label only with the sample.
    reused
        Whether its objects are those of an earlier version.
    rows_reused
        Rows that were taken over from it, holes among them.
    sums
        For each image field.
    seconds
        Wall time by stage: fetch (waiting for it), ops, encode, put.
    cpu_seconds, import_seconds
        CPU time of the worker process during the task, and before it for imports.
    host
        The node that made it: its address in a Ray cluster, else its name.
    began
        Unix time by that node's clock.
    fetched
        Bytes of its raw samples.
    slowest
        The few samples that took longest, longest first.
    libraries
        Versions of those that made it; `zstd` is the one that encodes images.
    """

    shard: int
    objects: dict[str, ShardObject]
    holes: dict[int, str]
    content: list[str]
    sums: dict[str, ChannelSums]
    seconds: dict[str, float]
    cpu_seconds: float
    import_seconds: float = 0.0
    labels: list[int] | None = field(default=None)
    reused: bool = False
    rows_reused: int = 0
    host: str = ""
    began: float = 0.0
    fetched: int = 0
    slowest: list[SlowSample] = field(default_factory=list)
    libraries: dict[str, str] = field(default_factory=dict)

    @property
    def wall_seconds(self) -> float:
        """From its first fetch to its last put."""
        return sum(self.seconds.values())

    @property
    def stored(self) -> int:
        """Bytes put."""
        return sum(each.size for each in self.objects.values())

    def to_json(self) -> bytes:
        return json.dumps(self, default=vars).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Receipt:
        """Read what `to_json` wrote; ValueError where it is not that."""
        return _RECEIPT.validate_json(data)


_RECEIPT = TypeAdapter(Receipt)
