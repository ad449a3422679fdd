"""Resident versions: the same batches, from memory; refused where they do not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch

import precache
from precache import Reading
from precache.errors import UsageError
from precache.loading.gpu import resident
from precache.loading.gpu.resident import ResidentStream
from precache.reading.version_reader import VersionReader
from precache.recipe.ops import DTYPES
from precache.sampling.order import Order
from tests.conftest import BuiltStore
from tests.support.loaders import (
    arrays_of,
    assert_same_arrays,
    opened,
    rows_as_stored,
    valid_rows,
)


@pytest.mark.parametrize("where", ["host", "device"])
def test_batches_are_those_of_the_disk_from_which_nothing_is_read_any_more(
    where: str, store: BuiltStore, copy_store: Callable[[BuiltStore], BuiltStore]
) -> None:
    own = copy_store(store)
    with (
        opened(store, seed=1) as disk,
        opened(own, seed=1, reading=Reading(resident=where, num_threads=3)) as memory,
    ):
        for path in own.version_folder.rglob("c/*/0/0/0"):
            path.unlink()
        for _ in range(2):
            assert_same_arrays(arrays_of(memory), arrays_of(disk))


def test_batches_gathered_on_a_device_are_the_same(store: BuiltStore) -> None:
    """The way of CUDA devices, on the one that is always there."""
    columns, cpu = VersionReader(str(store.path)), torch.device("cpu")
    stream = ResidentStream(resident.load(columns, cpu), cpu)
    batches = stream.batches(Order(columns.valid, 5).epoch(0))
    assert sorted(rows_as_stored(batches, store)) == valid_rows(store)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_can_be_resident(dtype: str, tmp_path: Path) -> None:
    """Also those that torch cannot index, and of fields that are held in memory anyway."""
    values = {}
    for name, shape in (("large", (9, 5, 20)), ("small", (9, 2)), ("number", (9,))):
        numbers = np.random.default_rng(0).integers(0, 2**64, shape, np.uint64)
        values[name] = (numbers >> np.uint64(48) if "float" in dtype else numbers).astype(dtype)
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(tmp_path / name)},
            "metadata": {"shape": shape, "data_type": dtype},
        }
        tensorstore.open(spec, create=True).result().write(values[name]).result()
    fields, cpu = {name: name for name in values}, torch.device("cpu")
    columns = VersionReader(str(tmp_path), fields)
    stream = ResidentStream(resident.load(columns, cpu), cpu)
    how: dict[str, Any] = {"fields": fields, "seed": 1, "device": "cpu"}
    with (
        precache.Loader(tmp_path, 3, **how) as disk,
        precache.Loader(tmp_path, 3, reading=Reading(resident="host"), **how) as host,
    ):
        on_a_device = stream.batches(Order(columns.valid, 3, seed=1).epoch(0))
        batches = [*disk, *host, *on_a_device]
    assert len(batches) == 9
    for batch in batches:
        for name, field in values.items():
            assert str(batch[name].dtype) == f"torch.{dtype}"
            np.testing.assert_array_equal(batch[name].numpy(), field[batch["row"].numpy()])


def test_what_does_not_fit_is_refused_before_loading(
    store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "_free_bytes", lambda device: 100_000)
    monkeypatch.setattr(resident, "BatchStream", None)
    with pytest.raises(UsageError, match=r"takes .* decoded, and the host has 100 KB free"):
        precache.Loader(store.path, 4, reading=Reading(resident="host"))
