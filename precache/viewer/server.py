"""Pages about a store over HTTP, for this machine alone; or one page in a file."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from precache.errors import PrecacheError, StorageError, UsageError
from precache.viewer.contents import Pages
from precache.viewer.pages import error_page, policy
from precache.viewer.search import Query

ADDRESS = "127.0.0.1"
NAMES = frozenset(("127.0.0.1", "localhost"))
"""What a browser may call this server; the port is another at the far end of an SSH tunnel."""

IDLE_SECONDS = 60
"""After which a connection that asks for nothing is closed."""

Answer = tuple[bytes, str]
"""Body and media type."""


def write_page(pages: Pages, query: Query, path: str) -> None:
    """Write the first rows that a query finds as one file that needs no other.

    Raises
    ------
    StorageError
        It cannot be written.
    """
    page = pages.grid(query, static=True)
    try:
        Path(path).write_text(page, "utf-8", errors="replace")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


class ViewServer(ThreadingHTTPServer):
    """Serves pages on the loopback interface, below a path that nobody can guess.

    Other users of this machine reach its loopback interface too, whatever the modes of the store's
    files say: the address that `url` gives is the key.

    Parameters
    ----------
    port
        To listen at; 0 for a free one.

    Raises
    ------
    UsageError
        The port cannot be had.
    """

    def __init__(self, pages: Pages, port: int = 0) -> None:
        self.pages = pages
        self.root = f"/{secrets.token_urlsafe(12)}/"
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot listen at port {port}: {error}; give another, or none for a free one"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}{self.root}"


def serve(pages: Pages, query: Query, port: int = 0, *, browser: bool = False) -> None:
    """Serve pages until Ctrl-C, having printed where.

    Parameters
    ----------
    query
        What the printed address finds.
    browser
        Whether it is opened in a browser.
    """
    asked = {"q": query.text, "class": query.label}
    asked = {name: value for name, value in asked.items() if value}
    with contextlib.suppress(KeyboardInterrupt), ViewServer(pages, port) as server:
        url = server.url + ("?" + urlencode(asked) if asked else "")
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        sys.stderr.write("precache: serving this address to this machine alone; Ctrl-C ends it\n")
        with _opened(url) if browser else contextlib.nullcontext():
            server.serve_forever()


@contextlib.contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open a browser, by a file of this user's own that leads to the URL.

    All users of a machine see what a process was started with, and the URL is a secret.
    """
    with tempfile.TemporaryDirectory(prefix="precache-view-") as folder:
        page = Path(folder, "open.html")
        page.touch(mode=0o600)
        address = escape(url)
        page.write_text(
            '<!doctype html><meta charset="utf-8"><title>precache view</title>'
            f'<meta http-equiv="refresh" content="0; url={address}">'
            f'<a href="{address}">precache view</a>'
        )
        webbrowser.open(page.as_uri())
        yield


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        if not _is_ours(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this server is 127.0.0.1 or localhost")
            return
        path, query = urlsplit(self.path)[2:4]
        root = self.server.root
        if not hmac.compare_digest(path[: len(root)].encode(), root.encode()):
            self._refuse(HTTPStatus.NOT_FOUND, "open the address that precache view has printed")
            return
        inner = path[len(root) :]
        try:
            body, media = _answer(self.server.pages, inner, query)
        except PrecacheError as error:
            missing = isinstance(error, UsageError)
            status = HTTPStatus.NOT_FOUND if missing else HTTPStatus.INTERNAL_SERVER_ERROR
            up = "../" * inner.count("/") or "."
            page = error_page("This cannot be shown", str(error), up)
            self._send(status, _encoded(page), "text/html; charset=utf-8")
            return
        self._send(HTTPStatus.OK, body, media)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True
        self._send(status, f"precache view: {why}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, media: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", f"{policy(False)}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def version_string(self) -> str:
        return "precache"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def _is_ours(host: str) -> bool:
    """Whether a Host header names this machine: a page of another name must not read the answer."""
    name, _, port = host.partition(":")
    return name.lower() in NAMES and (port.isdecimal() or not port)


def _answer(pages: Pages, path: str, query: str) -> Answer:
    """What lies at a path below the server's root."""
    match [unquote(part) for part in path.split("/")]:
        case [""]:
            return _grid(pages, query)
        case ["row", row]:
            return _encoded(pages.sample(_number(row))), "text/html; charset=utf-8"
        case ["raw", row]:
            return pages.raw(_number(row))
        case ["stored", row, name] if name.endswith(".png"):
            return pages.stored_png(_number(row), name.removesuffix(".png")), "image/png"
        case ["step", row, name, file] if file.endswith(".png"):
            number = _number(file.removesuffix(".png"))
            return pages.step_png(_number(row), name, number), "image/png"
    raise UsageError("there is nothing at this address")


def _grid(pages: Pages, query: str) -> Answer:
    try:
        given = parse_qs(query, max_num_fields=20)
    except ValueError:
        raise UsageError("the address has too many parts") from None
    asked = {name: values[-1] for name, values in given.items()}
    wanted = Query(
        asked.get("q", ""),
        asked.get("match", "begins"),
        asked.get("class", "").strip(),
        asked.get("rows", "all"),
    )
    before = "before" in asked
    start = _number(asked.get("before" if before else "from", "0"))
    page = pages.grid(wanted, start, before=before)
    return _encoded(page), "text/html; charset=utf-8"


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UsageError(f"{text!r} is no row number")
    return int(text)


def _encoded(page: str) -> bytes:
    return page.encode("utf-8", errors="replace")
