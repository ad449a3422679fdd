"""What is between client and server: a table of faults, and what comes of each; and proxies. For
every service."""

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import pytest

import precache
from precache.errors import DamageError, PrecacheError, StorageError
from precache.storage import object_store, retries
from precache.storage.object_store import ServiceError
from precache.storage.open import open_folder
from tests.storage.conftest import RECIPE, Service, only
from tests.support.building import assert_same, contents, pixels
from tests.support.servers import (
    Fault,
    error_document,
    reset,
    stalled,
    status,
    truncated,
    wrong_bytes,
)

PASSING: dict[str, list[Fault]] = {
    "the service is busy": [status(503), status(500), status(429), status(408), status(504)],
    "it says when to come back": [status(503, retry_after=0), status(429, retry_after=0)],
    "the body is not whole": [reset, reset, truncated, truncated, status(503)],
}
"""Of each fault, a request is made again, once."""


@pytest.mark.parametrize("case", PASSING)
def test_faults_that_pass_are_waited_for(case: str, service: Service) -> None:
    data = {f"{name}.bin": name.encode() * 1000 for name in "abc"}
    for name, content in data.items():
        service.straight.put(name, [content])
    waiting = service.proxy.faults["GET", "b.bin"] = list(PASSING[case])
    folder = service.behind
    assert folder.read_many(list(data), [1000] * 3) == list(data.values())
    assert waiting == []
    assert folder.read_many(["a.bin", "c.bin"], [-1, 1000]) == [b"a" * 1000, b"c" * 1000]
    assert folder.read_ranges([("a.bin", 10, 4), ("c.bin", 996, 4)]) == [b"aaaa", b"cccc"]
    made = [service.proxy.requests("GET", name) for name in data]
    assert made == [3, len(PASSING[case]) + 1, 3]
    assert sum(made) == service.proxy.seen.total(), "one request reads an object, or a part"


@only("gs", "http")
def test_a_range_of_a_server_without_ranges_is_that_range_and_no_more(service: Service) -> None:
    data = bytes(range(250)) * 2
    service.straight.put("short.bin", [data])
    service.proxy.ignored = frozenset({"Range"})
    asked = [(0, 10), (400, 100), (600, 100)]
    asked += [(100, 1000)] if service.files else []  # gcsfs does not say that it got the whole
    found = service.behind.read_ranges([("short.bin", *part) for part in asked])
    assert found == [data[start : start + length] for start, length in asked]
    assert service.behind.read_many(["short.bin"], [len(data)]) == [data]


@pytest.mark.parametrize(("seconds", "silent"), [(0.5, None), (60.0, 1.0)])
def test_a_body_that_stops_is_waited_for_as_long_as_a_connection_may_be_silent(
    seconds: float, silent: float | None, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(251)) * 400
    service.straight.put("a.bin", [data])
    if silent is not None:
        monkeypatch.setattr(retries, "SILENT_SECONDS", silent)
    service.proxy.faults["GET", "a.bin"] = [stalled(seconds)]
    began = time.monotonic()
    assert service.behind.read_many(["a.bin"], [len(data)]) == [data]
    assert (time.monotonic() - began >= seconds) is (silent is None)
    # A slow machine may be silent, too.
    assert (service.proxy.requests("GET", "a.bin") == 1) is (silent is None)


@pytest.mark.parametrize("faults", [[status(503)], [reset]], ids=["503", "reset"])
def test_whatever_is_asked_for_is_asked_for_again(faults: list[Fault], service: Service) -> None:
    """The first requests of each action fail: of a look, a listing, a write or a removal.

    What was created counts as ours though the answer was lost.
    """
    for name in ("a/1.jpg", "b/2.jpg", "b/c/3.jpg"):
        service.straight.put(name, [name.encode()])
    folder = service.behind
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
        service.straight.put(name, [b"1"])
    folder = service.behind
    for listed in (lambda: (info.name for info in folder.walk()), folder.sizes):
        faults = [status(503), reset, status(500), truncated, status(429)]
        assert service.failing(faults, lambda listed=listed: sorted(listed())) == names  # type: ignore[misc]


@pytest.mark.parametrize("code", [401, 403])
def test_what_is_forbidden_or_missing_is_requested_once(code: int, service: Service) -> None:
    service.straight.put("a.bin", [b"1"])
    folder = service.behind
    service.proxy.faults["GET", "a.bin"] = [status(code)] * 9
    with pytest.raises(StorageError, match=r"cannot read \S+/a\.bin: .*; check the cred") as caught:
        folder.read("a.bin")
    assert service.proxy.requests("GET", "a.bin") == 1
    assert not any(str(secret) in str(caught.value) for secret in service.options.values())
    with pytest.raises(StorageError, match=r"cannot read \S+/none: there is no such object$"):
        folder.read("none")
    assert service.proxy.requests("GET", "none") == 1
    service.proxy.choose = lambda method, path: status(code)
    with pytest.raises(StorageError, match=r"cannot look at \S+/a\.bin: .*; check the cred"):
        folder.size("a.bin")
    with pytest.raises(StorageError, match=r"cannot list \S+: .*; check the credentials"):
        folder.names()
    if service.protocol in ("s3", "az"):  # which remove several objects by one request
        service.proxy.choose = lambda method, path: status(code) if method == "POST" else None
        said = rf"cannot remove .*/a\.bin: .*{code}.*; check the credentials"
        with pytest.raises(StorageError, match=said):
            folder.remove("a.bin")
        assert service.proxy.requests("POST", "") == 1


def test_the_server_decides_how_long_to_wait_and_no_seed_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy(OSError):
        status = 503
        headers = {"Retry-After": "7"}  # noqa: RUF012 - never changed

    state = random.getstate()
    assert len({retries.pause(2, None) for _ in range(3)}) > 1
    assert random.getstate() == state
    assert retries.pause(0, Busy()) == 7
    assert all(0.1 < retries.pause(0, TimeoutError()) < 0.4 for _ in range(50))
    assert all(retries.pause(n, TimeoutError()) <= 1.5 * retries.LONGEST_PAUSE for n in range(20))
    monkeypatch.setattr(retries.JITTER, "uniform", lambda low, high: 1.0)
    pauses = [retries.pause(number, None) for number in range(retries.BUSY_ATTEMPTS - 1)]
    assert sum(pauses) >= retries.RETRY_SECONDS, "it has a minute"


@only("s3")
def test_a_conditional_write_that_s3_sent_away_is_made_again_and_one_that_failed_is_not(
    service: Service,
) -> None:
    faulty, faults = service.behind, service.proxy.faults
    faults["PUT", "/1.json"] = [error_document(409, "ConditionalRequestConflict")] * 2
    assert faulty.create("1.json", [b"mine"])
    assert service.proxy.requests("PUT", "/1.json") == 3
    faults["PUT", "/1.json"] = [error_document(412, "PreconditionFailed")]
    assert not faulty.create("1.json", [b"another's"])
    faults["PUT", "/1.json"] = [error_document(412, "PreconditionFailed")]
    with pytest.raises(StorageError, match=r"cannot write s3://.*/1\.json: it exists, and the"):
        faulty.put("1.json", [b"another's"])


def test_what_other_credentials_would_help_is_not_asked_for_again() -> None:
    """A status of success is that of an answer that was damaged."""
    passing = [ServiceError("", status) for status in (503, 200, 409)]
    passing += [ConnectionError(), TimeoutError()]
    final = [ServiceError("", 412), ServiceError("", 403), PermissionError(), ValueError()]
    assert all(map(retries.is_transient, passing))
    assert not any(map(retries.is_transient, final))
    assert [e for e in [*passing, *final] if retries.is_forbidden(e)] == final[1:3]


@only("s3", "http")
def test_wrong_bytes_are_caught(service: Service, served: Path, tmp_path: Path) -> None:
    """By checksum, in a pull as in an epoch; of small objects and of shards."""
    name, shard = service.push(served / "store", "store"), "c/1/0/0/0"
    store, options = f"{service.faulty}/{name}", service.faulty_options
    service.proxy.faults["GET", shard] = [wrong_bytes]
    small = service.proxy.faults["GET", "holes/c/0"] = [wrong_bytes]
    precache.pull(store, tmp_path / "pulled", storage_options=options)
    assert small == service.proxy.faults["GET", shard] == []
    of_source = {name for name in contents(served / "store") if name.startswith("_listings/")}
    assert contents(tmp_path / "pulled").keys() == contents(served / "store").keys() - of_source
    assert contents(tmp_path / "pulled").items() <= contents(served / "store").items()
    service.proxy.faults["GET", shard] = [wrong_bytes]
    more: dict[str, Any] = {"cache": tmp_path / "cache", "storage_options": options}
    found, right = pixels(store, **more), pixels(served / "store")
    assert service.proxy.faults["GET", shard] == []
    assert_same(found, right)
    service.proxy.faults["GET", shard] = [wrong_bytes] * 20
    with pytest.raises(DamageError, match=r"c/1/0/0/0 is damaged"):
        precache.pull(store, tmp_path / "later", storage_options=options)
    with pytest.raises(PrecacheError):
        precache.open(tmp_path / "later")
    service.proxy.faults.clear()
    precache.pull(store, tmp_path / "later", storage_options=options)
    assert precache.verify(tmp_path / "later").ok


def test_a_build_and_epochs_through_a_bad_network_are_right(
    service: Service, served: Path, tmp_path: Path
) -> None:
    """A third of all requests for a photograph, shard or commit fail, one way after another."""
    for path in (served / "photos").rglob("*.jpg"):
        service.straight.put(path.relative_to(served).as_posix(), [path.read_bytes()])
    name = service.push(served / "store", "store")
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
        shard = re.search("/[0-9a-f]{32}[.]1/image/c/", unquote(path))
        writes = method in ("PUT", "POST")
        kind = "write" if writes else "photo" if path.endswith(".jpg") else "shard" if shard else ""
        if method == "HEAD" or not kind or dice[kind].random() >= 0.35:
            return None
        failed[kind] += 1
        return ways[kind][failed[kind] % 4]

    service.proxy.choose = choose
    options, right = service.faulty_options, pixels(served / "store")
    build: dict[str, Any] = {"address": "serial", "storage_options": options}
    built_to = str(tmp_path / "store") if service.files else f"{service.faulty}/built"
    result = precache.build(f"{service.faulty}/photos", built_to, RECIPE, **build)
    assert (result.samples, result.failed) == (12, 0)
    there = built_to.replace(service.faulty, service.url)
    assert precache.verify(there, storage_options=service.options).ok
    store = f"{service.faulty}/{name}"
    epochs = [pixels(there, storage_options=service.options)]
    epochs += [
        pixels(store, storage_options=options, cache=tmp_path / cache) for cache in ("one", "other")
    ]
    for found in epochs:
        assert_same(found, right)
    assert min(failed["photo"], failed["shard"]) >= 2
    assert failed["write"] >= 2 or service.files


# --- proxies of the environment, and the name of precache in requests ---------------------------

HOST = "storage.invalid"
"""A name that nobody resolves: only a proxy can answer for it."""


def forget_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of before keep what they read of the environment."""
    monkeypatch.setattr(object_store, "_stores", {})
    for protocol in ("gs", "http"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


def test_a_proxy_of_the_environment_is_used_and_told_who_asks_but_for_excepted_hosts(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_read(host: str) -> None:
        options = {
            key: value.replace("127.0.0.1", host) if isinstance(value, str) else value
            for key, value in service.options.items()
        }
        forget_clients(monkeypatch)
        folder = open_folder(service.url.replace("127.0.0.1", host), options)
        assert (folder.names(), folder.read("a")) == (["a"], b"1")

    proxy = service.proxy
    service.straight.put("a", [b"1"])
    for name in ("all_proxy", "no_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    assert_read(HOST)
    assert {urlsplit(url).hostname for _, url in proxy.seen} == {HOST}
    name = f"precache/{precache.__version__}"
    assert all(name in headers["User-Agent"] for headers in proxy.headers)
    proxy.seen.clear()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert_read("127.0.0.1")
    assert not proxy.seen
