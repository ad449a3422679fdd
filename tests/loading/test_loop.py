"""What people do to loaders: resume with other batches, copy, pickle, use small sets, close."""

import copy
import itertools
import json
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import precache
from precache import Weighted
from precache.errors import UsageError
from precache.transforms import HorizontalFlip
from tests.conftest import BuiltStore
from tests.support.building import own_threads
from tests.support.loaders import assert_refused, flat, opened, rows_of, valid_rows

# --- resuming with another global batch ---------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": "block"}])
def test_a_state_goes_on_with_another_batch_size(
    image_store: BuiltStore, options: dict[str, Any]
) -> None:
    with opened(image_store, 4, **options) as loader:
        seen = flat(itertools.islice(loader, 3))
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["sample"], state["batch"]) == (0, 12, 3)
    drops = "drop_last" in options
    with opened(image_store, 5, **options) as loader:
        loader.load_state_dict(state)
        seen += flat(loader)
        assert len(seen) == len(set(seen)) == (17 if drops else 21)
        assert len(flat(loader)) == (20 if drops else 21)
    if drops:
        with opened(image_store, 10, drop_last=True) as loader:
            loader.load_state_dict(state)  # nine are left, less than a batch
            assert loader.state_dict()["epoch"] == 1


# --- small sets ---------------------------------------------------------------------------------


def test_a_set_smaller_than_a_batch_is_one_short_batch_and_marked_where_it_repeats(
    image_store: BuiltStore,
) -> None:
    for shuffle in (True, False, Weighted(np.arange(23))):
        with opened(image_store, 10**9, shuffle) as loader:
            assert [len(batch["row"]) for batch in loader] == [21]
            assert len(loader) == 1
    row, marks = valid_rows(image_store)[3], []
    for rank in range(2):
        with opened(image_store, 8, rank=rank, world_size=2, rows=[row]) as loader:
            [batch] = loader
            assert batch["row"].tolist() == [row]
            marks += batch["repeated"].tolist()
    assert marks == [False, True]
    for world, way in ((1, "give at most 21, or leave out drop_last"), (30, "leave it out")):
        said = rf"has 21 valid rows.*, of which drop_last .*: {way}$"
        with pytest.raises(UsageError, match=said):
            opened(image_store, 22, drop_last=True, rank=0, world_size=world)


# --- epochs ---


EPOCHS: dict[str, tuple[Callable[..., Any], int]] = {
    "anew": (lambda make: [_read(make()), _read(make())], 1),
    "mixed": (lambda make: [_read(precache.mix([make()])), _read(precache.mix([make()]))], 1),
    "together": (lambda make: [*zip(make(), make(), strict=True)], 0),
    "chosen": (lambda make: [_read(make(epoch=epoch)) for epoch in range(3)], 0),
    "kept": (lambda make: [[*loader] for loader in [make()] * 3], 0),
    "as stored": (lambda make: [_read(make(shuffle=False)) for _ in range(2)], 0),
    "seeds": (lambda make: [_read(make()), _read(make(seed=1))], 0),
    "another rank": (lambda make: [_read(make(rank=1, world_size=2)) for _ in range(2)], 0),
}


def test_epochs_of_loaders_made_anew_that_are_all_the_first_are_said(
    image_store: BuiltStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(epoch: int | None = None, **options: Any) -> precache.Loader:
        loader = opened(image_store, **options)
        if epoch is not None:
            loader.set_epoch(epoch)
        return loader

    for name, (epochs, said) in EPOCHS.items():
        monkeypatch.setattr("precache.loading.loop._first_epochs", set())
        caplog.clear()
        epochs(make)
        found = [m for m in caplog.messages if "begins at epoch 0 as did one before it" in m]
        assert len(found) == said, name


# --- copies -------------------------------------------------------------------------------------


def _rest(loaders: list[Any], answer: Any) -> None:
    answer.put([*map(_read, loaders)])


def _spawned(loaders: list[Any]) -> Any:
    """Read the rest of an epoch in a new process, as `ddp_spawn` does."""
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    process = spawn.Process(target=_rest, args=[loaders, answer])
    process.start()
    rows = answer.get(timeout=120)
    process.join()
    return rows


def _read(loader: Any) -> list[list[int]]:
    with loader:
        return rows_of(loader)


COPIES: list[Callable[[list[Any]], Any]] = [
    lambda loaders: [*map(_read, map(copy.copy, loaders))],
    lambda loaders: [*map(_read, copy.deepcopy(loaders))],
    lambda loaders: [*map(_read, pickle.loads(pickle.dumps(loaders)))],
    _spawned,
]


def test_a_copy_has_the_options_and_the_position(image_store: BuiltStore) -> None:
    """Of a loader, and of a mixture."""
    options: dict[str, Any] = {"seed": 3, "transform": HorizontalFlip()}
    loader, source = (
        opened(store, **options, fields=iter(["image"]), rows=iter(range(17)))
        for store in (precache.open(image_store.path), image_store.path)
    )
    with loader, precache.mix([source], seed=2) as mixture:
        loaders: list[Any] = [loader, mixture]
        batches = [iter(each) for each in loaders]
        first = [[next(each)["row"].tolist() for _ in range(2)] for each in batches]
        copies = [copied(loaders) for copied in COPIES]
        rest = [rows_of(each) for each in batches]
        assert copies == [rest] * 4
        for each, begun, more in zip(loaders, first, rest, strict=True):
            assert len(begun + more) == len(each)


# --- closing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
def test_iterators_end_with_their_loader(mixed: bool, image_store: BuiltStore) -> None:
    loader: Any = precache.Loader(image_store.path, 2)
    loader = precache.mix([loader]) if mixed else loader
    running, begun, fresh = iter(loader), iter(loader), iter(loader)
    next(running)
    next(begun)
    loader.close()
    assert own_threads() == []
    for iterator in (running, begun, fresh):
        with pytest.raises(StopIteration):
            next(iterator)
    with pytest.raises(UsageError, match=f"this {type(loader).__name__} is closed; make a new one"):
        iter(loader)
    loader.close()


def test_a_mixture_fails_if_one_of_its_sources_is_closed(image_store: BuiltStore) -> None:
    loaders = [opened(image_store) for _ in range(2)]
    with precache.mix(loaders) as mixture:
        batches = iter(mixture)
        next(batches)
        loaders[0].close()
        said = "source 0 of this mixture was closed"
        assert_refused((said, list, batches), (said, list, mixture))
    assert_refused(("source 0 is closed; make a new one", precache.mix, loaders))
