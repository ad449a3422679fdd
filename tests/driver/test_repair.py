"""Repairs: of shards that several versions share, and of small objects and documents."""

import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.cli.main import main
from precache.errors import DamageError, GoneError, StoreError
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.store import arrays
from precache.store import open as opening
from precache.store.commit_log import ROOT
from precache.store.small_arrays import small_array
from precache_workers.ops.field_recipe import FieldRecipe
from precache_workers.shards.stored_rows import StoredObject
from tests.support import building
from tests.support.building import (
    build_here,
    contents,
    cut,
    encoded,
    flip,
    identities,
    remains,
    rewrite,
    shard_files,
    write,
    write_jpegs,
)
from tests.support.changing_sources import make_unfetchable
from tests.support.mutations import small_names
from tests.support.servers import S3Server

RECIPE = precache.Recipe.image(resize=48, crop=40, codec="raw")
build = functools.partial(building.build, recipe=RECIPE, shard_samples=8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 24, classes=("cat", "dog"))


def grown(source: Path) -> None:
    write(source / "cat/new.jpg", encoded(cut(99)))


@pytest.fixture
def versions(source: Path, tmp_path: Path) -> list[Path]:
    """Two versions that share their first shards; the second is current."""
    first = build(source, tmp_path / "store")
    grown(source)
    second = build(source, tmp_path / "store")
    assert second.shards_reused == 3
    return [Path(first.path), Path(second.path)]


SHARD = "image/c/1/0/0/0"


def test_a_repair_leaves_other_versions_as_they_are(
    versions: list[Path], source: Path, tmp_path: Path
) -> None:
    flip(versions[1] / SHARD, 0.5)
    assert not any(precache.verify(version).ok for version in versions)
    (versions[1] / SHARD).unlink()
    before = contents(versions[0])
    result = build(source, tmp_path / "store")
    assert (result.version, result.shards_skipped) == (versions[1].name, 3)
    assert precache.verify(versions[1]).ok
    assert contents(versions[0]) == before
    assert all(remains(version) == [] for version in versions)


@pytest.mark.parametrize("act", [precache.verify, precache.use])
def test_a_damaged_version_that_is_not_current_is_mended_as_advised(
    act: Callable[[str], Any], versions: list[Path], source: Path, tmp_path: Path
) -> None:
    """The source has changed since, and the damaged shard is not that of the current version."""
    store, own = tmp_path / "store", versions[1].name
    shutil.copytree(store, tmp_path / "other")
    write(source / "cat/0000.jpg", encoded(cut(55)))
    third = Path(build(source, store).path)
    changed = [s for s in sorted(third.glob("image/c/*/0/0/0")) if not
               s.samefile(versions[1] / s.relative_to(third))]  # fmt: skip
    for version in versions:
        (version / changed[0].relative_to(third)).unlink()
    try:
        said = str(act(f"{store}@{own}"))
    except StoreError as error:
        said = str(error)
    build(source, store, verify=True)
    assert not precache.verify(f"{store}@{own}").ok
    pull, undo = re.search(r"precache (pull .*?), after .*precache (use .*?) undoes", said).groups()
    assert main(pull.replace("OTHER", str(tmp_path / "other")).split()) == 0
    assert precache.verify(f"{store}@{own}").ok
    assert precache.open(store).id == own
    assert main(undo.split()) == 0
    assert precache.open(store).id == third.name
    changed[0].unlink()
    assert "same precache build command again with --verify" in str(precache.verify(store))


def test_a_shard_that_another_version_has_whole_is_not_made_again(
    versions: list[Path], source: Path, tmp_path: Path
) -> None:
    """Of its samples nothing may be left."""
    (versions[1] / SHARD).unlink()
    for path in source.rglob("*.jpg"):
        rewrite(path, b"")
    options: dict[str, Any] = {"shard_samples": 8, "address": "serial", "ignore_ctime": True}
    planned = precache.plan(source, tmp_path / "store", RECIPE, timing=False, **options)
    assert (planned.state, planned.shards_reused, planned.rows_computed) == ("repair", 1, 0)
    result = build(source, tmp_path / "store", ignore_ctime=True)
    assert (result.shards, result.shards_skipped, result.shards_reused) == (4, 3, 1)
    assert all(precache.verify(version).ok for version in versions)
    one, other = (version / SHARD for version in versions)
    assert one.samefile(other)
    assert all(remains(version) == [] for version in versions)


@pytest.mark.parametrize("encoded_alike", [True, False])
def test_a_shard_is_repaired_of_rows_that_lie_elsewhere(
    encoded_alike: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample is decoded, unless rows of that version give other bytes."""
    recipe, store = precache.Recipe.image(resize=160, crop=150, codec="raw"), tmp_path / "store"
    build_here(source, store, recipe, {"shard_samples": 8})
    options = {"shard_samples": 4}
    second = build_here(source, store, recipe, {**options, "recompute": True})
    path = Path(second.path, SHARD)
    data = path.read_bytes()
    path.unlink()
    copied = []
    chunks = StoredObject.chunks

    def copy(self: StoredObject, first: int, count: int) -> Any:
        copied.append(count)
        for part, lengths in chunks(self, first, count):
            yield part if encoded_alike else bytes(part[:-1]) + b"?", lengths

    monkeypatch.setattr(StoredObject, "chunks", copy)
    if encoded_alike:
        monkeypatch.setattr(FieldRecipe, "__call__", None)
    again = build_here(source, store, recipe, options)
    assert (again.version, path.read_bytes(), sum(copied)) == (second.version, data, 4)


def test_what_was_a_hole_stays_one_though_its_sample_can_be_fetched_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        make_unfetchable(patch, sorted(source.glob("*/*.jpg"))[9].name)
        first = build(source, tmp_path / "store", accept_missing=True)
    before = contents(tmp_path / "store")
    for path in shard_files(tmp_path / "store").values():
        path.unlink()
    again = build(source, tmp_path / "store")
    assert (again.version, again.holes) == (first.version, first.holes)
    assert contents(tmp_path / "store") == before


def test_in_a_bucket_damage_of_another_version_is_not_copied(s3: S3Server, source: Path) -> None:
    options = s3.options()
    first = build(source, "s3://bucket/repaired", storage_options=options)
    grown(source)
    second = build(source, "s3://bucket/repaired", storage_options=options)
    folders = [open_folder(each.path, options) for each in (first, second)]
    data = folders[0].read(SHARD)
    folders[0].put(SHARD, [data[:-1] + bytes([data[-1] ^ 1])])
    folders[1].remove(SHARD)
    build(source, "s3://bucket/repaired", storage_options=options)
    assert folders[1].read(SHARD) == data


# --- small objects and documents ------------------------------------------------------------------

RESIZE = {"op": "resize", "size": [56, 56]}
FLOATS = [{**RESIZE, "size": [6, 6]}, {"op": "to_dtype", "dtype": "float32"}]
OPS = {"image": [RESIZE], "wide": FLOATS}
FIELDS = {name: {"ops": [{"op": "decode"}, *ops]} for name, ops in OPS.items()}
MENDED = precache.Recipe.from_dict({"fields": FIELDS})
mend = functools.partial(building.build, recipe=MENDED, shard_samples=8)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A source, a store of one version of it, with a hole, and the version's id."""
    root = tmp_path_factory.mktemp("mending")
    source = write_jpegs(root / "in", 20, (32, 24))
    write(source / "cat/broken.jpg", b"none")
    return source, root / "store", mend(source, root / "store").version


@pytest.fixture
def store(built: tuple[Path, Path, str], tmp_path: Path) -> Path:
    shutil.copytree(built[1], tmp_path / "store")
    return tmp_path / "store"


def test_a_lost_root_and_small_objects_are_made_again_which_is_said(
    built: tuple[Path, Path, str], store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, _, version = built
    before, shards = contents(store), identities(shard_files(store))
    (store / version / ROOT).unlink()
    with pytest.raises(GoneError, match="run the same precache build command again"):
        precache.open(store)
    given = {"shard_samples": 8, "timing": False, "address": "serial", "progress": True}
    precache.plan(source, store, MENDED, **given)
    assert f"{store / version} lost its {ROOT}, which a build puts back" in capfd.readouterr().err
    assert mend(source, store).cpu_seconds == 0
    assert contents(store) == before
    for name in small_names(store / version):
        if not name.startswith("_spare"):
            (store / version / name).write_bytes(b"lost")
    mend(source, store)
    assert contents(store) == before
    flip(store / version / "rows/size/c/0", 0.5, 0x55)
    mend(source, store, progress=True)
    said = capfd.readouterr().err
    assert f"Version {version[:8]} is complete again: rows/size/c/0 mended" in said
    assert "Nothing to do" not in said
    mend(source, store, progress=True)
    said = capfd.readouterr().err
    assert re.search(r"Nothing to do: version .{8} is complete; [0-9.]+ KB checked", said)
    assert identities(shard_files(store)) == shards
    (store / version / ROOT).unlink()
    for name in ("label/c/0", "image/c/1/0/0/0"):
        flip(store / version / name, 0.5, 0x55)
    mend(source, store)
    assert contents(store) == before


def test_damage_is_mended_before_failed_samples_are_tried_again(
    built: tuple[Path, Path, str], store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, _, version = built
    before, name = contents(store), store / version / "image/c/1/0/0/0"
    os.truncate(name, name.stat().st_size // 2)
    mend(source, store, retry_failed=True, verify=False, progress=True)
    assert "to try failed samples again, run the same command again" in capfd.readouterr().err
    assert contents(store) == before
    mend(source, store, retry_failed=True, progress=True)
    assert "Nothing was mended" in capfd.readouterr().err


def test_what_a_failing_disk_cannot_read_is_mended(
    built: tuple[Path, Path, str], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, version = built
    before, failing, opened = contents(store), set[int](), LocalFolder._open

    def open_(self: LocalFolder, path: Path) -> tuple[int, int]:
        descriptor, nbytes = opened(self, path)
        if os.fstat(descriptor).st_ino in failing:
            os.close(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return descriptor, nbytes

    monkeypatch.setattr(LocalFolder, "_open", open_)
    for name in ("label/c/0", "holes/c/0", "image/zarr.json", "_spare/c/0", "image/c/1/0/0/0"):
        failing.add((store / version / name).stat().st_ino)
        [damage] = precache.verify(store).damage
        assert (damage.shard, damage.reason) == (name, "its disk fails to read it")
        mend(source, store)
        assert precache.verify(store).ok
        assert contents(store) == before


def test_records_of_the_only_version_are_mended_though_they_alone_know_its_order(
    source: Path, tmp_path: Path
) -> None:
    """Rows of a source that changed are in another order than those of a new store."""
    store = tmp_path / "store"
    build(source, store)
    grown(source)
    (source / "cat/0004.jpg").unlink()
    version = Path(build(source, store).path)
    precache.gc(store, keep=0, older_than=0)
    before = contents(version)
    for name in small_names(version):
        flip(version / name, 0.5, 0x55)
        result = build(source, store)
        assert (result.path, contents(version)) == (str(version), before), name
    (version / ROOT).unlink()
    assert build(source, store).path == str(version)
    assert contents(version) == before


def test_a_root_that_is_lost_with_others_leaves_its_place_to_the_next_generation(
    built: tuple[Path, Path, str], store: Path
) -> None:
    """As where a copy of the store was cut short: the command that an error advises works."""
    source, _, version = built
    before = contents(store / version)
    (store / version / ROOT).unlink()
    shutil.rmtree(store / version / "shards")
    result = mend(source, store)
    assert result.version == f"{version[:32]}.2"
    assert contents(Path(result.path)) == before


def test_without_any_copy_the_next_generation_takes_the_place_of_the_version(
    built: tuple[Path, Path, str], store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The damaged one stays as it is, until gc removes it."""
    source, _, version = built
    before = contents(store / version)
    for name in ("rows/size/c/0", "_spare/c/0"):
        (store / version / name).unlink()
    left = contents(store / version)
    result = mend(source, store, progress=True)
    said = " ".join(capfd.readouterr().err.split())
    assert f"damaged, too: version {version[:8]}.2 takes its place" in said
    assert precache.open(store).id == result.version == f"{version[:32]}.2"
    assert contents(Path(result.path)) == before
    assert contents(store / version) == left
    assert mend(source, store).version == result.version
    assert [each.version for each in precache.gc(store, 1, 0).removed] == [version]
    assert precache.verify(store).ok


def test_a_lost_chunk_of_several_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arrays, opening):
        monkeypatch.setattr(module, "ROWS_PER_CHUNK", 8)
    write_jpegs(tmp_path / "in", 20, classes=("cat", "dog"))
    recipe = precache.Recipe.image(resize=40, crop=32)
    result = build_here(tmp_path / "in", tmp_path / "store", recipe, {"shard_samples": 8})
    before = contents(tmp_path / "store")
    for lost in ("label/c/2", "valid/c/1"):
        (Path(result.path) / lost).unlink()
        assert [each.shard for each in precache.verify(tmp_path / "store").damage] == [lost]
        build_here(tmp_path / "in", tmp_path / "store", recipe, {"shard_samples": 8})
        assert contents(tmp_path / "store") == before


def test_statistics_of_another_store_reach_no_later_version(
    built: tuple[Path, Path, str], store: Path, tmp_path: Path
) -> None:
    """Rows are taken over with their sums."""
    source = tmp_path / "in"
    shutil.copytree(built[0], source)
    path = store / built[2] / "_sums/image/c/0/0"
    sums = np.array(precache.open(store).shard_sums("image"))
    sums[:, 1:] *= 2
    path.write_bytes(small_array(sums, ["x", "y"])["c/0/0"])
    write(source / "cat/new.jpg", encoded(cut(99, (32, 24))))
    second = mend(source, store)
    again = mend(source, tmp_path / "other", recompute=True)
    assert second.version != built[2]
    assert second.rows_reused > 0
    np.testing.assert_allclose(second.mean["image"], again.mean["image"], rtol=1e-9)


def test_holes_of_another_version_are_not_told(built: tuple[Path, Path, str], store: Path) -> None:
    path = store / built[2] / "holes/c/0"
    [(row, hole)] = json.loads(path.read_bytes()).items()
    path.write_text(json.dumps({row: ["dog/other.jpg", hole[1]]}))
    with pytest.raises(DamageError, match=r"holes/c/0 is damaged: .*; run"):
        _ = precache.open(store).holes
