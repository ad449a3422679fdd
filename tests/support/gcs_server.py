"""A server on loopback that speaks what gcsfs uses of Google Cloud Storage's JSON API, in memory.

Source: https://cloud.google.com/storage/docs/json_api/v1
"""

import base64
import hashlib
import itertools
import json
import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.parser import BytesParser
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import google_crc32c

from tests.support.servers import Handler, HTTPServer, UnsatisfiableError, byte_range


@dataclass(frozen=True)
class _Object:
    """One generation of an object."""

    bucket: str
    name: str
    data: bytes
    generation: int
    updated: datetime

    @property
    def resource(self) -> dict[str, Any]:
        """Its metadata. Source: …/json_api/v1/objects#resource"""
        time = f"{self.updated:%Y-%m-%dT%H:%M:%S}.{self.updated.microsecond // 1000:03d}Z"
        return {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "bucket": self.bucket,
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


class GCSServer(HTTPServer):
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
        self.buckets: dict[str, dict[str, _Object]] = {}
        self.uploads: dict[str, _Upload] = {}
        self._generations = itertools.count(1_700_000_000_000_000)
        super().__init__(_Handler)

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

    def objects(self, bucket: str) -> dict[str, _Object]:
        try:
            return self.buckets[bucket]
        except KeyError:
            raise RefusedError(404, "The specified bucket does not exist.") from None

    def get(self, bucket: str, name: str, generation: str | None = None) -> _Object:
        found = self.objects(bucket).get(name)
        if found is None or generation not in (None, str(found.generation)):
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        return found

    def insert(self, bucket: str, name: str, data: bytes, create: bool) -> _Object:
        """A new generation; with `create`, only where there is none."""
        with self.lock:
            objects = self.objects(bucket)
            if create and name in objects:
                raise RefusedError(412, "At least one of the pre-conditions did not hold.")
            objects[name] = _Object(bucket, name, data, next(self._generations), self.clock())
            return objects[name]

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        """One page; objects below a delimiter count as their common prefix."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = base64.b64decode(query.get("pageToken", "")).decode()
        most = min(int(query.get("maxResults", self.page)), self.page)
        entries: dict[str, _Object | None] = {}
        with self.lock:
            self.pages += 1
            for name, found in sorted(self.objects(bucket).items()):
                if name.startswith(prefix):
                    inside, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
                    entries[prefix + inside + cut] = None if cut else found
        start = query.get("startOffset", "")
        names = [name for name in entries if name > after and name >= start]
        shown = [(name, entries[name]) for name in names[:most]]
        page: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [found.resource for _, found in shown if found],
            "prefixes": [name for name, found in shown if found is None],
        }
        if len(names) > most:
            page["nextPageToken"] = base64.b64encode(names[most - 1].encode()).decode()
        return page

    # --- resumable uploads ----------------------------------------------------------------------

    def begin(self, bucket: str, name: str, create: bool) -> str:
        """The id of a new upload."""
        self.objects(bucket)
        with self.lock:
            number = f"upload-{next(self._generations)}"
            self.uploads[number] = _Upload(bucket, name, create)
        return number

    def add(self, number: str, start: int, data: bytes, total: str) -> _Object | int:
        """The object once all its bytes are here; until then, how many are."""
        upload = self.uploads.get(number)
        if upload is None:
            raise RefusedError(404, f"No such upload: {number}")
        if upload.done is None:
            if start > len(upload.data):
                raise RefusedError(400, f"bytes from {len(upload.data)} on are missing")
            upload.data[start:] = data
            if str(len(upload.data)) != total:
                return len(upload.data)
            whole = bytes(upload.data)
            upload.done = self.insert(upload.bucket, upload.name, whole, upload.create)
        return upload.done


class _Handler(Handler):
    """Answers by methods whose names, and the names of buckets and objects, `ROUTES` has."""

    server: GCSServer

    def respond(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query))
        self.creates = self.query.get("ifGenerationMatch") == "0"
        try:
            for method, path, name in ROUTES:
                found = re.fullmatch(path.replace("*", "([^/]+)"), url.path.rstrip("/"))
                if method == self.command and found:
                    getattr(self, f"_{name}")(*map(unquote, found.groups()))
                    return
            raise RefusedError(404, "Not Found")
        except RefusedError as error:
            said = {"code": error.status, "message": str(error)}
            self._json({"error": said}, error.status)

    do_GET = do_POST = do_PUT = do_DELETE = respond

    def _json(self, document: dict[str, Any], status: int = 200) -> None:
        headers = {"Content-Type": "application/json; charset=UTF-8"}
        self.send(status, json.dumps(document).encode(), headers)

    def _insert_bucket(self) -> None:
        name = json.loads(self.body)["name"]
        with self.server.lock:
            if name in self.server.buckets:
                raise RefusedError(409, f"Your previous request to create {name} succeeded")
            self.server.buckets[name] = {}
        self._bucket(name)

    def _bucket(self, bucket: str) -> None:
        self.server.objects(bucket)
        self._json({"kind": "storage#bucket", "id": bucket, "name": bucket})

    def _list(self, bucket: str) -> None:
        self._json(self.server.list(bucket, self.query))

    def _get(self, bucket: str, name: str) -> None:
        if self.query.get("alt") == "media":
            self._media(bucket, name)
        else:
            self._json(self.server.get(bucket, name, self.query.get("generation")).resource)

    def _media(self, bucket: str, name: str) -> None:
        """The bytes that the request's range wants. Source: RFC 9110, section 14."""
        found = self.server.get(bucket, name, self.query.get("generation"))
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
            return self.send(416, said, {"Content-Range": f"bytes */{size}"})
        if wanted is None:
            return self.send(200, found.data, headers)
        start, stop = wanted
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return self.send(206, found.data[start:stop], headers)

    def _delete(self, bucket: str, name: str) -> None:
        with self.server.lock:
            self.server.get(bucket, name)
            del self.server.buckets[bucket][name]
        self.send(204, b"")

    def _rewrite(self, bucket: str, name: str, to: str, target: str) -> None:
        """A copy, at once."""
        data = self.server.get(bucket, name, self.query.get("sourceGeneration")).data
        made = self.server.insert(to, target, data, self.creates)
        found = {"objectSize": str(len(data)), "totalBytesRewritten": str(len(data))}
        found |= {"kind": "storage#rewriteResponse", "done": True, "resource": made.resource}
        self._json(found)

    def _upload(self, bucket: str) -> None:
        if "upload_id" in self.query:
            self._continue(bucket)
        elif self.query.get("uploadType") == "resumable":
            name = self.query.get("name") or json.loads(self.body)["name"]
            number = self.server.begin(bucket, name, self.creates)
            there = f"http://{self.headers['Host']}{urlsplit(self.path).path}"
            location = f"{there}?uploadType=resumable&upload_id={number}"
            self.send(200, b"", {"Location": location})
        elif self.query.get("uploadType") == "multipart":
            name, data = _related(self.headers["Content-Type"], self.body)
            self._json(self.server.insert(bucket, name, data, self.creates).resource)
        else:
            raise RefusedError(400, f"uploadType {self.query.get('uploadType')} is not known")

    def _continue(self, bucket: str) -> None:
        """Take bytes in. Source: …/storage/docs/performing-resumable-uploads"""
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        start = 0 if span == "*" else int(span.split("-")[0])
        there = self.server.add(self.query["upload_id"], start, self.body, total)
        if isinstance(there, _Object):
            self._json(there.resource)
        else:
            self.send(308, b"", {"Range": f"bytes=0-{there - 1}"})

    def _cancel(self, bucket: str) -> None:
        self.server.uploads.pop(self.query.get("upload_id", ""), None)
        self.send(499, b"")


ROUTES = (
    ("POST", "/storage/v1/b", "insert_bucket"),
    ("GET", "/storage/v1/b/*", "bucket"),
    ("GET", "/storage/v1/b/*/o", "list"),
    ("GET", "/storage/v1/b/*/o/*", "get"),
    ("GET", "/download/storage/v1/b/*/o/*", "media"),
    ("DELETE", "/storage/v1/b/*/o/*", "delete"),
    ("POST", "/storage/v1/b/*/o/*/rewriteTo/b/*/o/*", "rewrite"),
    ("POST", "/upload/storage/v1/b/*/o", "upload"),
    ("PUT", "/upload/storage/v1/b/*/o", "upload"),
    ("DELETE", "/upload/storage/v1/b/*/o", "cancel"),
)
"""Method, path, and who answers; slashes of objects' names are quoted there."""


def _related(content_type: str, body: bytes) -> tuple[str, bytes]:
    """Name and bytes of an object that comes in one multipart/related body."""
    head = BytesParser().parsebytes(f"Content-Type: {content_type}\n\n".encode())
    boundary = f"--{head.get_boundary()}".encode()
    _, metadata, rest = body.split(boundary, 2)
    media, _, _ = rest.rpartition(b"\n" + boundary + b"--")
    _, _, document = metadata.partition(b"\n\n")
    _, _, data = media.partition(b"\n\n")
    return json.loads(document)["name"], data
