"""`CachedDataset` is a map-style dataset like any other, in any process."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import collate, default_collate_fn_map

import precache
from precache.errors import DamageError, StoreError, UsageError
from precache.reading.version_reader import VersionReader
from tests.conftest import BuiltStore
from tests.support.building import flip


@pytest.fixture
def dataset(image_store: BuiltStore) -> precache.CachedDataset:
    return precache.CachedDataset(image_store.path)


def _assert_sample(store: BuiltStore, sample: dict[str, torch.Tensor], key: str) -> None:
    version = store.open()
    row = version.keys.index(key)
    assert sample["row"].dtype == torch.int64
    assert sample["row"].shape == sample["label"].shape == ()
    assert int(sample["row"]) == row
    assert int(sample["label"]) == int(version.labels[row])
    assert version.classes[int(sample["label"])] == Path(key).parent.name
    np.testing.assert_array_equal(sample["image"].numpy(), store.pixels(key))


def test_every_valid_row_is_a_sample_in_row_order(store: BuiltStore) -> None:
    dataset, version = precache.CachedDataset(store.path), store.open()
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
    dataset: precache.CachedDataset, image_store: BuiltStore
) -> None:
    for index in (-1, -21):
        _assert_sample(image_store, dataset[index], dataset.keys[index])
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


@pytest.mark.parametrize("index", [1.5, "3", None, True, np.True_, torch.tensor(True)])
def test_what_is_no_index_is_refused(dataset: precache.CachedDataset, index: Any) -> None:
    for sample in (dataset, Subset(dataset, [index])):
        with pytest.raises(UsageError, match=r"an index is .*; give .*, np.flatnonzero\(mask\)"):
            sample[0 if isinstance(sample, Subset) else index]


@pytest.mark.parametrize(
    "index",
    [slice(3, 9, 2), [3, 5, 7], (3, 5, 7), np.array([3, 5, 7]), torch.tensor([3, 5, 7]),
     [3, -16, -14], np.isin(np.arange(21), [3, 5, 7]),
     torch.isin(torch.arange(21), torch.tensor([3, 5, 7]))],
)  # fmt: skip
def test_several_indices_give_their_batch(dataset: precache.CachedDataset, index: Any) -> None:
    wanted = default_collate([dataset[number] for number in (3, 5, 7)])
    assert _same(dataset[index], wanted)
    sampler: Any = [index]
    assert not isinstance(index, list) or _same(
        next(iter(DataLoader(dataset, batch_size=None, sampler=sampler))), wanted
    )


@pytest.mark.parametrize("index", [[[1]], [1.5], ["a"], np.array([True, False])])
def test_what_are_no_indices_are_refused(dataset: precache.CachedDataset, index: Any) -> None:
    with pytest.raises(
        UsageError, match=r"the indices are .*; give \(n,\) whole numbers, or \(21,\)"
    ):
        dataset[index]


@pytest.mark.parametrize(
    ("name", "way"),
    [("transform", "Loader"), ("target_transform", "__getitem__"), ("targets", "--labels"),
     ("labels", "--labels"), ("samples", "Subset"), ("variant", "set_epoch")],
)  # fmt: skip
def test_what_samples_would_not_follow_cannot_be_set(
    name: str, way: str, dataset: precache.CachedDataset
) -> None:
    class Plain(precache.CachedDataset):
        pass

    for holder in (dataset, random_split(dataset, [20, 1])[0].dataset, Plain(dataset.version.path)):
        with pytest.raises(UsageError, match=f"^{name} was set on a .*, .*{way}"):
            setattr(holder, name, len)
    of_class = type("OfClass", (precache.CachedDataset,), {"transform": len})
    with pytest.raises(UsageError, match="transform was set on a OfClass"):
        of_class(dataset.version.path)
    for labels in (dataset.labels, dataset.version.labels):
        with pytest.raises(ValueError, match="read-only"):
            labels[:] = 7


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


def test_fields_can_be_chosen(image_store: BuiltStore) -> None:
    assert list(precache.CachedDataset(image_store.path, fields=["label"])[0]) == ["label", "row"]
    with pytest.raises(UsageError, match="no field 'mask'; it has image, label"):
        precache.CachedDataset(image_store.path, fields=["mask"])


def test_what_cannot_be_opened_is_refused(tmp_path: Path, stores: dict[str, BuiltStore]) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        precache.CachedDataset(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="access is 'maybe'; choose one of"):
        precache.CachedDataset(stores["raw"].path, access="maybe")  # type: ignore[arg-type]


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


def _as_floats(sample: dict[str, torch.Tensor]) -> None:
    sample["image"].data = sample["image"].float() / 255


@pytest.mark.parametrize(
    "change",
    [
        _doubled,
        lambda sample: sample.update(weight=torch.tensor(0.5)),
        lambda sample: sample.pop("row"),
        lambda sample: sample["image"].fill_(7),
        lambda sample: sample["image"].unsqueeze_(0),
        _as_floats,
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


# --- subclasses ---------------------------------------------------------------------------------


class Scaled(precache.CachedDataset):
    """Tuples, with a signature and attributes of its own."""

    def __init__(self, scale: float, *, store: str | Path, note: str = "") -> None:
        super().__init__(store)
        self.scale, self._options, self.labels = scale, {"note": note}, np.arange(3)

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample["image"].float() * self.scale, int(sample["row"]), self._options["note"]


class Halved(Scaled):
    """A subclass of a subclass."""

    def __getitem__(self, index: int) -> Any:
        image, row, note = super().__getitem__(index)
        return image / 2, row, note + "!"


class _Negated:
    def __getitem__(self, index: int) -> Any:
        return -super().__getitem__(index)["image"].float(), index  # type: ignore[misc]


class Mixed(_Negated, precache.CachedDataset):
    pass


class Reversed(precache.CachedDataset):
    """With indices of its own, of which it has more than there are rows."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(20 - index % 21) | {"index": torch.tensor(index)}


class Slotted(precache.CachedDataset):
    __slots__ = ("scale",)
    scale: int

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["image"] * self.scale


def _make(kind: type[precache.CachedDataset], store: BuiltStore) -> Any:
    if issubclass(kind, Scaled):
        return kind(3.0, store=store.path, note="own")
    made = kind(store.path)
    if isinstance(made, Slotted):
        made.scale = 2
    return made


def _list(samples: list[Any]) -> list[Any]:
    return samples


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else bool(one == other)


KINDS = [Scaled, Halved, Mixed, Reversed, Slotted]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_gets_the_samples_of_a_subclass(
    kind: type[precache.CachedDataset], stores: dict[str, BuiltStore]
) -> None:
    dataset = _make(kind, stores["raw"])
    expected = [dataset[index] for index in range(len(dataset))]
    assert not _same(expected[0], precache.CachedDataset(stores["raw"].path)[0])
    half, _ = random_split(dataset, [11, len(dataset) - 11], torch.Generator().manual_seed(0))
    chosen = [4, 0, 0, 20]
    for source, indices in (
        (dataset, range(len(dataset))), (Subset(dataset, chosen), chosen), (half, half.indices),
        (ConcatDataset([Subset(dataset, chosen), dataset]), [*chosen, *range(len(dataset))]),
    ):  # fmt: skip
        for options in ({"collate_fn": _list}, {"collate_fn": _list, "num_workers": 1}, {}):
            loader: DataLoader[Any] = DataLoader(source, batch_size=4, **options)
            wanted = [expected[index] for index in indices]
            batches = [wanted[start : start + 4] for start in range(0, len(wanted), 4)]
            if not options:
                batches = [default_collate(batch) for batch in batches]
            assert _same(batches, list(loader)), (source, options)
    single: DataLoader[Any] = DataLoader(dataset, batch_size=None, sampler=chosen)
    assert [_same(expected[i], found) for i, found in zip(chosen, single, strict=True)]


def test_a_class_that_reads_several_samples_in_its_own_way_is_refused() -> None:
    several = {"__getitems__": lambda self, indices: [0]}
    for bases, members in (
        ((precache.CachedDataset,), several), ((Scaled,), several),
        ((type("Mixin", (), several), Scaled), {}),
    ):  # fmt: skip
        with pytest.raises(
            UsageError, match=r"Own has a __getitems__, .*make samples in __getitem"
        ):
            type("Own", bases, members)


def _negated(dataset: precache.CachedDataset, index: int) -> Any:
    return -int(ROW(dataset, index)["row"])


ROW = precache.CachedDataset.__getitem__


@pytest.mark.parametrize("of_base", [False, True])
def test_a_method_that_is_set_later_makes_the_samples(
    of_base: bool, stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(precache.CachedDataset):
        pass

    class Below(Plain):
        pass

    monkeypatch.setattr(precache.CachedDataset if of_base else Plain, "__getitem__", _negated)
    for kind in (Plain, Below, *([precache.CachedDataset] if of_base else [])):
        dataset = kind(stores["raw"].path)
        loader = DataLoader(dataset, batch_size=4, collate_fn=_list)
        assert [one for batch in loader for one in batch] == [dataset[i] for i in range(21)]
        assert dataset[2] == -int(ROW(dataset, 2)["row"])


class _Wrapper(Dataset[Any]):
    """Passes on whatever it does not have."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dataset"], name)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        return sample["image"], sample["label"] + 100


def test_a_wrapper_that_passes_on_all_names_makes_its_own_samples(
    stores: dict[str, BuiltStore],
) -> None:
    cached = precache.CachedDataset(stores["raw"].path)
    # A lookup without a frame of Python, as those of wrapt and Cython.
    in_c = type(
        "InC", (_Wrapper,), {"__getattr__": staticmethod(functools.partial(getattr, cached))}
    )
    for wrapper in (_Wrapper(cached), in_c(cached)):
        for dataset in (wrapper, Subset(wrapper, range(21))):
            (images, labels), *_ = DataLoader(dataset, batch_size=21)
            assert labels.tolist() == [int(label) + 100 for label in cached.labels]
            assert len(images) == 21
        [(stacked,)] = DataLoader(StackDataset(wrapper), batch_size=21)
        assert torch.equal(stacked[1], labels)


@pytest.mark.parametrize("kind", [precache.CachedDataset, *KINDS])
@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_and_pickles_keep_all_attributes_and_no_data(
    kind: type[precache.CachedDataset], clone: Callable[[Any], Any], stores: dict[str, BuiltStore]
) -> None:
    dataset = _make(kind, stores["raw"])
    dataset.scale, dataset.names = 5, {"a": [1]}
    before = dataset[4]
    _ = dataset.keys, dataset.labels, dataset.classes
    assert len(pickle.dumps(dataset)) < 1_500
    other = clone(dataset)
    assert type(other) is kind
    assert (other.scale, other.names) == (5, {"a": [1]})
    assert _same(before, other[4])
    assert np.array_equal(other.labels, dataset.labels)
    assert list(other.keys) == list(dataset.keys)
    other.set_epoch(1)
    assert _same(before, dataset[4])


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.heavy)])
def test_workers_have_the_attributes_of_a_subclass(
    context: str, stores: dict[str, BuiltStore]
) -> None:
    dataset = _make(Scaled, stores["raw"])
    dataset.scale = 0.5
    loader: DataLoader[Any] = DataLoader(
        dataset, 6, num_workers=1, multiprocessing_context=context, collate_fn=_list
    )
    assert _same([sample for batch in loader for sample in batch], [dataset[i] for i in range(21)])


def test_rows_of_a_batch_are_read_together_for_a_subclass(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = VersionReader.read

    def counted(self: VersionReader, rows: np.ndarray, *args: Any, **options: Any) -> None:
        reads.append(len(rows))
        read(self, rows, *args, **options)

    monkeypatch.setattr(VersionReader, "read", counted)
    for kind, expected in (
        (Scaled, [8, 8, 5]), (Mixed, [8, 8, 5]), (Reversed, [8, *[1] * 42]), (Slotted, [8, 8, 5])
    ):  # fmt: skip
        reads.clear()
        list(DataLoader(_make(kind, stores["raw"]), 8, collate_fn=_list))
        assert reads == expected, kind


def test_each_sample_of_a_subclass_is_its_own(stores: dict[str, BuiltStore]) -> None:
    class Zeroed(precache.CachedDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            before = sample["image"].clone()
            sample["image"].zero_()
            return before

    dataset: Any = Zeroed(stores["raw"].path)
    plain = precache.CachedDataset(stores["raw"].path)
    for image in dataset.__getitems__([2, 2]):
        assert torch.equal(image, plain[2]["image"])


def test_a_subclass_may_handle_what_cannot_be_read(
    copy_store: Callable[..., BuiltStore], stores: dict[str, BuiltStore]
) -> None:
    class Patient(precache.CachedDataset):
        def __getitem__(self, index: int) -> Any:
            try:
                return super().__getitem__(index)["row"]
            except DamageError:
                return torch.tensor(-1)

    store = copy_store(stores["raw"])
    flip(store.shard_path(0), 1000)
    [rows] = DataLoader(Patient(store.path), 21)
    assert (rows < 0).any()
    assert (rows >= 0).any()


def test_fewer_samples_than_rows(stores: dict[str, BuiltStore]) -> None:
    class Few(precache.CachedDataset):
        def __len__(self) -> int:
            return 5

    dataset: Any = Few(stores["raw"].path)
    assert len(list(dataset)) == 5
    assert [len(batch["row"]) for batch in DataLoader(dataset, 2)] == [2, 2, 1]
    assert int(dataset[-1]["row"]) == int(dataset[4]["row"])


def test_a_class_of_fewer_samples_chooses_them_by_the_indices_of_all(
    stores: dict[str, BuiltStore],
) -> None:
    class Chosen(precache.CachedDataset):
        def __init__(self, store: Path, chosen: Sequence[int]) -> None:
            super().__init__(store)
            self.chosen = chosen

        def __len__(self) -> int:
            return len(self.chosen)

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(self.chosen[index])["row"]

    chosen = [20, 3, -1, 11]
    dataset: Any = Chosen(stores["raw"].path, chosen)
    rows = [int(precache.CachedDataset(stores["raw"].path)[index]["row"]) for index in chosen]
    assert [int(row) for row in dataset] == rows
    assert torch.cat([*DataLoader(dataset, 3)]).tolist() == rows


# --- labels -------------------------------------------------------------------------------------


def test_labels_are_those_of_the_samples(dataset: precache.CachedDataset) -> None:
    assert dataset.labels.shape == (21,)
    assert dataset.labels.dtype == np.int64
    # Iterated by __getitem__ and IndexError, which torch's types do not tell.
    assert dataset.labels.tolist() == [int(s["label"]) for s in dataset]  # type: ignore[attr-defined]
    assert dataset.classes == dataset.version.classes == ("cat", "dog", "eel")
    assert len(dataset.version.labels) > 21, "there must be holes"
    labels = torch.tensor(dataset.labels)
    sampler = WeightedRandomSampler((labels == 1).double().tolist(), 50)
    for batch in DataLoader(dataset, 10, sampler=sampler):
        assert (batch["label"] == 1).all()


def test_rows_that_may_be_indices_are_said_where_there_are_holes(
    stores: dict[str, BuiltStore], caplog: pytest.LogCaptureFixture
) -> None:
    version = precache.open(stores["raw"].path)
    samples = np.flatnonzero(version.valid)
    indices = [0, 5, len(samples) - 1]
    for rows, is_said in ((indices, True), ([version.rows - 1, *indices], False)):
        caplog.clear()
        with precache.Loader(version, batch_size=2, rows=rows, device="cpu") as loader:
            assert len(loader) > 0
        assert ("np.flatnonzero(version.valid)[indices]" in caplog.text) is is_said
    caplog.clear()
    with precache.Loader(version, batch_size=2, rows=version.labels == 0, device="cpu"):
        assert "holes" not in caplog.text


def test_holes_that_indices_leave_out_are_said_once(
    stores: dict[str, BuiltStore], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = precache.CachedDataset(stores["raw"].path)
    pickle.loads(pickle.dumps(dataset))
    [line] = [record.getMessage() for record in caplog.records]
    rows = dataset.version.rows
    assert line.startswith(f"{rows - 21} of {rows} rows of {dataset.version.path} are holes, which")


def test_labels_are_read_when_they_are_used(
    dataset: precache.CachedDataset, stores: dict[str, BuiltStore]
) -> None:
    only_images = precache.CachedDataset(stores["raw"].path, fields=["image"])
    assert np.array_equal(only_images.labels, dataset.labels)
    assert precache.CachedDataset(stores["raw"].path).__dict__.keys() & {"labels", "keys"} == set()
