"""Small objects and documents of a committed version: the same build makes them again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import DamageError, GoneError
from precache.store import arrays
from precache.store import open as opening
from precache.store.commit_log import ROOT
from precache.store.small_arrays import small_array
from tests.support.building import (
    build_here,
    contents,
    cut,
    encoded,
    flip,
    identities,
    shard_files,
    write,
    write_jpegs,
)
from tests.support.mutations import small_names

RECIPE = precache.Recipe.from_dict(
    {
        "fields": {
            "image": {"ops": [{"op": "decode"}, {"op": "resize", "size": [56, 56]}]},
            "wide": {
                "ops": [
                    {"op": "decode"},
                    {"op": "resize", "size": [6, 6]},
                    {"op": "to_dtype", "dtype": "float32"},
                ]
            },
        }
    }
)
OPTIONS = {"shard_samples": 8}


def build(source: Path, store: Path, **options: Any) -> Any:
    return build_here(source, store, RECIPE, {**OPTIONS, **options})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A source, a store of one version of it, with a hole, and the version's id."""
    root = tmp_path_factory.mktemp("mending")
    source = write_jpegs(root / "in", 20, (32, 24))
    write(source / "cat/broken.jpg", b"none")
    return source, root / "store", build(source, root / "store").version


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
    assert build(source, store).cpu_seconds == 0
    assert contents(store) == before
    for name in small_names(store / version):
        if not name.startswith("_spare"):
            (store / version / name).write_bytes(b"lost")
    build(source, store)
    assert contents(store) == before
    flip(store / version / "rows/c/0", 0.5, 0x55)
    build(source, store, progress=True)
    said = capfd.readouterr().err
    assert f"Version {version[:8]} is complete again: rows/c/0 mended" in said
    assert "Nothing to do" not in said
    build(source, store, progress=True)
    said = capfd.readouterr().err
    assert re.search(r"Nothing to do: version .{8} is complete; [0-9.]+ KB checked", said)
    assert identities(shard_files(store)) == shards


def test_a_root_that_is_lost_with_others_leaves_its_place_to_the_next_generation(
    built: tuple[Path, Path, str], store: Path
) -> None:
    """As where a copy of the store was cut short: the command that an error advises works."""
    source, _, version = built
    before = contents(store / version)
    (store / version / ROOT).unlink()
    shutil.rmtree(store / version / "shards")
    result = build(source, store)
    assert result.version == f"{version[:32]}.2"
    assert contents(Path(result.path)) == before


def test_without_any_copy_the_next_generation_takes_the_place_of_the_version(
    built: tuple[Path, Path, str], store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The damaged one stays as it is, until gc removes it."""
    source, _, version = built
    before = contents(store / version)
    for name in ("rows/c/0", "_spare/c/0"):
        (store / version / name).unlink()
    left = contents(store / version)
    result = build(source, store, progress=True)
    said = " ".join(capfd.readouterr().err.split())
    assert f"damaged, too: version {version[:8]}.2 takes its place" in said
    assert precache.open(store).id == result.version == f"{version[:32]}.2"
    assert contents(Path(result.path)) == before
    assert contents(store / version) == left
    assert build(source, store).version == result.version
    assert [each.version for each in precache.gc(store, 1, 0).removed] == [version]
    assert precache.verify(store).ok


def test_a_lost_chunk_of_several_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arrays, opening):
        monkeypatch.setattr(module, "ROWS_PER_CHUNK", 8)
    write_jpegs(tmp_path / "in", 20, classes=("cat", "dog"))
    recipe = precache.Recipe.image(resize=40, crop=32)
    result = build_here(tmp_path / "in", tmp_path / "store", recipe, OPTIONS)
    before = contents(tmp_path / "store")
    for lost in ("label/c/2", "valid/c/1"):
        (Path(result.path) / lost).unlink()
        assert [each.shard for each in precache.verify(tmp_path / "store").damage] == [lost]
        build_here(tmp_path / "in", tmp_path / "store", recipe, OPTIONS)
        assert contents(tmp_path / "store") == before


# --- what goes by it ----------------------------------------------------------------------------


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
    second = build(source, store)
    again = build(source, tmp_path / "other", recompute=True)
    assert second.version != built[2]
    assert second.rows_reused > 0
    np.testing.assert_allclose(second.mean["image"], again.mean["image"], rtol=1e-9)


def test_holes_of_another_version_are_not_told(built: tuple[Path, Path, str], store: Path) -> None:
    path = store / built[2] / "holes/c/0"
    [(row, hole)] = json.loads(path.read_bytes()).items()
    path.write_text(json.dumps({row: ["dog/other.jpg", hole[1]]}))
    with pytest.raises(DamageError, match=r"holes/c/0 is damaged: .*; run"):
        _ = precache.open(store).holes
