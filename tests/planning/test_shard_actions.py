"""How the rows of a shard come about, decided without reading anything."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.storage.local import LocalFolder
from precache.store.layout import RowShape
from precache.store.receipts import ChannelSums, ShardObject
from precache.store.row_table import REMOVED
from precache_workers.planning.base_shard import BaseField, BaseShard
from precache_workers.planning.field_match import FieldMatch
from precache_workers.planning.shard_actions import (
    Compute,
    Copy,
    Link,
    Resume,
    ShardActions,
    Zeros,
    decide_actions,
)
from precache_workers.planning.shard_plan import FieldRows, count_rows

SHAPE = RowShape((3, 8, 8), "uint8")
FIELD = {"ops": [{"op": "decode"}, {"op": "resize", "size": [8, 8]}], "codec": "image"}
RECIPE = precache.Recipe.from_dict({"fields": {"image": FIELD, "mask": FIELD}})
SHAPES = {"image": SHAPE, "mask": SHAPE}


def base_field(name: str, applied: int = 2, encoded: bool = True) -> BaseField:
    match = FieldMatch(name, applied, applied == 2, encoded and applied == 2, SHAPE)
    sums = ChannelSums(0, [0.0] * 3, [0.0] * 3)
    folder = LocalFolder("/nowhere/version")
    made = ShardObject(1, 2, 3, "")
    return BaseField(match, folder, "", f"{name}/c/0/0/0/0", made, sums)


def base_shard(rows: int = 4, **options: Any) -> BaseShard:
    same, content = [True] * rows, [f"{row:x}" for row in range(rows)]
    fields = {"image": base_field("image"), "mask": base_field("mask")}
    facts = {"fields": fields, "same": same, "content": content, "holes": {}}
    return BaseShard(**{**facts, **options})


def test_nothing_is_known_without_a_base() -> None:
    first, removed, last = decide_actions(RECIPE, SHAPES, 4, None, [1]).runs
    assert (first[0], removed[0], last[0]) == (range(1), range(1, 2), range(2, 4))
    assert (first[1].fetches, removed[1].hole, removed[1].fetches) == (True, REMOVED, False)


def holes_of(actions: ShardActions) -> list[tuple[range, str]]:
    return [(rows, row.hole) for rows, row in actions.runs]


def test_a_shard_is_linked_where_all_samples_are_the_same() -> None:
    actions = decide_actions(RECIPE, SHAPES, 4, base_shard(holes={2: "not an image"}))
    assert actions.linked
    expected = [(range(2), ""), (range(2, 3), "not an image"), (range(3, 4), "")]
    assert holes_of(actions) == expected
    assert set(actions.reuse.fields.values()) == {Link()}


def test_one_other_sample_is_computed_and_the_rest_copied() -> None:
    actions = decide_actions(RECIPE, SHAPES, 4, base_shard(same=[True, True, False, True]))
    assert not actions.linked
    assert [row.fields["image"] for _, row in actions.runs] == [Link(), Compute(), Link()]
    assert actions.fetched == [2]
    assert decide_actions(RECIPE, SHAPES, 5, base_shard()).reuse.fields["image"] == Copy()


def test_a_field_that_the_base_lacks_has_all_samples_fetched() -> None:
    base = base_shard(fields={"image": base_field("image", applied=1)})
    [(_, row)] = decide_actions(RECIPE, SHAPES, 4, base).runs
    assert row.fields == {"image": Resume(1), "mask": Compute()}
    assert row.fetches
    assert row.reuses


def test_a_sample_that_must_not_be_decoded_is_a_hole() -> None:
    fields = {name: base_field(name, applied=1) for name in SHAPES}
    actions = decide_actions(RECIPE, SHAPES, 4, base_shard(fields=fields), (), {1: "it hangs"})
    expected = [(range(1), ""), (range(1, 2), "it hangs"), (range(2, 4), "")]
    assert holes_of(actions) == expected


def test_the_content_of_a_sample_settles_what_its_identity_did_not() -> None:
    base = base_shard(same=[False] * 4, holes={3: "not an image"})
    actions = decide_actions(RECIPE, SHAPES, 4, base)
    assert actions.fetched == [0, 1, 2, 3]
    assert set(actions.with_sample(1, "1").fields.values()) == {Link()}
    assert set(actions.with_sample(1, "other").fields.values()) == {Compute()}
    assert actions.with_sample(3, "3").hole == "not an image"


def test_a_hole_that_is_computed_again_is_not_reused() -> None:
    fields = {name: base_field(name, applied=1) for name in SHAPES}
    actions = decide_actions(RECIPE, SHAPES, 4, base_shard(fields=fields, holes={3: "no image"}))
    assert actions.fetched == [3]
    assert actions.with_sample(3, "3") == actions.compute
    assert not actions.compute.reuses
    assert actions.with_sample(3, "3", "it hangs").reuses


@st.composite
def shards(draw: st.DrawFn) -> tuple[int, BaseShard, set[int]]:
    rows = draw(st.integers(1, 9))
    count = draw(st.integers(1, rows))
    places = st.integers(0, count - 1)
    fields = {
        name: base_field(name, draw(st.integers(1, 2)), draw(st.booleans()))
        for name in draw(st.sets(st.sampled_from(sorted(SHAPES))))
    }
    base = base_shard(
        fields=fields,
        same=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        content=draw(st.lists(st.sampled_from(["", "a"]), min_size=count, max_size=count)),
        holes=dict.fromkeys(draw(st.sets(places)), "not an image"),
        retries=draw(st.booleans()),
    )
    return rows, base, draw(st.sets(places))


@given(shards())
def test_every_row_has_one_way_and_none_is_reused_of_another_sample(
    drawn: tuple[int, BaseShard, set[int]],
) -> None:
    rows, base, removed = drawn
    actions = decide_actions(RECIPE, SHAPES, rows, base, removed)
    assert [place for places, _ in actions.runs for place in places] == list(range(rows))
    for places, row in actions.runs:
        for place in places:
            assert (row.hole == REMOVED) == (place in removed)
            assert row.fields.keys() == SHAPES.keys()
            assert row.hole or Zeros() not in row.fields.values()
            if row.reuses:
                assert base.same[place]
                assert base.content[place]
                assert bool(row.hole) == (place in base.holes)
                if not row.hole:
                    assert row.fetches == (base.fields.keys() != SHAPES.keys())


def test_a_hole_is_counted_as_it_is_expected_to_come_about() -> None:
    """One whose sample must be tried again is computed; one of the same sample stays, unread."""
    fields = {"image": base_field("image")}
    for retries, counts in ((True, FieldRows(copied=3, computed=1)), (False, FieldRows(linked=4))):
        content = ["0", "", "2", "3"]
        again = base_shard(fields=fields, holes={1: "x"}, content=content, retries=retries)
        assert count_rows("image", decide_actions(RECIPE, SHAPES, 4, again)) == counts
    changed = base_shard(
        fields=fields, holes={1: "x"}, content=content, same=[False, True, True, True]
    )
    actions = decide_actions(RECIPE, SHAPES, 4, changed)
    assert count_rows("image", actions) == FieldRows(copied=2, computed=2)
    known = base_shard(fields=fields, holes={1: "no image"})
    assert count_rows("image", decide_actions(RECIPE, SHAPES, 4, known)) == FieldRows(linked=4)
    other = base_shard(fields=fields, holes={1: "x"}, same=[False, True, True, True])
    actions = decide_actions(RECIPE, SHAPES, 4, other)
    assert count_rows("image", actions) == FieldRows(copied=2, computed=1)
    assert count_rows("mask", actions) == FieldRows(computed=4)
