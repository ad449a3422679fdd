"""The versions of a store as they are listed, and making one current."""

import itertools
import re
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import StoreError, UsageError
from precache.maintenance.versions import current_periods
from precache.store.build_status import COPY, BuildStatus
from precache.store.json_documents import LogEntry
from tests.maintenance.conftest import Store, leave_a_build
from tests.support.building import remains
from tests.support.command_line import Run


def test_versions_are_listed_with_what_they_hold(three: Store) -> None:
    path, (first, *_) = three
    found = precache.versions(path)
    assert [each.version for each in found.versions] == three[1][::-1]
    assert [each.current for each in found.versions] == [True, False, False]
    new, old, oldest = found.versions
    assert (new.rows, new.holes, new.problem) == (11, 1, "")
    assert new.recipe == "image: decode → resize(size=160) → center_crop(size=(150, 150)), raw"
    assert new.replaced is None
    assert (oldest.replaced, old.replaced) == (old.committed, new.committed)
    assert oldest.committed <= old.committed <= new.committed <= time.time()
    for each in found.versions:
        files = [f for f in (path / each.version).rglob("*") if f.is_file()]
        assert each.nbytes == sum(f.stat().st_size for f in files)
    assert found.nbytes == sum(each.nbytes for each in found.versions)
    assert found.unfinished == ()
    (path / first / "zarr.json").write_text("{}")
    [*_, old] = precache.versions(path).versions
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


def test_use_is_a_commit_and_can_be_undone(three: Store) -> None:
    path, (first, _, last) = three
    with pytest.raises(UsageError, match="names no version"):
        precache.use(path)
    with pytest.raises(StoreError, match="fits no version"):
        precache.use(f"{path}@{'0' * 8}")
    used = precache.use(f"{path}@{first[:6]}")
    assert (used.version, used.number, used.previous) == (first, 4, last)
    assert str(used) == f"version {first[:12]} is now current; it replaces {last[:12]}"
    assert precache.open(path).id == first
    assert precache.use(f"{path}@{first}").number == 4
    assert precache.use(f"{path}@{last}").number == 5
    assert precache.open(path).id == last
    assert remains(path) == []

    for take in (precache.use, precache.open, precache.verify):
        with pytest.raises(
            StoreError, match=f"is one version, and no store; leave out @{first[:4]}"
        ):
            take(f"{path}/{first}@{first[:4]}")


def test_a_version_whose_entry_is_lost_is_used_by_its_folder(
    three: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the error on a damaged entry advises: without an entry, gc would sweep the version."""
    path, (first, _, last) = three
    (path / "commits/000001.json").write_bytes(b"{")
    with pytest.raises(StoreError, match=r"Remove that file, .*precache use STORE/VERSION"):
        precache.use(path / first)
    (path / "commits/000001.json").unlink()
    monkeypatch.chdir(path)
    assert precache.use(f"{first}/").version == first
    assert precache.use(path / last).previous == first
    assert [each.version for each in precache.versions(path).versions][:2] == [last, first]
    shutil.copy(path / first / "zarr.json", path / last / "zarr.json")
    with pytest.raises(StoreError, match="it is that of version"):
        precache.use(path / last)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("image/c/2/0/0/0", "is damaged: image/c/2/0/0/0: it is missing, or"),
        ("key/c/0", "is damaged: key"),
        ("shards/image/c/0/0", "is damaged: shards/image"),
        ("image/c/0/0/0/0", "image/c/0/0/0/0: it is another shard than was written"),
    ],
)
def test_one_that_is_not_whole_is_not_used(three: Store, name: str, says: str) -> None:
    path, (first, _, last) = three
    (path / first / name).unlink()
    if "another" in says:
        shutil.copy(path / first / "image/c/1/0/0/0", path / first / name)
    with pytest.raises(StoreError, match=says):
        precache.use(f"{path}@{first}")
    assert precache.open(path).id == last


def test_what_is_listed_as_text(three: Store) -> None:
    path, (first, second, last) = three
    left = path / ("0" * 32 + ".1")
    shutil.copytree(path / first / "image", left / "image")
    (left / "_build").mkdir()
    shutil.copy(path / first / "zarr.json", left / COPY)
    head, columns, new, *old, unfinished = str(precache.versions(path)).splitlines()
    assert head.startswith(f"{path}: ")
    assert columns.split()[:2] == ["version", "committed"]
    assert new.startswith(f"*  {last[:12]}")
    assert [line[:15] for line in old] == [f"   {second[:12]}", f"   {first[:12]}"]
    assert unfinished.startswith(f"unfinished copy or removal of {'0' * 12}: ")


def test_a_build_that_was_left_is_listed_with_its_shards(
    source: Path, tmp_path: Path, run: Run
) -> None:
    store = tmp_path / "store"
    leave_a_build(source, store)
    found = precache.versions(store)
    assert not found.versions
    [unfinished] = found.unfinished
    assert unfinished.build == BuildStatus(rows=11, shards=3, done=2)
    assert 0 <= unfinished.idle_seconds < 60
    assert "2 of 3 shards, " in run("ls", store).out
    assert run("ls", store, "--json").json["unfinished"][0]["build"]["done"] == 2

    [receipts] = store.glob("*/_build/receipts")
    shutil.rmtree(receipts)
    [unfinished] = precache.versions(store).unfinished
    assert unfinished.build == BuildStatus(rows=11, shards=3, done=0)
    for nothing in (tmp_path / "nowhere", source):
        ran = run("ls", nothing)
        assert ran.status == 2
        assert re.search("there is no store at .*, and no build has started", ran.err)
