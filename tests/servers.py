"""Servers on loopback, started by the tests: S3, and a proxy in front of it that makes faults."""

from __future__ import annotations

import contextlib
import functools
import http.client
import logging
import socket
import struct
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

Fault = Callable[["_Handler", int, bytes], bool]
"""Answers a request in place of its server's answer (status, body); False to let that pass."""


class S3Server:
    """moto's server, which keeps everything in memory."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.port = int(self._server.get_host_and_port()[1])

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Storage options of s3fs, through a proxy's port or straight."""
        return {
            "key": "someone",
            "secret": "a-secret-that-nobody-may-see",
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        urllib.request.urlopen(request).close()

    def stop(self) -> None:
        self._server.stop()


class _QuietFiles(SimpleHTTPRequestHandler):
    held: Mapping[str, threading.Event] = MappingProxyType({})

    def do_GET(self) -> None:
        if self.path in self.held:
            self.held[self.path].wait()
        super().do_GET()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class _PatientServer(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


@contextlib.contextmanager
def web_server(
    folder: Path, held: Mapping[str, threading.Event] = MappingProxyType({})
) -> Iterator[str]:
    """A web server of the files below a folder, with listings; its URL.

    Parameters
    ----------
    held
        Path -> what to wait for before it is answered.
    """
    kind = type("Handler", (_QuietFiles,), {"held": held})
    handler = functools.partial(kind, directory=str(folder))
    with _PatientServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class FaultProxy:
    """Passes requests on to a server; those that `faults` names are answered otherwise.

    Attributes
    ----------
    faults
        (method, end of the path) -> faults, each of one request, in order.
    seen
        (method, path) -> requests.
    agents
        User-Agent of each request, in order.
    before
        Called with (method, path) of each request; may wait.
    choose
        (method, path) -> fault of a request that `faults` does not name, or None.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.faults: dict[tuple[str, str], list[Fault]] = {}
        self.seen: Counter[tuple[str, str]] = Counter()
        self.agents: list[str] = []
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.choose: Callable[[str, str], Fault | None] = lambda method, path: None
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _PatientServer(("127.0.0.1", 0), handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def requests(self, method: str, ending: str) -> int:
        """How many there were of a path's ending."""
        return sum(n for (m, path), n in self.seen.items() if m == method and path.endswith(ending))

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.seen[method, path] += 1
            for (wanted, ending), waiting in self.faults.items():
                if waiting and wanted == method and path.endswith(ending):
                    return waiting.pop(0)
            return self.choose(method, path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.proxy.agents.append(self.headers.get("User-Agent", ""))
        self.proxy.before(self.command, path)
        fault = self.proxy.take(self.command, path)
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if fault is not None and fault(self, answer.status, data):
            return
        self.answer(answer.status, data, dict(answer.getheaders()))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole answer, of the length that its headers say."""
        self.send_response(status)
        own = {"connection", "transfer-encoding", "server", "date"}
        for name, value in (headers or {}).items():
            if name.lower() not in own | ({"content-length"} if self.command != "HEAD" else set()):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def hang_up(self, length: int, sent: bytes) -> None:
        """Promise `length` bytes, send some, and reset the connection."""
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(sent)
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def status(code: int, retry_after: int | None = None) -> Fault:
    """An error of the service; the request itself was carried out or not, who knows."""

    def fault(handler: _Handler, upstream: int, data: bytes) -> bool:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        handler.answer(code, b"<Error><Code>Fault</Code></Error>", headers)
        return True

    return fault


def reset(handler: _Handler, upstream: int, data: bytes) -> bool:
    """The connection breaks in the middle of the body."""
    handler.hang_up(len(data), data[: len(data) // 2])
    return True


def truncated(handler: _Handler, upstream: int, data: bytes) -> bool:
    """A shorter body, of the length that its header says."""
    handler.answer(200, data[: len(data) // 2])
    return True


def wrong_bytes(handler: _Handler, upstream: int, data: bytes) -> bool:
    """A body of the right length, one bit of it turned."""
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    handler.answer(200, bytes(changed))
    return True
