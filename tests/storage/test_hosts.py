"""Proxies of the environment and the name of precache in requests, over every service."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest

import precache
from precache.storage import object_store
from precache.storage.base import Folder
from precache.storage.open import open_folder
from tests.support.servers import POLL, PatientServer, web_server

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


@dataclass(frozen=True)
class Place:
    """A folder with an object ``a``: its URL, the options, and the port of its server."""

    url: str
    options: dict[str, Any]
    port: int

    def folder(self, host: str = "127.0.0.1") -> Folder:
        """The folder by another name of its host."""
        options = {
            key: value.replace("127.0.0.1", host) if isinstance(value, str) else value
            for key, value in self.options.items()
        }
        return open_folder(self.url.replace("127.0.0.1", host), options)


@pytest.fixture(params=["s3", "gs", "az", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "http":
        (tmp_path / "a").write_bytes(b"1")
        with web_server(tmp_path) as url:
            yield Place(url, {}, urlsplit(url).port or 0)
    else:
        server = request.getfixturevalue({"s3": "s3", "gs": "gcs", "az": "azurite"}[request.param])
        made = Place(f"{request.param}://bucket/hosts", server.options(), server.port)
        made.folder().put("a", [b"1"])
        yield made


def forget_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of before keep what they read of the environment."""
    monkeypatch.setattr(object_store, "_stores", {})
    for protocol in ("gs", "http"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


@pytest.fixture
def proxied(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """URL and User-Agent of each request to a proxy that the environment names."""
    handler = type("Handler", (_Proxy,), {"port": place.port, "seen": (seen := [])})
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
    place: Place, proxied: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place.folder(HOST)
    assert (folder.names(), folder.read("a")) == (["a"], b"1")
    assert {urlsplit(url).hostname for url, _ in proxied} == {HOST}
    assert all(f"precache/{precache.__version__}" in agent for _, agent in proxied)
    proxied.clear()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    forget_clients(monkeypatch)
    folder = place.folder()
    assert (folder.names(), folder.read("a")) == (["a"], b"1")
    assert proxied == []
