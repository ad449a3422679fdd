"""Leases of builds: their heartbeats, and what their tasks may write under."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import BuildError
from precache.storage.local import LocalFolder
from precache.store import lease
from precache.store.build_status import DESCRIPTION, read_status
from precache.store.commit_log import ROOT
from precache.store.json_documents import LeaseDocument
from precache.store.lease import (
    BUILD_LEASES,
    BuildLease,
    await_builds,
    live_leases,
    read_leases,
)
from precache.store.tree import sealed_root
from precache_workers.planning.target_version import SCRATCH
from tests.support.building import build_here, poll, remains, write, write_jpegs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.001)


def beating() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "precache-lease"]


def test_it_is_renewed_until_it_ends(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    own = BuildLease(folder, SCRATCH)
    first = read_leases(folder)[own.name].time
    poll(lambda: read_leases(folder)[own.name].time > first, "a heartbeat")
    assert abs(time.time() - first) < 600
    assert live_leases(folder).keys() == {own.name}
    assert own.others() == {}
    own.end()
    own.end()
    assert read_leases(folder) == {}
    assert beating() == []


def test_one_that_was_removed_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.2)  # none while it is removed
    folder = LocalFolder(tmp_path)
    own = BuildLease(folder, SCRATCH)
    folder.remove(own.name)
    with own:
        poll(lambda: not beating(), "its thread ends")
        assert read_leases(folder) == {}


def test_one_that_was_renewed_amid_the_commit_of_another_build_ends_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, put = LocalFolder(tmp_path), LocalFolder.put
    own = BuildLease(folder, SCRATCH)

    def put_late(folder: LocalFolder, name: str, *given: Any, **options: Any) -> None:
        if name == own.name and folder.size(ROOT) is None:
            put(folder, ROOT, [sealed_root({})])
            folder.remove(own.name)
        put(folder, name, *given, **options)

    monkeypatch.setattr(LocalFolder, "put", put_late)
    with own:
        poll(lambda: not beating(), "its thread ends")
        assert read_leases(folder) == {}


def test_that_of_the_build_that_commits_lasts_until_its_end(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with BuildLease(folder, SCRATCH) as own:
        own.outlast_commit()
        folder.put(ROOT, [sealed_root({})])
        before = read_leases(folder)[own.name].time
        poll(lambda: read_leases(folder)[own.name].time > before, "a heartbeat")
    assert read_leases(folder) == {}


def test_builds_see_each_other(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with BuildLease(folder, SCRATCH) as one, BuildLease(folder, SCRATCH) as other:
        assert one.others().keys() == {other.name}
        assert other.others().keys() == {one.name}


def test_who_waits_for_a_build_waits_for_its_end_or_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "ALIVE_SECONDS", 5.0)
    folder, own = LocalFolder(tmp_path), BuildLease(LocalFolder(tmp_path), SCRATCH)
    other = threading.Thread(target=await_builds, args=(folder, [own.name]))
    other.start()
    other.join(1.0)
    assert other.is_alive()
    own.end()
    other.join(30)
    assert not other.is_alive()
    silent = BuildLease(folder, SCRATCH)
    silent._stop()
    monkeypatch.setattr(lease, "ALIVE_SECONDS", 0.5)
    await_builds(folder, [silent.name])
    with BuildLease(folder, SCRATCH) as next_one:
        next_one.revoke_others()
        assert read_leases(folder).keys() == {next_one.name}


@pytest.mark.parametrize("change", [{"time": 1.0}, {"pid": 2**22 + 1}])
def test_one_without_a_heartbeat_or_a_process_does_not_count(
    tmp_path: Path, change: dict[str, float]
) -> None:
    folder = LocalFolder(tmp_path)
    own = BuildLease(folder, SCRATCH)
    own._over.set()
    own._thread.join()
    held = read_leases(folder)[own.name].model_dump()
    held["time"] = change.get("time", held["time"])
    held["holder"]["pid"] = change.get("pid", held["holder"]["pid"])
    folder.put(own.name, [LeaseDocument(**held).model_dump_json().encode()])
    assert live_leases(folder) == {}


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / BUILD_LEASES / "a.json", b"{")
    write(tmp_path / BUILD_LEASES / "b", b"{}")
    assert read_leases(LocalFolder(tmp_path)) == {}


def test_a_store_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = BuildLease(LocalFolder(tmp_path), SCRATCH)
    monkeypatch.setattr(own, "_folder", LocalFolder(write(tmp_path / "file", b"") / "below"))
    monkeypatch.setattr(LocalFolder, "size", lambda folder, name: 1)
    poll(lambda: "was not renewed" in caplog.text, "a line in the log")
    own.end()


def await_beats(array: np.ndarray, store: str) -> np.ndarray:
    """The array as it is, once the build, if it has begun, has shown that it lives."""
    if any(Path(store).glob(f"*/{DESCRIPTION}")):
        poll(lambda: any(Path(store).glob(f"*/{BUILD_LEASES}/*.json")), "a beat")
    return array


def recipe_of(store: Path) -> precache.Recipe:
    function = "tests.driver.test_build_lease:await_beats"
    ops = [
        {"op": "decode"},
        {"op": "function", "function": function, "params": {"store": str(store)}},
    ]
    return precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})


def test_a_build_has_one_and_leaves_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    build_here(write_jpegs(tmp_path / "in", 4), store, recipe_of(store))
    assert remains(store) == []
    assert beating() == []


def test_a_build_that_fails_gives_it_back(tmp_path: Path) -> None:
    store = tmp_path / "store"
    source = write_jpegs(tmp_path / "in", 4)
    write(source / "eel/broken.jpg", b"none")
    with pytest.raises(BuildError):
        build_here(source, store, recipe_of(store), {"on_error": "raise"})
    assert beating() == []
    assert not list(store.glob(f"*/{BUILD_LEASES}/*.json"))
    assert len(read_status(store).building) == 1
