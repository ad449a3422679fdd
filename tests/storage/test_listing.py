"""Listings page by page: no name is lost or comes twice, and no more than a few pages are held."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from precache.errors import FetchError, SourceError, StorageError
from precache.storage import object_store, retries
from precache.storage import remote as blobs
from precache.storage.base import NO_NAME, FileInfo, is_name
from precache.storage.fsspec_services import Fsspec
from precache.storage.listing import KeyRange, Page, between
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache_workers.sources.kinds import open_source
from tests.storage.conftest import SERVERS, put_raw
from tests.support.listing_server import AzureListingServer, ListingServer
from tests.support.servers import FaultProxy, S3Server, passes, reset, status, truncated

pytest.importorskip("obstore", reason="s3:// needs obstore")

PARTS = st.text("ab0é +%&<", min_size=1, max_size=3) | st.sampled_from(["", ".", "..", "..."])
KEY = st.lists(PARTS, min_size=1, max_size=4).map("/".join).filter(bool)
NAMES = st.sets(KEY.filter(lambda key: key[-1] != "/"), max_size=40)
"""obstore hides a slash at the end: a key that differs by it alone would be one name."""
NUMBERS = st.sets(st.integers(0, 200).map("train/{:08d}.jpg".format), max_size=100)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ListingServer]]:
    """Kind of service -> its server."""
    servers = {"s3": ListingServer([]), "azure": AzureListingServer([])}
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture
def server() -> Iterator[ListingServer]:
    """A server that nothing else asks, such as the listing of an earlier test that still ends."""
    server = ListingServer([])
    yield server
    server.stop()


@pytest.mark.parametrize("kind", ["s3", "azure"])
@settings(max_examples=30)
@example(names={"/0"}, page=1)
@given(names=NAMES | NUMBERS, page=st.integers(1, 7))
def test_no_name_is_lost_or_comes_twice(
    kind: str, names: set[str], page: int, servers: dict[str, ListingServer]
) -> None:
    """Also where obstore takes one of them for no path, and the service's library lists."""
    server, left_out = servers[kind], list[str]()
    names = names if kind == "s3" else set(filter(is_name, names))  # Azure's resolves dots
    server.names, server.page = sorted(names), page
    folder = open_folder(f"{'s3' if kind == 's3' else 'az'}://bucket", server.options())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(object_store.PAGE, kind, page)
        found = [info.name for info in folder.walk(lambda name, reason: left_out.append(name))]
    assert sorted(found) == [name for name in server.names if is_name(name)]
    assert sorted(left_out) == [name for name in server.names if not is_name(name)]
    parts = {name.partition("/")[0] for name in names}
    assert set(folder.names()) == set(filter(is_name, parts))
    for first in set(folder.names()):
        below = {name[len(first) + 1 :] for name in names if name.startswith(f"{first}/")}
        parts = {name.partition("/")[0] for name in below}
        assert set(folder.names(first)) == set(filter(is_name, parts))


def test_boto3_lists_what_obstore_does(s3: S3Server) -> None:
    """The same sizes, times and entity tags: a sample is the same whoever lists it."""
    url = "s3://bucket/listed"
    for name in ("a b/1+2 é.jpg", "x&y", "deep/er/still"):
        open_folder(url, s3.options()).put(name, [name.encode()])
    by_obstore = sorted(open_folder(url, s3.options()).walk())
    put_raw(s3, "listed/odd//1.jpg")
    assert sorted(open_folder(url, s3.options()).walk()) == by_obstore
    assert all(info.etag and info.mtime_ns > 10**18 for info in by_obstore)


KEYS = ["1.jpg", "a/2.jpg", "/3.jpg", "a//4.jpg", "a/../5.jpg", "./6.jpg", "a//b/7.jpg", "a/8.jpg/"]


@pytest.mark.parametrize("protocol", SERVERS)
def test_keys_that_are_no_names_are_counted_and_never_fetched(
    protocol: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(SERVERS[protocol])
    url, left_out = f"{protocol}://bucket/odd", list[str]()
    keys = [key for key in KEYS if protocol != "az" or "./" not in key]  # its library resolves them
    for key in keys:
        put_raw(server, f"odd/{key}")
    marked = open_folder(f"{url}-marked", server.options())
    for key, data in (("cat/", b""), ("cat/1.jpg", b"1"), ("empty.jpg", b""), ("dog/", b"")):
        put_raw(server, f"odd-marked/{key}", data)
    found = sorted(info.name for info in marked.walk(lambda name, reason: left_out.append(name)))
    assert (found, left_out) == (["cat/1.jpg", "empty.jpg"], []), "marks of folders are no objects"
    assert set(marked.names()) - {"dog"} == {"cat", "empty.jpg"}
    folder = open_folder(url, server.options())
    found = sorted(info.name for info in folder.walk(lambda name, reason: left_out.append(name)))
    assert found == ["1.jpg", "a/2.jpg"]
    assert sorted(left_out) == sorted(keys[2:])
    assert folder.names() == ["1.jpg", "a"]
    assert set(folder.sizes()) == {"1.jpg", "a/2.jpg"}
    source = open_source(url, server.options())
    listing = source.list(lambda found: None)
    assert listing.table.keys == ["1.jpg", "a/2.jpg"]
    assert listing.left_out == {NO_NAME: len(keys) - 2}
    put_raw(server, "alone//1.jpg")
    alone = open_source(f"{protocol}://bucket/alone", server.options())
    with pytest.raises(SourceError, match=r"no image .*; left out: 1 with an empty part, .*rename"):
        alone.list(lambda found: None)
    for key, fetched in zip(keys, source.fetch(keys, [1] * len(keys)), strict=True):
        refused = isinstance(fetched, FetchError) and "is no name below" in str(fetched)
        assert refused == (key in keys[2:])


@example("00000999.jpg", None)
@example("00000999.jpg", "z")
@example("00000999.jpg", "00999999.jpg")
@given(low=st.text(max_size=6), high=st.none() | st.text(max_size=6))
def test_what_is_between_two_names_is(low: str, high: str | None) -> None:
    found = between(low, high)
    assert found is not None or low != "00000999.jpg"
    assert found is None or (low < found and "/" not in found)
    assert found is None or high is None or found < high


@pytest.fixture
def pages_of_ten(server: ListingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's pages are as large as S3's usual ones are to precache."""
    monkeypatch.setitem(object_store.PAGE, "s3", 10)


@pytest.mark.usefixtures("pages_of_ten")
def test_a_flat_bucket_is_listed_from_many_places_at_a_time(server: ListingServer) -> None:
    """Half of all listings are under way at once, of one folder.

    A range is split before it is known how many names are left in it: of 400 pages, 530 to 610 are
    asked for.
    """
    server.names, server.page = [f"train/{n:08d}.jpg" for n in range(4000)], 10
    together, met = threading.Barrier(blobs.LISTINGS // 2, timeout=60), threading.Event()
    answer = server.answer

    def meet(*asked: str) -> str:
        if not together.broken and server.pages > 250:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait()
                met.set()
                together.abort()
        return answer(*asked)

    server.answer = meet  # type: ignore[method-assign] - of this one server
    found = [info.name for info in open_folder("s3://bucket", server.options()).walk()]
    assert sorted(found) == server.names
    assert met.is_set()
    assert server.pages < 2 * 400
    # A service that begins at the first name in any case is listed once.
    server.names, server.starts, seen = server.names[:400], False, server.pages
    found = [info.name for info in open_folder("s3://bucket", server.options()).walk()]
    assert sorted(found) == server.names
    assert server.pages - seen < 400


@pytest.mark.usefixtures("pages_of_ten")
def test_no_more_than_a_few_pages_are_asked_for_ahead(server: ListingServer) -> None:
    """A folder is known by the first one."""
    server.names, server.page = [f"x/{n:05d}.jpg" for n in range(2000)], 10
    folder = open_folder("s3://bucket", server.options())
    assert folder.exists("x")
    assert server.pages == 1
    walk = folder.folder("x").walk()
    for _ in range(100):
        next(walk)
    walk.close()
    assert server.pages <= 13 + blobs.LISTINGS


class _Unordered(AzureListingServer):
    """Lists names in the order in which they are given; places are numbers."""

    def listed(self, prefix: str, delimiter: str, after: str) -> tuple[list[str], str]:
        names = [name for name in self.names if name.startswith(prefix)]
        place = int(after or 0)
        self.pages += 1
        more = str(place + self.page) if place + self.page < len(names) else ""
        return names[place : place + self.page], more


@pytest.mark.parametrize("odd", [[], pytest.param(["dog//x.jpg"], marks=pytest.mark.heavy)])
def test_nothing_is_lost_or_comes_twice_in_a_listing_without_order(odd: list[str]) -> None:
    names = [f"{folder}/{number:05d}.jpg" for folder in ("cat", "cat-2") for number in range(4000)]
    server = _Unordered([*names, *odd, "dog/1.jpg"], 5000)
    folder, left_out = open_folder("az://bucket", server.options()), list[str]()
    found = [info.name for info in folder.walk(lambda name, reason: left_out.append(name))]
    server.stop()
    assert sorted(found) == sorted([*names, "dog/1.jpg"])
    assert left_out == odd


def test_a_listing_that_is_not_found_after_its_first_page_is_an_error(
    server: ListingServer,
) -> None:
    server.names = [f"{number:05d}.jpg" for number in range(3000)]
    proxy, listings = FaultProxy(server.port), itertools.count()
    proxy.choose = lambda method, path: status(404) if next(listings) == 2 else None
    with pytest.raises(StorageError, match="cannot list"):
        list(open_folder("s3://bucket", server.options(proxy.port)).walk())
    proxy.stop()


def test_a_listing_of_many_pages_goes_on_where_it_failed(
    servers: dict[str, ListingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers["azure"]
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    monkeypatch.setitem(object_store.PAGE, "azure", 5)
    names = [f"{number:02d}.jpg" for number in range(30)] + ["a b", "é&<", "cat/1.jpg"]
    server.names, server.page = sorted(f"in/{name}" for name in names), 5
    proxy = FaultProxy(server.port)
    faults = proxy.faults["GET", "/bucket"] = [status(503), passes, reset, truncated]
    found = list(open_folder("az://bucket/in", server.options(proxy.port)).walk())
    proxy.stop()
    assert faults == []
    assert sorted(info.name for info in found) == sorted(names)
    assert all(info.etag.startswith("0x") and info.mtime_ns > 10**18 for info in found)


class Watched(Fsspec):
    """A service with prefixes of two files each, which counts listings that were begun."""

    def __init__(self, prefixes: int, meet: int = 1, broken: str = "") -> None:
        self.prefixes, self.broken, self.begun = prefixes, broken, 0
        self.meeting = threading.Barrier(meet, timeout=60)

    def page(self, root: str, span: KeyRange, *, again: bool) -> Page:
        self.begun += 1
        if not span.prefix:
            return Page([], [f"{number:03d}" for number in range(self.prefixes)], None)
        self.meeting.wait()
        if span.prefix == self.broken:
            raise ValueError("no such luck")
        return Page([FileInfo(f"{number}.jpg", number, -1) for number in range(2)], [], None)


def watched(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[RemoteFolder, Watched]:
    """A folder, and the service that it uses."""
    service = Watched(**options)
    monkeypatch.setattr(blobs, "open_service", lambda *_: service)
    return RemoteFolder("watched", "bucket"), service


def _listing_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("precache-list")]


def test_prefixes_are_listed_several_at_a_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until as many are being listed as may be."""
    earlier = _listing_threads()  # of a listing that another test gave up end with their pages
    folder, _ = watched(monkeypatch, prefixes=3 * blobs.LISTINGS, meet=blobs.LISTINGS)
    found = sorted(info.name for info in folder.walk())
    assert found == [f"{n:03d}/{m}.jpg" for n in range(3 * blobs.LISTINGS) for m in range(2)]
    assert set(_listing_threads()) <= set(earlier)

    folder, fs = watched(monkeypatch, prefixes=10 * blobs.LISTINGS)
    taken = {""}
    for info in folder.walk():
        taken.add(info.name.split("/")[0])
        assert fs.begun <= len(taken) + blobs.LISTINGS
    assert fs.begun == len(taken) == 10 * blobs.LISTINGS + 1

    folder, fs = watched(monkeypatch, prefixes=1000)
    walk = folder.walk()
    next(walk)
    walk.close()
    for thread in _listing_threads():
        thread.join()  # each ends with its page
    assert fs.begun <= 2 + blobs.LISTINGS


def test_a_prefix_that_cannot_be_listed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = watched(monkeypatch, prefixes=100, broken="090/")
    with pytest.raises(StorageError, match="cannot list watched://bucket/090: no such luck"):
        list(folder.walk())
    for thread in _listing_threads():
        thread.join()  # each ends with its page
