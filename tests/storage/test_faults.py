"""A table of faults between client and server, and what comes of each, for every service."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import numpy as np
import pytest

import precache
from precache.errors import DamageError, PrecacheError, StorageError
from precache.storage import retries
from precache.storage.open import open_folder
from tests.support.building import contents, cut, encoded, pixels, write
from tests.support.gcs_server import GCSServer
from tests.support.servers import (
    Azurite,
    Fault,
    FaultProxy,
    S3Server,
    reset,
    stalled,
    status,
    truncated,
    web_server,
    wrong_bytes,
)


@dataclass(frozen=True)
class Service:
    """Where objects are, straight and through a proxy: URLs, each with its storage options."""

    url: str
    options: dict[str, Any]
    faulty: str
    faulty_options: dict[str, Any]
    proxy: FaultProxy
    files: Path | None = None

    def put(self, name: str, data: bytes) -> None:
        """Also onto the web, where nobody can write."""
        folder = open_folder(self.files or self.url, None if self.files else self.options)
        folder.put(name, [data])

    def failing(self, faults: list[Fault], act: Callable[[], Any]) -> Any:
        """What an action returns whose first requests fail."""
        left = faults[::-1]
        self.proxy.choose = lambda method, path: left.pop() if left else None
        found = act()
        assert left == []
        return found

    def push(self, store: Path, name: str) -> str:
        """A copy of a store; its name in `url` and `faulty`."""
        options = None if self.files else self.options
        precache.pull(store, f"{self.files or self.url}/{name}", storage_options=options)
        return name


_numbers = iter(range(10**6))


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("web")
    with web_server(root) as url:
        yield url, root


@pytest.fixture(params=["s3", "gs", "az", "http"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """An empty folder, with pauses too short to wait for, the libraries' own included."""
    kind, place = request.param, f"bucket/faults-{next(_numbers)}"
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    if kind == "http":
        url, root = request.getfixturevalue("web")
        proxy = FaultProxy(urlsplit(url).port or 0)
        behind = f"http://127.0.0.1:{proxy.port}"
        found = Service(f"{url}/{place}", {}, f"{behind}/{place}", {}, proxy, root / place)
    else:
        server: S3Server | GCSServer | Azurite
        server = request.getfixturevalue({"s3": "s3", "gs": "gcs", "az": "azurite"}[kind])
        if kind == "gs":
            at_once = SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0))
            monkeypatch.setattr("gcsfs.retry.asyncio", at_once)
        proxy = FaultProxy(server.port)
        url, options, behind = f"{kind}://{place}", server.options(), server.options(proxy.port)
        found = Service(url, options, url, behind, proxy)
    yield found
    proxy.stop()
    if kind in ("gs", "http"):
        fsspec.get_filesystem_class(kind).clear_instance_cache()


# --- one object ---------------------------------------------------------------------------------

PASSING: dict[str, list[Fault]] = {
    "the service is busy": [status(503), status(500), status(429)],
    "it gave up waiting": [status(408), status(504)],
    "it says when to come back": [status(503, retry_after=0), status(429, retry_after=0)],
    "the connection breaks in mid-body": [reset, reset],
    "a body comes short": [truncated, truncated],
    "one after another": [status(503), reset, truncated],
    "for long": [status(503)] * 5,
}
"""Of each fault, a request is made again, once."""


@pytest.mark.parametrize("case", PASSING)
def test_faults_that_pass_are_waited_for(case: str, service: Service) -> None:
    data = {f"{name}.bin": name.encode() * 1000 for name in "abc"}
    for name, content in data.items():
        service.put(name, content)
    waiting = service.proxy.faults["GET", "b.bin"] = list(PASSING[case])
    folder = open_folder(service.faulty, service.faulty_options)
    assert folder.read_many(list(data), [1000] * 3) == list(data.values())
    assert waiting == []
    assert service.proxy.requests("GET", "b.bin") == len(PASSING[case]) + 1


@pytest.mark.parametrize(
    ("seconds", "silent"),
    [
        pytest.param(0.5, None, id="briefly"),
        pytest.param(60.0, 1.0, id="too-long"),
        pytest.param(30.0, None, id="half-a-minute", marks=pytest.mark.heavy),
    ],
)
def test_a_body_that_stops_in_the_middle(
    seconds: float,
    silent: float | None,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is waited for, but not longer than a connection may be silent."""
    data = bytes(range(251)) * 400
    service.put("a.bin", data)
    options = dict(service.faulty_options)
    if silent is not None:
        monkeypatch.setattr(retries, "SILENT_SECONDS", silent)
    service.proxy.faults["GET", "a.bin"] = [stalled(seconds)]
    began = time.monotonic()
    found = open_folder(service.faulty, options).read_many(["a.bin"], [len(data)])
    waited = time.monotonic() - began
    assert found == [data]
    requests = service.proxy.requests("GET", "a.bin")
    if silent is None:
        assert requests == 1
        assert waited >= seconds
    else:  # a slow machine may be silent, too
        assert requests > 1
        assert waited < seconds


@pytest.mark.parametrize("faults", [[status(503)], [reset]], ids=["503", "reset"])
def test_whatever_is_asked_for_is_asked_for_again(faults: list[Fault], service: Service) -> None:
    """The first requests of each action fail: of a look, a listing, a write or a removal.

    What was created counts as ours though the answer was lost.
    """
    for name in ("a/1.jpg", "b/2.jpg", "b/c/3.jpg"):
        service.put(name, name.encode())
    folder = open_folder(service.faulty, service.faulty_options)
    actions: list[tuple[Callable[[], object], object]] = [
        (folder.kind, "folder"),
        (folder.names, ["a", "b"]),
        (lambda: sorted(info.name for info in folder.folder("b").walk()), ["2.jpg", "c/3.jpg"]),
        (lambda: folder.size("b/2.jpg"), 7),
        (lambda: folder.exists("b/none.jpg"), False),
        (lambda: folder.get("b/none.jpg"), None),
        (lambda: folder.read("a/1.jpg"), b"a/1.jpg"),
    ]
    if service.files is None:
        actions += [
            (lambda: folder.put("new", [b"1"]), None),
            (lambda: folder.create("once", [b"1"]), True),
            (lambda: folder.create("once", [b"2"]), False),
            (lambda: folder.read("once"), b"1"),
            (lambda: folder.copy("copied", folder, "a/1.jpg"), True),
            (lambda: folder.read("copied"), b"a/1.jpg"),
            (lambda: folder.remove("b"), None),
            (lambda: sorted(folder.sizes()), ["a/1.jpg", "copied", "new", "once"]),
        ]
    for action, right in actions:
        assert service.failing(faults, action) == right


def test_a_listing_through_a_bad_network_is_whole(service: Service) -> None:
    names = [f"{n}/{m}.jpg" for n in range(6) for m in range(2)]
    for name in names:
        service.put(name, b"1")
    folder = open_folder(service.faulty, service.faulty_options)
    for listed in (lambda: (info.name for info in folder.walk()), folder.sizes):
        faults = [status(503), reset, status(500), truncated, status(429)]
        assert service.failing(faults, lambda listed=listed: sorted(listed())) == names  # type: ignore[misc]


@pytest.mark.parametrize("code", [401, 403])
def test_what_is_forbidden_is_requested_once(code: int, service: Service) -> None:
    service.put("a.bin", b"1")
    folder = open_folder(service.faulty, service.faulty_options)
    service.proxy.faults["GET", "a.bin"] = [status(code)] * 9
    with pytest.raises(StorageError, match=r"cannot read \S+/a\.bin: .*; check the cred") as caught:
        folder.read("a.bin")
    assert service.proxy.requests("GET", "a.bin") == 1
    assert not any(str(secret) in str(caught.value) for secret in service.options.values())


# --- whole builds, versions and epochs ----------------------------------------------------------

RECIPE = precache.Recipe.image(resize=64, crop=56)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photographs, and a store of them in three shards."""
    root = tmp_path_factory.mktemp("built")
    for number in range(12):
        write(root / f"photos/{'cat' if number % 2 else 'dog'}/{number:02d}.jpg", _photo(number))
    precache.build(root / "photos", root / "store", RECIPE, address="serial", shard_samples=4)
    return root


def _photo(number: int) -> bytes:
    return encoded(cut(number, (120, 90)))


def test_wrong_bytes_are_caught(service: Service, built: Path, tmp_path: Path) -> None:
    """By checksum, in a pull as in an epoch."""
    name, shard = service.push(built / "store", "store"), "c/1/0/0/0"
    store, options = f"{service.faulty}/{name}", service.faulty_options
    ending = shard.replace("/", "%2F") if service.url.startswith("gs:") else shard
    service.proxy.faults["GET", ending] = [wrong_bytes]
    precache.pull(store, tmp_path / "pulled", storage_options=options)
    of_source = {name for name in contents(built / "store") if name.startswith("_listings/")}
    assert contents(tmp_path / "pulled").keys() == contents(built / "store").keys() - of_source
    assert contents(tmp_path / "pulled").items() <= contents(built / "store").items()
    service.proxy.faults["GET", ending] = [wrong_bytes]
    more: dict[str, Any] = {"cache": tmp_path / "cache", "storage_options": options}
    found, right = pixels(store, **more), pixels(built / "store")
    assert service.proxy.faults["GET", ending] == []
    assert found.keys() == right.keys()
    assert all(np.array_equal(found[key], right[key]) for key in right)
    service.proxy.faults["GET", ending] = [wrong_bytes] * 20
    with pytest.raises(DamageError, match=r"c/1/0/0/0 is damaged"):
        precache.pull(store, tmp_path / "later", storage_options=options)
    with pytest.raises(PrecacheError):
        precache.open(tmp_path / "later")
    service.proxy.faults.clear()
    precache.pull(store, tmp_path / "later", storage_options=options)
    assert precache.verify(tmp_path / "later").ok


def test_a_build_and_epochs_through_a_bad_network_are_right(
    service: Service, built: Path, tmp_path: Path
) -> None:
    """A third of all requests for a photograph, shard or commit fail, one way after another."""
    for number in range(12):
        service.put(f"photos/{'cat' if number % 2 else 'dog'}/{number:02d}.jpg", _photo(number))
    name = service.push(built / "store", "store")
    failed = Counter[str]()
    ways: dict[str, list[Fault]] = {
        # Pages of the web tell no sizes: there, nobody knows that a file came short.
        "photo": [status(503), reset, status(504) if service.files else truncated, status(429, 0)],
        "shard": [status(503), reset, truncated, wrong_bytes],
        "write": [status(503), reset, status(500), status(429, 0)],
    }
    # Apart, since threads mix requests of several kinds.
    dice = {kind: random.Random(f"{kind} 7") for kind in ways}

    def choose(method: str, path: str) -> Fault | None:
        writes, shard = (
            method in ("PUT", "POST"),
            re.search("/[0-9a-f]{32}/image/c/", unquote(path)),
        )
        kind = "write" if writes else "photo" if path.endswith(".jpg") else "shard" if shard else ""
        if method == "HEAD" or not kind or dice[kind].random() >= 0.35:
            return None
        failed[kind] += 1
        return ways[kind][failed[kind] % 4]

    service.proxy.choose = choose
    options, right = service.faulty_options, pixels(built / "store")
    build: dict[str, Any] = {"address": "serial", "storage_options": options}
    built_to = str(tmp_path / "store") if service.files else f"{service.faulty}/built"
    result = precache.build(f"{service.faulty}/photos", built_to, RECIPE, **build)
    assert (result.samples, result.failed) == (12, 0)
    there = built_to.replace(service.faulty, service.url)
    assert precache.verify(there, storage_options=service.options).ok
    store = f"{service.faulty}/{name}"
    epochs = [pixels(there, storage_options=service.options)]
    for number in range(3):
        cache = {"cache": tmp_path / str(number)}
        epochs.append(pixels(store, storage_options=options, **cache))
    for found in epochs:
        assert found.keys() == right.keys()
        assert all(np.array_equal(found[key], right[key]) for key in right)
    assert min(failed["photo"], failed["shard"]) >= 2
    assert failed["write"] >= 2 or service.files
