"""`diagnose` on loops whose bottleneck is known, and whose remedies are really applied.

Predictions are held against what is measured with the remedy in place, in the same test. A machine
that others use may spoil a try, but not each of several; a wrong prediction spoils all.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler, Subset

import precache
from precache import Diagnosis, diagnose
from precache.diagnosis.page_cache import Files, files_of
from precache.errors import UsageError
from precache.runtime.usage import read_usage
from tests.conftest import BuiltStore

STEP = 0.04
TRIES = 3
# Workers that sleep may be more than cores, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
heavy = pytest.mark.heavy  # burns CPU time, measures it, or takes more than five seconds


class Samples(Dataset[torch.Tensor]):
    """Samples that `work` is done for."""

    def __init__(self, work: Callable[[int], Any], count: int = 100_000) -> None:
        self.work, self.count = work, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.work(index)
        return torch.zeros(3, 32, 32)


def sleep_in_step(batch: Any) -> None:
    time.sleep(STEP)


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def loader(work: Callable[[int], Any], **options: Any) -> DataLoader[torch.Tensor]:
    context = "fork" if options.get("num_workers") else None  # others cannot pickle a lambda
    settings = {"batch_size": 2, "multiprocessing_context": context, **options}
    return DataLoader(Samples(work), **settings)


def tail(index: int) -> None:
    """Every twentieth sample takes half a second."""
    time.sleep(0.5 if index % 20 == 19 else 0.002)


def measured_rate(
    batches: Iterable[Any], step: Callable[[Any], Any], lead: int = 4, count: int = 40
) -> float:
    """Batches/s of a loop."""
    iterator = iter(batches)
    for batch in itertools.islice(iterator, lead):
        step(batch)
    started = time.perf_counter()
    for batch in itertools.islice(iterator, count):
        step(batch)
    return count / (time.perf_counter() - started)


def remedy(found: Diagnosis, name: str) -> precache.diagnosis.remedies.Remedy:
    return next(each for each in found.remedies if each.name == name)


def gain_holds(
    find: Callable[[], Diagnosis],
    name: str,
    now: Callable[[], float] | None,
    remedied: Callable[[precache.diagnosis.remedies.Remedy], float],
) -> Diagnosis:
    """Whether the gain that is predicted is within a quarter of the one that applying it has.

    Without `now` that is over the rate that the diagnosis found: where CPU time is burnt, what
    others leave of the cores changes from one measurement to the next.
    """
    tried = []
    for _ in range(TRIES):
        found = find()
        predicted = remedy(found, name)
        gain = remedied(predicted) / (now() if now else found.batches_per_s)
        tried.append((predicted.gain, gain))
        if abs(predicted.gain / gain - 1) < 0.25:
            return found
    raise AssertionError(f"predicted and measured gains: {tried}\n{found}")


def verdict_holds(find: Callable[[], Diagnosis], verdict: str) -> Diagnosis:
    """The first diagnosis with this verdict."""
    for _ in range(TRIES):
        found = find()
        if found.verdict == verdict:
            return found
    raise AssertionError(f"not {verdict}:\n{found}")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """No worker and no thread is left over."""
    threads = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 30
    while multiprocessing.active_children() or set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline, "something was left over"
        time.sleep(0.05)  # between looks at what ends by itself


@heavy
def test_a_loader_that_sleeps_needs_workers() -> None:
    def find() -> Diagnosis:
        return diagnose(loader(lambda _: time.sleep(0.03)), sleep_in_step, seconds=0.5)

    def now() -> float:
        return measured_rate(loader(lambda _: time.sleep(0.03)), sleep_in_step, count=8)

    def apply(found: precache.diagnosis.remedies.Remedy) -> float:
        workers = int(found.what.removeprefix("num_workers="))
        better = loader(lambda _: time.sleep(0.03), num_workers=workers)
        return measured_rate(better, sleep_in_step, lead=8, count=24)

    found = gain_holds(find, "workers", now, apply)
    assert found.verdict == "storage-bound"
    assert "network" in found.reason


@heavy
def test_a_step_that_sleeps_is_the_limit_itself() -> None:
    found = verdict_holds(
        lambda: diagnose(loader(lambda _: None), sleep_in_step, seconds=0.4), "compute-bound"
    )
    assert all(each.gain < 1.2 for each in found.remedies)
    assert found.batches_per_s == pytest.approx(1 / STEP, rel=0.25)


@heavy
def test_a_cached_loader_takes_the_place_of_one_that_sleeps(
    stores: dict[str, BuiltStore],
) -> None:
    store = stores["image"]
    images = torch.from_numpy(store.rows()[:1])

    def slow() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.08)
            yield images

    def cached() -> Iterator[Any]:
        with precache.Loader(store.path, 1, device="cpu") as fast:
            yield from fast

    def apply(_: precache.diagnosis.remedies.Remedy) -> float:
        batches = cached()
        try:
            return measured_rate(batches, sleep_in_step, count=16)
        finally:
            batches.close()

    found = gain_holds(
        lambda: diagnose(slow(), sleep_in_step, seconds=0.5),
        "precache",
        lambda: measured_rate(slow(), sleep_in_step, count=6),
        apply,
    )
    assert found.verdict == "storage-bound"
    assert "iterator" in found.measurements.cold_note


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[Path]:
    """A FIFO that another thread feeds 64 KB every 15 ms."""
    path = tmp_path / "slow"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    stop = threading.Event()

    def feed() -> None:
        while not stop.wait(0.015):
            try:
                os.write(keep, bytes(1 << 16))
            except BlockingIOError:  # nobody reads
                continue

    writer = threading.Thread(target=feed)
    writer.start()
    yield path
    stop.set()
    writer.join()
    os.close(keep)


@heavy
def test_a_slow_disk_is_told_from_slow_code(slow_disk: Path) -> None:
    data = torch.zeros(1 << 18, dtype=torch.uint8)

    def read() -> Iterator[torch.Tensor]:
        with slow_disk.open("rb", buffering=0) as file:
            while True:
                left = len(data)
                while left:
                    left -= len(file.read(left))
                yield data

    found = gain_holds(
        lambda: diagnose(read(), sleep_in_step, seconds=1.5),
        "faster disk",
        lambda: measured_rate(read(), sleep_in_step, count=15),
        lambda _: measured_rate(itertools.repeat(data), sleep_in_step, count=15),
    )
    assert found.verdict == "storage-bound"
    assert "waits for data" in found.reason


@heavy
def test_samples_that_sleep_in_workers_are_told_by_one_worker_alone() -> None:
    def now() -> float:
        return measured_rate(
            loader(lambda _: time.sleep(0.06), num_workers=2), sleep_in_step, count=16
        )

    def apply(found: precache.diagnosis.remedies.Remedy) -> float:
        workers = int(found.what.removeprefix("num_workers="))
        better = loader(lambda _: time.sleep(0.06), num_workers=workers)
        return measured_rate(better, sleep_in_step, lead=2 * workers, count=24)

    found = gain_holds(
        lambda: diagnose(
            loader(lambda _: time.sleep(0.06), num_workers=2), sleep_in_step, seconds=0.8
        ),
        "workers",
        now,
        apply,
    )
    assert found.verdict == "storage-bound"
    assert found.measurements.single_worker is not None
    assert found.measurements.single_worker.mean == pytest.approx(0.12, rel=0.2)


@heavy
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_burns_is_cpu_bound_and_a_cache_is_the_cure(workers: int) -> None:
    def slow() -> DataLoader[torch.Tensor]:
        return loader(lambda _: burn(0.08), num_workers=workers)

    found = gain_holds(
        lambda: diagnose(slow(), sleep_in_step, seconds=2),
        "precache",
        None,
        lambda _: measured_rate(loader(lambda _: None), sleep_in_step),
    )
    assert found.verdict == "CPU-bound"


@heavy
def test_a_step_that_burns_is_compute_bound() -> None:
    verdict_holds(
        lambda: diagnose(loader(lambda _: None), lambda _: burn(0.05), seconds=2), "compute-bound"
    )


@heavy
def test_workers_that_take_the_cores_from_the_step_are_cpu_bound() -> None:
    workers = 2 * precache.runtime.usage.cores()
    found = verdict_holds(
        lambda: diagnose(
            loader(lambda _: burn(0.05), num_workers=workers), lambda _: burn(0.05), seconds=2
        ),
        "CPU-bound",
    )
    assert remedy(found, "workers").gain < 1.3


@heavy
def test_a_long_tail_is_variance_and_a_deeper_queue_the_cure() -> None:
    def deep(found: precache.diagnosis.remedies.Remedy) -> DataLoader[torch.Tensor]:
        factor = int(found.what.removeprefix("prefetch_factor="))
        return loader(tail, batch_size=1, num_workers=1, prefetch_factor=factor)

    found = gain_holds(
        lambda: diagnose(loader(tail, batch_size=1, num_workers=1), sleep_in_step, seconds=4),
        "prefetch",
        lambda: measured_rate(loader(tail, batch_size=1, num_workers=1), sleep_in_step, 20, 60),
        lambda found: measured_rate(deep(found), sleep_in_step, 20, 60),
    )
    assert found.verdict == "variance-bound"


@heavy
def test_a_long_tail_in_this_process_is_variance_too() -> None:
    found = verdict_holds(
        lambda: diagnose(loader(tail, batch_size=1), sleep_in_step, seconds=3), "variance-bound"
    )
    assert found.measurements.loader.tail > 0.5


def bursts() -> Iterator[torch.Tensor]:
    """Eight batches at a time, each time after a pause."""
    while True:
        time.sleep(0.3)
        yield from [torch.zeros(4, 3, 32, 32)] * 8


def in_background(batches: Iterator[Any], depth: int) -> Iterator[Any]:
    """The same batches, fetched ahead by a thread."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()

    def fetch() -> None:
        for batch in batches:
            while not stop.is_set():
                try:
                    ready.put(batch, timeout=0.05)
                    break
                except queue.Full:
                    continue
            if stop.is_set():
                return

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        while True:
            yield ready.get()
    finally:
        stop.set()
        thread.join()


@heavy
def test_bursts_are_variance_and_loading_ahead_is_the_cure() -> None:
    def apply(_: precache.diagnosis.remedies.Remedy) -> float:
        batches = in_background(bursts(), 16)
        try:
            return measured_rate(batches, sleep_in_step, 16, 64)
        finally:
            batches.close()

    found = gain_holds(
        lambda: diagnose(bursts(), sleep_in_step, seconds=3),
        "workers",
        lambda: measured_rate(bursts(), sleep_in_step, 16, 48),
        apply,
    )
    assert found.verdict == "variance-bound"


@heavy
def test_a_single_outlier_is_named_and_left_out() -> None:
    count = itertools.count()

    def once(_: int) -> None:
        if next(count) == 24:
            time.sleep(1)

    found = diagnose(loader(once, batch_size=1), lambda _: time.sleep(0.01), steps=20)
    assert found.verdict == "compute-bound", found
    assert any("one batch of" in flag for flag in found.flags)


@pytest.fixture
def big_files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.bin" for number in range(40)]
    for path in paths:
        with path.open("wb", buffering=0) as file:
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
    return paths


def on_disk(path: Path) -> bool:
    """Whether a file that is dropped from memory is read from a disk."""
    before = read_usage().read_bytes
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()
    return read_usage().read_bytes != before


class Paths(Dataset[torch.Tensor]):
    """Files, listed as torchvision's folders do."""

    def __init__(self, paths: list[Path]) -> None:
        self.samples = [(str(path), 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.fromfile(self.samples[index][0], np.uint8))


def test_all_files_count_and_what_is_none_does_not(big_files: list[Path]) -> None:
    paths = big_files * 6000
    nothing = [big_files[0].with_name("missing"), big_files[0].parent, "text " * 80, "\0"]
    files = Files.of([*paths, *nothing * (len(paths) // len(nothing))])
    assert files is not None
    assert files.count == pytest.approx(len(paths), rel=0.01)
    assert files.nbytes == files.count << 20
    assert files.median_nbytes == 1 << 20
    assert Files.of(nothing) is None


def test_sizes_that_alternate_are_estimated(tmp_path: Path) -> None:
    paths = [tmp_path / "image", tmp_path / "label"]
    for path, size in zip(paths, (10_000, 10), strict=True):
        path.write_bytes(bytes(size))
    files = Files.of(paths * 2000)
    assert files is not None
    assert files.nbytes == pytest.approx(2000 * 10_010, rel=0.15)


def test_files_of_a_dataset_are_those_that_it_reads(big_files: list[Path]) -> None:
    class Unready(Paths):
        @property
        def imgs(self) -> list[str]:
            raise RuntimeError("call setup() first")

    class Clips(Paths):
        def __len__(self) -> int:
            return 10 * len(self.samples)

    def found(dataset: Dataset[torch.Tensor]) -> list[Path]:
        return [Path(path) for path in files_of(DataLoader(dataset))]

    whole, clips = Paths(big_files), Clips(big_files)
    first, second = Subset(whole, range(10)), Subset(whole, [30, 31])
    assert found(whole) == big_files
    assert found(Paths([big_files[0].with_name("missing"), *big_files]))[1:] == big_files
    assert found(Subset(first, [3, 7])) == [big_files[3], big_files[7]]
    assert found(ConcatDataset([first, second, first])) == big_files[:10] + big_files[30:32]
    assert found(Subset(clips, [305])) == big_files
    unready = Unready([Path("a caption " * 70)])
    unready.files = [str(path) for path in big_files]  # type: ignore[attr-defined]
    assert found(unready) == big_files


def test_files_of_a_dataset_are_read_cold_and_warm(big_files: list[Path]) -> None:
    before = read_usage()
    loader = DataLoader(Paths(big_files), 4)
    found = diagnose(loader, lambda _: time.sleep(0.005), steps=20, seconds=20)
    if before.read_bytes is None:
        pytest.skip("the kernel does not tell what is read from disks")
    measured = found.measurements
    files = measured.setup.files
    assert files is not None
    assert (files.count, files.median_nbytes) == (40, 1 << 20)
    if not on_disk(big_files[0]):
        assert "not read from a disk" in measured.cold_note
        pytest.skip("the folder of temporary files is not on a disk")
    assert measured.cold is not None, measured.cold_note
    assert measured.cold.usage.read_bytes
    assert measured.cold.per_batch(measured.cold.usage.read_bytes) > 1 << 20
    assert "MB/s from the disk" in str(found)


@pytest.mark.parametrize(("length", "short"), [(4, True), (5, False)])
def test_an_epoch_that_is_loaded_ahead_is_not_measured_from_the_disk(
    length: int, short: bool
) -> None:
    batches = [torch.zeros(1)] * length
    note = diagnose(batches, lambda _: None, steps=3, files=[__file__]).measurements.cold_note
    assert (note == "an epoch of 4 batches is too short; up to 2 are loaded ahead") is short


def test_a_precache_loader_is_where_it_was(stores: dict[str, BuiltStore]) -> None:
    with precache.Loader(stores["zstd"].path, 4, device="cpu", seed=3) as cached:
        expected = [batch["row"].tolist() for batch in cached]
        cached.set_epoch(0)
        iterator = iter(cached)
        next(iterator)
        state = cached.state_dict()
        iterator.close()
        found = verdict_holds(
            lambda: diagnose(cached, lambda _: time.sleep(0.03), seconds=0.3), "compute-bound"
        )
        assert not {each.name for each in found.remedies} & {"precache", "workers"}
        assert cached.state_dict() == state
        assert [batch["row"].tolist() for batch in cached] == expected[1:]


def test_a_mixture_reads_stores_and_is_where_it_was(stores: dict[str, BuiltStore]) -> None:
    pair = [stores["raw"], stores["zstd"]]
    with precache.mix([precache.Loader(store.path, 4, device="cpu") for store in pair]) as mixture:
        expected = [(batch["source"], batch["row"].tolist()) for batch in mixture]
        mixture.set_epoch(0)
        iterator = iter(mixture)
        next(iterator)
        state = mixture.state_dict()
        found = diagnose(mixture, lambda _: None, steps=20)
        setup = found.measurements.setup
        assert setup.cached
        assert setup.files is not None
        assert setup.files.count == sum(len(store.open().folder.sizes()) for store in pair)
        assert mixture.state_dict() == state
        assert [(batch["source"], batch["row"].tolist()) for batch in mixture] == expected[1:]


def test_what_was_changed_is_put_back() -> None:
    model = torch.nn.Linear(3 * 32 * 32, 2)
    optimizer = torch.optim.Adam(model.parameters())
    before = [each.clone() for each in model.parameters()]
    generator = torch.Generator().manual_seed(5)
    data = DataLoader(Samples(lambda _: None, 64), 4, shuffle=True, generator=generator)
    states = generator.get_state(), torch.get_rng_state(), random.getstate()

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(batch.flatten(1)) + random.random() + torch.rand(1)).sum().backward()
        optimizer.step()

    diagnose(data, step, steps=5, restore=[model, optimizer])
    after = generator.get_state(), torch.get_rng_state(), random.getstate()
    for one, other in zip(states, after, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer.state_dict()["state"] == {}


def test_the_generator_of_a_batch_sampler_is_put_back() -> None:
    data, generator = Samples(lambda _: None, 64), torch.Generator()

    class Shuffled:
        def __init__(self) -> None:
            self.generator = generator

        def __iter__(self) -> Iterator[list[int]]:
            yield from torch.randperm(64, generator=generator).view(-1, 4).tolist()

    for sampler in (
        BatchSampler(RandomSampler(data, generator=generator), 4, drop_last=False),
        Shuffled(),
    ):
        before = generator.get_state()
        diagnose(DataLoader(data, batch_sampler=sampler), lambda _: None, steps=3)
        assert torch.equal(generator.get_state(), before)


def test_persistent_workers_of_the_caller_are_left_alone() -> None:
    data = loader(lambda _: None, num_workers=1, persistent_workers=True)
    mine = iter(data)
    next(mine)
    (worker,) = multiprocessing.active_children()
    diagnose(data, lambda _: None, steps=4)
    assert multiprocessing.active_children() == [worker]
    next(mine)
    del mine, data
    gc.collect()
    worker.join(30)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_of_the_step_comes_through_and_leaves_nothing(persistent: bool) -> None:
    def fail(_: Any) -> None:
        raise ValueError("the step's own")

    with pytest.raises(ValueError, match="the step's own"):
        diagnose(loader(lambda _: None, num_workers=2, persistent_workers=persistent), fail)
    assert not multiprocessing.active_children(), "before the error is forgotten"


def test_runs_end_by_steps_and_by_seconds() -> None:
    found = diagnose(loader(lambda _: None), lambda _: None, steps=7)
    assert len(found.measurements.step.seconds) == 7
    assert len(found.measurements.together.seconds) == 7
    found = diagnose([torch.zeros(1)], lambda _: time.sleep(0.2), seconds=0.1)
    assert len(found.measurements.step.seconds) <= 3


def test_a_step_may_pop_from_the_batch_that_is_replayed() -> None:
    batches = ([{"image": torch.zeros(2, 8)}, ["key"]] for _ in itertools.count())
    steps = 0

    def step(batch: list[Any]) -> None:
        nonlocal steps
        assert batch.pop() == ["key"]
        assert len(batch[0].pop("image")) == 2
        steps += 1

    found = diagnose(batches, step, steps=3)
    assert steps > 6
    assert found.measurements.setup.batch_nbytes == 64


def test_a_loader_of_a_few_batches_is_begun_again() -> None:
    batch = {"image": torch.zeros(2, 8), "mask": [np.zeros((2, 5), np.uint8)]}
    found = diagnose([batch] * 3, lambda _: time.sleep(0.01), steps=20)
    assert len(found.measurements.together.seconds) == 20
    assert found.measurements.setup.batch_nbytes == 74, "of tensors and arrays"
    assert found.measurements.setup.epoch == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "seconds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"loader": 3}, "loader is a int"),
        ({"loader": []}, "list has no batches left"),
        ({"loader": iter([1, 2, 3])}, "list_iterator has no batches left"),
        ({"step": None}, "step is a NoneType"),
        ({"restore": [3]}, "restore has 3"),
        ({"device": "nonsense"}, "nonsense"),
        ({"files": ["/no/such/file"]}, "/no/such/file"),
        ({"files": "/no/such/file"}, "give a list of paths"),
        ({"files": Path(__file__)}, "give a list of paths"),
        ({"restore": torch.nn.Linear(1, 1)}, "restore is a Linear; give a list"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"loader": [1], "step": lambda _: None, "steps": 3, **arguments}
    with pytest.raises(UsageError, match=message):
        diagnose(**given)


def test_a_length_and_a_dataset_that_raise_are_ignored() -> None:
    class Unready(Paths):
        def __len__(self) -> int:
            raise RuntimeError("call setup() first")

    class Batches:
        @property
        def dataset(self) -> Any:
            raise RuntimeError("call setup() first")

        def __len__(self) -> int:
            raise RuntimeError("call setup() first")

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.zeros(1)] * 3)

    data = Unready([Path(__file__)])
    assert files_of(DataLoader(Subset(data, [0]))) == [__file__]
    assert diagnose(Batches(), lambda _: None, steps=3).measurements.setup.epoch is None
    assert sum(1 for _ in precache.meter(Batches(), to=[])) == 3


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    diagnose([torch.zeros(1)], lambda _: None, steps=3)
    assert capsys.readouterr() == ("", "")
    diagnose([torch.zeros(1)], lambda _: None, steps=3, progress=True)
    assert "measuring the loader alone" in capsys.readouterr().err


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_pageable_copies_and_waits_for_the_device_are_found() -> None:
    batch = torch.zeros(64 << 20)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield batch

    def step(given: torch.Tensor) -> float:
        return float(given.to("cuda").mean().item())

    found = diagnose(batches(), step, seconds=1)
    copies = found.measurements.copies
    assert copies is not None
    assert not copies.pinned
    assert copies.from_pinned < copies.as_given
    assert found.verdict == "transfer-bound", found
    assert any(Path(__file__).name in place for place in found.measurements.synchronisations)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("loading", "cycles", "verdict"),
    [(0.02, 10_000_000, "CPU-bound"), (0.001, 40_000_000, "compute-bound")],
)
def test_loops_that_wait_for_the_host_or_for_the_device_are_told_apart(
    loading: float, cycles: int, verdict: str
) -> None:
    def batches() -> Iterator[torch.Tensor]:
        while True:
            end = time.process_time() + loading
            while time.process_time() < end:
                pass
            yield torch.zeros(4)

    def step(given: torch.Tensor) -> None:
        given.to("cuda")
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch's own

    assert diagnose(batches(), step, seconds=1).verdict == verdict
