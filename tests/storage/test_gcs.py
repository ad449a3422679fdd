"""The whole road over ``gs://``, against a server that speaks Google's JSON API."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import precache
from precache.errors import UsageError
from precache.storage import retries
from precache.storage.base import Folder
from precache.storage.open import open_folder
from precache.store.commit_log import read_log
from tests.support.building import append_commit, encoded, pixels, put_photos
from tests.support.gcs_server import GCSServer
from tests.support.servers import FaultProxy, passes, status

gcsfs = pytest.importorskip("gcsfs", reason="gs:// needs gcsfs")
aiohttp = pytest.importorskip("aiohttp", reason="what gcsfs asks by")

RECIPE = precache.Recipe.image(resize=64, crop=56)
UPLOAD = "/upload/storage/v1/b/bucket/o"


@pytest.fixture
def proxy(gcs: GCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """In front of the server, with pauses too short to wait for, gcsfs's own included."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    at_once = SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0))
    monkeypatch.setattr("gcsfs.retry.asyncio", at_once)
    proxy = FaultProxy(gcs.port)
    yield proxy
    proxy.stop()
    gcsfs.core.GCSFileSystem.clear_instance_cache()


_numbers = iter(range(10**6))


@pytest.fixture
def folder(gcs: GCSServer) -> Folder:
    """An empty folder."""
    return open_folder(f"gs://bucket/{next(_numbers)}", gcs.options())


@pytest.fixture
def faulty(gcs: GCSServer, proxy: FaultProxy) -> Folder:
    """An empty folder behind the proxy."""
    return open_folder(f"gs://bucket/{next(_numbers)}", gcs.options(proxy.port))


@pytest.fixture
def photos(gcs: GCSServer) -> str:
    """A source of twelve photographs in two classes, one of them broken."""
    url = f"gs://bucket/photos-{next(_numbers)}"
    put_photos(open_folder(url, gcs.options()))
    return url


# --- the server itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "code", "span", "data"),
    [
        ("bytes=2-4", 206, "bytes 2-4/10", b"234"),
        ("bytes=7-99", 206, "bytes 7-9/10", b"789"),
        ("bytes=8-", 206, "bytes 8-9/10", b"89"),
        ("bytes=-3", 206, "bytes 7-9/10", b"789"),
        ("bytes=10-", 416, "bytes */10", None),
        ("", 200, None, b"0123456789"),
    ],
)
def test_the_server_answers_ranges_as_googles_does(
    wanted: str, code: int, span: str | None, data: bytes | None, gcs: GCSServer, folder: Folder
) -> None:
    folder.put("a b", [b"0123456789"])
    prefix = str(folder).removeprefix("gs://bucket/")
    connection = http.client.HTTPConnection("127.0.0.1", gcs.port, timeout=30)
    path = f"/storage/v1/b/bucket/o/{prefix}%2Fa%20b?alt=media"
    connection.request("GET", path, headers={"Range": wanted} if wanted else {})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Content-Range"]) == (code, span)
    body = answer.read()
    connection.close()
    assert data in (None, body)


# --- folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["option", "variable"])
def test_a_server_other_than_googles_is_not_asked_by_grpc(
    told: str, gcs: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = gcs.options()
    if told == "variable":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", options.pop("endpoint_url"))
    folder = open_folder(f"gs://bucket/{next(_numbers)}", options)
    began = time.monotonic()
    folder.put("a", [b"1"])
    assert folder.read("a") == b"1"
    assert time.monotonic() - began < 80  # one by gRPC hangs for 90 s


@pytest.mark.parametrize("content", ["no token at all", '{"refresh_token": "x"}'])
def test_credentials_that_are_none_are_no_missing_store(
    content: str, gcs: GCSServer, tmp_path: Path
) -> None:
    token = tmp_path / "token.json"
    token.write_text(content)
    with pytest.raises(UsageError, match=r"cannot use gs://: .*; check the credentials") as caught:
        precache.open("gs://bucket/x", None, {**gcs.options(), "token": str(token)})
    assert str(token) not in str(caught.value)


def test_nothing_is_asked_for_sooner_than_the_server_wishes(
    faulty: Folder, proxy: FaultProxy
) -> None:
    faulty.put("a", [b"1"])
    asked = list[float]()
    proxy.before = lambda method, path: asked.append(time.monotonic())
    proxy.faults["GET", "a"] = [status(429, 2), status(503, 1), status(503)]
    assert faulty.read_many(["a"], [1]) == [b"1"]
    waited = [second - first for first, second in itertools.pairwise(asked)]
    assert len(waited) == 3
    assert waited[0] >= 2
    assert waited[1] >= 1


def test_connections_of_the_users_own_making_are_kept(gcs: GCSServer) -> None:
    seen = list[str]()

    async def begun(session: Any, context: Any, found: Any) -> None:
        seen.append(found.method)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begun)
    options = {**gcs.options(), "session_kwargs": {"trace_configs": [trace]}}
    open_folder("gs://bucket/own", options).put("a", [b"1"])
    assert seen


def test_listings_come_page_by_page(
    gcs: GCSServer, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{kind}/{n:02d}.png" for kind in ("cat", "dog", "eel", "fox") for n in range(7)]
    for name in [*names, "notes.txt"]:
        folder.put(name, [name.encode()])
    monkeypatch.setattr(gcs, "page", 3)
    before = gcs.pages
    assert folder.names() == ["cat", "dog", "eel", "fox", "notes.txt"]
    assert gcs.pages - before == 2
    assert folder.names("dog") == [f"{n:02d}.png" for n in range(7)]
    assert gcs.pages - before == 5
    found = {info.name: info for info in folder.walk()}
    assert sorted(found) == [*names, "notes.txt"]
    assert len({info.etag for info in found.values()}) == 29
    folder.remove("dog")
    assert folder.names() == ["cat", "eel", "fox", "notes.txt"]
    folder.remove("")
    assert folder.kind() is None


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_large_objects_go_in_parts_even_where_one_is_sent_twice(
    faulty: Folder, proxy: FaultProxy
) -> None:
    data = bytes(range(251)) * (51 << 12)  # gcsfs sends 50 MiB at a time
    assert len(data) > 50 << 20
    proxy.faults["POST", UPLOAD] = [passes, status(503), passes, status(503)]
    faulty.put("large", [data])
    assert proxy.requests("POST", UPLOAD) == 5
    assert faulty.size("large") == len(data)
    whole, middle, end = faulty.read_ranges(
        [("large", 0, len(data)), ("large", (50 << 20) - 1, 2), ("large", len(data) - 3, 3)]
    )
    assert whole == data
    assert middle == data[(50 << 20) - 1 : (50 << 20) + 1]
    assert end == data[-3:]


def test_a_gateway_that_is_bad_for_longer_than_gcsfs_waits(
    faulty: Folder, proxy: FaultProxy
) -> None:
    faulty.put("a", [b"1"])
    proxy.faults["GET", "%2Fa"] = [status(502)] * 7
    assert faulty.read("a") == b"1"
    assert proxy.requests("GET", "%2Fa") == 8


# --- commits ------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_of_many_commits_by_many_none_is_lost(gcs: GCSServer) -> None:
    store = open_folder(f"gs://bucket/{next(_numbers)}", gcs.options())

    def commit(name: str) -> None:
        for number in range(8):
            append_commit(store, f"{name * 28}{number:04x}.1")

    threads = [threading.Thread(target=commit, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = read_log(store).commits
    assert [commit.number for commit in log] == list(range(1, 33))
    assert len({commit.version for commit in log}) == 32
    assert [commit.parent for commit in log] == [None, *(c.version for c in log[:-1])]


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_who_gives_up_a_large_upload_after_another_was_first_hears_that_it_exists(
    faulty: Folder, proxy: FaultProxy
) -> None:
    """To gcsfs the answer to giving it up is the failure."""
    large = [bytes(50 << 20)]
    assert faulty.create("a", large)
    proxy.choose = lambda method, path: status(404) if method == "DELETE" else None
    assert not faulty.create("a", [*large, b"1"])


# --- the whole road -----------------------------------------------------------------------------


def test_a_photo_that_was_replaced_is_noticed_though_size_and_time_are_the_same(
    gcs: GCSServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    monkeypatch.setattr(gcs, "clock", lambda: noon)
    url = f"gs://bucket/photos-{next(_numbers)}"
    source = open_folder(url, gcs.options())
    build: dict[str, Any] = {"address": "serial", "storage_options": gcs.options()}
    built = []
    for grey in (10, 200):
        photo = encoded(Image.new("L", (80, 80), grey), "BMP")
        source.put("a.bmp", [photo])
        precache.build(url, tmp_path / "store", RECIPE, **build)
        built.append(int(pixels(tmp_path / "store")["a.bmp"].mean()))
    assert built == [10, 200]
