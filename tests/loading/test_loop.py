"""What people do to loaders: resume with other batches, copy, pickle, use small sets, close."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache import Weighted
from precache.errors import UsageError
from precache.sampling.order import Order, Shuffle, ValidRows
from precache.transforms import HorizontalFlip
from tests.conftest import BuiltStore
from tests.support.building import own_threads

# --- resuming with another global batch ---------------------------------------------------------


@given(
    st.integers(1, 60),
    st.sampled_from([(1, 5), (2, 3), (4, 1), (3, 7)]),
    st.sampled_from([(1, 4), (2, 5), (3, 1)]),
    st.sampled_from([None, Shuffle(), Shuffle("block", 7, 2)]),
    st.data(),
)
def test_rows_received_do_not_come_again_and_all_others_do(
    rows: int,
    before: tuple[int, int],
    after: tuple[int, int],
    shuffle: Shuffle | None,
    data: st.DataObject,
) -> None:
    """On any other number of ranks, with any other batch size."""

    def orders(world: int, batch: int) -> list[Order]:
        valid = ValidRows(rows, np.array([], np.int64))
        return [Order(valid, batch, shuffle, rank=r, world_size=world) for r in range(world)]

    old, new = orders(*before), orders(*after)
    steps = data.draw(st.integers(0, old[0].batches() - 1))
    place = steps * old[0].global_batch
    seen = [row for one in old for part in list(one.epoch(3))[:steps] for row in part.tolist()]
    rest = [list(one.epoch(3, place)) for one in new]
    assert {len(parts) for parts in rest} == {new[0].batches(place)}
    assert len({tuple(map(len, parts)) for parts in rest}) == 1
    starts = range(place, new[0].stop(place), new[0].global_batch)
    own = []
    for one, parts in zip(new, rest, strict=True):
        for start, part in zip(starts, parts, strict=True):
            again = one.repeated(start)
            own += part[~again].tolist() if again is not None else part.tolist()
    assert sorted(seen + own) == list(range(rows))


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": "block"}])
def test_a_state_goes_on_with_another_batch_size(
    image_store: BuiltStore, options: dict[str, Any]
) -> None:
    def rows_of(loader: Any, count: int = 99) -> list[int]:
        return [row for batch in itertools.islice(loader, count) for row in batch["row"].tolist()]

    with precache.Loader(image_store.path, 4, **options) as loader:
        seen = rows_of(loader, 3)
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["sample"], state["batch"]) == (0, 12, 3)
    with precache.Loader(image_store.path, 5, **options) as loader:
        loader.load_state_dict(state)
        seen += rows_of(loader)
        assert len(seen) == len(set(seen)) == (17 if options.get("drop_last") else 21)
        assert len(rows_of(loader)) == (20 if options.get("drop_last") else 21)
    with precache.Loader(image_store.path, 10, drop_last=True) as loader:
        if options.get("drop_last"):
            loader.load_state_dict(state)  # nine are left, less than a batch
            assert loader.state_dict()["epoch"] == 1


# --- small sets ---------------------------------------------------------------------------------


def test_a_set_smaller_than_a_batch_is_one_short_batch_and_marked_where_it_repeats(
    image_store: BuiltStore,
) -> None:
    for shuffle in (True, False, Weighted(np.arange(23))):
        with precache.Loader(image_store.path, 256, shuffle) as loader:
            assert [len(batch["row"]) for batch in loader] == [21]
            assert len(loader) == 1
    row = int(np.flatnonzero(image_store.open().valid)[3])
    marks = []
    for rank in range(2):
        ranks: dict[str, Any] = {"rank": rank, "world_size": 2, "rows": [row]}
        with precache.Loader(image_store.path, 8, **ranks) as loader:
            [batch] = loader
            assert batch["row"].tolist() == [row]
            marks += batch["repeated"].tolist()
    assert marks == [False, True]
    for world, way in ((1, "give at most 21, or leave out drop_last"), (30, "leave it out")):
        said = rf"has 21 valid rows.*, of which drop_last .*: {way}$"
        with pytest.raises(UsageError, match=said):
            precache.Loader(image_store.path, 22, drop_last=True, rank=0, world_size=world)


# --- epochs ---


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (lambda make, _: [_read(make()), _read(make())], 1),
        (lambda make, _: [_read(precache.mix([make()])), _read(precache.mix([make()]))], 1),
        (lambda make, _: [[*zip(*loaders, strict=True)] for loaders in [[make(), make()]]], 0),
        (lambda make, _: [_read(make(epoch=epoch)) for epoch in range(3)], 0),
        (lambda make, _: [[*loader] for loader in [make()] * 3], 0),
        (lambda make, _: [_read(make(shuffle=False)) for _ in range(2)], 0),
        (lambda make, seed: [_read(make()), _read(make(seed=seed + 1))], 0),
        (lambda make, _: [_read(make(rank=1, world_size=2)) for _ in range(2)], 0),
    ],
    ids=["anew", "mixed", "together", "chosen", "kept", "as stored", "seeds", "another rank"],
)
def test_epochs_of_loaders_made_anew_that_are_all_the_first_are_said(
    epochs: Callable[..., Any],
    said: int,
    image_store: BuiltStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("precache.loading.loop._first_epochs", set())
    caplog.set_level(logging.WARNING, "precache.loading.loop")

    def make(epoch: int | None = None, **options: Any) -> precache.Loader:
        loader = precache.Loader(image_store.path, 4, **options)
        if epoch is not None:
            loader.set_epoch(epoch)
        return loader

    epochs(make, 0)
    found = [line for line in caplog.messages if "begins at epoch 0 as did one before it" in line]
    assert len(found) == said


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
        return [batch["row"].tolist() for batch in loader]


@pytest.mark.parametrize(
    "copied",
    [
        lambda loaders: [*map(_read, map(copy.copy, loaders))],
        lambda loaders: [*map(_read, copy.deepcopy(loaders))],
        lambda loaders: [*map(_read, pickle.loads(pickle.dumps(loaders)))],
        _spawned,
    ],
    ids=["copy", "deepcopy", "pickle", "spawn"],
)
def test_a_copy_has_the_options_and_the_position(
    copied: Callable[[list[Any]], list[list[list[int]]]], image_store: BuiltStore
) -> None:
    """Of a loader, and of a mixture."""
    loader, source = (
        precache.Loader(store, 4, seed=3, transform=HorizontalFlip())
        for store in (precache.open(image_store.path), image_store.path)
    )
    with loader, precache.mix([source], seed=2) as mixture:
        loaders: list[Any] = [loader, mixture]
        batches = [iter(each) for each in loaders]
        first = [[next(each)["row"].tolist() for _ in range(2)] for each in batches]
        rest = copied(loaders)
        assert rest == [[batch["row"].tolist() for batch in each] for each in batches]
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
    loaders = [precache.Loader(image_store.path, 4) for _ in range(2)]
    with precache.mix(loaders) as mixture:
        batches = iter(mixture)
        next(batches)
        loaders[0].close()
        with pytest.raises(UsageError, match="source 0 of this mixture was closed"):
            list(batches)
        with pytest.raises(UsageError, match="source 0 of this mixture was closed"):
            list(mixture)
    with pytest.raises(UsageError, match="source 0 is closed; make a new one"):
        precache.mix(loaders)
