"""The services that hold objects, and their clients: the only place that knows them by protocol.

A `Service` has few methods, makes each request once, and raises what its library raises.
`precache.storage.remote` makes a folder of any of them, with retries.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote, quote_plus, unquote

from precache.errors import PrecacheError, UsageError, missing_library
from precache.messages import url_parts
from precache.storage.base import FileInfo
from precache.storage.listing import KeyRange, Page

EXTRAS = {
    "gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "az": "azure", "abfs": "azure",
    "abfss": "azure", "hf": "hf",
}  # fmt: skip
"""Protocol -> the extra of precache that installs its library."""

WEB = frozenset(("http", "https"))
"""Read-only protocols, whose listings and requests have URL-quoted names."""

READ_ONLY = WEB | {"hf"}

PathRange = tuple[str, int, int | None]
"""Path of an object, first byte, end; the whole object where that is None."""

_SECRET_PARTS = re.compile(r"(?:AccountKey|sig)=([^;&]{4,})", re.IGNORECASE)
"""Secrets within an Azure connection string or shared access signature, which may also appear by
themselves."""


class Service(Protocol):
    """Objects of an account or a server, by paths that begin with their bucket.

    Attributes
    ----------
    attempts
        Times that a request is made at most.
    strips_slashes
        A listing names a key with a slash at its end, which marks a folder, without the slash.
    no_name
        Characters of names that the service cannot have; None for none.
    """

    attempts: int
    strips_slashes: bool
    no_name: re.Pattern[str] | None

    def translated(self, error: Exception) -> Exception:
        """Return Python's own error for one of the library, if there is such an error."""

    def head(self, path: str) -> FileInfo:
        """Describe an object, by any name; a folder is no object."""

    def read(self, parts: Sequence[PathRange], *, whole: bool) -> list[Any]:
        """Read parts at the same time; an exception stands in place of what failed.

        Parameters
        ----------
        whole
            All begin at the first byte; no range need be asked for.
        """

    def splits(self, root: str) -> bool:
        """Return True if a listing can begin at any name, and comes in order."""

    def page(self, root: str, span: KeyRange, *, again: bool) -> Page:
        """List a page of what lies below a prefix.

        Parameters
        ----------
        root, span
            The folder that is walked, and where in it to begin; the page may go beyond either end.
        again
            The page failed before, and with it a stream that it was to come from.
        """

    def names(self, path: str) -> list[str]:
        """List the names directly below a prefix."""

    def put(self, path: str, data: bytes, *, new: bool) -> None:
        """Write an object; if `new`, one that must not exist."""

    def copy(self, source: str, target: str, *, new: bool) -> None:
        """Copy an object; if `new`, to a path where nothing may exist."""

    def remove(self, path: str) -> None:
        """Remove an object and all below it."""


def open_service(protocol: str, options: Mapping[str, Any], within: str) -> Service:
    """Return this process's client of a protocol's service for these options.

    Parameters
    ----------
    within
        URL below which a web server may redirect; empty for anywhere.
    """
    extra = EXTRAS.get(protocol)
    try:
        if extra in ("s3", "azure"):
            import obstore  # noqa: F401 - reports that it is missing

            from precache.storage.object_store import object_store

            client: Service = object_store(extra, options)
            return client
        if extra is None and protocol not in WEB and protocol != "memory":
            raise UsageError(
                f"{protocol}:// is not supported; give a local path, gs://, s3://, az://, hf:// or "
                "https://"
            )
        from precache.storage import fsspec_services as of_fsspec

        if protocol in WEB:
            return of_fsspec.Web(protocol, options, within)
        return (of_fsspec.Google if extra == "gcs" else of_fsspec.Fsspec)(protocol, options)
    except PrecacheError:
        raise
    except ImportError:
        if extra:
            raise missing_library(f"{protocol}://", None, extra) from None
        raise UsageError(f"{protocol}:// needs its fsspec library; install it") from None
    except Exception as error:  # of credentials, the libraries raise anything
        raise UsageError(
            f"cannot use {protocol}://: {reason_of(error, options)}; check the credentials and the "
            "storage options"
        ) from None


def path_below(protocol: str, root: str, name: str, *, quoted: bool = True) -> str:
    """Return the path of a name below a root, before the query that a web server's URL has."""
    if protocol not in WEB:
        return join(root, name)
    query = url_parts(root)[2]
    name = quote(name, errors="surrogateescape") if quoted else name
    return join(root.removesuffix(query), name) + query


def join(root: str, name: str) -> str:
    """Return a path of two parts, each of which may be empty."""
    return f"{root.rstrip('/')}/{name}" if root and name else root or name


@functools.cache
def user_agent() -> str:
    """Return the name by which precache calls itself to servers."""
    from precache import __version__

    return f"precache/{__version__}"


# --- secrets ------------------------------------------------------------------------------------


def reason_of(error: Exception, options: Mapping[str, Any], url: str = "") -> str:
    """Return an error's text without the values of the options and the secrets of the URL."""
    reason = str(error) or type(error).__name__
    plain = {*_secrets(options), *_secrets_of(url)}
    secrets = plain | {form(secret) for secret in plain for form in (quote, _quoted, quote_plus)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        reason = reason.replace(secret, "…")
    return reason


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _secrets_of(url: str) -> Iterator[str]:
    """Yield user, password and what follows the path of a URL, as they stand and unquoted."""
    user, _, query = url_parts(url)
    values = re.split(r"[?#&;]|(?<!=)=(?!=)", query)
    for part in (user[:-1], *user[:-1].split(":", 1), query[1:], *values):
        yield from (text for text in (part, unquote(part)) if len(text) >= 4)


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and len(value) >= 4:
            yield value
            yield from _SECRET_PARTS.findall(value)
