"""Subsets and weights: what is asked for is what comes, in every epoch and after every resume."""

import functools
import itertools
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

import precache
from precache import Weighted
from precache.errors import UsageError
from precache.sampling import order
from precache.sampling.order import ChosenRows, Order, ValidRows, WeightedDraws, WeightSums
from tests.conftest import BuiltStore
from tests.support.loaders import assert_refused, flat, opened

# --- the arithmetic -----------------------------------------------------------------------------


@given(st.sets(st.integers(0, 90), min_size=1), st.integers(1, 20))
@settings(max_examples=30)
def test_edges_of_chosen_rows_are_those_of_their_blocks(chosen: set[int], block: int) -> None:
    rows = np.array(sorted(chosen))
    edges = ChosenRows(rows).edges(block)
    runs = [rows[a:b] // block for a, b in itertools.pairwise(edges)]
    assert all(len(set(run.tolist())) == 1 for run in runs)
    assert [int(run[0]) for run in runs] == sorted({row // block for row in chosen})


def _draws(weights: Any, *key: Any) -> WeightedDraws:
    valid = ValidRows(len(weights), np.empty(0, np.int64))
    return WeightedDraws(WeightSums(np.asarray(weights), valid), *key)


def test_draws_follow_the_weights() -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.0, 6.0, 0.0])
    counts = np.bincount(_draws(weights, 1)(np.arange(100_000)), minlength=6)
    np.testing.assert_allclose(counts, weights / weights.sum() * 100_000, rtol=0.05)


def test_draws_can_be_asked_for_from_any_position_and_are_those_of_earlier_releases() -> None:
    draws = _draws(np.ones(1000), "a")
    whole = draws(np.arange(500))
    np.testing.assert_array_equal(draws(np.arange(200, 300)), whole[200:300])
    assert (_draws(np.ones(1000), "b")(np.arange(500)) != whole).mean() > 0.9
    drawn = _draws(np.arange(10), "weighted", 0, 0)(np.arange(12))
    assert drawn.tolist() == [5, 9, 5, 9, 2, 7, 6, 9, 6, 7, 7, 2]


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 50))
@settings(max_examples=200)
def test_draws_are_the_same_however_few_sums_are_kept(seed: int, rows: int, most: int) -> None:
    """Those of one array of all cumulative weights, of whatever type and size."""
    random = np.random.default_rng(seed)
    weights = random.random(rows) * 10.0 ** random.integers(-20, 20, rows)
    weights = [weights, random.integers(0, 9, rows), np.float32(weights % 7)][seed % 3]
    weights[random.integers(rows)] = 1
    holes = np.flatnonzero(random.random(rows) < random.choice([0, 0.3]))[: rows - 1]
    valid: Any = ValidRows(rows, holes)
    if random.random() < 0.3:
        valid = ChosenRows(np.flatnonzero(random.random(rows) < 0.5))
    by_index = weights[valid(np.arange(len(valid)))].astype(np.float64)
    if not by_index.sum() > 0:
        return
    levels = random.random(300) * by_index.sum() * 1.01
    sums = np.cumsum(by_index)
    last = np.searchsorted(sums, sums[-1])
    expected = np.minimum(np.searchsorted(sums, levels, side="right"), last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "MOST_SUMS", most)
        patch.setattr(order, "POSITIONS_AT_ONCE", 64)
        kept = WeightSums(weights, valid)
        assert kept.total == sums[-1]
        np.testing.assert_array_equal(kept.find(levels), expected)
        weights *= 2
        if len(valid) > most:
            assert_refused(("the weights were changed after", kept.find, levels))
        else:
            np.testing.assert_array_equal(kept.find(levels), expected)


@pytest.mark.heavy
def test_draws_from_many_rows_take_little_memory_beside_the_weights() -> None:
    """A list of their sums would take 800 MB."""
    rows = 100_000_000
    weights = np.random.default_rng(0).random(rows)
    tracemalloc.start()
    try:
        sums = WeightSums(weights, ValidRows(rows, np.arange(0, rows, 1000)))
        draws = Order(sums._valid, 256, weights=sums, rank=3, world_size=8)
        assert len(next(draws.epoch(1))) == 256
        assert tracemalloc.get_traced_memory()[1] < 64_000_000
    finally:
        tracemalloc.stop()


# --- loaders ------------------------------------------------------------------------------------


def _epochs(store: BuiltStore, count: int = 1, **options: Any) -> list[list[int]]:
    with opened(store, **options) as loader:
        return [flat(loader) for _ in range(count)]


@pytest.fixture
def raw(stores: dict[str, BuiltStore]) -> BuiltStore:
    return stores["raw"]


def test_rows_of_classes(raw: BuiltStore) -> None:
    version = raw.open()
    rows = version.rows_of_classes("cat", "eel")
    assert {version.keys[row].split("/")[0] for row in rows.tolist()} == {"cat", "eel"}
    assert rows.tolist() == version.rows_of_classes(0, 2).tolist()
    [found] = _epochs(raw, rows=rows)
    assert sorted(found) == [row for row in rows.tolist() if version.valid[row]]
    with pytest.raises(UsageError, match="has no class 'cut'; did you mean cat"):
        version.rows_of_classes("cut")


def test_rows_of_keys(raw: BuiltStore) -> None:
    version = raw.open()
    keys = [key for key in version.keys if key.startswith("dog/00")][:5]
    rows = version.rows_of_keys(keys)
    assert [version.keys[row] for row in rows.tolist()] == keys
    [found] = _epochs(raw, rows=rows, shuffle=False)
    assert found == [row for row in rows.tolist() if version.valid[row]]
    assert_refused(
        ("keys is 3; give keys", version.rows_of_keys, 3),
        ("no key 3", version.rows_of_keys, [3]),
        (r"no key \['a'\]", version.rows_of_keys, [["a"]]),
        ("has no key 'dog/nowhere'", version.rows_of_keys, ["dog/nowhere"]),
    )


@pytest.mark.parametrize("shuffle", [True, False, "block"])
def test_rows_by_number_and_by_mask_are_the_same(shuffle: bool | str, raw: BuiltStore) -> None:
    valid = raw.open().valid
    chosen = np.flatnonzero(valid)[[1, 5, 6, 9, 14, 20]]
    mask = np.zeros(len(valid), np.bool_)
    mask[chosen] = True
    by_number = _epochs(raw, 2, rows=chosen[::-1] if shuffle else chosen, shuffle=shuffle)
    assert by_number == _epochs(raw, 2, rows=mask, shuffle=shuffle)
    assert by_number == _epochs(raw, 2, rows=mask.nonzero()[0].tolist(), shuffle=shuffle)
    assert all(sorted(epoch) == sorted(chosen.tolist()) for epoch in by_number)


def test_rows_that_repeat_or_will_be_read_in_another_order_are_refused(raw: BuiltStore) -> None:
    version = raw.open()
    rows = np.flatnonzero(version.valid)[[9, 2, 5, 7]]
    twice = np.concatenate([rows, rows[:1]])
    with pytest.raises(UsageError, match=f"rows has {rows[0]} 2 times, .* 4 of 5; of") as refused:
        _epochs(raw, rows=twice)
    names = {"np": np, "rows": twice}
    draws = eval(str(refused.value).rpartition("shuffle=")[2], names | {"Weighted": Weighted})
    assert set(_epochs(raw, 9, shuffle=draws)[8]) <= set(rows.tolist())
    mask = (version.labels == 1).astype(int)
    with pytest.raises(UsageError, match=r"rows has 0 \d+ times.* of a mask, ") as refused:
        _epochs(raw, rows=mask.tolist())
    advice = str(refused.value).partition("of a mask, ")[2].partition(";")[0]
    mask = eval(advice, names | {"rows": mask.tolist()})
    assert _epochs(raw, rows=mask) == _epochs(raw, rows=version.rows_of_classes(1))
    with pytest.raises(UsageError, match=r"not in ascending order, .*np.sort\(rows\)") as refused:
        _epochs(raw, rows=rows, shuffle=False)
    code = str(refused.value).partition(" of ")[2].removesuffix(" of a CachedDataset")
    names = {"np": np, "Subset": Subset, "dataset": precache.CachedDataset(raw.path), "rows": rows}
    assert [int(sample["row"]) for sample in eval(code, names)] == rows.tolist()


def test_weights_draw_valid_rows_with_replacement(raw: BuiltStore) -> None:
    version = raw.open()
    weights = np.where(version.labels == 0, 8.0, 1.0)
    epochs = _epochs(raw, 40, shuffle=Weighted(weights))
    counts = Counter(row for epoch in epochs for row in epoch)
    assert set(counts) == set(np.flatnonzero(version.valid).tolist())
    heavy = [counts[row] for row in counts if version.labels[row] == 0]
    light = [counts[row] for row in counts if version.labels[row] != 0]
    assert 5 < np.mean(heavy) / np.mean(light) < 11
    assert epochs == _epochs(raw, 40, shuffle=Weighted(weights))
    smallest = np.ldexp(weights, -1030)  # of which no part by 2**53 is left
    halved = torch.tensor(weights, dtype=torch.bfloat16)
    for same in (smallest, iter(weights), halved, torch.tensor(weights, requires_grad=True)):
        assert epochs == _epochs(raw, 40, shuffle=Weighted(same))
    some = np.flatnonzero(version.valid)[:6]
    assert set(_epochs(raw, 5, rows=some, shuffle=Weighted(weights))[4]) <= set(some.tolist())


REFUSED: list[tuple[str, Any, str]] = [
    ("rows", np.ones(7, np.bool_), r"rows has shape \(7,\), and"),
    ("rows", [1.5], r"rows is \[1.5\], float64 \(1,\); give row numbers"),
    ("rows", torch.tensor(3), r"rows is tensor\(3\), int64 \(\); .* as \[0, 5\]"),
    ("rows", [[0, 5]], r"rows is \[\[0, 5\]\], int64 \(1, 2\); give"),
    ("rows", [[0], [0, 5]], r"rows is \[\[0\], \[0, 5\]\], object"),
    ("rows", "05", "rows is '05', <U1"),
    ("rows", {0: 5}, "rows is {0: 5}, object"),
    ("rows", [10**30], r"rows is \[10+\], object"),
    ("rows", [3, 99], "rows has 99, and .* has 23 rows"),
    ("rows", [-1], "rows has -1"),
    ("rows", [], "rows names no row of"),
    ("shuffle", [1.0, 2.0], r"weights is \[1.0, 2.0\], float64 \(2,\); give a number for"),
    ("shuffle", [[1.0], [1.0, 2.0]], r"weights is \[\[1.0\], \[1.0, 2.0\]\], object"),
    ("shuffle", dict.fromkeys(range(23), 1.0), "weights is {0: 1.0, .*, object"),
    ("shuffle", np.arange(23.0) - 1, r"the weight of row 0 is -1\.0"),
    ("shuffle", np.full(23, np.nan), "the weight of row 0 is nan"),
    ("shuffle", np.zeros(23), "all weights are zero"),
    ("shuffle", np.full(23, 1e308), "the sum of the weights is no finite number"),
]


def test_what_makes_no_sense_is_refused(raw: BuiltStore) -> None:
    assert_refused(("weights is None; give a number for each row", Weighted, None))
    with opened(raw) as loader:
        for name, value, said in REFUSED:
            options = {name: Weighted(value) if name == "shuffle" else value}
            assert_refused((said, functools.partial(opened, raw, 1, **options)))
            if name == "rows" and said != "rows names no row of":
                assert_refused((said, loader.keys, value))
