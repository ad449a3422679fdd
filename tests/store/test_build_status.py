"""How far a store is, without a cluster."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import precache
from precache.errors import BuildError
from precache.store.build_status import BuildStatus
from tests.conftest import BuiltStore
from tests.support.building import build_here, write, write_jpegs
from tests.support.command_line import Run

RECIPE = precache.Recipe.image(resize=160, crop=150)


def begin(source: Path, store: Path | str, options: dict[str, str] | None = None) -> None:
    """A build that ends when its first shard of five is done."""
    write_jpegs(source, 9)
    write(source / "cat/0000a.jpg", b"no photo")
    given = {"shard_samples": 2, "keep_order": True, "on_error": "raise"}
    with pytest.raises(BuildError):
        build_here(source, store, RECIPE, {**given, "storage_options": options})


def test_a_build_that_was_left_is_listed_with_its_shards(tmp_path: Path, run: Run) -> None:
    store = tmp_path / "store"
    begin(tmp_path / "in", store)
    found = precache.versions(store)
    assert not found.versions
    [unfinished] = found.unfinished
    assert unfinished.build == BuildStatus(rows=10, shards=5, done=1)
    assert 0 <= unfinished.idle_seconds < 60
    assert "1 of 5 shards, " in run("ls", store).out
    assert run("ls", store, "--json").json["unfinished"][0]["build"]["done"] == 1
    [receipt] = store.glob("*/_build/receipts/*")
    receipt.unlink()
    receipt.parent.rmdir()
    [unfinished] = precache.versions(store).unfinished
    assert unfinished.build == BuildStatus(rows=10, shards=5, done=0)
    for nothing in (tmp_path / "nowhere", tmp_path / "in"):
        ran = run("ls", nothing)
        assert ran.status == 2
        assert re.search("there is no store at .*, and no build has started", ran.err)


def test_asking_for_a_store_loads_no_ray(
    image_store: BuiltStore, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = (
        "import sys\nfrom precache.cli.main import main\nmain(['ls', sys.argv[1]])\n"
        "print('ray' in sys.modules)"
    )
    assert run_python(code, image_store.path).stdout.endswith("False\n")
