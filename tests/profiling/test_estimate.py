"""From rates to the time of a build."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache_workers.profiling.estimate import (
    BUILD_ROUND_TRIPS,
    SHARD_ROUND_TRIPS,
    RowCost,
    ShardWork,
    UnitTimes,
    estimate,
    makespan,
)
from precache_workers.shards.timing import TimeCost


@given(st.lists(st.floats(0, 100)), st.integers(1, 20))
def test_a_makespan_is_between_its_bounds(seconds: list[float], cpus: int) -> None:
    """Graham's bound for list scheduling: the mean, and less than one task more."""
    found = makespan(seconds, cpus)
    least, longest = sum(seconds) / cpus, max(seconds, default=0.0)
    assert max(least, longest) - 1e-6 <= found <= least + longest + 1e-6


def test_the_last_wave_is_a_whole_one_and_late_cpus_take_later_tasks() -> None:
    assert makespan([1.0] * 17, 16) == 2
    assert [makespan([1.0] * n, 2, late=1.5) for n in (4, 1, 0)] == [3, 1, 0]


def shard(read: int, computed: int = 0, reused: int = 0) -> ShardWork:
    return ShardWork(
        read=read,
        fetched=min(read, computed),
        computed={"image": computed},
        reused=reused,
    )


RATES = UnitTimes(
    fetch=TimeCost(0.1, 0.01),
    nbytes=50.0,
    computed={"image": RowCost(TimeCost(0.04, 0.03), 10.0)},
    reused=RowCost(TimeCost(0.001, 0.001), 8.0),
    samples=4,
    failed=(),
)
NOW = {"listing": 0.0, "start": 0.0, "round_trip": 0.0}


def test_work_and_bytes_are_added_up() -> None:
    shards = [shard(10, 10, 5), shard(0, 0, 15)]
    found = estimate(shards, RATES, 2, listing=3.0, start=0.0, round_trip=0.0)
    assert (found.fetched, found.written) == (500, 260)
    parts = 10 * (0.01 + 0.03), 20 * 0.001
    assert found.cpu_seconds == pytest.approx(sum(parts))
    assert found.seconds == pytest.approx(3 + 10 * 0.1), "fetching is waited for"
    assert (found.before_seconds, found.limited_by) == (3.0, "fetch")


def test_a_bucket_is_waited_for_by_each_shard_and_by_the_build() -> None:
    near, far = (
        estimate([shard(10, 10)] * 4, RATES, 2, listing=2.0, start=1.0, round_trip=seconds)
        for seconds in (0.0, 0.05)
    )
    waited = (BUILD_ROUND_TRIPS + 2 * SHARD_ROUND_TRIPS) * 0.05
    assert far.seconds - near.seconds == pytest.approx(waited)
    assert far.cpu_seconds == near.cpu_seconds


def test_samples_that_a_shard_only_passes_cost_their_reading_alone() -> None:
    own, more = (estimate([shard(read, 10)], RATES, 1, **NOW) for read in (10, 30))
    assert more.cpu_seconds - own.cpu_seconds == pytest.approx(20 * 0.01)
    assert more.seconds - own.seconds == pytest.approx(20 * 0.1)
    assert more.fetched == own.fetched


def test_a_source_that_delivers_less_than_the_cpus_take_limits_the_build() -> None:
    quick = dataclasses.replace(RATES, fetch=TimeCost(0.0, 0.0))
    fast = estimate([shard(10, 10)], quick, 1, **NOW)
    slow = estimate([shard(10, 10)], quick, 1, **NOW, fetched_per_s=1.0)
    assert (fast.limited_by, slow.limited_by) == ("cpu", "fetch")
    assert slow.seconds == pytest.approx(10)
