"""`CachedDataset` is a map-style dataset like any other, in any process."""

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
from tests.support.loaders import assert_refused, rows_as_stored, valid_rows


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
    monkeypatch.setattr("precache.runtime.usage.available_bytes", lambda: 1 << 29)
    row = sum(values.nbytes for values in dataset[0].values())
    count = (1 << 30) // row + 1
    words = f"a batch of {count} rows takes {count * row} bytes, and {1 << 29} are free; give a "
    with pytest.raises(UsageError, match=words + "smaller batch_size"):
        dataset.__getitems__([0] * count)


ONE = r"an index is .*; give .*, np.flatnonzero\(mask\)"
SEVERAL = r"the indices are .*; give \(n,\) whole numbers, or \(21,\)"


def test_what_is_no_index_is_refused(dataset: Any) -> None:
    for index in (21, -22, 10**12, 2**63, -(2**70)):
        said, several, keys = f"{index}.* is outside of the 21 samples", [0, index], dataset.keys
        assert_refused((said, dataset.__getitem__, index), error=IndexError)
        assert_refused(
            ("", dataset.__getitems__, several), ("", keys.__getitem__, index), error=IndexError
        )
    for index in (1.5, "3", None, True, np.True_, torch.tensor(True)):
        subset = Subset(dataset, [index])
        assert_refused((ONE, dataset.__getitem__, index), (ONE, subset.__getitem__, 0))
    for index in ([[1]], [1.5], ["a"], np.array([True, False])):
        assert_refused((SEVERAL, dataset.__getitem__, index))


def test_several_indices_give_their_batch(dataset: precache.CachedDataset) -> None:
    wanted = default_collate([dataset[number] for number in (3, 5, 7)])
    places = torch.tensor([3, 5, 7])
    lists: list[Any] = [[3, 5, 7], [3, -16, -14]]
    for index in (
        *lists, slice(3, 9, 2), (3, 5, 7), places.numpy(), places,
        np.isin(np.arange(21), [3, 5, 7]), torch.isin(torch.arange(21), places),
    ):  # fmt: skip
        assert _same(dataset[index], wanted)
    for index in lists:
        batches: DataLoader[Any] = DataLoader(dataset, batch_size=None, sampler=[index])
        assert _same(next(iter(batches)), wanted)


def test_what_samples_would_not_follow_cannot_be_set(dataset: precache.CachedDataset) -> None:
    class Plain(precache.CachedDataset):
        pass

    ways = {
        "transform": "Loader", "target_transform": "__getitem__", "targets": "--labels",
        "labels": "--labels", "samples": "Subset", "variant": "set_epoch",
    }  # fmt: skip
    for holder in (dataset, random_split(dataset, [20, 1])[0].dataset, Plain(dataset.version.path)):
        for name, way in ways.items():
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
    assert isinstance(samples[0], dict)
    assert type(dataset[3]) is dict
    for copied in (
        copy.copy(samples[0]), copy.deepcopy(samples[0]), pickle.loads(pickle.dumps(samples[0])),
        {**samples[0]}, samples[0].copy(),
    ):  # fmt: skip
        assert type(copied) is dict
        assert list(copied) == ["image", "label", "row"]
        assert _same(copied, dict(samples[0]))
    copy.deepcopy(samples)[1]["image"].fill_(0)
    dataset[0]["image"].zero_()
    np.testing.assert_array_equal(samples[1]["image"], dataset[0]["image"])
    samples[1]["image"].zero_()
    np.testing.assert_array_equal(samples[4]["image"], dataset[0]["image"])
    assert dataset[0]["label"].add_(5) != dataset[0]["label"]
    assert samples[-1] is samples[4]
    with pytest.raises(IndexError):
        samples[5]


def test_fields_can_be_chosen_and_labels_are_read_when_they_are_used(
    dataset: precache.CachedDataset, image_store: BuiltStore, tmp_path: Path
) -> None:
    fresh = precache.CachedDataset(image_store.path, fields=["label"])
    assert fresh.__dict__.keys() & {"labels", "keys"} == set()
    assert list(fresh[0]) == ["label", "row"]
    only_images = precache.CachedDataset(image_store.path, fields=["image"])
    assert np.array_equal(only_images.labels, dataset.labels)
    make: Any = functools.partial(precache.CachedDataset, image_store.path)
    assert_refused(
        ("access is 'maybe'; choose one of", lambda: make(access="maybe")),
        ("no field 'mask'; it has image, la", lambda: make(fields=["mask"])),
        ("variant is -1; give a whole number from", lambda: make(variant=-1)),
    )
    with pytest.raises(StoreError, match="there is no store"):
        precache.CachedDataset(tmp_path / "nowhere")


# --- other processes ----------------------------------------------------------------------------


def test_a_pickle_opens_the_same_version(
    photos: Path, make_store: Callable[..., BuiltStore]
) -> None:
    store = make_store(photos, precache.Recipe.image(codec="raw"))
    fields: Any = iter(["image"])
    dataset = precache.CachedDataset(store.path, fields=fields)
    data = pickle.dumps(dataset)
    precache.build(photos, store.path, precache.Recipe.image(codec="zstd"), address="serial")
    again = pickle.loads(data)
    assert again.version.id == dataset.version.id != store.open().id
    assert _same(again[3], dataset[3])


@pytest.mark.parametrize(("context", "workers"), [(None, 0), ("fork", 2), ("spawn", 1)])
def test_a_dataloader_reads_it_in_any_kind_of_worker(
    context: str | None, workers: int, image_tiles: BuiltStore
) -> None:
    dataset = precache.CachedDataset(image_tiles.path)
    _ = dataset[0]  # what a parent has mapped must serve its children too
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
    batches: DataLoader[Any] = DataLoader(dataset, batch_size=16, shuffle=True, **options)
    assert sorted(rows_as_stored(batches, image_tiles)) == valid_rows(image_tiles)


def _stacked(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As torch collates plain dicts."""
    batch: dict[str, torch.Tensor] = default_collate([dict(sample) for sample in samples])
    return batch


def test_a_plain_dataloader_yields_what_torch_would_stack_and_copies_nothing_that_lies_together(
    dataset: precache.CachedDataset,
) -> None:
    half, _ = random_split(dataset, [11, 10], torch.Generator().manual_seed(0))
    for source in (dataset, Subset(dataset, range(20, 0, -2)), half, Subset(half, [3, 2, 1, 0])):
        stacked = DataLoader(source, 4, collate_fn=_stacked)
        for way in (default_collate, dataset.collate):
            for expected, found in zip(stacked, DataLoader(source, 4, collate_fn=way), strict=True):
                assert type(found) is dict
                assert list(expected) == list(found)
                assert _same(expected, found)
            samples = source.__getitems__([3, 1, 2])
            batch = way(samples)
            assert batch["image"].data_ptr() == samples[0]["image"].data_ptr()
            assert [int(sample["row"]) for sample in samples] == batch["row"].tolist()
            some = way([samples[2], samples[0]])
            assert torch.equal(some["row"], batch["row"][[2, 0]])
            assert torch.equal(some["image"], batch["image"][[2, 0]])


CHANGES: list[Callable[[dict[str, torch.Tensor]], object]] = [
    lambda sample: sample.update(label=sample["label"] * 2),
    lambda sample: sample.update(weight=torch.tensor(0.5)),
    lambda sample: sample.pop("row"),
    lambda sample: sample["image"].fill_(7),
    lambda sample: sample["image"].unsqueeze_(0),
    lambda sample: setattr(sample["image"], "data", sample["image"].float() / 255),
]


def test_samples_that_were_changed_are_collated_as_they_are(
    dataset: precache.CachedDataset,
) -> None:
    for change in CHANGES:
        samples, plain = (dataset.__getitems__([3, 1, 2]) for _ in range(2))
        same = [dict(sample) for sample in plain]
        for sample in (*samples, *same):
            change(sample)
        found, stacked = default_collate(samples), default_collate(same)
        assert list(found) == list(stacked)
        assert _same(found, stacked)


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
    chosen, whole = [4, 0, 0, 20], range(len(dataset))
    of_workers = {"collate_fn": _list, "num_workers": 1}
    for source, indices, *more in (
        (dataset, whole, of_workers), (Subset(dataset, chosen), chosen), (half, half.indices),
        (ConcatDataset([Subset(dataset, chosen), dataset]), [*chosen, *whole]),
    ):  # fmt: skip
        for options in ({"collate_fn": _list}, {}, *more):
            loader: DataLoader[Any] = DataLoader(source, batch_size=4, **options)
            wanted = [expected[index] for index in indices]
            batches = [wanted[start : start + 4] for start in range(0, len(wanted), 4)]
            if not options:
                batches = [default_collate(batch) for batch in batches]
            assert _same(batches, list(loader)), (source, options)
    single: DataLoader[Any] = DataLoader(dataset, batch_size=None, sampler=chosen)
    assert [_same(expected[i], found) for i, found in zip(chosen, single, strict=True)]


def test_a_class_that_reads_several_samples_in_its_own_way_is_refused() -> None:
    own = {"__getitems__": lambda self, indices: [0]}
    mixin, base = type("Mixin", (), own), precache.CachedDataset
    for bases, members in (((base,), own), ((Scaled,), own), ((mixin, Scaled), {})):
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
    lookup = {"__getattr__": staticmethod(functools.partial(getattr, cached))}
    for wrapper in (_Wrapper(cached), type("InC", (_Wrapper,), lookup)(cached)):
        for dataset in (wrapper, Subset(wrapper, range(21))):
            [(images, labels)] = DataLoader(dataset, batch_size=21)
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
    reads, read = list[int](), VersionReader.read

    def counted(self: VersionReader, rows: np.ndarray, *args: Any, **options: Any) -> None:
        reads.append(len(rows))
        read(self, rows, *args, **options)

    monkeypatch.setattr(VersionReader, "read", counted)
    for kind in (Scaled, Mixed, Reversed, Slotted):
        reads.clear()
        list(DataLoader(_make(kind, stores["raw"]), 8, collate_fn=_list))
        assert reads == ([8, *[1] * 42] if kind is Reversed else [8, 8, 5]), kind


def test_each_sample_of_a_subclass_is_its_own_and_it_may_handle_what_cannot_be_read(
    copy_store: Callable[..., BuiltStore], stores: dict[str, BuiltStore]
) -> None:
    class Zeroed(precache.CachedDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            before = sample["image"].clone()
            sample["image"].zero_()
            return before

    class Patient(precache.CachedDataset):
        def __getitem__(self, index: int) -> Any:
            try:
                return super().__getitem__(index)["row"]
            except DamageError:
                return torch.tensor(-1)

    zeroed: Any = Zeroed(stores["raw"].path)
    image = precache.CachedDataset(stores["raw"].path)[2]["image"]
    assert all(torch.equal(found, image) for found in zeroed.__getitems__([2, 2]))
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

    dataset, few, plain = (c(stores["raw"].path) for c in (Chosen, Few, precache.CachedDataset))
    dataset.chosen = [20, 3, -1, 11]
    rows = [int(plain[index]["row"]) for index in dataset.chosen]
    assert [int(row) for row in dataset] == rows
    assert torch.cat([*DataLoader(dataset, 3)]).tolist() == rows
    assert len(list(few)) == 5
    assert [len(batch["row"]) for batch in DataLoader(few, 2)] == [2, 2, 1]
    assert int(few[-1]["row"]) == int(few[4]["row"])


# --- labels -------------------------------------------------------------------------------------


def test_holes_that_rows_and_indices_leave_out_are_said(
    stores: dict[str, BuiltStore], caplog: pytest.LogCaptureFixture
) -> None:
    version = precache.open(stores["raw"].path)
    indices, hint = [0, 5, 20], "np.flatnonzero(version.valid)[indices]"
    for rows, is_said in (
        (indices, True), ([version.rows - 1, *indices], False), (version.labels == 0, False)
    ):  # fmt: skip
        caplog.clear()
        with precache.Loader(version, batch_size=2, rows=rows, device="cpu") as loader:
            assert len(loader) > 0
        assert (hint in caplog.text) == ("holes" in caplog.text) == is_said
    caplog.clear()
    dataset = precache.CachedDataset(stores["raw"].path)
    pickle.loads(pickle.dumps(dataset))
    [line] = caplog.messages
    rows = dataset.version.rows
    assert line.startswith(f"{rows - 21} of {rows} rows of {dataset.version.path} are holes, which")
