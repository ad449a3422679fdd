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
    StackDataset,
    Subset,
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


def test_every_valid_row_is_a_sample_in_row_order(store: BuiltStore) -> None:
    dataset, version = precache.CachedDataset(store.path), store.open()
    rows, expected = np.flatnonzero(version.valid), store.rows()
    assert (len(dataset), version.rows) == (21, 23)
    assert repr(dataset) == f"<precache dataset, 21 samples: {version!r}>"
    assert list(dataset.keys) == [version.keys[row] for row in rows]
    samples: list[dict[str, torch.Tensor]] = list(dataset)  # type: ignore[call-overload]
    assert [int(sample["row"]) for sample in samples] == rows.tolist()
    for index, sample in enumerate(samples):
        assert {name: (values.dtype, values.ndim) for name, values in sample.items()} == {
            "image": (torch.uint8, 3), "label": (torch.int64, 0), "row": (torch.int64, 0)
        }  # fmt: skip
        assert list(sample) == ["image", "label", "row"]
        assert dataset.classes[int(sample["label"])] == Path(dataset.keys[index]).parent.name
        np.testing.assert_array_equal(sample["image"].numpy(), expected[rows[index]])
    assert dataset.labels.dtype == np.int64
    assert dataset.labels.tolist() == [int(sample["label"]) for sample in samples]
    assert dataset.classes == version.classes == ("cat", "dog", "eel")
    for index in (-1, -21, np.int64(3), torch.tensor(3), np.array(3)):
        sample = dataset[index]  # type: ignore[index]
        assert int(sample["row"]) == rows[int(index)]
        np.testing.assert_array_equal(sample["image"], expected[rows[int(index)]])


def test_a_batch_beyond_the_memory_is_refused(
    dataset: precache.CachedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache.loading.slots.available_bytes", lambda: 1 << 29)
    row = sum(values.nbytes for values in dataset[0].values())
    count = (1 << 30) // row + 1
    words = f"a batch of {count} rows takes {count * row} bytes, and {1 << 29} are free; give a "
    with pytest.raises(UsageError, match=words + "smaller batch_size"):
        dataset.__getitems__([0] * count)


ONE = r"an index is .*; give .*, np.flatnonzero\(mask\)"
SEVERAL = r"the indices are .*; give \(n,\) whole numbers, or \(21,\)"


@pytest.mark.parametrize(
    ("index", "said"),
    [
        *((index, f"{index}.* is outside of the 21 samples") for index in (21, -22, 10**12)),
        *((index, ONE) for index in (1.5, "3", None, True, np.True_, torch.tensor(True))),
        *((index, SEVERAL) for index in ([[1]], [1.5], ["a"], np.array([True, False]))),
    ],
)
def test_what_is_no_index_is_refused(
    dataset: precache.CachedDataset, index: Any, said: str
) -> None:
    outside = "outside" in said
    ways: list[Callable[[], Any]] = [lambda: dataset[index]]
    if outside:
        ways += [lambda: dataset.__getitems__([0, index]), lambda: dataset.keys[index]]
    elif said == ONE:
        ways.append(lambda: Subset(dataset, [index])[0])
    for number, way in enumerate(ways):
        with pytest.raises(
            IndexError if outside else UsageError, match=None if outside and number else said
        ):
            way()


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
    for own in ("transform", "labels", "classes"):
        of_class = type("OfClass", (precache.CachedDataset,), {own: property(len)})
        with pytest.raises(UsageError, match=f"{own} was set on a OfClass"):
            of_class(dataset.version.path)
    for labels in (dataset.labels, dataset.version.labels):
        with pytest.raises(ValueError, match="read-only"):
            labels[:] = 7


def test_several_samples_come_in_the_order_asked_for_and_are_the_callers_own(
    dataset: precache.CachedDataset,
) -> None:
    samples = dataset.__getitems__([20, 0, -1, 7, 0])
    assert [int(s["row"]) for s in samples] == [int(dataset[i]["row"]) for i in (20, 0, 20, 7, 0)]
    assert list(dataset.__getitems__([])) == []
    dataset[0]["image"].zero_()
    samples[1]["image"].zero_()
    np.testing.assert_array_equal(samples[4]["image"], dataset[0]["image"])
    assert dataset[0]["label"].add_(5) != dataset[0]["label"]


def test_fields_can_be_chosen_and_labels_are_read_when_they_are_used(
    dataset: precache.CachedDataset, image_store: BuiltStore
) -> None:
    fresh = precache.CachedDataset(image_store.path, fields=["label"])
    assert fresh.__dict__.keys() & {"labels", "keys"} == set()
    assert list(fresh[0]) == ["label", "row"]
    only_images = precache.CachedDataset(image_store.path, fields=["image"])
    assert np.array_equal(only_images.labels, dataset.labels)


def test_what_cannot_be_opened_is_refused(tmp_path: Path, image_store: BuiltStore) -> None:
    cases: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (tmp_path / "nowhere", {}, StoreError, "there is no store"),
        (image_store.path, {"access": "maybe"}, UsageError, "access is 'maybe'; choose one of"),
        (image_store.path, {"fields": ["mask"]}, UsageError, "no field 'mask'; it has image, la"),
        (image_store.path, {"variant": -1}, UsageError, "variant is -1; give a whole number from"),
    ]
    for path, options, error, said in cases:
        with pytest.raises(error, match=said):
            precache.CachedDataset(path, **options)


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


def _stacked(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As torch collates plain dicts."""
    batch: dict[str, torch.Tensor] = default_collate([dict(sample) for sample in samples])
    return batch


def test_a_plain_dataloader_yields_what_torch_would_stack(
    dataset: precache.CachedDataset,
) -> None:
    half, _ = random_split(dataset, [11, 10], torch.Generator().manual_seed(0))
    for source in (dataset, Subset(dataset, range(20, 0, -2)), half):
        stacked = DataLoader(source, 4, collate_fn=_stacked)
        for way in (None, dataset.collate):
            loader = DataLoader(source, 4, collate_fn=way)
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


def test_who_collates_tensors_otherwise_is_asked(
    dataset: precache.CachedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def largest(tensors: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
        return torch.stack(list(tensors)).amax(0)

    samples, ways = dataset.__getitems__([3, 1, 2]), {torch.Tensor: largest}
    row = max(int(sample["row"]) for sample in samples)
    for map_of_ways in (ways, {**default_collate_fn_map, **ways}):
        assert int(collate(samples, collate_fn_map=map_of_ways)["row"]) == row
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, largest)
    assert int(default_collate(samples)["row"]) == row


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
    sources: list[tuple[Any, Sequence[int]]] = [
        (dataset, range(len(dataset))), (Subset(dataset, chosen), chosen), (half, half.indices),
        (ConcatDataset([Subset(dataset, chosen), dataset]), [*chosen, *range(len(dataset))]),
    ]  # fmt: skip
    for source, indices in sources:
        for options in (
            {"collate_fn": _list}, {},
            *([{"collate_fn": _list, "num_workers": 1}] if source is dataset else []),
        ):  # fmt: skip
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
def test_copies_and_pickles_keep_all_attributes_and_no_data(
    kind: type[precache.CachedDataset], stores: dict[str, BuiltStore]
) -> None:
    dataset = _make(kind, stores["raw"])
    dataset.scale, dataset.names = 5, {"a": [1]}
    before = dataset[4]
    _ = dataset.keys, dataset.labels, dataset.classes
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1_500
    for other in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickled)):
        assert type(other) is kind
        assert (other.scale, other.names) == (5, {"a": [1]})
        assert _same(before, other[4])
        assert np.array_equal(other.labels, dataset.labels)
        assert list(other.keys) == list(dataset.keys)
        other.set_epoch(1)
        assert _same(before, dataset[4])


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


def test_a_class_of_fewer_samples_chooses_them_by_the_indices_of_all(
    stores: dict[str, BuiltStore],
) -> None:
    class Chosen(precache.CachedDataset):
        chosen: Sequence[int] = range(5)

        def __len__(self) -> int:
            return len(self.chosen)

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(self.chosen[index])["row"]

    class Few(Chosen):
        __getitem__ = precache.CachedDataset.__getitem__

    dataset: Any = Chosen(stores["raw"].path)
    dataset.chosen = [20, 3, -1, 11]
    plain = precache.CachedDataset(stores["raw"].path)
    rows = [int(plain[index]["row"]) for index in dataset.chosen]
    assert [int(row) for row in dataset] == rows
    assert torch.cat([*DataLoader(dataset, 3)]).tolist() == rows
    few: Any = Few(stores["raw"].path)
    assert len(list(few)) == 5
    assert [len(batch["row"]) for batch in DataLoader(few, 2)] == [2, 2, 1]
    assert int(few[-1]["row"]) == int(few[4]["row"])


# --- labels -------------------------------------------------------------------------------------


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
