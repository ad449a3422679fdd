"""What must not be taken over, and shards whose earlier version is going, damaged or elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.storage.open import open_folder
from precache.store.shard_writer import ShardWriter
from precache_workers.planning import source_record
from tests.support.building import (
    ask,
    build_here,
    build_until,
    contents,
    cut,
    encoded,
    end,
    pixels,
    start,
    write,
    write_jpegs,
)
from tests.support.servers import S3Server

CALLS: list[int] = []
HELD: list[np.ndarray] = []


def counted(array: np.ndarray) -> np.ndarray:
    """The array as it is."""
    CALLS.append(1)
    return array


def plus_the_last(array: np.ndarray) -> np.ndarray:
    """The array and the one before it, which this function keeps."""
    HELD.append(array)
    return array if len(HELD) < 2 else array // 2 + HELD[-2] // 2


DECODE = {"op": "decode"}
COUNT = {"op": "function", "function": "tests.shards.test_stored_rows:counted", "version": "1"}


def resize(size: int) -> dict[str, Any]:
    return {"op": "resize", "size": [size, size]}


def crop(size: int) -> dict[str, Any]:
    return {"op": "center_crop", "size": [size, size]}


def recipe_of(codec: str = "raw", size: int = 150, **fields: Any) -> precache.Recipe:
    image = {"ops": [DECODE, COUNT, resize(size)], "codec": codec}
    return precache.Recipe.from_dict({"fields": {"image": image, **fields}})


def build(source: Path, store: Any, recipe: precache.Recipe, **options: Any) -> Any:
    CALLS.clear()
    HELD.clear()
    return build_here(source, store, recipe, {"shard_samples": 8, **options})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 40, classes=("cat", "dog"))


def assert_rebuilt(result: Any, source: Path, recipe: precache.Recipe, **options: Any) -> None:
    """The version is what a build makes of the same rows that takes nothing over."""
    store = Path(result.path).parent
    other = store.parent / f"recomputed-{result.version}"
    shutil.copytree(store, other)
    shutil.rmtree(other / result.version)
    max((other / "commits").iterdir()).unlink()
    again = build(source, other, recipe, recompute=True, **options)
    assert (again.version, again.rows_reused) == (result.version, 0)
    assert contents(Path(result.path)) == contents(Path(again.path))


# --- what is not the same -----------------------------------------------------------------------


def test_a_field_that_names_its_input_is_another(source: Path, tmp_path: Path) -> None:
    """Files have bytes alone: a field that starts from anything else has no rows."""
    build(source, tmp_path / "store", recipe_of())
    recipe = precache.Recipe.from_dict(
        {"fields": {"image": {**recipe_of().to_dict()["fields"]["image"], "input": "image"}}}
    )
    with pytest.raises(precache.PrecacheError, match="fields start from 'image'"):
        build(source, tmp_path / "store", recipe)


def test_functions_behind_a_base_may_keep_what_they_are_given(source: Path, tmp_path: Path) -> None:
    def field(*ops: dict[str, Any]) -> precache.Recipe:
        first = [{**DECODE, "mode": "L"}, resize(100)]
        return precache.Recipe.from_dict(
            {"fields": {"image": {"ops": [*first, *ops], "variants": 1}}}
        )

    keeps = {
        "op": "function",
        "function": "tests.shards.test_stored_rows:plus_the_last",
        "version": "1",
    }
    build(source, tmp_path / "store", field())
    build(source, tmp_path / "anew", field(keeps), shard_samples=64)
    second = build(source, tmp_path / "store", field(keeps))
    assert second.rows_reused == 40
    assert_rebuilt(second, source, field(keeps))


@pytest.mark.parametrize(
    ("first", "mode"), [([crop(41)], "RGB"), ([{"op": "horizontal_flip", "p": 1.0}], "L")]
)
def test_a_resize_behind_a_base_sees_what_it_would_without(
    first: list[dict[str, Any]], mode: str, source: Path, tmp_path: Path
) -> None:
    def field(*ops: dict[str, Any]) -> precache.Recipe:
        every = [{**DECODE, "mode": mode}, *first, *ops]
        return precache.Recipe.from_dict({"fields": {"image": {"ops": every, "variants": 1}}})

    build(source, tmp_path / "store", field())
    second = build(source, tmp_path / "store", field(resize(29)))
    assert second.rows_reused == 40
    assert_rebuilt(second, source, field(resize(29)))


def test_recompute_takes_over_no_shard_of_a_build_that_was_killed(
    source: Path, tmp_path: Path
) -> None:
    """What that build took over from an earlier version is not what was asked for."""
    store = tmp_path / "store"
    build(source, store, recipe_of())
    write(source / "cat/new.jpg", encoded(cut(99)))
    killed = start(build_until, 60, source, store, recipe_of(), {"shard_samples": 8})
    assert end(killed) < 0
    assert list(store.glob("*/_build/receipts/*.json"))
    second = build(source, store, recipe_of(), recompute=True)
    assert (second.shards_skipped, second.rows_reused, len(CALLS)) == (0, 0, 41 + 2 * 8)


# --- what is the same ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["image", "zstd"])
def test_of_several_rows_a_chunk_only_chunks_with_a_change_are_encoded(
    codec: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(codec, 80)
    build(source, tmp_path / "store", recipe, shard_samples=16)
    assert precache.open(tmp_path / "store").arrays["image"].chunk_rows == 2
    write(source / "cat/0004.jpg", encoded(cut(70)))
    write(source / "cat/new.jpg", encoded(cut(71)))
    (source / "dog/0007.jpg").unlink()
    encoded_chunks = []
    flush = ShardWriter._flush

    def flush_counted(self: ShardWriter) -> None:
        encoded_chunks.append(1)
        flush(self)

    monkeypatch.setattr(ShardWriter, "_flush", flush_counted)
    second = build(source, tmp_path / "store", recipe, shard_samples=16)
    assert len(encoded_chunks) == 3
    assert second.rows_reused == 38
    assert_rebuilt(second, source, recipe, shard_samples=16)


# --- versions that are going, or damaged --------------------------------------------------------


def lose_on_link(source: Path, store: Path, recipe: precache.Recipe, version: Path) -> Any:
    """Build, while an earlier version is removed right before its first link."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.link" and os.fspath(arguments[0]).startswith(f"{version}/"):
            shutil.rmtree(version, ignore_errors=True)

    sys.addaudithook(hook)
    source_record.MOST_TOUCHED = 0
    return build_here(source, store, recipe, {"shard_samples": 8})


@pytest.mark.parametrize("change", ["added", "etags alone"])
def test_a_version_that_is_removed_while_it_is_linked_from_does_not_stop_a_build(
    change: str, source: Path, tmp_path: Path
) -> None:
    first = build(source, tmp_path / "store", recipe_of())
    if change == "added":
        write(source / "cat/new.jpg", encoded(cut(99)))
    else:
        for path in source.rglob("*.jpg"):
            os.utime(path)
    second = ask(lose_on_link, source, tmp_path / "store", recipe_of(), Path(first.path))
    assert not Path(first.path).exists()
    other = build(source, tmp_path / "anew", recipe_of())
    found, anew = pixels(tmp_path / "store"), pixels(tmp_path / "anew")
    assert found.keys() == anew.keys()
    assert all(np.array_equal(found[key], anew[key]) for key in anew)
    assert (second.mean, second.std) == (other.mean, other.std)


def test_a_version_in_a_bucket_whose_small_arrays_are_damaged_is_mended(
    s3: S3Server, source: Path
) -> None:
    """Its shards are its own: a service refuses to copy an object onto itself."""
    options = {"storage_options": s3.options()}
    store = "s3://bucket/mended"
    first = build(source, store, recipe_of(), **options)
    folder = open_folder(first.path, s3.options())
    for name in ("label/c/0", "valid/c/0"):
        data = folder.read(name)
        folder.put(name, [data[:-1]])
        assert build(source, store, recipe_of(), **options).version == first.version
        assert folder.read(name) == data
    assert precache.verify(store, storage_options=s3.options()).ok


# --- disk ---------------------------------------------------------------------------------------


def test_what_is_linked_needs_no_room_and_another_codec_needs_it_for_all_rows(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(source, tmp_path / "store", recipe_of("zstd"))
    free = first.stored_bytes // 4
    monkeypatch.setattr("precache.storage.local.LocalFolder.free_bytes", lambda self: free)
    write(source / "cat/new.jpg", encoded(cut(99)))
    assert build(source, tmp_path / "store", recipe_of("zstd")).shards_reused == 5
    free = first.stored_bytes
    with pytest.raises(precache.StorageError, match="and its disk has"):
        build(source, tmp_path / "store", recipe_of("raw"))
