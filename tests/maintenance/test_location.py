"""Where a store may be written: a new or empty folder, or one that holds a store already."""

from pathlib import Path

import pytest

import precache
from precache.errors import UsageError
from precache.maintenance.location import require_apart
from tests.conftest import BuiltStore
from tests.support.building import contents, write, write_jpegs

RECIPE = precache.Recipe.image(resize=24, crop=24)


OTHERS = r"is not a store, and holds other files \({}\)"
WEB = "https://example.org/store"
REFUSED = [
    ("{}/in", "{}/home", OTHERS.format("notes.txt")),
    ("{}/in", "{}/in", OTHERS.format("cat, dog, eel")),
    ("{}/in", "{}/in/store", "lies inside of the source"),
    ("{}/in", "{}/link/new/store", "lies inside of the source"),
    ("{}/in", "{}", "lies inside of the store"),
    ("s3://bucket/sets/photos", "s3://bucket/sets", "lies inside of the store"),
    ("{}/in", WEB, f"{WEB} is on a web server, which is read only; write .* s3://"),
]


@pytest.mark.parametrize(("source", "store", "why"), REFUSED)
def test_every_command_refuses_a_place_where_no_store_may_be(
    source: str, store: str, why: str, image_tiles: BuiltStore, tmp_path: Path
) -> None:
    write(write_jpegs(tmp_path / "in", 4).with_name("home") / "notes.txt", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    before = contents(tmp_path)
    source, store = source.format(tmp_path), store.format(tmp_path)
    for command in (precache.build, precache.plan, precache.ensure):
        with pytest.raises(UsageError, match=why):
            command(source, store, RECIPE, address="serial")
    if "inside of the source" in why or store == WEB:
        with pytest.raises(UsageError, match=why):
            precache.submit(source, store, RECIPE, address="http://127.0.0.1:1")
    if "other files" in why or store == WEB:
        with pytest.raises(UsageError, match=why):
            precache.pull(image_tiles.path, store)
    assert contents(tmp_path) == before


def test_a_store_keeps_other_files_that_come_later_and_what_an_empty_disk_has(
    source: Path, tmp_path: Path
) -> None:
    """Its name only begins as that of the source does."""
    store = tmp_path / "in.store"
    (store / "lost+found").mkdir(parents=True)
    (store / ".hidden").touch()
    precache.build(source, store, RECIPE, address="serial")
    write(store / "notes.txt", b"x")
    precache.build(source, store, precache.Recipe.image(resize=30), address="serial")
    assert len(precache.versions(store).versions) == 2
    assert precache.verify(store).ok


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 4)


def test_a_store_is_apart_from_all_files_that_a_pattern_stands_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source)
    for pattern in (f"{source}/**/*.parquet", "**/*.parquet"):
        with pytest.raises(UsageError, match="lies inside of the source"):
            precache.build(pattern, source / "store", RECIPE, address="serial")
    require_apart(source / "store", f"{source}/*.parquet")
