"""Slots are aligned, come back when nobody reads them any more, and not before."""

import contextlib
import gc
import logging
import re
import threading
import tracemalloc
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import precache
from precache import Reading
from precache.errors import DamageError
from precache.loading import stream
from precache.loading.slots import (
    STEPS_AHEAD,
    DeviceCopier,
    SlotLayout,
    SlotPool,
    map_tensors,
    slots_of_a_block,
)
from precache.reading.version_reader import VersionReader
from precache.recipe.ops import DTYPES
from tests.conftest import BuiltStore
from tests.support.loaders import opened, rows_as_stored, valid_rows


class Encoding(UserDict[str, Any]):
    """A batch as tokenizers return it, with an attribute."""

    def __init__(self, data: dict[str, Any], length: int) -> None:
        super().__init__(data)
        self.length = length


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)


class Odd(Frozen):
    """A mapping that is not made of another."""

    def __init__(self, *, data: dict[str, Any]) -> None:
        super().__init__(data)


def test_mapped_batches_keep_their_type_and_leave_the_original() -> None:
    data = {"image": torch.zeros(2), "key": ["a", "b"]}
    made: list[tuple[Any, type]] = [
        (Encoding(data, 7), Encoding),
        (OrderedDict(data), OrderedDict),
        (Frozen(data), Frozen),
        (Odd(data=data), dict),
    ]
    for batch, kind in made:
        mapped = map_tensors([batch], lambda tensor: tensor + 1)[0]
        assert type(mapped) is kind
        assert mapped["key"] == ["a", "b"]
        assert mapped["image"].tolist() == [1, 1]
        assert batch["image"].tolist() == [0, 0]
    assert map_tensors(Encoding(data, 7), torch.clone).length == 7


FIELDS = st.dictionaries(
    st.sampled_from(["image", "label", "mask", "row"]),
    st.tuples(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
)


def _address(slot: np.ndarray) -> int:
    return slot.__array_interface__["data"][0]


# --- layout -------------------------------------------------------------------------------------


@given(FIELDS, st.integers(1, 20), st.data())
def test_fields_lie_apart_at_multiples_of_64_bytes(
    fields: dict[str, tuple[tuple[int, ...], str]], batch_size: int, data: st.DataObject
) -> None:
    """And tensors and arrays are the same memory."""
    layout = SlotLayout.of(fields, batch_size)
    slot = SlotPool(layout.nbytes, 1).acquire()
    slot[:] = 1
    rows = data.draw(st.integers(1, batch_size))
    arrays, tensors = layout.arrays(slot, rows), layout.tensors(torch.from_numpy(slot), rows)
    assert list(arrays) == list(tensors) == list(fields)
    assert _address(slot) % 64 == 0
    for number, (name, array) in enumerate(arrays.items()):
        shape, dtype = fields[name]
        assert (array.shape, array.dtype.name) == ((rows, *shape), dtype)
        assert _address(array) % 64 == 0
        assert array.flags.c_contiguous
        assert tensors[name].shape == array.shape
        assert tensors[name].numpy().dtype == array.dtype
        assert tensors[name].data_ptr() == _address(array)
        array.view(np.uint8).fill(number)
    for number, array in enumerate(arrays.values()):
        assert (array.view(np.uint8) == number).all()


# --- the pool -----------------------------------------------------------------------------------


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(1000, keep=2)


@given(st.integers(1, 1 << 28), st.integers(1, 40))
@example(256 * 224 * 224 * 3, 11)
def test_slots_share_page_locked_blocks_that_torch_rounds_up_by_little(
    nbytes: int, slots: int
) -> None:
    def taken(each: int) -> int:
        return -(-slots // each) * (1 << (each * nbytes - 1).bit_length())

    chosen = slots_of_a_block(nbytes, slots)
    assert taken(chosen) == min(map(taken, range(1, slots + 1)))
    assert taken(chosen) <= taken(1)
    if slots >= 3:
        assert taken(chosen) <= 2 * slots * nbytes
    usual = 256 * 224 * 224 * 3  # three of them take a third less
    assert [slots_of_a_block(*s) for s in ((usual, 11), (usual, 6), (1 << 25, 11))] == [3, 3, 1]


def _leaving(slot: np.ndarray) -> torch.Tensor:
    """As a batch leaves: a tensor of a view of a view."""
    return torch.from_numpy(slot[:].view(np.uint8).reshape(2, -1)).view(-1)


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[3:5],
    "a reshaped view": lambda tensor: tensor.view(10, 100),
    "another dtype": lambda tensor: tensor.view(torch.int64),
    "an array": lambda tensor: tensor.numpy(),
    "a slice of an array": lambda tensor: tensor.numpy()[7:],
    "an array of a slice": lambda tensor: tensor[7:].numpy(),
    "a transposed view": lambda tensor: tensor.view(10, 100).T,
    "the storage": lambda tensor: tensor.untyped_storage(),
    "detached": lambda tensor: tensor.detach(),
    "through DLPack": np.from_dlpack,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_slot_comes_back_when_its_last_reader_is_gone(pool: SlotPool, holder: str) -> None:
    slot = pool.acquire()
    address = _address(slot)
    held = HOLDERS[holder](_leaving(slot))
    del slot
    fresh = pool.acquire()
    assert _address(fresh) != address
    del held
    assert _address(pool.acquire()) == address


def test_a_reader_in_a_cycle_holds_its_slot_until_it_is_collected_and_a_copy_holds_none(
    pool: SlotPool,
) -> None:
    slot = pool.acquire()
    address, copy = _address(slot), _leaving(slot).clone()
    cycle: list[object] = [_leaving(slot)]
    cycle.append(cycle)
    del slot, cycle
    gc.collect()
    assert _address(pool.acquire()) == address
    assert len(copy) == 1000


def test_an_empty_pool_makes_fresh_slots_and_says_so_once(
    pool: SlotPool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="precache"):
        held = [pool.acquire() for _ in range(2)]
        assert not caplog.records
        held += [pool.acquire() for _ in range(5)]
    assert len({_address(slot) for slot in held}) == 7
    assert len(caplog.records) == 1
    assert "more than 2 batches" in caplog.text


def test_no_slot_is_with_two_threads_at_once() -> None:
    pool = SlotPool(64, keep=100)

    def clashes(number: int) -> int:
        found = 0
        for _ in range(300):
            slot = pool.acquire()
            slot[:] = number
            tensor = _leaving(slot)
            found += not (tensor == number).all()
            del slot, tensor
        return found

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(clashes, range(4))] == [0] * 4
    assert 1 <= pool.owned <= 4
    assert len(pool._free) == pool.owned


# --- through the loader -------------------------------------------------------------------------


def test_what_is_kept_of_a_batch_stays_what_it_was(
    image_store: BuiltStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines of its pixels, or whole batches, which is said once; a loop that keeps nothing goes
    round in a few slots."""
    expected, kept = image_store.rows(), list[tuple[int, np.ndarray]]()
    with opened(image_store, 3, reading=Reading(num_threads=2)) as loader:
        for batch in (batch for _ in range(3) for batch in loader):
            kept.append((int(batch["row"][1]), batch["image"][1, :, 5:9].numpy()))
            del batch
    caplog.clear()
    with opened(image_store, 1, reading=Reading(num_threads=1, prefetch_batches=2)) as loader:
        batches = list(loader)
    assert len(kept) == len(batches) == 21
    rows_as_stored(batches, image_store)
    for row, lines in kept:
        np.testing.assert_array_equal(lines, expected[row, :, 5:9])
    assert len({batch["image"].data_ptr() for batch in batches}) == 21
    assert len([r for r in caplog.records if "batches" in r.message]) == 1
    with opened(image_store, 2, reading=Reading(num_threads=1, prefetch_batches=2)) as loader:
        addresses = [batch["image"].data_ptr() for _ in range(4) for batch in loader]
    assert len(addresses) == 44
    assert len(set(addresses)) <= 5
    assert all(address % 64 == 0 for address in addresses)


def test_memory_of_batches_is_free_with_the_last_one_even_of_a_closed_loader(
    image_store: BuiltStore, request: pytest.FixtureRequest
) -> None:
    def held() -> int:
        return tracemalloc.get_traced_memory()[0]

    with opened(image_store, 1, reading=Reading(num_threads=1, prefetch_batches=1)) as loader:
        tracemalloc.start()
        request.addfinalizer(tracemalloc.stop)
        batches = list(loader)
        before, nbytes = held(), batches[0]["image"].nbytes
        assert before > 21 * nbytes
        batches.clear()
        assert held() < before - 16 * nbytes
        batches = list(loader)
        last = batches[20]["image"]
        values = last.clone()
        del batches
        loader.close()
        assert torch.equal(last, values)
        before = held()
        del last
        assert held() < before - nbytes / 2


ITERABLES: dict[str, Callable[..., Any]] = {
    "a loader": lambda first, second: first,
    "a mixture": lambda first, second: precache.mix([first, second]),
    "a meter": lambda first, second: precache.meter(first, to=[]),
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", ITERABLES)
def test_a_batch_that_is_dropped_within_its_step_is_gone(
    name: str, image_store: BuiltStore
) -> None:
    raw: list[weakref.ref[torch.Tensor]] = []

    def transform(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raw.append(weakref.ref(batch["image"]))
        return {**batch, "image": batch["image"].float()}

    first, second = (opened(image_store, 3, transform=transform) for _ in range(2))
    with first, second:
        batches = iter(ITERABLES[name](first, second))
        for _ in range(4):
            batch = next(batches)
            assert [each() for each in raw] == [None] * len(raw)
            image = weakref.ref(batch["image"])
            del batch
            assert image() is None
        batches.close()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads divide batches of any size."""
    monkeypatch.setattr(stream, "PART_NBYTES", 1)


def test_all_threads_decode_the_same_batch(
    image_store: BuiltStore, parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until three have begun, of an epoch of one batch."""
    together, read = threading.Barrier(3), VersionReader.read

    def read_together(self: VersionReader, *args: Any, **kwargs: Any) -> None:
        together.wait(30)
        read(self, *args, **kwargs)

    monkeypatch.setattr(VersionReader, "read", read_together)
    with opened(image_store, 21, reading=Reading(num_threads=3)) as loader:
        assert len(rows_as_stored(loader, image_store)) == 21


def test_damage_is_raised_at_its_batch_in_whichever_part_it_is(
    stores: dict[str, BuiltStore], copy_store: Callable[[BuiltStore], BuiltStore], parts: None
) -> None:
    store = copy_store(stores["zstd"])
    row = valid_rows(store)[13]
    [reader] = VersionReader(str(store.path)).readers.values()
    [[_, number, _, offset, length]] = zip(*reader._objects.locate(np.array([row])), strict=True)
    with reader._objects.path(int(number)).open("r+b") as file:
        file.seek(offset + length // 2)
        file.write(bytes(9))
    with opened(store, 4, shuffle=False, reading=Reading(num_threads=3)) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        with pytest.raises(DamageError, match=re.escape(store.open().keys[row])):
            next(batches)
        gc.collect()
        pool: Any = loader._source.stream._pool  # type: ignore[union-attr]
        assert pool.owned == len(pool._free)


def test_slots_come_back_from_an_epoch_that_is_left(image_store: BuiltStore, parts: None) -> None:
    with opened(image_store, 2, reading=Reading(num_threads=3)) as loader:
        pool: Any = loader._source.stream._pool  # type: ignore[union-attr]
        for epoch in range(20):
            for number, batch in enumerate(loader):
                del batch
                if number == epoch % 5:
                    break
            assert len(pool._free) == pool.owned <= pool._keep


# --- to a device --------------------------------------------------------------------------------


class Event:
    """Stands in for one of CUDA's: passed when it is told so."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking, self.passed, self.waited = blocking, False, False
        self.on: object = None
        self.query: Callable[[], bool] = lambda: self.passed

    def record(self, stream: object) -> None:
        self.on = stream

    def synchronize(self) -> None:
        self.waited = True


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The caller's stream, where CUDA is stood in for."""
    stream = Mock()
    stand_ins = {"Stream": Mock(), "Event": Event, "current_stream": lambda device: stream}
    contexts = {name: lambda each: contextlib.nullcontext() for name in ("device", "stream")}
    for name, stand_in in {**stand_ins, **contexts}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return stream


@pytest.fixture
def copier(pool: SlotPool, users: Mock) -> DeviceCopier:
    return DeviceCopier(pool, torch.device("cpu"))


def _send(copier: Any, slot: np.ndarray) -> tuple[Event, dict[str, Mock]]:
    sent = copier.send(slot, len(slot), lambda memory: {"image": Mock()})
    return sent.arrived, copier.hand_out(sent)


def test_a_slot_comes_back_once_it_is_copied_and_the_callers_stream_waits_for_that(
    pool: SlotPool, users: Mock, copier: DeviceCopier
) -> None:
    slot = pool.acquire()
    address = _address(slot)
    there, batch = _send(copier, slot)
    del slot
    users.wait_event.assert_called_once_with(there)
    assert there.on is copier._stream
    batch["image"].record_stream.assert_called_once_with(users)
    copied: Any = pool._copies[0][0]
    pool._collect_copies()
    other = pool.acquire()
    assert _address(other) != address
    copied.passed = True
    pool._collect_copies()
    assert _address(pool.acquire()) == address


def test_a_closed_pool_has_waited_for_its_copies_also_of_slots_that_could_not_be_unpacked(
    pool: SlotPool, copier: Any
) -> None:
    _send(copier, pool.acquire())
    slot = pool.acquire()
    with pytest.raises(ZeroDivisionError):
        copier.send(slot, len(slot), lambda memory: 1 / 0)
    assert pool._copies[1][1] is slot
    del slot
    copies: Any = list(pool._copies)
    gone = [weakref.ref(slot) for _, slot in copies]
    events = [event for event, _ in copies]
    del copies
    pool.close()
    assert all(event.waited for event in events)
    assert [each() for each in gone] == [None, None]


def test_the_host_waits_for_the_device_once_it_is_too_far_ahead(
    pool: SlotPool, users: Mock, copier: Any
) -> None:
    queued: Any = copier._handed_out
    for number in range(3 * STEPS_AHEAD):
        oldest = queued[0] if len(queued) == STEPS_AHEAD else None
        _send(copier, pool.acquire())
        assert len(queued) == min(number + 1, STEPS_AHEAD)
        assert [each for each in queued if each.waited] == [oldest] * bool(oldest)
        if oldest:
            assert queued[-1] is oldest  # it is used again
            oldest.waited = False
    assert all(each.blocking and each.on is users for each in queued)
