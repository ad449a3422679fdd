"""One of several holds a lease, and another one once the first has ended."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from precache.errors import BuildError
from precache.runtime.process_id import process_of
from precache.storage.base import Folder
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.store import lease as leases
from precache.store.commit_log import ROOT
from precache.store.json_documents import LeaseDocument
from precache.store.lease import BUILD_LEASES, LEASES_FOLDER, Lease, Leases, is_built, latest
from precache.store.tree import sealed_root
from tests.support.building import poll, write

_numbers = itertools.count()
PLACES = {"of a version": BUILD_LEASES, "of a name": f"{LEASES_FOLDER}/x"}


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    on_disk = request.param == "disk"
    return open_folder(tmp_path / "store" if on_disk else f"memory://leases/{next(_numbers)}")


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def taken(folder: Folder, place: str) -> Lease:
    lease = Leases(folder, place).take()
    assert lease is not None
    return lease


def beating() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "precache-lease"]


def rewrite(folder: Folder, lease: Lease, **changes: Any) -> None:
    document = LeaseDocument.read(folder.read(lease.name), "")
    folder.put(lease.name, [document.model_copy(update=changes).model_dump_json().encode()])


def test_one_holds_it_until_its_end(store: Folder, place: str) -> None:
    others = Leases(store, place)
    with taken(store, place) as lease:
        assert others.take() is None
        held = others.holder()
        assert held is not None
        assert held.holder.pid == os.getpid()
        assert lease.is_held()
        with taken(store, f"{LEASES_FOLDER}/y"):
            pass
    lease.end()
    assert others.holder() is None
    assert store.sizes(LEASES_FOLDER) == {}
    with taken(store, place) as again:
        # A version's numbers only grow, so that whoever held it before notices.
        assert again.name.endswith("000002.json" if place == BUILD_LEASES else "000001.json")
        assert not lease.is_held()
    assert not beating()


def test_a_process_that_ended_holds_none(store: Folder) -> None:
    lease, others = taken(store, PLACES["of a name"]), Leases.named(store, "x")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        lease.hand_over_to(process_of(child.pid), "its log")
        held = others.holder()
        assert held is not None
        assert held.note == "its log"
        assert others.take() is None
        child.kill()
        child.wait()
    second = others.take()
    assert second is not None
    assert second.name > lease.name


@pytest.mark.parametrize("ago", [0, 10**6], ids=["", "that looks old"])
def test_of_another_machine_signs_of_life_decide(
    store: Folder, place: str, ago: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks may be wrong, so a lease that looks old is watched, too; for less time."""
    lease, others = taken(store, place), Leases(store, place)
    far = process_of(os.getpid()).model_copy(update={"node": "elsewhere"})
    document = LeaseDocument.read(store.read(lease.name), "")
    rewrite(store, lease, holder=far, time=document.time - ago)
    assert others.take() is None
    assert is_built(store) == (place == BUILD_LEASES and not ago)
    monkeypatch.setattr(leases, "OBSERVE_SECONDS", 0.0)
    if not ago:
        monkeypatch.setattr(leases, "ALIVE_SECONDS", 0.0)
    rewrite(store, lease, holder=far, time=document.time - ago, note="a heartbeat")
    second = others.take()
    assert second is not None
    assert not lease.is_held()
    assert second.is_held()
    with pytest.raises(BuildError, match="took over as this one did not go on for long"):
        lease.require()


def test_it_beats_and_who_knows_that_its_holder_has_ended_takes_over(
    store: Folder, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = taken(store, place)
    last = latest(store, place)
    rewrite(store, lease, note="a heartbeat since")
    assert Leases(store, place).take(ended=last) is None
    next_one = Leases(store, place).take(ended=latest(store, place))
    assert next_one is not None
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.001)
    with next_one:
        first = store.get(next_one.name)
        poll(lambda: store.get(next_one.name) not in (first, None), "a beat")


LOSSES: dict[str, Callable[[Folder, Lease], object]] = {
    "another has its name": lambda store, lease: rewrite(store, lease, nonce="another"),
    "another has a higher number": lambda store, lease: store.put(
        f"{lease.name.rpartition('/')[0]}/000009.json", [store.read(lease.name)]
    ),
    "it is removed": lambda store, lease: store.remove(lease.name),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_one_that_was_lost_is_not_renewed(
    loss: str, store: Folder, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.001)
    lease = taken(store, place)
    LOSSES[loss](store, lease)
    others = store.sizes(place).keys() - {lease.name}
    with lease:
        for thread in beating():
            thread.join(60)
    own = {lease.name} if "name" in loss else set()
    assert store.sizes(place).keys() == others | own
    assert not lease.is_held()


def test_one_that_is_renewed_amid_the_commit_of_another_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.001)
    folder, put = LocalFolder(tmp_path), LocalFolder.put
    lease = taken(folder, BUILD_LEASES)

    def put_late(folder: LocalFolder, name: str, *given: Any, **options: Any) -> None:
        if name == lease.name and folder.size(ROOT) is None:
            put(folder, ROOT, [sealed_root({})])
            folder.remove(lease.name)
        put(folder, name, *given, **options)

    monkeypatch.setattr(LocalFolder, "put", put_late)
    with lease:
        for thread in beating():
            thread.join(60)
    assert folder.names(BUILD_LEASES) == []


def test_who_waits_is_told_for_whom(store: Folder, place: str) -> None:
    said: list[LeaseDocument] = []
    with ThreadPoolExecutor() as pool:
        with taken(store, place):
            waiting = pool.submit(Leases(store, place).wait, said.append)
            poll(lambda: said, "it says for whom it waits")
            assert not waiting.done()
        assert waiting.result(60).is_held()
    assert [document.holder.pid for document in said] == [os.getpid()]


@pytest.mark.parametrize("data", [b"", b"{}", b'{"holder": 1, "time": 0}'])
def test_what_is_damaged_or_of_others_holds_nothing(store: Folder, place: str, data: bytes) -> None:
    """A version that is repaired has its root, too."""
    others = ["0.json", "000000-notes.txt", "000007.json", "\u00b2.json"]
    for name in others:
        store.put(f"{place}/{name}", [data])
    store.put(ROOT, [sealed_root({})])
    with taken(store, place) as lease:
        assert lease.is_held()
        assert lease.name.endswith("000008.json")
    assert set(store.names(place)) >= set(others) - {"000007.json"}


def test_a_store_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.001)
    lease = taken(LocalFolder(tmp_path), BUILD_LEASES)
    monkeypatch.setattr(lease, "_folder", LocalFolder(write(tmp_path / "file", b"") / "below"))
    monkeypatch.setattr(lease, "is_held", lambda: True)
    with lease:
        poll(lambda: "was not renewed" in caplog.text, "a line in the log")
