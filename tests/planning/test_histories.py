"""Any history of a store: the source and the recipe are edited, builds end or are killed, versions
are collected or made current again. The current version is always whole, and what it should be.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import precache
from tests.support.building import (
    build_here,
    build_until,
    collect_until,
    cut,
    encoded,
    end,
    labels,
    pixels,
    start,
    write,
)

OPTIONS: dict[str, Any] = {"shard_samples": 4, "max_failures": 100}
BROKEN = -1
"""The number of a photo that cannot be decoded."""
NBYTES = 2000
"""Size of each photo, padded, so that size and time tell none from another."""
CHANGES = 70
"""About as many as a build makes in its store."""

Rows = dict[str, dict[str, np.ndarray]]
"""Field -> key -> row."""


def mean_of(array: np.ndarray) -> np.ndarray:
    return array.mean((0, 1)).astype(np.float32)


def recipe_of(codec: str, *after: dict[str, Any], **fields: Any) -> precache.Recipe:
    """Images of 16 x 16, four to a chunk in shards of four."""
    ops = [{"op": "decode"}, {"op": "resize", "size": [16, 16]}, *after]
    image = {"ops": ops, "codec": codec, "variants": 1}
    return precache.Recipe.from_dict({"fields": {"image": image, **fields}})


MEAN = {"op": "function", "function": "tests.planning.test_histories:mean_of", "version": "1"}
MEANS = {"ops": [{"op": "decode"}, MEAN | {"dtype": "float32", "shape": [3]}], "codec": "zstd"}
LARGE = {"ops": [{"op": "decode"}, {"op": "resize", "size": [150, 150]}], "codec": "image"}
CROP = {"op": "center_crop", "size": [12, 10]}
FLIP = {"op": "horizontal_flip"}
PIPELINES = (
    recipe_of("image"),
    recipe_of("zstd"),
    recipe_of("raw"),
    recipe_of("image", CROP),
    recipe_of("image", CROP, FLIP),
    recipe_of("image", mean=MEANS),
    recipe_of("raw", mean=MEANS),
    recipe_of("image", large=LARGE),
)

numbers = st.integers(0, 999)


class Histories(RuleBasedStateMachine):
    """Two folders of the same names, a recipe and a store; what a build from scratch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="precache-history-"))
        self.source, self.store = self.root / "source", self.root / "store"
        self.photos_of: dict[Path, dict[str, int]] = {self.source: {}, self.root / "other": {}}
        self.recipe = 0
        self.touches = 0
        self.right: dict[str, tuple[Rows, dict[str, int]]] = {}
        self.from_scratch: dict[Any, tuple[Rows, dict[str, int]]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    # --- the source and the recipe --------------------------------------------------------------

    @property
    def photos(self) -> dict[str, int]:
        """Key -> number, of the folder that is built from now."""
        return self.photos_of[self.source]

    def _write(self, key: str, number: int) -> None:
        photo = b"no photo" if number == BROKEN else encoded(cut(number, (24, 18)))
        assert len(photo) <= NBYTES
        write(self.source / key, photo.ljust(NBYTES, b"\0"))
        self.photos[key] = number

    def _draw(self, number: int) -> str:
        return sorted(self.photos)[number % len(self.photos)]

    @initialize(count=st.integers(5, 11))
    def begin(self, count: int) -> None:
        for first in (0, 500):
            for number in range(count):
                self._write(f"{'cat' if number % 2 else 'dog'}/{number:03d}.jpg", first + number)
            self.build_from_the_other_folder()

    @rule()
    def build_from_the_other_folder(self) -> None:
        [self.source] = self.photos_of.keys() - {self.source}

    @rule(number=numbers, folder=st.sampled_from(["cat", "dog", "eel"]))
    def add(self, number: int, folder: str) -> None:
        self._write(f"{folder}/{number:03d}.jpg", number)

    @precondition(lambda self: len(self.photos) > 3)
    @rule(number=numbers)
    def remove(self, number: int) -> None:
        key = self._draw(number)
        (self.source / key).unlink()
        del self.photos[key]

    @rule(number=numbers, other=numbers)
    def change(self, number: int, other: int) -> None:
        key = self._draw(number)
        self._write(key, other)
        self._touch(key)

    @rule(number=numbers, other=numbers)
    def rewrite(self, number: int, other: int) -> None:
        key = self._draw(number)
        before = (self.source / key).stat().st_mtime_ns
        self._write(key, other)
        os.utime(self.source / key, ns=(before, before))

    @precondition(lambda self: sum(each != BROKEN for each in self.photos.values()) > 3)
    @rule(number=numbers)
    def spoil(self, number: int) -> None:
        self._write(self._draw(number), BROKEN)

    @rule(number=numbers)
    def touch(self, number: int) -> None:
        self._touch(self._draw(number))

    def _touch(self, key: str) -> None:
        self.touches += 1
        os.utime(self.source / key, (self.touches, self.touches))

    @rule(recipe=st.integers(0, len(PIPELINES) - 1))
    def edit_the_recipe(self, recipe: int) -> None:
        self.recipe = recipe

    # --- builds ---------------------------------------------------------------------------------

    @rule(again=st.booleans())
    def build(self, again: bool) -> None:
        right = self._from_scratch()
        options = {**OPTIONS, "retry_failed": again}
        result = build_here(self.source, self.store, PIPELINES[self.recipe], options)
        assert precache.open(self.store).id == result.version
        assert_same(self.right.setdefault(result.version, right), right)

    @rule(at=st.integers(0, CHANGES), again=st.booleans())
    def build_and_be_killed(self, at: int, again: bool) -> None:
        right = self._from_scratch()
        options = {**OPTIONS, "retry_failed": again}
        recipe = PIPELINES[self.recipe]
        status = end(start(build_until, at, self.source, self.store, recipe, options))
        assert status in (0, -signal.SIGKILL)
        if self._has_versions():
            self.right.setdefault(precache.open(self.store).id, right)

    def _has_versions(self) -> bool:
        return any((self.store / "commits").glob("*.json"))

    def _from_scratch(self) -> tuple[Rows, dict[str, int]]:
        """What a build into a store of its own makes of the source by the recipe."""
        state = self.recipe, frozenset(self.photos.items())
        if state not in self.from_scratch:
            anew = self.root / "anew"
            shutil.rmtree(anew, ignore_errors=True)
            build_here(self.source, anew, PIPELINES[self.recipe], OPTIONS)
            self.from_scratch[state] = read(anew)
        return self.from_scratch[state]

    # --- versions -------------------------------------------------------------------------------

    @precondition(lambda self: self.right)
    @rule(keep=st.integers(1, 3))
    def collect(self, keep: int) -> None:
        precache.gc(self.store, keep=keep, older_than=0)

    @precondition(lambda self: self.right)
    @rule(at=st.integers(0, CHANGES))
    def collect_and_be_killed(self, at: int) -> None:
        assert end(start(collect_until, at, self.store)) in (0, -signal.SIGKILL)

    @precondition(lambda self: self.right)
    @rule(number=numbers)
    def use_another(self, number: int) -> None:
        there = sorted(each.version for each in precache.versions(self.store).versions)
        precache.use(f"{self.store}@{there[number % len(there)]}")

    @invariant()
    def the_current_version_is_whole_and_right(self) -> None:
        if not self.right:
            return
        version = precache.open(self.store)
        assert precache.verify(self.store).ok
        assert_same(read(self.store), self.right[version.id])


def read(store: Path) -> tuple[Rows, dict[str, int]]:
    """Every row of the current version that is no hole, by field and key; labels by key."""
    fields = precache.open(store).fields
    return {name: pixels(store, name) for name in fields}, labels(store)


def assert_same(found: tuple[Rows, dict[str, int]], right: tuple[Rows, dict[str, int]]) -> None:
    assert found[1] == right[1]
    assert found[0].keys() == right[0].keys()
    for name, rows in right[0].items():
        assert found[0][name].keys() == rows.keys()
        assert all(np.array_equal(found[0][name][key], row) for key, row in rows.items())


def test_any_short_history() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=6, stateful_step_count=15, derandomize=True)
    )


@pytest.mark.heavy
def test_any_history() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=40, stateful_step_count=40, derandomize=False)
    )
