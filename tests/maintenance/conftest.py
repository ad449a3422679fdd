"""A store of three versions, and a build that was left."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import BuildError
from precache.storage.base import Folder
from precache.storage.open import open_folder
from tests.support.building import write, write_jpegs

SIDES = (152, 156, 160)
"""Rows of 150 x 150 x 3 bytes are chunks of their own: shards of four are of one size."""

Store = tuple[Path, list[str]]
"""A store, and its versions, the last one current."""


def recipe_of(side: int) -> precache.Recipe:
    return precache.Recipe.image(resize=side, crop=150, codec="raw")


def build_all(source: Path, store: Path | str, options: dict[str, Any] | None = None) -> list[str]:
    """Three versions, the last one current."""
    given = {"address": "serial", "shard_samples": 4, "storage_options": options}
    return [precache.build(source, store, recipe_of(side), **given).version for side in SIDES]


def leave_a_build(source: Path, store: Path | str, options: Any = None) -> Folder:
    """A build that ends over the broken photo, of its second shard; returns its folder."""
    given = {"address": "serial", "shard_samples": 4, "keep_order": True, "on_error": "raise"}
    with pytest.raises(BuildError):
        precache.build(source, store, recipe_of(170), **given, storage_options=options)
    [left] = precache.versions(store, options).unfinished
    return open_folder(store, options).folder(left.version)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten photographs, and a broken one."""
    folder = write_jpegs(tmp_path_factory.mktemp("photos"), 10)
    write(folder / "cat/broken.jpg", b"none")
    return folder


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store not to be changed."""
    store = tmp_path_factory.mktemp("built") / "store"
    return store, build_all(source, store)


@pytest.fixture
def three(built: Store, tmp_path: Path) -> Store:
    """A copy of its own for a test."""
    return shutil.copytree(built[0], tmp_path / "store"), built[1]
