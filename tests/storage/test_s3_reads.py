"""Reads from S3 by signed URLs: taken where they can be, left to s3fs where they fail."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from precache.errors import StorageError
from precache.storage import retries, s3_reads
from precache.storage.open import open_folder
from tests.support.servers import Fault, FaultProxy, S3Server, status

pytest.importorskip("obstore", reason="what these tests are of")
pytest.importorskip("s3fs", reason="s3:// needs s3fs")

NAMES = [f"{number:02d}" for number in range(10)]


@pytest.fixture(scope="module", autouse=True)
def objects(s3: S3Server) -> None:
    """Ten objects of 100 bytes."""
    folder = open_folder("s3://bucket/x", s3.options())
    for name in NAMES:
        folder.put(name, [name.encode() * 50])


def _reads(options: dict[str, Any]) -> s3_reads.S3Reads | None:
    return s3_reads.reads_of(fsspec.filesystem("s3", use_listings_cache=False, **options), options)


def _agents(proxy: FaultProxy) -> set[str]:
    """Who asked, by the first word of what they say of themselves."""
    return {agent.partition("/")[0] for agent in proxy.agents}


def test_one_request_an_object_and_none_by_s3fs(s3: S3Server, proxy: FaultProxy) -> None:
    folder = open_folder("s3://bucket/x", s3.options(proxy.port))
    assert folder.read_many(NAMES, [100] * 10) == [name.encode() * 50 for name in NAMES]
    assert folder.read_ranges([("03", 10, 4), ("04", 96, 4)]) == [b"0303", b"0404"]
    assert sum(proxy.seen.values()) == 12
    assert _agents(proxy) == {"Python"}


def test_an_object_that_grew_shows_by_a_byte_more(s3: S3Server) -> None:
    folder = open_folder("s3://bucket/x", s3.options())
    assert folder.read_many(["05", "06"], [60, -1]) == [(b"05" * 50)[:61], b"06" * 50]


def test_what_fails_is_asked_for_again_by_s3fs(s3: S3Server, proxy: FaultProxy) -> None:
    folder = open_folder("s3://bucket/x", s3.options(proxy.port))
    proxy.faults["GET", "/07"] = [status(503), status(503)]
    assert folder.read_many(["06", "07"], [100, 100]) == [b"06" * 50, b"07" * 50]
    assert _agents(proxy) == {"Python", "aiobotocore"}
    assert _reads(s3.options(proxy.port)) is not None


def test_nothing_is_asked_for_sooner_than_the_server_wishes(
    s3: S3Server, proxy: FaultProxy
) -> None:
    folder = open_folder("s3://bucket/x", s3.options(proxy.port))
    proxy.faults["GET", "/07"] = [status(503, 1), status(429, 1), status(503, 1)]
    asked = list[float]()
    proxy.before = lambda method, path: asked.append(time.monotonic())
    assert folder.read_many(["07"], [100]) == [b"07" * 50]
    waited = [second - first for first, second in itertools.pairwise(asked)]
    assert [seconds >= 1 for seconds in waited] == [True] * 3


def test_nor_are_listings(s3: S3Server, proxy: FaultProxy) -> None:
    proxy.faults["GET", "/bucket"] = [status(503, 1)]
    asked = list[float]()
    proxy.before = lambda method, path: asked.append(time.monotonic())
    assert open_folder("s3://bucket/x", s3.options(proxy.port)).names() == NAMES
    assert asked[1] - asked[0] >= 1


def no_http(handler: Any, upstream: int, data: bytes) -> bool:
    """An answer that is none."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nno header at all\r\n\r\n")
    handler.close_connection = True
    return True


@pytest.mark.parametrize(
    ("fault", "why"), [(status(503), "503 Service Unavailable"), (no_http, "the answer is no HTTP")]
)
def test_a_signed_url_is_in_no_message(
    fault: Fault, why: str, s3: S3Server, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "precache")
    folder = open_folder("s3://bucket/x", s3.options(proxy.port))
    proxy.faults["GET", "/07"] = [fault, status(403)]
    [found] = folder.read_many(["07"], [100])
    said = f"{found} {caplog.text}"
    assert why in said
    assert "; trying again in" in said
    assert "X-Amz" not in said


def test_bytes_come_as_they_are_stored(s3: S3Server) -> None:
    """Also those that a browser would unpack."""
    packed = gzip.compress(b"pixels" * 100)
    fs = fsspec.filesystem("s3", use_listings_cache=False, **s3.options())
    fs.pipe_file("bucket/names/packed", packed, ContentEncoding="gzip")
    folder = open_folder("s3://bucket/names", s3.options())
    assert folder.read_many(["packed", "packed"], [-1, len(packed)]) == [packed, packed]


@pytest.mark.parametrize(
    "name", ["grand chat/1 %20.jpg", "Kätzchen/3&4+5.jpg", "a%b/'6'.jpg", "q?a#"]
)
def test_keys_of_any_letters_are_read(name: str, s3: S3Server, proxy: FaultProxy) -> None:
    folder = open_folder("s3://bucket/names", s3.options(proxy.port))
    folder.put(name, [b"1"])
    assert folder.read_many([name, name], [1, -1]) == [b"1", b"1"]
    assert [agent.partition("/")[0] for agent in proxy.agents[-2:]] == ["Python", "Python"]


def test_what_never_works_is_not_tried_for_ever(s3: S3Server, proxy: FaultProxy) -> None:
    options = s3.options(proxy.port)
    proxy.choose = lambda method, path: (
        status(400) if proxy.agents[-1].startswith("Python") else None
    )
    folder = open_folder("s3://bucket/x", options)
    for _ in range(s3_reads.TRUST):
        assert _reads(options) is not None
        assert folder.read_many(["01"], [100]) == [b"01" * 50]
    assert _reads(options) is None
    assert folder.read_many(["01"], [100]) == [b"01" * 50]


def test_what_is_missing_or_forbidden_is_asked_for_once(s3: S3Server, proxy: FaultProxy) -> None:
    folder = open_folder("s3://bucket/x", s3.options(proxy.port))
    proxy.faults["GET", "/08"] = [status(403)]
    missing, forbidden = folder.read_many(["nowhere", "08"], [5, 100])
    assert isinstance(missing, StorageError)
    assert str(missing) == "cannot read s3://bucket/x/nowhere: there is no such object"
    assert isinstance(forbidden, StorageError)
    assert "check the credentials and what they may do" in str(forbidden)
    assert sum(proxy.seen.values()) == 2


def test_credentials_of_the_environment_serve_too(
    s3: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "else")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    folder = open_folder("s3://bucket/x", {"endpoint_url": f"http://127.0.0.1:{proxy.port}"})
    assert folder.read_many(["02"], [100]) == [b"02" * 50]
    assert _agents(proxy) == {"Python"}


def test_nobody_needs_credentials_for_what_is_public(s3: S3Server, proxy: FaultProxy) -> None:
    fs = fsspec.filesystem("s3", use_listings_cache=False, **s3.options())
    fs.pipe_file("bucket/public/02", b"for all", ACL="public-read")
    options = {"endpoint_url": f"http://127.0.0.1:{proxy.port}", "anon": True}
    assert open_folder("s3://bucket/public", options).read_many(["02"], [7]) == [b"for all"]
    assert _agents(proxy) == {"Python"}


def test_without_credentials_s3fs_says_so_at_once(
    s3: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(retries, "attempts", lambda: iter([retries.Attempt(0, last=True)]))
    options = {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
    [found] = open_folder("s3://bucket/x", options).read_many(["02"], [100])
    assert "Unable to locate credentials" in str(found)
    assert _reads(options) is None


def test_options_that_only_s3fs_understands_leave_it_to_that(s3: S3Server) -> None:
    assert _reads({**s3.options(), "requester_pays": True}) is None
    assert _reads(s3.options()) is not None


def test_whoever_may_not_look_at_a_bucket_reads_its_objects() -> None:
    from botocore.exceptions import ClientError

    async def head_bucket(**asked: str) -> None:
        said = {"HTTPStatusCode": 403, "HTTPHeaders": {"x-amz-bucket-region": "eu-north-1"}}
        raise ClientError({"Error": {"Code": "403"}, "ResponseMetadata": said}, "HeadBucket")

    meta = SimpleNamespace(endpoint_url="https://s3.amazonaws.com", region_name="us-east-1")
    client = SimpleNamespace(meta=meta, head_bucket=head_bucket)

    async def set_session() -> SimpleNamespace:
        return client

    fs = SimpleNamespace(set_session=set_session, anon=True)
    store = asyncio.run(s3_reads.S3Reads(fs)._open("bucket"))
    assert store.config["region"] == "eu-north-1"
