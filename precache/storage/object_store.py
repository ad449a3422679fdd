"""S3 and Azure through obstore.

obstore's own retries are off. They know no Retry-After, take a body that was cut off for whole,
give up at a page of a listing that breaks off and at the 409 by which S3 refuses one of two
conditional writes, and log nothing; beside those of `precache.storage.retries`, which all services
share, they would multiply attempts.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from fsspec import asyn

from precache.storage import retries
from precache.storage.backends import PathRange
from precache.storage.base import FileInfo
from precache.storage.listing import KeyRange, Page
from precache.storage.service_options import Bucket, described, open_bucket

AT_ONCE = 64
"""Requests under way at a time in one call."""

PAGE = {"s3": 1000, "azure": 5000}
"""Extra of precache -> objects that its service lists in one answer."""

DELETED_AT_ONCE = 250
"""Objects removed by one request; Azure allows 256."""

SMALL = 1 << 20
"""Bytes that are sent within the time that a silent server gets."""

UPLOAD_PART, UPLOADED_AT_ONCE = 50 << 20, 4
"""Bytes of a part of a larger object, and parts that are sent at a time."""

DELIVERY_SECONDS = 1.0
"""Longest wait at the end of the process for answers that are being delivered."""

_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][\w-]*)*)")
_CODE = re.compile(r"<Code>\s*([^<]+?)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<\n]+)")
_REMOVAL = re.compile(r"(?:Bulk delete|DeleteObjects) request failed .*\(code: (\w+)\)")
_PROVIDER = re.compile(r"credential provider: (\w+)")

_STATUS_OF_CODE = {
    "AccessDenied": 403,
    "BlobAlreadyExists": 412,
    "ExpiredToken": 403,
    "InvalidToken": 403,
    "RequestTimeout": 408,
}
"""Error codes that are more precise than their status. Source: "Error responses",
Amazon S3 API Reference; "Blob service error codes", Azure Storage REST API Reference."""


class ServiceError(Exception):
    """The service answered with an error.

    Attributes
    ----------
    status
        HTTP status.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status

    def __reduce__(self) -> Any:
        return ServiceError, (str(self), self.status)


def _error_of(status: int, reason: str) -> Exception:
    """The exception for a status of HTTP."""
    if status == 404:
        return FileNotFoundError(reason)
    if status == 412:
        return FileExistsError(reason)
    return PermissionError(reason) if status in (401, 403) else ServiceError(reason, status)


def _translate(error: Exception) -> Exception:
    """Translate an error of obstore, without the parts of its text that repeat the request."""
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):
        return FileNotFoundError("there is no such object")
    if not isinstance(error, exceptions.BaseError | ValueError):
        return error
    text = str(error).partition("\n\nDebug source:")[0]
    answer, code, message = _STATUS.search(text), _CODE.search(text), _MESSAGE.search(text)
    if answer:
        status, reason = int(answer[1][:3]), f"the service answered {answer[1]}"
        if code:
            reason += f" ({code[1]}{f': {message[1]}' if message else ''})"
            status = _STATUS_OF_CODE.get(code[1], status)
        return _error_of(status, reason)
    if removal := _REMOVAL.search(text):
        status = int(removal[1]) if removal[1].isdigit() else _STATUS_OF_CODE.get(removal[1], 503)
        return _error_of(status, f"the service answered {removal[1]}")
    if isinstance(error, exceptions.UnauthenticatedError):
        kind = _PROVIDER.search(text)  # and not its text, which may repeat a key
        return PermissionError(f"no credentials can be had ({kind[1] if kind else 'no reason'})")
    reason = re.sub(r"^Generic \w+ error: ", "", text.partition("\n")[0].rpartition(" - ")[2])
    if "CONTENT_RANGE" in reason and reason.endswith('/0"'):  # Azurite's answer of an empty blob
        return ServiceError(reason, 416)
    if isinstance(error, exceptions.GenericError):
        return ConnectionError("the server is silent" if "TimedOut" in str(error) else reason)
    return ValueError(reason)


@dataclass(frozen=True)
class _Stream:
    """A listing in progress; without its stream, as in another process, it starts again.

    Attributes
    ----------
    pages
        Full pages listed so far, if the bucket is unordered.
    """

    stream: Any
    pages: int

    def __reduce__(self) -> Any:
        return _Stream, (None, self.pages)


class _ByLibrary(NamedTuple):
    """The position of a listing by the service's own library.

    Attributes
    ----------
    skip
        Entries that were listed before, to be left out.
    """

    token: str | None
    after: str
    skip: int


class ObjectStore:
    """The buckets of one S3 or Azure account: a `precache.storage.backends.Service`.

    Parameters
    ----------
    kind
        ``s3`` or ``azure``.
    options
        Storage options as people give them; see `precache.storage.service_options`.
    """

    attempts = retries.BUSY_ATTEMPTS
    strips_slashes = True
    no_name = re.compile(r"[\x00-\x1f\x7f]")

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self._kind, self._options = kind, options
        self._buckets: dict[str, Bucket] = {}
        self._opening = threading.Lock()

    def _at(self, path: str) -> tuple[Bucket, str]:
        name, _, key = path.partition("/")
        with self._opening:
            if name not in self._buckets:
                self._buckets[name] = open_bucket(self._kind, name, self._options)
            return self._buckets[name], key

    def translated(self, error: Exception) -> Exception:
        return _translate(error)

    # --- reading --------------------------------------------------------------------------------

    def head(self, path: str) -> FileInfo:
        import obstore

        bucket, key = self._at(path)
        if not key:
            raise FileNotFoundError(path)  # the bucket is no object; Azure calls that a bad request
        return _described(_wait(obstore.head_async, bucket.reads, key), 0)

    def _has(self, path: str) -> bool:
        try:
            self.head(path)
        except Exception:
            return False
        return True

    def read(self, parts: Sequence[PathRange], *, whole: bool) -> list[Any]:
        located = [(*self._at(path), start, end) for path, start, end in parts]
        results: list[Any] = asyn.sync(asyn.get_loop(), _read_all, located)
        return results

    # --- listing --------------------------------------------------------------------------------

    def splits(self, root: str) -> bool:
        return self._at(root)[0].ordered

    def page(self, root: str, span: KeyRange, *, again: bool) -> Page:
        """List a page of all that lies below a prefix, at any depth."""
        import obstore

        path = f"{root}/{span.prefix}".rstrip("/")
        bucket, key = self._at(path)
        if isinstance(span.token, _ByLibrary):
            return self._page_by_library(bucket, key, span.token)
        rooted = not key and span.token is None and span.after < "/"
        if rooted and self._by_library(bucket, "/", _ByLibrary(None, "", 0))[0]:
            # obstore takes a key that begins with a slash for one without.
            return self._page_by_library(bucket, key, _ByLibrary(None, span.after, 0))
        seen = max(span.after, span.seen) if bucket.ordered else ""
        pages = 0 if bucket.ordered or span.token is None else span.token.pages
        size = PAGE[self._kind]
        stream, again_from = None if again or span.token is None else span.token.stream, 0
        if stream is None:
            start = f"{key}/{seen}".lstrip("/") if seen else None
            stream = obstore.list(bucket.reads, key or None, offset=start, chunk_size=size)
            again_from = pages
        try:
            for _ in range(again_from):
                next(stream, [])
            listed: Sequence[Any] = next(stream, [])
        except Exception as caught:
            error = _translate(caught)
            if isinstance(error, ValueError):  # a key that obstore takes for no path
                return self._page_by_library(bucket, key, _ByLibrary(None, seen, pages * size))
            # Hierarchical accounts of Azure refuse to list below a blob.
            if retries.status_of(error) == 409 and self._has(path):
                return Page([], [], None)
            raise
        skip = len(key) + 1 if key else 0
        more = _Stream(stream, pages + 1) if len(listed) == size else None
        return Page([_described(item, skip) for item in listed], [], more)

    def _page_by_library(self, bucket: Bucket, key: str, token: _ByLibrary) -> Page:
        """List a page through the service's own library, which takes any key."""
        prefix = f"{key}/" if key else ""
        files, more = self._by_library(bucket, prefix, token)
        files = [info._replace(name=info.name.removeprefix(prefix)) for info in files]
        left = max(0, token.skip - len(files))
        next_token = _ByLibrary(more, token.after, left) if more else None
        return Page(files[token.skip :], [], next_token)

    def _by_library(
        self, bucket: Bucket, prefix: str, token: _ByLibrary
    ) -> tuple[list[FileInfo], str | None]:
        try:
            return bucket.list_any_keys(prefix, token.after, token.token)
        except Exception as error:
            raise _translate_from_library(error) from None

    def names(self, path: str) -> list[str]:
        import obstore

        bucket, key = self._at(path)
        try:
            listing = _wait(obstore.list_with_delimiter_async, bucket.reads, key or None)
        except Exception as error:
            if not isinstance(_translate(error), ValueError):
                raise
            return self._names_by_library(bucket, key)
        skip = len(key) + 1 if key else 0
        files = [item["path"][skip:] for item in listing["objects"]]
        return [*files, *(prefix[skip:] for prefix in listing["common_prefixes"])]

    def _names_by_library(self, bucket: Bucket, key: str) -> list[str]:
        names = set[str]()
        token: Any = _ByLibrary(None, "", 0)
        while token:
            page = self._page_by_library(bucket, key, token)
            names.update(page.names())
            token = page.token
        return list(names)

    # --- writing --------------------------------------------------------------------------------

    def put(self, path: str, data: bytes, *, new: bool) -> None:
        import obstore

        bucket, key = self._at(path)
        _wait(
            obstore.put_async,
            bucket.reads if len(data) <= SMALL else bucket.writes,
            key,
            data,
            mode="create" if new else "overwrite",
            chunk_size=UPLOAD_PART,
            max_concurrency=UPLOADED_AT_ONCE,
        )

    def copy(self, source: str, target: str, *, new: bool) -> None:
        import obstore

        (origin, source_key), (bucket, key) = self._at(source), self._at(target)
        if origin is bucket:
            _wait(obstore.copy_async, bucket.writes, source_key, key, overwrite=not new)
            return
        [data] = self.read([(source, 0, None)], whole=True)  # between buckets, obstore cannot
        if isinstance(data, Exception):
            raise data
        self.put(target, data, new=new)

    def remove(self, path: str) -> None:
        import obstore

        bucket, key = self._at(path)
        listed = obstore.list(bucket.reads, key, chunk_size=DELETED_AT_ONCE)
        doomed = [key, *(item["path"] for item in next(listed, []))]
        while doomed:
            try:
                _wait(obstore.delete_async, bucket.reads, doomed)
            except Exception as error:
                if not isinstance(_translate(error), FileNotFoundError):  # removed meanwhile
                    raise
            doomed = [item["path"] for item in next(listed, [])]


def _described(meta: Any, skip: int) -> FileInfo:
    """Describe an object by its path without the first characters."""
    return described(meta["path"][skip:], meta["size"], meta["last_modified"], meta["e_tag"])


def _wait(request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Make an asynchronous request of obstore's, so that Ctrl-C does not wait for the answer."""

    async def made() -> Any:
        return await request(*arguments, **options)

    _end_in_order()
    return asyn.sync(asyn.get_loop(), made)


@functools.cache
def _end_in_order() -> None:
    """Let the process end only when obstore's threads have delivered their answers.

    A thread of its own wakes the event loop, and waits for the interpreter's lock again. Python
    ends such a thread once it finalizes, which aborts the process.
    """
    # Not `atexit`: finalizers run last in, first out, so after those of what makes requests.
    weakref.finalize(_end_in_order, _wait_for_answers)


def _wait_for_answers() -> None:
    known = {thread.ident for thread in threading.enumerate()}
    until = time.monotonic() + DELIVERY_SECONDS
    while time.monotonic() < until and any(
        _wakes_event_loop(frame)
        for thread, frame in sys._current_frames().items()
        if thread not in known
    ):
        time.sleep(0.001)


def _wakes_event_loop(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("asyncio."):
            return True
        frame = frame.f_back
    return False


async def _read_all(parts: Sequence[tuple[Bucket, str, int, int | None]]) -> list[Any]:
    import obstore

    _end_in_order()
    limit = asyncio.Semaphore(AT_ONCE)

    async def read(bucket: Bucket, key: str, start: int, end: int | None) -> bytes:
        if start == end:
            return b""
        async with limit:
            if end is None:
                answer = await obstore.get_async(bucket.reads, key)
                return (await answer.bytes_async()).to_bytes()
            data = await obstore.get_range_async(bucket.reads, key, start=start, end=end)
            return data.to_bytes()

    return await asyncio.gather(*(read(*part) for part in parts), return_exceptions=True)


def _translate_from_library(error: Exception) -> Exception:
    """Translate an error of boto3 or of Azure's library."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None)  # Azure's
    if isinstance(response, Mapping):  # boto3's
        status = response["ResponseMetadata"]["HTTPStatusCode"]
    if status is None:
        return ConnectionError(f"the connection failed ({type(error).__name__})")
    return _error_of(status, f"the service answered {status}")


# --- forked processes ---------------------------------------------------------------------------


class _Relay:
    """An `ObjectStore` in a process of its own, for a process that was forked from a user of one.

    The threads of obstore are gone in a forked child, and a request there would wait for ever.
    """

    attempts, strips_slashes, no_name = (
        ObjectStore.attempts,
        ObjectStore.strips_slashes,
        ObjectStore.no_name,
    )

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self._of = kind, dict(options)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def translated(self, error: Exception) -> Exception:
        return error  # as that process did it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"from {__name__} import answer_calls; answer_calls()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            calls, results = self._process.stdin, self._process.stdout
            assert calls is not None
            assert results is not None
            try:
                pickle.dump((self._of, name, arguments, options), calls)
                calls.flush()
                succeeded, result = pickle.load(results)
            except (EOFError, OSError):
                self._process = None
                raise ConnectionError("the process that makes the requests ended") from None
            except BaseException:  # such as Ctrl-C: its answer would be taken for the next call's
                self._process.kill()
                self._process = None
                raise
        if not succeeded:
            raise result
        return result


def answer_calls() -> None:
    """Execute the calls of a `_Relay` until it closes the pipe."""
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed output must not mix with the results
    while True:
        try:
            store, name, arguments, options = pickle.load(calls)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            found = getattr(object_store(*store), name)(*arguments, **options)
            answer = True, list(map(_sendable, found)) if isinstance(found, list) else found
        except Exception as error:
            answer = False, _translate(error)
        try:
            pickle.dump(answer, results)
            results.flush()
        except BrokenPipeError:  # the caller is gone, or gave up
            return


def _sendable(value: Any) -> Any:
    return _translate(value) if isinstance(value, Exception) else value


_stores: dict[int, dict[str, Any]] = {}
"""Process -> options -> client, for the life of the process: a child must not close the connections
of its parent."""


def object_store(kind: str, options: Mapping[str, Any]) -> Any:
    """Return this process's `ObjectStore` for these options."""
    # Without a lock, which a fork beside it would leave locked: in steps that threads cannot split.
    stores = _stores.setdefault(os.getpid(), {})
    name = repr((kind, sorted(options.items())))
    if name not in stores:
        forked = len(_stores) > 1
        stores.setdefault(name, (_Relay if forked else ObjectStore)(kind, options))
    return stores[name]
