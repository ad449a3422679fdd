"""What is read of a store far away, in few round trips."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import precache
from precache.errors import StoreError
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache.store import tree
from precache.store.commit_log import read_log
from tests.conftest import BuiltStore
from tests.support.servers import FaultProxy, S3Server

FAR = "memory://ahead"


@pytest.fixture
def far(stores: dict[str, BuiltStore]) -> Iterator[str]:
    """The URL of a store that is on no local disk."""
    precache.pull(stores["image"].path, FAR)
    yield FAR
    open_folder(FAR).remove("")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Methods of folders that were called, each a round trip or one beside another's."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(RemoteFolder, name)

        def call(self: RemoteFolder, *arguments: Any) -> Any:
            if arguments[0]:
                calls.append(f"{name} {threading.current_thread().name.partition('_')[0]}")
            return real(self, *arguments)

        return call

    for name in ("names", "read_many"):
        monkeypatch.setattr(RemoteFolder, name, counted(name))
    return calls


def test_a_store_is_opened_in_four_round_trips_however_long_its_log_is(
    far: str, asked: list[str]
) -> None:
    version, folder = precache.open(far), open_folder(far)
    assert precache.open(f"{far}/{version.id}").labels.tolist() == version.labels.tolist()
    [entry] = read_log(folder).entries
    for number in range(2, 30):
        folder.put(f"commits/{number:06d}.json", [entry.with_(number=number).to_json()])
    folder.put("commits/000007.json", [b"nonsense"])
    asked.clear()
    with precache.Loader(far, 4, device="cpu") as loader:
        here, there = "MainThread", "precache-open"
        log = [f"names {there}", f"read_many {there}"]  # beside the look for a version right there
        assert sorted(asked[:3]) == sorted([*log, f"read_many {here}"])
        assert asked[3:] == [f"read_many {here}"] * 2
        assert sum(len(batch["row"]) for batch in loader) == 21
    with pytest.raises(StoreError, match="000007"):
        precache.versions(far)


def test_verify_asks_for_each_shard_once_a_piece_and_for_no_size(
    stores: dict[str, BuiltStore], s3: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "PIECE_BYTES", 100_000)
    uri, built = "s3://bucket/pieces", stores["image"]
    precache.pull(built.path, uri, storage_options=s3.options())
    sizes = [leaf.size for leaf in built.open().shard_leaves("image")]
    assert max(sizes) > 100_000
    assert precache.verify(uri, storage_options=s3.options(proxy.port)).ok
    asked = {of: n for of, n in proxy.seen.items() if ".1/image/c/" in of[1]}
    assert {method for method, _ in asked} == {"GET"}
    assert sorted(asked.values()) == sorted(-(-size // 100_000) for size in sizes)
