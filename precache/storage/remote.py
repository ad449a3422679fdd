"""Remote folders: a `Folder` of any `Service`, with retries, at ``gs://``, ``s3://``, ``az://``, …

Every request that fails for a passing reason is made again, with exponential backoff and jitter.
Errors of the services' libraries become `StorageError` here, without the secrets of options and
URLs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import unquote

from precache.errors import PrecacheError, StorageError
from precache.messages import shown
from precache.runtime.process_id import boottime
from precache.runtime.threads import Threads
from precache.storage import retries
from precache.storage.backends import READ_ONLY, WEB, Service, open_service, path_below, reason_of
from precache.storage.base import (
    NO_NAME,
    Buffer,
    FileInfo,
    Folder,
    LeaveOut,
    Part,
    checked,
    ignore_left_out,
    is_name,
    refused,
)
from precache.storage.environment import read_environment
from precache.storage.listing import KeyRange, Page

Result = TypeVar("Result")

log = logging.getLogger(__name__)

DEEPEST = 64
"""Most nested folders of a web server, whose pages may list themselves endlessly."""

CHANGE_SECONDS = 40.0
"""Time after which a request to replace or remove an object is not made again: a process that was
stopped for so long may have lost the lease under which it did that."""

LISTINGS = 16
"""Prefixes that are listed at a time: a service answers one prefix page after page."""


@dataclass
class _Below:
    """A page of a listing: ranges to be listed next, files, names that are left out, and whether it
    began at the start of its range."""

    more: list[KeyRange]
    files: list[FileInfo]
    left_out: list[str]
    obeyed: bool


@dataclass(frozen=True)
class RemoteFolder(Folder):
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
        return self.path("")

    @property
    def name(self) -> str:
        last = shown(self.root).rstrip("/").rpartition("/")[2]
        return unquote(last, errors="surrogateescape") if self.protocol in WEB else last

    def path(self, name: str) -> str:
        """Return the URL without query and user: both may hold a secret."""
        return shown(self._whole_url(name))

    def folder(self, name: str) -> RemoteFolder:
        return replace(self, root=self._at(checked(name, self))) if name else self

    # --- reading --------------------------------------------------------------------------------

    def info(self, name: str) -> FileInfo | None:
        try:
            info = self._request(lambda service, path: service.head(path), name, "look at")
            return info._replace(name=name)
        except FileNotFoundError:
            return None

    def is_folder(self, name: str = "") -> bool:
        return any(page.has_any for page in self._pages(name))

    def read_parts(
        self, parts: Sequence[Part], least: Sequence[int], *, whole: bool = False
    ) -> list[bytes | StorageError]:
        service = self._service
        results: dict[int, bytes | StorageError] = {}
        wanted = []
        for number, (name, _, _) in enumerate(parts):
            if (refusal := self._refusal(service, name, "read")) is not None:
                results[number] = refusal
            else:
                wanted.append(number)
        for attempt, last in retries.attempts(service.attempts):
            if not wanted:
                break
            pause, again = 0.0, []
            some = [(self._at(parts[n][0]), *parts[n][1:]) for n in wanted]
            for number, data in zip(wanted, service.read(some, whole=whole), strict=True):
                name, start, _ = parts[number]
                error = service.translated(data) if isinstance(data, Exception) else None
                empty = error is not None and start == 0 and least[number] <= 0 and _is_empty(error)
                if error is None or empty:
                    results[number] = got = b"" if empty else data
                    passing = len(got) < least[number] and attempt + 1 < retries.ATTEMPTS
                else:
                    results[number] = self._error(error, name, "read")
                    passing = retries.is_transient(error)
                if passing and not last:
                    waited = retries.pause(attempt, error)
                    if error is not None:
                        self._log_retry(attempt, self._error(error, name, "read"), waited)
                    pause = max(pause, waited)
                    again.append(number)
            wanted = again
            time.sleep(pause)
        return [results[number] for number in range(len(parts))]

    # --- listing --------------------------------------------------------------------------------

    def names(self, name: str = "", *, first: bool = False) -> list[str]:
        if name:
            checked(name, self)
        if first:
            names = next(self._pages(name)).names()
        else:
            try:
                names = self._request(lambda service, path: service.names(path), name, "list")
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({name for name in names if is_name(name)})

    def _pages(self, name: str) -> Iterator[Page]:
        """Pages of what lies below; one of nothing where it does not exist."""
        service, token = self._service, None
        prefix = f"{checked(name, self)}/" if name else ""
        while True:
            page = self._page(service, KeyRange(prefix, token=token))
            yield page
            if (token := page.token) is None:
                return

    def _page(self, service: Service, span: KeyRange) -> Page:
        """List a page below a prefix, with the prefix itself if it is an object."""
        name, tries = span.prefix.rstrip("/"), itertools.count()
        try:
            return self._request(
                lambda service, path: service.page(self.root, span, again=next(tries) > 0),
                name, "list", service=service,
            )  # fmt: skip
        except (FileNotFoundError, NotADirectoryError) as error:
            if span.token is None and not span.after:
                return Page([], [], None)
            raise self._error(error, name, "list") from None  # there were pages before this one

    def walk(self, leave_out: LeaveOut = ignore_left_out) -> Iterator[FileInfo]:
        """Every object below the folder, in no particular order.

        Several prefixes are listed at a time, and no more pages than that are held.
        """
        service = self._service  # in another thread fsspec would make another, with its connections
        splitting = service.splits(self.root)
        empty, folders = list[FileInfo](), {""}
        waiting = [KeyRange("")]
        running: list[Future[_Below]] = []
        pool = Threads(LISTINGS, "precache-list")
        try:
            while waiting or running:
                while waiting and len(running) < LISTINGS:
                    running.append(pool.submit(self._below, service, waiting.pop()))
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
                    if service.strips_slashes:
                        _add_parents(folders, file.name)
                        if not file.size:  # which may be the mark of a folder
                            empty.append(file)
                            continue
                    yield file
            empty = [file for file in empty if file.name not in folders]
            # Nothing is there if the key has a slash at its end, which marks a folder.
            sizes = [pool.submit(self.size, file.name) for file in empty]
            yield from (file for file, size in zip(empty, sizes, strict=True) if size.result() == 0)
        finally:
            pool.close(wait=not running)  # Ctrl-C does not wait for a server

    def _below(self, service: Service, span: KeyRange) -> _Below:
        below, last = _Below([], [], [], True), max(span.after, span.seen)
        page = self._page(service, span)
        for folder in page.folders:
            name = f"{span.prefix}{folder}"
            if not is_name(name):
                below.left_out.append(name)
            elif name.count("/") >= DEEPEST:
                raise StorageError(
                    f"cannot list {self}: it has more than {DEEPEST} folders in one another, such "
                    f"as {name[:100]!r}, as where a page lists itself; give the folder that holds "
                    "the files"
                )
            else:
                below.more.append(KeyRange(f"{name}/"))
        while page.files:  # a listing in one page is freed entry by entry
            info = page.files.pop()
            last = max(last, info.name)
            below.obeyed = below.obeyed and span.after <= info.name
            if not span.holds(info.name) and info.name:
                continue
            name = f"{span.prefix}{info.name}"
            if is_name(name) and not (service.no_name and service.no_name.search(name)):
                below.files.append(info._replace(name=name))
            elif info.size or not (name.endswith("/") or not name):  # not the mark of a folder
                below.left_out.append(name)
        if page.token is not None and (span.end is None or last < span.end):
            # Listed next, being the last.
            below.more.append(span._replace(token=page.token, seen=last))
        return below

    # --- writing --------------------------------------------------------------------------------

    def put(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> None:
        data = b"".join(parts)
        self._replace(name, lambda service, path: service.put(path, data, new=False))

    def create(self, name: str, parts: Iterable[Buffer], scratch: str | None = None) -> bool:
        data = b"".join(parts)
        if self._write(name, lambda service, path: service.put(path, data, new=True)):
            return True
        # The first attempt may have arrived though its answer did not.
        return self.size(name) == len(data) and self.read(name) == data

    def copy(
        self,
        name: str,
        origin: Folder,
        source: str,
        scratch: str | None = None,
        *,
        create: bool = False,
    ) -> bool:
        if (
            isinstance(origin, RemoteFolder)
            and origin.protocol == self.protocol
            and origin.options == self.options
        ):
            path = origin._at(checked(source, origin))
            if create:
                return self._write(name, lambda service, to: service.copy(path, to, new=True))
            if path != self._at(name):  # S3 refuses to copy an object onto itself
                self._replace(name, lambda service, to: service.copy(path, to, new=False))
            return True
        if create:
            return self.create(name, [origin.read(source)])
        self.put(name, [origin.read(source)])
        return True

    def remove(self, name: str) -> None:
        self._require_writable(name, "remove")
        with contextlib.suppress(FileNotFoundError):
            self._request(
                lambda service, path: service.remove(path), name, "remove", CHANGE_SECONDS
            )

    def _replace(self, name: str, action: Callable[[Service, str], object]) -> None:
        if not self._write(name, action, CHANGE_SECONDS):
            raise StorageError(
                f"cannot write {self.path(name)}: it exists, and the service does not let it be "
                "replaced"
            )

    def _write(
        self, name: str, action: Callable[[Service, str], object], within: float = math.inf
    ) -> bool:
        """Write an object; return False if it exists and must stay."""
        self._require_writable(name, "write")
        try:
            self._request(action, name, "write", within)
            return True
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise StorageError(
                f"cannot write {self.path(name)}: there is no such bucket; make it first"
            ) from None

    def _require_writable(self, name: str, doing: str) -> None:
        if self.protocol in READ_ONLY:
            raise StorageError(
                f"cannot {doing} {self.path(name)}: {self.protocol}:// is for reading; give a "
                "store on a local disk, gs://, s3:// or az://"
            )

    # --- requests -------------------------------------------------------------------------------

    @property
    def _service(self) -> Service:
        return open_service(self.protocol, read_environment(self.options), self.within)

    def _at(self, name: str) -> str:
        """Return the path of `name` as the service takes it."""
        return path_below(self.protocol, self.root, name)

    def _whole_url(self, name: str) -> str:
        path = path_below(self.protocol, self.root, name, quoted=False)
        return path if self.protocol in WEB else f"{self.protocol}://{path}"

    def _request(
        self,
        action: Callable[[Service, str], Result],
        name: str,
        doing: str,
        within: float = math.inf,
        service: Service | None = None,
    ) -> Result:
        """Make a request until it succeeds or fails for good; `retries.FINAL` errors pass.

        No attempt but the first begins after `within` seconds.
        """
        service = service or self._service
        if doing != "list" and (refusal := self._refusal(service, name, doing)) is not None:
            raise refusal
        began, failure = boottime(), None
        for attempt, last in retries.attempts(service.attempts):
            if failure is not None and boottime() - began > within:
                raise failure
            try:
                return action(service, self._at(name))
            except PrecacheError:
                raise
            except Exception as caught:
                error = service.translated(caught)
                if isinstance(error, retries.FINAL) and not isinstance(error, PermissionError):
                    raise error from None
                failure = self._error(error, name, doing)
                if last or not retries.is_transient(error):
                    raise failure from None
                pause = retries.pause(attempt, error)
                self._log_retry(attempt, failure, pause)
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _refusal(self, service: Service, name: str, doing: str) -> StorageError | None:
        """Return the error for a name that no request may have, or None."""
        if name and not is_name(name):
            return refused(name, self)
        if service.no_name and service.no_name.search(name):
            return StorageError(
                f"cannot {doing} {self.path(name)}: its name has a control character; rename it"
            )
        return None

    def _log_retry(self, attempt: int, error: StorageError, pause: float) -> None:
        log_line = log.warning if attempt else log.info  # the first is usual
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
        failure = StorageError(f"cannot {doing} {self.path(name)}: {reason}")
        if isinstance(error, FileNotFoundError):
            failure.__cause__ = FileNotFoundError(name)  # its own text may hold a secret
        return failure


def _add_parents(folders: set[str], name: str) -> None:
    """Add all folders that a name is in."""
    while (name := name.rpartition("/")[0]) not in folders:
        folders.add(name)


def _is_empty(error: Exception) -> bool:
    """Return True if a range from the first byte on was refused: the object is empty."""
    return any(retries.status_of(cause) == 416 for cause in retries.causes(error))
