"""Samples that take more memory than there is: found, and left as holes."""

import contextlib
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import precache
from precache.runtime.usage import available_bytes
from precache.storage.open import open_folder
from precache.store.layout import RowShape
from precache_workers.planning.catalogue import StoredRows
from precache_workers.shards.samples import BASE_MEMORY, Job
from precache_workers.shards.shard_task import LARGE_FILE, LARGE_MEMORY, ShardTask
from precache_workers.sources.kinds import open_source
from tests.support.building import (
    MARKED,
    ask,
    assert_all_but_the_marked,
    build_here,
    build_marked,
    marked_photos,
    marked_recipe,
)
from tests.support.cgroups import entering, group, limit_memory

HOARDING = marked_recipe("hoard", nbytes=0)


def recipe_of(nbytes: int) -> precache.Recipe:
    return precache.Recipe.from_dict(tomllib.loads(marked_recipe("hoard", nbytes=nbytes)))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return marked_photos(tmp_path / "in")


# --- memory that is refused ---------------------------------------------------------------------


@pytest.mark.heavy
def test_a_sample_for_which_memory_does_not_suffice_is_a_hole(photos: Path) -> None:
    store, far_too_much = photos.with_name("store"), 1 << 60
    result = ask(build_here, photos, store, recipe_of(far_too_much), {"shard_samples": 20})
    assert sorted(key for key, _ in result.holes) == sorted(MARKED)
    for _, why in result.holes:
        assert re.fullmatch(
            r"decoding it, of 1\.\d+ KB, takes more memory than its process gets", why
        )
    assert_all_but_the_marked(photos, store, marked_recipe("hoard", nbytes=far_too_much))


def test_a_task_with_a_large_file_asks_for_more_memory(photos: Path) -> None:
    job, row = Job(open_source(str(photos)), recipe_of(0)), RowShape((3, 48, 48), "uint8")
    folder = open_folder(str(photos))
    ordinary, large = (
        ShardTask(
            job, ["a", "b"], [-1, size], folder=folder, shapes={"image": row},
            rows_per_shard=20, shard=0,
        )
        for size in (LARGE_FILE, LARGE_FILE + 1)
    )  # fmt: skip
    assert ordinary.memory == BASE_MEMORY + 20 * row.nbytes
    assert large.memory == ordinary.memory + LARGE_MEMORY
    nothing = StoredRows.empty(["image"], 2)  # as of a new store
    assert replace(ordinary, stored=nothing).memory == ordinary.memory


# --- processes that are killed ------------------------------------------------------------------


@pytest.mark.heavy
def test_a_sample_for_which_the_kernel_kills_its_worker_is_a_hole(photos: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(group("memory"))
            limit_memory(folder, 800 << 20)  # of which a worker gets less than it is ended for
        except OSError as error:
            pytest.skip(f"no group of processes with a limit can be made here: {error}")
        result = build_marked(photos, HOARDING, prefix=entering(folder))
    assert sorted(key for key, _ in result["holes"]) == sorted(MARKED)
    for _, why in result["holes"]:
        assert re.fullmatch(
            r"decoding it kills the worker: its process was killed \(SIGKILL\) with up to "
            r"\d+ MB of memory",
            why,
        )
    assert_all_but_the_marked(photos, photos.with_name("store"), HOARDING)


@pytest.mark.heavy
def test_a_sample_that_takes_the_machines_memory_is_a_hole(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = available_bytes()
    if available < 6 << 30:
        pytest.skip("too little memory is free")
    least = available - (3 << 30)
    monkeypatch.setattr("precache_workers.cluster.process_engine.LEAST_FREE", least)
    recipe = precache.Recipe.from_dict(tomllib.loads(HOARDING))
    result = precache.build(str(photos), str(photos.with_name("store")), recipe, shard_samples=20)
    assert sorted(key for key, _ in result.holes) == sorted(MARKED)
    for _, why in result.holes:
        assert "it ran out of memory" in why
    assert_all_but_the_marked(photos, photos.with_name("store"), HOARDING)
