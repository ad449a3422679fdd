"""An S3 server of names alone, which answers listings page by page; nothing there can be read."""

from __future__ import annotations

import threading
import time
import urllib.parse
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any
from xml.sax.saxutils import escape

import xxhash

from tests.servers import POLL, PatientServer

PAGE = 1000
"""Names in a page, as with S3."""


class ListingServer:
    """A bucket of some names, in order; a page of a prefix takes `latency` seconds.

    Attributes
    ----------
    pages
        How many were asked for.
    starts
        Whether a listing begins where it is to, as not every service has it.
    """

    def __init__(self, names: Sequence[str], page: int = PAGE, latency: float = 0.0) -> None:
        self.names, self.page, self.latency = names, page, latency
        self.pages, self._lock = 0, threading.Lock()
        self.starts = True
        handler = type("Handler", (_Handler,), {"bucket": self})
        self._server = PatientServer(("127.0.0.1", 0), handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=[POLL], daemon=True)
        self._thread.start()

    def options(self) -> dict[str, Any]:
        """Storage options of s3fs."""
        return {
            "key": "someone",
            "secret": "something",
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, prefix: str, delimiter: str, after: str) -> str:
        """The XML of a page, of the names behind `after`."""
        with self._lock:
            self.pages += 1
        time.sleep(self.latency)
        found = ["<EncodingType>url</EncodingType>"]
        at, last = max(bisect_left(self.names, prefix), bisect_right(self.names, after)), ""
        while at < len(self.names) and self.names[at].startswith(prefix):
            if len(found) > self.page:
                token = f"<NextContinuationToken>{_quoted(last)}</NextContinuationToken>"
                found.append(f"<IsTruncated>true</IsTruncated>{token}")
                break
            name = self.names[at]
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                last, at = name, at + 1
                found.append(_contents(name))
            else:  # all below the folder: no name lies between them and what follows "/"
                folder = name[: cut + 1]
                last = folder + "\U0010ffff"
                at = bisect_left(self.names, last)
                found.append(f"<CommonPrefixes><Prefix>{_quoted(folder)}</Prefix></CommonPrefixes>")
        kind = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return f"<ListBucketResult {kind}>{''.join(found)}</ListBucketResult>"


def _contents(name: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(name.encode())
    return (
        f"<Contents><Key>{_quoted(name)}</Key><LastModified>2024-05-17T08:30:00.000Z</LastModified>"
        f"<ETag>&quot;{digest}&quot;</ETag><ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm>"
        f"<ChecksumType>FULL_OBJECT</ChecksumType><Size>{100_000 + len(name)}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _quoted(name: str) -> str:
    return escape(urllib.parse.quote_plus(name, "/"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket: ListingServer

    def do_GET(self) -> None:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        after = urllib.parse.unquote_plus(query.get("continuation-token", ""))
        if self.bucket.starts:
            after = after or query.get("start-after", "")
        data = self.bucket.answer(query.get("prefix", ""), query.get("delimiter", ""), after)
        self._answer(200, data.encode())

    def do_HEAD(self) -> None:
        bucket = "/" not in urllib.parse.urlsplit(self.path).path.strip("/")
        self._answer(200 if bucket else 404, b"")

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""
