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
    decide_actions,
)

SHAPE = RowShape((3, 8, 8), "uint8")
FIELD = {"ops": [{"op": "decode"}, {"op": "resize", "size": [8, 8]}], "codec": "image"}
RECIPE = precache.Recipe.from_dict({"fields": {"image": FIELD, "mask": FIELD}})
SHAPES = {"image": SHAPE, "mask": SHAPE}


def base_field(name: str, applied: int = 2, encoded: bool = True) -> BaseField:
    match = FieldMatch(name, applied, applied == 2, encoded and applied == 2, SHAPE)
    sums = ChannelSums(0, [0.0] * 3, [0.0] * 3)
    folder = LocalFolder("/nowhere/version")
    return BaseField(match, folder, f"{name}/c/0/0/0/0", ShardObject(1, 2, 3), sums)


def base_shard(rows: int = 4, **options: Any) -> BaseShard:
    same, content = [True] * rows, [f"{row:x}" for row in range(rows)]
    fields = {"image": base_field("image"), "mask": base_field("mask")}
    facts = {"fields": fields, "same": same, "content": content, "holes": {}}
    return BaseShard(**{**facts, "content_decides": True, **options})


def test_nothing_is_known_without_a_base() -> None:
    [first, removed, last] = decide_actions(RECIPE, SHAPES, 4, None, [1]).runs
    assert (first.rows, removed.rows, last.rows) == (range(1), range(1, 2), range(2, 4))
    assert (first.fetches, removed.hole, removed.fetches) == (True, REMOVED, False)


def test_a_shard_is_linked_where_all_samples_are_the_same() -> None:
    actions = decide_actions(RECIPE, SHAPES, 4, base_shard(holes={2: "not an image"}))
    assert actions.linked
    assert [(run.rows, run.hole) for run in actions.runs] == [
        (range(2), ""), (range(2, 3), "not an image"), (range(3, 4), ""),
    ]  # fmt: skip
    assert set(actions.runs[0].actions.values()) == {Link()}


def test_one_other_sample_is_computed_and_the_rest_copied() -> None:
    actions = decide_actions(RECIPE, SHAPES, 4, base_shard(same=[True, True, False, True]))
    assert not actions.linked
    assert [run.actions["image"] for run in actions.runs] == [Copy(), Compute(), Copy()]
    assert actions.fetched == [2]


def test_a_field_that_the_base_lacks_has_all_samples_fetched() -> None:
    base = base_shard(fields={"image": base_field("image", applied=1)})
    [run] = decide_actions(RECIPE, SHAPES, 4, base).runs
    assert run.actions == {"image": Resume(1), "mask": Compute()}
    assert run.fetches
    assert run.reuses


def test_a_sample_that_must_not_be_decoded_is_a_hole() -> None:
    fields = {name: base_field(name, applied=1) for name in SHAPES}
    actions = decide_actions(RECIPE, SHAPES, 4, base_shard(fields=fields), (), {1: "it hangs"})
    assert [(run.rows, run.hole) for run in actions.runs] == [
        (range(1), ""), (range(1, 2), "it hangs"), (range(2, 4), ""),
    ]  # fmt: skip


def test_the_content_of_a_sample_settles_what_its_identity_did_not() -> None:
    base = base_shard(same=[False] * 4, holes={3: "not an image"})
    actions = decide_actions(RECIPE, SHAPES, 4, base)
    assert actions.fetched == [0, 1, 2, 3]
    assert set(actions.with_sample(1, "1").actions.values()) == {Copy()}
    assert set(actions.with_sample(1, "other").actions.values()) == {Compute()}
    assert actions.with_sample(3, "3").hole == "not an image"
    listed = decide_actions(RECIPE, SHAPES, 4, base_shard(same=[False] * 4, content_decides=False))
    assert set(listed.with_sample(1, "1").actions.values()) == {Compute()}


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
    assert [place for run in actions.runs for place in run.rows] == list(range(rows))
    for run in actions.runs:
        for place in run.rows:
            assert (run.hole == REMOVED) == (place in removed)
            assert bool(run.hole) != bool(run.actions)
            if run.reuses or (run.hole and place not in removed):
                assert base.same[place]
                assert base.content[place]
            if run.reuses:
                assert place not in base.holes
                assert run.fetches == (base.fields.keys() != SHAPES.keys())
