"""How the rows of a shard come about, decided without reading anything."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import Hole
from precache.store.row_table import REMOVED
from precache_workers.planning.assembly import (
    Action,
    Compute,
    FieldRows,
    Take,
    Zeros,
    assemble,
    count_rows,
)
from precache_workers.planning.catalogue import StoredRows
from tests.support.stored import shard_rows, stored_array

FIELD = {"ops": [{"op": "decode"}, {"op": "resize", "size": [8, 8]}], "codec": "image"}
RECIPE = precache.Recipe.from_dict({"fields": {"image": FIELD, "mask": FIELD}})
NOWHERE = np.array([-1, -1, -1], np.int32)
BROKEN, LATE = Hole("failed", "not an image"), Hole("timed out", "it hangs")


def changed(name: str, place: int, *held: int) -> StoredRows:
    """Rows of which one is stored elsewhere, or nowhere."""
    rows = shard_rows()
    fields = {n: each.copy() for n, each in rows.fields.items()}
    fields[name][place] = held or NOWHERE
    return shard_rows(fields=fields)


def failed(place: int, **options: Any) -> StoredRows:
    """Rows of which one is stored as a hole."""
    rows = shard_rows(**options)
    for held in rows.fields.values():
        held[place, 2] = 1
    return rows


BOTH = {"image", "mask"}
SHARDS: dict[str, tuple[StoredRows, set[str], list[Action], list[int], FieldRows]] = {
    "stored nowhere": (
        StoredRows.empty(RECIPE.fields, 4), set(), [Compute()], [0, 1, 2, 3], FieldRows(computed=4),
    ),
    "whole, with a hole": (
        failed(2, holes={2: BROKEN}), BOTH, [Take(0, 0)] * 3, [], FieldRows(linked=4),
    ),
    "whole, but for one that may be tried again": (
        failed(1), BOTH, [Take(0, 0), Compute(), Take(0, 0)], [1], FieldRows(linked=4),
    ),
    "one of unknown content": (
        shard_rows(known=np.array([True, True, False, True])), BOTH,
        [Take(0, 0), Compute(), Take(0, 0)], [2], FieldRows(copied=3, computed=1),
    ),
    "rows of two shards": (
        changed("image", 3, 0, 50, 0), {"mask"}, [Take(0, 0), Take(0, 47)], [], FieldRows(copied=4),
    ),
    "a field without a row": (
        changed("mask", 1), {"image"}, [Take(0, 0)] * 3, [1], FieldRows(linked=4),
    ),
    "without an object": (
        shard_rows().without(("version", "image"), 0), {"mask"}, [Compute()], [0, 1, 2, 3],
        FieldRows(computed=4),
    ),
    "without an object of another shard": (
        shard_rows().without(("version", "image"), 1), BOTH, [Take(0, 0)], [], FieldRows(linked=4),
    ),
}  # fmt: skip
"""Rows -> fields to link, the image's actions, rows to fetch, and the image's counts."""


@pytest.mark.parametrize("case", SHARDS)
def test_stored_rows_are_linked_copied_or_computed(case: str) -> None:
    rows, links, actions, fetched, counts = SHARDS[case]
    assembly = assemble(RECIPE, rows)
    assert assembly.links.keys() == links
    assert [run.fields["image"] for run in assembly.runs] == actions
    assert assembly.fetched == fetched
    assert count_rows("image", assembly) == counts
    assert [run.hole for run in assembly.runs if run.hole] == [*rows.holes.values()]
    assert assembly.linked == (case.startswith("whole, with") or "another shard" in case)
    partly = case in ("a field without a row", "without an object")
    assert all(run.reuses == partly for run in assembly.runs if run.fetches)


def test_holes_are_removed_samples_those_that_hang_and_those_of_known_content() -> None:
    gone = replace(StoredRows.empty(RECIPE.fields, 4), known=np.arange(4) == 1, holes={1: REMOVED})
    _, removed, _ = assemble(RECIPE, gone).runs
    assert (removed.places, removed.hole, removed.fetches) == (range(1, 2), REMOVED, False)
    hangs = assemble(RECIPE, shard_rows(), {1: LATE}).runs[1]
    assert (hangs.hole, hangs.fields) == (LATE, {"image": Zeros(), "mask": Zeros()})
    rows = shard_rows(known=np.zeros(4, np.bool_), holes={3: BROKEN})
    assembly = assemble(RECIPE, rows)
    assert assembly.fetched == [0, 1, 2, 3]
    assert assembly.with_sample(1, f"{2:032x}").fields["image"] == Take(0, 0)
    assert assembly.with_sample(1, "other").fields["image"] == Compute()
    assert assembly.with_sample(3, f"{4:032x}").hole == BROKEN
    assert assembly.with_sample(1, f"{2:032x}", "it hangs").hole == "it hangs"
    guesses = [
        replace(stored, content=stored.content + np.array([0, more], np.uint64))
        for more, stored in ((10, changed("mask", 1, 1, 77, 0)), (20, changed("mask", 1, 1, 50, 0)))
    ]
    assembly = assemble(RECIPE, replace(rows, others=guesses).without(("version", "mask"), 77 // 4))
    for number, mask in ((2, Take(1, 0)), (12, Compute()), (22, Take(1, 49))):
        fields = assembly.with_sample(1, f"{number:032x}").fields
        assert fields == {"image": Take(0, 0), "mask": mask}
    assert assemble(RECIPE, failed(1)).hole_at(1)["image"] == Take(0, 0)


@st.composite
def shards(draw: st.DrawFn) -> tuple[StoredRows, set[int]]:
    count = draw(st.integers(1, 9))
    arrays = [stored_array(f"v{number}", applied=draw(st.integers(1, 2))) for number in range(3)]
    held = st.tuples(st.integers(-1, 2), st.integers(0, 99), st.integers(0, 1))
    fields = {
        name: np.array(draw(st.lists(held, min_size=count, max_size=count)), np.int32)
        for name in RECIPE.fields
    }
    known = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    places = st.sets(st.integers(0, count - 1))
    removed = draw(places)
    known[list(removed)] = True
    rows = StoredRows(
        arrays, fields, np.arange(1, 2 * count + 1, dtype=np.uint64).reshape(count, 2), known,
        dict.fromkeys(draw(places), BROKEN) | dict.fromkeys(removed, REMOVED),
    )  # fmt: skip
    return rows, removed


@given(shards())
def test_every_row_has_one_way_and_none_is_taken_of_another_sample(
    drawn: tuple[StoredRows, set[int]],
) -> None:
    rows, removed = drawn
    assembly = assemble(RECIPE, rows)
    assert [place for run in assembly.runs for place in run.places] == list(range(len(rows.known)))
    for run in assembly.runs:
        for place in run.places:
            assert (run.hole == REMOVED) == (place in removed)
            assert run.fields.keys() == RECIPE.fields.keys()
            if not rows.known[place] and place not in removed:
                assert set(run.fields.values()) == {Compute()}
            for name, action in run.fields.items():
                array, row, is_hole = rows.fields[name][place].tolist()
                if isinstance(action, Take):
                    assert (action.array, action.shift + place) == (array, row)
                    assert bool(run.hole) == bool(is_hole)
                else:
                    assert run.hole or array < 0 or is_hole or not rows.known[place]
                assert run.hole or not isinstance(action, Zeros)
            computes = Compute() in run.fields.values()
            assert run.fetches == (computes and not run.hole)
