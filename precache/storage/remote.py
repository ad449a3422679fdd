"""Remote folders: ``gs://``, ``s3://``, ``az://``, ``https://``, ``memory://``.

Every request that fails for a passing reason is made again, with exponential backoff and jitter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from glob import has_magic
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from fsspec import asyn
from fsspec.core import strip_protocol

from precache.errors import PrecacheError, StorageError
from precache.messages import shown, url_parts
from precache.runtime.ordered_map import Threads
from precache.runtime.process_id import boottime
from precache.storage import retries
from precache.storage.backends import (
    EXTRAS,
    READ_ONLY,
    WEB,
    create_copy_on_google,
    file_system,
    reason_of,
)
from precache.storage.base import (
    NO_NAME,
    Buffer,
    FileInfo,
    Folder,
    LeaveOut,
    Range,
    checked,
    ignore_left_out,
    is_missing,
    is_name,
    most_bytes,
    refused,
    required,
    too_large_text,
)
from precache.storage.environment import read_environment
from precache.storage.listing import Entry, KeyRange, Page, page_of_google
from precache.storage.retries import Attempt

Result = TypeVar("Result")
ObjectRange = tuple[str, int, int | None]
"""Name, first byte, end; the whole object where that is None."""

log = logging.getLogger(__name__)

DEEPEST = 64
"""Most nested folders of a web server, whose pages may list themselves endlessly."""

STREAMS = 100
"""Requests to a web server at a time; aiohttp opens as many connections."""

PIECE = 1 << 16
"""Bytes read at a time of the part before a range, if a server ignores ranges."""

CHANGE_SECONDS = 40.0
"""Time after which a request to replace or remove an object is not made again: a process that was
stopped for so long may have lost the lease under which it did that."""

LISTINGS = 16
"""Prefixes that are listed at a time: a service answers one prefix page after page."""


_ASCII_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass
class _Below:
    """A page of a listing: ranges to be listed next, files, names that are left out, and whether it
    began at the start of its range."""

    more: list[KeyRange]
    files: list[FileInfo]
    left_out: list[str]
    obeyed: bool


@dataclass(frozen=True)
class RemoteFolder:
    """A `Folder` in blob storage.

    Parameters
    ----------
    protocol, root
        Such as ``gs`` and ``bucket/photos``.
    options
        Storage options, or `FromEnvironment`; never shown.
    within
        URL below which a web server's redirects must stay.
    """

    protocol: str
    root: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    within: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self._url("")

    @property
    def name(self) -> str:
        return self._name({"name": shown(self.root)})

    def path(self, name: str) -> str:
        return self._url(name)

    def local(self, name: str) -> Path | None:
        return None

    def open(self, name: str) -> int | None:
        return None

    def folder(self, name: str) -> RemoteFolder:
        root = self._at(checked(name, self)) if name else self.root
        return replace(self, root=root)

    def kind(self) -> str | None:
        try:
            info = self._request(self._fs.info, "", "look at")
        except FileNotFoundError:
            return "folder" if self._by_obstore and any(self._pages(self._fs, "")) else None
        # A folder is not listed to know that it is one, but to HTTP all is a file.
        if info["type"] == "directory":
            return "folder"
        try:
            return "folder" if any(self._pages(self._fs, "")) else "file"
        except StorageError:
            if not self._by_obstore:
                raise
            return "file"  # Azure's hierarchical accounts refuse to list below one

    def exists(self, name: str = "") -> bool:
        return self.size(name) is not None or any(self._pages(self._fs, name))

    def info(self, name: str) -> FileInfo | None:
        try:
            info = self._request(self._fs.info, name, "look at")
        except FileNotFoundError:
            return None
        if info["type"] == "directory":
            return None
        return FileInfo(name, _size(info), _mtime_ns(info), _etag(info))

    def size(self, name: str) -> int | None:
        info = self.info(name)
        return None if info is None else max(0, info.size)

    def read(self, name: str) -> bytes:
        return required(*self._parts([(name, 0, None)], [-1]))

    def get(self, name: str) -> bytes | None:
        try:
            return required(*self.read_many([name], [-1]))
        except StorageError as error:
            if is_missing(error):
                return None
            raise

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | StorageError]:
        # With a range, no library asks for the size first; one byte more tells what has grown.
        pairs = zip(names, sizes, strict=True)
        ends = [(most_bytes(name) if size < 0 else size) + 1 for name, size in pairs]
        parts = [(name, 0, end) for name, end in zip(names, ends, strict=True)]
        contents = self._parts(parts, sizes, stream=any(size < 0 for size in sizes))
        for number, (name, size, got) in enumerate(zip(names, sizes, contents, strict=True)):
            if size < 0 and isinstance(got, bytes) and len(got) > most_bytes(name):
                contents[number] = StorageError(
                    f"cannot read {self._url(name)}: {too_large_text(name)}"
                )
        return contents

    def read_first(self, name: str, most: int) -> bytes:
        return required(*self._parts([(name, 0, most)], [-1], stream=True))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        parts = [(name, start, start + length) for name, start, length in ranges]
        return self._parts(parts, [length for _, _, length in ranges])

    def _parts(
        self, parts: Sequence[ObjectRange], least: Sequence[int], *, stream: bool = False
    ) -> list[bytes | StorageError]:
        """Read parts of objects; what comes with fewer bytes than `least` is fetched again.

        Parameters
        ----------
        stream
            All start at 0 and are of unknown size: a web server gets no range requests, since
            some servers cut ranges out of compressed bytes.
        """
        results: dict[int, bytes | StorageError] = {}
        wanted = []
        for number, (name, _, _) in enumerate(parts):
            if (refusal := self._refusal(name, "read")) is not None:
                results[number] = refusal
            else:
                wanted.append(number)
        for attempt in self._attempts():
            if not wanted:
                break
            pause = 0.0
            again = []
            some = [parts[n] for n in wanted]
            if self.protocol in WEB:
                tried = asyn.sync(self._fs.loop, self._stream, some, ranges=not stream)
            else:
                tried = self._cat(some)
            tried = [
                b"" if parts[n][1] == 0 and least[n] <= 0 and _is_empty(got) else got
                for n, got in zip(wanted, tried, strict=True)
            ]
            for number, got in zip(wanted, tried, strict=True):
                error = got if isinstance(got, Exception) else None
                short = error is None and len(got) < least[number]
                again_short = short and attempt.number + 1 < retries.ATTEMPTS
                if not attempt.last and (again_short or (error and retries.is_transient(error))):
                    waited = retries.pause(attempt.number, error)
                    if error is not None:
                        failure = self._error(error, parts[number][0], "read")
                        self._log_retry(attempt, failure, waited)
                    pause = max(pause, waited)
                    again.append(number)
                else:
                    name = parts[number][0]
                    results[number] = self._error(error, name, "read") if error else got
            wanted = again
            time.sleep(pause)
        return [results[number] for number in range(len(parts))]

    def _cat(self, parts: Sequence[ObjectRange]) -> list[Any]:
        """Read parts once; an exception stands in place of what failed."""
        paths = [self._at(name) for name, _, _ in parts]
        ends = [end for _, _, end in parts]
        starts = [None if end is None else start for _, start, end in parts]
        got = self._fs.cat_ranges(paths, starts, ends, on_error="return")
        return [self._part(*pair) for pair in zip(got, parts, strict=True)]

    async def _stream(self, parts: Sequence[ObjectRange], *, ranges: bool) -> list[Any]:
        """Read parts from a web server once; an exception stands in place of what failed.

        Holds no more than was requested, even if the server sends more.
        """
        fs, places = self._fs, asyncio.Semaphore(STREAMS)
        session = await fs.set_session()

        async def read(name: str, start: int, end: int | None) -> bytes:
            if end == start:
                return b""
            data, url = bytearray(), fs.encode_url(self._at(name))
            headers = dict(fs.kwargs.get("headers", {}))
            if ranges and end is not None:
                headers["Range"] = f"bytes={start}-{end - 1}"
            async with places, session.get(url, **{**fs.kwargs, "headers": headers}) as answer:
                if answer.status == 404:
                    raise FileNotFoundError(str(url))
                answer.raise_for_status()
                skipped = 0 if answer.status == 206 else start
                while skipped and (piece := await answer.content.read(min(skipped, PIECE))):
                    skipped -= len(piece)
                most = sys.maxsize if end is None else end - start
                while piece := await answer.content.read(most - len(data)):
                    data += piece
                if "Range" in headers and answer.status != 206 and not answer.content.at_eof():
                    _warn_of_whole_objects(self._url("").split("/")[2])
            return bytes(data)

        return await asyncio.gather(*(read(*part) for part in parts), return_exceptions=True)

    def _part(self, got: Any, part: ObjectRange) -> Any:
        """Cut the requested range out of the answer of a server that ignores ranges."""
        _, start, end = part
        if end is None or isinstance(got, Exception) or len(got) <= end - start:
            return got
        _warn_of_whole_objects(self._url("").split("/")[2])
        return got[start:end]

    def names(self, name: str = "", *, first: bool = False) -> list[str]:
        if name:
            checked(name, self)
        if first:
            page = next(self._pages(self._fs, name), [])
            names = [entry["name"].partition("/")[0] for entry in page]
        elif self._by_obstore:
            try:
                names = self._request(self._fs.names, name, "list")
            except FileNotFoundError:
                return []
        else:
            names = [entry["name"] for page in self._pages(self._fs, name) for entry in page]
        return sorted({name for name in names if is_name(name)})

    def _pages(self, fs: Any, name: str) -> Iterator[list[Entry]]:
        """Pages of what lies below; nothing where it does not exist."""
        prefix = f"{checked(name, self)}/" if name else ""
        token = None
        while True:
            listed, token = self._page(fs, KeyRange(prefix, token=token))
            yield [entry for entry in listed if entry["name"] or entry["type"] == "directory"]
            if token is None:
                return

    def _page(self, fs: Any, span: KeyRange) -> Page:
        """List a page below a prefix, with the prefix itself if it is an object.

        S3 and Azure list at any depth, others directly below.
        """
        name = span.prefix.rstrip("/")
        again = False

        def list_anew(path: str) -> Page:
            nonlocal again
            again, before = True, again
            if self._by_obstore:
                page: Page = fs.page(self.root, span, again=before)
                return page
            fs.invalidate_cache()
            if EXTRAS.get(self.protocol) == "gcs":
                return page_of_google(fs, self.root, span)
            own = self._as_listed(path)
            listed = [
                entry for entry in fs.ls(path, detail=True) if entry["name"].rstrip("/") != own
            ]
            if self.protocol in WEB:  # a page may have links to itself, otherwise sorted
                listed = [entry for entry in listed if not re.search("[?#]", entry["name"])]
            return Page([{**entry, "name": self._name(entry)} for entry in listed], None)

        try:
            return self._request(list_anew, name, "list")
        except (FileNotFoundError, NotADirectoryError) as error:
            if span.token is None and not span.after:
                return Page([], None)
            raise self._error(error, name, "list") from None  # there were pages before this one

    def sizes(self, name: str = "") -> dict[str, int]:
        def find_anew(path: str) -> dict[str, dict[str, Any]]:
            self._fs.invalidate_cache()
            infos: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
            return infos

        if name:
            checked(name, self)
        # Pages of the web have links that are no files.
        if self.protocol in WEB or self._by_obstore:
            return {_join(name, info.name): info.size for info in self.folder(name).walk()}
        try:
            infos = self._request(find_anew, name, "list")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        own = self._as_listed(self.root)
        below = {path[len(own) + 1 :]: _size(info) for path, info in infos.items()}
        return {name: size for name, size in below.items() if is_name(name)}

    def walk(self, leave_out: LeaveOut = ignore_left_out) -> Iterator[FileInfo]:
        """Every object below the folder, in no particular order.

        Several prefixes are listed at a time, and no more pages than that are held.
        """
        fs = self._fs  # in another thread fsspec would make another, with connections of its own
        kind = EXTRAS.get(self.protocol)
        splitting = kind == "gcs" or (self._by_obstore and fs.splits(self.root))
        empty, folders = list[FileInfo](), {""}
        waiting = [KeyRange("")]
        running: list[Future[_Below]] = []
        pool = Threads(LISTINGS, "precache-list")
        try:
            while waiting or running:
                while waiting and len(running) < LISTINGS:
                    running.append(pool.submit(self._below, fs, waiting.pop()))
                done = wait(running, return_when=FIRST_COMPLETED).done
                oldest = next(number for number, future in enumerate(running) if future in done)
                below = running.pop(oldest).result()
                waiting += below.more
                splitting = splitting and below.obeyed
                if splitting and waiting and len(waiting) + len(running) < LISTINGS:
                    waiting += waiting.pop().split()
                for name in below.left_out:
                    leave_out(name, NO_NAME)
                while below.files:
                    file = below.files.pop()
                    if self._by_obstore:
                        _add_parents(folders, file.name)
                        if not file.size:  # which may be the mark of a folder
                            empty.append(file)
                            continue
                    yield file
            empty = [file for file in empty if file.name not in folders]
            checks = [pool.submit(self._is_empty, file) for file in empty]
            yield from (file for file, check in zip(empty, checks, strict=True) if check.result())
        finally:
            pool.close(wait=not running)  # Ctrl-C does not wait for a server

    def _is_empty(self, file: FileInfo) -> bool:
        """Return False if there is no such object: a key with a slash at its end marks a folder."""
        return self.size(file.name) == 0

    def _below(self, fs: Any, span: KeyRange) -> _Below:
        below, last = _Below([], [], [], True), max(span.after, span.seen)
        listed, token = self._page(fs, span)
        while listed:  # a listing in one page is freed entry by entry
            entry = listed.pop()
            folder = entry["type"] == "directory"
            if not entry["name"] and not folder:  # marks a folder, or its key ends in a slash
                if entry["size"] and not span.token and not span.after:
                    below.left_out.append(span.prefix)
                continue
            sorted_as = f"{entry['name']}/" if folder else entry["name"]
            last = max(last, sorted_as)
            below.obeyed = below.obeyed and span.after <= sorted_as
            if not span.holds(sorted_as):
                continue
            name = span.prefix + entry["name"]
            if folder and (is_name(name) or self.protocol not in WEB):
                if self.protocol in WEB and name.count("/") >= DEEPEST:
                    raise StorageError(
                        f"cannot list {self._url('')}: it has more than {DEEPEST} folders in one "
                        f"another, such as {name[:100]!r}, as where a page lists itself; give the "
                        "folder that holds the files"
                    )
                below.more.append(KeyRange(f"{name}/"))
            elif not is_name(name) or (self._by_obstore and _ASCII_CONTROL.search(name)):
                below.left_out.append(name)
            else:
                below.files.append(FileInfo(name, _size(entry), _mtime_ns(entry), _etag(entry)))
        if token is not None and (span.end is None or last < span.end):
            below.more.append(span._replace(token=token, seen=last))  # listed next, being the last
        return below

    def put(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> None:
        data = b"".join(parts)
        self._replace(name, lambda path: self._fs.pipe_file(path, data))

    def copy(
        self,
        name: str,
        origin: Folder,
        source: str,
        scratch: str | None = None,
        *,
        create: bool = False,
    ) -> bool:
        same = isinstance(origin, RemoteFolder) and origin.protocol == self.protocol
        if same and isinstance(origin, RemoteFolder) and origin.options == self.options:
            source_path = origin._at(checked(source, origin))
            if create:
                return self._write(name, lambda path: self._create_copy(source_path, path))
            if source_path != self._at(name):  # S3 refuses to copy an object onto itself
                self._replace(name, lambda path: self._fs.cp_file(source_path, path))
            return True
        if create:
            return self.create(name, [origin.read(source)])
        self.put(name, [origin.read(source)])
        return True

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        data = b"".join(parts)
        if self._write(name, lambda path: self._fs.pipe_file(path, data, mode="create")):
            return True
        # The first attempt may have arrived though its answer did not.
        return self.size(name) == len(data) and self.read(name) == data

    def remove(self, name: str) -> None:
        self._require_writable(name, "remove")
        with contextlib.suppress(FileNotFoundError):
            self._request(self._remove_all, name, "remove", CHANGE_SECONDS)

    def _remove_all(self, path: str) -> None:
        if self._by_obstore or not has_magic(path):
            self._fs.rm(path, recursive=True)
            return
        # fsspec would take the name for a pattern.
        for child in self._fs.find(path):
            self._fs.rm_file(child)

    def free_bytes(self) -> int | None:
        return None

    # --- requests -------------------------------------------------------------------------------

    @property
    def _fs(self) -> Any:
        return file_system(self.protocol, read_environment(self.options), self.within)

    @property
    def _by_obstore(self) -> bool:
        return EXTRAS.get(self.protocol) in ("s3", "azure")

    def _attempts(self) -> Iterator[Attempt]:
        return retries.attempts(retries.BUSY_ATTEMPTS if self._by_obstore else None)

    def _create_copy(self, source: str, target: str) -> None:
        if self._by_obstore:
            self._fs.cp_file(source, target, create=True)
        elif EXTRAS.get(self.protocol) == "gcs":
            create_copy_on_google(self._fs, source, target)
        else:
            self._fs.pipe_file(target, self._fs.cat_file(source), mode="create")

    def _replace(self, name: str, action: Callable[[str], object]) -> None:
        if not self._write(name, action, CHANGE_SECONDS):
            raise StorageError(
                f"cannot write {self._url(name)}: it exists, and the service does not let it be "
                "replaced"
            )

    def _write(self, name: str, action: Callable[[str], object], within: float = math.inf) -> bool:
        """Write an object; return False if it exists and must stay."""
        self._require_writable(name, "write")
        try:
            self._request(action, name, "write", within)
            return True
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise StorageError(
                f"cannot write {self._url(name)}: there is no such bucket; make it first"
            ) from None

    def _require_writable(self, name: str, doing: str) -> None:
        if self.protocol in READ_ONLY:
            raise StorageError(
                f"cannot {doing} {self._url(name)}: {self.protocol}:// is for reading; give a "
                "store on a local disk, gs://, s3:// or az://"
            )

    def _at(self, name: str) -> str:
        """Return the path of `name` as the file system takes it."""
        quoted = quote(name, errors="surrogateescape") if self.protocol in WEB else name
        return self._joined(quoted)

    def _joined(self, name: str) -> str:
        """Return the root with a name below it, before the query that a web server's URL has."""
        query = url_parts(self.root)[2] if self.protocol in WEB else ""
        return _join(self.root.removesuffix(query), name) + query

    def _name(self, info: Mapping[str, Any]) -> str:
        """Return the last part of a path of the file system."""
        name: str = info["name"].rstrip("/").rsplit("/", 1)[-1]
        return unquote(name, errors="surrogateescape") if self.protocol in WEB else name

    def _as_listed(self, path: str) -> str:
        """Return a path of the file system as its listings name it, such as ``/x`` in memory."""
        url = path if self.protocol in WEB else f"{self.protocol}://{path}"
        stripped: str = strip_protocol(url)
        return stripped.rstrip("/")

    def _url(self, name: str) -> str:
        """Return the URL without query and user: both may hold a secret."""
        return shown(self._whole_url(name))

    def _whole_url(self, name: str) -> str:
        path = self._joined(name)
        return path if self.protocol in WEB else f"{self.protocol}://{path}"

    def _request(
        self, action: Callable[..., Result], name: str, doing: str, within: float = math.inf
    ) -> Result:
        """Make a request until it succeeds or fails for good; `retries.FINAL` errors pass.

        No attempt but the first begins after `within` seconds.
        """
        if doing != "list" and (refusal := self._refusal(name, doing)) is not None:
            raise refusal
        began, failure = boottime(), None
        for attempt in self._attempts():
            if failure is not None and boottime() - began > within:
                raise failure
            try:
                return action(self._at(name))
            except PrecacheError:
                raise
            except Exception as caught:
                error = self._behind(caught)
                if isinstance(error, retries.FINAL) and not isinstance(error, PermissionError):
                    raise error from None
                failure = self._error(error, name, doing)
                if attempt.last or not retries.is_transient(error):
                    raise failure from None
                pause = retries.pause(attempt.number, error)
                self._log_retry(attempt, failure, pause)
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _refusal(self, name: str, doing: str) -> StorageError | None:
        """Return the error for a name that no request may have, or None."""
        if name and not is_name(name):
            return refused(name, self)
        if self._by_obstore and _ASCII_CONTROL.search(name):
            return StorageError(
                f"cannot {doing} {self._url(name)}: its name has a control character; rename it"
            )
        return None

    def _behind(self, error: Exception) -> Exception:
        """Return the cause that a library's exception may hide."""
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        # gcsfs aborts an upload after a 412, and that request may fail.
        if retries.status_of(cause) == 412 or isinstance(error.__context__, FileExistsError):
            return FileExistsError()
        if self.protocol in WEB and isinstance(error, FileNotFoundError):
            # fsspec reports every failed request as a missing file.
            return error if retries.status_of(cause) in (404, 410) else cause
        return error

    def _log_retry(self, attempt: Attempt, error: StorageError, pause: float) -> None:
        log_line = log.warning if attempt.number else log.info  # the first is usual
        log_line("%s; trying again in %.1f s", error, pause)

    def _error(self, error: Exception, name: str, doing: str) -> StorageError:
        reason = reason_of(error, read_environment(self.options), self._whole_url(""))
        if type(error).__name__ == "TooManyRedirects":
            reason = "the server redirects it without end"
        elif isinstance(error, FileNotFoundError):
            reason = "there is no such object"
        elif retries.is_forbidden(error):
            reason = f"{reason}; check the credentials and what they may do"
        elif any(
            isinstance(cause, ssl.SSLCertVerificationError) for cause in retries.causes(error)
        ):
            reason = (
                f"{reason}; if it is to be trusted, name the certificate of its authority in the "
                "environment variable SSL_CERT_FILE"
            )
        failure = StorageError(f"cannot {doing} {self._url(name)}: {reason}")
        if isinstance(error, FileNotFoundError):
            failure.__cause__ = FileNotFoundError(name)  # its own text may hold a secret
        return failure


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}" if root and name else root or name


def _add_parents(folders: set[str], name: str) -> None:
    """Add all folders that a name is in."""
    while (name := name.rpartition("/")[0]) not in folders:
        folders.add(name)


_warned: set[str] = set()
_warning = threading.Lock()


def _warn_of_whole_objects(server: str) -> None:
    """Log the warning once for each server."""
    with _warning:
        if server in _warned:
            return
        _warned.add(server)
    log.warning(
        "%s sends whole objects where parts are asked for; to train from it, give cache_dir or "
        "pull the store",
        server,
    )


def _is_empty(got: Any) -> bool:
    """Return True if a range from the first byte on was refused: the object is empty."""
    errors = retries.causes(got) if isinstance(got, Exception) else ()
    return any(retries.status_of(cause) == 416 for cause in errors)


def _size(info: Mapping[str, Any]) -> int:
    size = info.get("size")
    return -1 if size is None else int(size)


def _mtime_ns(info: Mapping[str, Any]) -> int:
    for name in ("LastModified", "updated", "last_modified", "mtime", "created"):
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
    for name in ("generation", "ETag", "etag", "blob_id"):
        if info.get(name):
            return str(info[name]).strip('"')
    return ""
