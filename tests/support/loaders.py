"""Loaders on the CPU, what their batches have, and tables of what is refused."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import UsageError
from tests.conftest import BuiltStore


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


def assert_refused(*cases: tuple[Any, ...], error: type[Exception] = UsageError) -> None:
    """Of each case, (text, function, arguments …), the call raises an error that says the text."""
    for said, act, *arguments in cases:
        with pytest.raises(error, match=said or None):
            act(*arguments)
