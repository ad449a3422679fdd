"""The version that a build is to make: its shards, and how it is found again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.recipe.recipe import Recipe
from precache.storage.open import open_folder
from precache.store.layout import RowShape
from precache.store.row_table import RowTable
from precache_workers.planning.target_version import TargetVersion, VersionSpec, find_goal

SHAPES = {"image": RowShape((3, 8, 8), "uint8"), "vector": RowShape((5,), "float32")}


def recipe_of(count: int, seed: int = 0) -> VersionSpec:
    unknown = np.full(count, -1, np.int64)
    keys = [f"{number}.jpg" for number in range(count)]
    table = RowTable(keys, unknown, unknown, [""] * count, unknown, ())
    recipe = Recipe.image(seed=seed)
    return VersionSpec(recipe, recipe.fingerprint({}), table, table.digest)


def goal_of(store: Path, count: int = 10, per_shard: int = 4, seed: int = 0) -> TargetVersion:
    return TargetVersion.of(open_folder(store), recipe_of(count, seed), per_shard, SHAPES)


@given(st.integers(1, 500), st.integers(1, 600))
def test_shards_part_the_rows(count: int, per_shard: int) -> None:
    goal = goal_of(Path("/nowhere"), count, per_shard)
    rows = [row for shard in range(goal.shards) for row in goal.rows_of(shard)]
    assert rows == list(range(count))
    assert all(len(goal.rows_of(shard)) == per_shard for shard in range(goal.shards - 1))
    assert 0 < len(goal.rows_of(goal.shards - 1)) <= per_shard


def test_objects_are_named_as_zarr_names_them() -> None:
    goal = goal_of(Path("/nowhere"))
    assert goal.object_name("image", 2) == "image/c/2/0/0/0"
    assert goal.object_name("vector", 1) == "vector/c/1/0"


def test_sizes_tell_what_is_there(tmp_path: Path) -> None:
    goal = goal_of(tmp_path)
    goal.folder.put("image/c/1/0/0/0", [b"12345"])
    sizes = goal.sizes()
    assert sizes.pop(("image", 1)) == 5
    assert len(sizes) == 5
    assert set(sizes.values()) == {None}


def test_a_version_begun_is_found_with_its_shapes(tmp_path: Path) -> None:
    goal = goal_of(tmp_path)
    goal.begin()
    found = find_goal(open_folder(tmp_path), recipe_of(10), None)
    assert found is not None
    assert found.version == goal.version
    assert found.shapes == SHAPES
    assert found.rows_per_shard == 4


def test_a_version_is_found_by_recipe_rows_and_shard_size(tmp_path: Path) -> None:
    store = open_folder(tmp_path)
    assert find_goal(store, recipe_of(10), None) is None
    for count, per_shard, seed in ((10, 4, 0), (10, 5, 0), (11, 4, 0), (10, 4, 1)):
        goal_of(tmp_path, count, per_shard, seed).begin()
    for count, per_shard, seed in ((10, 4, 0), (10, 5, 0), (11, 4, 0), (10, 4, 1)):
        found = find_goal(store, recipe_of(count, seed), per_shard)
        assert found is not None
        assert found.version == goal_of(tmp_path, count, per_shard, seed).version
    assert find_goal(store, recipe_of(10), 6) is None
    assert find_goal(store, recipe_of(12), None) is None


def test_beginning_again_keeps_the_row_table(tmp_path: Path) -> None:
    goal_of(tmp_path).begin()
    [table] = tmp_path.rglob("rows.parquet")
    before = table.stat().st_ino
    goal_of(tmp_path).begin()
    assert table.stat().st_ino == before


def test_the_frozen_row_table_reads_back(tmp_path: Path) -> None:
    goal = goal_of(tmp_path)
    goal.begin()
    assert goal.frozen_rows().digest == goal.spec.rows_digest


@pytest.mark.parametrize("text", [b"", b"[]", b"{}"])
def test_a_damaged_description_does_not_stop_a_build(tmp_path: Path, text: bytes) -> None:
    """What it says is computed from the source and the recipe again."""
    goal = goal_of(tmp_path)
    goal.begin()
    (goal.folder.root / "_build/build.json").write_bytes(text)
    assert find_goal(open_folder(tmp_path), recipe_of(10), None) is None


@pytest.mark.parametrize("missing", ["fields", "rows_per_shard"])
def test_a_description_without_all_its_parts_is_none(tmp_path: Path, missing: str) -> None:
    goal = goal_of(tmp_path)
    goal.begin()
    described = goal.describe()
    del described[missing]
    (goal.folder.root / "_build/build.json").write_text(json.dumps(described))
    assert find_goal(open_folder(tmp_path), recipe_of(10), None) is None


def test_a_damaged_version_is_made_again(tmp_path: Path) -> None:
    goal = goal_of(tmp_path)
    goal.folder.put("zarr.json", [b"{"])
    assert find_goal(open_folder(tmp_path), recipe_of(10), None) is None


def test_other_folders_of_a_store_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/zarr.txt").write_text("mine")
    (tmp_path / "README").write_text("mine")
    assert find_goal(open_folder(tmp_path), recipe_of(10), None) is None
