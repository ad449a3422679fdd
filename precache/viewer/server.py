"""Serve pages about a store on this machine's loopback interface, or write one static page."""

from __future__ import annotations

import hmac
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from precache.errors import PrecacheError, UsageError
from precache.html.pages import content_policy
from precache.viewer.pages import STYLES, View, error_page
from precache.viewer.search import STATES, Query

ADDRESS = "127.0.0.1"
HOST_NAMES = frozenset(("127.0.0.1", "localhost"))
"""Host names that requests may carry; the port differs at the far end of an SSH tunnel."""

CONNECTION_SECONDS = 60
"""Time after which an idle connection is closed."""

HTML = "text/html; charset=utf-8"


class ViewServer(ThreadingHTTPServer):
    """Serves pages on the loopback interface, below a secret random path.

    Other users of this machine reach its loopback interface too, even if they may not read the
    store's files. So the address in `url` is a secret.

    Parameters
    ----------
    port
        Port to listen on; 0 for a free one.

    Raises
    ------
    UsageError
        The port cannot be used.
    """

    def __init__(self, pages: View, port: int = 0) -> None:
        self.pages = pages
        self.root = f"/{secrets.token_urlsafe(12)}/"
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot listen on port {port}: {error}; give another, or none for a free one"
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser may reset its connections
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}{self.root}"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_SECONDS

    def do_GET(self) -> None:
        if not _is_allowed_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "use the host name 127.0.0.1 or localhost")
            return
        path, query = urlsplit(self.path)[2:4]
        root = self.server.root
        if not hmac.compare_digest(path[: len(root)].encode(), root.encode()):
            self._refuse(HTTPStatus.NOT_FOUND, "open the address that precache view printed")
            return
        inner = path[len(root) :]
        try:
            self._send(HTTPStatus.OK, *_answer(self.server.pages, inner, query))
        except PrecacheError as error:
            missing = isinstance(error, UsageError)
            status = HTTPStatus.NOT_FOUND if missing else HTTPStatus.INTERNAL_SERVER_ERROR
            self._send(status, error_page(str(error), "../" * inner.count("/") or "."), HTML)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True
        self._send(status, f"precache view: {why}\n", "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, text: str, media: str) -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        policy = content_policy(STYLES, served=True)
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def version_string(self) -> str:
        return "precache"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def _is_allowed_host(host: str) -> bool:
    """Return whether a Host header names this machine; refuses DNS rebinding."""
    name, _, port = host.partition(":")
    return name.lower() in HOST_NAMES and (port.isdecimal() or not port)


def _answer(pages: View, path: str, query: str) -> tuple[str, str]:
    """Return the text and media type at a path below the server's root."""
    match [unquote(part) for part in path.split("/")]:
        case [""]:
            return pages.grid(*_asked(query)), HTML
        case ["rows.json"]:
            return pages.data(*_asked(query)), "application/json"
        case ["row", row]:
            return pages.sample(_number(row)), HTML
    raise UsageError("there is nothing at this address")


def _asked(query: str) -> tuple[Query, int]:
    """Return the conditions and the first row that an address asks for."""
    try:
        parsed = parse_qs(query, max_num_fields=20)
    except ValueError:
        raise UsageError("the address has too many parts") from None
    values = {name: entries[-1] for name, entries in parsed.items()}
    label, state = values.get("class", "").strip(), values.get("rows", "all")
    if state not in STATES:
        raise UsageError(f"{state!r} is not one of {', '.join(STATES)}")
    return Query(values.get("q", ""), label, state), _number(values.get("from", "0"))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UsageError(f"{text!r} is not a row number")
    return int(text)
