"""Proxies of the environment and the name of precache in requests, over every service."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest

import precache
from precache.storage import object_store
from precache.storage.open import open_folder
from tests.storage.conftest import Service
from tests.support.servers import POLL, PatientServer

HOST = "storage.invalid"
"""A name that nobody resolves: only a proxy can answer for it."""


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests for any host on to one server, as a proxy of HTTP does."""

    protocol_version = "HTTP/1.1"
    port: int
    seen: list[tuple[str, str]]

    def _pass(self) -> None:
        self.seen.append((self.path, self.headers["User-Agent"]))
        where = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        path = where._replace(scheme="", netloc="").geturl()
        headers = {name.title(): value for name, value in self.headers.items()}
        headers["Host"] = f"127.0.0.1:{self.port}"  # which servers go by
        upstream.request(self.command, path, body, headers)
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"connection", "transfer-encoding", "server", "date"}:
                self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def forget_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of before keep what they read of the environment."""
    monkeypatch.setattr(object_store, "_stores", {})
    for protocol in ("gs", "http"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


@pytest.fixture
def proxied(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """URL and User-Agent of each request to a proxy that the environment names."""
    service.straight.put("a", [b"1"])
    port = service.server.port if service.server else urlsplit(service.url).port
    handler = type("Handler", (_Proxy,), {"port": port, "seen": (seen := [])})
    with PatientServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[POLL])
        thread.start()
        for name in ("all_proxy", "no_proxy", "https_proxy", "http_proxy"):
            monkeypatch.delenv(name.upper(), raising=False)
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_address[1]}")
        forget_clients(monkeypatch)
        yield seen
        server.shutdown()
        thread.join()
    forget_clients(monkeypatch)


def test_a_proxy_of_the_environment_is_used_and_told_who_asks_but_for_excepted_hosts(
    service: Service, proxied: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_read(host: str) -> None:
        options = {
            key: value.replace("127.0.0.1", host) if isinstance(value, str) else value
            for key, value in service.options.items()
        }
        folder = open_folder(service.url.replace("127.0.0.1", host), options)
        assert (folder.names(), folder.read("a")) == (["a"], b"1")

    assert_read(HOST)
    assert {urlsplit(url).hostname for url, _ in proxied} == {HOST}
    assert all(f"precache/{precache.__version__}" in agent for _, agent in proxied)
    proxied.clear()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    forget_clients(monkeypatch)
    assert_read("127.0.0.1")
    assert proxied == []
