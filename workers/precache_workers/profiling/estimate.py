"""Estimates of a build from unit times: wall time, CPU time and bytes. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from precache_workers.shards.timing import TimeCost

if TYPE_CHECKING:
    from precache_workers.planning.shard_plan import ShardPlan

BUILD_ROUND_TRIPS, SHARD_ROUND_TRIPS = 65, 3
"""Requests to a bucket that wait for one another: of a build, from its first look at the store to
its commit and result, and of a shard (its object, its receipt, and the record that it is done)."""


FILE_SECONDS = 0.0015
"""Assumed seconds to write a small file and sync it to a local disk: the 65 of a build then
take 0.1 s, as on an SSD."""


@dataclass(frozen=True)
class RowCost:
    """Cost of a row of one array, and its stored bytes."""

    time: TimeCost = field(default_factory=TimeCost)
    nbytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ShardWork:
    """Parts of a shard that is to be built, and not linked.

    Attributes
    ----------
    read
        Samples that it reads, as `planning.rows.samples_read` counts them.
    fetched
        Samples of its rows.
    computed
        Rows that are computed, by array.
    reused
        Rows that are copied or resumed, of all arrays.
    """

    read: int
    fetched: int
    computed: Mapping[str, int]
    reused: int = 0

    @classmethod
    def of(cls, shard: ShardPlan, read: int) -> Self:
        """Return the work of a planned shard."""
        return cls(
            read=read,
            fetched=len(shard.fetched),
            computed={name: rows.computed for name, rows in shard.fields.items()},
            reused=shard.reused,
        )

    @classmethod
    def new(cls, rows: int, arrays: Iterable[str]) -> Self:
        """Return the work of a shard whose rows are all computed."""
        return cls(read=rows, fetched=rows, computed=dict.fromkeys(arrays, rows))


@dataclass(frozen=True)
class UnitTimes:
    """Costs of a sample, a row, a byte and a shard, measured on one thread.

    Attributes
    ----------
    fetch
        Cost of reading a sample while the next ones are read, too; `nbytes` is its size.
    computed
        Rows of each array that are computed; ops and encoding.
    reused
        Row of an array that is copied or resumed, the reading of its object included.
    samples
        Number of samples that were measured.
    failed
        (key, reason) of those that would be holes, or could not be fetched.
    """

    fetch: TimeCost
    nbytes: float
    computed: Mapping[str, RowCost]
    reused: RowCost
    samples: int
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Estimate:
    """Predicted cost of a build.

    Attributes
    ----------
    seconds
        Wall time of listing, starting, building shards on `cpus`, each as fast as the one
        measured, and committing.
    before_seconds
        Part of it before the first shard: listing the source, and starting a worker.
    limited_by
        ``cpu``, or ``fetch`` if shards wait for their samples.
    cpu_seconds
        Of all shards.
    fetched, written
        Bytes of samples; bytes of new objects.
    samples, failed
        Number of samples measured; (key, reason) of those among them that failed.
    """

    cpus: int
    seconds: float
    before_seconds: float
    limited_by: str
    cpu_seconds: float
    fetched: int
    written: int
    samples: int
    failed: tuple[tuple[str, str], ...]


def estimate(
    shards: Sequence[ShardWork],
    times: UnitTimes,
    cpus: int,
    *,
    listing: float,
    start: float,
    round_trip: float,
    fetched_per_s: float = math.inf,
) -> Estimate:
    """Apply unit times to the shards that are to be built, and not linked.

    Parameters
    ----------
    listing
        Seconds of listing the source, and of the probe.
    start
        Seconds of starting a worker: first one, and when it has measured a few samples the others.
    round_trip
        Seconds of a request to the store, or of a small file if it is local.
    fetched_per_s
        Samples that the source delivers in a second at most.

    Notes
    -----
    A shard takes the longer of fetching its samples, which goes on beside the work, and of the
    CPU time of both; then its objects are put. Shards go to the first CPU that is free.
    """
    work = [_work(shard, times) for shard in shards]
    fetches = [shard.read * times.fetch.wall for shard in shards]
    walls = [max(cost.wall, wait) for cost, wait in zip(work, fetches, strict=True)]
    put = SHARD_ROUND_TRIPS * round_trip
    busy = makespan((wall + put for wall in walls), cpus, start)
    delivered = sum(shard.read for shard in shards) / fetched_per_s
    waiting = sum(fetches) > sum(cost.wall for cost in work) or delivered > busy
    return Estimate(
        cpus=cpus,
        seconds=listing + start + max(busy, delivered) + BUILD_ROUND_TRIPS * round_trip,
        before_seconds=listing + start,
        limited_by="fetch" if waiting else "cpu",
        cpu_seconds=sum(cost.cpu for cost in work),
        fetched=int(sum(shard.fetched for shard in shards) * times.nbytes),
        written=int(sum(_written(shard, times) for shard in shards)),
        samples=times.samples,
        failed=times.failed,
    )


def makespan(seconds: Iterable[float], cpus: int, late: float = 0.0) -> float:
    """Time at which the last task ends, if each begins in order on the first CPU that is free.

    Parameters
    ----------
    late
        Time from which the CPUs but the first are free.
    """
    free, end = [0.0, *[late] * (cpus - 1)], 0.0
    for duration in seconds:
        end = max(end, free[0] + duration)
        heapq.heapreplace(free, free[0] + duration)
    return end


def _work(shard: ShardWork, times: UnitTimes) -> TimeCost:
    read = TimeCost(times.fetch.cpu, times.fetch.cpu) * shard.read
    rows = (cost.time * count for cost, count in _rows(shard, times))
    return sum(rows, read)


def _written(shard: ShardWork, times: UnitTimes) -> float:
    return sum(cost.nbytes * count for cost, count in _rows(shard, times))


def _rows(shard: ShardWork, times: UnitTimes) -> Iterator[tuple[RowCost, int]]:
    """Yield the cost of a row, and the number of such rows: those reused, and of each array."""
    yield times.reused, shard.reused
    for name, count in shard.computed.items():
        if count:
            yield times.computed[name], count
