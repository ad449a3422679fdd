"""Google by gcsfs, web servers, and what other classes of fsspec reach (hf, memory)."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from glob import has_magic
from html import unescape
from typing import Any
from urllib.parse import quote, unquote, urljoin

import fsspec
from fsspec import asyn

from precache.messages import shown, url_parts
from precache.storage import retries
from precache.storage.backends import PathRange, user_agent
from precache.storage.base import FileInfo
from precache.storage.listing import KeyRange, Page

log = logging.getLogger(__name__)

GOOGLES_PAGE = 5000
"""Most objects in a page of Google's."""

GOOGLES_FIELDS = "nextPageToken,prefixes,items(name,size,updated,generation)"
"""Fields to request, of some twenty that Google has for an object."""

MOST_PAGE = 64 << 20
"""Bytes of a web page that lists files: of some 500,000 names."""

PAGE_SECONDS = 300.0
"""Most time from the first byte of such a page to the last."""

STREAMS = 100
"""Requests to a web server at a time; aiohttp opens as many connections."""

PIECE = 1 << 16
"""Bytes read at a time of the part before a range, if a server ignores ranges."""

_LINK = re.compile(
    r"""<a\s(?:[^<>]*?\s)?href\s*=\s*(?:"([^"]+)|'([^']+))|(https?://[^\s"'<>]+)""",
    re.IGNORECASE,
)
"""A link of a page; the search takes linear time in any page."""

_DECODED = ("gzip", "deflate", "br", "zstd")
"""Encodings that aiohttp decodes; others are metadata of uploads, such as ``base64``."""

_OF_URLS = "%/:?#[]@!$&()*+,;="
"""Characters of a URL that are not quoted once more."""


class Fsspec:
    """A `precache.storage.backends.Service` of any class of fsspec."""

    attempts = retries.ATTEMPTS
    strips_slashes = False
    no_name: re.Pattern[str] | None = None

    def __init__(self, protocol: str, options: Mapping[str, Any]) -> None:
        # fsspec keeps its instances by their arguments.
        self.fs = self._class(protocol, options)(use_listings_cache=False, **options)

    def _class(self, protocol: str, options: Mapping[str, Any]) -> Any:
        return fsspec.get_filesystem_class(protocol)

    def translated(self, error: Exception) -> Exception:
        # gcsfs aborts an upload after a 412, and that request may fail.
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        exists = retries.status_of(cause) == 412 or isinstance(error.__context__, FileExistsError)
        return FileExistsError() if exists else error

    def head(self, path: str) -> FileInfo:
        info = self.fs.info(path)
        if info["type"] == "directory":
            raise FileNotFoundError(path)
        return _described("", info)

    def read(self, parts: Sequence[PathRange], *, whole: bool) -> list[Any]:
        paths = [path for path, _, _ in parts]
        ends = [end for _, _, end in parts]
        starts = [None if end is None else start for _, start, end in parts]
        got = self.fs.cat_ranges(paths, starts, ends, on_error="return")
        return [_cut(*pair) for pair in zip(got, parts, strict=True)]

    def splits(self, root: str) -> bool:
        return False

    def page(self, root: str, span: KeyRange, *, again: bool) -> Page:
        path = f"{root}/{span.prefix}".rstrip("/")
        self.fs.invalidate_cache()
        page = Page([], [], None)
        for info in self.fs.ls(path, detail=True):
            name = info["name"].strip("/")
            if name == path.strip("/"):
                continue
            name = name.rpartition("/")[2]
            if info["type"] == "directory":
                page.folders.append(name)
            else:
                page.files.append(_described(name, info))
        return page

    def names(self, path: str) -> list[str]:
        return self.page(path, KeyRange(""), again=False).names()

    def put(self, path: str, data: bytes, *, new: bool) -> None:
        self.fs.pipe_file(path, data, mode="create" if new else "overwrite")

    def copy(self, source: str, target: str, *, new: bool) -> None:
        if new:
            self.put(target, self.fs.cat_file(source), new=True)
        else:
            self.fs.cp_file(source, target)

    def remove(self, path: str) -> None:
        if not has_magic(path):
            self.fs.rm(path, recursive=True)
            return
        for child in self.fs.find(path):  # `rm` would take the name for a pattern
            self.fs.rm_file(child)


class Google(Fsspec):
    """Google Cloud Storage by its JSON API."""

    def __init__(self, protocol: str, options: Mapping[str, Any]) -> None:
        if (logger := logging.getLogger("gcsfs")).level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)  # it logs what it raises as well
        # gcsfs has no time-out, and its own retries ignore Retry-After.
        limits = {"requests_timeout": retries.client_timeout()}
        session = _session_options(options.get("session_kwargs", {}), _trace("", wait=True))
        super().__init__(protocol, {**limits, **options, "session_kwargs": session})

    def _class(self, protocol: str, options: Mapping[str, Any]) -> Any:
        usual = fsspec.get_filesystem_class(protocol)
        server = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
        if not server or server == "default" or "googleapis.com" in server:
            return usual
        # gcsfs's usual class asks by gRPC what kind of bucket it is: a minute for each request.
        from gcsfs.core import GCSFileSystem

        return GCSFileSystem

    def head(self, path: str) -> FileInfo:
        bucket, _, key = path.partition("/")
        if not key:
            raise FileNotFoundError(path)
        item = self.fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
        return _described("", item)

    def splits(self, root: str) -> bool:
        return True

    def page(self, root: str, span: KeyRange, *, again: bool) -> Page:
        """List a page of what is at any depth below a prefix.

        Keys may have empty parts: no slash is added to them or taken away.
        """
        bucket, _, key = root.partition("/")
        prefix = f"{key}/{span.prefix}" if key else span.prefix
        start = f"{prefix}{span.after}" if span.after and not span.token else None
        answer = self._list(bucket, prefix=prefix, startOffset=start, pageToken=span.token)
        items = answer.get("items", ())
        files = [_described(item["name"].removeprefix(prefix), item) for item in items]
        return Page(files, [], answer.get("nextPageToken"))

    def names(self, path: str) -> list[str]:
        bucket, _, key = path.partition("/")
        prefix, names, token = f"{key}/" if key else "", list[str](), None
        while True:
            answer = self._list(bucket, prefix=prefix, delimiter="/", pageToken=token)
            names += [item["name"] for item in answer.get("items", ())]
            names += [below.removesuffix("/") for below in answer.get("prefixes", ())]
            if (token := answer.get("nextPageToken")) is None:
                return [name.removeprefix(prefix) for name in names]

    def _list(self, bucket: str, **places: str | None) -> Any:
        bounds = {name: value for name, value in places.items() if value}
        wanted = {"maxResults": GOOGLES_PAGE, "fields": GOOGLES_FIELDS}
        return self.fs.call("GET", "b/{}/o", bucket, **wanted, **bounds, json_out=True)

    def copy(self, source: str, target: str, *, new: bool) -> None:
        if not new:
            super().copy(source, target, new=False)
            return
        # gcsfs cannot copy to where nothing may exist.
        path = "b/{}/o/{}/rewriteTo/b/{}/o/{}"
        names = *self.fs.split_path(source)[:2], *self.fs.split_path(target)[:2]
        token, done = None, False
        while not done:  # a large object takes several requests
            answer = self.fs.call(
                "POST", path, *names, ifGenerationMatch=0, rewriteToken=token, json_out=True
            )
            token, done = answer.get("rewriteToken"), answer["done"]


class Web(Fsspec):
    """A web server, to be read: its pages list files. Paths are whole URLs.

    Parameters
    ----------
    within
        URL below which redirects must stay; empty for anywhere.
    """

    def __init__(self, protocol: str, options: Mapping[str, Any], within: str) -> None:
        limits = {"timeout": retries.client_timeout(), **options.get("client_kwargs", {})}
        session = _session_options(limits, _trace(within, wait=False))
        super().__init__(protocol, {**options, "client_kwargs": session})

    def translated(self, error: Exception) -> Exception:
        # fsspec reports every failed request as a missing file.
        cause = error.__cause__
        if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
            return error
        return error if retries.status_of(cause) in (404, 410) else cause

    def page(self, root: str, span: KeyRange, *, again: bool) -> Page:
        query = url_parts(root)[2]
        base = f"{root.removesuffix(query)}/{quote(span.prefix)}".rstrip("/")
        folders, files = set[str](), set[str]()
        for link in asyn.sync(self.fs.loop, self._links, base + query):
            to = urljoin(f"{base}/", quote(unescape(link), _OF_URLS))
            below, rest = to.partition("://")[2], f"{base}/".partition("://")[2]
            if not below.startswith(rest) or re.search("[?#]", to):
                continue  # a page may have links to itself, otherwise sorted
            name, slash, _ = below.removeprefix(rest).partition("/")
            (folders if slash else files).add(unquote(name, errors="surrogateescape"))
        infos = [FileInfo(name, -1, -1) for name in sorted(files - folders - {""})]
        return Page(infos, sorted(folders - {""}), None)

    async def _links(self, url: str) -> list[str]:
        """Links of a page, which may be endless, or in no encoding that exists."""
        session = await self.fs.set_session()
        async with session.get(self.fs.encode_url(url), **self.fs.kwargs) as answer:
            _raise_for_status(answer, url)
            if answer.headers.get("Content-Type", "text/html").partition(";")[0] != "text/html":
                return []
            page, began = bytearray(), time.monotonic()
            async for piece in answer.content.iter_any():
                page += piece
                if len(page) > MOST_PAGE or time.monotonic() - began > PAGE_SECONDS:
                    limits = f"{MOST_PAGE:,} bytes, or takes longer than {PAGE_SECONDS:g} s"
                    raise OSError(f"the page has more than {limits}")
        return ["".join(link) for link in _LINK.findall(page.decode("utf-8", "ignore"))]

    def read(self, parts: Sequence[PathRange], *, whole: bool) -> list[Any]:
        """Read parts, holding no more than was requested, even if the server sends more.

        Objects from their first byte on are not requested by ranges, since some servers cut these
        out of compressed bytes.
        """
        results: list[Any] = asyn.sync(self.fs.loop, self._read_all, parts, whole)
        return results

    async def _read_all(self, parts: Sequence[PathRange], whole: bool) -> list[Any]:
        fs, places = self.fs, asyncio.Semaphore(STREAMS)
        session = await fs.set_session()

        async def read(url: str, start: int, end: int | None) -> bytes:
            if end == start:
                return b""
            data, headers = bytearray(), dict(fs.kwargs.get("headers", {}))
            if not whole and end is not None:
                # Else some servers cut ranges out of compressed bytes.
                headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            options = {**fs.kwargs, "headers": headers}
            async with places, session.get(fs.encode_url(url), **options) as answer:
                _raise_for_status(answer, url)
                if answer.status == 206:
                    _require_range(answer, start)
                skipped = 0 if answer.status == 206 else start
                while skipped and (piece := await answer.content.read(min(skipped, PIECE))):
                    skipped -= len(piece)
                most = sys.maxsize if end is None else end - start
                while piece := await answer.content.read(most - len(data)):
                    data += piece
                if "Range" in headers and answer.status != 206 and not answer.content.at_eof():
                    _warn_of_whole_objects(shown(url).split("/")[2])
            return bytes(data)

        return await asyncio.gather(*(read(*part) for part in parts), return_exceptions=True)


def _cut(got: Any, part: PathRange) -> Any:
    """Cut the requested range out of the answer of a server that ignores ranges."""
    path, start, end = part
    if end is None or isinstance(got, Exception) or len(got) <= end - start:
        return got
    _warn_of_whole_objects(path.partition("/")[0])
    return got[start:end]


def _raise_for_status(answer: Any, url: str) -> None:
    if answer.status == 404:
        raise FileNotFoundError(url)
    answer.raise_for_status()


def _require_range(answer: Any, start: int) -> None:
    """Raise `OSError` for a part of an object that is another than the requested one."""
    part, coding = (answer.headers.get(f"Content-{name}", "") for name in ("Range", "Encoding"))
    if coding.lower() in _DECODED or not re.match(rf"bytes {start}-", part):
        raise OSError(f"the server sent another part ({part} {coding}) than was asked for")


@functools.cache
def _warn_of_whole_objects(server: str) -> None:
    """Log the warning once for each server."""
    log.warning(
        "%s sends whole objects where parts are asked for; to train from it, give cache_dir or "
        "pull the store",
        server,
    )


# --- what the libraries say ---------------------------------------------------------------------


def _described(name: str, info: Mapping[str, Any]) -> FileInfo:
    size = info.get("size")
    return FileInfo(name, -1 if size is None else int(size), _mtime_ns(info), _etag(info))


def _mtime_ns(info: Mapping[str, Any]) -> int:
    for name in ("updated", "last_modified", "mtime", "created"):
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e6) * 1000
        if isinstance(value, int | float):
            return int(value * 1e9)
    return -1


def _etag(info: Mapping[str, Any]) -> str:
    for name in ("generation", "ETag", "etag", "blob_id", "Last-Modified"):
        if info.get(name):
            return str(info[name]).strip('"')
    return ""


# --- connections of aiohttp ---------------------------------------------------------------------


def _session_options(own: Mapping[str, Any], trace: Any) -> dict[str, Any]:
    """Return options of a session that uses the proxies of the environment."""
    traces = [*own.get("trace_configs", []), trace]
    return {"trust_env": True, **own, "trace_configs": traces}


@functools.cache  # fsspec keeps instances by their arguments
def _trace(within: str, *, wait: bool) -> Any:
    """Return a trace that names precache to the server, and refuses redirects out of a URL.

    Parameters
    ----------
    wait
        Wait as long as the server says, for a library that retries by itself and ignores that.
    """
    import aiohttp
    from yarl import URL

    inside = URL(within)

    async def begun(session: Any, context: Any, request: Any) -> None:
        own = request.headers.get("User-Agent", "")
        if not own or own.startswith("python-gcsfs/"):
            request.headers["User-Agent"] = f"{user_agent()} {own}".rstrip()

    async def answered(session: Any, context: Any, request: Any) -> None:
        await retries.wait_retry_after(request.response.status, request.response.headers)

    async def redirected(session: Any, context: Any, request: Any) -> None:
        """From http to https is allowed."""
        headers = request.response.headers
        to = request.url.join(URL(headers.get("Location") or headers.get("URI") or ""))
        safer = inside.with_scheme("https").with_port(None) if inside.is_default_port() else inside
        below = f"{to.path}/".startswith(f"{inside.path.rstrip('/')}/")
        same = to.user is to.password is None and any(
            (to.scheme, to.host, to.port) == (url.scheme, url.host, url.port)
            for url in (inside, safer)
        )
        if not (same and below) or ".." in to.path.split("/"):
            request.response.close()
            where = to.with_user(None).with_query(None).with_fragment(None)
            raise OSError(
                f"the server redirects to {where}, which is not below {shown(within)}; give the "
                "address where the files lie, or, of a source, --follow-links"
            )

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begun)
    if wait:
        trace.on_request_end.append(answered)
    if within:
        trace.on_request_redirect.append(redirected)
    return trace
