"""A loader and the commits of its store: it stays, or it follows from epoch to epoch."""

import copy
import functools
import json
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

import precache
from precache import Reading, Weighted
from precache.errors import StoreError
from tests.support.building import (
    build_here,
    cut,
    encoded,
    end,
    pixels,
    poll,
    start,
    write,
    write_jpegs,
)
from tests.support.loaders import assert_refused, opened, rows_of

RECIPES = [precache.Recipe.image(resize=side, crop=40) for side in (40, 48, 44)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jpegs(tmp_path / "in", 10)


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    build_here(source, tmp_path / "store", RECIPES[0])
    return tmp_path / "store"


def check(loader: precache.Loader, batches: Any, right: dict[str, np.ndarray]) -> int:
    """That each row is the one that its key has; how many there are."""
    rows = 0
    for batch in batches:
        for key, image in zip(loader.keys(batch["row"]), batch["image"], strict=True):
            assert np.array_equal(image.numpy(), right[key])
            rows += 1
    return rows


def test_by_default_a_commit_changes_nothing_and_its_states_name_the_version(
    source: Path, store: Path
) -> None:
    right = pixels(store)
    with opened(store, 3) as loader:
        version = loader.version.id
        batches = iter(loader)
        rows = check(loader, [next(batches)], right)
        build_here(source, store, RECIPES[1])
        assert rows + check(loader, batches, right) == 10
        assert check(loader, loader, right) == 10
        state = loader.state_dict()
        assert loader.version.id == state["version"] == version
    with opened(store, 3) as loader:
        said = rf"'STORE@{version}', or start a new epoch"
        assert_refused((said, loader.load_state_dict, state))
    with opened(f"{store}@{version}", 3) as loader:
        loader.load_state_dict(state)


@pytest.mark.parametrize("refresh", [None, "epoch"])
def test_a_copy_reads_the_version_that_its_position_is_of(
    source: Path, store: Path, refresh: Any
) -> None:
    old = pixels(store)
    with opened(store, 3, refresh=refresh) as loader:
        pickled = {0: pickle.dumps(loader)}
        batches = iter(loader)
        next(batches)
        pickled[1] = pickle.dumps(loader)
        build_here(source, store, RECIPES[1])
        copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickled[1])]
        rest = rows_of(batches)
        for other in copies:
            with other:
                assert other.version.id == loader.version.id
                batches = [*other]
                assert rows_of(batches) == rest
                assert check(other, batches, old) == 7
        with pickle.loads(pickled[0]) as fresh:
            assert check(fresh, fresh, pixels(store) if refresh else old) == 10
        named = [f"{store}@{loader.version.id[:6]}", loader.version.path, f"{store}/"]
    for uri in named:
        with opened(uri, 3) as one, copy.copy(one) as other:
            assert other.version.id == one.version.id


@pytest.mark.parametrize("options", [{}, {"shuffle": "block", "reading": Reading(access="pread")}])
def test_it_follows_at_the_beginning_of_an_epoch(
    source: Path, store: Path, options: dict[str, Any]
) -> None:
    old = pixels(store)
    with opened(store, 3, refresh="epoch", **options) as loader:
        first = loader.version.id
        batches = iter(loader)
        rows = check(loader, [next(batches)], old)
        write(source / "fox/0099.jpg", encoded(cut(99)))
        second = build_here(source, store, RECIPES[1]).version
        assert rows + check(loader, batches, old) == 10
        assert loader.version.id == first
        new, spent = pixels(store), loader.counters
        assert check(loader, loader, new) == 11
        assert loader.counters.threads > spent.threads > 0
        assert loader.version.id == loader.state_dict()["version"] == second
        precache.gc(store, keep=1, older_than=0)
        ahead, later = iter(loader), iter(loader)
        assert check(loader, ahead, new) == 11
        build_here(source, store, RECIPES[2])
        assert check(loader, later, pixels(store)) == 11
        assert loader.state_dict()["epoch"] == 4


def test_from_a_bucket_by_way_of_a_disk_cache(source: Path, tmp_path: Path) -> None:
    url, cache = "memory://refresh/store", precache.Cache(tmp_path / "cache", 2_000_000)
    precache.build(source, url, RECIPES[0], address="serial")
    old = pixels(url)
    with opened(url, 3, refresh="epoch", cache=cache) as loader:
        assert check(loader, loader, old) == 10
        batches = iter(loader)
        assert check(loader, [next(batches)], old) == 3
        precache.build(source, url, RECIPES[1], address="serial")
        assert check(loader, loader, pixels(url)) == 10
        assert list(batches) == []  # that of the epoch before has ended
        stats = loader.stats()
    assert stats.batches == 8  # without the step that was left
    assert stats.fetched.objects >= 4  # two shards of each version


@pytest.mark.parametrize("kind", ["shape", "dtype", "field", "rows", "classes"])
def test_one_that_does_not_fit_is_not_taken(
    source: Path, store: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ops = RECIPES[0].to_dict()["fields"]["image"]["ops"]
    half = {"op": "to_dtype", "dtype": "float16"}
    fields: dict[str, Any] = {"dtype": {"image": [*ops, half]}, "field": {"picture": ops}}
    recipes = {
        "shape": precache.Recipe.image(resize=40, crop=36), "rows": RECIPES[1],
        "classes": RECIPES[0], **{
            name: precache.Recipe.from_dict({"fields": {n: {"ops": o} for n, o in each.items()}})
            for name, each in fields.items()
        },
    }  # fmt: skip
    right = pixels(store)
    with opened(store, 10, refresh="epoch", drop_last=True) as loader:
        version = loader.version.id
        assert check(loader, loader, right) == 10
        if kind == "rows":
            next(source.glob("cat/*")).unlink()
        if kind == "classes":
            write(source / "ant/0.jpg", encoded(cut(77)))
        build_here(source, store, recipes[kind])
        assert check(loader, loader, right) == 10
        assert loader.version.id == version
    assert f"the next epoch reads version {version[:12]} again: " in caplog.text


def test_a_state_names_the_version_that_it_goes_on_with(source: Path, store: Path) -> None:
    old = pixels(store)
    with opened(store, 3, refresh="epoch") as loader:
        first = loader.version.id
        check(loader, [next(iter(loader))], old)
        state = json.loads(json.dumps(loader.state_dict()))
    second = build_here(source, store, RECIPES[1]).version
    with opened(store, 3, refresh="epoch") as loader:
        assert loader.version.id == second
        said = "the saved state has seed=1 and this loader has 0"
        assert_refused((said, loader.load_state_dict, {**state, "seed": 1}))
        assert loader.version.id == second
        loader.load_state_dict(state)
        assert loader.version.id == first
        assert check(loader, loader, old) == 7
        assert check(loader, loader, pixels(store)) == 10
        assert loader.version.id == second
    precache.gc(store, keep=1, older_than=0)
    with opened(store, 3, refresh="epoch") as loader:
        assert_refused((f"{first} is gone", loader.load_state_dict, state), error=StoreError)


def test_what_it_does_not_go_with(store: Path) -> None:
    version = precache.open(store)
    make = functools.partial(opened, refresh="epoch")
    for uri in (f"{store}@{version.id[:6]}", version.path):
        assert_refused(("refresh='epoch' follows a store", make, uri))
    for options in (
        {"rows": [1, 2]},
        {"shuffle": Weighted(np.ones(10))},
        {"reading": Reading(resident="host")},
    ):
        assert_refused(("need one version", functools.partial(make, store, **options)))
    said = "refresh is 'step'; choose one of None, epoch"
    assert_refused((said, functools.partial(opened, store, refresh="step")))
    with make(store, 2, rank=0, world_size=2) as loader:
        assert_refused((r"with 2 ranks needs torch\.distributed", next, iter(loader)))


def rank_of_two(rank: int, store: Path, folder: Path) -> None:
    """Three epochs; the versions read, and their rows, go into a file."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    tell = logging.Handler()
    # A handler of one method, for a log.
    tell.emit = lambda record: (folder / "followed").touch()  # type: ignore[method-assign]
    logging.getLogger("precache.loading.loader").addHandler(tell)
    logging.getLogger("precache.loading.loader").setLevel(logging.INFO)
    read = []
    with precache.Loader(store, batch_size=2, device="cpu", refresh="epoch") as loader:
        for epoch in range(3):
            poll((folder / f"go-{rank}-{epoch}").exists, f"epoch {epoch}")
            rows = [row for batch in loader for row in batch["row"].tolist()]
            read.append([loader.version.id, rows])
            (folder / f"done-{rank}-{epoch}").touch()
    (folder / f"read-{rank}").write_text(json.dumps(read))
    torch.distributed.destroy_process_group()


def test_all_ranks_read_the_same_version(source: Path, store: Path, tmp_path: Path) -> None:
    versions = [precache.open(store).id]
    processes = [start(rank_of_two, rank, store, tmp_path) for rank in (0, 1)]

    def go(rank: int, epoch: int) -> None:
        (tmp_path / f"go-{rank}-{epoch}").touch()

    def done(epoch: int) -> None:
        for rank in (0, 1):
            poll((tmp_path / f"done-{rank}-{epoch}").exists, f"rank {rank}, epoch {epoch}")

    go(0, 0)
    go(1, 0)
    done(0)
    versions.append(build_here(source, store, RECIPES[1]).version)
    go(0, 1)
    poll((tmp_path / "followed").exists, "the decision of rank 0")
    versions.append(build_here(source, store, RECIPES[2]).version)  # rank 1 comes after it
    go(1, 1)
    done(1)
    go(0, 2)
    go(1, 2)
    assert [end(process) for process in processes] == [0, 0]
    told = [json.loads((tmp_path / f"read-{rank}").read_text()) for rank in (0, 1)]
    for rank in (0, 1):
        assert [version for version, _ in told[rank]] == versions
    for epoch in range(3):
        assert sorted(told[0][epoch][1] + told[1][epoch][1]) == list(range(10))


def rank_that_opens_when_told(
    rank: int, port: int, store: Path, folder: Path, refresh: Any
) -> None:
    """An epoch of a loader that is made once the file ``open-RANK`` is there."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    shared = torch.distributed.TCPStore("127.0.0.1", port, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=shared, rank=rank, world_size=2)
    poll((folder / f"open-{rank}").exists, f"rank {rank}")
    with precache.Loader(store, batch_size=2, device="cpu", refresh=refresh) as loader:
        (folder / f"opened-{rank}").touch()
        torch.distributed.barrier()
        try:
            told: Any = sorted(key for batch in loader for key in loader.keys(batch["row"]))
        except StoreError as error:
            told = str(error)
    (folder / f"told-{rank}").write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("refresh", [None, "epoch"])
def test_ranks_that_opened_different_versions(
    refresh: str | None, source: Path, store: Path, tmp_path: Path
) -> None:
    """A commit comes between: they read one version, or none."""
    old = precache.open(store).id
    shared = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = shared.port, store, tmp_path, refresh
    processes = [start(rank_that_opens_when_told, rank, *arguments) for rank in (0, 1)]
    (tmp_path / "open-1").touch()
    poll((tmp_path / "opened-1").exists, "rank 1")
    new = build_here(source, store, RECIPES[1]).version
    (tmp_path / "open-0").touch()
    assert [end(process) for process in processes] == [0, 0]
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in (0, 1)]
    if refresh:
        assert sorted([*told[0], *told[1]]) == sorted(precache.open(store).keys)
        return
    refused = [text for text in told if isinstance(text, str)]
    assert len(refused) == 1  # the one that came second
    assert old in refused[0]
    assert new in refused[0]
    assert "a build committed in between" in refused[0]
    advice = re.search("open '(.+)' on all ranks", refused[0])
    assert advice
    assert precache.open(advice[1]).id in (old, new)
