"""Commands other than build read containers as they read a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import precache
from precache.errors import SourceError, UsageError
from tests.support.building import cli, environment, pixels, write_jpegs
from tests.support.containers import WRITERS

KINDS = ["tar", "parquet"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_jpegs(tmp_path / "in", 12)
    return tmp_path / "in"


@pytest.mark.parametrize("kind", KINDS)
def test_refresh_finds_the_source_in_the_log(kind: str, photos: Path, tmp_path: Path) -> None:
    recipe = precache.Recipe.image(random_resized_crop=32, variants=2)
    source = WRITERS[kind](photos, tmp_path)
    built = precache.build(source, tmp_path / "store", recipe, address="serial")
    fresh = precache.refresh(tmp_path / "store", address="serial")
    assert fresh.version != built.version
    assert not fresh.failed


def test_a_refresh_takes_the_columns_of_the_build(photos: Path, tmp_path: Path) -> None:
    rows = [
        json.dumps({"path": str(path), "id": path.stem, "label": path.parent.name})
        for path in sorted(photos.rglob("*.jpg"))
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(rows), "utf-8")
    recipe = precache.Recipe.image(random_resized_crop=32, variants=2)
    options = {"address": "serial", "key_column": "id"}
    precache.build(tmp_path / "list.jsonl", tmp_path / "store", recipe, **options)
    with pytest.raises(UsageError, match=r"none of the samples .* --sample-name, give them again"):
        precache.refresh(tmp_path / "store", address="serial")
    fresh = precache.refresh(tmp_path / "store", **options)
    assert not fresh.failed


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_what_a_build_does_and_writes_nothing(
    kind: str, photos: Path, tmp_path: Path
) -> None:
    source, store = WRITERS[kind](photos, tmp_path), tmp_path / "store"
    recipe = precache.Recipe.image(resize=40, crop=32)
    plan = precache.plan(source, store, recipe, address="serial")
    assert plan.samples == plan.rows_computed == 12
    assert not store.exists()
    precache.build(source, store, recipe, address="serial")
    assert precache.plan(source, store, recipe, address="serial").state == "nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_measures_containers(kind: str, photos: Path, tmp_path: Path) -> None:
    recipe = precache.Recipe.image(resize=40, crop=32)
    source = WRITERS[kind](photos, tmp_path)
    report = precache.doctor(source, recipe, samples=4, seconds=5, address="serial")
    assert report.samples == 12
    assert report.storage
    assert not report.failures


@pytest.mark.parametrize(
    "command", ["build", "plan", pytest.param("doctor", marks=pytest.mark.heavy)]
)
def test_without_pyarrow_its_extra_is_named(command: str, photos: Path, tmp_path: Path) -> None:
    """As where only the training part is installed."""
    source, store = WRITERS["tar"](photos, tmp_path), tmp_path / "store"
    recipe = precache.Recipe.image(resize=40, crop=32)
    precache.build(source, store, recipe, address="serial")
    code = "import sys; sys.modules['pyarrow'] = None; from precache.cli.main import main; main()"
    places = [source] if command == "doctor" else [source, store]
    line = [sys.executable, "-c", code, command, *places]
    ran = subprocess.run(line, check=False, env=environment(), capture_output=True, text=True)
    assert "needs pyarrow: pip install 'precache[workers]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_ensure_builds_once(photos: Path, tmp_path: Path) -> None:
    recipe = precache.Recipe.image(resize=40, crop=32)
    source = WRITERS["tar"](photos, tmp_path)
    options = {"address": "serial", "progress": False}
    first = precache.ensure(source, tmp_path / "store", recipe, **options)
    again = precache.ensure(source, tmp_path / "store", recipe, **options)
    assert first is not None
    assert again is not None
    assert first.id == again.id


@pytest.mark.heavy
def test_flags_name_columns(photos: Path, tmp_path: Path) -> None:
    rows = [
        json.dumps({"where": str(path), "what": path.parent.name, "image": "no path"})
        for path in sorted(photos.rglob("*.jpg"))
    ]
    (tmp_path / "list.ndjson").write_text("\n".join(rows), "utf-8")
    flags = ("--image-column", "where", "--label-column", "what", "--resize", "40", "--crop", "32")
    store = tmp_path / "store"
    done = cli("build", tmp_path / "list.ndjson", store, *flags, "--address", "serial")
    assert done.returncode == 0, done.stderr
    assert "URIs from the column 'where', labels from 'what'; not used: 'image'" in done.stderr
    assert precache.open(store).classes == ("cat", "dog", "eel")


@pytest.mark.parametrize("kind", ["tar", "zip", "lmdb", "folder"])
def test_columns_of_a_source_without_any_are_refused(
    kind: str, photos: Path, tmp_path: Path
) -> None:
    source = photos if kind == "folder" else WRITERS[kind](photos, tmp_path)
    with pytest.raises(UsageError, match="is of a kind without columns"):
        precache.build(source, tmp_path / "store", label_column="label", address="serial")


def test_a_version_of_containers_is_copied_and_cleaned_up_as_any(
    photos: Path, tmp_path: Path
) -> None:
    recipe = precache.Recipe.image(resize=40, crop=32)
    source, store = WRITERS["tar"](photos, tmp_path), tmp_path / "store"
    precache.build(source, store, recipe, address="serial")
    assert (store / "_listings").is_dir()
    assert not precache.verify(store).damage
    assert precache.gc(store, keep=1, older_than=0).listings == ()
    precache.pull(store, tmp_path / "copy")
    assert not (tmp_path / "copy/_listings").exists()
    assert pixels(tmp_path / "copy").keys() == pixels(store).keys()


def test_a_build_of_containers_that_is_refused_leaves_nothing(photos: Path, tmp_path: Path) -> None:
    source = WRITERS["tar"](photos, tmp_path)
    recipe = precache.Recipe.from_dict({"fields": {"image": {"kind": "text", "input": "jpg"}}})
    with pytest.raises(SourceError, match="none of the"):
        precache.build(source, tmp_path / "store", recipe, address="serial")
    assert not (tmp_path / "store").exists()


def test_gc_removes_indexes_of_sources_that_no_version_has(photos: Path, tmp_path: Path) -> None:
    recipe, store = precache.Recipe.image(resize=40, crop=32), tmp_path / "store"
    for name in ("before", "now"):
        (tmp_path / name).mkdir()
        source = WRITERS["tar"](photos, tmp_path / name)
        precache.build(source, store, recipe, address="serial", compact=True)
        if name == "before":
            former = {path.name for path in (store / "_listings").iterdir()}
            recipe = precache.Recipe.image(resize=44, crop=32)
    (store / "_listings/of-no-source.parquet").write_bytes(b"")
    kept = (
        {path.name for path in (store / "_listings").iterdir()} - former - {"of-no-source.parquet"}
    )
    assert (len(former), len(kept)) == (2, 2)  # an index, and a record of contents

    assert precache.gc(store, keep=2, older_than=0).listings == ("_listings/of-no-source.parquet",)
    assert precache.gc(store, keep=1).listings == ()
    planned = precache.gc(store, keep=1, older_than=0, dry_run=True)
    assert {path.name for path in (store / "_listings").iterdir()} == former | kept
    done = precache.gc(store, keep=1, older_than=0)
    assert done.listings == planned.listings
    assert sorted(done.listings) == sorted(f"_listings/{name}" for name in former)
    assert f"removed {done.listings[0]}, an index of a former source" in str(done)
    assert {path.name for path in (store / "_listings").iterdir()} == kept


@pytest.mark.heavy
def test_an_archive_of_one_folder_with_folders_is_named(photos: Path, tmp_path: Path) -> None:
    """As ``tar cf photos.tar photos`` and ``zip -r photos.zip photos`` write it."""
    note = ": in/: each folder is a class: "
    for root, inside in ((photos.parent, photos.name), (photos, ".")):
        archive = shutil.make_archive(str(tmp_path / "photos"), "zip", root, inside)
        plan = cli("plan", archive, tmp_path / "store", "--crop", 32, "--no-timing")
        assert not plan.returncode, plan.stderr
        assert (note in plan.stderr + plan.stdout) is (inside == photos.name)
