"""Re-caching: only what changed is computed, and the bytes are those of a full rebuild."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.store.row_table import REMOVED
from precache_workers.cluster import executor
from tests.support import counting
from tests.support.building import contents, cut, encoded, write, write_jpegs
from tests.support.counting import CALLS, MEAN, mean_field, mean_of, recipe_of

HELD: list[np.ndarray] = []


def halved(array: np.ndarray) -> np.ndarray:
    return array // 2


def plus_the_last(array: np.ndarray) -> np.ndarray:
    """The array and the one before it, which this function keeps."""
    HELD.append(array)
    return array if len(HELD) < 2 else array // 2 + HELD[-2] // 2


def picky(array: np.ndarray) -> np.ndarray:
    if array.shape[1] == NARROW:
        raise ValueError("too narrow")
    return mean_of(array)


NARROW = 61
"""Pixels."""
HALVE, KEEP = (
    {"op": "function", "function": f"tests.driver.test_incremental:{name}", "version": "1"}
    for name in ("halved", "plus_the_last")
)


RECIPES = {
    "image": recipe_of(),
    "raw": recipe_of(codec="raw"),
    "several rows a chunk": recipe_of(20),
    "two fields": recipe_of(mean=mean_field(9)),
    "floats": recipe_of(20, "zstd", {"op": "to_dtype", "dtype": "float32", "scale": True}),
}


def build(source: Path, store: Path, recipe: precache.Recipe, **options: Any) -> Any:
    HELD.clear()
    return counting.build(source, store, recipe, **options)


def rebuilt(source: Path, store: Path, recipe: precache.Recipe, **options: Any) -> Any:
    """The version built into the store, and one like it for which nothing was taken over."""
    other = store.parent / "recomputed"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(store, other)
    before = {path.name for path in store.iterdir()}
    result = build(source, store, recipe, **options)
    calls = len(CALLS)
    again = build(source, other, recipe, recompute=True, **options)
    assert result.holes == again.holes
    if result.version not in before:  # else it was made anew, beside that
        assert result.version == again.version
        assert contents(Path(result.path)) == contents(Path(again.path))
    assert again.rows_reused == 0
    assert precache.verify(store).ok
    CALLS[:] = [1] * calls
    return result


def change(path: Path, number: int) -> None:
    path.write_bytes(encoded(cut(number), quality=80))


def some_changed(source: Path) -> None:
    change(source / "cat/0006.jpg", 100)
    change(source / "dog/0017.jpg", 101)


def some_added(source: Path) -> None:
    for number in range(5):
        write(source / f"cat/new{number}.jpg", encoded(cut(200 + number)))


def some_removed(source: Path) -> None:
    (source / "cat/0004.jpg").unlink()
    (source / "dog/0039.jpg").unlink()


def a_hole_mended(source: Path) -> None:
    change(source / "dog/0039.jpg", 102)


def one_broken(source: Path) -> None:
    (source / "dog/0021.jpg").write_bytes(b"broken, too")


def all_of_it(source: Path) -> None:
    some_changed(source)
    some_added(source)
    one_broken(source)
    some_removed(source)


CHANGES: dict[str, tuple[Callable[[Path], None], int]] = {
    "a hole mended": (a_hole_mended, 39),
    "all of it": (all_of_it, 35),
}
"""Changes of the source, and how many rows are taken over."""


CROP = {"op": "center_crop", "size": [100, 110]}
SMALLER = {"op": "center_crop", "size": [17, 19]}
FLIP, NINE = {"op": "horizontal_flip"}, {"op": "center_crop", "size": [9, 9]}
RESIZE = {"op": "resize", "size": [29, 29]}


@pytest.mark.parametrize(
    ("size", "mode", "first", "after"),
    [
        (150, "RGB", (), (CROP, SMALLER)),
        (150, "RGB", (), (FLIP, CROP, HALVE)),
        (40, "RGB", (), (SMALLER, FLIP)),
        # What functions keep, and what a resize sees, is as without a base.
        (100, "L", (), (KEEP,)),
        (150, "RGB", ({**CROP, "size": [41, 41]},), (RESIZE,)),
        (150, "L", ({**FLIP, "p": 1.0},), (RESIZE,)),
    ],
)
def test_ops_after_those_of_a_base_start_from_its_rows(
    size: int, mode: str, first: tuple[Any, ...], after: tuple[Any, ...],
    source: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """The base is found though another version was built since."""
    store = tmp_path / "store"
    build(source, store, recipe_of(size, "image", *first, mode=mode))
    build(source, store, recipe_of(size, "zstd", *first, NINE, mode=mode))
    second = rebuilt(source, store, recipe_of(size, "image", *first, *after, mode=mode))
    assert len(CALLS) <= 24, "those that are measured"
    assert second.rows_reused == 39


def test_a_sample_may_fail_for_another_field(source: Path, tmp_path: Path) -> None:
    """Its shard has a hole in both, and the others' objects of the first field are linked."""
    write(source / "cat/narrow.jpg", encoded(cut(NARROW, (NARROW, 48))))
    first = build(source, tmp_path / "store", recipe_of())
    mean = {"ops": [{"op": "decode"}, MEAN | {"function": "tests.driver.test_incremental:picky"}]}
    second = rebuilt(source, tmp_path / "store", recipe_of(mean=mean))
    assert second.failed == 2
    assert len(CALLS) <= 24, "those that are measured"
    names = [f"image/c/{shard}/0/0/0" for shard in range(second.shards)]
    linked = [name for name in names if Path(first.path, name).samefile(f"{second.path}/{name}")]
    assert len(linked) == second.shards - 1


def test_samples_that_come_back_take_their_rows_again_and_compact_lays_all_down_anew(
    source: Path, tmp_path: Path
) -> None:
    store, image = tmp_path / "store", RECIPES["image"]
    first = build(source, store, image)
    keys = list(precache.open(store).keys)
    data = (source / "cat/0004.jpg").read_bytes()
    some_removed(source)
    second = rebuilt(source, store, image)
    assert (second.samples, second.removed, second.failed) == (38, 2, 0)
    assert precache.open(store).holes[keys.index("cat/0004.jpg")][1] == REMOVED
    compact = build(source, store, image, compact=True)
    assert (CALLS, compact.rows_reused) == ([], 38)
    fresh = build(source, tmp_path / "anew", image)
    assert (compact.version, compact.removed) == (fresh.version, 0)
    assert contents(Path(compact.path)) == contents(Path(fresh.path))
    precache.use(f"{store}@{second.version}")
    write(source / "cat/0004.jpg", data)
    write(source / "dog/0039.jpg", b"no photo")
    third = build(source, store, image)
    assert (third.version, third.removed) == (first.version, 0)
    assert list(precache.open(store).keys) == keys


def test_what_tasks_run_has_a_name_also_where_pixels_of_new_samples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray names its tasks by their functions."""
    names: list[str] = []
    run_serial = executor.run_serial

    def noted(function: Callable[[Any], Any], *work: Any) -> Iterator[executor.Outcome]:
        names.append(function.__name__)
        return run_serial(function, *work)

    monkeypatch.setattr(executor, "run_serial", noted)
    source = write_jpegs(tmp_path / "in", 8)
    for number in range(2):
        precache.build(source, tmp_path / "out", precache.Recipe.image(resize=16), address="serial")
        write(source / f"cat/new{number}.jpg", encoded(cut(90 + number)))
    assert names == ["run_probe", "run_shard"] * 2
