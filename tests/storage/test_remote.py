"""Folders in blob storage, against servers that speak the protocol, with and without faults."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import precache
from precache.errors import (
    BuildError,
    PrecacheError,
    SourceError,
    StorageError,
    StoreError,
    UsageError,
)
from precache.storage import base as limits
from precache.storage import remote as blobs
from precache.storage import retries
from precache.storage.base import Buffer, Folder
from precache.storage.fsspec_services import Fsspec
from precache.storage.local import LocalFolder
from precache.storage.object_store import ObjectStore
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache.store.commit_log import append_entry, read_commits, require_create_only
from precache_workers.sources.kinds import open_source
from tests.conftest import BuiltStore
from tests.support.building import (
    assert_whole_road,
    contents,
    environment,
    put_photos,
    remains,
    running,
    write_jpegs,
)
from tests.support.servers import (
    Azurite,
    FaultProxy,
    S3Server,
    error_document,
    status,
    web_server,
)

SECRET = "a-secret-that-nobody-may-see"
RECIPE = precache.Recipe.image(resize=64, crop=56)


_numbers = iter(range(10**6))


SERVERS = {"s3": "s3", "gs": "gcs", "az": "azurite"}
"""Protocol -> the fixture of its server."""


@pytest.fixture(params=[*SERVERS, "memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder."""
    number = next(_numbers)
    if request.param == "disk":
        return LocalFolder(tmp_path / "root")
    if request.param == "memory":
        return open_folder(f"memory://test/{number}")
    server = request.getfixturevalue(SERVERS[request.param])
    return open_folder(f"{request.param}://bucket/{number}", server.options())


@pytest.fixture
def faulty(s3: S3Server, proxy: FaultProxy) -> Folder:
    """An empty folder behind the proxy."""
    return open_folder(f"s3://bucket/{next(_numbers)}", s3.options(proxy.port))


# --- folders ------------------------------------------------------------------------------------

FILES = [
    "a",
    "b.bin",
    "d/1",
    "d/x",
    "d/deep/er",
    "d2/1",
    "x[1]/a",
    "x*/b",
    "x1/a",
    "a b%20/+",
    "Kä/&'",
]
FOLDERS = ["d", "d/deep", "x[1]", "x*", "x1", "a b%20", "Kä", "nowhere"]
FILE = st.sampled_from(FILES)
PARTS = st.lists(st.binary(max_size=9), max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("put"), FILE, PARTS),
    st.tuples(st.just("create"), FILE, PARTS),
    st.tuples(st.just("copy"), FILE, FILE, st.booleans()),
    st.tuples(st.just("remove"), FILE | st.sampled_from(FOLDERS)),
)


@settings(
    phases=[Phase.generate],  # to shrink takes minutes at a service
    max_examples=5,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(STEPS, min_size=6, max_size=12), data=st.data())
def test_a_folder_is_a_mapping_of_names_to_bytes(
    steps: list[tuple[Any, ...]], data: st.DataObject, folder: Folder
) -> None:
    folder, held = folder.folder(str(next(_numbers))), dict[str, bytes]()
    for what, name, *rest in steps:
        if what == "remove":
            folder.remove(name)
            held = {n: d for n, d in held.items() if n != name and not n.startswith(f"{name}/")}
        elif what == "copy":
            other, create = rest
            if other in held and other != name:
                there = create and name in held
                assert folder.copy(name, folder, other, create=create) == (not there)
                held[name] = held[name if there else other]
        elif what == "put":
            folder.put(name, rest[0])
            held[name] = b"".join(rest[0])
        else:
            assert folder.create(name, map(memoryview, rest[0])) == (name not in held)
            held.setdefault(name, b"".join(rest[0]))
    local = folder.local("")
    for path in sorted(local.rglob("*"), reverse=True) if local else ():
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()  # a disk keeps folders that are empty
    sizes = {name: len(content) for name, content in held.items()}
    if held:
        infos = {info.name: info for info in folder.walk()}
        assert {name: info.size for name, info in infos.items()} == folder.sizes() == sizes
        assert all(info.mtime_ns > 10**18 for info in infos.values())
        assert folder.kind() == "folder"
    assert folder.names() == sorted({name.partition("/")[0] for name in held})
    for place in data.draw(st.permutations(FOLDERS))[:3]:
        below = {n: s for n, s in sizes.items() if n.startswith(f"{place}/")}
        assert folder.sizes(place) == below
        assert folder.names(place) == sorted({n[len(place) + 1 :].partition("/")[0] for n in below})
        assert folder.exists(place) == bool(below)
    asked = data.draw(st.permutations(FILES))
    for given_sizes in ([sizes.get(name, -1) for name in asked], [-1] * len(asked)):
        for name, found in zip(asked, folder.read_many(asked, given_sizes), strict=True):
            missing = isinstance(found, StorageError) and f"{name}: " in str(found)
            assert found == held.get(name) or (missing and name not in held)
    for name in asked[:3]:
        assert (folder.size(name), folder.exists(name)) == (sizes.get(name), name in held)
        assert folder.get(name) == held.get(name)
        assert folder.folder(name).kind() == ("file" if name in held else None)
    ranges = [(name, 1, 4) for name in asked if sizes.get(name, 0) > 5]
    assert folder.read_ranges(ranges) == [held[name][1:5] for name, *_ in ranges]


@pytest.mark.parametrize("seconds", [30.0, 50.0])
def test_a_change_that_took_long_is_not_made_again(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may have been stopped; an object that must be new can be put again."""
    folder = open_folder("memory://remote/late")
    folder.put("old", [b"old"])
    folder.put("gone", [b"old"])
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(blobs, "boottime", lambda: next(clock))
    monkeypatch.setattr(retries, "pause", lambda number, error: 0.0)

    def failing_once(name: str) -> None:
        action, failed = getattr(MemoryFileSystem, name), []

        def act(*args: Any, **options: Any) -> Any:
            if not failed:
                failed.append(args)
                raise ConnectionResetError("by the server")
            return action(*args, **options)

        monkeypatch.setattr(MemoryFileSystem, name, act)

    failing_once("pipe_file")
    assert folder.create("new", [b"new"])
    late = seconds > blobs.CHANGE_SECONDS
    refused = pytest.raises(StorageError, match="cannot") if late else contextlib.nullcontext()
    failing_once("pipe_file")
    with refused:
        folder.put("old", [b"new"])
    failing_once("rm")
    with refused:
        folder.remove("gone")
    assert folder.read("old") == (b"old" if late else b"new")
    assert folder.exists("gone") == late


def test_a_small_object_is_read_no_further_than_its_limit(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_DOCUMENT", 1000)
    folder.put("right.json", [b"1" * 1000])
    folder.put("large.json", [b"1" * 5000])
    folder.put("empty.json", [b""])
    sizes = list[int]()
    for kind in (Fsspec, ObjectStore):

        def counted(own: Any, *arguments: Any, read: Any = kind.read, **options: Any) -> list[Any]:
            found: list[Any] = read(own, *arguments, **options)
            sizes.extend(len(each) for each in found if isinstance(each, bytes))
            return found

        monkeypatch.setattr(kind, "read", counted)
    names = ["right.json", "large.json", "empty.json"]
    right, large, empty = folder.read_many(names, [-1, -1, -1])
    assert (right, empty) == (b"1" * 1000, b"")
    words = r"large\.json: it has (5,000 bytes, )?more than the 1,000 bytes"
    assert re.search(words, str(large))
    with pytest.raises(StorageError, match=words):
        folder.get("large.json")
    assert folder.get("empty.json") == b""
    assert max(sizes, default=1001) == 1001  # none are counted on a disk
    assert folder.read("large.json") == b"1" * 5000


def test_what_is_not_there_is_said(folder: Folder) -> None:
    assert folder.kind() is None
    assert folder.size("a") is None
    assert not folder.exists("a")
    assert folder.names("a") == []
    with pytest.raises(
        StorageError, match=r"cannot read .*/a: (there is no such obj|No such file)"
    ):
        folder.read("a")
    folder.remove("a")


def test_an_object_that_grew_shows_by_a_byte_more(folder: Folder) -> None:
    folder.put("a", [b"0123456789"])
    folder.put("empty", [b""])
    assert folder.read_many(["a", "empty", "a"], [4, 0, 10]) == [b"01234", b"", b"0123456789"]
    assert folder.read_ranges([("a", 7, 99)]) == [b"789"]


def test_what_a_service_says_of_the_contents_is_in_the_row_table(s3: S3Server) -> None:
    url = f"s3://bucket/{next(_numbers)}"
    for name in ("cat/1.jpg", "dog/2.jpg"):
        open_folder(url, s3.options()).put(name, [name.encode()])
    table = open_source(url, s3.options()).list(lambda found: None).table
    assert table.keys == ["cat/1.jpg", "dog/2.jpg"]
    assert table.sizes.tolist() == [9, 9]
    assert table.etags == [hashlib.md5(key.encode()).hexdigest() for key in table.keys]
    assert (table.mtimes > 10**18).all()


def test_of_many_creators_of_one_object_one_succeeds(folder: Folder) -> None:
    created: list[bool] = []

    def create(number: int) -> None:
        created.append(folder.create("commits/000001.json", [b"%d" % number]))

    threads = [threading.Thread(target=create, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * 7 + [True]
    assert folder.names("commits") == ["000001.json"]


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_bucket_that_is_not_there_is_named(protocol: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(SERVERS[protocol])
    folder = open_folder(f"{protocol}://nowhere/x", server.options())
    assert not folder.exists()
    assert folder.kind() is None
    assert folder.names() == []
    for write in (lambda: folder.put("a", [b"1"]), lambda: folder.create("a", [b"1"])):
        with pytest.raises(StorageError, match=rf"cannot write {protocol}://nowhere/x/a: .*bucket"):
            write()


@pytest.mark.parametrize("protocol", ["s3", "az"])
def test_what_may_not_be_removed_is_named(protocol: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(SERVERS[protocol])
    proxy = FaultProxy(server.port)
    folder = open_folder(f"{protocol}://bucket/{next(_numbers)}", server.options(proxy.port))
    folder.put("a", [b"1"])
    proxy.choose = lambda method, path: status(403) if method == "POST" else None
    try:
        with pytest.raises(StorageError, match=r"cannot remove .*/a: .*403.*; check the creden"):
            folder.remove("a")
        assert proxy.requests("POST", "") == 1
    finally:
        proxy.stop()


def test_a_folder_travels_and_shows_no_secret(s3: S3Server) -> None:
    folder = open_folder("s3://bucket/x", s3.options())
    assert pickle.loads(pickle.dumps(folder)) == folder
    for text in (str(folder), repr(folder), folder.path("a?token=hidden")):
        assert SECRET not in text
        assert "hidden" not in text
    assert str(open_folder("https://user:pass@host/x?signature=y")) == "https://host/x"
    assert str(open_folder("https://user:p@ss@host/x")) == "https://host/x"


@pytest.mark.parametrize("url", ["s3://", "gs:///", "az://"])
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=rf"{url[:5]} names no bucket; give {url[:5]}BUCKET/FOLD"):
        open_folder(url)


def test_a_store_that_is_not_there_is_named_without_the_secrets_of_its_url(s3: S3Server) -> None:
    for action in (precache.open, precache.versions, precache.verify):
        with pytest.raises(StoreError, match=r"there is no store at s3://bucket/none") as caught:
            action("s3://bucket/none?signature=hidden", storage_options=s3.options())
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("protocol", "extra"), [("s3", "s3"), ("gs", "gcs"), ("az", "azure"), ("abfss", "azure")]
)
def test_a_library_that_is_not_installed_is_named_with_the_way_to_it(
    protocol: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any, **options: Any) -> None:
        raise ImportError

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=rf"{protocol}:// needs .*'precache\[{extra}\]'"):
        open_folder(f"{protocol}://bucket").exists()


@pytest.mark.parametrize("protocol", ["nowhere", "ftps", "ftp", "sftp", "zip", "data"])
def test_a_protocol_that_is_none_is_said(protocol: str) -> None:
    with pytest.raises(UsageError, match=rf"{protocol}:// is not supported; give a local path"):
        open_folder(f"{protocol}://bucket").exists()


# --- listing ------------------------------------------------------------------------------------


class Watched(AbstractFileSystem):  # type: ignore[misc] - fsspec has no types
    """A bucket of some prefixes of two files each, which counts listings that were begun."""

    protocol = "watched"
    cachable = False

    def __init__(self, prefixes: int, meet: int = 1, broken: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.prefixes, self.broken = prefixes, broken
        self.meeting = threading.Barrier(meet, timeout=60)
        self.begun = 0

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[dict[str, Any]]:
        self.begun += 1
        if path == "bucket":
            found = [f"{path}/{n:03d}" for n in range(self.prefixes)]
            return [{"name": name, "size": 0, "type": "directory"} for name in found]
        self.meeting.wait()
        if path == self.broken:
            raise ValueError("no such luck")
        return [{"name": f"{path}/{n}.jpg", "size": n, "type": "file"} for n in range(2)]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": 0, "type": "directory"}


def watched(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[RemoteFolder, Watched]:
    """A folder, and the one file system that it uses."""
    service = Fsspec("memory", {})
    service.fs = fs = Watched(**options)
    monkeypatch.setattr(blobs, "open_service", lambda *_: service)
    return RemoteFolder("watched", "bucket"), fs


def _listing_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("precache-list")]


def test_prefixes_are_listed_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until as many are being listed as may be."""
    folder, _ = watched(monkeypatch, prefixes=3 * blobs.LISTINGS, meet=blobs.LISTINGS)
    found = sorted(info.name for info in folder.walk())
    assert found == [f"{n:03d}/{m}.jpg" for n in range(3 * blobs.LISTINGS) for m in range(2)]
    assert _listing_threads() == []


def test_no_more_listings_are_held_than_are_made_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, fs = watched(monkeypatch, prefixes=10 * blobs.LISTINGS)
    taken = {""}
    for info in folder.walk():
        taken.add(info.name.split("/")[0])
        assert fs.begun <= len(taken) + blobs.LISTINGS
    assert fs.begun == len(taken) == 10 * blobs.LISTINGS + 1


def test_a_prefix_that_cannot_be_listed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = watched(monkeypatch, prefixes=100, broken="bucket/090")
    with pytest.raises(StorageError, match="cannot list watched://bucket/090: no such luck"):
        list(folder.walk())
    for thread in _listing_threads():
        thread.join()  # each ends with its page


def test_threads_of_a_walk_that_is_left_end_with_their_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, fs = watched(monkeypatch, prefixes=1000)
    walk = folder.walk()
    next(walk)
    walk.close()
    for thread in _listing_threads():
        thread.join()
    assert fs.begun <= 2 + blobs.LISTINGS


# --- faults -------------------------------------------------------------------------------------


def test_a_server_that_stays_busy_is_an_error_in_the_end(
    faulty: Folder,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ObjectStore, "attempts", 3)
    faulty.put("a", [b"1"])
    proxy.faults["GET", "/a"] = [status(503)] * 1000
    with pytest.raises(StorageError, match=r"cannot read s3://bucket/\d+/a"):
        faulty.read("a")
    [said] = [r.message for r in caplog.records if r.name == "precache.storage.remote"]
    assert "cannot read s3://bucket/" in said
    assert "; trying again in " in said


def test_the_server_decides_how_long_to_wait() -> None:
    class Busy(OSError):
        status = 503
        headers = {"Retry-After": "7"}  # noqa: RUF012 - never changed

    assert retries.pause(0, Busy()) == 7
    assert all(0.1 < retries.pause(0, TimeoutError()) < 0.4 for _ in range(50))
    assert all(retries.pause(n, TimeoutError()) <= 1.5 * retries.LONGEST_PAUSE for n in range(20))


def test_of_two_conditional_writes_at_once_the_one_that_s3_sent_away_is_made_again(
    faulty: Folder, proxy: FaultProxy
) -> None:
    proxy.faults["PUT", "/1.json"] = [error_document(409, "ConditionalRequestConflict")] * 2
    assert faulty.create("1.json", [b"mine"])
    assert proxy.requests("PUT", "/1.json") == 3


def test_a_failed_precondition_means_that_it_exists_whatever_else_a_service_says(
    faulty: Folder, proxy: FaultProxy
) -> None:
    assert faulty.create("1.json", [b"mine"])
    proxy.faults["PUT", "/1.json"] = [error_document(412, "PreconditionFailed")]
    assert not faulty.create("1.json", [b"another's"])
    proxy.faults["PUT", "/1.json"] = [error_document(412, "PreconditionFailed")]
    with pytest.raises(StorageError, match=r"cannot write s3://.*/1\.json: it exists, and the"):
        faulty.put("1.json", [b"another's"])


NO_NAMES = ["/etc", "..", "../x", "a//b", "a/", "./a", "a/..", "a\0b", "x/" * 3000]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_is_refused_by_all(name: str) -> None:
    """Libraries would resolve it: another object would be read, or one outside of the folder."""
    folder = open_folder("memory://names/a/b")
    folder.put("own", [b"own"])
    for action in (
        lambda: folder.read(name),
        lambda: folder.get(name),
        lambda: folder.size(name),
        lambda: folder.exists(name),
        lambda: folder.names(name),
        lambda: folder.sizes(name),
        lambda: folder.folder(name),
        lambda: folder.put(name, [b"new"]),
        lambda: folder.create(name, [b"new"]),
        lambda: folder.copy(name, folder, "own"),
        lambda: folder.copy(name, folder, "own", create=True),
        lambda: folder.copy("copied", folder, name),
        lambda: folder.remove(name),
    ):
        with pytest.raises(StorageError, match=r"is no name below memory://names/a/b: it must"):
            action()
    many = folder.read_many(["own", name], [3, -1])
    for found in many, folder.read_ranges([("own", 0, 3), (name, 0, 1)]):
        assert found[0] == b"own"
        assert isinstance(found[1], StorageError)
    assert open_folder("memory://names").sizes() == {"a/b/own": 3}


def test_a_service_that_creates_again_what_exists_is_refused_before_a_build_writes(
    s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = f"s3://bucket/{next(_numbers)}", s3.options(proxy.port)
    require_create_only(open_folder(url, options), "tmp")
    assert open_folder(url, options).names() == []
    proxy.ignored = frozenset({"If-None-Match"})
    for place in (url, f"{url}/folder"):
        with pytest.raises(StorageError, match=rf"{place}\S* lets a create-only write overwrite"):
            require_create_only(open_folder(place, options), "tmp")
    assert open_folder(url, options).names() == []
    with pytest.raises(StorageError, match=r"its service ignores If-None-Match; give a store on"):
        precache.build(write_jpegs(tmp_path / "in", 3), url, RECIPE, address="serial",
                       storage_options=options)  # fmt: skip
    assert open_folder(url, options).names() == []


def test_a_disk_is_found_to_create_only(tmp_path: Path) -> None:
    require_create_only(LocalFolder(tmp_path), "tmp")
    assert list(LocalFolder(tmp_path).walk()) == []


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_an_object_of_many_parts_is_created_once(folder: Folder) -> None:
    """All libraries send one of this size in parts, and create it with the last request."""
    half = bytes(52 << 20)
    assert folder.create("a", [half, memoryview(half), b"1"])
    assert not folder.create("a", [half, half, b"2"])
    [end] = folder.read_ranges([("a", 2 * len(half), 9)])
    assert (folder.size("a"), end) == (2 * len(half) + 1, b"1")


def test_a_copy_can_leave_alone_what_exists(folder: Folder, tmp_path: Path) -> None:
    folder.put("a", [b"new"])
    assert folder.copy("b", folder, "a", create=True)
    assert not folder.copy("b", folder, "a", create=True)
    folder.put("b", [b"old"])
    assert not folder.copy("b", folder, "a", create=True)
    disk = LocalFolder(tmp_path)
    assert disk.copy("a", folder, "a", create=True)
    disk.put("b", [b"another's"])
    assert not disk.copy("b", folder, "a", create=True)
    assert not folder.copy("b", disk, "a", create=True)
    assert (folder.read("b"), disk.read("a"), disk.read("b")) == (b"old", b"new", b"another's")


@pytest.mark.parametrize("protocol", SERVERS)
def test_of_two_who_copy_to_one_name_at_once_one_succeeds(
    protocol: str, request: pytest.FixtureRequest
) -> None:
    """Another's copy comes just before this one's first request that writes."""
    server = request.getfixturevalue(SERVERS[protocol])
    url = f"{protocol}://bucket/{next(_numbers)}"
    proxy = FaultProxy(server.port)
    here, other = (open_folder(url, server.options(port)) for port in (proxy.port, None))
    here.put("a", [b"one"])
    here.put("b", [b"another"])
    copied: list[bool] = []

    def before(method: str, path: str) -> None:
        if method in ("PUT", "POST") and not copied:
            copied.append(True)
            copied.append(other.copy("c", other, "b", create=True))

    proxy.before = before
    try:
        assert not here.copy("c", here, "a", create=True)
    finally:
        proxy.stop()
        if protocol == "gs":
            type(here._service.fs).clear_instance_cache()  # type: ignore[attr-defined]
    assert copied == [True, True]
    assert other.read("c") == b"another"
    assert other.names() == ["a", "b", "c"]


# --- the whole road -----------------------------------------------------------------------------


@pytest.fixture
def remote_photos(s3: S3Server) -> str:
    """A source of twelve photographs in two classes, one of them broken."""
    url = f"s3://bucket/photos-{next(_numbers)}"
    put_photos(open_folder(url, s3.options()))
    return url


def test_a_shard_takes_a_look_at_the_lease_and_two_objects(
    s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    source, options = write_jpegs(tmp_path / "in", 13), s3.options(proxy.port)

    def requests(rows: int) -> int:
        """But those of the log of finished shards, which go by the clock."""
        proxy.seen.clear()
        store = f"s3://bucket/store-{next(_numbers)}"
        build = {"address": "serial", "shard_samples": rows, "storage_options": options}
        assert precache.build(source, store, RECIPE, **build).shards == -(-13 // rows)
        return sum(count for (_, path), count in proxy.seen.items() if "/finished/" not in path)

    assert requests(4) - requests(16) == 3 * (4 - 1)


@pytest.mark.parametrize(
    ("protocol", "address"),
    [
        *((protocol, "serial") for protocol in SERVERS),
        ("az", "local"),
        *(pytest.param(protocol, "local", marks=pytest.mark.heavy) for protocol in ("s3", "gs")),
    ],
)
def test_from_bucket_to_bucket_to_training(
    protocol: str, address: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue(SERVERS[protocol])
    photos, store = (f"{protocol}://bucket/{kind}-{next(_numbers)}" for kind in ("in", "store"))
    put_photos(open_folder(photos, server.options()))
    assert_whole_road(photos, store, server.options(), tmp_path, address)
    stored = open_folder(store, server.options())
    for secret in (SECRET, Azurite.KEY):
        assert not any(secret.encode() in stored.read(info.name) for info in stored.walk())


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_version_goes_there_and_back_and_is_the_same(
    protocol: str, stores: dict[str, BuiltStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    built, url = stores["image"], f"{protocol}://bucket/store-{next(_numbers)}"
    options = request.getfixturevalue(SERVERS[protocol]).options()
    for skipped in (0, built.result.shards):
        pushed = precache.push(built.path, url, storage_options=options)
        assert (pushed.version, pushed.skipped) == (built.result.version, skipped)
    back = precache.pull(url, tmp_path / "back", storage_options=options)
    assert contents(Path(back.path)) == contents(built.version_folder)
    assert precache.verify(tmp_path / "back").ok


@dataclass(frozen=True)
class _Meeting(RemoteFolder):
    """A store of two committers, neither of whom commits before the other has read the log."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        if name == "commits/000001.json":
            self.barrier.wait(30)
        return super().create(name, parts, scratch)


@pytest.mark.parametrize("protocol", SERVERS)
def test_two_who_commit_at_once_both_end_up_in_the_log(
    protocol: str, request: pytest.FixtureRequest
) -> None:
    options = request.getfixturevalue(SERVERS[protocol]).options()
    store = _Meeting(protocol, f"bucket/{next(_numbers)}", options)
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


def test_samples_that_stay_out_of_reach_leave_the_build_to_be_continued(
    remote_photos: str, s3: S3Server, proxy: FaultProxy
) -> None:
    store = f"s3://bucket/store-{next(_numbers)}"
    build = {"address": "serial", "shard_samples": 4, "storage_options": s3.options(proxy.port)}
    proxy.faults["GET", "/05.jpg"] = [status(403)] * 50
    with pytest.raises(BuildError, match=r"1 of 4 shards are not done: .*05\.jpg"):
        precache.build(remote_photos, store, RECIPE, **build)
    proxy.faults.clear()
    result = precache.build(remote_photos, store, RECIPE, **build)
    assert (result.shards_skipped, result.failed) == (3, 1)


def test_a_build_says_nothing_of_the_secrets_of_urls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_jpegs(tmp_path / "photos", 3)
    (tmp_path / "broken" / "cat").mkdir(parents=True)
    (tmp_path / "broken" / "cat" / "0.jpg").write_bytes(b"none")
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "zarr.json").write_text("{}")
    serial: dict[str, Any] = {"address": "serial", "progress": True}
    with web_server(tmp_path) as url:
        own = url.replace("http://", f"http://someone:{SECRET}@")
        precache.build(f"{own}/photos", tmp_path / "store", RECIPE, **serial)
        for source, store, wrong in (
            (f"{own}/broken", tmp_path / "other", f"{url}/broken: none of the 1 samples tried"),
            (tmp_path, f"{own}/store", f"{url}/store is on a web server, which is read only"),
        ):
            with pytest.raises(PrecacheError, match=re.escape(wrong)) as caught:
                precache.build(source, store, RECIPE, **serial)
            assert SECRET not in str(caught.value)
        labels = f"{own}/labels.csv"
        with pytest.raises(SourceError, match="cannot read labels") as caught:
            precache.build(tmp_path / "photos", tmp_path / "other", labels=labels, **serial)
        assert SECRET not in str(caught.value)
    said = capfd.readouterr().err
    assert f"3 samples in 3 classes in {url}/photos" in said
    assert SECRET not in said


# --- pull and push ------------------------------------------------------------------------------


def test_a_pull_that_is_killed_goes_on_where_it_was(
    image_shards: Callable[[], tuple[str, str]], s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    url, _ = image_shards()
    asked, killed = threading.Event(), threading.Event()

    def hang(method: str, path: str) -> None:
        if path.endswith("/image/c/1/0/0/0"):
            asked.set()
            assert killed.wait(60)

    proxy.before = hang
    options = json.dumps(s3.options(proxy.port))
    script = (
        "import json, sys, precache\n"
        "precache.pull(*sys.argv[1:3], storage_options=json.loads(sys.argv[3]))"
    )
    line = [sys.executable, "-c", script, url, str(tmp_path / "to"), options]
    with running(line, environment()) as process:
        assert asked.wait(60)
        process.kill()
        process.wait()
        killed.set()
    with pytest.raises(precache.PrecacheError):
        precache.open(tmp_path / "to")
    precache.pull(url, tmp_path / "to", storage_options=s3.options())
    assert precache.verify(tmp_path / "to").ok
    assert remains(tmp_path / "to") == []


@pytest.fixture
def image_shards(stores: dict[str, BuiltStore], s3: S3Server) -> Callable[[], tuple[str, str]]:
    """Pushes a store; its URL, and the end of the path of its first shard."""

    def push() -> tuple[str, str]:
        url = f"s3://bucket/store-{next(_numbers)}"
        precache.pull(stores["image"].path, url, storage_options=s3.options())
        return url, "/image/c/0/0/0/0"

    return push


def test_an_unreachable_server_is_named_without_its_secrets(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    options = {**s3.options(), "endpoint_url": "http://127.0.0.1:9"}
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot read s3://bucket/nowhere/zarr\.json") as caught:
        precache.open("s3://bucket/nowhere", None, options)
    assert SECRET not in str(caught.value)
    assert time.monotonic() - began < 60
    assert isinstance(open_folder("s3://bucket", options), RemoteFolder)
