"""Servers on loopback, started by the tests: S3, Azure, the web, and a proxy that makes faults."""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import logging
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

Fault = Callable[["_Handler", int, bytes], bool]
"""Answers a request in place of its server's answer (status, body); False to let that pass."""

POLL = 0.05
"""Seconds after which a server notices that it is to stop."""


class PatientServer(ThreadingHTTPServer):
    """Takes many connections at a time."""

    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients hang up."""


class HTTPServer(PatientServer):
    """Serves on a thread of its own, until it is stopped; `server` of its handlers is this.

    Parameters
    ----------
    certificate
        Makes it one of ``https://``.
    """

    def __init__(self, handler: Callable[..., Any], certificate: Certificate | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.port = int(self.server_address[1])
        self.lock = threading.Lock()
        if certificate is not None:
            self.socket = certificate.wrap(self.socket)
        self._thread = threading.Thread(target=self.serve_forever, args=[POLL], daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    """Keeps connections, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A whole answer, of the length of its body."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class S3Server:
    """moto's server, which keeps everything in memory.

    moto looks whether an object is there and puts it in two steps, in a thread for each request.
    Those that may only create one take turns here, as the real service has it.
    """

    def __init__(self) -> None:
        from moto.server import MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server
        from werkzeug.wsgi import get_input_stream

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        moto, creating = create_backend_app("s3"), threading.Lock()

        def answer(environ: dict[str, Any], start: Any) -> Any:
            if "HTTP_IF_NONE_MATCH" not in environ:
                return moto(environ, start)
            environ["wsgi.input"] = io.BytesIO(get_input_stream(environ).read())  # all of it
            with creating:
                return moto(environ, start)

        self._server = make_server(
            "127.0.0.1", 0, answer, threaded=True, request_handler=MotoRequestHandler
        )
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Storage options, through a proxy's port or straight."""
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
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Azurite:
    """Microsoft's emulator of Azure Blob Storage: a process of its own, all in memory.

    Parameters
    ----------
    program
        The path of ``azurite-blob``.
    folder
        Where it may write.
    """

    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    """Of the account that every emulator has. Source: Azurite's documentation."""

    def __init__(self, program: Path, folder: Path) -> None:
        line = [program, "--inMemoryPersistence", "--disableTelemetry", "--silent"]
        line += ["--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", "0"]
        self._process = subprocess.Popen(
            line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.port = self._listening()

    @staticmethod
    def find() -> Path | None:
        """The program that the variable AZURITE names, or the search path, or npm's folder here."""
        here = Path(__file__).parents[2] / "node_modules/.bin"
        found = os.environ.get("AZURITE")
        found = found or shutil.which("azurite-blob") or shutil.which("azurite-blob", path=here)
        return Path(found).with_name("azurite-blob") if found else None

    def options(self, port: int | None = None, key: str = KEY) -> dict[str, Any]:
        """Storage options, through a proxy's port or straight."""
        account = "devstoreaccount1"
        endpoint = f"http://127.0.0.1:{port or self.port}/{account}"
        parts = {"AccountName": account, "AccountKey": key, "BlobEndpoint": endpoint}
        return {"connection_string": ";".join(f"{n}={value}" for n, value in parts.items())}

    def container(self, name: str) -> Any:
        """A container, of which there need be none, as Azure's own library has it."""
        from azure.storage.blob import ContainerClient

        connection: str = self.options()["connection_string"]
        return ContainerClient.from_connection_string(connection, name)

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate()

    def _listening(self) -> int:
        """The port, when it says it."""
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if found := re.search(r"listens on http://127\.0\.0\.1:([0-9]+)", line):
                return int(found[1])
        raise RuntimeError(f"Azurite does not run: {said}")


class UnsatisfiableError(Exception):
    """A range begins beyond the end of what it is of."""


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Start and stop that a Range header wants of `size` bytes; None where it wants all.

    Source: RFC 9110, section 14.1.2.
    """
    found = re.fullmatch(r"bytes=([0-9]*)-([0-9]*)", header or "")
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
    if start >= size:
        raise UnsatisfiableError
    return start, stop


class FileHandler(Handler, SimpleHTTPRequestHandler):
    """Sends the files of a folder, and lists it."""

    ranges = True
    silent = False
    query = ""
    held: Mapping[str, threading.Event] = MappingProxyType({})

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        signed = unquote(self.path).endswith(unquote(self.query))
        if not signed:
            self.send_error(403, f"{self.path} is not signed")
        return signed

    def do_GET(self) -> None:
        if self.path in self.held:
            self.held[self.path].wait()
        path = Path(self.translate_path(self.path))
        if not self.ranges or "Range" not in self.headers or not path.is_file():
            return super().do_GET()
        data = path.read_bytes()
        try:
            wanted = byte_range(self.headers["Range"], len(data))
        except UnsatisfiableError:
            return self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        if wanted is None:
            return super().do_GET()
        start, stop = wanted
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return self.send(206, data[start:stop], span)

    def send_header(self, keyword: str, value: str) -> None:
        if not (self.silent and keyword == "Last-Modified"):
            super().send_header(keyword, value)


@dataclass(frozen=True)
class Certificate:
    """Of 127.0.0.1, signed by itself: two PEM files."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Certificate | None:
        """A new one; None where there is no `openssl` to make it."""
        if shutil.which("openssl") is None:
            return None
        made = cls(folder / "certificate.pem", folder / "key.pem")
        line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        line += " -subj /CN=precache -addext subjectAltName=IP:127.0.0.1"
        paths = ["-keyout", str(made.key), "-out", str(made.certificate)]
        subprocess.run([*line.split(), *paths], check=True, capture_output=True)
        return made

    def wrap(self, listening: socket.socket) -> socket.socket:
        """The socket of a server, which shows this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)


@contextlib.contextmanager
def answering(
    handler: Callable[..., BaseHTTPRequestHandler], certificate: Certificate | None = None
) -> Iterator[str]:
    """A web server with this handler; its URL."""
    server = HTTPServer(handler, certificate)
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.port}"
    finally:
        server.stop()


@contextlib.contextmanager
def web_server(
    folder: Path,
    held: Mapping[str, threading.Event] = MappingProxyType({}),
    *,
    certificate: Certificate | None = None,
    ranges: bool = True,
    silent: bool = False,
    query: str = "",
) -> Iterator[str]:
    """A web server of the files below a folder, with listings; its URL.

    Parameters
    ----------
    held
        Path -> what to wait for before it is answered.
    certificate
        Makes it one of ``https://``.
    ranges
        Whether it answers with parts of files; otherwise with all, whatever the range.
    silent
        Whether it tells no time of a file.
    query
        End of the URLs that it answers, such as a signature.
    """
    own = {"held": held, "ranges": ranges, "silent": silent, "query": query}
    kind = type("Handler", (FileHandler,), own)
    with answering(functools.partial(kind, directory=str(folder)), certificate) as url:
        yield url


class FaultProxy(HTTPServer):
    """Passes requests on to a server; those that `faults` names are answered otherwise.

    Attributes
    ----------
    faults
        (method, end of the path) -> faults, each of one request, in order.
    seen
        (method, path) -> requests.
    headers
        Those of each request, in order.
    before
        Called with (method, path) of each request; may wait.
    ignored
        Headers that are not passed on.
    choose
        (method, path) -> fault of a request that `faults` does not name, or None.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.faults: dict[tuple[str, str], list[Fault]] = {}
        self.seen: Counter[tuple[str, str]] = Counter()
        self.headers: list[Mapping[str, str]] = []
        self.ignored: frozenset[str] = frozenset()
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.choose: Callable[[str, str], Fault | None] = lambda method, path: None
        super().__init__(_Handler)

    def requests(self, method: str, ending: str) -> int:
        """How many there were of a path's ending."""
        return sum(n for (m, path), n in self.seen.items() if m == method and path.endswith(ending))

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.seen[method, path] += 1
            for (wanted, ending), waiting in self.faults.items():
                if waiting and wanted == method and path.endswith(ending):
                    return waiting.pop(0)
            return self.choose(method, path)


class _Handler(Handler):
    server: FaultProxy
    upstream_headers: Mapping[str, str]

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.headers.append(self.headers)
        self.server.before(self.command, path)
        fault = self.server.take(self.command, path)
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        ignored = {name.lower() for name in self.server.ignored}
        headers = {n: each for n, each in self.headers.items() if n.lower() not in ignored}
        there = self.path
        if "://" in there:  # as a proxy of HTTP is asked, for any host
            there = urlsplit(there)._replace(scheme="", netloc="").geturl()
            headers = {n: each for n, each in headers.items() if n.lower() != "host"}
        upstream.request(self.command, there, body, headers)
        answer = upstream.getresponse()
        data = answer.read()
        self.upstream_headers = dict(answer.getheaders())
        upstream.close()
        if fault is not None and fault(self, answer.status, data):
            return
        self.answer(answer.status, data, self.upstream_headers)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

    def answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A whole answer, of the length that its headers say."""
        self.send_head(status, len(data), headers or {})
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        """Status and headers; to HEAD, with the length that these say themselves."""
        self.send_response(status)
        own = {"connection", "transfer-encoding", "server", "date"}
        for name, value in headers.items():
            if name.lower() not in own | ({"content-length"} if self.command != "HEAD" else set()):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def hang_up(self, status: int, data: bytes) -> None:
        """Begin to answer as the server did, and reset the connection in mid-body."""
        self.send_head(status, len(data), self.upstream_headers)
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def status(code: int, retry_after: int | None = None) -> Fault:
    """An error of the service; the request itself was carried out or not, who knows."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return _refusal(code, "<Error><Code>Fault</Code></Error>", headers)


def error_document(code: int, error: str) -> Fault:
    """An error as S3 tells one; the request itself was carried out or not, who knows."""
    document = f"<Error><Code>{error}</Code><Message>no such luck</Message></Error>"
    return _refusal(code, document, {"Content-Type": "application/xml"})


def _refusal(code: int, document: str, headers: dict[str, str]) -> Fault:
    def fault(handler: _Handler, upstream: int, data: bytes) -> bool:
        handler.answer(code, document.encode(), headers)
        return True

    return fault


def passes(handler: _Handler, upstream: int, data: bytes) -> bool:
    """No fault."""
    return False


def reset(handler: _Handler, upstream: int, data: bytes) -> bool:
    """The connection breaks in the middle of the body."""
    handler.hang_up(upstream, data)
    return True


def stalled(seconds: float) -> Fault:
    """The answer stops in the middle of the body for a while."""

    def fault(handler: _Handler, upstream: int, data: bytes) -> bool:
        handler.send_head(upstream, len(data), handler.upstream_headers)
        handler.wfile.write(data[: len(data) // 2])
        handler.wfile.flush()
        time.sleep(seconds)
        handler.wfile.write(data[len(data) // 2 :])
        return True

    return fault


def truncated(handler: _Handler, upstream: int, data: bytes) -> bool:
    """A shorter body, of the length that its header says."""
    handler.answer(upstream, data[: len(data) // 2], handler.upstream_headers)
    return True


def wrong_bytes(handler: _Handler, upstream: int, data: bytes) -> bool:
    """A body of the right length, one bit of it turned."""
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    handler.answer(upstream, bytes(changed), handler.upstream_headers)
    return True
