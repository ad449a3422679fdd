"""Retries of requests: which errors are transient, how often and after what pauses to try again."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

ATTEMPTS = 6
BUSY_ATTEMPTS = 9
"""Attempts by default, and at a request that no library retries (about a minute)."""

RETRY_SECONDS = 60.0
"""Seconds since the first attempt after which only one more is made."""

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
"""Seconds between attempts: doubled each time, +-50%, unless the server sends Retry-After."""

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""Seconds after which a connection that brings no byte counts as lost."""

TRANSIENT_STATUS = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
"""S3 returns 409 (ConditionalRequestConflict) if two clients create an object at the same time.
Source: Amazon S3 User Guide, "How to prevent object overwrites with conditional writes".
"""

TRANSIENT_ERRNO = frozenset(
    (errno.EIO, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE, errno.EAGAIN)
)
NETWORK_LIBRARIES = frozenset(("aiohttp", "requests", "urllib3"))
FINAL = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)
"""Errors that are never retried."""

JITTER = random.Random()
"""Not the module's own: a retry on another thread would change what a seeded script draws."""


def attempts(most: int) -> Iterator[tuple[int, bool]]:
    """Yield the number of each attempt, from 0, within the limits of number and time, and whether
    it is the last; stop iterating after a success."""
    began = time.monotonic()
    for number in range(most):
        late = time.monotonic() - began > RETRY_SECONDS
        yield number, late or number + 1 == most
        if late:
            return


def client_timeout() -> Any:
    """Return time-outs for aiohttp, whose default ends every request after five minutes."""
    import aiohttp

    seconds = {"sock_connect": CONNECT_SECONDS, "sock_read": SILENT_SECONDS}
    return aiohttp.ClientTimeout(total=None, **seconds)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error of any of the libraries, or None."""
    if type(error).__module__ == "aiohttp.http_exceptions":
        return None  # its 400 is not the server's: the answer was cut off
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
            return int(value)
    return None


def is_forbidden(error: Exception) -> bool:
    """Return True if other credentials would help."""
    gcs = str(error).startswith("Forbidden: ")  # of gcsfs, a plain OSError
    return gcs or isinstance(error, PermissionError) or status_of(error) in (401, 403)


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later; an HTTP status in the causes decides."""
    behind = list(causes(error))
    if any(isinstance(cause, (*FINAL, ssl.SSLCertVerificationError)) for cause in behind):
        return False
    statuses = [status for cause in behind if (status := status_of(cause)) is not None]
    if statuses:  # after a status of success, the answer was damaged
        return statuses[0] in TRANSIENT_STATUS or 200 <= statuses[0] < 300
    return any(
        # JSONDecodeError: a document of Google's that was cut off.
        isinstance(
            cause,
            ConnectionError | TimeoutError | asyncio.IncompleteReadError | json.JSONDecodeError,
        )
        or (isinstance(cause, OSError) and cause.errno in TRANSIENT_ERRNO)
        or type(cause).__module__.partition(".")[0] in NETWORK_LIBRARIES
        for cause in behind
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def pause(attempt: int, error: Exception | None) -> float:
    """Return the seconds to wait before the next attempt."""
    for cause in causes(error):
        answer = cause if getattr(cause, "headers", None) else getattr(cause, "response", None)
        seconds = _retry_after(getattr(answer, "headers", None) or {})
        if seconds is not None:
            return min(seconds, LONGEST_PAUSE)
    doubled: float = FIRST_PAUSE * 2**attempt
    return min(LONGEST_PAUSE, doubled) * JITTER.uniform(0.5, 1.5)


async def wait_retry_after(status: int, headers: Mapping[str, str]) -> None:
    """Sleep for Retry-After, for libraries that retry by themselves and ignore it."""
    if status in TRANSIENT_STATUS:
        await asyncio.sleep(min(_retry_after(headers) or 0.0, LONGEST_PAUSE))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After, or None. Source: RFC 9110, section 10.2.3."""
    for name in ("Retry-After", "retry-after"):
        value = str(headers.get(name))
        if value.isdigit():
            return float(value)
    return None
