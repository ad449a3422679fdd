"""How far a store is, without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import precache
from precache.errors import BuildError, StoreError
from tests.conftest import BuiltStore
from tests.support.building import cli, write, write_jpegs
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=160, crop=150)


def test_a_committed_store(image_store: BuiltStore) -> None:
    found = precache.status(image_store.path)
    assert (found.store, found.version) == (str(image_store.path), image_store.result.version)
    assert found.committed is not None
    assert 0 <= time.time() - found.committed < 3600
    assert found.building == ()


def begin(source: Path, store: Path | str, options: dict[str, str] | None = None) -> None:
    """A build that ends when its first shard of five is done."""
    write_jpegs(source, 9)
    write(source / "cat/0000a.jpg", b"no photo")
    with pytest.raises(BuildError):
        precache.build(
            source,
            store,
            RECIPE,
            address="serial",
            shard_samples=2,
            keep_order=True,
            on_error="raise",
            storage_options=options,
        )


def test_a_build_that_was_left(tmp_path: Path) -> None:
    begin(tmp_path / "in", tmp_path / "store")
    found = precache.status(tmp_path / "store")
    assert (found.version, found.committed) == (None, None)
    [build] = found.building
    assert (build.rows, build.shards, build.done) == (10, 5, 1)
    assert 0 <= build.idle_seconds < 60

    [receipt] = tmp_path.glob("store/*/_build/receipts/*")
    [description] = tmp_path.glob("store/*/_build/build.json")
    long_ago = time.time() - 7200
    os.utime(receipt, (long_ago, long_ago))
    [lease] = tmp_path.glob("store/*/_build/leases/*")
    for path, key in (description, "begun"), (lease, "time"):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: long_ago}))
    [build] = precache.status(tmp_path / "store").building
    assert 7200 <= build.idle_seconds < 7260


def test_a_build_that_has_no_receipt_yet_is_as_old_as_its_beginning(tmp_path: Path) -> None:
    begin(tmp_path / "in", tmp_path / "store")
    [receipt] = tmp_path.glob("store/*/_build/receipts/*")
    receipt.unlink()
    receipt.parent.rmdir()
    [build] = precache.status(tmp_path / "store").building
    assert (build.done, build.shards) == (0, 5)
    assert build.idle_seconds < 60


def test_where_there_is_nothing(tmp_path: Path) -> None:
    for name in ("nowhere", "."):
        with pytest.raises(StoreError, match=r"there is no store at .*, and no build has begun"):
            precache.status(tmp_path / name)


def test_a_store_in_a_bucket(tmp_path: Path, s3: S3Server) -> None:
    begin(tmp_path / "in", "s3://bucket/begun.store", s3.options())
    [build] = precache.status("s3://bucket/begun.store", storage_options=s3.options()).building
    assert (build.shards, build.done) == (5, 1)
    assert build.idle_seconds < 60


def test_the_command(tmp_path: Path) -> None:
    begin(tmp_path / "in", tmp_path / "store")
    ran = cli("status", tmp_path / "store")
    assert ran.returncode == 0, ran.stderr
    assert "current version    none yet" in ran.stdout
    assert "1 of 5 shards, 10 rows in all; idle for " in ran.stdout
    told = json.loads(cli("status", tmp_path / "store", "--json").stdout)
    assert told["building"][0]["done"] == 1
    nothing = cli("status", tmp_path / "in")
    assert nothing.returncode == 2
    assert "there is no store at" in nothing.stderr


def test_asking_for_a_store_loads_no_ray(
    image_store: BuiltStore, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = (
        "import sys\nfrom precache.cli.main import main\nmain(['status', sys.argv[1]])\n"
        "print('ray' in sys.modules)"
    )
    assert run_python(code, image_store.path).stdout.endswith("False\n")
