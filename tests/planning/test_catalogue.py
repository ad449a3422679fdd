"""The catalogue's look-up, held against a search through all stored rows."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import Hole
from precache.store.layout import RowShape
from precache.store.row_table import RowTable
from precache.store.version import Version
from precache_workers.planning.catalogue import Catalogue, StoredArray, StoredRows, StoredSamples
from precache_workers.planning.target_version import VersionSpec
from tests.support.stored import SHAPE, stored_array

FLIP = {"op": "horizontal_flip"}
OPS = {
    "fixed": [{"op": "decode"}, {"op": "resize", "size": [8, 8]}],
    "random": [{"op": "decode"}, FLIP],
}


BROKEN = Hole("failed", "not an image")


@dataclass
class Opened:
    """A version of which only the holes are known."""

    holes: dict[int, tuple[str, Hole]] = field(default_factory=dict)


def contents_of(numbers: list[int]) -> np.ndarray:
    """A content for each number; none for 0."""
    return np.array([(number * 2**40, number) for number in numbers], np.uint64).reshape(-1, 2)


def parts_of(content: np.ndarray) -> dict[str, np.ndarray]:
    """The only part of samples, from which the field `image` starts."""
    return {'["image"]': content}


def known_rows(content: np.ndarray) -> StoredRows:
    """Listed samples of known contents."""
    known = np.ones(len(content), np.bool_)
    return StoredRows((), {}, content, known, {}, parts=parts_of(content))


numbers = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@st.composite
def catalogues(draw: st.DrawFn) -> tuple[Catalogue, int]:
    ops = OPS[draw(st.sampled_from(sorted(OPS)))]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops, "variants": 1}}})
    keys = st.lists(st.integers(0, 14), min_size=12, max_size=12, unique=True)
    listed = draw(numbers)
    wanted = RowTable.of_keys([f"k{key}" for key in draw(keys)[: len(listed)]])
    versions = []
    for number in range(draw(st.integers(0, 3))):
        stored = draw(numbers)
        table = RowTable.of_keys([f"k{key}" for key in draw(keys)[: len(stored)]])
        holes = draw(st.sets(st.integers(0, len(stored) - 1), max_size=2))
        opened = Opened({row: (table.keys[row], BROKEN) for row in holes})
        rows = table.keys.find(wanted.keys)
        applied = draw(st.integers(1, 2))
        finished = applied == 2
        array = stored_array(
            f"v{number}", applied=applied, rows=len(stored), finished=finished,
            encoded=finished and draw(st.booleans()), rows_per_shard=draw(st.sampled_from([2, 4])),
            shape=draw(st.sampled_from([SHAPE, RowShape((3, 9, 9), "uint8")])),
        )  # fmt: skip
        attributes, content = cast(Any, None), contents_of(stored)
        samples = StoredSamples(
            cast(Version, opened), attributes, table, content, rows, {"image": [array]},
            parts_of(content),
        )  # fmt: skip
        versions.append(samples)
    spec = VersionSpec(recipe, "", wanted, "")
    catalogue = Catalogue(spec, versions, known_rows(contents_of(listed)), retries=True)
    damaged = draw(st.sets(st.integers(0, 5), max_size=2))
    return replace(catalogue, lost=[(("v0", "image"), shard) for shard in sorted(damaged)]), 4


def is_lost(catalogue: Catalogue, array: StoredArray, row: int) -> bool:
    return (array.place, row // array.rows_per_shard) in catalogue.lost


@given(catalogues())
def test_the_best_stored_row_is_found_for_every_row(drawn: tuple[Catalogue, int]) -> None:
    catalogue, per_shard = drawn
    found = catalogue.find(per_shard, {"image": SHAPE})
    held, table, content = found.fields["image"], catalogue.spec.table, found.content
    for row, (number, stored_row, is_hole) in enumerate(held.tolist()):
        candidates = []
        for version, array in catalogue.arrays["image"]:
            if array.finished and array.shape != SHAPE:
                continue
            samples = catalogue.versions[version]
            ops = catalogue.spec.recipe.fields["image"].ops[: array.applied]
            for other in range(len(samples.table)):
                same = content[row].any()
                same &= (samples.content[other] == content[row]).all()
                if any(op.is_random for op in ops):
                    same &= samples.table.keys[other] == table.keys[row]
                usable = other not in samples.version.holes and not is_lost(catalogue, array, other)
                if same and usable:
                    candidates.append((array.applied, array.encoded, other == row, array, other))
        if is_hole == 1:
            [array] = [found.arrays[number]]
            version = next(v for v, each in catalogue.arrays["image"] if each is array)
            assert stored_row == row in catalogue.versions[version].version.holes
            assert not is_lost(catalogue, array, row)
            assert all(candidate[:2] < (array.applied, array.encoded) for candidate in candidates)
            continue
        assert (number >= 0) == bool(candidates)
        if number >= 0:
            array = found.arrays[number]
            assert any(c[3] is array and c[4] == stored_row for c in candidates)
            assert (array.applied, array.encoded, stored_row == row) == max(
                c[:3] for c in candidates
            )


@given(catalogues())
def test_a_shard_is_taken_whole_where_a_version_has_it_whole(drawn: tuple[Catalogue, int]) -> None:
    catalogue, per_shard = drawn
    found = catalogue.find(per_shard, {"image": SHAPE})
    held, content = found.fields["image"], found.content
    draws = any(op.is_random for op in catalogue.spec.recipe.fields["image"].ops)
    for start in range(0, len(held), per_shard):
        rows = range(start, min(start + per_shard, len(held)))
        for version, array in catalogue.arrays["image"]:
            samples, taken = catalogue.versions[version], held[start : rows.stop]
            best = array.finished and array.encoded and array.shape == SHAPE
            if not best or array.rows_per_shard != per_shard:
                continue
            if array.rows_of(start // per_shard) == rows and all(
                content[row].any()
                and (samples.content[row] == content[row]).all()
                and (samples.rows[row] == row or not draws)
                and row not in samples.version.holes
                and not is_lost(catalogue, array, row)
                for row in rows
            ):
                assert len(set(taken[:, 0].tolist())) == 1
                assert taken[:, 1].tolist() == list(rows)


def test_samples_that_ended_workers_are_known_whatever_recipe_they_ended() -> None:
    """Unless functions of the user may have done so, or they are to be tried again."""
    ops = {name: {"ops": OPS[name], "variants": 1} for name in OPS}
    function = {"op": "function", "function": "os:getpid", "version": "1"}
    ops["user's"] = {"ops": [*OPS["fixed"], function], "variants": 1}
    wanted = precache.Recipe.from_dict({"fields": {"image": ops["fixed"]}})
    table = RowTable.of_keys(["a", "b", "c"])
    spec = VersionSpec(wanted, "", table, "")
    ended = Hole("killed its worker", "it fell")
    opened = Opened({0: ("a", ended), 1: ("b", BROKEN)})
    content = contents_of([1, 2, 3])
    for before, retries, holes in (
        ("random", False, {0: ended}), ("user's", False, {}), ("random", True, {}),
    ):  # fmt: skip
        recipe = precache.Recipe.from_dict({"fields": {"image": ops[before]}})
        attributes = cast(Any, SimpleNamespace(recipe=recipe, fields={"image": None}))
        version = cast(Version, opened)
        samples = StoredSamples(version, attributes, table, content, np.arange(3), {}, {})
        catalogue = Catalogue(spec, [samples], known_rows(content), retries=retries)
        assert catalogue.find().holes == holes
        assert catalogue.failed == {0, 1}


@given(catalogues())
def test_shapes_and_versions_are_those_of_most_rows(drawn: tuple[Catalogue, int]) -> None:
    catalogue, _ = drawn
    found = catalogue.find()
    held = found.fields["image"]
    taken = [found.arrays[n] for n, _, is_hole in held.tolist() if n >= 0 and not is_hole]
    assert {array.folder.name for array in taken} == set(found.versions)
    assert int(found.has_rows.sum()) == len(taken)
    finished = [array.shape for array in taken if array.finished]
    assert ("image" in found.shapes) == bool(finished)
    if finished:
        assert found.shapes["image"] in finished
