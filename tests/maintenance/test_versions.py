"""The versions of a store as they are listed, and making one current."""

import itertools
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import BuildError, StoreError, UsageError
from precache.maintenance.versions import current_periods
from precache.store.build_status import COPY, BuildStatus
from precache.store.json_documents import LogEntry
from tests.support.building import remains, write_jpegs
from tests.support.command_line import Run

RECIPES = [precache.Recipe.image(resize=side, crop=150, codec="raw") for side in (152, 156)]


def build(source: Path, store: Path | str, options: dict[str, Any] | None = None) -> list[str]:
    given = {"address": "serial", "shard_samples": 4, "storage_options": options}
    return [precache.build(source, store, recipe, **given).version for recipe in RECIPES]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_jpegs(tmp_path_factory.mktemp("photos"), 9)
    (folder / "cat/broken.jpg").write_bytes(b"none")
    return folder


@pytest.fixture(scope="module")
def built(source: Path) -> tuple[Path, list[str]]:
    store = source.with_name("store")
    return store, build(source, store)


@pytest.fixture
def store(built: tuple[Path, list[str]], tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy of its own for a test."""
    return shutil.copytree(built[0], tmp_path / "store"), built[1]


def test_versions_are_listed_with_what_they_hold(store: tuple[Path, list[str]]) -> None:
    path, (first, second) = store
    found = precache.versions(path)
    assert [each.version for each in found.versions] == [second, first]
    assert [each.current for each in found.versions] == [True, False]
    new, old = found.versions
    assert (new.rows, new.holes, new.problem) == (10, 1, "")
    assert new.recipe == "image: decode → resize(size=156) → center_crop(size=(150, 150)), raw"
    assert new.replaced is None
    assert old.replaced == new.committed
    assert old.committed <= new.committed <= time.time()
    for each in found.versions:
        files = [f for f in (path / each.version).rglob("*") if f.is_file()]
        assert each.nbytes == sum(f.stat().st_size for f in files)
    assert found.nbytes == new.nbytes + old.nbytes
    assert found.unfinished == ()
    (path / first / "zarr.json").write_text("{}")
    [_, old] = precache.versions(path).versions
    assert (old.version, old.rows) == (first, None)
    assert "precache did not write" in old.problem


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_a_version_is_current_until_the_next_commit(log: list[int]) -> None:
    names = [f"{each:032x}.1" for each, _ in itertools.groupby(log)]
    commits = [LogEntry(version=name, time=float(n)) for n, name in enumerate(names, 1)]
    found = current_periods(commits)
    assert set(found) == set(names)
    assert list(found)[-1] == names[-1]
    for name, (since, until) in found.items():
        last = len(names) - names[::-1].index(name)
        assert since == last
        assert until == (last + 1 if last < len(names) else None)
    assert [since for since, _ in found.values()] == sorted(s for s, _ in found.values())


def test_use_is_a_commit_and_can_be_undone(store: tuple[Path, list[str]]) -> None:
    path, (first, second) = store
    with pytest.raises(UsageError, match="names no version"):
        precache.use(path)
    with pytest.raises(StoreError, match="fits no version"):
        precache.use(f"{path}@{'0' * 8}")
    used = precache.use(f"{path}@{first[:6]}")
    assert (used.version, used.number, used.previous) == (first, 3, second)
    assert precache.open(path).id == first
    assert precache.use(f"{path}@{first}").number == 3
    assert precache.use(f"{path}@{second}").number == 4
    assert precache.open(path).id == second
    assert remains(path) == []


def test_a_version_has_no_versions(store: tuple[Path, list[str]]) -> None:
    path, (first, *_) = store
    for take in (precache.use, precache.open, precache.verify):
        with pytest.raises(
            StoreError, match=f"is one version, and no store; leave out @{first[:4]}"
        ):
            take(f"{path}/{first}@{first[:4]}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("image/c/2/0/0/0", "is damaged: image/c/2/0/0/0: it is missing, or"),
        ("key/c/0", "is damaged: key"),
        ("shards/image/c/0/0", "is damaged: shards/image"),
        ("image/c/0/0/0/0", "image/c/0/0/0/0: it is another shard than was written"),
    ],
)
def test_one_that_is_not_whole_is_not_used(
    store: tuple[Path, list[str]], name: str, says: str
) -> None:
    path, (first, second) = store
    (path / first / name).unlink()
    if "another" in says:
        shutil.copy(path / first / "image/c/1/0/0/0", path / first / name)
    with pytest.raises(StoreError, match=says):
        precache.use(f"{path}@{first}")
    assert precache.open(path).id == second


def test_what_is_listed_and_used_as_text(store: tuple[Path, list[str]]) -> None:
    path, (first, second) = store
    left = path / ("0" * 32 + ".1")
    shutil.copytree(path / first / "image", left / "image")
    (left / "_build").mkdir()
    shutil.copy(path / first / "zarr.json", left / COPY)
    head, columns, new, old, unfinished = str(precache.versions(path)).splitlines()
    assert head.startswith(f"{path}: ")
    assert columns.split()[:2] == ["version", "committed"]
    assert new.startswith(f"*  {second[:12]}")
    assert old.startswith(f"   {first[:12]}")
    assert unfinished.startswith(f"unfinished copy or removal of {'0' * 12}: ")
    said = f"version {first[:12]} is now current; it replaces {second[:12]}"
    assert str(precache.use(f"{path}@{first}")) == said


def test_a_build_that_was_left_is_listed_with_its_shards(tmp_path: Path, run: Run) -> None:
    """It ended when its first shard of five was done."""
    source, store = write_jpegs(tmp_path / "in", 9), tmp_path / "store"
    (source / "cat/0000a.jpg").write_bytes(b"no photo")
    given = {"shard_samples": 2, "keep_order": True, "on_error": "raise"}
    with pytest.raises(BuildError):
        precache.build(source, store, RECIPES[0], address="serial", **given)
    found = precache.versions(store)
    assert not found.versions
    [unfinished] = found.unfinished
    assert unfinished.build == BuildStatus(rows=10, shards=5, done=1)
    assert 0 <= unfinished.idle_seconds < 60
    assert "1 of 5 shards, " in run("ls", store).out
    assert run("ls", store, "--json").json["unfinished"][0]["build"]["done"] == 1

    [receipt] = store.glob("*/_build/receipts/*")
    receipt.unlink()
    receipt.parent.rmdir()
    [unfinished] = precache.versions(store).unfinished
    assert unfinished.build == BuildStatus(rows=10, shards=5, done=0)
    for nothing in (tmp_path / "nowhere", source):
        ran = run("ls", nothing)
        assert ran.status == 2
        assert re.search("there is no store at .*, and no build has started", ran.err)
