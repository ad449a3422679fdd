"""Devices that are neither the CPU nor CUDA: batches are copied there synchronously."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precache
from precache.errors import UsageError
from tests.conftest import BuiltStore
from tests.support.kinds import put_rows, recipe, row

READ = """
import sys
import numpy as np, torch, zarr
from tests.support import other_device
import precache
from precache.errors import UsageError
from precache.transforms import HorizontalFlip

store = sys.argv[1]

def whole(device, **options):
    with precache.Loader(store, 5, device=device, **options) as loader:
        assert loader.device.type == device
        batches = [dict(enumerate(b)) if isinstance(b, tuple) else b for b in loader]
    assert all(v.device.type == device for batch in batches for v in batch.values())
    return {name: torch.cat([batch[name].cpu() for batch in batches]) for name in batches[0]}

def on_device(batch):
    assert {values.device.type for values in batch.values()} <= {"other", "cpu"}
    return batch

for options in (
    {}, {"output": "tuple"}, {"transform": HorizontalFlip()}, {"transform": on_device},
    {"reading": precache.Reading(resident="host")}, {"reading": precache.Reading(num_threads=3)},
    {"reading": precache.Reading(decompress="device")},
    {"transform": HorizontalFlip(), "shuffle": precache.Weighted([1] * 23), "output": "tuple"},
    {"rank": 1, "world_size": 2},
):
    expected, there = whole("cpu", **options), whole("other", **options)
    assert expected.keys() == there.keys()
    assert all(torch.equal(expected[name], there[name]) for name in expected), options
assert not any(other_device.asynchronous)

def rows(device, **options):
    with precache.Loader(sys.argv[3], 5, seed=3, device=device, **options) as loader:
        for batch in loader:
            tensors = {n: v for n, v in batch.items() if n not in ("caption", "blob")}
            tensors = {n: v if isinstance(v, list) else [v] for n, v in tensors.items()}
            assert all(v.device.type == device for part in tensors.values() for v in part)
            host = {n: [v.cpu() for v in part] for n, part in tensors.items()}
            yield batch["caption"], batch["blob"], host

threads = {"reading": precache.Reading(num_threads=3)}
for options in ({}, {"output": {"tokens": "list", "points": "list"}}, threads):
    for one, other in zip(rows("cpu", **options), rows("other", **options)):
        assert one[:2] == other[:2]
        assert one[2].keys() == other[2].keys()
        for name, part in one[2].items():
            assert all(torch.equal(*pair) for pair in zip(part, other[2][name], strict=True))

group = zarr.create_group(sys.argv[2])
group.create_array("x", data=np.ones((8, 2)), chunks=(4, 2))
there = {"reading": precache.Reading(resident="device")}
for uri, options in (store, there), (sys.argv[2], {"fields": {"x": "x"}}):
    try:
        precache.Loader(uri, 5, device="other", **options)
    except UsageError as error:
        print(error)
"""


def test_batches_arrive_with_the_same_values(
    stores: dict[str, BuiltStore], run_python: Callable[..., Any], tmp_path: Path
) -> None:
    """And texts stay."""
    source = put_rows(tmp_path / "rows.pickle", [row(number) for number in range(23)])
    names = ("image", "caption", "blob", "tokens", "points", "boxes")
    precache.build(source, tmp_path / "rows.store", recipe(*names), address="serial")
    line = stores["image"].path, tmp_path / "group", tmp_path / "rows.store"
    refusals = run_python(READ, *line).stdout
    assert "resident='device' needs a CUDA device, and device is 'other'" in refusals
    assert "field 'x' is float64, and device 'other' does not take it" in refusals


@pytest.mark.parametrize("device", ["mps", "xla:1", "vulkan"])
def test_a_device_that_is_not_there_is_refused(stores: dict[str, BuiltStore], device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception:
        with pytest.raises(UsageError, match=f"device '{device}' cannot be used here: "):
            precache.Loader(stores["raw"].path, 4, device=device)
