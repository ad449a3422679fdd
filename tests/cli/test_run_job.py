"""`precache job`: a submitted document is built as the call that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import precache
from precache.cli.main import main
from precache_workers.jobs.job_package import pack
from precache_workers.planning.options import BuildOptions
from tests.support.building import build_here, contents, write_jpegs

RECIPE = precache.Recipe.image(random_resized_crop=20, variants=2, codec="raw")


def test_a_document_builds_as_the_function_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store, other = write_jpegs(tmp_path / "in", 3), tmp_path / "job", tmp_path / "here"
    options = BuildOptions(address="serial", shard_samples=4, keep_order=True)
    assert main(["job", pack(str(source), str(store), RECIPE, options).document]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 3
    build_here(source, other, RECIPE, {"shard_samples": 4, "keep_order": True})
    assert contents(store) == contents(other)


def test_an_option_of_another_release_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(pack("/in", "/out", RECIPE, BuildOptions(address="auto")).document)
    document["options"]["colour"] = "red"
    assert main(["job", json.dumps(document)]) == 2
    assert "there is no option 'colour'" in capsys.readouterr().err
