"""Reads from S3 by obstore, which takes a fifth of the CPU time of s3fs a request.

Credentials, region and endpoint are those that s3fs found, and all else is left to it: listing,
writing, and every request that failed once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from precache import retries

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

CREDENTIALS_LAST = timedelta(minutes=10)
"""After this they are asked for again; the library behind s3fs knows when they expire."""

_processes: set[int] = set()
"""Where obstore's threads were started. They are gone in a forked child, which would wait for
them for ever."""


class _NoCredentialsError(Exception):
    """s3fs finds none."""


class S3Reads:
    """Reads of one s3fs file system."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._stores: dict[str, Any] = {}
        self._opening = asyncio.Lock()
        self._failures = 0
        self._succeeded = False

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

    async def _cat_all(self, parts: Sequence[Part]) -> list[Any]:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(part: Part) -> bytes | Exception:
            async with limit:
                try:
                    return await self._cat(*part)
                except _NoCredentialsError:
                    raise
                except Exception as error:
                    return _plain(error)

        return await asyncio.gather(*map(one, parts))

    async def _cat(self, path: str, start: int, end: int | None) -> bytes:
        import obstore

        bucket, _, key = self._fs._strip_protocol(path).partition("/")
        async with self._opening:
            store = self._stores.get(bucket) or await self._open(bucket)
        if end is None:
            whole = await obstore.get_async(store, key)
            return bytes(await whole.bytes_async())
        return bytes(await obstore.get_range_async(store, key, start=start, end=end))

    async def _open(self, bucket: str) -> Any:
        from botocore.exceptions import ClientError
        from obstore.store import S3Store

        client = await self._fs.set_session()
        # botocore tries again by itself, and does not look at when the server wishes it.
        client.meta.events.register_first("needs-retry.s3", _wait_as_wished, "precache")
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
        if self._fs.anon:
            config["skip_signature"] = True
        elif self._fs.key:
            config["access_key_id"] = self._fs.key
            config["secret_access_key"] = self._fs.secret
            if self._fs.token:
                config["session_token"] = self._fs.token
        elif await self._fs.session.get_credentials() is None:
            raise _NoCredentialsError
        else:
            config["credential_provider"] = self._credentials
        self._stores[bucket] = S3Store(
            bucket,
            **config,
            client_options={"allow_http": True, "timeout": "300s", "connect_timeout": "10s"},
            retry_config={"max_retries": 0},
        )
        return self._stores[bucket]

    async def _credentials(self) -> dict[str, Any]:
        found = await self._fs.session.get_credentials()
        frozen = await found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_LAST,
        }


async def _wait_as_wished(response: tuple[Any, Any] | None = None, **others: Any) -> None:
    if response is not None:
        await retries.wait_as_wished(response[0].status_code, response[0].headers)


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


def _plain(error: Exception) -> Exception:
    """What cannot be helped by asking again, as Python calls it."""
    from obstore import exceptions

    if isinstance(error, exceptions.NotFoundError):
        return FileNotFoundError(str(error))
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return PermissionError(str(error))
    return error
