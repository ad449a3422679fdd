"""Differences of recipes and of sources."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from precache.maintenance.diff import EXAMPLES, Change, compare_recipes
from precache.recipe.recipe import Recipe
from precache.store.row_table import RowTable
from precache_workers.ops.identity import behaviours
from precache_workers.planning.diff import op_changes, source_changes

DECODE: dict[str, Any] = {"op": "decode"}
FLIP: dict[str, Any] = {"op": "horizontal_flip"}


RESIZE, CROP = {"op": "resize", "size": 64}, {"op": "center_crop", "size": 56}


def recipe(*ops: dict[str, Any], codec: Any = "image", **more: Any) -> Recipe:
    return Recipe.from_dict({"fields": {"image": {"ops": list(ops), "codec": codec}, **more}})


def test_recipes_are_compared_op_by_op_and_fields_as_a_whole() -> None:
    before, level = recipe(DECODE, RESIZE, CROP), {"name": "zstd", "level": 3}
    two = recipe(DECODE, RESIZE, CROP, mask={"ops": [DECODE]})
    cases: list[tuple[Recipe, list[str]]] = [
        (before, []),
        (
            recipe(DECODE, RESIZE, FLIP, {**CROP, "size": 48}),
            [
                "image op 3: added horizontal_flip",
                "image op 4 center_crop size: (56, 56) → (48, 48)",
            ],
        ),
        (recipe(DECODE, CROP), ["image op 2: removed resize(size=64)"]),
        (
            recipe(DECODE, RESIZE, CROP, codec=level),
            ["image codec name: image → zstd", "image codec level: added 3"],
        ),
        (two, ["field mask: added decode"]),
    ]
    for after, changes in cases:
        assert list(map(str, compare_recipes(before, after))) == changes
    assert compare_recipes(two, before) == [Change("field mask", "decode", None)]


Rows = dict[str, tuple[int, int]]
"""Key -> its modification time and its label."""


def table(rows: Rows, classes: tuple[str, ...] = ("cat", "dog")) -> RowTable:
    times, labels = zip(*rows.values(), strict=True) if rows else ((), ())
    return RowTable(
        keys=list(rows),
        sizes=np.zeros(len(rows), np.int64),
        mtimes=np.array(times, np.int64),
        etags=[""] * len(rows),
        labels=np.array(labels, np.int64),
        classes=classes,
    )


ROWS = st.dictionaries(
    st.sampled_from("abcdefghijklmnop"), st.tuples(st.integers(0, 1), st.integers(-1, 2))
)


@given(ROWS, ROWS)
def test_every_key_is_counted_once(before: Rows, after: Rows) -> None:
    found = source_changes(table(before), table(after))
    both = before.keys() & after.keys()
    assert found.same == sum(before[key][0] == after[key][0] for key in both)
    assert found.same + found.changed.count + found.added.count == len(after)
    assert found.same + found.changed.count + found.removed.count == len(before)
    assert found.relabelled.count == sum(before[key][1] != after[key][1] for key in both)
    assert found.any == (before != after)
    for each in (found.added, found.changed, found.removed, found.relabelled):
        assert len(each.examples) == min(each.count, EXAMPLES)


def test_classes_are_compared_by_name() -> None:
    """Other numbers for the same names relabel no sample."""
    found = source_changes(
        table({"x": (0, 0), "y": (0, 1)}), table({"x": (0, 1), "y": (0, 1)}, ("ape", "cat", "dog"))
    )
    assert found.relabelled.examples == ("y: dog → cat",)
    assert found.classes_changed
    before, after = (
        replace(table({"x": (0, 0), "y": (0, 0)}, ()), labels=np.array([0.5, number], np.float32))
        for number in (np.nan, 2)
    )
    assert source_changes(before, after).relabelled.examples == ("y: none → 2.0",)


def test_removed_rows_are_no_samples() -> None:
    before = table({"a": (0, 0), "b": (0, 0)})
    after = RowTable(**{**vars(before), "removed": frozenset([1])})
    assert source_changes(before, after).removed.examples == ("b",)
    assert source_changes(after, before).added.examples == ("b",)
    assert not source_changes(after, after).any


def test_what_identifies_an_op_otherwise_is_named() -> None:
    """Only a library of another version is; and nothing where other probes alone are tried."""
    declared = recipe({**RESIZE, "size": 9})
    [(name, outputs)] = behaviours(declared).items()
    first, *others = outputs
    shifted = {**outputs, first: "0" * 16 + outputs[first][16:]}
    fewer = {probe: outputs[probe] for probe in others}
    for before, changed, says in [
        (outputs, {"torch"}, ""),
        (fewer, {"torch"}, "tried on other probes than before"),
        (fewer | {"of an older release": "0"}, set(), "tried on other probes than before"),
        (shifted, {"torch"}, f"torch computes other pixels, first of the probe {first}"),
        (shifted, {"pillow"}, "precache, or this processor, computes other pixels"),
        (shifted, set(), "precache, or this processor, computes other pixels"),
    ]:
        lines = [str(op) for op in op_changes(declared, {name: before}, changed)]
        assert [says in line for line in lines] == [True] * bool(says), (says, lines)
