"""Proxies of the environment and the name of precache in requests, over every service."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import fsspec
import pytest

import precache
from precache.storage import object_store
from precache.storage.open import open_folder
from tests.storage.conftest import Service
from tests.support.servers import FaultProxy

HOST = "storage.invalid"
"""A name that nobody resolves: only a proxy can answer for it."""


def forget_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of before keep what they read of the environment."""
    monkeypatch.setattr(object_store, "_stores", {})
    for protocol in ("gs", "http"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


@pytest.fixture
def proxied(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy that the environment names."""
    service.straight.put("a", [b"1"])
    for name in ("all_proxy", "no_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{service.proxy.port}")
    forget_clients(monkeypatch)
    yield service.proxy
    forget_clients(monkeypatch)


def test_a_proxy_of_the_environment_is_used_and_told_who_asks_but_for_excepted_hosts(
    service: Service, proxied: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_read(host: str) -> None:
        options = {
            key: value.replace("127.0.0.1", host) if isinstance(value, str) else value
            for key, value in service.options.items()
        }
        folder = open_folder(service.url.replace("127.0.0.1", host), options)
        assert (folder.names(), folder.read("a")) == (["a"], b"1")

    assert_read(HOST)
    assert {urlsplit(url).hostname for _, url in proxied.seen} == {HOST}
    name = f"precache/{precache.__version__}"
    assert all(name in headers["User-Agent"] for headers in proxied.headers)
    proxied.seen.clear()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    forget_clients(monkeypatch)
    assert_read("127.0.0.1")
    assert not proxied.seen
