"""Sums by node, and rates that neither jump with whole shards nor outlive a lull."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.store.receipts import Receipt, ShardObject
from precache_workers.driver.totals import (
    SHARDS,
    WINDOW,
    BuildRates,
    BuildTotals,
    Totals,
    by_number,
)


def receipt(host: str, wall: float, images: int = 100, holes: int = 0) -> Receipt:
    return Receipt(
        shard=0,
        objects={"image": ShardObject(images * 20, 1, images * 50)},
        holes=dict.fromkeys(range(holes), "broken"),
        content=[""] * images,
        sums={},
        seconds={"fetch": wall / 4, "ops": wall / 2, "encode": wall / 4},
        cpu_seconds=wall,
        host=host,
        fetched=images * 10,
    )


RECEIPTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.floats(0.01, 100),
        st.integers(1, 9),
        st.integers(0, 1),
        st.floats(0, 50),
    ),
    min_size=1,
)


@given(RECEIPTS, st.floats(0, 500))
def test_sums_are_those_of_the_receipts(
    made: list[tuple[str, float, int, int, float]], lull: float
) -> None:
    totals, now = BuildTotals(planned=len(made)), 0.0
    for host, wall, images, holes, wait in made:
        now += wait
        totals.add(receipt(host, wall, images, holes), now)
        totals.nodes[host].rates(now)
    assert totals.left == 0
    sums = sum((node.total for node in totals.nodes.values()), Totals())
    assert (sums.images, sums.stored) == (totals.total.images, totals.total.stored)
    assert (sums - totals.total).wall_seconds == pytest.approx(0, abs=1e-6)
    assert set(totals.nodes) == {host for host, *_ in made}
    for host, node in totals.nodes.items():
        own = [each for each in made if each[0] == host]
        assert node.total.shards == len(own)
        assert node.total.images == sum(images for _, _, images, _, _ in own)
        assert node.total.failed == sum(holes for _, _, _, holes, _ in own)
        assert node.total.fetched * 2 == node.total.stored == node.total.images * 20
        assert node.total.stages["ops"] == pytest.approx(sum(wall / 2 for _, wall, *_ in own))
        rates = node.rates(now + lull)
        for value in (rates.images, rates.fetched, rates.stored, rates.cores):
            assert value >= -1e-6


@pytest.mark.parametrize("wall", [0.2, 5.0, 60.0])
@pytest.mark.parametrize("cores", [1, 4])
def test_a_steady_node_is_shown_at_its_speed_between_receipts_too(wall: float, cores: int) -> None:
    totals = BuildTotals()
    for shard in range(1, 401):
        totals.add(receipt("a", wall), now=shard * wall / cores)
    last = 400 * wall / cores
    for since in (0.0, 0.5 * wall / cores, 0.9 * wall / cores):
        rates = totals.nodes["a"].rates(last + since)
        assert rates.images == pytest.approx(100 * cores / wall, rel=0.1)
        assert rates.fetched == pytest.approx(10 * rates.images)
        assert rates.stored == pytest.approx(20 * rates.images)
        assert rates.cores == pytest.approx(cores, rel=0.1)


def test_the_first_shards_of_all_cores_count_from_when_they_began() -> None:
    totals = BuildTotals()
    for _ in range(4):
        totals.add(receipt("a", 20.0), now=1020.0)
    assert totals.nodes["a"].rates(1039.0) == BuildRates(20.0, 200.0, 400.0, 4.0)


def test_a_node_that_makes_no_more_comes_to_nothing() -> None:
    totals = BuildTotals()
    for shard in range(100):
        totals.add(receipt("a", 1.0), now=float(shard))
    node = totals.nodes["a"]
    speeds = [node.rates(99.0 + lull).images for lull in (0, 10, 20, 30, WINDOW + 5 * SHARDS)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == pytest.approx(0.0, abs=1e-6)


def test_names_sort_by_the_numbers_in_them() -> None:
    names = ["node-10", "10.0.0.2", "node-2", "10.0.0.10", "9.0.0.1", "", "node"]
    assert sorted(names, key=by_number) == [
        "", "9.0.0.1", "10.0.0.2", "10.0.0.10", "node", "node-2", "node-10",
    ]  # fmt: skip
