"""Builds, versions and training over every service."""

from pathlib import Path

import pytest

import precache
from precache.errors import StorageError, StoreError
from precache.storage import retries
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache.store.commit_log import require_create_only
from tests.storage.conftest import RECIPE, SERVERS, numbers
from tests.support.building import assert_whole_road, put_photos, write_jpegs
from tests.support.servers import Azurite, FaultProxy, S3Server

SECRET = "a-secret-that-nobody-may-see"


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
        ("gs", "serial"),
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


def test_a_store_or_server_that_is_not_there_is_named_without_secrets(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for action in (precache.open, precache.versions, precache.verify):
        with pytest.raises(StoreError, match=r"there is no store at s3://bucket/none") as gone:
            action("s3://bucket/none?signature=hidden", storage_options=s3.options())
        assert "hidden" not in str(gone.value)
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    options = {**s3.options(), "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(StorageError, match=r"cannot read s3://bucket/nowhere/zarr\.json") as caught:
        precache.open("s3://bucket/nowhere", options)
    assert SECRET not in str(caught.value)
    assert isinstance(open_folder("s3://bucket", options), RemoteFolder)


def test_a_service_that_creates_again_what_exists_is_refused_before_a_build_writes(
    s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = f"s3://bucket/{next(numbers)}", s3.options(proxy.port)
    for folder in (open_folder(url, options), LocalFolder(tmp_path)):
        require_create_only(folder, "tmp")
        assert folder.names() == []
    proxy.ignored = frozenset({"If-None-Match"})
    for place in (url, f"{url}/folder"):
        with pytest.raises(StorageError, match=rf"{place}\S* lets a create-only write overwrite"):
            require_create_only(open_folder(place, options), "tmp")
    assert open_folder(url, options).names() == []
    with pytest.raises(StorageError, match=r"its service ignores If-None-Match; give a store on"):
        precache.build(write_jpegs(tmp_path / "in", 3), url, RECIPE, address="serial",
                       storage_options=options)  # fmt: skip
    assert open_folder(url, options).names() == []
