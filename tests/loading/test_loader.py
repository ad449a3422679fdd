"""`Loader`: every row once, in an order that is a function, resumable, and no trace left."""

import functools
import inspect
import itertools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import precache
from precache import Reading, Weighted
from precache.errors import UsageError
from precache.loading import batch_source
from precache.sampling import order
from precache.store.small_arrays import small_array
from precache.transforms import HorizontalFlip
from tests.conftest import BuiltStore
from tests.support.building import own_threads
from tests.support.forging import settle
from tests.support.loaders import (
    assert_any_history,
    assert_refused,
    epoch_of,
    opened,
    rows_of,
    valid_rows,
)

RunPython = Callable[..., subprocess.CompletedProcess[str]]


# --- orders -------------------------------------------------------------------------------------


def test_an_order_that_a_thread_computes_block_by_block_is_the_same(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch, no_threads_left: None
) -> None:
    expected = epoch_of(image_store, epoch=1, seed=3)
    for module in (order, batch_source):
        monkeypatch.setattr(module, "POSITIONS_AT_ONCE", 6)
    assert epoch_of(image_store, epoch=1, seed=3) == expected
    with opened(image_store, seed=3) as loader:
        loader.seek(1, 2)
        assert rows_of(itertools.islice(loader, 2)) == expected[2:4]


def test_keys_of_rows_in_every_form(image_store: BuiltStore) -> None:
    with opened(image_store) as loader:
        batch = next(iter(loader))
        rows, one = batch["row"].tolist(), batch["row"][0]
        expected = [image_store.open().keys[row] for row in rows]
        for form in (batch["row"], batch["row"].numpy(), rows, iter(rows), [*batch["row"]]):
            assert loader.keys(form) == expected
        assert loader.keys([]) == []
        assert loader.keys([one]) == loader.keys(np.arange(23) == int(one)) == expected[:1]
        for row in (one, one.numpy(), one.item(), True, None, batch):
            assert_refused((r"give row numbers, as \[0, 5\]", loader.keys, row))
        assert_refused((r"rows has -1, and .* has 23 rows, counted from 0", loader.keys, [-1]))


def test_the_rows_of_any_batch_can_be_told(image_store: BuiltStore) -> None:
    with opened(image_store, seed=3, output="tuple") as loader:
        told = [loader.rows_of_batch(1, number).tolist() for number in range(len(loader))]
        loader.set_epoch(1)
        located = [loader.locate() for _ in loader]
        assert [list(find()) for find in located] == [loader.keys(rows) for rows in told]
    assert epoch_of(image_store, epoch=1, seed=3) == told


def test_fields_can_be_chosen_and_a_tuple_is_made_of_what_the_transform_leaves(
    image_store: BuiltStore,
) -> None:
    with opened(image_store, fields=["label"]) as loader:
        assert [list(batch) for batch in loader] == [["label", "row"]] * 6
    make = functools.partial(opened, image_store)
    tuples = functools.partial(make, fields=["label"], output="tuple")
    assert_refused(
        ("no field 'mask'; it has image, label", lambda: make(fields=["label", "mask"])),
        (r"output='tuple' .* image is not among label, row", tuples),
    )

    def brighten(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {**batch, "image": batch["image"].float() / 255, "label": batch["label"] * 2}

    valid = valid_rows(image_store)
    with opened(image_store, 21, False, transform=brighten, output="tuple") as loader:
        [(image, label)] = list(loader)
    expected = image_store.rows()[valid].astype(np.float32) / 255
    np.testing.assert_array_equal(image.numpy(), expected)
    assert (label.numpy() == 2 * image_store.open().labels[valid]).all()


# --- resuming -----------------------------------------------------------------------------------


ORDERS: list[dict[str, Any]] = [
    {"shuffle": "full"},
    {"shuffle": precache.Block(2)},
    {"shuffle": False},
    {"rows": np.arange(23)},
    {"shuffle": Weighted(np.arange(23.0))},
]


@settings(max_examples=40)
@given(data=st.data())
def test_any_history_of_a_loop_reads_what_its_position_says(
    data: st.DataObject, image_store: BuiltStore
) -> None:
    how: dict[str, Any] = {
        "seed": data.draw(st.integers(0, 2)),
        **data.draw(st.sampled_from(ORDERS)),
    }
    size, drop_last = data.draw(st.integers(1, 21)), data.draw(st.booleans())

    @functools.cache
    def batches_of(epoch: int) -> list[list[int]]:
        rows = [*itertools.chain(*epoch_of(image_store, 1, epoch, **how))]
        found = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [batch for batch in found if len(batch) == size or not drop_last]

    def make() -> precache.Loader:
        threads, ahead = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
        reading = Reading(num_threads=threads, prefetch_batches=ahead)
        return opened(image_store, size, drop_last=drop_last, reading=reading, **how)

    assert_any_history(data, make, batches_of)


BLOCKS = {"shuffle": precache.Block(2)}
OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("seed", {}, {"seed": 1}),
    ("shuffle", {}, {"shuffle": False}),
    ("shuffle", {}, {"shuffle": "block"}),
    ("shuffle", BLOCKS, {"shuffle": precache.Block(3)}),
    ("shuffle", BLOCKS, {"shuffle": precache.Block(2, nodes=2)}),
    ("drop_last", {}, {"drop_last": True}),
    ("rows", {}, {"rows": range(20)}),
    ("weights", {}, {"shuffle": Weighted(np.arange(23))}),
    ("format", {}, {}),
    ("version", {}, {"codec": "raw"}),
]


def test_a_state_of_another_order_or_a_spoilt_one_is_refused_by_name(
    stores: dict[str, BuiltStore],
) -> None:
    for name, base, options in OTHERS:
        with opened(stores["image"], **base) as loader:
            state = {**loader.state_dict(), **({"format": 0} if name == "format" else {})}
        other = {**base, **options}
        with opened(stores[other.pop("codec", "image")], **other) as loader:
            said = f"the saved state has {name}={state[name]!r} and this loader has "
            own = loader.state_dict()
            said = re.escape(f"{said}{own[name]!r}; open ")
            assert_refused((said, loader.load_state_dict, state))
            assert loader.state_dict() == own
    changes: list[dict[str, Any]] = [
        {"format": 2}, {"epoch": None}, {"epoch": "x"}, {"sample": -1}, {"sample": 21},
        {"sample": 1.5},
    ]  # fmt: skip
    with opened(stores["image"]) as loader:
        whole = loader.state_dict()
        states = [(next(iter(change)), {**whole, **change}) for change in changes]
        required = whole.keys() - {"batch"}  # which says the same as `sample`
        states += [(n, {k: v for k, v in whole.items() if k != n}) for n in required]
        for name, state in states:
            assert_refused((name, loader.load_state_dict, state))
        assert loader.state_dict() == whole
        loader.seek(0, len(loader) - 1)
        assert len(list(loader)) == 1
        negative = "epoch is -1; give a whole number from 0 up"
        assert_refused(
            (negative, loader.set_epoch, -1),
            (negative, loader.seek, -1, 0),
            (negative, loader.rows_of_batch, -1, 0),
            ("batch is 6, and an epoch has 6", loader.rows_of_batch, 0, 6),
            ("batch is 6", loader.seek, 0, 6),
            ("batch is -1", loader.seek, 0, -1),
        )


# --- nothing is left over -----------------------------------------------------------------------


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert own_threads() == []
    assert threading.active_count() <= before  # those of a server may end meanwhile


IGNORED: list[tuple[str, Callable[[Any], object]]] = [
    ("iterate over it in place of a DataLoader", lambda loader: loader[0]),
    ("in place of a DataLoader", lambda loader: next(iter(DataLoader(loader, None)))),
    ("in place of a DataLoader", lambda loader: list(DataLoader(loader, num_workers=2))),
    ("state is None; give what state_dict", lambda loader: loader.load_state_dict(None)),
    ("Loader|Mixture was given for a store", precache.Loader),
    ("Loader|Mixture was given for a store", precache.CachedDataset),
    ("transform was set on a .*: give tr", lambda loader: setattr(loader, "transform", len)),
    ("batch_size was set on a .*: give batch", lambda loader: setattr(loader, "batch_size", 3)),
    ("sampler was set on a .*: give", lambda loader: setattr(loader, "sampler", [1])),
]


@pytest.mark.parametrize("mixed", [False, True])
def test_what_a_loader_would_ignore_is_refused(mixed: bool, image_store: BuiltStore) -> None:
    loader = opened(image_store, 2)
    with precache.mix([loader]) if mixed else loader as batches:
        batches.sampler = None  # type: ignore[union-attr]  # as for timm's train.py
        for way, use in IGNORED:
            assert_refused((way, use, batches))
        assert next(iter(batches))


def test_a_subclass_that_names_what_a_loader_would_ignore_is_refused_unless_it_iterates_itself(
    image_store: BuiltStore,
) -> None:
    for name in ("transform", "batch_size", "collate_fn"):
        for value in (len, property(len), 3):
            said = f"^{name} was set on a Own, .*: give {name} when"
            assert_refused((said, type, "Own", (precache.Loader,), {name: value}))

    class Doubled(precache.Loader):
        def __iter__(self) -> Iterator[Any]:
            return map(self.transform, super().__iter__())

        transform: Any

    with Doubled(image_store.path, 2) as loader:
        loader.transform = len
        assert set(loader) == {3}
        said = "source 0 is a Doubled with an __iter__ of its own"
        assert_refused((said, precache.mix, [loader]))


def test_two_iterators_of_a_loader_are_two_epochs(
    image_store: BuiltStore, no_threads_left: None
) -> None:
    with opened(image_store) as loader:
        pairs = [rows_of(pair) for pair in zip(loader, loader, strict=True)]
    epochs = [epoch_of(image_store, epoch=number) for number in (0, 1)]
    assert pairs == [list(pair) for pair in zip(*epochs, strict=True)]


FORK = """
import os, sys, threading, warnings
import precache
from precache.reading import array_reader

# A fork beside threads is deprecated from Python 3.12 on, and yet what DataLoader does.
warnings.simplefilter("ignore", DeprecationWarning)
loader = precache.Loader(sys.argv[1], 4, reading=precache.Reading(num_threads=2))
expected = sorted(int(s["row"]) for s in precache.CachedDataset(sys.argv[1]))

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(sorted(r for batch in loader for r in batch["row"].tolist()) != expected)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

FORK_WITHIN_AN_EPOCH = """
before = fork()
batches = iter(loader)
next(batches)
during = fork()
if os.fork() == 0:
    try:
        next(batches)
    except precache.UsageError as error:
        os._exit("before the process forked" not in str(error))
    os._exit(2)
inherited = os.waitstatus_to_exitcode(os.wait()[1])
rest = sum(1 for _ in batches)
after = fork()
print(before, during, inherited, after, rest)
"""

FORK_WHILE_CHUNKS_ARE_KEPT = """
class Held(array_reader.DecodedChunks):
    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()

    def copy(self, *args):
        with self.lock:
            within.set()
            if os.getpid() == parent:
                forked.wait()
            return super().copy(*args)

parent, within, forked = os.getpid(), threading.Event(), threading.Event()
array_reader.DecodedChunks = Held
thread = threading.Thread(target=list, args=(loader,))
thread.start()
within.wait()
print(fork())
forked.set()
thread.join()
"""


# Several batches at a time, and one.
@pytest.mark.parametrize("codec", [pytest.param("raw", marks=pytest.mark.heavy), "image"])
def test_a_fork_before_within_and_after_an_epoch_reads_on(
    codec: str, stores: dict[str, BuiltStore], run_python: RunPython
) -> None:
    assert run_python(FORK + FORK_WITHIN_AN_EPOCH, stores[codec].path).stdout == "0 0 0 0 5\n"


@pytest.mark.heavy
def test_a_fork_while_decoded_chunks_change_reads_on(
    tile_stores: dict[str, BuiltStore], run_python: RunPython
) -> None:
    code = FORK + FORK_WHILE_CHUNKS_ARE_KEPT
    assert run_python(code, tile_stores["image"].path).stdout == "0\n"


# --- what is refused ----------------------------------------------------------------------------

UP, ONES = "choose one of True, False, full, block", "give one of precache.transforms"
REFUSED: list[tuple[str, Any, str]] = [
    ("batch_size", 0, "batch_size is 0; give a whole number from 1 up"),
    ("batch_size", -4, "batch_size is -4"),
    ("batch_size", 2**63, r"is 9223372036854775808; .* from 1 up, at most 9,22"),
    ("batch_size", 2.5, r"batch_size is 2\.5"),
    ("batch_size", "4", "batch_size is '4'"),
    ("drop_last", "no", "drop_last is 'no'; choose one of True, False"),
    ("output", "list", "output is 'list'; choose one of dict, tuple"),
    ("cache", 5, "cache is 5; give a folder on a local disk, or a Cache"),
    ("cache", "a\0b", r"cache is 'a\\x00b'; give a folder on a local disk, or a Cache"),
    ("shuffle", "some", f"shuffle is 'some'; {UP}"),
    ("shuffle", {}, f"shuffle is {{}}; {UP}"),
    ("shuffle", np.ones(23), rf"shuffle is array\(.*\); {UP}"),
    ("shuffle", torch.ones(23), rf"shuffle is tensor\(.*\); {UP}"),
    ("reading", 2, r"reading is 2; give a Reading, as Reading\(num_threads=2\)"),
    ("transform", 3, f"transform is 3; {ONES}"),
    ("transform", 0, f"transform is 0; {ONES}"),
    ("transform", HorizontalFlip, "transform is the class HorizontalFlip; make one, as Horiz"),
    ("device", "cdua", "device 'cdua' is not one torch knows"),
    ("device", "meta", "meta"),
    ("device", "cpu:x", "cpu:x"),
]


REFUSED_READING: list[tuple[str, Any, str]] = [
    ("access", {}, "access is {}; choose one of map, pread"),
    ("resident", "disk", "resident is 'disk'"),
    ("num_threads", -1, "num_threads is -1"),
    ("prefetch_batches", -1, "prefetch_batches is -1"),
    ("decompress", "gpu", "decompress is 'gpu'; choose one of host, device"),
]
UNKNOWN = [
    ("num_threads", r"give reading=Reading\(num_threads=…\)"),
    ("window", r"give shuffle=Block\(window=…\)"),
    ("weights", r"give shuffle=Weighted\(weights\)"),
    ("num_workers", r"threads of its own, as reading=Reading\(num_threads=…\)"),
    ("collate_fn", "transform= takes each batch"),
    ("bach_size", "its options are uri, batch_size, shuffle, .*, refresh$"),
]


def test_a_wrong_option_is_refused_with_its_value(image_store: BuiltStore) -> None:
    """And one that there is not, with the one that is meant."""
    for name, value, words in REFUSED:
        options = {"batch_size": 4, name: value}
        assert_refused((words, functools.partial(precache.Loader, image_store.path, **options)))
    for name, value, words in REFUSED_READING:
        assert_refused((words, functools.partial(precache.Reading, **{name: value})))
    for name, words in UNKNOWN:
        said = rf"Loader\(\) got an unexpected keyword argument '{name}'; .*{words}"
        make = functools.partial(precache.Loader, image_store.path, **{name: 1})
        assert_refused((said, make), error=TypeError)
    assert len(inspect.signature(precache.Loader).parameters) <= 16


def test_rows_without_a_label_are_named_once_where_labels_are_read(
    image_folder: Callable[..., Path],
    make_store: Callable[..., BuiltStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    photos = image_folder(4)
    for name in ("other0.png", "other1.png"):
        shutil.copy(next(photos.glob("*/*.png")), photos / name)
    store = make_store(photos, precache.Recipe.image())
    assert "2 of 6 samples have no label (-1), such as other" in caplog.text
    assert ": 2 are in no class folder" in caplog.text
    caplog.clear()
    labelled = store.open().labels >= 0
    precache.Loader(store.path, 2).close()
    precache.Loader(store.path, 2, output="tuple", rows=labelled).close()
    assert not caplog.records
    for _ in range(2):
        precache.Loader(store.path, 2, output="tuple").close()
    [record] = caplog.records
    assert "2 of 6 rows of " in record.getMessage()
    assert "leave them out with rows=precache.open(…).labels >= 0" in record.getMessage()


def test_a_store_without_a_valid_row_is_refused(
    image_folder: Callable[..., Path], make_store: Callable[..., BuiltStore], tmp_path: Path
) -> None:
    """All rows became holes: forged here, since a build stops long before."""
    store = make_store(image_folder(3, (16, 16)))
    for name, data in small_array(np.zeros(3, np.bool_), ["row"], fill_value=False).items():
        (store.version_folder / "valid" / name).write_bytes(data)
    settle(store.version_folder)
    with pytest.raises(UsageError, match="has 0 valid rows"):
        precache.Loader(store.path, 1)
    assert len(precache.CachedDataset(store.path)) == 0
    with pytest.raises(IndexError):
        precache.CachedDataset(store.path)[0]


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_count_what_was_handed_out(image_store: BuiltStore) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a path cannot list what vanishes
    with opened(image_store) as loader:
        handed = [sum(t.nbytes for t in batch.values()) for batch in loader]
        stats = loader.stats()
        assert (stats.batches, stats.samples, stats.bytes) == (6, 21, sum(handed))
        assert 0 <= stats.stall_ratio <= 1
        assert stats.data.max >= stats.data.median > 0
        assert stats.cpu_seconds > 0
        assert loader.stats().batches == 0
        assert len(os.listdir("/proc/self/fd")) <= descriptors  # noqa: PTH208 - as above


# --- closing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
def test_a_loader_may_be_closed_by_what_runs_inside_it(
    mixed: bool, image_store: BuiltStore, no_threads_left: None
) -> None:
    def close(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batches.close()
        return batch

    loader = opened(image_store, 4, transform=close)
    batches: Any = precache.mix([loader]) if mixed else loader
    assert len(list(batches)) in ({0, 1} if mixed else {1})


def test_a_loader_may_be_closed_by_another_thread(
    image_store: BuiltStore, no_threads_left: None
) -> None:
    loader, seen = opened(image_store), list[int]()
    inside, closed = threading.Event(), threading.Event()

    def train() -> None:
        for batch in loader:
            seen.append(len(batch["row"]))
            inside.set()
            closed.wait()

    thread = threading.Thread(target=train)
    thread.start()
    inside.wait()
    loader.close()
    closed.set()
    thread.join(30)
    assert not thread.is_alive()
    assert seen == [4]
