"""Integers of NumPy and torch mean the same as plain ones, wherever callers give them."""

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precache
from precache import transforms
from precache.building import ensure as ensured
from precache.errors import UsageError
from precache.metering.publisher import MeterSettings
from tests.conftest import BuiltStore

KINDS = [np.uint8, torch.tensor]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_takes_any_integer_as_the_plain_one(
    stores: dict[str, BuiltStore], kind: Callable[[int], Any]
) -> None:
    numbers = {"batch_size": 4, "seed": 3, "rank": 1, "world_size": 2}

    def open_loader(kind: Any) -> precache.Loader:
        options: dict[str, Any] = {name: kind(value) for name, value in numbers.items()}
        options["reading"] = precache.Reading(kind(2), kind(3))
        crop, block = transforms.RandomCrop(kind(80), kind(0)), precache.Block(kind(2), kind(2))
        return precache.Loader(stores["raw"].path, shuffle=block, transform=crop, **options)

    with open_loader(int) as plain, open_loader(kind) as other:
        plain.set_epoch(2)
        other.set_epoch(kind(2))
        for one, two in zip(plain, other, strict=True):
            assert torch.equal(one["row"], two["row"])
            assert torch.equal(one["image"], two["image"])
        assert np.array_equal(plain.rows_of_batch(1, 1), other.rows_of_batch(kind(1), kind(1)))
        other.seek(kind(1), kind(1))
        state = other.state_dict()
        saved = io.BytesIO()
        torch.save(state, saved)
        saved.seek(0)
        assert torch.load(saved, weights_only=True) == state
        plain.load_state_dict({**state, "epoch": kind(1), "sample": kind(8)})
        assert plain.state_dict() == state


def test_flags_of_numpy_are_plain_in_a_state(image_store: BuiltStore) -> None:
    for shuffle in (np.False_, np.str_("full")):
        given: Any = {"drop_last": np.True_, "shuffle": shuffle}
        with precache.Loader(image_store.path, 4, **given) as loader:
            state = loader.state_dict()
        assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_takes_any_integer_as_the_plain_one(
    stores: dict[str, BuiltStore], kind: Callable[[int], Any]
) -> None:
    states, steps = [], []
    for number in (int, kind):
        loaders = [precache.Loader(stores[codec].path, 4) for codec in ("raw", "zstd")]
        with precache.mix(loaders, seed=number(5), until=number(6)) as batches:
            batches.set_epoch(number(1))
            steps.append([batch["source"] for batch in batches])
            states.append(repr(batches.state_dict()))
    assert states[0] == states[1]
    assert steps[0] == steps[1]


def test_a_dataset_a_version_and_a_recipe_take_any_integer(stores: dict[str, BuiltStore]) -> None:
    dataset = precache.CachedDataset(stores["raw"].path, variant=np.int64(1))  # type: ignore[arg-type]
    dataset.set_epoch(np.int64(2))  # type: ignore[arg-type]
    version = stores["raw"].open()
    rows = version.rows_of_classes(np.int64(0))  # type: ignore[arg-type]
    assert np.array_equal(rows, version.rows_of_classes(0))
    numbers: Any = {"crop": np.int64(64), "resize": np.int64(80), "seed": np.int64(2)}
    plain = precache.Recipe.image(crop=64, resize=80, seed=2)
    assert precache.Recipe.image(**numbers).fingerprint({}) == plain.fingerprint({})
    assert ensured._seconds(np.int64(5)) == ensured._seconds(np.float32(5)) == 5
    simulated = precache.simulate(100, 100, np.int64(2), seed=np.int64(3))  # type: ignore[arg-type]
    assert simulated.to_dict() == precache.simulate(100, 100, 2, seed=3).to_dict()
    assert MeterSettings("data", np.int64(7), 0.1, (), None).steps == 7  # type: ignore[arg-type]


def test_a_build_takes_any_integer(photos: Path, tmp_path: Path) -> None:
    numbers: Any = {"shard_samples": np.int64(8), "max_failures": np.int64(9), "nice": np.int64(10)}
    built = precache.build(photos, tmp_path / "store", address="serial", **numbers)
    assert built.shards == 3


@pytest.mark.parametrize(
    "name", ["batch_size", "seed", "num_threads", "prefetch_batches", "window", "nodes"]
)
def test_what_is_no_whole_number_is_refused(image_store: BuiltStore, name: str) -> None:
    values: list[Any] = [True, 2.0, "2", np.float32(2), np.bool_(True)]
    values += [] if name in ("seed", "prefetch_batches") else [0, np.int64(0)]
    values += [None] if name in ("batch_size", "seed") else []
    take: Any = functools.partial(precache.Loader, image_store.path, batch_size=4)
    take = precache.Block if name in ("window", "nodes") else take
    take = precache.Reading if name in ("num_threads", "prefetch_batches") else take
    for value in values:
        with pytest.raises(UsageError, match=f"^{name} is .*; give a whole number"):
            take(**{name: value})


def test_a_place_that_is_no_whole_number_is_refused(image_store: BuiltStore) -> None:
    with precache.Loader(image_store.path, 4) as loader:
        for wrong in (1.5, "1", True, None):
            with pytest.raises(UsageError, match="epoch is"):
                loader.set_epoch(wrong)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="batch is"):
                loader.seek(0, wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"seed is 1\.5"):
            precache.mix([loader], seed=1.5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="until is True"):
            precache.mix([loader], until=True)
    with pytest.raises(UsageError, match=r"classes is 2\.5"):
        transforms.MixUp(2.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="size is"):
        transforms.RandomResizedCrop((8, 8, 8))  # type: ignore[arg-type]
