"""Small objects and documents of a committed version: the same build makes them again."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import DamageError, FetchError, StoreError
from precache.store import array_metadata, object_names, small_arrays
from precache.store import open as opening
from precache.store.small_arrays import small_array
from tests.support.building import (
    build_here,
    contents,
    cut,
    encoded,
    flip,
    identities,
    remains,
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


NAMES = [
    *(
        f"{name}/zarr.json"
        for name in ("label", "valid", "key", "rows", "holes", "shards", "_sums")
    ),
    *(f"{name}/zarr.json" for name in ("image", "wide", "shards/image", "_sums/wide")),
    *(f"{name}/c/0" for name in ("label", "valid", "key", "rows", "holes")),
    *(f"{name}/c/0/0" for name in ("shards/image", "shards/wide", "_sums/image", "_sums/wide")),
]


def spoil(path: Path, how: str) -> None:
    if how == "unlink":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        flip(path, 0.5, 0x55)


HOW = ("unlink", "cut", "change")


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *((name, [HOW[number % 3]]) for number, name in enumerate(NAMES)),
        *(pytest.param(name, HOW, marks=pytest.mark.heavy) for name in NAMES),
    ],
)
def test_every_small_object_is_found_and_mended(
    name: str, ways: Sequence[str], built: tuple[Path, Path, str], store: Path
) -> None:
    source, _, version = built
    before, shards = contents(store), identities(shard_files(store))
    for how in ways:
        spoil(store / version / name, how)
        assert [each.shard for each in precache.verify(store).damage] == [name]
        result = build(source, store)
        assert (result.version, result.cpu_seconds) == (version, 0)
        assert precache.verify(store).ok, how
        assert contents(store) == before
    assert identities(shard_files(store)) == shards
    assert remains(store) == []


def test_a_build_says_that_it_mended_and_what_it_did_not_read(
    built: tuple[Path, Path, str], store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, _, version = built
    spoil(store / version / "rows/c/0", "change")
    build(source, store, progress=True)
    said = capfd.readouterr().err
    assert f"Version {version[:8]} is complete again: rows/c/0 mended" in said
    assert "Nothing to do" not in said
    build(source, store, progress=True)
    said = capfd.readouterr().err
    assert re.search(r"Nothing to do: version .{8} is complete; [0-9.]+ KB checked", said)


def test_all_documents_but_the_versions_own_may_be_lost_at_once(
    built: tuple[Path, Path, str], store: Path
) -> None:
    source, _, version = built
    before = contents(store)
    for name in small_names(store / version):
        if name.endswith("/zarr.json"):
            (store / version / name).unlink()
    with pytest.raises(StoreError, match=r"there is no Zarr v3 array at .*run the same precache"):
        precache.open(store)
    build(source, store)
    assert contents(store) == before


def test_a_shard_and_the_sums_of_its_field_are_made_again_together(
    built: tuple[Path, Path, str], store: Path
) -> None:
    source, _, version = built
    before = contents(store)
    (store / version / "_sums/image/c/0/0").unlink()
    (store / version / "image/c/1/0/0/0").unlink()
    assert build(source, store).version == version
    assert contents(store) == before


def test_a_damaged_shard_is_to_be_removed_where_the_sums_of_its_field_are_lost(
    built: tuple[Path, Path, str], store: Path
) -> None:
    source, _, version = built
    before = contents(store)
    (store / version / "_sums/image/c/0/0").unlink()
    spoil(store / version / "image/c/1/0/0/0", "change")
    with pytest.raises(StoreError, match="so is _sums/image, which is made of it") as raised:
        build(source, store)
    [path] = re.findall(r"remove (/\S+) and run the same command again", str(raised.value))
    Path(path).unlink()
    assert build(source, store).version == version
    assert contents(store) == before


def test_a_table_is_not_made_of_shards_that_are_damaged(
    built: tuple[Path, Path, str], store: Path
) -> None:
    source, _, version = built
    (store / version / "shards/image/c/0/0").unlink()
    spoil(store / version / "image/c/1/0/0/0", "change")
    before = contents(store)
    with pytest.raises(
        StoreError,
        match=r"shards/image is damaged and cannot be mended: image/c/1.*give --recompute",
    ):
        build(source, store)
    assert contents(store) == before


def test_a_table_is_not_made_of_shards_that_are_others(
    built: tuple[Path, Path, str], store: Path
) -> None:
    """They are whole by themselves; the sums by channel tell."""
    source, _, version = built
    (store / version / "shards/image/c/0/0").unlink()
    one, other = (store / version / f"image/c/{number}/0/0/0" for number in (0, 1))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    with pytest.raises(StoreError, match="are not those that the sums by channel tell of"):
        build(source, store)


def test_where_the_source_changed_the_row_table_is_not_made_up(
    built: tuple[Path, Path, str], store: Path, tmp_path: Path
) -> None:
    """A photo of the same size and time, with other contents."""
    source = tmp_path / "in"
    shutil.copytree(built[0], source)
    path = source / "cat/0000.jpg"
    status, data = path.stat(), path.read_bytes()
    version = build(source, store).version
    (store / version / "rows/c/0").unlink()
    path.write_bytes(data[:-3] + b"abc")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(StoreError, match=r"rows/c/0 is damaged and cannot be mended: what is made"):
        build(source, store, ignore_ctime=True)
    assert build(source, store).version != version
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    build(source, store)
    assert precache.verify(store).ok


def test_the_row_table_of_a_version_that_grew_is_mended(tmp_path: Path) -> None:
    """Its rows are in no order that the listing alone gives; it has one that is removed."""
    source, store = write_jpegs(tmp_path / "in", 20, (32, 24)), tmp_path / "store"
    build(source, store)
    (source / "cat/0000.jpg").unlink()
    write(source / "cat/new.jpg", encoded(cut(99, (32, 24))))
    grown = build(source, store)
    before = contents(store)
    for name in ("rows/c/0", "key/c/0", "holes/c/0"):
        (Path(grown.path) / name).unlink()
        again = build(source, store)
        assert again.version == grown.version, name
        assert contents(store) == before


@pytest.mark.parametrize(
    "name", ["label", "valid", "key", "rows", "holes", "shards/image", "_sums/wide"]
)
def test_a_folder_of_another_version_is_mended_at_once(
    name: str, built: tuple[Path, Path, str], store: Path
) -> None:
    """Its document agrees with its data, and not with the version's own document."""
    source, _, version = built
    before = contents(store)
    more = shutil.copytree(source, store.with_name("more"))
    write_jpegs(more / "more", 20)
    write(more / "cat/broken too.jpg", b"none")
    other = build(more, store.with_name("other")).path
    shutil.copytree(Path(other, name), store / version / name, dirs_exist_ok=True)
    assert not precache.verify(store).ok
    assert build(source, store).version == version
    assert precache.verify(store).ok
    assert contents(store) == before


def test_the_row_table_comes_from_a_version_that_has_the_same(tmp_path: Path) -> None:
    """Nothing of the samples is read for it."""
    source, store = write_jpegs(tmp_path / "in", 12, (32, 24)), tmp_path / "store"
    first = build_here(source, store, precache.Recipe.image(codec="raw"), OPTIONS)
    build_here(source, store, precache.Recipe.image(codec="zstd"), OPTIONS)
    paths = [Path(first.path) / name for name in ("rows/c/0", "key/c/0", "rows/zarr.json")]
    before = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    for photo in source.rglob("*.jpg"):
        status = photo.stat()
        photo.write_bytes(bytes(status.st_size))
        os.utime(photo, ns=(status.st_atime_ns, status.st_mtime_ns))
    options = {**OPTIONS, "ignore_ctime": True}
    build_here(source, store, precache.Recipe.image(codec="raw"), options)
    assert [path.read_bytes() for path in paths] == before


LABELLED = """
import numpy as np

class Numbers:
    # members
    def __len__(self):
        return 20

    def __getitem__(self, number):
        shape = (3, 5) if number == 7 else (3, 4)  # number 7 becomes a hole
        return {"image": np.full(shape, number, np.uint8), "label": number % 5}

def make():
    return Numbers()
"""

FINGERPRINT = "    def fingerprint(self, number): return str(number)\n"


@pytest.mark.parametrize(
    ("members", "labels"),
    [
        ("", [n % 5 for n in range(20)]),
        (FINGERPRINT, [n % 5 for n in range(20)]),
        ("    targets = None\n" + FINGERPRINT, [n % 5 for n in range(20)]),
    ],
    ids=["code", "fingerprints", "fingerprints and no targets"],
)
def test_labels_that_came_with_the_samples_are_fetched_again(
    members: str, labels: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"labelled_{len(members)}"
    (tmp_path / f"{name}.py").write_text(LABELLED.replace("    # members\n", members))
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": []}}})
    source: Any = f"python:{name}:make"
    result = build_here(source, tmp_path / "store", recipe, OPTIONS)
    assert [key for key, _ in result.holes] == ["7"]
    found = precache.verify(tmp_path / "store")
    assert found.ok
    assert any("came with the samples" in each for each in found.unchecked)
    before = contents(tmp_path / "store")
    assert build_here(source, tmp_path / "store", recipe, OPTIONS).version == result.version
    assert contents(tmp_path / "store") == before
    (Path(result.path) / "label/c/0").unlink()
    build_here(source, tmp_path / "store", recipe, OPTIONS)
    assert contents(tmp_path / "store") == before
    assert sorted(precache.open(tmp_path / "store").labels) == sorted(labels)


CHANGING = """
import pathlib
import time
import numpy as np

class Numbers:
    def __len__(self):
        return 20

    def __getitem__(self, number):
        state = pathlib.Path(__file__).with_suffix(".txt").read_text() if number == 7 else "whole"
        if state == "too large":
            raise MemoryError
        if state == "gone":
            raise OSError(state)
        if state == "hanging":
            time.sleep(600)
        shape = (3, 5) if state == "odd" else (3, 4)
        return {"image": np.full(shape, number, np.uint8), "label": number % 5}

def make():
    return Numbers()
"""


@pytest.mark.parametrize("lost", ["label/c/0", "rows/c/0"])
@pytest.mark.parametrize(
    ("built", "later", "mends"),
    [
        ("odd", "odd", True),
        ("odd", "gone", False),
        ("odd", "too large", False),
        pytest.param("odd", "hanging", False, marks=pytest.mark.heavy),
        ("too large", "too large", True),
        ("too large", "gone", True),
        ("too large", "odd", True),
        pytest.param("hanging", "hanging", True, marks=pytest.mark.heavy),
    ],
)
def test_what_came_with_the_sample_of_a_hole_is_mended_or_the_error_said(
    lost: str,
    built: str,
    later: str,
    mends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"changing_{abs(hash((built, later, lost)))}"
    (tmp_path / f"{name}.py").write_text(CHANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    options: dict[str, Any] = {"address": "serial"}
    if "hanging" in (built, later):  # it ends its process, which is this one in a serial build
        options = {"address": "local", "sample_timeout": 2}

    def build_while(state: str) -> precache.BuildResult:
        (tmp_path / f"{name}.txt").write_text(state)
        recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": []}}})
        return precache.build(
            f"python:{name}:make", tmp_path / "store", recipe, shard_samples=8, **options
        )

    result = build_while(built)
    assert [key for key, _ in result.holes] == ["7"]
    before = contents(tmp_path / "store")
    (Path(result.path) / lost).unlink()
    # Without its row table a version does not tell whether the sample could be fetched.
    if not mends or (lost == "rows/c/0" and built != later):
        with pytest.raises(
            (FetchError, StoreError), match=r"--recompute, which makes a new version"
        ):
            build_while(later)
        later = built
    build_while(later)
    assert contents(tmp_path / "store") == before


def test_a_lost_chunk_of_several_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (array_metadata, object_names, opening, small_arrays):
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


def test_intact_labels_stay_though_the_dataset_has_others_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "labelled_anew.py"
    module.write_text(LABELLED.replace("    # members\n", FINGERPRINT))
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": []}}})
    source: Any = "python:labelled_anew:make"
    result = build_here(source, tmp_path / "store", recipe, OPTIONS)
    before = contents(tmp_path / "store")
    module.write_text(LABELLED.replace("    # members\n", FINGERPRINT + "    targets = None\n"))
    monkeypatch.delitem(sys.modules, "labelled_anew")  # as in another process
    (Path(result.path) / "label/zarr.json").unlink()
    build_here(source, tmp_path / "store", recipe, OPTIONS)
    assert contents(tmp_path / "store") == before


# --- the version's own document -----------------------------------------------------------------


def test_a_wrong_document_of_the_version_is_said_and_made_again_with_it(
    built: tuple[Path, Path, str], store: Path
) -> None:
    source, _, version = built
    path = store / version / "zarr.json"
    before = contents(store)
    document = json.loads(path.read_bytes())
    document["attributes"]["precache"]["mean"]["image"][0] += 1
    path.write_text(json.dumps(document))
    assert [each.shard for each in precache.verify(store).damage] == ["zarr.json"]
    with pytest.raises(
        StoreError, match=r"zarr.json is damaged.*remove .*zarr.json and run the same"
    ):
        build(source, store)
    path.unlink()
    assert build(source, store).version == version
    assert contents(store) == before


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


def test_a_wrong_chunk_shape_is_said_of_the_document(
    built: tuple[Path, Path, str], store: Path
) -> None:
    source, _, version = built
    path = store / version / "image/zarr.json"
    document = json.loads(path.read_bytes())
    inner = document["codecs"][0]["configuration"]["chunk_shape"]
    assert inner[0] == 4
    inner[0] = 2
    path.write_text(json.dumps(document))
    for use in (precache.open, precache.CachedDataset, lambda at: precache.Loader(at, 2)):
        with pytest.raises(
            StoreError, match=r"image/zarr.json is damaged.*chunk_shape.*run the same"
        ):
            use(store)
    build(source, store)
    assert precache.verify(store).ok


def test_holes_of_another_version_are_not_told(built: tuple[Path, Path, str], store: Path) -> None:
    path = store / built[2] / "holes/c/0"
    [(row, hole)] = json.loads(path.read_bytes()).items()
    path.write_text(json.dumps({row: ["dog/other.jpg", hole[1]]}))
    with pytest.raises(DamageError, match="holes/c/0 is damaged: its checksum does not hold; run"):
        _ = precache.open(store).holes


def test_a_table_of_another_version_is_at_fault_and_not_the_shards(
    built: tuple[Path, Path, str], store: Path
) -> None:
    """Of shards that are as large: each is whole by its own checksums."""
    source, _, version = built
    table = np.array(precache.open(store).shard_table("wide"))
    table[:, 1] ^= 1
    (store / version / "shards/wide/c/0/0").write_bytes(small_array(table, ["a", "b"])["c/0/0"])
    assert [each.shard for each in precache.verify(store).damage] == ["shards/wide/c/0/0"]
    (store / version / "shards/wide/c/0/0").unlink()
    build(source, store)
    assert precache.verify(store).ok


def test_without_pyarrow_it_is_said_what_was_not_checked(
    store: Path, run_python: Callable[..., Any]
) -> None:
    code = """
import sys
sys.modules["pyarrow"] = None
import precache
found = precache.verify(sys.argv[1])
assert found.ok
print(*found.unchecked)
"""
    assert "needs pyarrow" in run_python(code, store).stdout
