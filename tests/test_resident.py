"""Resident versions: the same batches, from memory; refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import precache
from precache import resident
from precache.errors import UsageError
from precache.stream import ResidentStream
from tests.conftest import BuiltStore


def _epoch(loader: precache.Loader) -> list[dict[str, np.ndarray]]:
    return [{name: value.numpy().copy() for name, value in batch.items()} for batch in loader]


@pytest.mark.parametrize("where", ["host", "device"])
def test_batches_are_those_of_the_disk(store: BuiltStore, where: str) -> None:
    with (
        precache.Loader(store.path, 4, seed=1) as disk,
        precache.Loader(store.path, 4, seed=1, resident=where) as memory,
    ):
        for _ in range(2):
            for wanted, found in zip(_epoch(disk), _epoch(memory), strict=True):
                assert wanted.keys() == found.keys()
                assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_nothing_is_read_from_the_disk_any_more(
    stores: dict[str, BuiltStore], copy_store: object
) -> None:
    store = copy_store(stores["image"])  # type: ignore[operator]  # a path
    with precache.Loader(store.path, 4, resident="host") as loader:
        for path in Path(store.version_folder).rglob("c/*/0/0/0"):
            path.unlink()
        assert sum(len(batch["row"]) for batch in loader) == 21


def test_batches_gathered_on_a_device_are_the_same(store: BuiltStore) -> None:
    """The way of CUDA devices, on the one that is always there."""
    from precache.columns import Columns
    from precache.sampler import Order

    columns, cpu = Columns(str(store.path)), torch.device("cpu")
    stream = ResidentStream(resident.load(columns, cpu), cpu)
    rows = store.rows()
    for batch in stream.batches(Order(columns.valid, 5).epoch(0)):
        np.testing.assert_array_equal(batch["image"], rows[batch["row"].numpy()])


def test_what_does_not_fit_is_refused_before_loading(
    store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "_free_bytes", lambda device: 100_000)
    monkeypatch.setattr(resident, "BatchStream", None)
    with pytest.raises(UsageError, match=r"takes .* decoded, and the host has 100 KB free"):
        precache.Loader(store.path, 4, resident="host")


def test_another_place_is_refused(store: BuiltStore) -> None:
    with pytest.raises(UsageError, match="resident is 'disk'; choose one of None, host, device"):
        precache.Loader(store.path, 4, resident="disk")
