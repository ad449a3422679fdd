"""Commands other than build read containers as they read a folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import SourceError, UsageError
from tests.support.building import cli, pixels, write_jpegs
from tests.support.containers import WRITERS

KINDS = ["tar", "parquet"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_jpegs(tmp_path / "in", 12)
    return tmp_path / "in"


@pytest.mark.parametrize("kind", KINDS)
def test_commands_read_containers_as_they_read_a_folder(
    kind: str, photos: Path, tmp_path: Path
) -> None:
    recipe = precache.Recipe.image(random_resized_crop=32, variants=2)
    source, store = WRITERS[kind](photos, tmp_path), tmp_path / "store"
    text = precache.Recipe.from_dict({"fields": {"image": {"kind": "text", "input": "jpg"}}})
    with pytest.raises(SourceError, match="none of the" if kind == "tar" else "no column 'jpg'"):
        precache.build(source, store, text, address="serial")
    plan = precache.plan(source, store, recipe, address="serial")
    assert plan.samples == plan.rows_computed == 12
    assert not store.exists()
    built = precache.build(source, store, recipe, address="serial")
    assert precache.plan(source, store, recipe, address="serial").state == "nothing"
    ensured = precache.ensure(source, store, recipe, address="serial", progress=False)
    assert ensured is not None
    assert ensured.id == built.version
    report = precache.doctor(source, recipe, samples=4, seconds=5, address="serial")
    assert (report.samples, bool(report.storage)) == (12, True)
    assert not report.failures

    assert (store / "_listings").is_dir()
    assert not precache.verify(store).damage
    assert precache.gc(store, keep=1, older_than=0).listings == ()
    precache.pull(store, tmp_path / "copy")
    assert not (tmp_path / "copy/_listings").exists()
    assert pixels(tmp_path / "copy").keys() == pixels(store).keys()
    fresh = precache.refresh(store, address="serial")  # it finds the source in the log
    assert (fresh.version != built.version, fresh.failed) == (True, 0)


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


WITHOUT = """
import json, sys
sys.modules["pyarrow"] = None
from precache.cli.main import main
for line in json.loads(sys.argv[1]):
    main(line)
"""


def test_without_pyarrow_its_extra_is_named(photos: Path, tmp_path: Path, run_python: Any) -> None:
    """As where only the training part is installed."""
    source, store = WRITERS["tar"](photos, tmp_path), str(tmp_path / "store")
    precache.build(source, store, precache.Recipe.image(resize=40), address="serial")
    lines = [["build", source, store], ["plan", source, store], ["doctor", source]]
    said = run_python(WITHOUT, json.dumps(lines)).stderr
    assert said.count("needs pyarrow: pip install 'precache[workers]'") == 3
    assert "Traceback" not in said


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
