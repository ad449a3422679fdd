"""Verify: damage of any stored byte is found, and named by shard and key."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import DamageError, StoreError
from precache.store import tree
from precache.store.commit_log import ROOT
from tests.conftest import BuiltStore
from tests.support.building import contents, flip
from tests.support.servers import FaultProxy, S3Server, web_server

Copy = Callable[[BuiltStore], BuiltStore]


def keys_of_shard(store: BuiltStore, shard: int, rows_per_shard: int) -> list[str]:
    return list(store.open().keys)[shard * rows_per_shard : (shard + 1) * rows_per_shard]


def only(found: Any) -> tuple[str, str, tuple[str, ...]]:
    [damage] = found.damage
    return damage.shard, damage.reason, damage.keys


def test_a_whole_store_is_whole_and_to_read_it_changes_nothing(
    store: BuiltStore, image_tiles: BuiltStore
) -> None:
    """Each byte is told of once."""

    def everything() -> dict[Path, tuple[int, int]]:
        paths = [store.path, *store.path.rglob("*")]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}

    before, told = (contents(store.path), everything()), list[int]()
    found = precache.verify(store.path, told.append)
    assert (found.ok, found.damage) == (True, ())
    assert (found.version, found.path) == (store.result.version, store.result.path)
    assert (found.rows, found.objects) == (23, store.result.shards)
    assert sum(told) == found.nbytes == store.result.stored_bytes
    with precache.Loader(store.path, batch_size=4) as loader:
        list(loader)
    version = precache.open(store.path)
    _ = (version.holes, list(version.keys), precache.CachedDataset(store.path)[0])
    assert (contents(store.path), everything()) == before
    assert precache.verify(image_tiles.path).ok  # of chunks of several rows


@pytest.mark.parametrize(("codec", "place"), [("image", 0.3), ("raw", 0.3), ("image", 1.0)])
def test_a_flipped_bit_in_a_row_is_found_and_its_key_named(
    codec: str, place: float, stores: dict[str, BuiltStore], copy_store: Copy
) -> None:
    """Rows are chunks of their own here: one bit spoils one key, or the index and so the shard."""
    damaged = copy_store(stores[codec])
    path = damaged.shard_path(1)
    flip(path, int((path.stat().st_size - 9) * place), 8)
    shard, reason, keys = only(precache.verify(damaged.path))
    assert shard == "image/c/1/0/0/0"
    assert reason == "its checksum does not hold"
    if place == 0.3:
        with web_server(Path(damaged.path).parent) as url:
            over_http = precache.verify(f"{url}/{Path(damaged.path).name}")
        assert only(over_http) == (shard, reason, keys)
    here, dataset = keys_of_shard(damaged, 1, 8), precache.CachedDataset(damaged.path)
    assert set(keys) <= set(here)
    assert len(keys) == (8 if place == 1.0 else 1)
    for number, key in enumerate(dataset.keys):
        if key in keys:
            with pytest.raises(DamageError, match=key):
                dataset[number]
        else:
            assert np.array_equal(dataset[number]["image"].numpy(), damaged.pixels(key))


SPOILT: dict[str, tuple[Callable[..., object], dict[int, str]]] = {
    "a byte less": (lambda a, b, c: os.truncate(c, c.stat().st_size - 1), {2: "it has {} bytes"}),
    "two": (lambda a, b, c: (a.unlink(), os.truncate(c, 9)), {0: "it is mis", 2: "it has 9 bytes"}),
    "another one": (lambda a, b, c: shutil.copy(a, b), {1: ""}),
    "a folder": (lambda a, b, c: (b.unlink(), b.mkdir()), {1: ""}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_every_damaged_shard_is_named_with_all_its_keys(
    name: str, image_store: BuiltStore, own: BuiltStore
) -> None:
    spoil, reasons = SPOILT[name]
    paths = [own.shard_path(number) for number in range(3)]
    spoil(*paths)
    found = precache.verify(own.path)
    assert (found.ok, found.objects) == (False, 3)
    assert [each.shard for each in found.damage] == [f"image/c/{n}/0/0/0" for n in reasons]
    for each, (number, begin) in zip(found.damage, reasons.items(), strict=True):
        assert list(each.keys) == keys_of_shard(own, number, 8)
        written = image_store.shard_path(number).stat().st_size
        reason = begin.format(paths[number].stat().st_size) if "bytes" in begin else begin
        reason += f" where {written} were written" if "bytes" in begin else ""
        assert each.reason.startswith(reason)


def test_shards_are_checked_though_small_objects_are_damaged(
    image_tiles: BuiltStore, copy_store: Copy
) -> None:
    """By the spare copy; without it, the table of the shards tells nothing."""
    store, table = copy_store(image_tiles), "shards/image/c/0/0"
    folder = store.version_folder
    flip(store.shard_path(1), 20)
    _, _, keys = only(precache.verify(store.path))
    assert list(keys) == keys_of_shard(store, 1, 32)[:16], "rows that share a chunk"
    for name in (table, ROOT):
        flip(folder / name, 20)
    found = precache.verify(store.path)
    assert [damage.shard for damage in found.damage] == [ROOT, table, "image/c/1/0/0/0"]
    (folder / "_spare/c/0").unlink()
    flip(folder / ROOT, 20)
    found = precache.verify(store.path)
    assert (found.ok, found.objects) == (False, 0)
    assert [part for part in found.unchecked if part.startswith("the shards of image: ")]
    flip(folder / ROOT, 20)
    with pytest.raises(StoreError, match=r"zarr.json is .*run the same precache build"):
        precache.verify(store.path)


def test_a_version_goes_there_and_back_and_each_shard_is_asked_for_once_a_piece(
    image_store: BuiltStore,
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And for no size, when it is verified."""
    monkeypatch.setattr(tree, "PIECE_BYTES", 100_000)
    uri, built = "s3://bucket/pieces", image_store
    for skipped in (0, built.result.shards):
        pushed = precache.push(built.path, uri, storage_options=s3.options())
        assert (pushed.version, pushed.skipped) == (built.result.version, skipped)
    back = precache.pull(uri, tmp_path / "back", storage_options=s3.options())
    assert contents(Path(back.path)) == contents(built.version_folder)
    assert precache.verify(tmp_path / "back").ok
    sizes = [leaf.size for leaf in built.open().shard_leaves("image")]
    assert max(sizes) > 100_000
    assert precache.verify(uri, storage_options=s3.options(proxy.port)).ok
    asked = {of: n for of, n in proxy.seen.items() if ".1/image/c/" in of[1]}
    assert {method for method, _ in asked} == {"GET"}
    assert sorted(asked.values()) == sorted(-(-size // 100_000) for size in sizes)


def test_nothing_but_the_store_is_needed(
    stores: dict[str, BuiltStore], run_python: Callable[..., Any]
) -> None:
    code = """
import sys
sys.modules["pyarrow"] = None
import precache
one, other = sys.argv[1:]
assert precache.verify(one).ok and precache.info(one).rows
assert precache.versions(one).versions and not precache.diff(one, one).samples.added.count
precache.diff(one, other)
"""
    run_python(code, stores["image"].path, stores["raw"].path)
