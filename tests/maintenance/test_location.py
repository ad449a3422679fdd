"""Where a store may be written: a new or empty folder, or one that holds a store already."""

from __future__ import annotations

from pathlib import Path

import pytest

import precache
from precache.errors import BuildError, UsageError
from precache.maintenance.location import open_for_writing, require_apart
from tests.conftest import BuiltStore
from tests.support.building import write, write_jpegs
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=24, crop=24)


def refused(source: Path | str, store: Path | str, why: str) -> None:
    """Every command refuses, and nothing is written."""
    for command in (precache.build, precache.plan, precache.ensure):
        with pytest.raises(UsageError, match=why):
            command(source, store, RECIPE, address="serial")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 4)


def test_a_folder_with_other_files_is_refused(source: Path, tmp_path: Path) -> None:
    write(tmp_path / "home/notes.txt", b"x")
    refused(source, tmp_path / "home", r"home is not a store, and holds other files \(notes.txt\)")
    assert names(tmp_path / "home") == ["notes.txt"]


def test_the_source_itself_is_refused(source: Path) -> None:
    before = names(source)
    refused(source, source, r"in is not a store, and holds other files \(cat, dog, eel\)")
    assert names(source) == before


def test_a_store_inside_of_its_source_is_refused(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(source)
    refused(source, source / "store", "lies inside of the source")
    refused(source, link / "new/store", "lies inside of the source")
    with pytest.raises(UsageError, match="lies inside of the source"):
        precache.submit(source, source / "store", RECIPE, address="http://127.0.0.1:1")
    assert len(list(source.rglob("*.*"))) == len(list(source.rglob("*"))) - 3 == 4


def test_a_store_is_apart_from_all_files_that_a_pattern_stands_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source)
    for pattern in (f"{source}/**/*.parquet", "**/*.parquet"):
        with pytest.raises(UsageError, match="lies inside of the source"):
            precache.build(pattern, source / "store", RECIPE, address="serial")
    require_apart(source / "store", f"{source}/*.parquet")


def test_a_source_inside_of_the_store_is_refused(source: Path, tmp_path: Path) -> None:
    refused(source, tmp_path, "lies inside of the store")
    refused("s3://bucket/sets/photos", "s3://bucket/sets", "lies inside of the store")


def test_a_web_server_is_no_place_for_a_store(source: Path, image_tiles: BuiltStore) -> None:
    why = "https://example.org/store is on a web server, which is read only; write .* s3://"
    refused(source, "https://example.org/store", why)
    with pytest.raises(UsageError, match=why):
        precache.push(image_tiles.path, "https://example.org/store")
    with pytest.raises(UsageError, match=why):
        precache.submit(source, "https://example.org/store", address="http://127.0.0.1:1")


def test_names_that_only_begin_alike_are_apart(source: Path, tmp_path: Path) -> None:
    precache.build(source, tmp_path / "in.store", RECIPE, address="serial")
    assert precache.verify(tmp_path / "in.store").ok


def test_an_empty_folder_becomes_a_store(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk/lost+found").mkdir(parents=True)
    (tmp_path / "disk/.hidden").touch()
    precache.build(source, tmp_path / "disk", RECIPE, address="serial")
    assert precache.verify(tmp_path / "disk").ok


def test_a_store_keeps_other_files_beside_its_versions(source: Path, tmp_path: Path) -> None:
    precache.build(source, tmp_path / "store", RECIPE, address="serial")
    write(tmp_path / "store/notes.txt", b"x")
    precache.build(source, tmp_path / "store", precache.Recipe.image(resize=30), address="serial")
    assert len(precache.versions(tmp_path / "store").versions) == 2


def test_a_first_build_that_failed_is_finished(source: Path, tmp_path: Path) -> None:
    write(source / "cat/broken.jpg", b"x")
    store = tmp_path / "store"
    with pytest.raises(BuildError, match="1 of 5 samples failed"):
        precache.build(source, store, RECIPE, address="serial", max_failures=0)
    assert not (store / "commits").exists()
    assert precache.build(source, store, RECIPE, address="serial").failed == 1


def test_a_copy_goes_into_a_store_or_nowhere(image_tiles: BuiltStore, tmp_path: Path) -> None:
    write(tmp_path / "home/notes.txt", b"x")
    with pytest.raises(UsageError, match="home is not a store, and holds other files"):
        precache.pull(image_tiles.path, tmp_path / "home")
    with pytest.raises(UsageError, match="lies inside of the source"):
        precache.pull(image_tiles.path, Path(image_tiles.path, "copy"))
    precache.pull(image_tiles.path, tmp_path / "new")
    precache.pull(image_tiles.path, tmp_path / "new")
    assert precache.verify(tmp_path / "new").ok


def test_a_bucket_is_told_by_its_first_page(source: Path, s3: S3Server) -> None:
    s3.make_bucket("places")
    options = s3.options()
    folder = open_for_writing("s3://places/new", source, options)
    for path in source.rglob("*.jpg"):
        folder.put(path.relative_to(source).as_posix(), [path.read_bytes()])
    with pytest.raises(UsageError, match=r"holds other files \(cat, dog, eel\)"):
        open_for_writing("s3://places/new", "", options)
    begun = open_for_writing("s3://places/begun", "", options)
    begun.put(f"{'0' * 32}.1/_build/build.json", [b"{}"])
    open_for_writing("s3://places/begun", "", options)
