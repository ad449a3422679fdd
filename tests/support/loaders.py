"""Loaders on the CPU, what their batches have, and tables of what is refused."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import precache
from precache.errors import UsageError
from tests.conftest import BuiltStore
from tests.support.building import own_threads


def opened(store: Any, batch_size: int = 4, *more: Any, **options: Any) -> precache.Loader:
    """A loader of a store of the tests, or of a path."""
    options = {"device": "cpu", **options}
    uri = store.path if isinstance(store, BuiltStore) else store
    return precache.Loader(uri, batch_size, *more, **options)


def rows_of(batches: Iterable[Any]) -> list[list[int]]:
    """Row numbers of each batch."""
    return [batch["row"].tolist() for batch in batches]


def flat(batches: Iterable[Any]) -> list[int]:
    """Row numbers of all batches, one after another."""
    return [row for rows in rows_of(batches) for row in rows]


def epoch_of(store: Any, batch_size: int = 4, epoch: int = 0, **options: Any) -> list[list[int]]:
    """Row numbers of each batch of an epoch."""
    with opened(store, batch_size, **options) as loader:
        loader.set_epoch(epoch)
        return rows_of(loader)


def rows_as_stored(batches: Iterable[Any], store: BuiltStore) -> list[int]:
    """Row numbers of batches whose pixels must be those of a store of the tests."""
    expected, rows = store.rows(), list[int]()
    for batch in batches:
        numbers = batch["row"].tolist()
        np.testing.assert_array_equal(batch["image"].cpu().numpy(), expected[numbers])
        rows += numbers
    return rows


def arrays_of(batches: Iterable[Any]) -> list[dict[str, np.ndarray]]:
    """Copies of all batches, so that none is held."""
    return [{name: each.cpu().numpy().copy() for name, each in b.items()} for b in batches]


def assert_same_arrays(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same fields, and the same values of each."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def valid_rows(store: Any) -> list[int]:
    """Numbers of the rows of a store of the tests that are no holes."""
    return np.flatnonzero(store.open().valid).tolist()


def assert_any_history(
    data: st.DataObject,
    make: Callable[[], Any],
    batches_of: Callable[[int], list[Any]],
    read: Callable[[Iterable[Any]], list[Any]] = rows_of,
) -> None:
    """Whatever its history, a loop reads what its position says, and leaves no thread.

    Epochs are read in part or to their end, chosen, and gone on with by another loop.

    Parameters
    ----------
    batches_of
        All that `read` finds in the batches of an epoch.
    """
    loop, begin, saved = make(), (0, 0), (0, 0)
    assert len(loop) == len(batches_of(0))
    for step in data.draw(st.lists(st.sampled_from(["read", "choose", "resume"]), max_size=7)):
        if step == "read":
            epoch, first = begin
            left = batches_of(epoch)[first:]
            count = data.draw(st.integers(0, len(left)))
            assert read(itertools.islice(loop, count)) == left[:count]
            if count:  # an iterator that is never used costs no epoch
                saved = (epoch, first + count) if count < len(left) else (epoch + 1, 0)
                begin = (epoch + 1, 0)
        elif step == "choose":
            epoch = data.draw(st.integers(0, 3))
            if begin[0] != epoch or begin[1] == 0:  # what was resumed survives that it is named
                begin = saved = (epoch, 0)
            loop.set_epoch(epoch)
        else:
            state = json.loads(json.dumps(loop.state_dict()))
            loop.close()
            loop = make()
            loop.load_state_dict(state)
            assert loop.state_dict() == state
            begin = saved
        state = loop.state_dict()
        assert (state["epoch"], state["batch"]) == saved
        assert own_threads() == []
    loop.close()


def assert_refused(*cases: tuple[Any, ...], error: type[Exception] = UsageError) -> None:
    """Of each case, (text, function, arguments …), the call raises an error that says the text."""
    for said, act, *arguments in cases:
        with pytest.raises(error, match=said or None):
            act(*arguments)
