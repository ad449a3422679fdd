"""From rates to the time of a build."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache_workers.planning.assembly import FieldRows
from precache_workers.planning.catalogue import StoredRows
from precache_workers.planning.shard_plan import ShardPlan
from precache_workers.profiling.estimate import (
    BUILD_ROUND_TRIPS,
    SHARD_ROUND_TRIPS,
    UnitTimes,
    estimate,
    makespan,
)
from precache_workers.profiling.measurements import TimeCost


@given(st.lists(st.floats(0, 100)), st.integers(1, 20))
def test_a_makespan_is_between_its_bounds(seconds: list[float], cpus: int) -> None:
    """Graham's bound for list scheduling: the mean, and less than one task more."""
    found = makespan(seconds, cpus)
    least, longest = sum(seconds) / cpus, max(seconds, default=0.0)
    assert max(least, longest) - 1e-6 <= found <= least + longest + 1e-6


def test_the_last_wave_is_as_long_as_a_whole_one() -> None:
    assert makespan([1.0] * 17, 16) == 2


def test_cpus_that_are_late_take_later_tasks() -> None:
    assert makespan([1.0] * 4, 2, late=1.5) == 3
    assert makespan([1.0], 2, late=1.5) == 1
    assert makespan([], 2, late=1.5) == 0


def shard(fetched: int, rows: FieldRows, linked: bool = False) -> ShardPlan:
    return ShardPlan(
        shard=0,
        stored=StoredRows.empty(["image"], 15),
        linked=linked,
        fetched=np.arange(fetched),
        taken=np.arange(0),
        compared=0,
        rows_reused=0,
        retried=0,
        stay_failed=0,
        read_nbytes=100,
        linked_nbytes=0,
        fields={"image": rows},
    )


RATES = UnitTimes(
    fetch=TimeCost(0.1, 0.01),
    nbytes=50.0,
    computed={"image": TimeCost(0.04, 0.03)},
    taken={"image": TimeCost(0.001, 0.001)},
    computed_nbytes={"image": 10.0},
    taken_nbytes={"image": 8.0},
    opened=TimeCost(0.01, 0.001),
    samples=4,
    failed=(),
)


def test_work_and_bytes_are_added_up() -> None:
    shards = [
        shard(10, FieldRows(computed=10, copied=5)),
        shard(0, FieldRows(copied=15)),
    ]
    found = estimate(shards, RATES, 2, read=[10, 0], listing=3.0, start=0.0, round_trip=0.0)
    assert (found.fetched, found.written) == (500, 260)
    assert found.cpu_seconds == pytest.approx(10 * (0.01 + 0.03) + 20 * 0.001 + 200 * 0.001)
    assert found.seconds == pytest.approx(3 + 10 * 0.1 + 100 * 0.01), (
        "fetching is what it waits for"
    )


def test_a_bucket_is_waited_for_by_each_shard_and_by_the_build() -> None:
    shards = [shard(10, FieldRows(computed=10)) for _ in range(4)]
    near = estimate(shards, RATES, 2, read=[10] * 4, listing=2.0, start=1.0, round_trip=0.0)
    far = estimate(shards, RATES, 2, read=[10] * 4, listing=2.0, start=1.0, round_trip=0.05)
    waited = (BUILD_ROUND_TRIPS + 2 * SHARD_ROUND_TRIPS) * 0.05
    assert far.seconds - near.seconds == pytest.approx(waited)
    assert far.cpu_seconds == near.cpu_seconds


def test_samples_that_a_shard_only_passes_cost_their_reading_alone() -> None:
    shards, times = [shard(10, FieldRows(computed=10))], {"listing": 0.0, "start": 0.0}
    own = estimate(shards, RATES, 1, read=[10], round_trip=0.0, **times)
    more = estimate(shards, RATES, 1, read=[30], round_trip=0.0, **times)
    assert more.cpu_seconds - own.cpu_seconds == pytest.approx(20 * 0.01)
    assert more.seconds - own.seconds == pytest.approx(20 * 0.1)
    assert more.fetched == own.fetched
