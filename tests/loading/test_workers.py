"""A `Loader` within the workers of a `DataLoader`: each row once, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import precache
from precache.errors import UsageError
from tests.conftest import BuiltStore


def _plain(store: Path, **options: Any) -> Any:
    return precache.Loader(store, 5, device="cpu", **options)


def _mixed(store: Path, **options: Any) -> Any:
    return precache.mix([_plain(store, **options)])


def _metered(store: Path, **options: Any) -> Any:
    return precache.meter(_plain(store, **options), to=[])


class Streamed(IterableDataset[Any]):
    """Batches of what `make` returns; options that are functions are called in the worker."""

    def __init__(self, make: Callable[..., Any], store: Path, **options: Any) -> None:
        self.make, self.store, self.options = make, store, options

    def __iter__(self) -> Iterator[Any]:
        options = {n: v() if callable(v) else v for n, v in self.options.items()}
        yield from self.make(self.store, **options)


def _rows(dataset: Any, workers: int, **options: Any) -> list[int]:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=workers, **options)
    return sorted(row for batch in loader for row in batch["row"].tolist())


CONTEXTS = ["fork", pytest.param("spawn", marks=pytest.mark.heavy)]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("make", [_plain, _mixed, _metered])
def test_several_workers_that_would_each_read_everything_are_refused(
    make: Callable[..., Any], context: str, stores: dict[str, BuiltStore]
) -> None:
    dataset = Streamed(make, stores["raw"].path)
    valid = stores["raw"].open().valid.nonzero()[0].tolist()
    assert _rows(dataset, 0) == _rows(dataset, 1, multiprocessing_context=context) == valid
    with pytest.raises(UsageError, match="2 workers of a DataLoader") as refused:
        _rows(dataset, 2, multiprocessing_context=context)
    [code] = re.findall(r"such as (rank=.*?), with info = ", str(refused.value))
    asked = dict(part.split("=") for part in code.split(", "))
    names = {"get_worker_info": get_worker_info}
    options = {
        name: _Evaluated(expression.replace("info.", "get_worker_info()."), names)
        for name, expression in asked.items()
    }
    parted = Streamed(make, stores["raw"].path, drop_last=True, **options)
    rows = _rows(parted, 2, multiprocessing_context=context)
    assert len(rows) == len(set(rows)) == 20


class _Evaluated:
    def __init__(self, code: str, names: dict[str, Any]) -> None:
        self.code, self.names = code, names

    def __call__(self) -> Any:
        return eval(self.code, self.names)


def test_workers_with_rows_of_their_own_are_the_users_business(
    stores: dict[str, BuiltStore],
) -> None:
    def rows() -> Any:
        info = get_worker_info()
        valid = stores["raw"].open().valid.nonzero()[0]
        return valid if info is None else valid[info.id :: info.num_workers]

    dataset = Streamed(_plain, stores["raw"].path, rows=rows)
    assert _rows(dataset, 2) == _rows(dataset, 0)


def test_a_loader_made_before_the_workers_is_refused_with_its_first_batch(
    stores: dict[str, BuiltStore],
) -> None:
    with precache.Loader(stores["raw"].path, 5, device="cpu", rank=1, world_size=2) as parted:
        assert len(_rows(Streamed(lambda _: parted, Path()), 2)) == 22

    class Begun(IterableDataset[Any]):
        def __init__(self, batches: Any) -> None:
            self.batches = batches

        def __iter__(self) -> Iterator[Any]:
            return iter(self.batches)

    loader = precache.Loader(stores["raw"].path, 5, device="cpu")
    for batches in (loader, iter(loader)):
        with pytest.raises(UsageError, match="2 workers of a DataLoader"):
            _rows(Begun(batches), 2)
    assert torch.utils.data.get_worker_info() is None
    assert sum(len(batch["row"]) for batch in loader) == 21
