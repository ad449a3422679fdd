"""Estimates of a build from unit times: wall time, CPU time and bytes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from precache_workers.planning.shard_plan import ShardPlan
from precache_workers.profiling.measurements import TimeCost

BUILD_ROUND_TRIPS, SHARD_ROUND_TRIPS = 65, 3
"""Requests to a bucket that wait for one another: of a build, from its first look at the store to
its commit and result, and of a shard (its object, its receipt, and the record that it is done)."""


@dataclass(frozen=True)
class UnitTimes:
    """Costs of a sample, a row and a byte, measured on one thread.

    Attributes
    ----------
    fetch
        Cost of reading a sample while the next ones are read, too; `nbytes` is its size.
    computed, taken
        Cost of a row of each field that is computed, or reused; ops and encoding.
    computed_nbytes, taken_nbytes
        Stored bytes of such a row.
    opened
        Cost of reading and checking a byte of stored objects.
    samples
        Number of samples that were measured.
    failed
        (key, reason) of those that would be holes, or could not be fetched.
    """

    fetch: TimeCost
    nbytes: float
    computed: Mapping[str, TimeCost]
    taken: Mapping[str, TimeCost]
    computed_nbytes: Mapping[str, float]
    taken_nbytes: Mapping[str, float]
    opened: TimeCost
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
    cpu_seconds
        Of all shards.
    fetched, written
        Bytes of samples; bytes of new objects.
    samples, failed
        Number of samples measured; (key, reason) of those among them that failed.
    """

    cpus: int
    seconds: float
    cpu_seconds: float
    fetched: int
    written: int
    samples: int
    failed: tuple[tuple[str, str], ...]


def estimate(
    shards: Sequence[ShardPlan],
    times: UnitTimes,
    cpus: int,
    *,
    read: Sequence[int],
    listing: float,
    start: float,
    round_trip: float,
) -> Estimate:
    """Apply unit times to the shards that are to be built, and not linked.

    Parameters
    ----------
    read
        Samples that each of these shards reads, as `planning.rows.samples_read` counts them.
    listing
        Seconds of listing the source, and of the probe.
    start
        Seconds of starting a worker: first one, and when it has measured a few samples the others.
    round_trip
        Seconds of a request to the store, or of a small file if it is local.

    Notes
    -----
    A shard takes the longer of fetching its samples, which goes on beside the work, and of the
    CPU time of both; then its objects are put. Shards go to the first CPU that is free.
    """
    costs = [_cost(shard, times, count) for shard, count in zip(shards, read, strict=True)]
    put = SHARD_ROUND_TRIPS * round_trip
    return Estimate(
        cpus=cpus,
        seconds=listing
        + start
        + makespan((cost.wall + put for cost in costs), cpus, start)
        + BUILD_ROUND_TRIPS * round_trip,
        cpu_seconds=sum(cost.cpu for cost in costs),
        fetched=int(sum(len(shard.fetched) for shard in shards) * times.nbytes),
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


def _cost(shard: ShardPlan, times: UnitTimes, read: int) -> TimeCost:
    work = TimeCost(read * times.fetch.cpu, read * times.fetch.cpu)
    for name, rows in shard.fields.items():
        if rows.computed:
            work += times.computed[name] * rows.computed
        if reused := rows.copied + rows.resumed:
            work += times.taken.get(name, TimeCost()) * reused
    waited = TimeCost(max(work.wall, read * times.fetch.wall), work.cpu)
    return waited + times.opened * shard.read_nbytes


def _written(shard: ShardPlan, times: UnitTimes) -> float:
    return sum(
        rows.computed * times.computed_nbytes[name]
        + (rows.copied + rows.resumed) * times.taken_nbytes.get(name, 0.0)
        for name, rows in shard.fields.items()
    )
