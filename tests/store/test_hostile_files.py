"""Stores in which files are no files, or lie elsewhere: whoever uses one ends at once, in words."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import precache
from precache.errors import PrecacheError, StorageError
from precache.storage import base as folder
from tests.support.building import write_jpegs

RECIPE = precache.Recipe.image(resize=16, crop=16)

USE = """
import os, shutil, sys
from pathlib import Path
import precache
from precache.errors import PrecacheError

root = Path(sys.argv[1])
pristine, store = root / "out", root / "copy"

def load():
    with precache.Loader(store, 4) as loader:
        return sum(len(batch["row"]) for batch in loader)

def build():
    recipe = precache.Recipe.image(resize=16, crop=16)
    return precache.build(root / "in", store, recipe, address="serial").version

uses = {
    "load": load,
    "verify": lambda: precache.verify(store).damage,
    "versions": lambda: precache.versions(store),
    "gc": lambda: precache.gc(store, dry_run=True),
    "build": build,
}
for number, path in enumerate(sorted(path for path in pristine.rglob("*") if path.is_file())):
    shutil.copytree(pristine, store)
    odd = store / path.relative_to(pristine)
    odd.unlink()
    if number % 3 == 0:
        os.mkfifo(odd)
    else:
        odd.symlink_to("/dev/zero" if number % 3 == 1 else path)
    for what, use in uses.items():
        try:
            found = use()
        except PrecacheError as error:
            found = "refused"
        print(path.relative_to(pristine), what, found)
    shutil.rmtree(store)
"""


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


@pytest.mark.heavy
def test_a_store_whose_files_are_none_hangs_nobody(
    built: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """One of its files at a time is a FIFO, a device, or a link to a file outside."""
    said = [line.split(maxsplit=2) for line in run_python(USE, built).stdout.splitlines()]
    loads = {name: found for name, what, found in said if what == "load"}
    needed = [name for name in loads if re.search("^commits|/(image|valid|label)/", name)]
    other = ("/valid/zarr.json", "/shards/image/zarr.json")  # for software that needs them
    needed = [name for name in needed if not name.endswith(other)]
    assert len(needed) > 8
    assert [n for n in needed if loads[n] != "refused" and "_sums" not in n] == []
    assert set(loads.values()) == {"refused", "8"}
