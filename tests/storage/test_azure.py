"""The whole road over ``az://``, against Azurite, Microsoft's emulator.

It is found by the variable AZURITE, on the search path, or where `npm install --no-save azurite`
puts it.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache.errors import DamageError, StorageError, UsageError
from precache.storage import object_store, retries
from precache.storage.base import Buffer, Folder
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache.store.commit_log import append_entry, read_commits
from tests.support.building import assert_whole_road, contents, put_photos
from tests.support.listing_server import AzureListingServer
from tests.support.servers import (
    Azurite,
    Fault,
    FaultProxy,
    passes,
    reset,
    status,
    truncated,
    wrong_bytes,
)

pytest.importorskip("obstore", reason="az:// needs obstore")

RECIPE = precache.Recipe.image(resize=64, crop=56)
NAMES = st.sets(
    st.lists(st.text("ab0é +%&<", min_size=1, max_size=3), min_size=1, max_size=3).map("/".join),
    max_size=40,
)
WRONG_KEY = base64.b64encode(b"another key, which opens nothing").decode()


@pytest.fixture
def proxy(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """In front of the server, with pauses too short to wait for."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    proxy = FaultProxy(azurite.port)
    yield proxy
    proxy.stop()


_numbers = iter(range(10**6))


@pytest.fixture
def folder(azurite: Azurite) -> Folder:
    """An empty folder."""
    return open_folder(f"az://bucket/azure-{next(_numbers)}", azurite.options())


@pytest.fixture
def faulty(azurite: Azurite, proxy: FaultProxy) -> Folder:
    """An empty folder behind the proxy."""
    return open_folder(f"az://bucket/azure-{next(_numbers)}", azurite.options(proxy.port))


@pytest.fixture
def photos(azurite: Azurite) -> str:
    """A source of twelve photographs in two classes, one of them broken."""
    url = f"az://bucket/photos-{next(_numbers)}"
    put_photos(open_folder(url, azurite.options()))
    return url


# --- folders ------------------------------------------------------------------------------------


def test_names_are_those_of_the_blobs(folder: Folder) -> None:
    names = [
        "grand chat/1 %20.jpg", "Kätzchen/3&4+5.jpg", "a%b/'6'.jpg", "q?a/b?c=d.jpg", "x[1]/#*.jpg",
    ]  # fmt: skip
    for name in names:
        folder.put(name, [name.encode()])
    assert sorted(info.name for info in folder.walk()) == sorted(names)
    assert sorted(folder.sizes()) == sorted(names)
    assert folder.names() == sorted(name.split("/")[0] for name in names)
    assert folder.read_many(names, [-1] * len(names)) == [name.encode() for name in names]
    folder.remove("x[1]")
    assert folder.names() == ["Kätzchen", "a%b", "grand chat", "q?a"]


@pytest.mark.parametrize("name", ["cat?", "cat#", "cat ", " cat"])
def test_folders_whose_names_end_oddly_are_listed(
    name: str, azurite: Azurite, folder: Folder
) -> None:
    for each in ("cat/1.jpg", f"{name}/2.jpg", f"{name}/deep/3.jpg"):
        folder.put(each, [each.encode()])
    names = sorted(info.name for info in folder.walk())
    assert names == sorted(["cat/1.jpg", f"{name}/2.jpg", f"{name}/deep/3.jpg"])
    assert folder.read_many(names, [-1] * 3) == [each.encode() for each in names]
    assert folder.names(name) == ["2.jpg", "deep"]


@pytest.mark.parametrize("name", ["cat?", "cat#", "c?a#t"])
def test_no_blob_is_taken_for_another(name: str, folder: Folder) -> None:
    folder.put("cat", [b"another"])
    folder.put(name, [b"1"])
    folder.put("deep/c?a#t/1.jpg", [b"1"])
    assert folder.names() == sorted(["cat", "deep", name])
    assert folder.read_many(["cat", name], [7, 1]) == [b"another", b"1"]
    assert (folder.size(name), folder.sizes("deep")) == (1, {"deep/c?a#t/1.jpg": 1})
    folder.remove(name)
    assert folder.names() == ["cat", "deep"]


@pytest.mark.parametrize(
    ("marker", "metadata"),
    [
        ("cat", {"hdi_isfolder": "true"}),
        ("cat", {"Hdi_isfolder": "true"}),
        ("cat", {"is_directory": "true"}),
        ("cat/", {}),
        ("deep/cat/", {}),
    ],
)
@pytest.mark.parametrize("page", [1, 5000])
def test_folders_that_are_blobs_too_are_folders(
    page: int,
    marker: str,
    metadata: dict[str, str],
    azurite: Azurite,
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where other names stand between a folder's two, and a page ends there."""
    monkeypatch.setitem(object_store.PAGE, "azure", page)
    place = marker.rstrip("/")
    names = [f"{place}-0.jpg", f"{place}/1.jpg", f"{place}/small/2.jpg"]
    for name in names:
        folder.put(name, [b"1"])
    with azurite.container("bucket") as bucket:
        bucket.upload_blob(f"{folder.name}/{marker}", b"", metadata=metadata)
    assert sorted(info.name for info in folder.walk()) == names
    below = folder.folder(place)
    assert (below.kind(), below.names()) == ("folder", ["1.jpg", "small"])
    beside = folder.folder(place.rpartition("/")[0])
    assert beside.names() == ["cat", "cat-0.jpg"]


def test_a_file_is_one_where_nothing_can_be_listed_below_it(
    faulty: Folder, proxy: FaultProxy
) -> None:
    faulty.put("a.tar", [b"1"])
    refused = proxy.faults["GET", "/bucket"] = [status(409)]
    assert faulty.folder("a.tar").kind() == "file"
    assert refused == []


def test_a_blob_that_is_said_to_be_no_folder_is_a_file(azurite: Azurite, folder: Folder) -> None:
    with azurite.container("bucket") as bucket:
        marks = {"hdi_isfolder": "true", "is_directory": "false"}
        bucket.upload_blob(f"{folder.name}/a.jpg", b"1", metadata=marks)
    assert [info.name for info in folder.walk()] == ["a.jpg"]


def test_a_blob_that_grew_shows_by_one_byte_more(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    folder.put("a", [b"0123456789"])
    folder.put("empty", [b""])
    assert folder.read_many(["a", "empty", "a"], [4, 0, 10]) == [b"01234", b"", b"0123456789"]
    assert folder.read_ranges([("a", 7, 99)])[0] == b"789"


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_large_blobs_come_and_go_in_parts(faulty: Folder, proxy: FaultProxy) -> None:
    data = bytes(range(251)) * (33 << 12)
    proxy.faults["PUT", "/large"] = [status(503)]
    faulty.put("large", [data])
    proxy.faults["GET", "/large"] = [status(503), reset]
    [found] = faulty.read_many(["large"], [len(data)])
    assert found == data
    assert proxy.requests("GET", "/large") == 3


# --- listings -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names_alone() -> Iterator[AzureListingServer]:
    server = AzureListingServer([])
    yield server
    server.stop()


def test_a_listing_of_many_pages_goes_on_where_it_failed(
    names_alone: AzureListingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    monkeypatch.setitem(object_store.PAGE, "azure", 5)
    names = [f"{number:02d}.jpg" for number in range(30)] + ["a b", "é&<", "cat/1.jpg"]
    names_alone.names, names_alone.page = sorted(names), 5
    proxy = FaultProxy(names_alone.port)
    endpoint = f"http://127.0.0.1:{proxy.port}/account"
    options = {"account_name": "account", "account_key": "a2V5"}
    options["connection_string"] = f"BlobEndpoint={endpoint}"
    faults = proxy.faults["GET", "/bucket"] = [status(503), passes, reset, truncated]
    try:
        found = list(open_folder("az://bucket", options).walk())
    finally:
        proxy.stop()
    assert faults == []
    assert sorted(info.name for info in found) == sorted(names)
    assert all(info.etag.startswith("0x") and info.mtime_ns > 10**18 for info in found)


@settings(max_examples=20)
@given(names=NAMES, page=st.integers(1, 7))
def test_no_name_is_lost_or_comes_twice(
    names: set[str], page: int, names_alone: AzureListingServer
) -> None:
    names_alone.names, names_alone.page = sorted(names), page
    folder = open_folder("az://bucket", names_alone.options())
    assert sorted(info.name for info in folder.walk()) == names_alone.names
    assert set(folder.names()) == {name.partition("/")[0] for name in names}


def test_no_more_pages_are_asked_for_than_are_walked(
    names_alone: AzureListingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names_alone.names, names_alone.page = [f"x/{n:05d}.jpg" for n in range(2000)], 10
    monkeypatch.setitem(object_store.PAGE, "azure", 10)
    folder = open_folder("az://bucket", names_alone.options())
    before = names_alone.pages
    walk = folder.walk()
    for _ in range(100):
        next(walk)
    walk.close()
    assert names_alone.pages - before <= 13
    before = names_alone.pages
    assert folder.exists("x")
    assert names_alone.pages - before <= 3


# --- credentials --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [WRONG_KEY, "this-is-no-key-but-a-secret"])
def test_credentials_that_are_wrong_are_said_at_once(key: str, azurite: Azurite) -> None:
    folder = open_folder("az://bucket/x", azurite.options(key=key))
    for action, doing, name in [
        (lambda: folder.read("a"), "read", "/a"),
        (lambda: folder.size("a"), "look at", "/a"),
        (folder.names, "list", ""),
        (folder.sizes, "list", ""),
        (lambda: folder.put("a", [b"1"]), "write", "/a"),
        (lambda: folder.create("a", [b"1"]), "write", "/a"),
        (lambda: folder.remove("a"), "remove", "/a"),
    ]:
        with pytest.raises(StorageError) as caught:
            action()
        said = str(caught.value)
        assert said.startswith(f"cannot {doing} az://bucket/x{name}: ")
        assert said.endswith("; check the credentials and what they may do")
        assert "\n" not in said
        assert key not in said


def test_no_credentials_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_NAME", "CONNECTION_STRING"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with pytest.raises(UsageError, match=r"az:// needs the name of an account; give acc"):
        precache.open("az://bucket/x")


# --- commits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Meeting(RemoteFolder):
    """A store of two committers, neither of whom commits before the other has read the log."""

    barrier: threading.Barrier = threading.Barrier(2)  # noqa: RUF009 - shared on purpose

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        if name == "commits/000001.json":
            self.barrier.wait(30)
        return super().create(name, parts, scratch)


def test_two_who_commit_at_once_both_end_up_in_the_log(azurite: Azurite) -> None:
    store = _Meeting("az", f"bucket/azure-{next(_numbers)}", azurite.options())
    versions = ["a" * 32, "b" * 32]
    threads = [threading.Thread(target=append_entry, args=[store, v]) for v in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = read_commits(store)
    assert (first.number, second.number) == (1, 2)
    assert {first.version, second.version} == set(versions)
    assert (first.parent, second.parent) == (None, first.version)


def test_a_commit_whose_answer_was_lost_counts_as_ours(faulty: Folder, proxy: FaultProxy) -> None:
    proxy.faults["PUT", "/1.json"] = [status(503)]
    assert faulty.create("1.json", [b"mine"])
    assert proxy.requests("PUT", "/1.json") == 2
    assert not faulty.create("1.json", [b"another's"])
    assert faulty.read("1.json") == b"mine"


# --- the whole road -----------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["serial", "local"])
def test_from_container_to_container_to_training(
    address: str, photos: str, azurite: Azurite, tmp_path: Path
) -> None:
    options = azurite.options()
    store = f"az://bucket/store-{next(_numbers)}"
    assert_whole_road(photos, store, options, tmp_path, address)
    stored = open_folder(store, options)
    assert not any(Azurite.KEY.encode() in stored.read(info.name) for info in stored.walk())


def test_a_version_goes_there_and_back_and_is_the_same(
    photos: str, azurite: Azurite, tmp_path: Path
) -> None:
    options = azurite.options()
    build: dict[str, Any] = {"address": "serial", "shard_samples": 4, "storage_options": options}
    result = precache.build(photos, tmp_path / "built", RECIPE, **build)
    url = f"az://bucket/store-{next(_numbers)}"
    pushed = precache.pull(tmp_path / "built", url, storage_options=options)
    assert (pushed.version, pushed.skipped) == (result.version, 0)
    pushed = precache.pull(tmp_path / "built", url, storage_options=options)
    assert pushed.skipped == result.shards == 4
    precache.pull(url, tmp_path / "back", storage_options=options)
    assert contents(tmp_path / "back") == contents(tmp_path / "built")
    assert precache.verify(tmp_path / "back").ok


# --- faults -------------------------------------------------------------------------------------


def test_a_service_that_is_busy_for_long_is_waited_for(faulty: Folder, proxy: FaultProxy) -> None:
    faulty.put("a", [b"1"])
    waiting = proxy.faults["GET", "/a"] = [status(503)] * 7
    assert faulty.read("a") == b"1"
    assert waiting == []


def test_a_listing_through_a_bad_network_is_whole(faulty: Folder, proxy: FaultProxy) -> None:
    names = [f"{n}/{m}.jpg" for n in range(6) for m in range(2)]
    for name in names:
        faulty.put(name, [b"1"])
    for found in (lambda: [info.name for info in faulty.walk()], faulty.sizes):
        waiting = [status(503), reset, status(500), truncated, status(429)]
        proxy.faults["GET", "/bucket"] = waiting
        assert sorted(found()) == names
        assert waiting == []


def test_whatever_breaks_off_is_asked_for_again(faulty: Folder, proxy: FaultProxy) -> None:
    faulty.put("a/1.jpg", [b"1"])
    faulty.put("b/1.jpg", [b"1"])
    for ending, action in [
        ("/bucket", lambda: faulty.names() == ["a", "b"]),
        ("/bucket", lambda: faulty.sizes("a") == {"a/1.jpg": 1}),
        ("/a/1.jpg", lambda: faulty.read("a/1.jpg") == b"1"),
        ("/bucket", lambda: faulty.remove("b") is None),
    ]:
        waiting = proxy.faults["GET", ending] = [reset, reset]
        assert action()
        assert waiting == []
    assert faulty.names() == ["a"]


@pytest.mark.parametrize("code", [401, 403])
def test_what_is_forbidden_is_not_asked_for_again(
    code: int, faulty: Folder, proxy: FaultProxy
) -> None:
    faulty.put("a", [b"1"])
    for method, ending, action in [
        ("GET", "/a", lambda: faulty.read("a")),
        ("POST", "/bucket", lambda: faulty.remove("a")),
    ]:
        proxy.faults[method, ending] = [status(code)] * 9
        with pytest.raises(StorageError, match=r"cannot .* az://bucket/.*/a: .*; check the cred"):
            action()
        assert proxy.requests(method, ending) == 1


def test_a_build_through_a_bad_network_is_the_build_through_a_good_one(
    photos: str, azurite: Azurite, proxy: FaultProxy, tmp_path: Path
) -> None:
    faults: list[list[Fault]] = [
        [status(503), status(500)],
        [status(429, retry_after=0), reset],
        [reset, reset],
        [truncated, status(502)],
    ]
    for number in range(12):
        proxy.faults["GET", f"/{number:02d}.jpg"] = list(faults[number % 4])
    proxy.faults["PUT", "/c/1/0/0/0"] = [status(503), reset]
    proxy.faults["PUT", "/000001.json"] = [status(500)]
    for name, port in (("good", azurite.port), ("bad", proxy.port)):
        store = f"az://bucket/store-{next(_numbers)}"
        build: dict[str, Any] = {"address": "serial", "shard_samples": 4}
        precache.build(photos, store, RECIPE, storage_options=azurite.options(port), **build)
        precache.pull(store, tmp_path / name, storage_options=azurite.options())
    assert not any(proxy.faults.values())
    assert contents(tmp_path / "bad") == contents(tmp_path / "good")


def test_wrong_bytes_on_the_way_are_noticed(
    photos: str, azurite: Azurite, proxy: FaultProxy, tmp_path: Path
) -> None:
    store = f"az://bucket/store-{next(_numbers)}"
    build: dict[str, Any] = {"address": "serial", "storage_options": azurite.options()}
    precache.build(photos, store, RECIPE, **build)
    precache.pull(store, tmp_path / "right", storage_options=azurite.options())
    shard = "/image/c/0/0/0/0"
    proxy.faults["GET", shard] = [wrong_bytes]
    precache.pull(store, tmp_path / "once", storage_options=azurite.options(proxy.port))
    assert proxy.faults["GET", shard] == []
    assert contents(tmp_path / "once") == contents(tmp_path / "right")
    proxy.faults["GET", shard] = [wrong_bytes] * 10
    with pytest.raises(DamageError, match=rf"{shard} is damaged: its checksum does not hold"):
        precache.pull(store, tmp_path / "always", storage_options=azurite.options(proxy.port))
