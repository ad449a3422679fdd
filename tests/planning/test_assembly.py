"""How the rows of a shard come about, decided without reading anything."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.store.row_table import REMOVED
from precache_workers.planning.assembly import (
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


def changed(name: str, place: int, *held: int) -> StoredRows:
    """Rows of which one is stored elsewhere, or nowhere."""
    rows = shard_rows()
    fields = {n: each.copy() for n, each in rows.fields.items()}
    fields[name][place] = held or NOWHERE
    return shard_rows(fields=fields)


def test_all_samples_are_fetched_where_nothing_is_stored() -> None:
    first, removed, last = assemble(RECIPE, StoredRows.empty(RECIPE.fields, 4), [1]).runs
    assert (first.places, removed.places, last.places) == (range(1), range(1, 2), range(2, 4))
    assert (first.fetches, removed.hole, removed.fetches) == (True, REMOVED, False)


def test_a_shard_that_is_stored_whole_is_linked_with_its_holes() -> None:
    rows = shard_rows(holes={2: "not an image"})
    for held in rows.fields.values():
        held[2, 2] = 1
    assembly = assemble(RECIPE, rows)
    assert assembly.linked
    assert [run.hole for run in assembly.runs] == ["", "not an image", ""]
    assert count_rows("image", assembly) == FieldRows(linked=4)


def test_one_other_sample_is_computed_and_the_rest_copied() -> None:
    rows = shard_rows(known=np.array([True, True, False, True]))
    assembly = assemble(RECIPE, rows)
    assert not assembly.linked
    assert assembly.links.keys() == {"image", "mask"}, "its content may turn out to be the same"
    assert [run.fields["image"] for run in assembly.runs] == [Take(0, 0), Compute(), Take(0, 0)]
    assert assembly.fetched == [2]
    assert count_rows("image", assembly) == FieldRows(copied=3, computed=1)


def test_rows_of_several_shards_are_copied_in_runs() -> None:
    rows = changed("image", 3, 0, 50, 0)
    assembly = assemble(RECIPE, rows)
    assert [run.fields["image"] for run in assembly.runs] == [Take(0, 0), Take(0, 47)]
    assert assembly.links.keys() == {"mask"}


def test_a_field_that_is_stored_nowhere_has_its_samples_fetched() -> None:
    rows = changed("mask", 1)
    _, run, _ = assemble(RECIPE, rows).runs
    assert run.fields == {"image": Take(0, 0), "mask": Compute()}
    assert run.fetches
    assert run.reuses


def test_a_sample_that_must_not_be_decoded_is_a_hole() -> None:
    assembly = assemble(RECIPE, shard_rows(), (), {1: "it hangs"})
    assert [run.hole for run in assembly.runs] == ["", "it hangs", ""]
    assert assembly.runs[1].fields == {"image": Zeros(), "mask": Zeros()}


def test_the_content_of_a_sample_settles_what_its_identity_did_not() -> None:
    rows = shard_rows(known=np.zeros(4, np.bool_), holes={3: "not an image"})
    assembly = assemble(RECIPE, rows)
    assert assembly.fetched == [0, 1, 2, 3]
    assert assembly.with_sample(1, f"{2:032x}").fields["image"] == Take(0, 0)
    assert assembly.with_sample(1, "other").fields["image"] == Compute()
    assert assembly.with_sample(3, f"{4:032x}").hole == "not an image"
    assert assembly.with_sample(1, f"{2:032x}", "it hangs").hole == "it hangs"


def test_a_sample_that_failed_is_tried_again_and_expected_to_fail_again() -> None:
    rows = shard_rows()
    for held in rows.fields.values():
        held[1, 2] = 1
    assembly = assemble(RECIPE, rows)
    assert assembly.fetched == [1]
    assert assembly.hole_at(1)["image"] == Take(0, 0)
    assert count_rows("image", assembly) == FieldRows(linked=4)


def test_without_an_object_its_rows_are_computed() -> None:
    rows = shard_rows().without(("version", "image"), 0)
    assert (rows.fields["image"] == NOWHERE).all()
    assert assemble(RECIPE, rows).links.keys() == {"mask"}
    kept = shard_rows().without(("version", "image"), 1)
    assert assemble(RECIPE, kept).linked


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
    known[list(removed)] = False
    rows = StoredRows(
        arrays, fields, np.arange(1, 2 * count + 1, dtype=np.uint64).reshape(count, 2), known,
        dict.fromkeys(draw(places) - removed, "not an image"),
    )  # fmt: skip
    return rows, removed


@given(shards())
def test_every_row_has_one_way_and_none_is_taken_of_another_sample(
    drawn: tuple[StoredRows, set[int]],
) -> None:
    rows, removed = drawn
    assembly = assemble(RECIPE, rows, removed)
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
