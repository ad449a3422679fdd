"""One of several gets a claim, and another one once the first is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from precache.runtime.process_id import process_of
from precache.storage.base import Folder
from precache.storage.open import open_folder
from precache.store import lease as claims
from precache.store.lease import CLAIMS, Claims
from tests.support.building import poll


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    name = request.node.name.replace("[", "-").strip("]")
    return open_folder(tmp_path / "store" if request.param == "disk" else f"memory://claims/{name}")


def test_one_holds_it_and_leaves_nothing(store: Folder) -> None:
    one, other = Claims(store, "x"), Claims(store, "x")
    claim = one.take()
    assert claim is not None
    with claim:
        assert other.take() is None
        held = other.holder()
        assert held is not None
        assert held.holder.pid == os.getpid()
        elsewhere = Claims(store, "y").take()
        assert elsewhere is not None
        with elsewhere:
            pass
    assert store.sizes(CLAIMS) == {}
    again = other.take()
    assert again is not None
    with again:
        pass
    assert not [t for t in threading.enumerate() if t.name == "precache-lease"]


def test_of_many_at_once_one_gets_it(store: Folder) -> None:
    taken: list[bool] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        taken.append(Claims(store, "x").take() is not None)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 7 + [True]


def test_a_process_that_ended_holds_none(store: Folder) -> None:
    claim = Claims(store, "x").take()
    assert claim is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        claim.give_to(process_of(child.pid), "its log")
        others = Claims(store, "x")
        held = others.holder()
        assert held is not None
        assert held.note == "its log"
        assert others.take() is None
        child.kill()
        child.wait()
    second = others.take()
    assert second is not None
    assert second.name > claim.name


def test_of_another_machine_signs_of_life_decide(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claims(store, "x").take()
    assert claim is not None
    far = process_of(os.getpid()).model_copy(update={"node": "elsewhere"})
    claim.give_to(far, "")
    others = Claims(store, "x")
    assert others.take() is None
    monkeypatch.setattr(claims, "STALE_SECONDS", 0.0)
    assert others.take() is not None


def test_it_beats(store: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.001)
    claim = Claims(store, "x").take()
    assert claim is not None
    with claim:
        first = store.get(claim.name)
        poll(lambda: store.get(claim.name) != first, "a beat")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"holder": 1, "time": 0}'])
def test_what_is_damaged_holds_nothing(store: Folder, data: bytes) -> None:
    store.put(f"{CLAIMS}/x/000007.json", [data])
    claim = Claims(store, "x").take()
    assert claim is not None
    assert claim.name.endswith("000008.json")


def test_what_others_put_beside_claims_is_left_alone(store: Folder) -> None:
    for name in ("000000-notes.txt", "\u00b2.json", "0.json"):
        store.put(f"{CLAIMS}/thing/{name}", [b"mine"])
    claim = Claims(store, "thing").take()
    assert claim is not None
    with claim:
        assert claim.name == f"{CLAIMS}/thing/000001.json"
    assert store.names(f"{CLAIMS}/thing") == ["0.json", "000000-notes.txt", "\u00b2.json"]
