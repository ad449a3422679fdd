"""Repair of shards by another release of their encoder: other bytes, of the same rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numcodecs import zstd

import precache
from precache.errors import BuildError, FetchError
from precache_workers.driver import repair
from precache_workers.ops import identity
from precache_workers.shards import field_writer, shard_task
from precache_workers.sources.folder import FolderSource
from tests.support.building import build_here, pixels, remains, shard_files, write_jpegs

SIZE = [{"op": "decode"}, {"op": "resize", "size": [150, 150]}]


def recipe_of(*ops: dict[str, Any]) -> precache.Recipe:
    image = {"ops": [*SIZE, *ops], "codec": "zstd"}
    return precache.Recipe.from_dict({"fields": {"image": image}})


def changed(array: np.ndarray) -> np.ndarray:
    """The array as it is, or as CHANGE has it: code that changes under its declared version."""
    match os.environ.get("CHANGE"):
        case "values":
            return array ^ 1
        case "order":
            return array[:, ::-1].copy()
    return array


def build(source: Path, store: Path, recipe: precache.Recipe) -> Any:
    return build_here(source, store, recipe, {"shard_samples": 4})


def build_by_another(source: Path, store: Path, recipe: precache.Recipe) -> None:
    """Build where numcodecs is of another release, whose zstd makes other bytes."""

    def encoder(*_: Any) -> Callable[[np.ndarray], bytes]:
        return lambda chunk: bytes(zstd.compress(np.ascontiguousarray(chunk), 19, True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(identity.installed_versions(), "numcodecs", "0.0.1")
        patch.setattr(field_writer, "encoder", encoder)
        build(source, store, recipe)


def insert_before_index(path: Path) -> None:
    """Make an object of four chunks longer, so that it counts as lost; its chunks stay readable."""
    data, index = path.read_bytes(), 4 * 16 + 4
    path.write_bytes(data[:-index] + b"x" + data[-index:])


@pytest.mark.parametrize("deleted", [True, False])
def test_lost_shards_are_repaired_with_other_bytes_in_all_versions(
    tmp_path: Path, deleted: bool
) -> None:
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build_by_another(source, store, recipe_of())
    before, first = pixels(store), precache.open(store).id
    write_jpegs(tmp_path / "in", 11)
    build_by_another(source, store, recipe_of())
    newest = precache.open(store).id
    paths = sorted(store.glob("*/image/c/0/*/*/*"))
    assert newest != first
    assert len(paths) == 2
    for path in paths:
        path.unlink() if deleted else insert_before_index(path)
    build(source, store, recipe_of())
    assert {key: rows.tolist() for key, rows in before.items()}.items() <= {
        key: rows.tolist() for key, rows in pixels(store).items()
    }.items()
    for version in (first, newest):
        path = f"{store}@{version}"
        assert precache.verify(path).ok, path
        attributes = precache.open(path).attributes
        assert attributes is not None
        assert attributes.libraries["numcodecs"].startswith("0.0.1, ")
    assert remains(store) == []
    assert build(source, store, recipe_of()).cpu_seconds == 0


def test_a_repair_cut_off_between_document_and_table_is_finished(tmp_path: Path) -> None:
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build_by_another(source, store, recipe_of())
    [table] = store.glob("*/shards/image/c/0/0")
    old = table.read_bytes()
    shard_files(store).popitem()[1].unlink()
    build(source, store, recipe_of())
    assert precache.verify(store).ok
    new = table.read_bytes()
    assert new != old
    table.write_bytes(old)
    assert not precache.verify(store).ok
    build(source, store, recipe_of())
    assert table.read_bytes() == new
    assert precache.verify(store).ok


@pytest.mark.parametrize(
    ("change", "deleted"), [("values", True), ("order", False), ("order", True)]
)
def test_other_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, deleted: bool
) -> None:
    """Sums by channel show it, or rows that can still be read; without these a user's function is
    not trusted."""
    function = {"op": "function", "function": f"{__name__}:changed", "version": "1"}
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build_by_another(source, store, recipe_of(function))
    path = shard_files(store).popitem()[1]
    path.unlink() if deleted else insert_before_index(path)
    monkeypatch.setenv("CHANGE", change)
    with pytest.raises(BuildError, match="came out different from what it was"):
        build(source, store, recipe_of(function))


def test_the_same_function_is_trusted_where_a_row_can_still_be_read(tmp_path: Path) -> None:
    function = {"op": "function", "function": f"{__name__}:changed", "version": "1"}
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build_by_another(source, store, recipe_of(function))
    insert_before_index(shard_files(store).popitem()[1])
    build(source, store, recipe_of(function))
    assert precache.verify(store).ok


@pytest.mark.parametrize("recorded", [True, False])
def test_a_store_that_grew_since_the_upgrade_is_repaired(tmp_path: Path, recorded: bool) -> None:
    """Its new version has shards by both releases; older stores recorded no release at all."""
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build_by_another(source, store, recipe_of())
    write_jpegs(tmp_path / "in", 11)
    build(source, store, recipe_of())
    if not recorded:
        for path in store.glob("*/zarr.json"):
            document = json.loads(path.read_bytes())
            document["attributes"]["precache"]["libraries"].pop("numcodecs")
            path.write_text(json.dumps(document))
    for shard in (0, 1):
        for path in store.glob(f"*/image/c/{shard}/*/*/*"):
            path.unlink()
        build(source, store, recipe_of())
    versions = [path.name for path in store.iterdir() if len(path.name) == 32]
    assert len(versions) == 2
    for version in versions:
        assert precache.verify(f"{store}@{version}").ok


@pytest.mark.parametrize("number", [0, 1])
def test_a_repair_cut_off_between_two_versions_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build_by_another(source, store, recipe_of())
    write_jpegs(tmp_path / "in", 11)
    build_by_another(source, store, recipe_of())
    for path in store.glob("*/image/c/0/*/*/*"):
        path.unlink()
    real, calls = repair._restate, iter(range(2))

    def cut_off(*given: Any) -> None:
        if next(calls) == number:
            raise KeyboardInterrupt
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(repair, "_restate", cut_off)
        with pytest.raises(KeyboardInterrupt):
            build(source, store, recipe_of())
    build(source, store, recipe_of())
    for path in store.iterdir():
        if len(path.name) == 32:
            assert precache.verify(f"{store}@{path.name}").ok


def test_shards_made_before_one_that_fails_are_recorded(tmp_path: Path) -> None:
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build_by_another(source, store, recipe_of())
    version = precache.open(store)
    for shard in (0, 1):
        next(store.glob(f"*/image/c/{shard}/*/*/*")).unlink()
    key, fetch = version.keys[5], FolderSource.fetch

    def failing(self: FolderSource, keys: Any, sizes: Any, locations: Any = ()) -> Any:
        samples = zip(keys, fetch(self, keys, sizes), strict=True)
        return [FetchError("no answer") if name == key else sample for name, sample in samples]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSource, "fetch", failing)
        with pytest.raises(BuildError, match="are not done"):
            build(source, store, recipe_of())
    damage = precache.verify(store).damage
    assert {each.shard for each in damage} == {"image/c/1/0/0/0"}


def test_two_repairs_at_once_by_different_releases_leave_a_whole_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = write_jpegs(tmp_path / "in", 10), tmp_path / "store"
    build(source, store, recipe_of())
    min(store.glob("*/image/c/0/*/*/*")).unlink()
    put, once = shard_task.replace_lost, []

    def put_late(*given: Any) -> None:
        if not once:
            once.append(given)
            build_by_another(source, store, recipe_of())
            assert precache.verify(store).ok
        put(*given)

    monkeypatch.setattr(shard_task, "replace_lost", put_late)
    build(source, store, recipe_of())
    assert precache.verify(store).ok
