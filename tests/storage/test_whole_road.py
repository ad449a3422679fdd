"""Builds, versions and training over every service."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from pathlib import Path

import pytest

import precache
from precache.errors import (
    BuildError,
    StorageError,
    StoreError,
)
from precache.storage import retries
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache.store.commit_log import require_create_only
from precache_workers.sources.kinds import open_source
from tests.conftest import BuiltStore
from tests.storage.conftest import SERVERS, numbers
from tests.support.building import (
    DEADLINE,
    assert_whole_road,
    contents,
    environment,
    put_photos,
    remains,
    running,
    write_jpegs,
)
from tests.support.servers import (
    Azurite,
    FaultProxy,
    S3Server,
    status,
)

SECRET = "a-secret-that-nobody-may-see"
RECIPE = precache.Recipe.image(resize=64, crop=56)


@pytest.fixture
def remote_photos(s3: S3Server) -> str:
    """A source of twelve photographs in two classes, one of them broken."""
    url = f"s3://bucket/photos-{next(numbers)}"
    put_photos(open_folder(url, s3.options()))
    return url


def test_a_shard_takes_a_look_at_the_lease_and_two_objects(
    s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    source, options = write_jpegs(tmp_path / "in", 13), s3.options(proxy.port)

    def requests(rows: int) -> int:
        """But those of the log of finished shards, which go by the clock."""
        proxy.seen.clear()
        store = f"s3://bucket/store-{next(numbers)}"
        build = {"address": "serial", "shard_samples": rows, "storage_options": options}
        assert precache.build(source, store, RECIPE, **build).shards == -(-13 // rows)
        return sum(count for (_, path), count in proxy.seen.items() if "/finished/" not in path)

    assert requests(4) - requests(16) == 3 * (4 - 1)


@pytest.mark.parametrize(
    ("protocol", "address"),
    [
        *((protocol, "serial") for protocol in SERVERS),
        ("az", "local"),
        *(pytest.param(protocol, "local", marks=pytest.mark.heavy) for protocol in ("s3", "gs")),
    ],
)
def test_from_bucket_to_bucket_to_training(
    protocol: str, address: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue(SERVERS[protocol])
    photos, store = (f"{protocol}://bucket/{kind}-{next(numbers)}" for kind in ("in", "store"))
    put_photos(open_folder(photos, server.options()))
    assert_whole_road(photos, store, server.options(), tmp_path, address)
    stored = open_folder(store, server.options())
    for secret in (SECRET, Azurite.KEY):
        assert not any(secret.encode() in stored.read(info.name) for info in stored.walk())


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_version_goes_there_and_back_and_is_the_same(
    protocol: str, stores: dict[str, BuiltStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    built, url = stores["image"], f"{protocol}://bucket/store-{next(numbers)}"
    options = request.getfixturevalue(SERVERS[protocol]).options()
    for skipped in (0, built.result.shards):
        pushed = precache.push(built.path, url, storage_options=options)
        assert (pushed.version, pushed.skipped) == (built.result.version, skipped)
    back = precache.pull(url, tmp_path / "back", storage_options=options)
    assert contents(Path(back.path)) == contents(built.version_folder)
    assert precache.verify(tmp_path / "back").ok


def test_what_a_service_says_of_the_contents_is_in_the_row_table(s3: S3Server) -> None:
    url = f"s3://bucket/{next(numbers)}"
    for name in ("cat/1.jpg", "dog/2.jpg"):
        open_folder(url, s3.options()).put(name, [name.encode()])
    table = open_source(url, s3.options()).list(lambda found: None).table
    assert table.keys == ["cat/1.jpg", "dog/2.jpg"]
    assert table.sizes.tolist() == [9, 9]
    assert table.etags == [hashlib.md5(key.encode()).hexdigest() for key in table.keys]
    assert (table.mtimes > 10**18).all()


def test_samples_that_stay_out_of_reach_leave_the_build_to_be_continued(
    remote_photos: str, s3: S3Server, proxy: FaultProxy
) -> None:
    store = f"s3://bucket/store-{next(numbers)}"
    build = {"address": "serial", "shard_samples": 4, "storage_options": s3.options(proxy.port)}
    proxy.faults["GET", "/05.jpg"] = [status(403)] * 50
    with pytest.raises(BuildError, match=r"1 of 4 shards are not done: .*05\.jpg"):
        precache.build(remote_photos, store, RECIPE, **build)
    proxy.faults.clear()
    result = precache.build(remote_photos, store, RECIPE, **build)
    assert (result.shards_skipped, result.failed) == (3, 1)


def test_a_store_that_is_not_there_is_named_without_the_secrets_of_its_url(s3: S3Server) -> None:
    for action in (precache.open, precache.versions, precache.verify):
        with pytest.raises(StoreError, match=r"there is no store at s3://bucket/none") as caught:
            action("s3://bucket/none?signature=hidden", storage_options=s3.options())
        assert "hidden" not in str(caught.value)


def test_an_unreachable_server_is_named_without_its_secrets(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    options = {**s3.options(), "endpoint_url": "http://127.0.0.1:9"}
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot read s3://bucket/nowhere/zarr\.json") as caught:
        precache.open("s3://bucket/nowhere", options)
    assert SECRET not in str(caught.value)
    assert time.monotonic() - began < 60
    assert isinstance(open_folder("s3://bucket", options), RemoteFolder)


def test_a_service_that_creates_again_what_exists_is_refused_before_a_build_writes(
    s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = f"s3://bucket/{next(numbers)}", s3.options(proxy.port)
    require_create_only(open_folder(url, options), "tmp")
    assert open_folder(url, options).names() == []
    proxy.ignored = frozenset({"If-None-Match"})
    for place in (url, f"{url}/folder"):
        with pytest.raises(StorageError, match=rf"{place}\S* lets a create-only write overwrite"):
            require_create_only(open_folder(place, options), "tmp")
    assert open_folder(url, options).names() == []
    with pytest.raises(StorageError, match=r"its service ignores If-None-Match; give a store on"):
        precache.build(write_jpegs(tmp_path / "in", 3), url, RECIPE, address="serial",
                       storage_options=options)  # fmt: skip
    assert open_folder(url, options).names() == []


def test_a_disk_is_found_to_create_only(tmp_path: Path) -> None:
    require_create_only(LocalFolder(tmp_path), "tmp")
    assert list(LocalFolder(tmp_path).walk()) == []


def test_a_pull_that_is_killed_goes_on_where_it_was(
    stores: dict[str, BuiltStore], s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    url = f"s3://bucket/store-{next(numbers)}"
    precache.pull(stores["image"].path, url, storage_options=s3.options())
    asked, killed = threading.Event(), threading.Event()

    def hang(method: str, path: str) -> None:
        if path.endswith("/image/c/1/0/0/0"):
            asked.set()
            assert killed.wait(DEADLINE)

    proxy.before = hang
    options = json.dumps(s3.options(proxy.port))
    script = (
        "import json, sys, precache\n"
        "precache.pull(*sys.argv[1:3], storage_options=json.loads(sys.argv[3]))"
    )
    line = [sys.executable, "-c", script, url, str(tmp_path / "to"), options]
    with running(line, environment()) as process:
        assert asked.wait(DEADLINE)
        process.kill()
        process.wait()
        killed.set()
    with pytest.raises(precache.PrecacheError):
        precache.open(tmp_path / "to")
    precache.pull(url, tmp_path / "to", storage_options=s3.options())
    assert precache.verify(tmp_path / "to").ok
    assert remains(tmp_path / "to") == []
