"""A source that was copied: shards are taken over where the samples are what they were."""

import functools
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from tests.support import building, counting
from tests.support.building import (
    LONG_AGO,
    age,
    ask,
    build_here,
    build_until,
    contents,
    cut,
    encoded,
    end,
    flip,
    pixels,
    start,
    write,
)
from tests.support.counting import CALLS, mean_field, mean_of


def mean_after_removal(array: np.ndarray, folder: str) -> np.ndarray:
    """The mean, once `folder` is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return mean_of(array)


def recipe_of(size: int = 150, codec: str = "image") -> precache.Recipe:
    """Images that are counted, and their means."""
    return counting.recipe_of(size, codec, mean=mean_field(size))


LARGE = recipe_of()
build = functools.partial(counting.build, recipe=LARGE)


@functools.cache
def padded(number: int) -> bytes:
    """A photograph in a file of 8,000 bytes, as all of these are."""
    return encoded(cut(number), quality=60).ljust(8000, b"\0")


pytestmark = pytest.mark.usefixtures("many_touched")


def write_thirty(root: Path) -> Path:
    """Thirty files of one size, one of them broken."""
    for number in range(29):
        write(root / f"{'cat' if number % 2 else 'dog'}/{number:03d}.jpg", padded(number))
    write(root / "dog/broken.jpg", bytes(8000))
    return root


def copied(source: Path, copy: Path) -> Path:
    """The same files, a day younger."""
    shutil.copytree(source, copy)
    for path in copy.rglob("*.jpg"):
        os.utime(path, (LONG_AGO + 86400, LONG_AGO + 86400))
    return copy


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_thirty(tmp_path / "a")


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return copied(source, tmp_path / "b")


@dataclass(frozen=True)
class Kept:
    """A source and its copy that stay as they are, what a build of each made, and a store that
    has the source's alone, to be built into."""

    source: Path
    copy: Path
    of_source: Any
    of_copy: Any
    store: Path

    @property
    def version_folder(self) -> Path:
        return self.store / str(self.of_source.version)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    root = tmp_path_factory.mktemp("kept")
    source = write_thirty(root / "a")
    copy = copied(source, root / "b")
    results = [build(each, root / f"{each.name}.store") for each in (source, copy)]
    return Kept(source, copy, *results, root / "a.store")


@pytest.fixture
def kept(built: Kept, tmp_path: Path) -> Kept:
    shutil.copytree(built.store, tmp_path / "store")
    return replace(built, store=tmp_path / "store")


def assert_as_if_built_anew(result: Any, source: Path, **options: Any) -> None:
    """The version is what a build into another store makes, to the last byte."""
    recipe = options.pop("recipe", LARGE)
    assert_same(result, build(source, Path(result.path).parent / "anew", recipe=recipe, **options))


def assert_same(result: Any, other: Any) -> None:
    assert contents(Path(result.path)) == contents(Path(other.path))
    assert (result.holes, result.mean, result.std) == (other.holes, other.mean, other.std)
    assert (result.raw_bytes, result.stored_bytes) == (other.raw_bytes, other.stored_bytes)


RECIPES = {
    "image": LARGE,
    "raw": recipe_of(codec="raw"),
    "zstd": recipe_of(codec="zstd"),
    "several rows a chunk": recipe_of(20),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_nothing_of_a_copied_source_is_decoded_again_which_is_said(
    kind: str, source: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = build(source, tmp_path / "store", recipe=RECIPES[kind])
    assert len(CALLS) >= 29
    second = build(copy, tmp_path / "store", recipe=RECIPES[kind], progress=True)
    assert CALLS == []
    said = capsys.readouterr().err
    assert re.search(r"Since version \w{8}: another source, 30 of the same names", said)
    assert re.search(r"30 rows and \d whole shards were taken over from version", said)
    assert second.version != first.version
    assert (second.shards_reused, second.shards_skipped) == (second.shards, 0)
    assert [key for key, _ in second.holes] == ["dog/broken.jpg"]
    assert precache.open(tmp_path / "store").id == second.version
    assert precache.verify(tmp_path / "store").ok
    assert_as_if_built_anew(second, copy, recipe=RECIPES[kind])


@pytest.mark.parametrize("draws", [False, True])
def test_copied_and_renamed_photos_are_not_decoded_again_unless_ops_draw_by_key(
    draws: bool, source: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(40)
    if draws:
        fields = recipe.to_dict()["fields"]
        fields["image"]["ops"].append({"op": "horizontal_flip"})
        recipe = precache.Recipe.from_dict({"fields": fields})
    photo = source / "cat/001.jpg"
    for number, path in enumerate(sorted(source.rglob("*.jpg")), 1):
        os.utime(path, ns=(number, number))  # all are of one size
    build(source, tmp_path / "store", recipe=recipe)
    for copies in (["cat/copy.jpg", "dog/other.jpg"], ["cat/third.jpg"]):
        for name in copies:
            shutil.copy2(photo, source / name)  # with its time
        CALLS.clear()
        build_here(source, tmp_path / "store", recipe, {"shard_samples": 8})
        assert (CALLS == []) == (not draws)
    (source / "dog/004.jpg").rename(source / "dog/moved.jpg")
    (source / "cat").rename(source / "lion")
    photo = source / "lion/001.jpg"
    CALLS.clear()
    second = build_here(source, tmp_path / "store", recipe, {"shard_samples": 8})
    assert (CALLS == []) == (not draws)
    assert (second.classes, second.failed) == (("dog", "lion"), 1)
    (source / "lion/new.jpg").write_bytes(photo.read_bytes()[:-1] + b"\1")
    shutil.copystat(photo, source / "lion/new.jpg")
    CALLS.clear()
    second = build_here(source, tmp_path / "store", recipe, {"shard_samples": 8})
    assert CALLS != []
    fresh = build(source, tmp_path / "anew", recipe=recipe)
    building.assert_same(pixels(tmp_path / "store"), pixels(tmp_path / "anew"))
    assert (second.mean, second.std) == (fresh.mean, fresh.std)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_copy_takes_rows_of_whichever_content_of_its_keys_its_files_have(
    is_hidden: bool, source: Path, tmp_path: Path
) -> None:
    """Though a later version has others of the same sizes, and even of the same times."""
    store, photos = tmp_path / "store", sorted(source.rglob("0*.jpg"))[:3]
    build(source, store)
    shutil.copytree(source, tmp_path / "copy")
    datas = [photo.read_bytes() for photo in photos]
    for photo, data in zip(photos, datas[1:] + datas[:1], strict=True):
        photo.write_bytes(data)
        if is_hidden:
            os.utime(photo, (LONG_AGO, LONG_AGO))
    build(source, store)
    (tmp_path / "copy" / photos[0].relative_to(source)).write_bytes(padded(900))
    plan = precache.plan(tmp_path / "copy", store, LARGE, address="serial", timing=False)
    assert (plan.rows_computed, plan.rows_compared) == (30, 30)
    CALLS.clear()
    result = build(tmp_path / "copy", store)
    assert (result.rows_reused, len(CALLS)) == (29, 1)
    assert_as_if_built_anew(result, tmp_path / "copy")


def test_a_short_or_missing_object_is_made_anew(kept: Kept) -> None:
    one, other = (kept.version_folder / f"image/c/{shard}/0/0/0" for shard in (1, 2))
    one.unlink()
    other.write_bytes(other.read_bytes()[:-1])
    second = build(kept.copy, kept.store)
    assert second.shards_reused == second.shards - 2
    assert_same(second, kept.of_copy)


@pytest.mark.parametrize("verify", [True, False])
def test_damage_is_found_where_rows_are_copied(source: Path, tmp_path: Path, verify: bool) -> None:
    """All of that shard is made anew, and other shards are linked."""
    first = build(source, tmp_path / "store")
    keys = list(precache.open(tmp_path / "store").keys)
    path = Path(first.path) / "image/c/1/0/0/0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (source / keys[12]).write_bytes(padded(900))
    second = build(source, tmp_path / "store", verify=verify)
    twice = not verify  # the sample that changed, before and after the damage was found
    assert (second.shards_reused, len(CALLS)) == (second.shards - 1, 8 + twice)
    assert_as_if_built_anew(second, source)


def test_an_object_that_goes_before_it_is_linked_is_made_anew(kept: Kept) -> None:
    mean = {
        "op": "function",
        "function": "tests.planning.test_reuse:mean_after_removal",
        "version": "1",
    }
    mean |= {"dtype": "float32", "shape": [3], "params": {"folder": f"{kept.version_folder}/image"}}
    fields = {**LARGE.to_dict()["fields"], "mean": {"ops": [{"op": "decode"}, mean]}}
    recipe = precache.Recipe.from_dict({"fields": fields})
    second = build(kept.source, kept.store, recipe=recipe)
    assert (second.rows_reused, second.failed) == (0, 1)
    CALLS.clear()
    assert_as_if_built_anew(second, kept.source, recipe=recipe)


@pytest.mark.parametrize("has_copies", [True, False])
def test_a_version_whose_records_are_damaged_offers_rows_by_their_copies_alone(
    has_copies: bool, kept: Kept
) -> None:
    names = ["zarr.json", "rows/size/c/0", "holes/c/0", "shards/image/c/0/0"]
    for name in names if has_copies else [*names, "_spare/c/0"]:
        path = kept.version_folder / name
        path.write_bytes(path.read_bytes()[:-7])
    second = build(kept.copy, kept.store)
    assert second.shards_reused == (second.shards if has_copies else 0)
    assert_same(second, kept.of_copy)


def test_datasets_whose_code_changed_are_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes are the same, and their shapes are others."""
    monkeypatch.syspath_prepend(tmp_path)
    code = "import numpy as np\ndef make():\n    return [np.zeros((8, 16, 3), np.uint8)] * 3\n"
    write(tmp_path / "turned_dataset.py", code.encode())  # long ago, unlike the next
    source = "python:turned_dataset:make"
    ask(build_here, source, tmp_path / "store", precache.Recipe.image(), {})
    (tmp_path / "turned_dataset.py").write_text(code.replace("8, 16", "16, 8"))
    second = ask(build_here, source, tmp_path / "store", precache.Recipe.image(), {})
    assert second.shards_reused == 0
    assert precache.open(tmp_path / "store").fields["image"].shape == (3, 16, 8)


@pytest.mark.parametrize("then", ["added", "other shards", "damaged", "removed"])
def test_finished_shards_of_a_build_that_was_killed_serve_a_build_of_another_version(
    then: str, source: Path, tmp_path: Path
) -> None:
    store, options = tmp_path / "store", {"shard_samples": 8}
    assert end(start(build_until, 55, source, store, LARGE, options)) < 0
    [killed] = [path for path in store.iterdir() if "." in path.name]
    done = len(list((killed / "_build/receipts").iterdir()))
    assert 1 < done < 4
    if then == "other shards":
        options = {"shard_samples": 5}
    else:
        write(source / "cat/added.jpg", padded(900))
    if then == "damaged":
        flip(killed / "image/c/0/0/0/0", 0.5)
    elif then == "removed":
        age(killed, 7200)
        assert len(precache.gc(store, older_than=0).removed) == 1
        done = 0
    plan = precache.plan(source, store, LARGE, address="serial", timing=False, **options)
    assert plan.rows_reused == 8 * done
    second = build(source, store, recipe=LARGE, **options)
    lost = 8 * done - second.rows_reused  # of a shard's rows, those whose chunks were read
    assert 0 < lost <= 8 if then == "damaged" else lost == 0
    assert_as_if_built_anew(second, source, **options)


def test_shards_that_a_killed_build_finished_since_are_taken_by_the_same_process(
    source: Path, tmp_path: Path
) -> None:
    store, options = tmp_path / "store", {"shard_samples": 8}

    def finished(change: int) -> int:
        assert end(start(build_until, change, source, store, LARGE, options)) < 0
        return len(list(store.glob("*/_build/receipts/*")))

    before = finished(45)
    added = write(source / "cat/added.jpg", padded(900))
    plan = precache.plan(source, store, LARGE, address="serial", timing=False, **options)
    assert plan.rows_reused == 8 * before
    added.unlink()
    done = finished(24)
    assert 1 <= before < done < 4
    write(source / "cat/added.jpg", padded(900))
    second = build(source, store, recipe=LARGE, **options)
    assert second.rows_reused == 8 * done


def test_a_disk_without_room_for_a_second_version_is_refused(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache.storage.local.LocalFolder.free_bytes", lambda self: 1000)
    with pytest.raises(precache.StorageError, match="and its disk has"):
        build(kept.copy, kept.store)
