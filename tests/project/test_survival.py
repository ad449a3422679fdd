"""However a loop ends, nothing hangs, nothing is left over, and the first error is told."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import precache
from precache import Reading
from precache.errors import DamageError, GoneError, StoreError
from precache.reading.version_reader import VersionReader
from tests.conftest import BuiltStore
from tests.support.building import DEADLINE, ask, environment, own_threads, poll, running

RunPython = Callable[..., subprocess.CompletedProcess[str]]
CopyStore = Callable[[BuiltStore], BuiltStore]

ROWS = 48
SHARD = 4
"""Rows of a shard, so that a few batches ahead are not the whole store."""


@pytest.fixture(scope="module")
def sharded(
    image_folder: Callable[..., Path], make_store: Callable[..., BuiltStore]
) -> dict[str, BuiltStore]:
    """Codec -> store of 48 images in shards of 4, a chunk a row."""
    photos = image_folder(ROWS)
    return {
        codec: make_store(photos, precache.Recipe.image(codec=codec), shard_samples=SHARD)
        for codec in ("raw", "image")
    }


@pytest.fixture(params=["raw", "image"])
def store(request: pytest.FixtureRequest, sharded: dict[str, BuiltStore]) -> BuiltStore:
    return sharded[request.param]


@pytest.fixture
def own(store: BuiltStore, copy_store: CopyStore) -> BuiltStore:
    """A store that may be damaged, once for each codec."""
    return copy_store(store)


def _ours() -> list[str]:
    return [thread.name for thread in own_threads()]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert _ours() == []


# --- many epochs --------------------------------------------------------------------------------

FEW, MANY = 20, 200
"""Epochs after which a process is looked at; by the first, all that is kept for good is there."""

SLACK = 2 << 20
"""Bytes that memory may grow by; one batch lost in every eighth epoch would be 3.4 MB."""


@dataclass(frozen=True)
class Held:
    """What a process holds: threads by name and by the kernel's count, files, maps, memory."""

    threads: list[str]
    tasks: int
    files: int
    maps: int
    anonymous: int

    @classmethod
    def here(cls, store: Path) -> Held:
        maps = Path("/proc/self/maps").read_text().splitlines()
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        [anonymous] = [int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")]
        return cls(
            sorted(thread.name for thread in threading.enumerate()),
            len(os.listdir("/proc/self/task")),  # noqa: PTH208 - /proc is no folder of files
            len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - /proc is no folder of files
            sum(str(store) in line for line in maps),
            anonymous * 1024,
        )


def _return_memory_at_once() -> None:
    """Have every batch mapped by itself, so that memory which stays is memory somebody holds."""
    m_mmap_threshold = -3  # malloc.h of glibc
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 64 << 10)


def _break(loader: precache.Loader) -> Any:
    for number, _ in enumerate(loader):
        if number == 1:
            break
    return None


def _fail(loader: precache.Loader) -> Any:
    try:
        for batch in loader:
            raise ZeroDivisionError(batch)
    except ZeroDivisionError as error:
        return error


def _close(loader: precache.Loader) -> Any:
    batches = iter(loader)
    kept = [next(batches), next(batches)]
    batches.close()  # type: ignore[attr-defined]  # a generator's
    return kept


def _suspend(loader: precache.Loader) -> Any:
    batches = iter(loader)
    return next(batches), batches


def _damage(loader: precache.Loader) -> Any:
    try:
        return list(loader)
    except DamageError as error:
        return error


WAYS: dict[str, tuple[Callable[[precache.Loader], Any], ...]] = {
    "early breaks": (
        _break,
        iter,
        lambda loader: next(iter(loader)),
        _suspend,
        _fail,
        list,
        lambda loader: sum(len(batch["row"]) for batch in loader),
        _close,
    ),
    "damage": (_damage,),
}
"""Ways to go through an epoch, each with what the caller still holds in the next one."""


def _soak(store: Path, ways: str, fresh: bool) -> list[Held]:
    """Go through many epochs, with one loader or a fresh one each time."""
    _return_memory_at_once()
    held: list[Held] = []

    def look() -> bool:
        found = Held.here(store)
        if held and found.tasks > held[0].tasks:
            return False  # a thread that was joined may still be on its way out of the kernel
        held.append(found)
        return True

    def make() -> precache.Loader:
        return precache.Loader(store, SHARD, reading=Reading(num_threads=2, prefetch_batches=3))

    loader, kept = make(), None
    for epoch in range(1, MANY + 1):
        if fresh:
            loader = make()
        kept = WAYS[ways][epoch % len(WAYS[ways])](loader)
        if fresh and epoch % 3 == 0:
            loader.close()
        if epoch in (FEW, MANY):
            kept = None
            poll(look, "no more threads than before")
    del kept
    return held


def _assert_flat(held: list[Held]) -> None:
    few, many = held
    assert many.threads == few.threads == ["MainThread"]
    assert many.tasks <= few.tasks
    assert many.files == few.files
    assert max(few.maps, many.maps) <= ROWS // SHARD
    assert many.anonymous - few.anonymous <= SLACK


@pytest.mark.parametrize(
    "fresh",
    [
        pytest.param(False, id="one loader"),
        pytest.param(True, id="a loader each", marks=pytest.mark.heavy),
    ],
)
def test_two_hundred_epochs_hold_no_more_than_twenty(fresh: bool, store: BuiltStore) -> None:
    _assert_flat(ask(_soak, store.path, "early breaks", fresh))


@pytest.mark.heavy
def test_two_hundred_epochs_that_end_in_damage_hold_no_more_than_twenty(own: BuiltStore) -> None:
    _change_row(own, 26)
    _assert_flat(ask(_soak, own.path, "damage", False))


def _keep_all(store: Path) -> list[int]:
    """Anonymous memory before, while and after several epochs of batches are kept."""
    _return_memory_at_once()
    with precache.Loader(store, SHARD, reading=Reading(num_threads=2)) as loader:
        list(loader)
    del loader
    gc.collect()  # what imports left behind, which else goes while batches are kept
    found = [Held.here(store).anonymous]
    with precache.Loader(store, SHARD, reading=Reading(num_threads=2)) as loader:
        kept = [list(loader) for _ in range(6)]
        found.append(Held.here(store).anonymous)
    del loader, kept
    return [*found, Held.here(store).anonymous]


def test_batches_that_were_kept_take_no_memory_once_they_and_the_loader_are_gone(
    store: BuiltStore,
) -> None:
    before, during, after = ask(_keep_all, store.path)
    assert during - before >= 6 * ROWS * 3 * 112 * 112
    assert after - before <= SLACK


# --- damage -------------------------------------------------------------------------------------


def _change_row(store: BuiltStore, row: int) -> Path:
    """Change a byte in the middle of the stored row; returns the shard's path."""
    number, inside = divmod(row, SHARD)
    path = store.shard_path(number)
    data = bytearray(path.read_bytes())
    index = np.frombuffer(data[-16 * SHARD - 4 : -4], "<u8").reshape(SHARD, 2)
    offset, length = index[inside].tolist()
    data[offset + length // 2] ^= 0x55
    path.write_bytes(data)
    return path


def _harm(change: Callable[[Path], object]) -> Callable[[BuiltStore, int], Path]:
    def harm(store: BuiltStore, row: int) -> Path:
        path = store.shard_path(row // SHARD)
        change(path)
        return path

    return harm


HARMS: dict[str, Callable[[BuiltStore, int], Path]] = {
    "a byte changed": _change_row,
    "a byte short": _harm(lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "empty": _harm(lambda path: path.write_bytes(b"")),
    "gone": _harm(Path.unlink),
}


def _read_until_damage(batches: Iterator[Any], pixels: np.ndarray) -> tuple[list[int], str]:
    """Row numbers that came, pixels checked, and the error that ended them."""
    rows: list[int] = []

    def read() -> None:
        for batch in batches:
            numbers = batch["row"].numpy()
            np.testing.assert_array_equal(batch["image"].numpy(), pixels[numbers])
            rows.extend(numbers.tolist())

    with pytest.raises(DamageError) as caught:
        read()
    return rows, str(caught.value)


@pytest.mark.parametrize("harm", HARMS)
def test_damage_in_the_middle_is_named_by_shard_and_key_and_ends_every_thread(
    harm: str, own: BuiltStore
) -> None:
    path, pixels = HARMS[harm](own, 24), own.rows()
    with precache.Loader(
        own.path, 3, False, reading=Reading(num_threads=4, prefetch_batches=6)
    ) as loader:
        for _ in range(3):
            loader.set_epoch(0)
            batches = iter(loader)
            rows, text = _read_until_damage(batches, pixels)
            assert rows == list(range(24))
            assert f"shard {path} is {'missing' if harm == 'gone' else 'damaged'} at row 24" in text
            assert repr(loader.version.keys[24]) in text
            assert _ours() == []
            assert list(batches) == []


def test_of_several_damaged_rows_the_first_in_the_loop_is_named(own: BuiltStore) -> None:
    paths, pixels = {row: _change_row(own, row) for row in (9, 26, 27, 41)}, own.rows()
    with precache.Loader(
        own.path, 3, seed=4, reading=Reading(num_threads=4, prefetch_batches=8)
    ) as loader:
        for epoch in range(6):
            loader.set_epoch(epoch)
            order = _order(loader, epoch)
            first = next(row for row in order if row in paths)
            # One batch is read shard by shard or row by row: either of its damaged rows is first.
            whole = order.index(first) // 3 * 3
            rows, text = _read_until_damage(iter(loader), pixels)
            assert rows == order[:whole]
            named = [
                row
                for row in paths
                if str(paths[row]) in text and repr(loader.version.keys[row]) in text
            ]
            assert set(named) & set(order[whole : whole + 3])
            assert _ours() == []


def _order(loader: precache.Loader, epoch: int) -> list[int]:
    """Rows of an epoch, from a loader of the same order that reads no images."""
    with precache.Loader(
        loader.version.path, 3, seed=4, fields=["label"], reading=Reading(num_threads=1)
    ) as labels_alone:
        labels_alone.set_epoch(epoch)
        return list(itertools.chain.from_iterable(b["row"].tolist() for b in labels_alone))


def _workers(dataset: precache.CachedDataset) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork", timeout=60)


def test_damage_that_a_forked_worker_finds_is_named_by_shard_and_key(own: BuiltStore) -> None:
    path = _change_row(own, 26)
    dataset = precache.CachedDataset(own.path)
    rows, text = [], ""
    try:
        for batch in _workers(dataset):
            rows += batch["row"].tolist()
    except DamageError as error:
        text = str(error)
        traceback.clear_frames(error.__traceback__)  # they hold the workers
    assert rows == list(range(24))
    assert f"shard {path} is damaged at row 26 (" in text
    assert repr(dataset.keys[26]) in text


@pytest.mark.parametrize("first", [".", "*/image/c"], ids=["any order", "root last"])
def test_a_store_that_is_deleted_while_several_threads_read_ends_the_epoch(
    first: str, own: BuiltStore
) -> None:
    pixels = own.rows()
    with precache.Loader(
        own.path, 2, False, reading=Reading(num_threads=3, prefetch_batches=3)
    ) as loader:
        batches = iter(loader)
        kept = [next(batches)]
        for folder in [own.path] if first == "." else own.path.glob(first):
            shutil.rmtree(folder)
        with pytest.raises((DamageError, GoneError), match=r"removed; open the store's current"):
            kept.extend(batches)
        assert _ours() == []
        shutil.rmtree(own.path, ignore_errors=True)
        for number, batch in enumerate(kept):
            assert batch["row"].tolist() == [2 * number, 2 * number + 1]
            np.testing.assert_array_equal(batch["image"].numpy(), pixels[batch["row"].numpy()])
        loader.set_epoch(0)
        again = iter(loader)
        with pytest.raises(StoreError, match="was removed; open"):
            list(again)
        assert _ours() == []


# --- errors of the caller -----------------------------------------------------------------------


def test_an_error_of_the_transform_ends_every_thread_though_all_is_still_held(
    store: BuiltStore,
) -> None:
    calls = itertools.count()

    def transform(batch: Any) -> Any:
        if next(calls) == 3:
            raise ZeroDivisionError("in the transform")
        return batch

    with precache.Loader(
        store.path, 3, reading=Reading(num_threads=3, prefetch_batches=6), transform=transform
    ) as loader:
        batches = iter(loader)
        kept = [next(batches) for _ in range(3)]
        with pytest.raises(ZeroDivisionError, match="in the transform") as caught:
            next(batches)
        assert _ours() == []
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert list(batches) == []
        assert len(kept) == 3


# --- the garbage collector ----------------------------------------------------------------------


def _collect_on_a_decoding_thread(store: Path) -> tuple[list[str], list[str]]:
    """Drop a running iterator in a cycle, which a thread of its own then collects.

    Returns what could not be raised, and the threads that are left.
    """
    ignored: list[str] = []
    sys.unraisablehook = lambda unraisable: ignored.append(repr(unraisable.exc_value))
    read, calls = VersionReader.read, itertools.count()
    started, dropped = threading.Event(), threading.Event()

    def collecting(self: VersionReader, *args: Any, **options: Any) -> None:
        if next(calls) == 1:
            started.set()
            assert dropped.wait(30)
            gc.collect()
        read(self, *args, **options)

    VersionReader.read = collecting  # type: ignore[method-assign]  # the test's stand-in
    gc.disable()
    loader: Any = precache.Loader(store, SHARD, reading=Reading(num_threads=2, prefetch_batches=3))
    batches = iter(loader)
    next(batches)
    assert started.wait(30)
    threads = own_threads()
    loader.cycle = [loader, batches]
    del loader, batches
    dropped.set()
    for thread in threads:
        thread.join(30)
    return ignored, _ours()


def test_an_iterator_that_its_own_thread_collects_ends_without_a_word(store: BuiltStore) -> None:
    assert ask(_collect_on_a_decoding_thread, store.path) == ([], [])


# --- forks --------------------------------------------------------------------------------------

CLEANLY = 7
"""Status of a child whose iterator raised an error instead of the right rows."""


def _fork_while_decoding(store: Path, how: str) -> tuple[int, list[int]]:
    """Fork while a batch is in the making, as the child then does something with the iterator.

    Returns the child's exit status, and the rows that the parent reads from there on.
    """
    read, calls = VersionReader.read, itertools.count()
    started, forked = threading.Event(), threading.Event()

    def slow(self: VersionReader, *args: Any, **options: Any) -> None:
        if next(calls) == 1:
            started.set()
            assert forked.wait(30)
        read(self, *args, **options)

    VersionReader.read = slow  # type: ignore[method-assign]  # the test's stand-in
    loader = precache.Loader(
        store, SHARD, False, reading=Reading(num_threads=2, prefetch_batches=3)
    )
    batches: Any = iter(loader)
    next(batches)
    assert started.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends a child that hangs
        status = 1
        try:
            match how:
                case "reads on":
                    rows = [row for batch in batches for row in batch["row"].tolist()]
                    status = int(rows != list(range(SHARD, ROWS)))
                case "drops it":
                    batches = None
                    status = 0
                case "closes the loader":
                    loader.close()
                    status = 0
        except Exception:
            status = CLEANLY
        finally:
            os._exit(status)
    forked.set()
    _, status = os.waitpid(child, 0)
    rows = [row for batch in batches for row in batch["row"].tolist()]
    return os.waitstatus_to_exitcode(status), rows


@pytest.mark.parametrize("how", ["reads on", "drops it", "closes the loader"])
def test_a_child_that_was_forked_beside_a_running_iterator_does_not_hang(
    how: str, sharded: dict[str, BuiltStore]
) -> None:
    status, rows = ask(_fork_while_decoding, sharded["image"].path, how)
    assert rows == list(range(SHARD, ROWS))
    assert status in ((0, CLEANLY) if how == "reads on" else (0,))


def _fork_before_the_first_batch(store: Path) -> list[bool]:
    """Whether the parent and the child read all rows from one iterator that had not begun."""
    loader = precache.Loader(
        store, SHARD, False, reading=Reading(num_threads=2, prefetch_batches=3)
    )
    batches = iter(loader)
    child = os.fork()
    whole = False
    if child == 0:
        signal.alarm(5)
    try:
        rows = [row for batch in batches for row in batch["row"].tolist()]
        whole = rows == list(range(ROWS))
    finally:
        if child == 0:
            os._exit(not whole)
    return [whole, os.waitpid(child, 0)[1] == 0]


def test_an_iterator_that_had_not_begun_is_read_by_the_parent_and_by_a_forked_child(
    sharded: dict[str, BuiltStore],
) -> None:
    assert ask(_fork_before_the_first_batch, sharded["image"].path) == [True, True]


@pytest.mark.parametrize("touched", [False, True], ids=["unread", "read before"])
def test_forked_workers_read_while_a_loader_does(touched: bool, store: BuiltStore) -> None:
    """As a validation in the middle of a training epoch."""
    pixels, dataset = store.rows(), precache.CachedDataset(store.path)
    if touched:
        _ = dataset[5]
    with precache.Loader(store.path, 4, False, reading=Reading(num_threads=2)) as loader:
        batches = iter(loader)
        first = next(batches)["row"].tolist()
        assert len(next(iter(_workers(dataset)))["row"]) == 4
        rows = []
        for batch in _workers(dataset):
            np.testing.assert_array_equal(batch["image"].numpy(), pixels[batch["row"].numpy()])
            rows += batch["row"].tolist()
        rest = [row for batch in batches for row in batch["row"].tolist()]
    assert rows == [*first, *rest] == list(range(ROWS))


# --- Ctrl-C -------------------------------------------------------------------------------------

INTERRUPT = """
import itertools, os, select, signal, sys, threading
import precache
from precache.reading.version_reader import VersionReader

store, moment = sys.argv[1:]
pressed, wakeup = os.pipe()
os.set_blocking(wakeup, False)
signal.set_wakeup_fd(wakeup)

def wait():
    select.select([pressed], [], [])

read, calls = VersionReader.read, itertools.count()

def read_late(self, *args, **options):
    if moment == "waiting" and next(calls) == 1:
        wait()
    read(self, *args, **options)

VersionReader.read = read_late
loader = precache.Loader(store, 4, reading=precache.Reading(num_threads=2, prefetch_batches=3))

def train():
    for epoch in itertools.count():
        for number, batch in enumerate(loader):
            if (epoch, number) == (0, 0):
                print("go", flush=True)
            if moment == "in the step":
                wait()

try:
    train()  # Python 3.14 leaves jumps at the end of a loop out of the try around it
except KeyboardInterrupt:
    left = [t.name for t in threading.enumerate() if t.name.startswith("precache")]
    print(left, sum(len(batch["row"]) for batch in loader), flush=True)
    raise
"""


@contextlib.contextmanager
def _interrupted(store: BuiltStore, moment: str) -> Iterator[subprocess.Popen[str]]:
    """A script that was told Ctrl-C at a certain moment of its loop."""
    line = [sys.executable, "-W", "error", "-c", INTERRUPT, str(store.path), moment]
    with running(line, environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        process.send_signal(signal.SIGINT)
        yield process


@pytest.mark.parametrize(
    "moment", ["in the step", pytest.param("waiting", marks=pytest.mark.heavy)]
)
def test_ctrl_c_ends_the_threads_and_then_the_script(
    moment: str, sharded: dict[str, BuiltStore]
) -> None:
    with _interrupted(sharded["image"], moment) as process:
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGINT
    assert out == f"[] {ROWS}\n", err
    assert err.endswith("\nKeyboardInterrupt\n")
    assert err.count("Traceback") == 1
    assert "Exception ignored" not in err


def test_ctrl_c_at_any_moment_ends_the_script(sharded: dict[str, BuiltStore]) -> None:
    """Pressed again where nothing happens: an interrupt within a finalizer is lost in Python."""
    with _interrupted(sharded["raw"], "reading") as process:
        for _ in range(7):
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, err = process.communicate(timeout=20)
                break
            process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT
    assert err.endswith("\nKeyboardInterrupt\n")


# --- the end of the interpreter -----------------------------------------------------------------


UNCAUGHT = """
import sys
import precache
reading = precache.Reading(num_threads=3, prefetch_batches=5)
loader = precache.Loader(sys.argv[1], 4, shuffle=False, reading=reading)
kept = []
def train():
    for batch in loader:
        kept.append(batch["label"])
        if len(kept) == int(sys.argv[2]):
            raise ZeroDivisionError("in the step")
train()
"""


@pytest.mark.parametrize(
    "fails_first", ["the step", pytest.param("the store", marks=pytest.mark.heavy)]
)
def test_an_error_that_nobody_catches_is_all_that_a_script_says(
    fails_first: str, sharded: dict[str, BuiltStore], copy_store: CopyStore, run_python: RunPython
) -> None:
    store = copy_store(sharded["image"])
    path, key = _change_row(store, 26), store.open().keys[26]
    steps = 6 if fails_first == "the step" else 7
    done = run_python(UNCAUGHT, store.path, steps, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    last = done.stderr.splitlines()[-1]
    if fails_first == "the step":
        assert last == "ZeroDivisionError: in the step"
    else:
        assert last.startswith(f"precache.errors.DamageError: shard {path} is damaged at row 26")
        assert repr(key) in last
    assert done.stderr.count("Traceback") == 1
    assert "Exception ignored" not in done.stderr
