"""S3 and Azure through obstore: options, credentials, errors, and processes that fork."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from precache.errors import StorageError, UsageError
from precache.storage import object_store, service_options
from precache.storage.base import NO_NAME
from precache.storage.open import open_folder
from tests.storage.conftest import put_raw
from tests.support.building import environment
from tests.support.servers import Fault, FaultProxy, S3Server, status

pytest.importorskip("obstore", reason="what these tests are of")

NAMES = [f"{number:02d}" for number in range(10)]


@pytest.fixture(scope="module", autouse=True)
def objects(s3: S3Server) -> None:
    """Ten objects of 100 bytes."""
    folder = open_folder("s3://bucket/x", s3.options())
    for name in NAMES:
        folder.put(name, [name.encode() * 50])


_LEAVE_AT_ONCE = """
import json, sys, threading, time
from asyncio.selector_events import BaseSelectorEventLoop
from precache.storage.open import open_folder

wake = BaseSelectorEventLoop._write_to_self

def wake_late(loop):
    wake(loop)
    if threading.get_ident() not in {thread.ident for thread in threading.enumerate()}:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            time.sleep(0.001)  # waits for the interpreter's lock afterwards

BaseSelectorEventLoop._write_to_self = wake_late
folder = open_folder("s3://bucket/x", json.loads(sys.argv[1]))
print(folder.size("03"), folder.read("03"))
"""


def test_a_process_that_ends_right_after_its_last_answer_ends_well(s3: S3Server) -> None:
    """A thread of obstore has woken the event loop, and has not come back from there."""
    line = [sys.executable, "-c", _LEAVE_AT_ONCE, json.dumps(s3.options())]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def no_http(handler: Any, upstream: int, data: bytes) -> bool:
    """Answer with something else."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nno header at all\r\n\r\n")
    handler.close_connection = True
    return True


@pytest.mark.parametrize(
    ("fault", "reason"), [(status(503), "503 Service Unavailable"), (no_http, "error sending req")]
)
def test_messages_give_the_reason_and_no_signature(
    fault: Fault,
    reason: str,
    s3: S3Server,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a server that stays as it is for long."""
    monkeypatch.setattr(object_store.ObjectStore, "attempts", 3)
    caplog.set_level("DEBUG", "precache")
    folder = open_folder("s3://bucket/x", s3.options(proxy.port))
    proxy.faults["GET", "/07"] = [fault] * 1000
    [error] = folder.read_many(["07"], [100])
    assert isinstance(error, StorageError)
    assert str(error).startswith("cannot read s3://bucket/x/07: ")
    text = f"{error} {caplog.text}"
    assert reason in text
    assert "; trying again in" in text
    assert not any(part in text for part in ("X-Amz", "AWS4", "Debug", s3.options()["secret"]))


def test_bytes_come_as_they_are_stored(s3: S3Server) -> None:
    """Also those that a browser would unpack."""
    packed = gzip.compress(b"pixels" * 100)
    put_raw(s3, "names/packed", packed, content_encoding="gzip")
    folder = open_folder("s3://bucket/names", s3.options())
    assert folder.read_many(["packed", "packed"], [-1, len(packed)]) == [packed, packed]


def test_keys_with_control_characters_are_left_out_and_refused(s3: S3Server) -> None:
    put_raw(s3, "control/a%07b.jpg", b"1")
    put_raw(s3, "control/c.jpg", b"1")
    folder, left_out = open_folder("s3://bucket/control", s3.options()), list[tuple[str, str]]()
    assert [info.name for info in folder.walk(lambda *what: left_out.append(what))] == ["c.jpg"]
    assert left_out == [("a\x07b.jpg", NO_NAME)]
    with pytest.raises(StorageError, match="its name has a control character; rename it"):
        folder.read("a\x07b.jpg")


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody has put any where boto3 looks."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("no_credentials")
def test_credentials_are_those_that_boto3_finds_or_those_that_are_given(
    s3: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
    secrets = "[mine]\naws_access_key_id = profile\naws_secret_access_key = else\n"
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(secrets)
    with monkeypatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "variable")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "else")
        environment.setenv("AWS_SESSION_TOKEN", "of-the-variable")
        assert open_folder("s3://bucket/x", options).read_many(["02"], [100]) == [b"02" * 50]
        assert open_folder("s3://bucket/x", s3.options(proxy.port)).read("02") == b"02" * 50
    profile = open_folder("s3://bucket/x", {**options, "profile": "mine"})
    assert profile.read_many(["02"], [100]) == [b"02" * 50]
    sent = [(h["Authorization"], h.get("x-amz-security-token")) for h in proxy.headers]
    names = ["variable", "someone", "profile"]
    assert [name in key for name, (key, _) in zip(names, sent, strict=True)] == [True] * 3
    assert [token for _, token in sent] == ["of-the-variable", None, None]


@pytest.mark.usefixtures("no_credentials")
def test_credentials_that_are_replaced_in_their_file_are_read_again(
    s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    file = tmp_path / ".aws/credentials"
    file.parent.mkdir()
    folder = open_folder("s3://bucket/x", {"endpoint_url": f"http://127.0.0.1:{proxy.port}"})
    for name in ("FIRST", "SECOND"):
        file.write_text(f"[default]\naws_access_key_id = {name}\naws_secret_access_key = else\n")
        until = time.monotonic() + 60  # obstore asks for them ten times a second
        while not proxy.headers or name not in proxy.headers[-1]["Authorization"]:
            assert folder.read("02") == b"02" * 50
            assert time.monotonic() < until


@pytest.mark.usefixtures("no_credentials")
def test_nobody_needs_credentials_for_what_is_public(s3: S3Server) -> None:
    put_raw(s3, "public/02", b"for all", x_amz_acl="public-read")
    options = {"endpoint_url": f"http://127.0.0.1:{s3.port}"}
    folder = open_folder("s3://bucket/public", {**options, "anon": True})
    assert folder.read_many(["02"], [7]) == [b"for all"]
    with pytest.raises(UsageError, match="there are no credentials for s3://; give key and secr"):
        open_folder("s3://bucket/public", options).read("02")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3://bucket", {"secert": "hidden"}, "unknown storage option of s3:// 'secert'; known ar"),
        ("s3://bucket", {"client_kwargs": {"region": 1}}, "unknown key of client_kwargs 'region';"),
        ("s3://bucket", {"profile": "hidden"}, r"cannot connect to bucket \(ProfileNotFound\); ch"),
        ("az://bucket", {"acount_key": "hidden"}, "unknown storage option of az:// 'acount_key'; "),
        ("az://bucket", {"account_key": "hidden"}, "az:// needs the name of an account; give acc"),
    ],
)
def test_options_that_are_wrong_are_refused_without_their_values(
    url: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match=message) as caught:
        open_folder(url, options).read("a")
    assert "hidden" not in str(caught.value)


def test_the_region_of_a_bucket_is_found_by_whoever_may_only_read_its_objects() -> None:
    from botocore.exceptions import ClientError

    metadata = {"HTTPStatusCode": 403, "HTTPHeaders": {"x-amz-bucket-region": "eu-north-1"}}
    refusal = {"Error": {"Code": "403"}, "ResponseMetadata": metadata}
    client = Mock(**{"head_bucket.side_effect": ClientError(refusal, "HeadBucket")})
    assert service_options._region(client, "bucket") == "eu-north-1"


def test_a_forked_child_reads_and_lists_and_gets_no_answer_to_a_call_that_it_gave_up(
    s3: S3Server, proxy: FaultProxy
) -> None:
    """The threads of obstore are its parent's."""
    folder = open_folder("s3://bucket/x", s3.options(proxy.port))
    assert folder.read("00") == b"00" * 50

    def answer_late(method: str, path: str) -> None:
        if path.endswith("09"):
            os.kill(child, signal.SIGALRM)
            time.sleep(1.0)

    def give_up(*_: object) -> None:
        raise ZeroDivisionError

    proxy.before = answer_late
    child = os.fork()
    if child == 0:
        outcome = 1
        try:
            right = folder.read_many(["01", "02"], [100, 100]) == [b"01" * 50, b"02" * 50]
            listed = sorted(info.name for info in folder.walk()) == folder.names() == NAMES
            signal.signal(signal.SIGALRM, give_up)
            with contextlib.suppress(ZeroDivisionError):
                folder.read("09")
            right &= folder.read("03") == b"03" * 50
            outcome = 0 if right and listed and folder.get("nowhere") is None else 2
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert folder.read("02") == b"02" * 50


def test_threads_may_begin_with_different_accounts_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, hasty_threads: None
) -> None:
    monkeypatch.setattr(object_store, "_stores", {})
    monkeypatch.setattr(object_store, "ObjectStore", lambda kind, options: options["key"])
    with ThreadPoolExecutor(4) as pool:
        begun = pool.map(lambda n: object_store.object_store("s3", {"key": n}), range(2000))
        assert list(begun) == list(range(2000))


def test_the_environment_moves_no_request_to_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    options = {"key": "someone", "secret": "something", "endpoint_url": "https://s3.amazonaws.com"}
    monkeypatch.setattr(service_options, "_region", lambda client, bucket: "eu-north-1")
    config = service_options.open_bucket("s3", "bucket", options).reads.config
    assert config["endpoint"] == "https://s3.eu-north-1.amazonaws.com"
    assert config["virtual_hosted_style_request"] == "false"
