"""Samples that failed, tried again: all else is taken over, and a version is what it was."""

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.cli.main import main
from precache.errors import BuildError
from tests.support import building
from tests.support.building import (
    LONG_AGO,
    ask,
    assert_same,
    build_as_anyone,
    build_here,
    contents,
    cut,
    encoded,
    end,
    pixels,
    remains,
    start,
    write,
    write_jpegs,
)

OPTIONS: dict[str, Any] = {"shard_samples": 8, "max_failures": 5}


def moody(array: np.ndarray, folder: str) -> np.ndarray:
    """The array as it is, unless there is a file that is named as it is wide."""
    if Path(folder, str(array.shape[1])).exists():
        raise ValueError("not today")
    if Path(folder, f"deadly{array.shape[1]}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return array


def recipe_of(folder: Path) -> precache.Recipe:
    op = {"op": "function", "function": "tests.planning.test_work_plan:moody", "version": "1"}
    ops = [{"op": "decode"}, op | {"params": {"folder": str(folder)}}]
    return precache.Recipe.from_dict(
        {"fields": {"image": {"ops": [*ops, {"op": "resize", "size": [150, 150]}]}}}
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Thirty photos; two of them, 61 and 62 pixels wide, meet a bad mood."""
    write_jpegs(tmp_path / "in", 28, classes=("cat", "dog"))
    for width in (61, 62):
        write(tmp_path / f"in/cat/wide{width}.jpg", encoded(cut(width, (width, 48))))
        write(tmp_path / f"moods/{width}", b"")
    return tmp_path / "in"


build = functools.partial(building.build, **OPTIONS)


def versions(store: Path) -> set[str]:
    return {path.name for path in store.iterdir()} - {"commits", "_listings"}


def assert_as_if_built_anew(result: Any, source: Path, recipe: precache.Recipe) -> None:
    """Every object of the field, to the last byte, and every row by its key."""
    store = Path(result.path).parent
    anew = build(source, store.parent / "anew", recipe)
    assert (result.mean, result.std, result.holes) == (anew.mean, anew.std, anew.holes)
    assert contents(Path(result.path, "image")) == contents(Path(anew.path, "image"))
    assert_same(pixels(store), pixels(store.parent / "anew"))


def test_what_failed_is_tried_until_nothing_is_left(source: Path, tmp_path: Path) -> None:
    recipe, store = recipe_of(tmp_path / "moods"), tmp_path / "store"
    first = build(source, store, recipe)
    before = contents(Path(first.path))
    assert (first.failed, first.mended) == (2, 0)
    still = build(source, store, recipe, retry_failed=True)
    assert (still.version, still.mended, still.holes) == (first.version, 0, first.holes)
    assert (versions(store), remains(store)) == ({first.version}, [])

    (tmp_path / "moods/61").unlink()
    assert build(source, store, recipe).version == first.version, "nobody asked for it"
    options = {**OPTIONS, "address": "serial", "retry_failed": True, "timing": False}
    planned = precache.plan(source, store, recipe, **options)
    assert (planned.state, planned.rows_retried, planned.rows_computed) == ("build", 2, 2)
    second = build(source, store, recipe, retry_failed=True)
    assert planned.version == second.version != first.version
    assert (second.failed, second.mended, second.rows_reused) == (1, 1, 28)
    assert [key for key, _ in second.holes] == ["cat/wide62.jpg"]
    assert_as_if_built_anew(second, source, recipe)
    assert contents(Path(first.path)) == before

    for retry_failed in (False, True):
        same = build(source, store, recipe, retry_failed=retry_failed)
        assert (same.version, same.mended) == (second.version, 0)
    (tmp_path / "moods/62").unlink()
    write(source / "cat/new.jpg", encoded(cut(900)))
    grown = build(source, store, recipe)
    assert (grown.samples, grown.failed, grown.rows_reused) == (31, 1, 30)
    write(source / "cat/newer.jpg", encoded(cut(901)))
    third = build(source, store, recipe, retry_failed=True)
    assert (third.samples, third.failed, third.mended, third.rows_reused) == (32, 0, 1, 30)
    assert build(source, store, recipe, retry_failed=True).version == third.version
    made = (first, second, grown, third)
    assert versions(store) == {each.version for each in made}
    assert precache.verify(store).ok


def test_a_retry_that_was_killed_says_what_is_left_to_try(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, store, moods = recipe_of(tmp_path / "moods"), tmp_path / "store", tmp_path / "moods"
    options = {"keep_order": True, "shard_samples": 15}  # each of the two in a shard of its own
    first = build(source, store, recipe, **options)
    retry: dict[str, Any] = {**OPTIONS, **options, "retry_failed": True}
    (moods / "62").rename(moods / "deadly62")
    assert end(start(build_here, source, store, recipe, retry)) == -signal.SIGKILL
    (moods / "deadly62").rename(moods / "62")

    still = build(source, store, recipe, **retry, progress=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "Tried again: 1 sample that failed before; 1 more are in shards that" in said
    assert (still.version, still.mended, still.failed) == (first.version, 0, 2)
    assert still.cpu_seconds > 0

    (moods / "61").unlink()
    (moods / "62").rename(moods / "deadly62")
    assert end(start(build_here, source, store, recipe, retry)) == -signal.SIGKILL
    (moods / "deadly62").unlink()
    second = build(source, store, recipe, **retry)
    assert (second.mended, second.failed) == (2, 0)
    assert (second.shards, second.shards_skipped) == (2, 1)
    assert precache.verify(store).ok


def test_a_file_mended_in_place_is_seen(source: Path, tmp_path: Path) -> None:
    """Of the same size and time, so that its ctime alone tells."""
    photo, store = encoded(cut(900)), tmp_path / "store"
    write(source / "dog/broken.jpg", bytes(len(photo)))
    recipe = precache.Recipe.image(resize=40, crop=40)
    first = build(source, store, recipe)
    assert first.failed == 1
    write(source / "dog/broken.jpg", photo)
    assert build(source, store, recipe, ignore_ctime=True).version == first.version
    second = build(source, store, recipe, ignore_ctime=True, retry_failed=True)
    assert (second.failed, second.mended) == (0, 1)
    assert_as_if_built_anew(second, source, recipe)
    third = build(source, store, recipe)
    assert (third.failed, third.version == first.version) == (0, False)
    assert_as_if_built_anew(third, source, recipe)


def test_a_file_that_could_not_be_read_is_fetched_again(source: Path, tmp_path: Path) -> None:
    """While it cannot, it stays a hole, and stops nothing."""
    recipe, store = precache.Recipe.image(resize=40, crop=40), tmp_path / "store"
    locked = source / "cat/0004.jpg"
    locked.chmod(0)
    first = ask(build_as_anyone, source, store, recipe, {**OPTIONS, "accept_missing": True})
    assert [key for key, _ in first.holes] == ["cat/0004.jpg"]
    again = {**OPTIONS, "retry_failed": True}
    still = ask(build_as_anyone, source, store, recipe, again)
    assert (still.version, still.holes) == (first.version, first.holes)
    locked.chmod(0o644)
    assert locked.stat().st_mtime == LONG_AGO or os.utime(locked, (LONG_AGO, LONG_AGO)) is None
    second = ask(build_as_anyone, source, store, recipe, again)
    assert (second.failed, second.mended) == (0, 1)
    assert_as_if_built_anew(second, source, recipe)


def test_the_command_says_what_came_of_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source / "dog/broken.jpg", b"no photo")
    line = ["build", str(source), str(tmp_path / "store"), "--resize", "40", "--crop", "40"]
    line += ["--address", "serial"]
    assert main(line) == 0
    capsys.readouterr()
    assert main([*line, "--retry-failed"]) == 0
    said = capsys.readouterr().err
    assert "Tried again: 1 sample that failed before" in said
    assert "Nothing was mended" in said
    assert main([*line, "--dry-run", "--retry-failed"]) == 0
    planned = capsys.readouterr().out
    assert "tried again" in planned
    assert "1 sample that failed before" in planned
    write(source / "dog/broken.jpg", encoded(cut(5)))
    os.utime(source / "dog/broken.jpg", (LONG_AGO, LONG_AGO))
    assert main([*line, "--retry-failed"]) == 0
    assert "0 failed, 1 mended" in capsys.readouterr().out


# --- rows of a shard ----------------------------------------------------------------------------


LARGE = precache.Recipe.image(resize=150, crop=150)


def files(folder: Path, count: int) -> Path:
    """So many photos of a large and growing set, in one class."""
    return write_jpegs(folder, count, classes=("cat",))


def test_shards_stay_where_rows_are_reused_and_are_chosen_anew_elsewhere(tmp_path: Path) -> None:
    source, store = files(tmp_path / "in", 5), tmp_path / "store"
    trial = building.build(source, store, LARGE)
    assert trial.shards == 5
    files(source, 100)
    recipe = precache.Recipe.image(resize=160, crop=160)
    assert building.build(source, store, recipe).shards == 17
    whole = building.build(source, store, LARGE)
    assert (whole.shards, whole.shards_reused, whole.rows_reused) == (17, 0, 5)
    assert list(precache.open(store).keys)[:5] == list(precache.open(trial.path).keys)
    files(source, 110)
    grown = building.build(source, store, LARGE)
    assert (grown.shards, grown.shards_reused) == (19, 16)


def test_a_plan_says_when_compact_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store = files(tmp_path / "in", 20), tmp_path / "store"
    building.build(source, store, LARGE)
    for count in (60, 90):
        files(source, count)
        building.build(source, store, LARGE)
    command = ["plan", str(source), str(store), "--resize=150", "--crop=150", "--no-timing"]
    assert main(command) == 0
    assert "90 shards; --compact would give 18" in capsys.readouterr().out
    compact = building.build(source, store, LARGE, compact=True)
    assert compact.shards == 18
    assert precache.plan(source, store, LARGE, address="serial").shards_compact is None


# --- samples that were removed ------------------------------------------------------------------


def test_samples_that_were_removed_are_counted_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, store = files(tmp_path / "in", 30), tmp_path / "store"
    write(source / "cat/broken.jpg", b"none")
    options: dict[str, Any] = {"address": "serial", "shard_samples": 8}
    precache.build(source, store, LARGE, **options)
    for number in range(10):
        (source / f"cat/{number:04d}.jpg").unlink()
    capfd.readouterr()
    plan = precache.plan(source, store, LARGE, timing=False, **options)
    path = tmp_path / "report.json"
    result = precache.build(source, store, LARGE, report=path, progress=True, **options)
    report = json.loads(path.read_text())
    assert (plan.samples, plan.removed, result.samples, result.removed) == (21, 10, 21, 10)
    assert (report["images"], report["images_failed"], len(report["failures"])) == (21, 1, 1)
    assert sum(line["images"] for line in report["timeline"]) == 21
    assert "21 samples in 1 class" in capfd.readouterr().err
    broken = {**options, "max_failures": 0}
    with pytest.raises(BuildError, match="1 of 21 samples failed"):
        precache.build(source, store, LARGE, **broken)
