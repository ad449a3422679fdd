"""The version that a build is to make: its shards, and how it is found again."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from precache.recipe.recipe import Recipe
from precache.storage.open import open_folder
from precache.store.layout import RowShape
from precache.store.live_version import open_begun
from precache.store.receipts import Receipt, ShardObject
from precache.store.row_table import RowTable
from precache_workers.planning.target_version import TargetVersion, VersionSpec, find_target

SHAPES = {"image": RowShape((3, 8, 8), "uint8"), "vector": RowShape((5,), "float32")}


def recipe_of(count: int, seed: int = 0) -> VersionSpec:
    table = RowTable.of_keys([f"{number}.jpg" for number in range(count)])
    fields = {name: {"ops": [{"op": "decode"}], "codec": "raw"} for name in SHAPES}
    recipe = Recipe.from_dict({"fields": fields, "seed": seed})
    return VersionSpec(recipe, recipe.fingerprint({}), table, table.digest)


def target_of(store: Path, count: int = 10, per_shard: int = 4, seed: int = 0) -> TargetVersion:
    return TargetVersion.of(open_folder(store), recipe_of(count, seed), per_shard, SHAPES)


def receipt(shard: int, **sizes: int) -> Receipt:
    objects = {name: ShardObject(size, 0, size, "") for name, size in sizes.items()}
    return Receipt(
        shard=shard, objects=objects, holes={}, content=[], sums={}, seconds={}, cpu_seconds=0.0
    )


@given(st.integers(1, 500), st.integers(1, 600))
def test_shards_part_the_rows(count: int, per_shard: int) -> None:
    target = target_of(Path("/nowhere"), count, per_shard)
    rows = [row for shard in range(target.shards) for row in target.rows_of(shard)]
    assert rows == list(range(count))
    assert all(len(target.rows_of(shard)) == per_shard for shard in range(target.shards - 1))
    assert 0 < len(target.rows_of(target.shards - 1)) <= per_shard


def test_objects_are_named_as_zarr_names_them() -> None:
    target = target_of(Path("/nowhere"))
    assert target.object_name("image", 2) == "image/c/2/0/0/0"
    assert target.object_name("vector", 1) == "vector/c/1/0"


def test_shards_to_do_are_those_not_whole(tmp_path: Path) -> None:
    states = ["done", "no receipt", "no object", "short", "half", "done"]
    target, receipts = target_of(tmp_path, 4 * len(states)), {99: receipt(99)}
    for shard, state in enumerate(states):
        if state != "no receipt":
            receipts[shard] = receipt(shard, image=10, vector=4)
        if state != "no object":
            nbytes = 9 if state == "short" else 10
            target.folder.put(target.object_name("image", shard), [bytes(nbytes)])
        if state != "half":
            target.folder.put(target.object_name("vector", shard), [bytes(4)])
    assert target.shards_to_do(receipts) == [1, 2, 3, 4]
    assert target_of(tmp_path / "none").shards_to_do({}) == [0, 1, 2]


def test_a_version_is_found_by_recipe_rows_and_shard_size(tmp_path: Path) -> None:
    store = open_folder(tmp_path)
    begun = ((10, 4, 0), (10, 5, 0), (11, 4, 0), (10, 4, 1))
    assert find_target(store, recipe_of(10), None) is None
    for count, per_shard, seed in begun:
        target_of(tmp_path, count, per_shard, seed).begin()
        found = find_target(store, recipe_of(count, seed), None if seed else per_shard)
        assert found is not None
    for count, per_shard, seed in begun:
        found = find_target(store, recipe_of(count, seed), per_shard)
        assert found is not None
        assert found.version == target_of(tmp_path, count, per_shard, seed).version
        assert (found.shapes, found.rows_per_shard) == (SHAPES, per_shard)
    assert find_target(store, recipe_of(10), 6) is None
    assert find_target(store, recipe_of(12), None) is None


def test_beginning_again_keeps_the_row_table(tmp_path: Path) -> None:
    target_of(tmp_path).begin()
    [table] = tmp_path.rglob("rows.zip")
    before = table.stat().st_ino
    target = target_of(tmp_path)
    target.begin()
    assert table.stat().st_ino == before
    begun = open_begun(target.folder)
    assert begun is not None
    assert begun.table.digest == target.spec.rows_digest


def test_damage_and_what_others_put_there_stop_no_build(tmp_path: Path) -> None:
    """What a description says is computed from the source and the recipe again."""
    target = target_of(tmp_path)
    target.begin()
    described = target.describe()
    parts = [{n: part for n, part in described.items() if n != lost} for lost in described]
    for data in (b"", b"[]", b"{}", *(json.dumps(each).encode() for each in parts)):
        (target.folder.root / "_build/build.json").write_bytes(data)
        assert find_target(open_folder(tmp_path), recipe_of(10), None) is None, data
    target.folder.put("zarr.json", [b"{"])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/zarr.txt").write_text("mine")
    (tmp_path / "README").write_text("mine")
    assert find_target(open_folder(tmp_path), recipe_of(10), None) is None
