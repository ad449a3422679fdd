"""Sums by node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.store.receipts import Receipt, ShardObject
from precache_workers.driver.totals import BuildTotals, Totals
from precache_workers.planning.rows import by_number


def receipt(host: str, wall: float, images: int = 100, holes: int = 0) -> Receipt:
    return Receipt(
        shard=0,
        objects={"image": ShardObject(images * 20, 1, images * 50, "")},
        holes=dict.fromkeys(range(holes), "broken"),
        content=[""] * images,
        sums={},
        seconds={"fetch": wall / 4, "ops": wall / 2, "encode": wall / 4},
        cpu_seconds=wall,
        host=host,
        fetched=images * 10,
    )


RECEIPTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0.01, 100), st.integers(1, 9), st.integers(0, 1)),
    min_size=1,
)


@given(RECEIPTS)
def test_sums_are_those_of_the_receipts(made: list[tuple[str, float, int, int]]) -> None:
    totals = BuildTotals(planned=len(made))
    for host, wall, images, holes in made:
        totals.add(receipt(host, wall, images, holes))
    assert totals.total.shards == len(made)
    sums = sum((node.total for node in totals.nodes.values()), Totals())
    assert (sums.images, sums.stored) == (totals.total.images, totals.total.stored)
    assert sums.wall_seconds == pytest.approx(totals.total.wall_seconds)
    assert set(totals.nodes) == {host for host, *_ in made}
    for host, node in totals.nodes.items():
        own = [each for each in made if each[0] == host]
        assert node.total.shards == len(own)
        assert node.total.images == sum(images for _, _, images, _ in own)
        assert node.total.failed == sum(holes for _, _, _, holes in own)
        assert node.total.fetched * 2 == node.total.stored == node.total.images * 20
        assert node.total.stages["ops"] == pytest.approx(sum(wall / 2 for _, wall, *_ in own))


def test_names_sort_by_the_numbers_in_them() -> None:
    names = ["node-10", "10.0.0.2", "node-2", "10.0.0.10", "9.0.0.1", "", "node"]
    assert sorted(names, key=by_number) == [
        "", "9.0.0.1", "10.0.0.2", "10.0.0.10", "node", "node-2", "node-10",
    ]  # fmt: skip
