"""Orders are functions: bijections, divided among ranks.

`tests.project.test_golden` holds what they are, from any start.
"""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.sampling.order import (
    POSITIONS_AT_ONCE,
    Order,
    Permutation,
    Shuffle,
    ValidRows,
)


@given(st.integers(1, 3000), st.integers(-(2**63), 2**63), st.integers(0, 10**6))
def test_a_permutation_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    images = Permutation(n, "full", seed, epoch)(np.arange(n))
    assert images.dtype == np.int64
    np.testing.assert_array_equal(np.sort(images), np.arange(n))


@given(st.integers(1, 2**62), st.integers(0, 100), st.data())
def test_any_position_of_any_size_can_be_asked_alone(
    n: int, seed: int, data: st.DataObject
) -> None:
    permutation = Permutation(n, seed)
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    images = permutation(positions)
    assert ((images >= 0) & (images < n)).all()
    np.testing.assert_array_equal(images, [permutation(p[None])[0] for p in positions])
    assert len(set(images.tolist())) == len(set(positions.tolist()))


def test_positions_of_any_shape_are_not_changed_and_keys_do_not_run_together() -> None:
    positions = np.arange(6, dtype=np.uint64).reshape(2, 3)
    [one] = Permutation(6, 3)(np.array([4]))
    for given_positions in (positions, positions[1, 1], positions[:0]):
        assert np.shape(Permutation(6, 3)(given_positions)) == np.shape(given_positions)
    assert Permutation(6, 3)(positions)[1, 1] == one
    np.testing.assert_array_equal(positions.ravel(), np.arange(6))
    keys = [(1, 23), (12, 3), (123,), ("1", "2", "3"), (-1, 23)]
    assert len({tuple(Permutation(50, *key)(np.arange(50)).tolist()) for key in keys}) == 5


def test_a_shuffle_spreads_rows_evenly_over_the_positions() -> None:
    """Chi-squared over (row, tenth of the epoch); 90 cells, three standard deviations."""
    counts = np.zeros((10, 10))
    for epoch in range(400):
        images = Permutation(10, "full", 0, epoch)(np.arange(10))
        counts[np.arange(10), images] += 1
    statistic = ((counts - 40) ** 2 / 40).sum()
    assert statistic < 81 + 3 * np.sqrt(2 * 81)


FEW = settings(max_examples=15, derandomize=True, deadline=None)


# --- blocks ---------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=200).filter(any), st.integers(1, 20))
def test_valid_rows_are_those_of_a_mask_and_edges_are_where_their_runs_begin(
    mask: list[bool], block: int
) -> None:
    valid = np.array(mask)
    rows = ValidRows(len(valid), np.flatnonzero(~valid))
    assert len(rows) == valid.sum()
    np.testing.assert_array_equal(rows(np.arange(len(rows))), np.flatnonzero(valid))
    edges = rows.edges(block)
    counts = [int(valid[start : start + block].sum()) for start in range(0, len(valid), block)]
    assert np.diff(edges).tolist() == [count for count in counts if count]
    assert (edges[0], edges[-1]) == (0, valid.sum())


@FEW
@given(
    st.lists(st.booleans(), min_size=1, max_size=200).filter(any),
    st.integers(1, 20),
    st.integers(1, 5) | st.just(2**63 - 1),
)
def test_holes_do_not_shift_a_block_shuffle_out_of_its_shards(
    mask: list[bool], block: int, window: int
) -> None:
    valid = np.array(mask)
    order = Order(ValidRows(len(valid), np.flatnonzero(~valid)), 1, Shuffle("block", block, window))
    shards = [int(rows[0]) // block for rows in order.epoch(0)]
    changes = [shard for at, shard in enumerate(shards) if shard not in shards[:at]]
    for group in (changes[at : at + window] for at in range(0, len(changes), window)):
        places = [at for at, shard in enumerate(shards) if shard in group]
        assert places == list(range(places[0], places[0] + len(places)))


# --- batches of an epoch ------------------------------------------------------------------------

SHUFFLES = [
    None, Shuffle(), Shuffle("block", 8, 2), Shuffle("block", 3, 100), Shuffle("block", 5, 2, 2),
]  # fmt: skip


@given(
    st.lists(st.booleans(), min_size=1, max_size=120).filter(any),
    st.tuples(st.integers(1, 40), st.integers(1, 8)).filter(lambda sizes: sizes[0] * sizes[1] < 50),
    st.sampled_from(SHUFFLES),
    st.booleans(),
    st.integers(0, 5),
    st.data(),
)
def test_from_any_position_each_step_takes_the_next_rows_of_one_order_on_any_number_of_ranks(
    mask: list[bool],
    sizes: tuple[int, int],
    shuffle: Shuffle | None,
    drop_last: bool,
    epoch: int,
    data: st.DataObject,
) -> None:
    """That of all valid rows. Rows that fill up its end are marked, and drawn with numbers."""
    valid, (batch, world) = np.array(mask), sizes
    rows = ValidRows(len(valid), np.flatnonzero(~valid))
    alone = np.concatenate(list(Order(rows, 2, shuffle, 5).epoch(epoch)))
    assert sorted(alone.tolist()) == np.flatnonzero(valid).tolist()
    assert shuffle is not None or (np.diff(alone) > 0).all()
    batch *= shuffle.nodes if shuffle else 1
    step, first = batch * world, data.draw(st.integers(0, len(alone) - 1), "first position")
    left = len(alone) - first
    count = left // step * step if drop_last else -(-left // world) * world
    wanted = alone[(first + np.arange(count)) % len(alone)]
    starts = range(0, count, step)
    own, drawn = list[int](), list[int]()
    for rank in range(world):
        order = Order(rows, batch, shuffle, 5, drop_last, rank=rank, world_size=world)
        parts = list(order.epoch(epoch, first))
        assert len(parts) == order.batches(first) == len(starts)
        if rank == 0:
            steps: list[list[int]] = [[] for _ in starts]
        for start, taken, part in zip(starts, steps, parts, strict=True):
            assert len(part) == min(step, count - start) // world
            taken.extend(part.tolist())
            again, marks = order.again(first + start), order.repeated(first + start)
            own += (part if marks is None else part[~marks]).tolist()
            drawn += (part if again is None else np.where(again < 0, again, part)).tolist()
    for start, taken in zip(starts, steps, strict=True):
        assert sorted(taken) == sorted(wanted[start : start + step].tolist())
    assert sorted(own) == sorted(alone[first : first + count].tolist())
    assert len(set(drawn)) == len(drawn) == count


@pytest.mark.parametrize(
    "batch_size", [1, POSITIONS_AT_ONCE // 2 - 1, POSITIONS_AT_ONCE, POSITIONS_AT_ONCE + 1]
)
def test_windows_of_the_computation_leave_no_trace(batch_size: int) -> None:
    n = 2 * POSITIONS_AT_ONCE + 5
    order = Order(ValidRows(n, np.array([])), batch_size, seed=3)
    rows = np.concatenate(list(order.epoch(1)))
    np.testing.assert_array_equal(rows, Permutation(n, "full", 3, 1)(np.arange(n)))


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("holes", [0, 40])
@pytest.mark.parametrize(("nodes", "ranks_of_a_node"), [(2, 1), (4, 2)])
def test_each_canonical_node_reads_its_own_shards_in_every_epoch(
    nodes: int, ranks_of_a_node: int, holes: int
) -> None:
    rows, block, world = 1600, 50, nodes * ranks_of_a_node
    valid = ValidRows(rows, np.sort(np.random.default_rng(0).permutation(rows)[:holes]))
    shards: list[set[int]] = []
    for node in range(nodes):
        read = set()
        for rank in range(node * ranks_of_a_node, (node + 1) * ranks_of_a_node):
            shuffle = Shuffle("block", block, 2, nodes)
            order = Order(valid, 8, shuffle, drop_last=True, rank=rank, world_size=world)
            for epoch in range(3):
                read |= {row // block for batch in order.epoch(epoch) for row in batch.tolist()}
        shards.append(read)
    assert set().union(*shards) == set(range(rows // block))
    assert sum(map(len, shards)) <= rows // block + nodes - 1  # where shares meet


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("holes", [0, 100_000])
@pytest.mark.parametrize("shuffle", [Shuffle(), Shuffle("block", 1000, 8)])
def test_an_order_of_a_billion_rows_takes_memory_for_holes_and_blocks_alone(
    shuffle: Shuffle, holes: int
) -> None:
    """A list of its rows would take 8 GB."""
    rows = 1_000_000_000
    missing = np.arange(holes, dtype=np.int64) * 999
    tracemalloc.start()
    try:
        order = Order(ValidRows(rows, missing), 256, shuffle, rank=3, world_size=8)
        for start in (0, order.batches() // 2, order.batches() - 2):
            batches = [
                batch for batch, _ in zip(order.epoch(7, start * 2048), range(2), strict=False)
            ]
            assert len(batches[0]) == 256
            assert all(0 <= batch.min() <= batch.max() < rows for batch in batches)
            found = np.concatenate(batches)
            assert not ((found % 999 == 0) & (found // 999 < holes)).any()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    blocks = rows // shuffle.block if shuffle.kind == "block" else 0
    assert peak < 32_000_000 + 64 * holes + 128 * blocks
