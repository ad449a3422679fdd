"""Shards that several versions share: a repair of one takes them of others, and leaves these."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.cli.main import main
from precache.errors import StoreError
from precache.storage.open import open_folder
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.shards.stored_rows import StoredObject
from tests.support.building import (
    build_here,
    contents,
    cut,
    encoded,
    flip,
    remains,
    write,
    write_jpegs,
)
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=48, crop=40, codec="raw")


def build(source: Path, store: Any, **options: Any) -> Any:
    return build_here(source, store, RECIPE, {"shard_samples": 8, **options})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 24, classes=("cat", "dog"))


def grown(source: Path) -> None:
    write(source / "cat/new.jpg", encoded(cut(99)))


@pytest.fixture
def versions(source: Path, tmp_path: Path) -> list[Path]:
    """Two versions that share their first shards; the second is current."""
    first = build(source, tmp_path / "store")
    grown(source)
    second = build(source, tmp_path / "store")
    assert second.shards_reused == 3
    return [Path(first.path), Path(second.path)]


SHARD = "image/c/1/0/0/0"


def test_a_repair_leaves_other_versions_as_they_are(
    versions: list[Path], source: Path, tmp_path: Path
) -> None:
    flip(versions[1] / SHARD, 0.5)
    assert not any(precache.verify(version).ok for version in versions)
    (versions[1] / SHARD).unlink()
    before = contents(versions[0])
    result = build(source, tmp_path / "store")
    assert (result.version, result.shards_skipped) == (versions[1].name, 3)
    assert precache.verify(versions[1]).ok
    assert contents(versions[0]) == before
    assert all(remains(version) == [] for version in versions)


@pytest.mark.parametrize("act", [precache.verify, precache.use])
def test_a_damaged_version_that_is_not_current_is_mended_as_advised(
    act: Callable[[str], Any], versions: list[Path], source: Path, tmp_path: Path
) -> None:
    """The source has changed since, and the damaged shard is not that of the current version."""
    store, own = tmp_path / "store", versions[1].name
    shutil.copytree(store, tmp_path / "other")
    write(source / "cat/0000.jpg", encoded(cut(55)))
    third = Path(build(source, store).path)
    changed = [s for s in sorted(third.glob("image/c/*/0/0/0")) if not
               s.samefile(versions[1] / s.relative_to(third))]  # fmt: skip
    for version in versions:
        (version / changed[0].relative_to(third)).unlink()
    try:
        said = str(act(f"{store}@{own}"))
    except StoreError as error:
        said = str(error)
    build(source, store, verify=True)
    assert not precache.verify(f"{store}@{own}").ok
    pull, undo = re.search(r"precache (pull .*?), after .*precache (use .*?) undoes", said).groups()
    assert main(pull.replace("OTHER", str(tmp_path / "other")).split()) == 0
    assert precache.verify(f"{store}@{own}").ok
    assert precache.open(store).id == own
    assert main(undo.split()) == 0
    assert precache.open(store).id == third.name
    changed[0].unlink()
    assert "same precache build command again with --verify" in str(precache.verify(store))


def test_a_shard_that_another_version_has_whole_is_not_made_again(
    versions: list[Path], source: Path, tmp_path: Path
) -> None:
    """Of its samples nothing may be left."""
    (versions[1] / SHARD).unlink()
    for path in source.rglob("*.jpg"):
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    options: dict[str, Any] = {"shard_samples": 8, "address": "serial", "ignore_ctime": True}
    planned = precache.plan(source, tmp_path / "store", RECIPE, timing=False, **options)
    assert (planned.state, planned.shards_reused, planned.rows_computed) == ("repair", 1, 0)
    result = build(source, tmp_path / "store", ignore_ctime=True)
    assert (result.shards, result.shards_skipped, result.shards_reused) == (4, 3, 1)
    assert all(precache.verify(version).ok for version in versions)
    one, other = (version / SHARD for version in versions)
    assert one.samefile(other)
    assert all(remains(version) == [] for version in versions)


@pytest.mark.parametrize("encoded_alike", [True, False])
def test_a_shard_is_repaired_of_rows_that_lie_elsewhere(
    encoded_alike: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample is decoded, unless rows of that version give other bytes."""
    recipe, store = precache.Recipe.image(resize=160, crop=150, codec="raw"), tmp_path / "store"
    build_here(source, store, recipe, {"shard_samples": 8})
    options = {"shard_samples": 4}
    second = build_here(source, store, recipe, {**options, "recompute": True})
    path = Path(second.path, SHARD)
    data = path.read_bytes()
    path.unlink()
    copied = []
    chunks = StoredObject.chunks

    def copy(self: StoredObject, first: int, count: int) -> Any:
        copied.append(count)
        for part, lengths in chunks(self, first, count):
            yield part if encoded_alike else bytes(part[:-1]) + b"?", lengths

    monkeypatch.setattr(StoredObject, "chunks", copy)
    if encoded_alike:
        monkeypatch.setattr(FieldRecipe, "__call__", None)
    again = build_here(source, store, recipe, options)
    assert (again.version, path.read_bytes(), sum(copied)) == (second.version, data, 4)


def test_in_a_bucket_damage_of_another_version_is_not_copied(s3: S3Server, source: Path) -> None:
    options = s3.options()
    first = build(source, "s3://bucket/repaired", storage_options=options)
    grown(source)
    second = build(source, "s3://bucket/repaired", storage_options=options)
    folders = [open_folder(each.path, options) for each in (first, second)]
    data = folders[0].read(SHARD)
    folders[0].put(SHARD, [data[:-1] + bytes([data[-1] ^ 1])])
    folders[1].remove(SHARD)
    build(source, "s3://bucket/repaired", storage_options=options)
    assert folders[1].read(SHARD) == data
