"""Stores in which files are no files, or lie elsewhere: whoever uses one ends at once, in words."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import precache
from precache.errors import PrecacheError, StorageError
from precache.storage import base as folder
from tests.support.building import write_jpegs

RECIPE = precache.Recipe.image(resize=16, crop=16)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source ``in`` and a store ``out`` of it."""
    root = tmp_path_factory.mktemp("hostile")
    write_jpegs(root / "in", 8)
    precache.build(root / "in", root / "out", RECIPE, address="serial", shard_samples=4)
    return root


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    """The current version of a copy of the store, whose files may be replaced."""
    store = tmp_path / "store"
    shutil.copytree(built / "out", store)
    return store / precache.open(store).id


@pytest.mark.parametrize(
    "name",
    ["zarr.json", "image/zarr.json", "valid/c/0", "key/c/0", "rows/c/0", "shards/image/c/0/0"],
)
def test_a_small_object_of_a_terabyte_is_not_read(
    name: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are lowered, so that little is read where they do not hold."""
    monkeypatch.setattr(folder, "MOST_DOCUMENT", 1 << 20)
    monkeypatch.setattr(folder, "MOST_SMALL", 1 << 20)
    os.truncate(copied / name, (1 << 20) + 1)
    what = rf"{name}.*it has 1,048,577 bytes, more than the 1,048,576 .*; remove it"
    try:
        found = " ".join(f"{d.shard}: {d.reason}" for d in precache.verify(copied.parent).damage)
    except PrecacheError as error:
        found = str(error)
    assert re.search(what, found)
    if name in ("zarr.json", "valid/c/0", "shards/image/c/0/0"):
        with pytest.raises(StorageError, match=r"more than the [0-9,]+ bytes that such an object"):
            precache.open(copied.parent).valid, precache.Loader(copied.parent, batch_size=2)
    [entry] = (copied.parent / "commits").iterdir()
    os.truncate(entry, 900 << 30)
    with pytest.raises(StorageError, match=r"000001.json: it has 966,367,641,600 bytes, more than"):
        precache.open(copied.parent)


def put_folder(path: Path) -> None:
    (path / "in").mkdir(parents=True)


@pytest.mark.parametrize(
    ("name", "put", "words"),
    [
        ("image/c/0/0/0/0", put_folder, "folder is where a file .* remove"),
        ("zarr.json", put_folder, "folder is where a file .* remove"),
        ("zarr.json", os.mkfifo, "it is a FIFO.*; remove"),
    ],
)
def test_what_is_in_the_place_of_a_file_is_to_be_removed(
    name: str, put: Callable[[Path], None], words: str, built: Path, copied: Path
) -> None:
    (copied / name).unlink()
    put(copied / name)
    with pytest.raises(PrecacheError, match=f"{name}: .*{words} it"):
        precache.build(built / "in", copied.parent, RECIPE, address="serial", shard_samples=4)
