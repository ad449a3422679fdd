"""Samples keep their rows, whatever the source does."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from precache.store.row_table import RowTable, freeze, thaw
from precache_workers.planning.diff import source_changes
from precache_workers.planning.row_placement import keep_rows
from precache_workers.planning.rows import order_rows, samples_read
from tests.support.containers import located

Files = dict[str, tuple[int, int]]
"""Key -> size, label."""


def listing(files: Files) -> RowTable:
    keys = sorted(files)
    sizes = np.array([files[key][0] for key in keys], np.int64)
    labels = np.array([files[key][1] for key in keys], np.int64)
    return RowTable(
        keys=keys,
        sizes=sizes,
        mtimes=sizes * 10,
        etags=[f"e{s}" for s in sizes],
        labels=labels,
        classes=("a", "b"),
    )


files = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.tuples(st.integers(1, 9), st.integers(0, 1)),
    min_size=1,
    max_size=30,
)


@given(st.lists(files, min_size=1, max_size=6))
def test_any_history_of_a_source_keeps_every_sample_in_its_place(history: list[Files]) -> None:
    """A source that did not change has its table again."""
    table = order_rows(listing(history[0]), keep_order=False)
    for now in history[1:]:
        child = keep_rows(table, listing(now), keep_order=False)
        if child is None:
            kept = len(set(now) & set(table.keys))
            assert kept < 0.5 * (len(table) - len(table.removed)) or not kept
            child = order_rows(listing(now), keep_order=False)
        else:
            assert child.keys[: len(table)] == table.keys
            found, rows = source_changes(table, child), slice(len(table))
            assert found.same + found.changed.count + found.added.count == len(now)
            assert found.same == int(table.unchanged(child, rows, rows).sum())
        rows = [row for row in range(len(child)) if row not in child.removed]
        assert sorted(child.keys[row] for row in rows) == sorted(now)
        for row in rows:
            key = child.keys[row]
            assert (child.sizes[row], child.labels[row]) == now[key]
            assert child.etags[row] == f"e{now[key][0]}"
        for row in child.removed:
            assert (child.sizes[row], child.mtimes[row], child.labels[row]) == (-1, -1, -1)
            assert child.etags[row] == ""
        again = keep_rows(child, listing(now), keep_order=False)
        assert again is not None
        assert again.digest == thaw(freeze(child), "here").digest == child.digest
        table = child


def test_moved_files_take_their_rows_along() -> None:
    before: Files = {f"cat/{n}.jpg": (n, 0) for n in range(1, 9)} | {"dog/1.jpg": (20, 1)}
    table = order_rows(listing(before), keep_order=False)
    now: Files = {key.replace("cat", "lion"): value for key, value in before.items()}
    now["lion/1.jpg"] = 99, 0  # it has another size
    child = keep_rows(table, listing(now), keep_order=False)
    assert child is not None
    moved = [key.replace("cat", "lion") for key in table.keys]
    moved[moved.index("lion/1.jpg")] = "cat/1.jpg"
    assert list(child.keys) == [*moved, "lion/1.jpg"]
    assert child.removed == {list(table.keys).index("cat/1.jpg")}


def test_without_a_time_or_an_etag_no_sample_is_known_to_be_the_same() -> None:
    """As with web pages, which tell neither."""
    table = RowTable.of_keys(["a", "b", "c"], etags=["", "", "x"])
    assert table.unchanged(table, slice(3), slice(3)).tolist() == [False, False, True]
    assert source_changes(table, table).same == 1


def test_new_samples_of_a_container_are_read_with_those_that_keep_their_rows() -> None:
    places = located([("a", True)] * 6, [0] * 6)
    whole = replace(listing({str(n): (1, 0) for n in range(6)}), locations=places)
    child = keep_rows(whole.take(range(4)), whole, keep_order=True)
    assert child is not None
    assert child.locations is not None
    assert len(child.locations.containers) == 1
    assert samples_read(child, [np.arange(6)]) == [6]
