"""gc: what goes and what stays, killed anywhere, beside readers, builds and committers."""

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache.errors import BuildError, StoreError, UsageError
from precache.maintenance import gc as garbage
from precache.maintenance.gc import GcResult, plan_gc
from precache.maintenance.scan import ListedObject, StoredFolder
from precache.runtime.process_id import process_of
from precache.storage.open import open_folder
from precache.store.build_status import COPY, DESCRIPTION
from precache.store.commit_log import BUILD, ROOT, Log, read_log, record_removal
from precache.store.json_documents import LogEntry
from precache.store.lease import QUIET_SECONDS, Leases
from tests.maintenance.conftest import SIDES, Store, build_all, leave_a_build, recipe_of
from tests.support.building import (
    age,
    assert_same,
    build_here,
    build_until,
    collect_until,
    contents,
    cut,
    encoded,
    end,
    pixels,
    start,
    write,
)
from tests.support.servers import S3Server

NOW = 1_800_000_000.0
DAY = 86400.0
ALWAYS = ("commits", "_listings")
"""What every store has beside its versions."""


def removed(done: GcResult) -> list[str]:
    return [each.version for each in done.removed]


def why(done: GcResult) -> dict[str, str]:
    return {each.version: each.why for each in (*done.removed, *done.kept)}


def place(name: str, build_idle: float | None = None) -> StoredFolder:
    objects = [ListedObject(ROOT, 1, NOW - 900 * DAY)]
    if build_idle is not None:
        objects.append(ListedObject(DESCRIPTION, 1, NOW - build_idle))
    return StoredFolder(name, tuple(objects), None)


@given(
    st.lists(st.integers(0, 7), max_size=12),
    st.sets(st.integers(0, 9)),
    st.integers(0, 4),
    st.floats(0, 40 * DAY),
    st.sets(st.integers(0, 9)),
    st.lists(st.one_of(st.none(), st.floats(0, 40 * DAY)), min_size=10, max_size=10),
)
def test_the_current_the_newest_the_young_and_the_living_stay(
    log: list[int],
    there: set[int],
    keep: int,
    least: float,
    gone: set[int],
    idle: list[float | None],
) -> None:
    names = [f"{number:032x}.1" for number in range(10)]
    commits = [
        LogEntry(number=number, version=names[version], time=NOW - (len(log) - number) * 3 * DAY)
        for number, version in enumerate(log)
    ]
    places = [place(names[v], build_idle=idle[v]) for v in sorted(there)]
    begun = {names[version] for version in gone - set(log[-1:])}
    removal = [LogEntry(time=NOW, removed=tuple(begun))] if begun else []
    whole = Log((*commits, *removal), len(commits))
    plan = plan_gc(whole, commits, places, keep, least, NOW)
    going = plan.removed
    assert sorted([*going, *(each.version for each in plan.kept)]) == [p.version for p in places]
    assert begun & {p.version for p in places} <= going.keys()
    last = {commit.version: commit for commit in commits}
    committed = {p.version for p in places} & last.keys() - begun
    by_age = sorted(committed, key=lambda v: last[v].number)
    for name in going.keys() - begun:
        assert not commits or name != commits[-1].version
        assert name not in by_age[len(by_age) - keep :]
        told = idle[int(name[:-2], 16)]
        assert told is None or told >= QUIET_SECONDS
        if name in by_age:
            after = commits[last[name].number + 1].time
            assert NOW - after >= least
        else:
            assert told is None or told >= least


def test_bad_usage_and_no_store(tmp_path: Path) -> None:
    for wrong in ("7", "d", "-1d", "7y", "", 3, 3.5, -1, float("nan")):
        with pytest.raises(UsageError, match="is not an age; give a number with a unit"):
            precache.gc(tmp_path, older_than=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="keep is -1"):
        precache.gc(tmp_path, keep=-1)
    with pytest.raises(StoreError, match="there is no store at"):
        precache.gc(tmp_path)


OTHERS: dict[str, dict[str, bytes]] = {
    "files": {"photo.jpg": b"mine"},
    "files among what looks like ours": {"valid/c/0": b"mine", "photo.jpg": b"mine"},
    "arrays": {"label/zarr.json": b"{}", "label/c/0": b"mine"},
    "a Zarr group": {"zarr.json": b'{"zarr_format": 3, "attributes": {}}', "label/c/0": b"mine"},
    "a copy of a version": {"zarr.json": b'{"attributes": {"precache": {"version": "%s"}}}'},
    "a build of something else": {"_build/build.json": b'{"version": "1.2"}', "_build/log": b""},
    "a build's output": {"_build/html/index.html": b"mine", "conf.py": b"mine"},
    "scratch": {"_build/tmp/data": b"mine"},
    "a root that is a folder": {"zarr.json/photo.jpg": b"mine"},
}
"""Below a folder that is named by the MD5 of something."""

BESIDE = ("_gc/{}/x", "_clock/notes/x", "_pull/{}/photo.jpg", "_claims/x", "commits/notes")
SOME = "d41d8cd98f00b204e9800998ecf8427e.1"


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_what_others_have_is_neither_touched_nor_counted(three: Store, kind: str) -> None:
    path, (_, second, third) = three
    url = str(path) if kind == "disk" else "memory://garbage/others"
    folder = open_folder(url)
    mine = {name.format(SOME): b"mine" for name in BESIDE}
    for number, files in enumerate(OTHERS.values()):
        for name, data in files.items():
            mine[f"{number:032x}.1/{name}"] = data.replace(b"%s", second[:32].encode())
    if kind == "bucket":
        with pytest.raises(StoreError, match="there is no store"):
            precache.gc(url, keep=0, older_than=0)
        precache.pull(path, url)
    else:
        (path / "0123456789abcdef0123456789abcdef.1").write_bytes(b"mine")
        (path / f"{'f' * 32}.1").mkdir()
    nbytes = precache.versions(url).nbytes
    for name, data in mine.items():
        folder.put(name, [data])
    age(path, 900 * DAY)
    found = precache.versions(url)
    assert (found.nbytes, found.unfinished) == (nbytes, ())
    done = precache.gc(url, keep=0, older_than=0)
    assert not {name.partition("/")[0] for name in mine} & why(done).keys()
    assert mine.keys() <= folder.sizes().keys()
    assert precache.open(url).id == third
    if kind == "disk":
        assert (path / "0123456789abcdef0123456789abcdef.1").read_bytes() == b"mine"
        assert (path / f"{'f' * 32}.1").is_dir()


def test_a_version_that_lost_its_root_is_listed_and_kept_as_any_other(three: Store) -> None:
    """Its build makes it whole from its copy of small objects, so it is no rubbish."""
    path, (first, second, third) = three
    age(path, 40 * DAY)
    for version in (second, third):
        (path / version / ROOT).unlink()
    listed = precache.versions(path)
    assert [each.version for each in listed.versions] == [third, second, first]
    assert [each.current for each in listed.versions] == [True, False, False]
    assert [f"{ROOT}: No such file" in each.problem for each in listed.versions] == [1, 1, 0]
    assert listed.unfinished == ()
    assert why(precache.gc(path, keep=2, older_than="1d")) == {
        third: "current", second: "among the newest 2", first: "replaced 40 days ago"
    }  # fmt: skip


def test_a_link_is_no_version(three: Store, tmp_path: Path) -> None:
    path, (first, second, third) = three
    elsewhere = tmp_path / "elsewhere"
    (path / first).rename(elsewhere)
    for each in ("x/000001.json", f"{'0' * 16}-samples.parquet"):
        write(elsewhere / each, b"mine")
    age(elsewhere, 900 * DAY)
    shutil.rmtree(path / "_listings")
    links = (first, SOME, "_claims", "_listings")
    for name in links:
        (path / name).symlink_to(elsewhere)
    before = contents(elsewhere)
    listed = precache.versions(path)
    assert [each.version for each in listed.versions] == [third, second]
    record_removal(open_folder(path), [SOME])
    done = precache.gc(path, keep=1, older_than=0)
    assert removed(done) == [second]
    assert not {first, SOME} & why(done).keys()
    assert contents(elsewhere) == before
    assert all((path / name).is_symlink() for name in links)


LEFT: dict[str, Sequence[str]] = {
    "the first folders of a build": (f"{SOME}/_build/tmp/",),
    "files that were being put": (
        f"{SOME}/_build/tmp/.build.json.{SOME[:32]}.tmp",
        f"{SOME}/_build/tmp/.{SOME[:32]}.tmp",
        f"{SOME}/_build/tmp/{SOME[:32]}",
    ),
    "a row table": (f"{SOME}/_build/leases/000001.json", f"{SOME}/_build/rows.zip"),
    "a receipt": (f"{SOME}/_build/receipts/00000000.json",),
    "a build without a description": (f"{SOME}/_build/leases/000001.json", f"{SOME}/rows/size/c/0"),
    "a copy": (f"{SOME}/image/c/0/0/0/0", f"{SOME}/{COPY}"),
    "an entry of the log that was being created": (f"commits/.{SOME[:32]}.tmp",),
    "an empty folder that the log names": ("{first}/",),
    "a version without its document": ("{first}/image/c/0/0/0/0", "{first}/valid/c/0"),
    "a version whose document is damaged": ("{first}/image/c/0/0/0/0", "{first}/zarr.json"),
}


@pytest.mark.parametrize("names", LEFT.values(), ids=LEFT)
def test_whatever_a_killed_process_left_is_collected(names: Sequence[str], three: Store) -> None:
    path, (first, second, third) = three
    shutil.rmtree(path / first)
    for name in names:
        left = path / name.format(first=first)
        (left if name.endswith("/") else left.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            left.write_bytes(b"left")
    age(path, 8 * DAY)
    done = precache.gc(path)
    if f"{SOME}/{COPY}" in names:
        assert why(done)[SOME] == "unfinished copy, last changed 8 days ago"
    assert {p.name for p in path.iterdir()} == {second, third, *ALWAYS}
    assert not [p.name for p in (path / "commits").iterdir() if p.suffix != ".json"]
    assert precache.verify(path).ok


def test_whatever_a_killed_build_left_is_collected(
    source: Path, three: Store, tmp_path: Path
) -> None:
    """Each name that a build uses is known for ours, with no description of it or before there is
    one.
    """
    path, versions = three
    for change in (0, 11, 60):
        killed = tmp_path / str(change)
        shutil.copytree(path, killed)
        options = {"shard_samples": 4}
        status = end(start(build_until, change, source, killed, recipe_of(170), options))
        assert status == -signal.SIGKILL
        for name in {p.name for p in killed.iterdir()} - {*versions, *ALWAYS}:
            (killed / name / DESCRIPTION).unlink(missing_ok=True)
        age(killed, 8 * DAY)
        precache.gc(killed, keep=3)
        files = {p.relative_to(killed).parts[0] for p in killed.rglob("*") if p.is_file()}
        assert files == {*versions, *ALWAYS}


@pytest.mark.parametrize("by", ["gc", "use", "pull"])
def test_what_a_process_left_that_was_killed_after_its_commit_goes(by: str, three: Store) -> None:
    path, (_, second, third) = three
    for version in (second, third):
        write(path / version / BUILD / "receipts/00000000.json", b"{}")
        write(path / version / DESCRIPTION, b"{}")
    if by == "gc":
        os.utime(write(path / third / f"{BUILD}/leases/000001.json", b"{}"))  # somebody is at work
        told = precache.gc(path, dry_run=True)
        assert told.swept == (second,)
        assert (path / second / BUILD).exists()
        assert precache.gc(path).swept == (second,)
        assert (path / third / BUILD).exists()
    elif by == "use":
        precache.use(f"{path}@{second}")
    else:
        precache.pull(f"{path}@{second}", path)
    assert not (path / second / BUILD).exists()
    assert precache.verify(f"{path}@{second}").ok


@pytest.mark.parametrize(("own", "builders"), [(-3650, 3650), (0, -3650), (3650, 3650)])
def test_wrong_clocks_decide_nothing(
    own: int, builders: int, source: Path, three: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (first, second, third) = three
    left = leave_a_build(source, path).name
    entries = [(entry, "time") for entry in (path / "commits").iterdir()]
    for file, name in [*entries, (path / left / DESCRIPTION, "begun")]:
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, name: told[name] + builders * DAY}))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + own * DAY)
    assert removed(precache.gc(path, keep=0)) == []  # all of it is young
    monkeypatch.undo()
    age(path / left, 8 * DAY)
    then = now() - 8 * DAY
    os.utime(path / "commits/000002.json", (then, then))
    monkeypatch.setattr(time, "time", lambda: now() + own * DAY)
    assert removed(precache.gc(path, keep=0)) == [first, left]
    assert why(precache.gc(path, keep=0))[second].startswith("replaced ")
    assert precache.open(path).id == third


def test_a_bucket_tells_the_time_itself(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://garbage/clock"
    first, second, third = build_all(source, url)
    monkeypatch.setattr(time, "time", lambda: NOW + 3650 * DAY)
    assert removed(precache.gc(url, keep=0, older_than="1h")) == []
    for name, file in fsspec.filesystem("memory").store.items():
        if name.startswith("/garbage/clock/commits/"):
            file.created -= timedelta(hours=2)
    assert removed(precache.gc(url, keep=0, older_than="1h")) == [second, first]
    assert open_folder(url).names() == sorted([third, *ALWAYS])


def test_what_was_removed_says_so_and_can_be_built_again(source: Path, three: Store) -> None:
    path, (first, second, third) = three
    before = pixels(f"{path}@{first}")
    shutil.copytree(path / first, path.with_name("first"))
    log = read_log(open_folder(path))
    assert removed(precache.gc(path, keep=1, older_than=0)) == [second, first]
    assert sorted(p.name for p in path.iterdir()) == sorted([third, *ALWAYS])
    after = read_log(open_folder(path))
    assert (after.removed, after.number) == ({first, second}, log.number + 1)
    assert after.commits[:-1] == log.commits
    with pytest.raises(StoreError, match=f"{first} is gone"):
        precache.open(f"{path}@{first[:6]}")
    with pytest.raises(StoreError, match="is gone"):
        precache.use(f"{path}@{first}")
    with pytest.raises(StoreError, match="fits no version") as caught:
        precache.open(f"{path}@0000")
    assert third[:12] in str(caught.value)
    assert first[:12] not in str(caught.value)
    shutil.copytree(path.with_name("first"), path / first)  # its removal was not finished
    with pytest.raises(BuildError, match=f"{first} was removed meanwhile; run the same"):
        precache.use(f"{path}@{first}")
    assert why(precache.gc(path, dry_run=True))[first] == "its removal was not finished"
    assert removed(precache.gc(path)) == [first], "whatever its age"
    assert not (path / first).exists()
    again = build_here(source, path, recipe_of(SIDES[0]), {"shard_samples": 4})
    assert (again.version, again.shards_skipped) == (f"{first[:32]}.2", 0)
    assert_same(pixels(path), before)


def test_a_build_that_was_left_goes_by_its_age_unless_its_holder_seems_alive_again(
    source: Path, three: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = three
    left = leave_a_build(source, path)
    assert "in use by a process" in why(precache.gc(path, older_than=0))[left.name]
    age(path / left.name, 3 * DAY + 60)
    kept = why(precache.gc(path, older_than="4d"))
    assert kept[left.name] == "unfinished build, last changed 3 days ago"
    [found] = precache.versions(path).unfinished
    assert 3 * DAY <= found.idle_seconds < 3 * DAY + 600

    lease = Leases(left).take()
    assert lease is not None
    age(path / left.name, 3 * DAY)
    scan = garbage.scan_folder

    def scan_late(*given: Any) -> StoredFolder | None:
        """A heartbeat comes between the plan and the removal."""
        found = scan(*given)
        lease.hand_over_to(process_of(os.getpid()), "a heartbeat")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(garbage, "scan_folder", scan_late)
        assert why(precache.gc(path, older_than="1d"))[left.name] == "in use by a process"
    assert lease.is_held()
    lease.end()
    age(path / left.name, 2 * DAY)
    assert removed(precache.gc(path, older_than="1d")) == [left.name]
    assert not (path / left.name).exists()


def lose(array: np.ndarray, store: str) -> np.ndarray:
    """The array as it is; takes the version's first shard away, where LOSE is set."""
    if "LOSE" in os.environ:
        for path in Path(store).glob("*/image/c/0/0/0/0"):
            path.unlink()
    return array


def test_a_build_whose_shards_are_removed_notes_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    lose = {"op": "function", "function": f"{__name__}:lose", "params": {"store": str(path)}}
    ops = [{"op": "decode"}, {"op": "resize", "size": [150, 150]}, lose]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    monkeypatch.setenv("LOSE", "1")
    with pytest.raises(BuildError, match=r"1 of 3 shards of .* were removed while"):
        build_here(source, path, recipe, {"shard_samples": 4})
    assert not read_log(open_folder(path)).commits
    monkeypatch.delenv("LOSE")
    done = build_here(source, path, recipe, {"shard_samples": 4})
    assert done.shards_skipped == 2
    assert precache.verify(path).ok


def test_what_a_later_version_has_linked_stays_and_counts_once(
    source: Path, tmp_path: Path
) -> None:
    photos, path = shutil.copytree(source, tmp_path / "in"), tmp_path / "store"
    options = {"shard_samples": 4, "keep_order": True}
    names = [build_here(photos, path, recipe_of(150), options).version]
    for number in (1, 2):
        write(photos / f"zoo/{number}.jpg", encoded(cut(77)))
        names.append(build_here(photos, path, recipe_of(150), options).version)
    before, listed = pixels(path), precache.versions(path)
    files = [p.stat() for name in names for p in (path / name).rglob("*") if p.is_file()]
    shared = sum(each.nbytes for each in listed.versions) - listed.nbytes
    assert shared > 50_000
    assert listed.nbytes == sum({each.st_ino: each.st_size for each in files}.values())
    told = precache.gc(path, keep=1, older_than=0, dry_run=True)
    done = precache.gc(path, keep=1, older_than=0)
    assert removed(done) == names[1::-1]
    assert [each.freed_nbytes for each in done.removed] == [
        each.freed_nbytes for each in told.removed
    ]
    assert precache.open(path).id == names[2]
    assert precache.verify(path).ok
    after = pixels(path)
    assert all(np.array_equal(after[key], before[key]) for key in before)
    left = precache.versions(path)
    assert left.nbytes == left.versions[0].nbytes == listed.nbytes - done.freed_nbytes


def test_killed_anywhere_and_run_again_the_end_is_the_same(built: Store, tmp_path: Path) -> None:
    original, (_, _, third) = built
    right = tmp_path / "right"
    shutil.copytree(original, right)
    precache.gc(right, keep=1, older_than=0)
    for change in itertools.chain(range(12), itertools.count(12, 17)):
        path = tmp_path / f"killed-{change}"
        shutil.copytree(original, path)
        status = end(start(collect_until, change, path))
        assert precache.open(path).id == third
        assert precache.verify(path).ok
        precache.gc(path, keep=1, older_than=0)
        assert contents(path) == contents(right)
        assert {p.name for p in path.iterdir()} == {third, *ALWAYS}
        if status == 0:
            assert change > 40
            return
        assert status == -signal.SIGKILL


def test_a_store_in_a_bucket(source: Path, s3: S3Server) -> None:
    url, options = "s3://bucket/garbage.store", s3.options()
    first, second, third = build_all(source, url, options)
    found = precache.versions(url, options)
    assert [each.version for each in found.versions] == [third, second, first]
    assert found.nbytes == sum(each.nbytes for each in found.versions)
    left = leave_a_build(source, url, options).name
    [unfinished] = precache.versions(url, options).unfinished
    assert unfinished.build is not None
    assert (unfinished.version, unfinished.build.done, unfinished.build.shards) == (left, 2, 3)
    assert unfinished.idle_seconds < 60
    told = precache.gc(url, 1, 0, dry_run=True, storage_options=options)
    done = precache.gc(url, 1, 0, storage_options=options)
    assert set(removed(told)) == set(removed(done)) == {first, second}
    assert done.freed_nbytes == sum(each.nbytes for each in found.versions[1:])
    assert open_folder(url, options).names() == sorted([third, left, *ALWAYS])
    assert precache.verify(url, storage_options=options).ok
    with pytest.raises(StoreError, match="is gone"):
        precache.use(f"{url}@{first}", options)
