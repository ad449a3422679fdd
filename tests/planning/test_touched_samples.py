"""Samples whose time changed and whose content did not."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

import precache
from precache.errors import UsageError
from precache.store.row_table import RowTable
from precache_workers.planning.content_reader import ContentReader
from precache_workers.runtime.time_limit import FETCHING, samples_at_work
from precache_workers.sources.base import Fetched
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.kinds import open_source
from tests.support.building import build_here, cut, encoded, pixels, write, write_jpegs

RECIPE = precache.Recipe.image(resize=40, crop=32)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "photos", 12)


@pytest.fixture
def store(photos: Path, tmp_path: Path) -> Path:
    build_here(photos, tmp_path / "store", RECIPE)
    return tmp_path / "store"


def touch(path: Path) -> None:
    os.utime(path, (1e9, 1e9))


def test_a_touched_photo_is_no_other_version(photos: Path, store: Path) -> None:
    before = precache.open(store).id
    for path in sorted(photos.rglob("*.jpg"))[:5]:
        touch(path)
    assert precache.ensure(photos, store, RECIPE, address="serial").id == before
    assert build_here(photos, store, RECIPE).version == before


def test_rows_of_touched_photos_stay_beside_new_and_changed_ones(photos: Path, store: Path) -> None:
    touched, changed = sorted(photos.rglob("*.jpg"))[:2]
    touch(touched)
    data = changed.read_bytes()
    write(changed, data[:-2] + bytes([data[-2] ^ 1, data[-1]]))
    touch(changed)
    write(photos / "cat/new.jpg", encoded(cut(77)))
    again = build_here(photos, store, RECIPE)
    assert (again.samples, again.rows_reused) == (13, 11)
    assert again.version == build_here(photos, store, RECIPE).version


def test_a_changed_photo_of_the_same_size_is_another_version(photos: Path, store: Path) -> None:
    before, old = precache.open(store).id, pixels(store)
    one, other = sorted((photos / "cat").glob("*.jpg"))[:2]
    longest = max(one.stat().st_size, other.stat().st_size)
    for path in (one, other):  # bytes behind the end of a JPEG do not count
        write(path, path.read_bytes().ljust(longest, b"\0"))
    second = build_here(photos, store, RECIPE)
    first_bytes = one.read_bytes()
    write(one, other.read_bytes())
    write(other, first_bytes)
    touch(one)
    touch(other)
    third = build_here(photos, store, RECIPE)
    assert len({before, second.version, third.version}) == 3
    new = pixels(store)
    key, swapped = (path.relative_to(photos).as_posix() for path in (one, other))
    assert (new[key] == old[swapped]).all()


def test_a_checkpoint_of_another_version_is_refused_with_the_way_to_open_that(
    photos: Path, store: Path
) -> None:
    before = precache.open(store).id
    with precache.Loader(store, batch_size=4, device="cpu") as loader:
        state = loader.state_dict()
    write(photos / "cat/new.jpg", encoded(cut(77)))
    build_here(photos, store, RECIPE)
    says = rf"'STORE@{before}', or start a new epoch"
    with (
        precache.Loader(store, batch_size=4, device="cpu") as loader,
        pytest.raises(UsageError, match=says),
    ):
        loader.load_state_dict(state)
    with precache.Loader(f"{store}@{before}", batch_size=4, device="cpu") as loader:
        loader.load_state_dict(state)


def test_a_touched_photo_that_hangs_is_left_to_the_build(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(source: FolderSource, keys: Sequence[str], *others: object) -> list[Fetched]:
        samples_at_work().begin(FETCHING, *keys, foreign=False)
        released.wait()
        return []

    monkeypatch.setattr(FolderSource, "fetch", hang)
    read = ContentReader(open_source(str(photos)), 0.5, print)
    assert read(RowTable.of_keys(["a", "b"]), [0, 1]) == ["", ""]
    released.set()
