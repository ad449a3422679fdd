"""Builds of each kind of change, killed: they finish, and the version before is readable always."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from tests.support.building import (
    ask,
    build_here,
    build_until,
    changes,
    contents,
    cut,
    encoded,
    end,
    pixels,
    poll,
    remains,
    start,
    write,
    write_jpegs,
)

HEAVY = pytest.mark.heavy
OPTIONS = {"shard_samples": 8}


def recipe_of(codec: str = "raw", *after: dict[str, Any], thumb: int = 16) -> precache.Recipe:
    decode = {"op": "decode"}
    image = {"ops": [decode, {"op": "resize", "size": [150, 150]}, *after], "codec": codec}
    small = {"ops": [decode, {"op": "resize", "size": [thumb, thumb]}], "codec": "zstd"}
    return precache.Recipe.from_dict({"fields": {"image": image, "small": small}})


def as_it_was(source: Path) -> None:
    """Nothing changes but the recipe."""


def changed(source: Path) -> None:
    write(source / "cat/0006.jpg", encoded(cut(100)))
    write(source / "dog/0011.jpg", b"no photo")


def added(source: Path) -> None:
    for number in range(5):
        write(source / f"cat/new{number}.jpg", encoded(cut(200 + number)))


def removed(source: Path) -> None:
    (source / "cat/0004.jpg").unlink()
    (source / "dog/0013.jpg").unlink()


CROP = {"op": "center_crop", "size": [140, 130]}
KINDS: dict[str, tuple[Callable[[Path], None], precache.Recipe]] = {
    "changed": (changed, recipe_of()),
    "added": (added, recipe_of()),
    "removed": (removed, recipe_of()),
    "codec": (as_it_was, recipe_of("image")),
    "base": (as_it_was, recipe_of("raw", CROP)),
    "one field": (as_it_was, recipe_of(thumb=12)),
}


def read_on(store: Path, expected: Path, seen: Path, done: Path, undoing: Lock) -> None:
    """Read every row of the version before, again and again until `done`; each must be right.

    The log of commits, which no command shortens and this test does, is read under `undoing`.
    """

    def opened(**options: Any) -> precache.Loader:
        with undoing:
            return precache.Loader(store, batch_size=5, device="cpu", fields=["image"], **options)

    right = dict(np.load(expected))
    loader = opened(shuffle=False)
    while True:
        last = done.exists()
        with opened() as anew:
            for each in (loader, anew):
                rows = 0
                for batch in each:
                    for key, row in zip(
                        each.keys(batch["row"]), batch["image"].numpy(), strict=True
                    ):
                        assert np.array_equal(row, right[key]), key
                        rows += 1
                assert rows == len(right)
        seen.touch()
        if last:
            loader.close()
            return


@pytest.mark.parametrize(
    ("kind", "kills"),
    [("changed", 2), *(pytest.param(kind, 12, marks=HEAVY) for kind in KINDS)],
)
def test_a_change_killed_at_any_moment_finishes_and_its_parent_stays(
    kind: str, kills: int, tmp_path: Path
) -> None:
    source, store = write_jpegs(tmp_path / "in", 24, classes=("cat", "dog")), tmp_path / "store"
    change, recipe = KINDS[kind]
    first = build_here(source, store, recipe_of(), OPTIONS)
    np.savez(tmp_path / "expected.npz", **pixels(store))
    change(source)
    shutil.copytree(store, tmp_path / "undisturbed")
    result = build_here(source, tmp_path / "undisturbed", recipe, OPTIONS)
    shutil.copytree(store, tmp_path / "counted")
    total = ask(changes, source, tmp_path / "counted", recipe, OPTIONS)

    seen, done = tmp_path / "seen", tmp_path / "done"
    undoing = get_context("forkserver").Lock()
    pinned = Path(f"{store}@{first.version[:12]}")
    reader = start(read_on, pinned, tmp_path / "expected.npz", seen, done, undoing)
    draw = random.Random(kind)
    try:
        for _ in range(kills):
            process = start(build_until, draw.randrange(total), source, store, recipe, OPTIONS)
            status = end(process)
            assert status in (0, -signal.SIGKILL)
            if not status or draw.random() < 0.3:  # done before it came to that: from the start
                build_here(source, store, recipe, OPTIONS)
                assert contents(store / result.version) == contents(Path(result.path))
                shutil.rmtree(store / result.version)
                with undoing:
                    max((store / "commits").iterdir()).unlink()
        build_here(source, store, recipe, OPTIONS)
        poll(seen.exists, "the reader's first round")
    finally:
        done.touch()
    assert end(reader) == 0
    assert contents(store / result.version) == contents(Path(result.path))
    assert remains(store) == []
    assert all(precache.verify(version).ok for version in (store, first.path))
