"""The whole road over ``gs://``, against a server that speaks Google's JSON API."""

import itertools
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from PIL import Image

import precache
from precache.errors import UsageError
from precache.storage.open import open_folder
from tests.storage.conftest import RECIPE, Service, numbers, only
from tests.support.building import encoded, pixels
from tests.support.gcs_server import GCSServer
from tests.support.servers import status


def test_a_server_other_than_googles_that_a_variable_names_is_not_asked_by_grpc(
    gcs: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = gcs.options()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", options.pop("endpoint_url"))
    folder = open_folder(f"gs://bucket/{next(numbers)}", options)
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
        precache.open("gs://bucket/x", {**gcs.options(), "token": str(token)})
    assert str(token) not in str(caught.value)


@only("gs")
def test_nothing_is_asked_for_sooner_than_the_server_wishes(service: Service) -> None:
    """And again where a gateway is bad for longer than gcsfs waits."""
    faulty, proxy, asked = service.behind, service.proxy, list[float]()
    faulty.put("a", [b"1"])
    proxy.before = lambda method, path: asked.append(time.monotonic())
    proxy.faults["GET", "a"] = [status(429, 2), status(503, 1), status(503), *[status(502)] * 7]
    assert faulty.read_many(["a"], [1]) == [b"1"]
    waited = [second - first for first, second in itertools.pairwise(asked)]
    assert len(waited) == 10
    assert waited[0] >= 2
    assert waited[1] >= 1


def test_connections_of_the_users_own_making_are_kept(gcs: GCSServer) -> None:
    import aiohttp  # which gcsfs asks by

    trace, begun = aiohttp.TraceConfig(), AsyncMock()
    trace.on_request_start.append(begun)
    options = {**gcs.options(), "session_kwargs": {"trace_configs": [trace]}}
    open_folder("gs://bucket/own", options).put("a", [b"1"])
    assert begun.called


@only("gs")
def test_listings_come_page_by_page(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs, folder = service.server, service.straight
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


@only("gs")
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_who_gives_up_a_large_upload_after_another_was_first_hears_that_it_exists(
    service: Service,
) -> None:
    """To gcsfs the answer to giving it up is the failure."""
    faulty, proxy = service.behind, service.proxy
    large = [bytes(50 << 20)]
    assert faulty.create("a", large)
    proxy.choose = lambda method, path: status(404) if method == "DELETE" else None
    assert not faulty.create("a", [*large, b"1"])


def test_a_photo_that_was_replaced_is_noticed_though_size_and_time_are_the_same(
    gcs: GCSServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    monkeypatch.setattr(gcs, "clock", lambda: noon)
    url = f"gs://bucket/photos-{next(numbers)}"
    source = open_folder(url, gcs.options())
    build: dict[str, Any] = {"address": "serial", "storage_options": gcs.options()}
    built = []
    for grey in (10, 200):
        photo = encoded(Image.new("L", (80, 80), grey), "BMP")
        source.put("a.bmp", [photo])
        precache.build(url, tmp_path / "store", RECIPE, **build)
        built.append(int(pixels(tmp_path / "store")["a.bmp"].mean()))
    assert built == [10, 200]
