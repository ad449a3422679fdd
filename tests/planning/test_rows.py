"""Planning: orders, ids and the samples of a probe."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.store.json_documents import version_id
from precache.store.locations import UNKNOWN_BYTES
from precache.store.row_table import RowTable
from precache_workers.planning.rows import (
    GROUP_BYTES,
    default_max_failures,
    order_rows,
    sample_for_probe,
    samples_read,
)
from precache_workers.sources.labels import by_number
from tests.support.containers import located


def table_of(count: int, classes: int = 3) -> RowTable:
    numbers = np.arange(count)
    return RowTable(
        keys=[f"{number:05d}.jpg" for number in range(count)],
        sizes=numbers * 10,
        mtimes=numbers * 1000,
        etags=[f"etag{number}" for number in range(count)],
        labels=numbers * classes // max(1, count),
        classes=tuple(f"class{number}" for number in range(classes)),
    )


# --- order --------------------------------------------------------------------------------------


@given(st.integers(1, 300))
def test_rows_are_a_permutation_that_keeps_samples_whole(count: int) -> None:
    listing = table_of(count)
    rows = order_rows(listing, keep_order=False)
    assert sorted(rows.keys) == list(listing.keys)
    for row, key in enumerate(rows.keys):
        number = int(key[:5])
        assert rows.sizes[row] == number * 10
        assert rows.mtimes[row] == number * 1000
        assert rows.etags[row] == f"etag{number}"
        assert rows.labels[row] == listing.labels[number]


def test_the_order_is_always_the_same_and_mixes_classes_or_is_the_listings() -> None:
    listing = table_of(3000)
    rows = order_rows(listing, keep_order=False)
    assert order_rows(table_of(3000), keep_order=False).keys == rows.keys != listing.keys
    assert order_rows(listing, keep_order=True).keys == listing.keys
    for start in range(0, 3000, 300):
        found = Counter(rows.labels[start : start + 300].tolist())
        assert min(found[label] for label in range(3)) > 60


def in_containers(count: int, per_unit: int, nbytes: int) -> RowTable:
    """A listing of samples in units of a container, each unit of one class."""
    listing = table_of(count)
    units = np.arange(count) // per_unit
    return replace(
        listing,
        sizes=np.full(count, nbytes),
        labels=units,
        classes=tuple(map(str, range(units.max() + 1))),
        locations=located([("a.tar", False)] * count, units.tolist()),
    )


@given(st.integers(1, 300), st.integers(1, 40), st.integers(-1, 1 << 25))
def test_rows_of_containers_are_a_permutation_in_groups_of_whole_units(
    count: int, per_unit: int, nbytes: int
) -> None:
    rows = order_rows(in_containers(count, per_unit, nbytes), keep_order=False)
    assert rows.locations is not None
    places = rows.locations.places.to_pylist()
    assert [f"{place:05d}.jpg" for place in places] == rows.keys
    assert rows.locations.units.tolist() == [place // per_unit for place in places]
    spans: dict[int, tuple[int, int]] = {}
    for row, unit in enumerate(rows.locations.units.tolist()):
        first, _ = spans.setdefault(unit, (row, row))
        spans[unit] = first, row
    known = UNKNOWN_BYTES if nbytes < 0 else max(1, nbytes)
    most = GROUP_BYTES // known + 2 + per_unit
    assert all(last - first < most + GROUP_BYTES // known for first, last in spans.values())


def test_units_of_containers_are_mixed_within_groups_and_among_all() -> None:
    rows = order_rows(in_containers(8000, 10, 100 << 10), keep_order=False)
    labels = [int(label) for label in rows.labels[:40]]
    assert len(set(labels)) > 3  # of the 4 units of a group
    assert max(labels) - min(labels) > 200  # from all over the container


@pytest.mark.parametrize(("count", "per_unit", "nbytes"), [(600, 23, 45_000), (20_000, 9, 110_000)])
def test_each_unit_lies_in_about_one_shard(count: int, per_unit: int, nbytes: int) -> None:
    rows = order_rows(in_containers(count, per_unit, nbytes), keep_order=False)
    units, shard_rows = -(-count // per_unit), count // 16
    assert rows.locations is not None
    pairs = {(n // shard_rows, unit) for n, unit in enumerate(rows.locations.units.tolist())}
    assert len(pairs) <= 1.1 * units + 16 + 1  # but for those that lie across an end of a shard


# --- ids ----------------------------------------------------------------------------------------


def test_an_id_depends_on_each_of_its_parts() -> None:
    ids = {
        version_id("recipe", "rows", 8),
        version_id("other", "rows", 8),
        version_id("recipe", "other", 8),
        version_id("recipe", "rows", 9),
        version_id("recip", "erows", 8),
    }
    assert len(ids) == 5
    assert version_id("recipe", "rows", 8) == "ee43e4051cecc858e774f88a8ba011cd"  # in every process
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)


# --- the probe -----------------------------------------------------------------------------------


def test_failures_allowed_are_one_percent_and_at_least_five() -> None:
    allowed = {1: 5, 499: 5, 500: 5, 600: 6, 1_281_167: 12_811}
    assert {rows: default_max_failures(rows) for rows in allowed} == allowed


@given(st.integers(1, 200), st.integers(1, 40))
def test_the_probe_takes_the_first_key_first_and_then_all_over(rows: int, count: int) -> None:
    table = order_rows(table_of(rows), keep_order=False)
    chosen = sample_for_probe(table, count)
    assert table.keys[chosen[0]] == "00000.jpg"
    assert len(set(chosen)) == len(chosen) <= count + 1
    assert set(chosen) <= set(range(rows))
    if count > 1:
        assert {0, rows - 1} <= set(chosen)


def test_names_sort_by_the_numbers_in_them() -> None:
    names = ["node-10", "10.0.0.2", "node-2", "10.0.0.10", "9.0.0.1", "", "node"]
    assert sorted(names, key=by_number) == [
        "", "9.0.0.1", "10.0.0.2", "10.0.0.10", "node", "node-2", "node-10",
    ]  # fmt: skip


# --- reading ------------------------------------------------------------------------------------


def test_a_unit_that_is_read_forward_counts_up_to_the_last_sample() -> None:
    files = [("a", False)] * 10 + [("b", True)] * 20 + [("c>", True)] * 5
    table = replace(table_of(35), locations=located(files, [0] * 35))
    fetches = [[], [0, 9], [10], [29, 10], [2, 12, 34], range(35)]
    assert samples_read(table, [np.array(rows, np.int64) for rows in fetches]) == [
        0, 2, 1, 20, 1 + 3 + 5, 35,
    ]  # fmt: skip
    assert samples_read(table_of(9), [np.arange(3), np.arange(0)]) == [3, 0], "of no container"
