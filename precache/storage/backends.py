"""Open the file system of a protocol: obstore's for S3 and Azure, fsspec's for all others."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator, Mapping
from html import unescape
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from precache.errors import PrecacheError, UsageError, missing_library
from precache.messages import shown, url_parts
from precache.storage import retries
from precache.storage.object_store import object_store

EXTRAS = {
    "gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "az": "azure", "abfs": "azure",
    "abfss": "azure", "hf": "hf",
}  # fmt: skip
"""Protocol -> the extra of precache that installs its library."""

WEB = frozenset(("http", "https"))
"""Read-only protocols, whose listings and requests have URL-quoted names."""

READ_ONLY = WEB | {"hf"}

MOST_PAGE = 64 << 20
"""Bytes of a web page that lists files: of some 500,000 names."""

PAGE_SECONDS = 300.0
"""Most time from the first byte of such a page to the last."""

_LINK = re.compile(
    r"""<a\s(?:[^<>]*?\s)?href\s*=\s*(?:"([^"]+)|'([^']+))|(https?://[^\s"'<>]+)""",
    re.IGNORECASE,
)
"""A link of a page; the search takes linear time in any page."""

_OF_URLS = "%/:?#[]@!$&()*+,;="
"""Characters of a URL that are not quoted once more."""

_SECRET_PARTS = re.compile(r"(?:AccountKey|sig)=([^;&]{4,})", re.IGNORECASE)
"""Secrets within an Azure connection string or shared access signature, which may also appear by
themselves."""


def file_system(protocol: str, options: Mapping[str, Any], within: str) -> Any:
    """Return this process's client for these options; fsspec's instance but for S3 and Azure.

    Parameters
    ----------
    within
        URL below which a web server may redirect; empty for anywhere.
    """
    try:
        if EXTRAS.get(protocol) in ("s3", "azure"):
            import obstore  # noqa: F401 - reports that it is missing

            return object_store(EXTRAS[protocol], options)
        system_class = _class_of(protocol, options)
        return system_class(
            **{"use_listings_cache": False, **_with_timeouts(protocol, options, within)}
        )
    except PrecacheError:
        raise
    except ImportError:
        if extra := EXTRAS.get(protocol):
            raise missing_library(f"{protocol}://", None, extra) from None
        raise UsageError(f"{protocol}:// needs its fsspec library; install it") from None
    except Exception as error:  # of credentials, the libraries raise anything
        raise UsageError(
            f"cannot use {protocol}://: {reason_of(error, options)}; check the credentials and the "
            "storage options"
        ) from None


def _class_of(protocol: str, options: Mapping[str, Any]) -> Any:
    import fsspec

    if protocol not in EXTRAS and protocol not in WEB and protocol != "memory":
        raise UsageError(
            f"{protocol}:// is not supported; give a local path, gs://, s3://, az://, hf:// or "
            "https://"
        )
    system_class = fsspec.get_filesystem_class(protocol)
    if protocol in ("gs", "gcs") and not _on_google(options):
        # gcsfs's usual class asks by gRPC what kind of bucket it is: a minute for each request.
        from gcsfs.core import GCSFileSystem

        return GCSFileSystem
    return system_class


def _with_timeouts(protocol: str, options: Mapping[str, Any], within: str) -> dict[str, Any]:
    """Add the time limits of a request to the options of a library."""
    if protocol in WEB:
        own = options.get("client_kwargs", {})
        traces = [*own.get("trace_configs", []), *([_redirects_within(within)] if within else [])]
        limits = {"timeout": retries.client_timeout(), "response_class": _bounded_page()}
        return {**options, "client_kwargs": {**limits, **own, "trace_configs": traces}}
    if EXTRAS.get(protocol) != "gcs":
        return {**options}
    # gcsfs has no time-out, and its own retries ignore Retry-After.
    own = options.get("session_kwargs", {})
    own = {**own, "trace_configs": [*own.get("trace_configs", []), _retry_after_trace()]}
    return {"requests_timeout": retries.client_timeout(), **options, "session_kwargs": own}


@functools.cache  # fsspec caches instances by their arguments
def _retry_after_trace() -> Any:
    import aiohttp

    async def answered(session: Any, context: Any, request: Any) -> None:
        await retries.wait_retry_after(request.response.status, request.response.headers)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(answered)
    return trace


@functools.cache
def _redirects_within(root: str) -> Any:
    """Return a trace that refuses redirects out of a URL; from http to https is allowed."""
    import aiohttp
    from yarl import URL

    inside = URL(root)

    async def redirected(session: Any, context: Any, request: Any) -> None:
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
                f"the server redirects to {where}, which is not below {shown(root)}; give the "
                "address where the files lie, or, of a source, --follow-links"
            )

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(redirected)
    return trace


@functools.cache
def _bounded_page() -> type:
    """Return a response class whose text is the links of a page alone, in UTF-8 and URL-quoted.

    fsspec would search for them in cubic time, with the interpreter's lock held. A page may be
    endless, or name an encoding that is unknown or takes quadratic time.
    """
    from aiohttp import ClientResponse

    class Bounded(ClientResponse):
        async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
            page, began = bytearray(), time.monotonic()
            async for piece in self.content.iter_any():
                page += piece
                if len(page) > MOST_PAGE or time.monotonic() - began > PAGE_SECONDS:
                    self.close()
                    limits = f"{MOST_PAGE:,} bytes, or takes longer than {PAGE_SECONDS:g} s"
                    raise OSError(f"the page has more than {limits}")
            links = map("".join, _LINK.findall(page.decode("utf-8", errors)))
            return "".join(f'<a href="{quote(unescape(link), _OF_URLS)}">' for link in links)

    return Bounded


def create_copy_on_google(fs: Any, source: str, target: str) -> None:
    """Copy an object within Google's service to a path where nothing may exist; gcsfs cannot.

    Raises
    ------
    Exception
        Something exists: an error of gcsfs's, with status 412.
    """
    path = "b/{}/o/{}/rewriteTo/b/{}/o/{}"
    names = *fs.split_path(source)[:2], *fs.split_path(target)[:2]
    token, done = None, False
    while not done:  # a large object takes several requests
        answer = fs.call(
            "POST", path, *names, ifGenerationMatch=0, rewriteToken=token, json_out=True
        )
        token, done = answer.get("rewriteToken"), answer["done"]


def _on_google(options: Mapping[str, Any]) -> bool:
    """Return True if ``gs://`` is Google's own service, and no server that has HTTP alone."""
    server = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    return not server or server == "default" or "googleapis.com" in server


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
