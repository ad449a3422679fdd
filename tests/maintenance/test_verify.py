"""Verify: damage of any stored byte is found, and named by shard and key."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precache
from precache.errors import DamageError, StoreError
from precache.store.commit_log import ROOT
from precache.store.json_documents import FORMAT
from tests.conftest import BuiltStore
from tests.support.building import build_here, contents, environment, remains, write_jpegs
from tests.support.servers import web_server

Copy = Callable[[BuiltStore], BuiltStore]


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def keys_of_shard(store: BuiltStore, shard: int, rows_per_shard: int) -> list[str]:
    return list(store.open().keys)[shard * rows_per_shard : (shard + 1) * rows_per_shard]


def only(found: Any) -> tuple[str, str, tuple[str, ...]]:
    [damage] = found.damage
    return damage.shard, damage.reason, damage.keys


def test_the_module_does_not_stand_in_the_way_of_the_function() -> None:
    """Whatever was imported first: ``precache.verify`` is what users call."""
    code = "import precache.building.verify; import precache; precache.verify('/nowhere')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert "StoreError: there is no store at /nowhere" in ran.stderr


# --- whole stores -------------------------------------------------------------------------------


def test_a_whole_store_is_whole(store: BuiltStore) -> None:
    found = precache.verify(store.path)
    assert found.ok
    assert found.damage == ()
    assert found.version == store.result.version
    assert found.path == store.result.path
    assert found.rows == 23
    assert found.objects == store.result.shards == 3
    assert found.nbytes == store.result.stored_bytes


def test_chunks_of_several_rows_are_checked_too(tile_store: BuiltStore) -> None:
    assert precache.verify(tile_store.path).ok


def test_progress_tells_every_byte_once(store: BuiltStore) -> None:
    heard: list[int] = []
    found = precache.verify(store.path, heard.append)
    assert sum(heard) == found.nbytes


def test_a_version_can_be_named(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 4)
    first = build_here(tmp_path / "in", tmp_path / "store", precache.Recipe.image(resize=20))
    build_here(tmp_path / "in", tmp_path / "store", precache.Recipe.image(resize=24))
    found = precache.verify(f"{tmp_path / 'store'}@{first.version[:6]}")
    assert found.version == first.version


def test_verifying_writes_nothing(store: BuiltStore) -> None:
    before = contents(store.path)
    precache.verify(store.path)
    assert contents(store.path) == before


# --- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
def test_a_flipped_bit_in_a_row_is_found_and_its_key_named(
    store: BuiltStore, copy_store: Copy, place: float
) -> None:
    """Rows are chunks of their own here: one bit spoils one key, or the index and so the shard."""
    damaged = copy_store(store)
    path = damaged.shard_path(1)
    flip(path, int((path.stat().st_size - 9) * place), bit=3)
    shard, reason, keys = only(precache.verify(damaged.path))
    assert shard == "image/c/1/0/0/0"
    assert reason == "its checksum does not hold"
    with web_server(Path(damaged.path).parent) as url:
        over_http = precache.verify(f"{url}/{Path(damaged.path).name}")
    assert only(over_http) == (shard, reason, keys)
    here = keys_of_shard(damaged, 1, 8)
    assert set(keys) <= set(here)
    assert len(keys) == (8 if place == 1.0 else 1)
    for key in here:
        row = list(damaged.open().keys).index(key)
        if key not in keys:
            assert np.array_equal(read(damaged, row), damaged.pixels(key))
        else:
            with pytest.raises(DamageError, match=key):
                read(damaged, row)


def test_a_wrong_mean_is_told_from_wrong_sums_wherever_the_version_is(
    store: BuiltStore, copy_store: Copy
) -> None:
    damaged = copy_store(store)
    root = Path(damaged.open().path) / ROOT
    document = json.loads(root.read_text("utf-8"))
    attributes = document["attributes"]["precache"]
    attributes["mean"]["image"][0] += 1
    root.write_text(json.dumps(document), "utf-8")
    here = precache.verify(damaged.path)
    assert ROOT in [damage.shard for damage in here.damage]
    with web_server(Path(damaged.path).parent) as url:
        over_http = precache.verify(f"{url}/{Path(damaged.path).name}")
    assert over_http.damage == here.damage


def read(store: BuiltStore, row: int) -> np.ndarray:
    dataset = precache.CachedDataset(store.path)
    version = store.open()
    position = int(version.valid[:row].sum())
    return dataset[position]["image"].numpy()


def test_rows_that_share_a_chunk_are_named_together(
    tile_store: BuiltStore, copy_store: Copy
) -> None:
    damaged = copy_store(tile_store)
    flip(damaged.shard_path(0), 40)
    shard, _, keys = only(precache.verify(damaged.path))
    assert shard == "image/c/0/0/0/0"
    assert list(keys) == keys_of_shard(damaged, 0, 32)[:16]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), shard=st.integers(0, 2))
def test_no_flipped_bit_goes_unseen(
    stores: dict[str, BuiltStore],
    tmp_path_factory: pytest.TempPathFactory,
    share: float,
    bit: int,
    shard: int,
) -> None:
    store = stores["image"]
    path = store.shard_path(shard)
    at = int(path.stat().st_size * share)
    flip(path, at, bit)
    try:
        assert only(precache.verify(store.path))[0] == f"image/c/{shard}/0/0/0"
    finally:
        flip(path, at, bit)
    assert precache.verify(store.path).ok


@pytest.mark.parametrize("cut", [1, 100, None])
def test_a_truncated_shard_is_named_with_all_its_keys(
    store: BuiltStore, copy_store: Copy, cut: int | None
) -> None:
    damaged = copy_store(store)
    path = damaged.shard_path(2)
    size = path.stat().st_size
    left = 0 if cut is None else size - cut
    path.write_bytes(path.read_bytes()[:left])
    shard, reason, keys = only(precache.verify(damaged.path))
    assert shard == "image/c/2/0/0/0"
    assert reason == f"it has {left} bytes where {size} were written"
    assert list(keys) == keys_of_shard(damaged, 2, 8)


def test_bytes_at_the_end_are_damage(store: BuiltStore, copy_store: Copy) -> None:
    damaged = copy_store(store)
    with damaged.shard_path(0).open("ab") as file:
        file.write(b"\0")
    assert "bytes where" in only(precache.verify(damaged.path))[1]


def test_a_missing_shard_is_named_with_all_its_keys(store: BuiltStore, copy_store: Copy) -> None:
    damaged = copy_store(store)
    damaged.shard_path(0).unlink()
    shard, reason, keys = only(precache.verify(damaged.path))
    assert (shard, reason) == ("image/c/0/0/0/0", "it is missing")
    assert list(keys) == keys_of_shard(damaged, 0, 8)


def test_every_damaged_shard_is_named(store: BuiltStore, copy_store: Copy) -> None:
    damaged = copy_store(store)
    damaged.shard_path(0).unlink()
    flip(damaged.shard_path(2), 5)
    found = precache.verify(damaged.path)
    assert [each.shard for each in found.damage] == ["image/c/0/0/0/0", "image/c/2/0/0/0"]
    assert not found.ok
    assert found.objects == 3


def test_two_shards_that_changed_places_are_damage(store: BuiltStore, copy_store: Copy) -> None:
    """Each is whole by its own index; which rows it holds is what the version says."""
    damaged = copy_store(store)
    first, second = damaged.shard_path(0), damaged.shard_path(1)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert len(precache.verify(damaged.path).damage) == 2


def test_two_rows_that_changed_places_are_damage(
    stores: dict[str, BuiltStore], copy_store: Copy
) -> None:
    """With their checksums, so that each chunk holds by itself."""
    damaged = copy_store(stores["raw"])
    path, pitch = damaged.shard_path(0), 112 * 112 * 3 + 4
    data = path.read_bytes()
    path.write_bytes(data[pitch : 2 * pitch] + data[:pitch] + data[2 * pitch :])
    assert only(precache.verify(damaged.path))[0] == "image/c/0/0/0/0"


def test_a_folder_in_place_of_a_shard_is_damage(store: BuiltStore, copy_store: Copy) -> None:
    damaged = copy_store(store)
    damaged.shard_path(1).unlink()
    damaged.shard_path(1).mkdir()
    assert only(precache.verify(damaged.path))[0] == "image/c/1/0/0/0"


def test_damage_of_one_field_of_several(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "in", 6)
    fields = {
        "image": {"ops": [{"op": "decode"}, {"op": "resize", "size": [40, 40]}]},
        "small": {"ops": [{"op": "decode"}, {"op": "resize", "size": [20, 20]}], "codec": "raw"},
    }
    recipe = precache.Recipe.from_dict({"fields": fields})
    result = build_here(tmp_path / "in", tmp_path / "store", recipe)
    flip(Path(result.path) / "small/c/0/0/0/0", 10)
    assert only(precache.verify(tmp_path / "store"))[0] == "small/c/0/0/0/0"


# --- the rest of a version ----------------------------------------------------------------------

SMALL = ["label/c/0", "valid/c/0", "key/c/0", "shards/image/c/0/0"]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("how", ["flip", "cut", "unlink"])
def test_damaged_small_arrays_are_found(
    stores: dict[str, BuiltStore], copy_store: Copy, name: str, how: str
) -> None:
    damaged = copy_store(stores["image"])
    path = damaged.version_folder / name
    if how == "flip":
        flip(path, path.stat().st_size // 2)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        path.unlink()
    found = precache.verify(damaged.path)
    assert not found.ok
    assert any(name.startswith(each.shard) for each in found.damage)


def test_damage_of_keys_and_of_a_shard_are_both_found(
    stores: dict[str, BuiltStore], copy_store: Copy
) -> None:
    damaged = copy_store(stores["image"])
    (damaged.version_folder / "key/c/0").unlink()
    damaged.shard_path(1).unlink()
    found = {each.shard for each in precache.verify(damaged.path).damage}
    assert found == {"key/c/0", "image/c/1/0/0/0"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"3": 4}', '{"x": ["a", "b"]}'])
def test_a_damaged_list_of_holes_is_found(
    stores: dict[str, BuiltStore], copy_store: Copy, text: str
) -> None:
    damaged = copy_store(stores["image"])
    [path] = damaged.version_folder.glob("holes/c/0")
    path.write_text(text)
    found = precache.verify(damaged.path)
    assert [each.shard for each in found.damage] == ["holes/c/0"]


def test_what_was_damaged_is_whole_again_after_a_build(
    stores: dict[str, BuiltStore], copy_store: Copy
) -> None:
    """A file that was deleted comes back by the same command."""
    damaged = copy_store(stores["image"])
    before = contents(damaged.path)
    for name in (*SMALL, "image/c/1/0/0/0"):
        (damaged.version_folder / name).unlink()
        assert not precache.verify(damaged.path).ok
        build_here(damaged.source, damaged.path, damaged.recipe, {"shard_samples": 8})
        assert precache.verify(damaged.path).ok, name
    assert contents(damaged.path) == before
    assert remains(damaged.path) == []


# --- what cannot be verified --------------------------------------------------------------------


def test_no_store_and_no_version(store: BuiltStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        precache.verify(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="fits no version"):
        precache.verify(f"{store.path}@fffff")


def test_a_store_of_a_newer_format(stores: dict[str, BuiltStore], copy_store: Copy) -> None:
    newer = copy_store(stores["raw"])
    path = newer.version_folder / "zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["precache"]["format"] = FORMAT + 1
    path.write_text(json.dumps(document))
    with pytest.raises(
        StoreError, match=rf"store format {FORMAT + 1}.*up to {FORMAT}; update precache"
    ):
        precache.verify(newer.path)


def test_a_group_that_other_software_wrote(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "group", mode="w")
    group.create_array("image", shape=(4, 3), dtype="uint8")[:] = 1
    with pytest.raises(StoreError, match="precache did not write"):
        precache.verify(tmp_path / "group")


def test_shards_whose_checksums_are_damaged_are_said_to_be_unchecked(
    tile_store: BuiltStore, copy_store: Copy
) -> None:
    store, table = copy_store(tile_store), "shards/image/c/0/0"
    flip(Path(store.result.path, table), 20)
    found = precache.verify(store.path)
    assert [damage.shard for damage in found.damage] == [table]
    assert found.objects == 0
    assert [part for part in found.unchecked if part.startswith(f"the shards of image: {table}")]


def test_a_version_without_a_readable_document_names_the_way_out(
    store: BuiltStore, copy_store: Copy
) -> None:
    copy = copy_store(store)
    (copy.version_folder / ROOT).write_text("no JSON")
    with pytest.raises(precache.StoreError, match="nor its shards checked: run the same precache"):
        precache.verify(copy.path)
    precache.build(copy.source, copy.path, copy.recipe, address="serial", shard_samples=8)
    assert precache.verify(copy.path).ok
