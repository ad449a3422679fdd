"""The contract of a folder, over disk, memory, S3, Google and Azure."""

import contextlib
import itertools
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from precache.errors import StorageError, UsageError
from precache.storage import base as limits
from precache.storage import remote, retries
from precache.storage.base import Folder
from precache.storage.fsspec_services import Fsspec
from precache.storage.local import LocalFolder
from precache.storage.object_store import ObjectStore
from precache.storage.open import open_folder
from tests.storage.conftest import SERVERS, Service, actions, numbers, only
from tests.support.servers import S3Server, passes, reset, status

FILES = [
    "a", "b.bin", "d/1", "d/x", "d/deep/er", "d2/1", "x[1]/a", "x*/b", "x1/a", "a b%20/+", "Kä/&'",
    "cat/1", "cat?/2", "cat#/3", "cat /4", " cat/5", "c?a#t", "c",
]  # fmt: skip
FOLDERS = ["d", "d/deep", "x[1]", "x*", "x1", "a b%20", "Kä", "cat", "cat?", "cat#", "cat ", "no"]
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
    folder, held = folder.folder(str(next(numbers))), dict[str, bytes]()
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
        looked = {name: folder.info(name) for name in infos}
        assert all(info and info.etag == infos[name].etag for name, info in looked.items())
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


def test_what_is_not_there_is_said_and_what_grew_shows_by_a_byte_more(folder: Folder) -> None:
    with pytest.raises(StorageError, match=r"cannot read .*/a: (there is no such|No such file)"):
        folder.read("a")
    folder.put("a", [b"0123456789"])
    folder.put("empty", [b""])
    assert folder.read_many(["a", "empty", "a"], [4, 0, 10]) == [b"01234", b"", b"0123456789"]
    assert folder.read_ranges([("a", 7, 99)]) == [b"789"]


NO_NAMES = ["/etc/passwd", "..", "../x", "a/../../x", "a//b", "/", "a/", ".", "./a", "a/.", "a\0b"]


@pytest.mark.parametrize("name", [*NO_NAMES, "x/" * 3000 + "x"])
def test_what_is_no_name_is_refused_by_all_and_shown_escaped(name: str, folder: Folder) -> None:
    """Libraries would resolve it: another object would be read, or one outside of the folder."""
    folder.put("own", [b"own"])
    for action in actions(folder, name):
        with pytest.raises(StorageError, match=r"is no name below .*: it must") as caught:
            action()
        assert repr(name)[:-1][:50] in str(caught.value)
        assert len(str(caught.value)) < 500
    many = folder.read_many(["own", name], [3, -1])
    for found in many, folder.read_ranges([("own", 0, 3), (name, 0, 1)]):
        assert found[0] == b"own"
        assert isinstance(found[1], StorageError)
    assert folder.sizes() == {"own": 3}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        *((url, f"{url[:5]} names no bucket; give {url[:5]}BUCKET/FOLD") for url in
          ("s3://", "gs:///", "az://", "gs:///x")),
        *((url, f"{url} names no server; give {url}SERVER/FOLD") for url in ("http://", "https://")),
        *((url, f"the address is '{url}'; give a path, such as .") for url in ("", "file://")),
        *((f"{protocol}://bucket", f"{protocol}:// is not supported; give a local path")
          for protocol in ("nowhere", "ftps", "ftp", "sftp", "zip", "data")),
    ],
)  # fmt: skip
def test_a_url_of_no_folder_is_refused(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_folder(url).exists()


def test_a_folder_travels_and_shows_no_secret(s3: S3Server) -> None:
    folder = open_folder("s3://bucket/x", s3.options())
    assert pickle.loads(pickle.dumps(folder)) == folder
    for text in (str(folder), repr(folder), folder.path("a?token=hidden")):
        assert s3.options()["secret"] not in text
        assert "hidden" not in text
    assert str(open_folder("https://user:pass@host/x?signature=y")) == "https://host/x"
    assert str(open_folder("https://user:p@ss@host/x")) == "https://host/x"


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_bucket_that_is_not_there_is_named(protocol: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(SERVERS[protocol])
    open_folder(f"{protocol}://bucket/some", server.options()).put("a", [b"1"])
    assert open_folder(f"{protocol}://bucket", server.options()).kind() == "folder"
    folder = open_folder(f"{protocol}://nowhere/x", server.options())
    assert not folder.exists()
    assert folder.kind() is None
    assert folder.names() == []
    for write in (lambda: folder.put("a", [b"1"]), lambda: folder.create("a", [b"1"])):
        with pytest.raises(StorageError, match=rf"cannot write {protocol}://nowhere/x/a: .*bucket"):
            write()


@pytest.mark.parametrize(
    ("protocol", "extra"),
    [("s3", "s3"), ("gs", "gcs"), ("az", "azure"), ("abfss", "azure"), ("hf", "hf")],
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


def test_of_many_creators_of_one_object_one_succeeds(folder: Folder) -> None:
    with ThreadPoolExecutor(8) as pool:
        created = pool.map(lambda n: folder.create("commits/000001.json", [b"%d" % n]), range(8))
    assert sorted(created) == [False] * 7 + [True]
    assert folder.names("commits") == ["000001.json"]


def test_a_copy_can_leave_alone_what_exists(folder: Folder, tmp_path: Any) -> None:
    folder.put("a", [b"new"])
    folder.put("b", [b"old"])
    assert not folder.copy("b", folder, "a", create=True)
    disk = LocalFolder(tmp_path / "disk")
    assert disk.copy("a", folder, "a", create=True)
    disk.put("b", [b"another's"])
    assert not disk.copy("b", folder, "a", create=True)
    assert not folder.copy("b", disk, "a", create=True)
    assert (folder.read("b"), disk.read("a"), disk.read("b")) == (b"old", b"new", b"another's")
    assert folder.copy("b", disk, "b")
    assert folder.copy("b", folder, "b")
    assert folder.read("b") == b"another's"


def test_a_name_with_a_wildcard_is_removed_and_no_other(folder: Folder) -> None:
    for name in ("x*/b", "x*/deep/c", "x1/a", "y?"):
        folder.put(name, [b"1"])
    folder.remove("x*")
    folder.remove("y?")
    assert folder.sizes() == {"x1/a": 1}


@only(*SERVERS)
def test_of_two_who_copy_to_one_name_at_once_one_succeeds(service: Service) -> None:
    """Another's copy comes just before this one's first request that writes."""
    here, other, copied = service.behind, service.straight, list[bool]()
    here.put("a", [b"one"])
    here.put("b", [b"another"])

    def before(method: str, path: str) -> None:
        if method in ("PUT", "POST") and not copied:
            copied.append(True)
            copied.append(other.copy("c", other, "b", create=True))

    service.proxy.before = before
    assert not here.copy("c", here, "a", create=True)
    assert copied == [True, True]
    assert other.read("c") == b"another"
    assert other.names() == ["a", "b", "c"]


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_an_object_of_many_parts_is_created_once(folder: Folder) -> None:
    """All libraries send one of this size in parts, and create it with the last request."""
    half = bytes(52 << 20)
    assert folder.create("a", [half, memoryview(half), b"1"])
    assert not folder.create("a", [half, half, b"2"])
    [end] = folder.read_ranges([("a", 2 * len(half), 9)])
    assert (folder.size("a"), end) == (2 * len(half) + 1, b"1")


@only("gs", "az")
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_large_objects_come_and_go_in_parts_even_where_one_is_sent_twice(service: Service) -> None:
    data = bytes(range(251)) * (51 << 12)  # gcsfs and obstore send 50 MiB at a time
    folder, proxy = service.behind, service.proxy
    writes = {"gs": ("POST", "/upload/storage/v1/b/bucket/o"), "az": ("PUT", "/large")}
    proxy.faults[writes[service.protocol]] = [passes, status(503), passes, status(503)]
    folder.put("large", [data])
    assert proxy.faults[writes[service.protocol]] == []
    ending = "%2Flarge" if service.protocol == "gs" else "/large"
    proxy.faults["GET", ending] = [status(503), reset]
    whole, middle, end = folder.read_ranges(
        [("large", 0, len(data)), ("large", (50 << 20) - 1, 2), ("large", len(data) - 3, 3)]
    )
    assert whole == data
    assert middle == data[(50 << 20) - 1 : (50 << 20) + 1]
    assert end == data[-3:]


@pytest.mark.parametrize("seconds", [30.0, 50.0])
def test_a_change_that_took_long_is_not_made_again(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may have been stopped; an object that must be new can be put again."""
    folder = open_folder(f"memory://late/{next(numbers)}")
    folder.put("old", [b"old"])
    folder.put("gone", [b"old"])
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(remote, "boottime", lambda: next(clock))
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
    late = seconds > remote.CHANGE_SECONDS
    refused = pytest.raises(StorageError, match="cannot") if late else contextlib.nullcontext()
    failing_once("pipe_file")
    with refused:
        folder.put("old", [b"new"])
    failing_once("rm")
    with refused:
        folder.remove("gone")
    assert folder.read("old") == (b"old" if late else b"new")
    assert folder.exists("gone") == late
