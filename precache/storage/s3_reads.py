"""Reads from S3 by URLs that obstore signs, at a fifth of the CPU time that s3fs takes a request.

aiohttp fetches them, since obstore's own answers do not tell when a server wishes to be asked
again, and lists, since s3fs takes 45 ms to read an answer of 1,000 names. Credentials, region and
endpoint are those that s3fs found, and all else is left to it: writing, and every request that
failed once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http.client import responses
from typing import Any
from urllib.parse import quote, urlencode
from urllib.request import getproxies

from precache.storage import retries

log = logging.getLogger(__name__)

Part = tuple[str, int, int | None]
"""Bucket and key, first byte, end; the whole object where that is None."""

UNDERSTOOD = frozenset(
    ("key", "secret", "token", "anon", "endpoint_url", "client_kwargs", "profile",
     "use_listings_cache")
)  # fmt: skip
"""Options of s3fs that are carried over; with any other, s3fs reads."""

AT_ONCE = 64
"""Requests under way at a time."""

TRUST = 3
"""Calls that may fail before any has succeeded; then s3fs does it all."""

SIGNED_FOR = timedelta(hours=1)

BUFFER = 1 << 20
"""Bytes of an answer that arrive before anybody asks for them."""

CREDENTIALS_LAST = timedelta(minutes=10)
"""After this they are asked for again; the library behind s3fs knows when they expire."""

_processes: set[int] = set()
"""Where obstore's threads were started. They are gone in a forked child, which would wait for
them for ever."""


class _NoCredentialsError(Exception):
    """s3fs finds none."""


class _RefusedError(Exception):
    """The service answered with an error; no text of it, which may repeat what it was sent."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"the service answered {status} {responses.get(status, '')}".rstrip())
        self.status, self.headers = status, headers


class _OddError(ConnectionError):
    """The service answered what s3fs may understand."""


class S3Reads:
    """Reads of one s3fs file system."""

    def __init__(self, fs: Any) -> None:
        self._fs, self._web = fs, _web()
        self._stores: dict[str, Any] = {}
        self._opening = asyncio.Lock()
        self._failures = 0
        self._succeeded = False
        self._lists = True

    @property
    def usable(self) -> bool:
        """Whether it is worth asking."""
        return self._succeeded or self._failures < TRUST

    def cat(self, parts: Sequence[Part]) -> list[Any] | None:
        """The bytes of each of one or more, or the exception that says why there are none.

        None where s3fs is to say what it does without credentials.
        """
        from fsspec.asyn import sync

        _processes.add(os.getpid())
        try:
            found: list[Any] = sync(self._fs.loop, self._cat_all, parts)
        except _NoCredentialsError:
            self._failures = TRUST
            return None
        if any(isinstance(each, bytes | FileNotFoundError) for each in found):
            self._succeeded = True
        else:
            self._failures += 1
            if not self.usable:
                # Not its text: a service may repeat there what it was sent.
                log.info("reading through s3fs alone after %s", type(found[0]).__name__)
        return found

    def page(self, bucket: str, prefix: str, start: str | None, token: str | None) -> bytes | None:
        """One page of what lies directly below a prefix: the answer to ListObjectsV2.

        None where s3fs is to list, as this service does not understand.
        """
        from fsspec.asyn import sync

        _processes.add(os.getpid())
        wanted = {"list-type": "2", "delimiter": "/", "encoding-type": "url", "prefix": prefix}
        if start:
            wanted["start-after"] = start
        if token:
            wanted["continuation-token"] = token
        try:
            if self._lists:
                listed: bytes = sync(self._fs.loop, self._list, bucket, wanted)
                return listed
        except _NoCredentialsError:
            self._lists = False
        except _OddError as error:
            self._lists = False
            log.info("listing through s3fs alone after %s", error)
        return None

    async def _list(self, bucket: str, wanted: Mapping[str, str]) -> bytes:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials
        from yarl import URL

        url = (await self._signed([f"{bucket}/x"]))[0].with_query(None).parent
        request = AWSRequest("GET", f"{url}?{urlencode(wanted, quote_via=quote)}")
        if not self._fs.anon:
            told = await self._credentials()
            own = Credentials(told["access_key_id"], told["secret_access_key"], told["token"])
            S3SigV4Auth(own, "s3", self._stores[bucket].config["region"]).add_auth(request)
        headers = dict(request.headers.items())
        return await self._ask(URL(request.url, encoded=True), headers, 200)

    async def _cat_all(self, parts: Sequence[Part]) -> list[Any]:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(url: Any, part: Part) -> bytes | Exception:
            async with limit:
                try:
                    return await self._fetch(url, *part[1:])
                except Exception as error:
                    return error

        try:
            urls = await self._signed([path for path, _, _ in parts])
        except _NoCredentialsError:
            raise
        except Exception as error:  # whose text may tell what it was to sign with
            return [_OddError(f"no URL, but {type(error).__name__}")] * len(parts)
        return await asyncio.gather(*map(one, urls, parts))

    async def _signed(self, paths: Sequence[str]) -> list[Any]:
        """A URL for each path; those of one bucket are signed together, at a fifth of the cost."""
        import obstore
        from yarl import URL

        split = [self._fs._strip_protocol(path).partition("/")[::2] for path in paths]
        found = {}
        for bucket in dict.fromkeys(bucket for bucket, _ in split):
            async with self._opening:
                store = self._stores.get(bucket) or await self._open(bucket)
            keys = [key for name, key in split if name == bucket]
            signed = await obstore.sign_async(store, "GET", keys, SIGNED_FOR)
            found[bucket] = iter(signed)
        urls = [URL(next(found[bucket]), encoded=True) for bucket, _ in split]
        return [url.with_query(None) for url in urls] if self._fs.anon else urls

    async def _fetch(self, url: Any, start: int, end: int | None) -> bytes:
        if end is None:
            return await self._ask(url, {}, 200)
        return await self._ask(url, {"Range": f"bytes={start}-{end - 1}"}, 206)

    async def _ask(self, url: Any, headers: Mapping[str, str], expected: int) -> bytes:
        """The body of an answer with the status that is expected."""
        from aiohttp import ClientResponseError

        session = await self._web.set_session()
        headers = {**headers, "Accept-Encoding": "identity"}
        try:
            async with session.get(url, headers=headers, allow_redirects=False) as answer:
                if answer.status == expected:
                    data: bytes = await answer.read()
                    return data
                raise _refused(answer.status, answer.headers)
        except ClientResponseError as error:  # whose text has the signed URL
            raise ConnectionError(f"the answer is no HTTP: {error.message}") from None

    async def _open(self, bucket: str) -> Any:
        from botocore.exceptions import ClientError
        from obstore.store import S3Store

        client = await self._fs.set_session()
        endpoint = str(client.meta.endpoint_url)
        config: dict[str, Any] = {"region": client.meta.region_name}
        if endpoint.endswith(".amazonaws.com"):
            try:
                answer = await client.head_bucket(Bucket=bucket)
            except ClientError as error:  # whoever may only read objects is told the region too
                answer = error.response
            headers = answer["ResponseMetadata"].get("HTTPHeaders", {})
            config["region"] = headers.get("x-amz-bucket-region", config["region"])
        else:
            config["endpoint"] = endpoint
        if self._fs.anon:  # what is signed with it is taken away again
            config |= {"access_key_id": "nobody", "secret_access_key": "nothing"}
        elif not self._fs.key and await self._fs.session.get_credentials() is None:
            raise _NoCredentialsError
        else:
            config["credential_provider"] = self._credentials
        self._stores[bucket] = S3Store(
            bucket,
            **config,
            client_options={"allow_http": True},
        )
        return self._stores[bucket]

    async def _credentials(self) -> dict[str, Any]:
        if self._fs.key:
            own = self._fs.key, self._fs.secret, self._fs.token
        else:
            found = await self._fs.session.get_credentials()
            frozen = await found.get_frozen_credentials()
            own = frozen.access_key, frozen.secret_key, frozen.token
        names = ("access_key_id", "secret_access_key", "token")
        return {
            **dict(zip(names, own, strict=True)),
            "expires_at": datetime.now(UTC) + CREDENTIALS_LAST,
        }


def _web() -> Any:
    """fsspec's file system of the web, which keeps a session of aiohttp's, and closes it."""
    from fsspec import filesystem

    session = {
        "timeout": retries.patience(),
        "read_bufsize": BUFFER,
        "auto_decompress": False,
        "trust_env": bool(getproxies()),  # to look for proxies takes as long as a request
    }
    return filesystem("http", use_listings_cache=False, client_kwargs=session)


_made: dict[int, S3Reads] = {}


def reads_of(fs: Any, options: Mapping[str, Any]) -> S3Reads | None:
    """Those of an s3fs file system; None where s3fs itself is to read."""
    if not set(options) <= UNDERSTOOD or _processes - {os.getpid()}:
        return None
    try:
        import obstore  # noqa: F401 - whether it is installed
    except ImportError:
        return None
    # fsspec keeps one file system for each set of options, as long as the process lives.
    reads = _made.get(id(fs))
    if reads is None or reads._fs is not fs:
        reads = _made[id(fs)] = S3Reads(fs)
    return reads if reads.usable else None


def _refused(status: int, headers: Mapping[str, str]) -> Exception:
    """What is raised for a status: as Python calls it, where asking again cannot help."""
    refused = _RefusedError(status, headers)
    if status == 404:
        return FileNotFoundError(str(refused))
    if status in (401, 403):
        return PermissionError(str(refused))
    return refused if status in retries.TRANSIENT_STATUS else _OddError(str(refused))
