"""How far a store is, without a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import precache
from precache.errors import BuildError, StoreError
from precache.store.build_status import BuildStatus
from tests.conftest import BuiltStore
from tests.support.building import write, write_jpegs
from tests.support.command_line import Run
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=160, crop=150)


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
    found = precache.versions(tmp_path / "store")
    assert not found.versions
    [unfinished] = found.unfinished
    assert unfinished.build == BuildStatus(rows=10, shards=5, done=1)
    assert 0 <= unfinished.idle_seconds < 60


def test_a_build_may_have_no_receipt_yet(tmp_path: Path) -> None:
    begin(tmp_path / "in", tmp_path / "store")
    [receipt] = tmp_path.glob("store/*/_build/receipts/*")
    receipt.unlink()
    receipt.parent.rmdir()
    [unfinished] = precache.versions(tmp_path / "store").unfinished
    assert unfinished.build == BuildStatus(rows=10, shards=5, done=0)


def test_where_there_is_nothing(tmp_path: Path) -> None:
    for name in ("nowhere", "."):
        with pytest.raises(StoreError, match=r"there is no store at .*, and no build has started"):
            precache.versions(tmp_path / name)


def test_a_store_in_a_bucket(tmp_path: Path, s3: S3Server) -> None:
    begin(tmp_path / "in", "s3://bucket/begun.store", s3.options())
    [unfinished] = precache.versions("s3://bucket/begun.store", s3.options()).unfinished
    assert unfinished.build == BuildStatus(rows=10, shards=5, done=1)
    assert unfinished.idle_seconds < 60


def test_the_command(tmp_path: Path, run: Run) -> None:
    begin(tmp_path / "in", tmp_path / "store")
    ran = run("ls", tmp_path / "store")
    assert ran.status == 0, ran.err
    assert "1 of 5 shards, " in ran.out
    told = run("ls", tmp_path / "store", "--json").json
    assert told["unfinished"][0]["build"]["done"] == 1
    nothing = run("ls", tmp_path / "in")
    assert nothing.status == 2
    assert "there is no store at" in nothing.err


def test_asking_for_a_store_loads_no_ray(
    image_store: BuiltStore, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = (
        "import sys\nfrom precache.cli.main import main\nmain(['ls', sys.argv[1]])\n"
        "print('ray' in sys.modules)"
    )
    assert run_python(code, image_store.path).stdout.endswith("False\n")
