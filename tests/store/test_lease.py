"""One of several gets a lease, and another one once the first is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from precache.errors import BuildError
from precache.runtime.process_id import process_of
from precache.storage.base import Folder
from precache.storage.open import open_folder
from precache.store import lease as leases
from precache.store.lease import LEASES_FOLDER, NamedLease
from tests.support.building import poll


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    name = request.node.name.replace("[", "-").strip("]")
    return open_folder(tmp_path / "store" if request.param == "disk" else f"memory://claims/{name}")


def test_one_holds_it_and_leaves_nothing(store: Folder) -> None:
    one, other = NamedLease(store, "x"), NamedLease(store, "x")
    lease = one.try_acquire()
    assert lease is not None
    with lease:
        assert other.try_acquire() is None
        held = other.holder()
        assert held is not None
        assert held.holder.pid == os.getpid()
        elsewhere = NamedLease(store, "y").try_acquire()
        assert elsewhere is not None
        with elsewhere:
            pass
    assert store.sizes(LEASES_FOLDER) == {}
    again = other.try_acquire()
    assert again is not None
    with again:
        pass
    assert not [t for t in threading.enumerate() if t.name == "precache-lease"]


def test_of_many_at_once_one_gets_it(store: Folder) -> None:
    taken: list[bool] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        taken.append(NamedLease(store, "x").try_acquire() is not None)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 7 + [True]


def test_a_process_that_ended_holds_none(store: Folder) -> None:
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        lease.hand_over_to(process_of(child.pid), "its log")
        others = NamedLease(store, "x")
        held = others.holder()
        assert held is not None
        assert held.note == "its log"
        assert others.try_acquire() is None
        child.kill()
        child.wait()
    second = others.try_acquire()
    assert second is not None
    assert second.name > lease.name


def test_of_another_machine_signs_of_life_decide(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    far = process_of(os.getpid()).model_copy(update={"node": "elsewhere"})
    lease.hand_over_to(far, "")
    others = NamedLease(store, "x")
    assert others.try_acquire() is None
    monkeypatch.setattr(leases, "STALE_SECONDS", 0.0)
    assert others.try_acquire() is not None


def test_it_beats(store: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.001)
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    with lease:
        first = store.get(lease.name)
        poll(lambda: store.get(lease.name) != first, "a beat")


def test_one_that_was_lost_is_neither_held_nor_removed(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers began anew meanwhile, so that another's object has its name."""
    monkeypatch.setattr(leases, "HELD_RENEWALS", 0)
    first = NamedLease(store, "x").try_acquire()
    assert first is not None
    with first:
        assert first.is_held()
        with monkeypatch.context() as patched:
            patched.setattr(leases, "STALE_SECONDS", 0.0)
            second = NamedLease(store, "x").try_acquire()
        assert second is not None
        assert not first.is_held()
        with second:
            assert second.is_held()
        assert not first.is_held()
        third = NamedLease(store, "x").try_acquire()
        assert third is not None
        assert third.name == first.name
        assert not first.is_held()
    assert third.is_held()
    with pytest.raises(BuildError, match="took over the lease"):
        first.require()


def test_one_that_was_lost_is_not_renewed(store: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    other = (store.get(lease.name) or b"").replace(b'"note":""', b'"note":"another"')
    store.put(lease.name, [other])
    monkeypatch.setattr(leases, "HELD_RENEWALS", 0)
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.001)
    with lease:
        threads = [t for t in threading.enumerate() if t.name == "precache-lease"]
        for thread in threads:
            thread.join(60)
    assert store.get(lease.name) == other


def test_one_whose_object_another_process_removed_is_lost_at_the_next_heartbeat(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former holder that resumes as it removes its own: the numbers have begun anew."""
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.01)
    monkeypatch.setattr(leases, "HELD_RENEWALS", 10_000)  # no holder asks for itself
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    with lease:
        store.remove(lease.name)
        other = NamedLease(store, "x").try_acquire()
        poll(lambda: other is None or not lease.is_held(), "it notices")
    assert other is None or store.get(lease.name) is not None


def test_who_waits_for_long_is_told_for_whom(
    store: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "WAIT_LINE_SECONDS", 0.0)
    first, entered = NamedLease(store, "x").try_acquire(), threading.Event()
    assert first is not None

    def wait() -> None:
        with NamedLease(store, "x").acquire():
            entered.set()

    with first:
        waiting = threading.Thread(target=wait)
        waiting.start()
        poll(lambda: f"waiting for {process_of(os.getpid())}, which works on" in caplog.text, "it")
        assert not entered.is_set()
    waiting.join(60)
    assert entered.is_set()


def test_one_whose_heartbeat_took_too_long_to_be_put_is_lost(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another may have taken it over, and ended, before the object was there again."""
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    clock, put = leases.boottime, type(store).put

    def put_late(*given: Any, **options: Any) -> None:
        put(*given, **options)
        monkeypatch.setattr(leases, "boottime", lambda: clock() + leases.STALE_SECONDS + 1)

    monkeypatch.setattr(type(store), "put", put_late)
    lease.hand_over_to(process_of(os.getpid()), "")
    assert NamedLease(store, "x").holder() is not None
    assert not lease.is_held()


def test_one_that_was_renewed_a_moment_ago_is_held_without_a_request(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    monkeypatch.setattr(lease, "_folder", None)
    assert lease.is_held()


@pytest.mark.parametrize("data", [b"", b"{}", b'{"holder": 1, "time": 0}'])
def test_what_is_damaged_holds_nothing(store: Folder, data: bytes) -> None:
    store.put(f"{LEASES_FOLDER}/x/000007.json", [data])
    lease = NamedLease(store, "x").try_acquire()
    assert lease is not None
    assert lease.name.endswith("000008.json")


def test_what_others_put_beside_claims_is_left_alone(store: Folder) -> None:
    for name in ("000000-notes.txt", "\u00b2.json", "0.json"):
        store.put(f"{LEASES_FOLDER}/thing/{name}", [b"mine"])
    lease = NamedLease(store, "thing").try_acquire()
    assert lease is not None
    with lease:
        assert lease.name == f"{LEASES_FOLDER}/thing/000001.json"
    assert store.names(f"{LEASES_FOLDER}/thing") == ["0.json", "000000-notes.txt", "\u00b2.json"]
