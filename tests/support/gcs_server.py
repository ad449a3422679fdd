"""A server on loopback that speaks what gcsfs uses of Google Cloud Storage's JSON API, in memory.

Source: https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.parser import BytesParser
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import google_crc32c

from tests.support.servers import POLL, PatientServer, UnsatisfiableError, byte_range

Answer = tuple[int, bytes, dict[str, str]]
"""Status, body, headers."""


@dataclass(frozen=True)
class _Object:
    """One generation of an object."""

    name: str
    data: bytes
    generation: int
    updated: datetime

    def resource(self, bucket: str) -> dict[str, Any]:
        """Its metadata. Source: …/json_api/v1/objects#resource"""
        time = f"{self.updated:%Y-%m-%dT%H:%M:%S}.{self.updated.microsecond // 1000:03d}Z"
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{self.name}/{self.generation}",
            "bucket": bucket,
            "name": self.name,
            "generation": str(self.generation),
            "metageneration": "1",
            "size": str(len(self.data)),
            "timeCreated": time,
            "updated": time,
            "contentType": "application/octet-stream",
            "etag": self.etag,
            "md5Hash": base64.b64encode(hashlib.md5(self.data).digest()).decode(),
            "crc32c": self.crc32c,
        }

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}/1".encode()).decode()

    @property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()


@dataclass
class _Upload:
    """A resumable upload: what came so far, and the object once all did."""

    bucket: str
    name: str
    create: bool
    data: bytearray = field(default_factory=bytearray)
    done: _Object | None = None


class RefusedError(Exception):
    """A request that is answered with an error: its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GCSServer:
    """Buckets in memory.

    Attributes
    ----------
    page
        Entries of a listing's page at most, whatever a request wishes.
    pages
        Pages that were asked for.
    clock
        The time at which objects are written.
    """

    def __init__(self) -> None:
        self.page = 1000
        self.pages = 0
        self.clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        self._buckets: dict[str, dict[str, _Object]] = {}
        self._uploads: dict[str, _Upload] = {}
        self._generations = itertools.count(1_700_000_000_000_000)
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = PatientServer(("127.0.0.1", 0), handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=[POLL], daemon=True)
        self._thread.start()

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Storage options of gcsfs, through a proxy's port or straight."""
        return {
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "token": "anon",
            "project": "test",
        }

    def make_bucket(self, name: str) -> None:
        body = json.dumps({"name": name}).encode()
        url = f"http://127.0.0.1:{self.port}/storage/v1/b?project=test"
        urllib.request.urlopen(urllib.request.Request(url, body, method="POST")).close()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- buckets and objects --------------------------------------------------------------------

    def insert_bucket(self, name: str) -> dict[str, Any]:
        with self._lock:
            if name in self._buckets:
                raise RefusedError(409, f"Your previous request to create {name} succeeded")
            self._buckets[name] = {}
        return self.bucket(name)

    def bucket(self, name: str) -> dict[str, Any]:
        self._objects(name)
        return {"kind": "storage#bucket", "id": name, "name": name}

    def _objects(self, bucket: str) -> dict[str, _Object]:
        try:
            return self._buckets[bucket]
        except KeyError:
            raise RefusedError(404, "The specified bucket does not exist.") from None

    def get(self, bucket: str, name: str, generation: str | None = None) -> _Object:
        found = self._objects(bucket).get(name)
        if found is None or generation not in (None, str(found.generation)):
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        return found

    def insert(self, bucket: str, name: str, data: bytes, create: bool) -> _Object:
        """A new generation; with `create`, only where there is none."""
        with self._lock:
            objects = self._objects(bucket)
            if create and name in objects:
                raise RefusedError(412, "At least one of the pre-conditions did not hold.")
            made = _Object(name, data, next(self._generations), self.clock())
            objects[name] = made
        return made

    def delete(self, bucket: str, name: str) -> None:
        with self._lock:
            self.get(bucket, name)
            del self._buckets[bucket][name]

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        """One page; objects below a delimiter count as their common prefix."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = base64.b64decode(query.get("pageToken", "")).decode()
        most = min(int(query.get("maxResults", self.page)), self.page)
        entries: dict[str, _Object | None] = {}
        with self._lock:
            self.pages += 1
            for name, found in sorted(self._objects(bucket).items()):
                if name.startswith(prefix):
                    inside, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
                    entries[prefix + inside + cut] = None if cut else found
        start = query.get("startOffset", "")
        names = [name for name in entries if name > after and name >= start]
        page: dict[str, Any] = {"kind": "storage#objects", "items": [], "prefixes": []}
        for name in names[:most]:
            if (each := entries[name]) is None:
                page["prefixes"].append(name)
            else:
                page["items"].append(each.resource(bucket))
        if len(names) > most:
            page["nextPageToken"] = base64.b64encode(names[most - 1].encode()).decode()
        return page

    # --- resumable uploads ----------------------------------------------------------------------

    def begin(self, bucket: str, name: str, create: bool) -> str:
        """The id of a new upload."""
        self._objects(bucket)
        with self._lock:
            number = f"upload-{next(self._generations)}"
            self._uploads[number] = _Upload(bucket, name, create)
        return number

    def cancel(self, number: str) -> None:
        self._uploads.pop(number, None)

    def add(self, number: str, start: int, data: bytes, total: int | None) -> _Object | int:
        """The object once all its bytes are here; until then, how many are."""
        upload = self._uploads.get(number)
        if upload is None:
            raise RefusedError(404, f"No such upload: {number}")
        if upload.done is None:
            if start > len(upload.data):
                raise RefusedError(400, f"bytes from {len(upload.data)} on are missing")
            upload.data[start:] = data
            if len(upload.data) != total:
                return len(upload.data)
            whole = bytes(upload.data)
            upload.done = self.insert(upload.bucket, upload.name, whole, upload.create)
        return upload.done


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: GCSServer

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        try:
            act = self._actions()[self.command, _shape(url.path)]
        except KeyError:
            act = _not_found
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        try:
            status, data, headers = act(parts, dict(parse_qsl(url.query)), body)
        except RefusedError as error:
            said = {"error": {"code": error.status, "message": str(error)}}
            status, data, headers = error.status, *_json(said)[1:]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def _actions(self) -> dict[tuple[str, str], Callable[..., Answer]]:
        return {
            ("POST", "storage/v1/b"): self._insert_bucket,
            ("GET", "storage/v1/b/*"): self._bucket,
            ("GET", "storage/v1/b/*/o"): self._list,
            ("GET", "storage/v1/b/*/o/*"): self._get,
            ("GET", "download/storage/v1/b/*/o/*"): self._download,
            ("DELETE", "storage/v1/b/*/o/*"): self._delete,
            ("POST", "storage/v1/b/*/o/*/rewriteTo/b/*/o/*"): self._rewrite,
            ("POST", "upload/storage/v1/b/*/o"): self._upload,
            ("PUT", "upload/storage/v1/b/*/o"): self._upload,
            ("DELETE", "upload/storage/v1/b/*/o"): self._cancel,
            ("GET", "*/*"): self._get_xml,
        }

    def _insert_bucket(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        return _json(self.store.insert_bucket(json.loads(body)["name"]))

    def _bucket(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        return _json(self.store.bucket(parts[3]))

    def _list(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        return _json(self.store.list(parts[3], query))

    def _get(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        if query.get("alt") == "media":
            return self._media(self.store.get(parts[3], parts[5], query.get("generation")))
        found = self.store.get(parts[3], parts[5], query.get("generation"))
        return _json(found.resource(parts[3]))

    def _download(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        return self._media(self.store.get(parts[4], parts[6], query.get("generation")))

    def _get_xml(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        """Google's XML API: bucket and object make up the path."""
        return self._media(self.store.get(*parts))

    def _media(self, found: _Object) -> Answer:
        """The bytes that the request's range wants. Source: RFC 9110, section 14."""
        size = len(found.data)
        headers = {
            "Content-Type": "application/octet-stream",
            "ETag": found.etag,
            "Last-Modified": format_datetime(found.updated, usegmt=True),
            "X-Goog-Generation": str(found.generation),
            "X-Goog-Hash": f"crc32c={found.crc32c}",
        }
        try:
            wanted = byte_range(self.headers.get("Range"), size)
        except UnsatisfiableError:
            said = b"The requested range cannot be satisfied."
            return 416, said, {"Content-Range": f"bytes */{size}"}
        if wanted is None:
            return 200, found.data, headers
        start, stop = wanted
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, found.data[start:stop], headers

    def _delete(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        self.store.delete(parts[3], parts[5])
        return 204, b"", {}

    def _rewrite(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        """A copy, at once."""
        data = self.store.get(parts[3], parts[5], query.get("sourceGeneration")).data
        create = query.get("ifGenerationMatch") == "0"
        made = self.store.insert(parts[8], parts[10], data, create)
        found = {"objectSize": str(len(data)), "totalBytesRewritten": str(len(data))}
        resource = made.resource(parts[8])
        return _json(
            {"kind": "storage#rewriteResponse", "done": True, **found, "resource": resource}
        )

    def _upload(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        bucket, create = parts[4], query.get("ifGenerationMatch") == "0"
        if "upload_id" in query:
            return self._continue(query["upload_id"], body)
        if query.get("uploadType") == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            number = self.store.begin(bucket, name, create)
            there = f"http://{self.headers['Host']}{urlsplit(self.path).path}"
            return 200, b"", {"Location": f"{there}?uploadType=resumable&upload_id={number}"}
        if query.get("uploadType") != "multipart":
            raise RefusedError(400, f"uploadType {query.get('uploadType')} is not known")
        name, data = _related(self.headers["Content-Type"], body)
        return _json(self.store.insert(bucket, name, data, create).resource(bucket))

    def _continue(self, number: str, body: bytes) -> Answer:
        """Take bytes in. Source: …/storage/docs/performing-resumable-uploads"""
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        start = 0 if span == "*" else int(span.split("-")[0])
        there = self.store.add(number, start, body, None if total == "*" else int(total))
        if isinstance(there, _Object):
            return _json(there.resource(self.path.split("/")[5]))
        return 308, b"", {"Range": f"bytes=0-{there - 1}"}

    def _cancel(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        self.store.cancel(query.get("upload_id", ""))
        return 499, b"", {}

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def _shape(path: str) -> str:
    """A path with a star for each name: of a bucket, or of an object, whose slashes are quoted."""
    parts = path.strip("/").split("/")
    if len(parts) == 2:
        return "*/*"
    first = parts.index("b") if "b" in parts else len(parts)
    names = {first + place for place in (1, 3, 6, 8)}
    return "/".join("*" if n in names else part for n, part in enumerate(parts))


def _not_found(parts: list[str], query: dict[str, str], body: bytes) -> Answer:
    raise RefusedError(404, "Not Found")


def _json(document: dict[str, Any]) -> Answer:
    return 200, json.dumps(document).encode(), {"Content-Type": "application/json; charset=UTF-8"}


def _related(content_type: str, body: bytes) -> tuple[str, bytes]:
    """Name and bytes of an object that comes in one multipart/related body."""
    head = BytesParser().parsebytes(f"Content-Type: {content_type}\n\n".encode())
    boundary = f"--{head.get_boundary()}".encode()
    _, metadata, rest = body.split(boundary, 2)
    media, _, _ = rest.rpartition(b"\n" + boundary + b"--")
    _, _, document = metadata.partition(b"\n\n")
    _, _, data = media.partition(b"\n\n")
    return json.loads(document)["name"], data
