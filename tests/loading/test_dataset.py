"""`CachedDataset` is a map-style dataset like any other, in any process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import collate, default_collate_fn_map

import precache
from precache.errors import PrecacheError, StoreError, UsageError
from tests.conftest import BuiltStore


@pytest.fixture
def dataset(store: BuiltStore) -> precache.CachedDataset:
    return precache.CachedDataset(store.path)


def _assert_sample(store: BuiltStore, sample: dict[str, torch.Tensor], key: str) -> None:
    version = store.open()
    row = version.keys.index(key)
    assert sample["row"].dtype == torch.int64
    assert sample["row"].shape == sample["label"].shape == ()
    assert int(sample["row"]) == row
    assert int(sample["label"]) == int(version.labels[row])
    assert version.classes[int(sample["label"])] == Path(key).parent.name
    np.testing.assert_array_equal(sample["image"].numpy(), store.pixels(key))


def test_every_valid_row_is_a_sample_in_row_order(
    dataset: precache.CachedDataset, store: BuiltStore
) -> None:
    version = store.open()
    assert len(dataset) == 21
    valid = [key for key, holds in zip(version.keys, version.valid, strict=True) if holds]
    assert list(dataset.keys) == valid
    for index, key in enumerate(valid):
        _assert_sample(store, dataset[index], key)


def test_fields_come_in_the_order_of_the_recipe(dataset: precache.CachedDataset) -> None:
    sample = dataset[0]
    assert list(sample) == ["image", "label", "row"]
    assert (sample["image"].dtype, sample["label"].dtype) == (torch.uint8, torch.int64)


def test_negative_indices_count_from_the_end(
    dataset: precache.CachedDataset, store: BuiltStore
) -> None:
    for index in (-1, -21):
        _assert_sample(store, dataset[index], dataset.keys[index])
        assert int(dataset[index]["row"]) == int(dataset[index + 21]["row"])


def test_a_batch_beyond_the_memory_is_refused(
    dataset: precache.CachedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache.loading.slots.available_bytes", lambda: 1 << 29)
    row = sum(values.nbytes for values in dataset[0].values())
    count = (1 << 30) // row + 1
    words = f"a batch of {count} rows takes {count * row} bytes, and {1 << 29} are free; give a "
    with pytest.raises(UsageError, match=words + "smaller batch_size"):
        dataset.__getitems__([0] * count)


@pytest.mark.parametrize("index", [21, -22, 10**12])
def test_other_indices_are_an_index_error(dataset: precache.CachedDataset, index: int) -> None:
    with pytest.raises(IndexError, match=f"{index}.* is outside of the 21 samples"):
        dataset[index]
    with pytest.raises(IndexError):
        dataset.__getitems__([0, index])
    with pytest.raises(IndexError):
        dataset.keys[index]


@pytest.mark.parametrize("index", [np.int64(3), torch.tensor(3), np.array(3)])
def test_indices_of_other_kinds_are_taken(dataset: precache.CachedDataset, index: Any) -> None:
    assert int(dataset[index]["row"]) == int(dataset[3]["row"])


@pytest.mark.parametrize("index", [1.5, "3", None, slice(0, 3)])
def test_what_is_no_index_is_refused(stores: dict[str, BuiltStore], index: Any) -> None:
    with pytest.raises((TypeError, IndexError, ValueError)):
        precache.CachedDataset(stores["raw"].path)[index]


def test_iterating_ends(dataset: precache.CachedDataset) -> None:
    # Iterated by __getitem__ and IndexError, which torch's types do not tell.
    assert [int(sample["row"]) for sample in dataset] == [  # type: ignore[attr-defined]
        int(dataset[i]["row"]) for i in range(21)
    ]


def test_several_samples_come_together_in_the_order_asked_for(
    dataset: precache.CachedDataset,
) -> None:
    samples = dataset.__getitems__([20, 0, -1, 7])
    assert [int(s["row"]) for s in samples] == [int(dataset[i]["row"]) for i in (20, 0, 20, 7)]
    assert list(dataset.__getitems__([])) == []


def test_samples_are_the_callers_own(dataset: precache.CachedDataset) -> None:
    dataset[0]["image"].zero_()
    one, other = dataset.__getitems__([0, 0])
    one["image"].zero_()
    np.testing.assert_array_equal(other["image"], dataset[0]["image"])
    assert dataset[0]["label"].add_(5) != dataset[0]["label"]


def test_fields_can_be_chosen(store: BuiltStore) -> None:
    assert list(precache.CachedDataset(store.path, fields=["label"])[0]) == ["label", "row"]
    with pytest.raises(UsageError, match="no field 'mask'; it has image, label"):
        precache.CachedDataset(store.path, fields=["mask"])


def test_what_cannot_be_opened_is_refused(tmp_path: Path, stores: dict[str, BuiltStore]) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        precache.CachedDataset(tmp_path / "nowhere")
    with pytest.raises(PrecacheError, match="verify is 'maybe'"):
        precache.CachedDataset(stores["raw"].path, verify="maybe")


# --- other processes ----------------------------------------------------------------------------


def test_a_pickle_is_small_and_opens_the_same_version(
    photos: Path, make_store: Callable[..., BuiltStore]
) -> None:
    store = make_store(photos, precache.Recipe.image(codec="raw"))
    dataset = precache.CachedDataset(store.path)
    _ = (dataset[3], dataset.keys[0])
    data = pickle.dumps(dataset)
    precache.build(photos, store.path, precache.Recipe.image(codec="zstd"), address="serial")
    again = pickle.loads(data)
    assert len(data) < 10_000
    assert again.version.id == dataset.version.id != store.open().id
    np.testing.assert_array_equal(again[3]["image"], dataset[3]["image"])


@pytest.mark.parametrize(("context", "workers"), [(None, 0), ("fork", 2), ("spawn", 1)])
def test_a_dataloader_reads_it_in_any_kind_of_worker(
    context: str | None, workers: int, tile_stores: dict[str, BuiltStore]
) -> None:
    store = tile_stores["image"]
    dataset = precache.CachedDataset(store.path)
    _ = dataset[0]  # what a parent has mapped must serve its children too
    loader = DataLoader(
        dataset, batch_size=16, shuffle=True, num_workers=workers, multiprocessing_context=context
    )
    expected, rows = store.rows(), []
    for batch in loader:
        rows += batch["row"].tolist()
        np.testing.assert_array_equal(batch["image"].numpy(), expected[batch["row"].numpy()])
    assert sorted(rows) == np.flatnonzero(store.open().valid).tolist()


def test_a_distributed_sampler_deals_it_out(tile_stores: dict[str, BuiltStore]) -> None:
    dataset = precache.CachedDataset(tile_stores["raw"].path)
    ranks = []
    for rank in range(4):
        sampler = DistributedSampler(dataset, 4, rank, seed=1)
        sampler.set_epoch(2)
        loader = DataLoader(dataset, 8, sampler=sampler, collate_fn=dataset.collate)
        ranks.append([row for batch in loader for row in batch["row"].tolist()])
    assert {len(rows) for rows in ranks} == {19}
    # As above.
    assert {row for rows in ranks for row in rows} == {int(sample["row"]) for sample in dataset}  # type: ignore[attr-defined]


def _stacked(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As torch collates plain dicts."""
    batch: dict[str, torch.Tensor] = default_collate([dict(sample) for sample in samples])
    return batch


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.heavy)])
def test_a_plain_dataloader_yields_what_torch_would_stack(
    dataset: precache.CachedDataset, workers: int
) -> None:
    half, _ = random_split(dataset, [11, 10], torch.Generator().manual_seed(0))
    for source in (dataset, Subset(dataset, range(20, 0, -2)), half):
        options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
        stacked = DataLoader(source, collate_fn=_stacked, **options)
        for way in (None, dataset.collate):
            loader = DataLoader(source, collate_fn=way, **options)
            for expected, found in zip(stacked, loader, strict=True):
                assert type(found) is dict
                assert list(expected) == list(found)
                assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_collating_copies_nothing_that_lies_together(dataset: precache.CachedDataset) -> None:
    chosen, _ = random_split(dataset, [11, 10])
    for source in (dataset, Subset(dataset, [5, 9, 2, 1]), chosen, Subset(chosen, [3, 2, 1, 0])):
        for way in (default_collate, dataset.collate):
            samples = source.__getitems__([3, 1, 2])
            batch = way(samples)
            assert batch["image"].data_ptr() == samples[0]["image"].data_ptr()
            assert [int(sample["row"]) for sample in samples] == batch["row"].tolist()
            some = way([samples[2], samples[0]])
            assert torch.equal(some["row"], batch["row"][[2, 0]])
            assert torch.equal(some["image"], batch["image"][[2, 0]])


def test_samples_read_together_are_dicts_to_whoever_takes_them(
    dataset: precache.CachedDataset,
) -> None:
    samples = dataset.__getitems__([3, 1, 2])
    assert isinstance(samples[0], dict)
    assert type(dataset[3]) is dict
    for copied in (
        copy.copy(samples[0]), copy.deepcopy(samples[0]), pickle.loads(pickle.dumps(samples[0])),
        {**samples[0]}, samples[0].copy(),
    ):  # fmt: skip
        assert type(copied) is dict
        assert list(copied) == ["image", "label", "row"]
        assert all(torch.equal(copied[name], samples[0][name]) for name in copied)
    copy.deepcopy(samples)[1]["image"].fill_(0)
    np.testing.assert_array_equal(samples[1]["image"], dataset[1]["image"])
    assert samples[-1] is samples[2]
    with pytest.raises(IndexError):
        samples[3]


def _doubled(sample: dict[str, torch.Tensor]) -> None:
    sample["label"] = sample["label"] * 2


@pytest.mark.parametrize(
    "change",
    [
        _doubled,
        lambda sample: sample.update(weight=torch.tensor(0.5)),
        lambda sample: sample.pop("row"),
        lambda sample: sample["image"].fill_(7),
    ],
)
def test_samples_that_were_changed_are_collated_as_they_are(
    dataset: precache.CachedDataset, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    samples, expected = dataset.__getitems__([3, 1, 2]), dataset.__getitems__([3, 1, 2])
    plain = [dict(sample) for sample in expected]
    for sample, same in zip(samples, plain, strict=True):
        change(sample)
        change(same)
    found, stacked = default_collate(samples), default_collate(plain)
    assert list(found) == list(stacked)
    assert all(torch.equal(found[name], stacked[name]) for name in stacked)


def test_who_collates_tensors_otherwise_is_asked(dataset: precache.CachedDataset) -> None:
    def largest(tensors: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
        return torch.stack(list(tensors)).amax(0)

    samples, ways = dataset.__getitems__([3, 1, 2]), {torch.Tensor: largest}
    for map_of_ways in (ways, {**default_collate_fn_map, **ways}):
        assert int(collate(samples, collate_fn_map=map_of_ways)["row"]) == max(
            int(sample["row"]) for sample in samples
        )


def test_who_stacks_tensors_otherwise_for_all_is_asked(
    dataset: precache.CachedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halves(tensors: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
        return torch.stack(list(tensors)).half()

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, halves)
    assert default_collate(dataset.__getitems__([3, 1, 2]))["image"].dtype == torch.float16


@pytest.mark.parametrize("change", ["data", "unsqueeze"])
def test_samples_that_were_changed_in_place_are_collated_as_they_are(
    dataset: precache.CachedDataset, change: str
) -> None:
    samples = dataset.__getitems__([3, 1])
    for sample in samples:
        if change == "data":
            sample["image"].data = sample["image"].float() / 255
        else:
            sample["image"].unsqueeze_(0)
    expected = torch.stack([sample["image"] for sample in samples])
    assert torch.equal(default_collate(samples)["image"], expected)
