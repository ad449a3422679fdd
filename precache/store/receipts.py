"""Receipts: records that a shard is done, kept by a build until it commits."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter

from precache.errors import Hole
from precache.store.commit_log import BUILD
from precache.store.layout import CHECK_NBYTES, RowShape
from precache.store.tree import Leaf

RECEIPTS = f"{BUILD}/receipts"
"""Folder of a version with the receipts of its finished shards, until it is committed."""


def receipt_name(shard: int) -> str:
    """Name of a shard's receipt below the version's folder."""
    return f"{RECEIPTS}/{shard:08d}.json"


@dataclass(frozen=True)
class ShardObject:
    """One stored object: size, XXH3-128 of all its bytes, and bytes before compression.

    Attributes
    ----------
    checks
        The last bytes of each chunk, in hex; zeros where it has none.
    """

    size: Annotated[int, Field(ge=0, lt=2**63)]
    xxh3: Annotated[int, Field(ge=0, lt=2**128)]
    raw_nbytes: int
    checks: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")] = field(repr=False)

    def leaf(self, name: str) -> Leaf:
        """Return the object of a name as the tree of digests has it."""
        return Leaf(name, self.size, self.xxh3)

    @property
    def ends(self) -> np.ndarray:
        """Return the checks: (chunks,) uint32."""
        return np.frombuffer(bytes.fromhex(self.checks), "<u4")


@dataclass(frozen=True)
class ChannelSums:
    """Sums over the valid rows of one image field, by channel; `count` is pixels per channel."""

    count: int
    total: list[float]
    squares: list[float]

    def flat(self) -> list[float]:
        """Count, totals and squares in one list."""
        return [self.count, *self.total, *self.squares]

    @classmethod
    def of(cls, flat: Sequence[float]) -> ChannelSums:
        """Make the sums from the list that `flat` returns."""
        channels = (len(flat) - 1) // 2
        return cls(int(flat[0]), list(flat[1 : 1 + channels]), list(flat[1 + channels :]))


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Result of one shard task.

    Attributes
    ----------
    shard
        Number of the shard.
    objects
        Stored object of each field.
    holes
        Row number -> why it is a hole.
    content
        XXH3-128 (hex) of each raw sample in row order; empty if it could not be fetched.
    parts
        XXH3-128s (hex), one after the other, of the parts of each sample from which fields start;
        empty if all are `content`. None if all are empty.
    labels
        Labels in row order, if the source gives labels only with samples.
    reused
        The objects are those of an earlier version.
    rows_reused
        Number of rows taken from an earlier version, holes included.
    sums
        Channel sums of each image field.
    shapes
        Shape of each row of ragged fields, in row order, zeros for holes.
    seconds
        Wall time by stage: fetch (waiting for it), ops, encode, put.
    cpu_seconds
        CPU time of the worker process during the task.
    host
        Node that ran the task: its address in a Ray cluster, else its name.
    began
        Unix time of the start, by that node's clock.
    fetched
        Bytes of raw samples fetched.
    libraries
        Versions of the libraries used; `zstd` is the one that encodes images.
    spoiled
        Objects of other versions, as VERSION/NAME, that were missing or damaged, so that nothing of
        them was reused.
    """

    shard: int
    objects: dict[str, ShardObject]
    holes: dict[int, Hole]
    content: list[Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]]
    sums: dict[str, ChannelSums]
    seconds: dict[str, float]
    cpu_seconds: float
    labels: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]] | None = field(default=None)
    reused: bool = False
    rows_reused: int = 0
    host: str = ""
    began: float = 0.0
    fetched: int = 0
    libraries: dict[str, str] = field(default_factory=dict)
    spoiled: list[str] = field(default_factory=list)
    shapes: dict[str, list[list[Annotated[int, Field(ge=0, lt=2**31)]]]] = field(
        default_factory=dict
    )
    parts: list[Annotated[str, Field(pattern="^([0-9a-f]{32})*$")]] = field(default_factory=list)

    def fits(self, rows: range, fields: Mapping[str, RowShape], rows_per_shard: int) -> bool:
        """Return whether it can be that of a shard with these rows.

        Parameters
        ----------
        fields
            Row of each array of the version.
        """
        chunks = {n: rows_per_shard // row.chunk_rows(rows_per_shard) for n, row in fields.items()}
        ragged = {n: {(len(rows), len(row.shape))} for n, row in fields.items() if row.ragged}
        return (
            {n: len(o.checks) // (2 * CHECK_NBYTES) for n, o in self.objects.items()} == chunks
            and {n: {(len(s), len(one)) for one in s} for n, s in self.shapes.items()} == ragged
            and all(
                name in fields and len(sums.flat()) == 1 + 2 * (*fields[name].shape, 0)[0]
                for name, sums in self.sums.items()
            )
            and all(row in rows for row in self.holes)
            and len(self.content) == len(rows)
            and len(self.parts) in (0, len(rows))
            and (self.labels is None or len(self.labels) == len(rows))
        )

    @property
    def wall_seconds(self) -> float:
        """Wall time from the first fetch to the last put."""
        return sum(self.seconds.values())

    def to_json(self) -> bytes:
        return json.dumps(self, default=vars).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Receipt:
        """Parse the output of `to_json`; raise ValueError for anything else."""
        return _receipts().validate_json(data)


@functools.cache
def _receipts() -> TypeAdapter[Receipt]:
    """At its first use: a training node reads no receipt of a finished build."""
    return TypeAdapter(Receipt)
