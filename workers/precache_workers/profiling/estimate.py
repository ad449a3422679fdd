"""From what a few rows cost to what a build costs: time, CPU time and bytes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from precache_workers.planning.shard_plan import ShardPlan


@dataclass(frozen=True)
class TimeCost:
    """Seconds that pass, and seconds of CPU time."""

    wall: float = 0.0
    cpu: float = 0.0

    def over(self, count: float) -> TimeCost:
        """Of each of so many."""
        return TimeCost(self.wall / count, self.cpu / count)


@dataclass(frozen=True)
class UnitTimes:
    """What was measured on one thread.

    Attributes
    ----------
    fetch
        A sample, the next ones being fetched meanwhile; `nbytes` of it.
    computed, taken
        A row of each field, made of its sample or taken over; ops and encoding.
    computed_nbytes, taken_nbytes
        Stored bytes of such a row.
    opened
        A byte of an earlier version's objects, read and checked.
    samples
        That were measured.
    failed
        (key, why) of those that would be holes, or could not be fetched.
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
    """What a build will take, by what a few rows took.

    Attributes
    ----------
    seconds
        Wall time of listing and making shards on `cpus`, each as fast as the one measured; not
        of starting Ray, nor of waiting for the store.
    cpu_seconds
        Of all shards.
    fetched, written
        Bytes of samples; bytes of new objects.
    samples, failed
        That were measured; (key, why) of those among them that failed.
    """

    cpus: int
    seconds: float
    cpu_seconds: float
    fetched: int
    written: int
    samples: int
    failed: tuple[tuple[str, str], ...]


def estimate(shards: Sequence[ShardPlan], rates: UnitTimes, cpus: int, listing: float) -> Estimate:
    """Apply measured rates to the shards that are to be made.

    Parameters
    ----------
    listing
        Seconds that it took.

    Notes
    -----
    A shard takes the longer of fetching its samples, which goes on beside the work, and of the
    CPU time of both. Shards go to the first CPU that is free.
    """
    costs = [_cost(each, rates) for each in shards if not each.linked]
    written = sum(_written(each, rates) for each in shards if not each.linked)
    fetched = sum(len(each.fetched) for each in shards)
    return Estimate(
        cpus,
        listing + makespan((cost.wall for cost in costs), cpus),
        sum(cost.cpu for cost in costs),
        int(fetched * rates.nbytes),
        int(written),
        rates.samples,
        rates.failed,
    )


def makespan(seconds: Iterable[float], cpus: int) -> float:
    """When the last of some tasks ends, each being begun in order by the first CPU to be free."""
    free = [0.0] * cpus
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def _cost(shard: ShardPlan, rates: UnitTimes) -> TimeCost:
    samples, nbytes = len(shard.fetched), shard.read_nbytes
    wall, cpu = samples * rates.fetch.cpu, samples * rates.fetch.cpu
    for name, rows in shard.fields.items():
        taken = rates.taken.get(name, TimeCost())
        count = rows.copied + rows.resumed
        wall += rows.computed * rates.computed[name].wall + count * taken.wall
        cpu += rows.computed * rates.computed[name].cpu + count * taken.cpu
    wall = max(wall, samples * rates.fetch.wall)
    return TimeCost(wall + nbytes * rates.opened.wall, cpu + nbytes * rates.opened.cpu)


def _written(shard: ShardPlan, rates: UnitTimes) -> float:
    return sum(
        rows.computed * rates.computed_nbytes[name]
        + (rows.copied + rows.resumed) * rates.taken_nbytes.get(name, 0.0)
        for name, rows in shard.fields.items()
        if not shard.reused
    )
