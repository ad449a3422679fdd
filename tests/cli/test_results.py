"""`print` of a result shows what its command prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import precache
from precache.cli.main import main
from tests.conftest import BuiltStore


@pytest.fixture(scope="module")
def two_versions(tiles: Path, make_store: Callable[..., BuiltStore]) -> BuiltStore:
    """A store of two versions, the later of another codec."""
    store = make_store(tiles, precache.Recipe.image(codec="raw"), shard_samples=32)
    recipe = precache.Recipe.image(codec="zstd")
    precache.build(tiles, store.path, recipe, address="serial", shard_samples=32)
    return BuiltStore(store.path, tiles, recipe, store.result)


def test_a_result_is_printed_as_by_its_command(
    two_versions: BuiltStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path, source = str(two_versions.path), str(two_versions.source)
    before = f"{path}@{two_versions.result.version}"
    current = f"{path}@{precache.open(path).id}"
    plan = precache.plan(source, path, two_versions.recipe, timing=False, address="serial")
    results: dict[str, tuple[list[str], object]] = {
        "info": ([path], precache.info(path)),
        "verify": ([path], precache.verify(path)),
        "ls": ([path], precache.versions(path)),
        "diff": ([before, path], precache.diff(before, path)),
        "gc": ([path, "--dry-run"], precache.gc(path, dry_run=True)),
        "plan": ([source, path, "--codec", "zstd", "--no-timing", "--address", "serial"], plan),
        "use": ([current], precache.use(current)),
    }
    for name, (arguments, result) in results.items():
        capsys.readouterr()
        assert main([name, *arguments]) == 0
        ages = re.compile(r"[\d.]+ \w+ ago")
        assert ages.sub("", capsys.readouterr().out) == ages.sub("", f"{result}\n")
        assert type(result).__name__ not in str(result)


def test_the_result_of_a_build_is_for_people(two_versions: BuiltStore) -> None:
    built = str(two_versions.result).splitlines()
    assert built[0] == f"version          {two_versions.result.version}"


def test_foreign_text_in_a_result_is_escaped(two_versions: BuiltStore) -> None:
    result = precache.versions(two_versions.path)
    assert "\x1b" not in str(type(result)("\x1b[2J", (), (), 0))
