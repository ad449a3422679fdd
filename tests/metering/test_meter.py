"""The stall meter tells what was really waited for, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import random
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import precache
from precache import outputs
from precache.errors import UsageError
from precache.reading import readahead
from precache.transforms import Transform
from tests.conftest import BuiltStore


class Slept:
    """A loader that sleeps, and a step that does, both on a clock of their own."""

    def __init__(self, delays: list[float]) -> None:
        self.delays = delays
        self.data: list[float] = []
        self.steps: list[float] = []

    def __len__(self) -> int:
        return len(self.delays)

    def __iter__(self) -> Iterator[int]:
        for number, delay in enumerate(self.delays):
            started = time.perf_counter()
            time.sleep(delay)
            self.data.append(time.perf_counter() - started)
            yield number

    def step(self, seconds: float) -> None:
        started = time.perf_counter()
        time.sleep(seconds)
        self.steps.append(time.perf_counter() - started)

    def stall_ratio(self, start: int, stop: int) -> float:
        data = sum(self.data[start:stop])
        return data / (data + sum(self.steps[start:stop]))


class Reports(list[precache.StallReport]):
    """An output that keeps them."""

    def __call__(self, report: precache.StallReport) -> None:
        self.append(report)


_numbers = itertools.count()


def meter(loader: Any, every: int | str = 100, **options: Any) -> Iterator[Any]:
    """Iterate as `precache.meter` does, whose steps begin at 1, until its reports are published."""
    metered = precache.meter(loader, every, **{"name": f"meter {next(_numbers)}", **options})
    try:
        yield from metered
    finally:
        metered.flush()


class Clock:
    """Stands still but where a test moves it, whatever else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def move(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


RANDOM = random.Random(7)
DELAYS = {
    "none": [0.0] * 150,
    "long-tailed": [min(0.1, 0.0005 * RANDOM.paretovariate(1)) for _ in range(150)],
}


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
def test_the_stall_ratio_is_what_was_slept(delays: list[float]) -> None:
    """In one run of five: between two clocks this process may lose the CPU to others."""
    errors = [stall_ratio_error(delays)]
    while errors[-1] > 0.02 and len(errors) < 5:
        errors.append(stall_ratio_error(delays))
    assert min(errors) <= 0.02, errors


def stall_ratio_error(delays: list[float]) -> float:
    """The largest of a run's reports."""
    loader, reports = Slept(delays), Reports()
    for _ in meter(loader, every=60, to=[reports], device="cpu"):
        loader.step(0.004)
    assert [report.steps for report in reports] == [60, 60, 30]
    assert [report.step for report in reports] == [60, 120, 150]
    truths = [loader.stall_ratio(each.step - each.steps, each.step) for each in reports]
    return max(abs(r.stall_ratio - truth) for r, truth in zip(reports, truths, strict=True))


class Keyed:
    """Batches of two samples; some are long in coming."""

    def __init__(
        self, count: int, slow: dict[int, float], clock: Clock, field: str = "key"
    ) -> None:
        self.count = count
        self.clock = clock
        self.slow = slow
        self.field = field

    def __iter__(self) -> Iterator[dict[str, Any]]:
        row = torch.zeros(2, dtype=torch.int64)  # the memory of every batch
        for number in range(self.count):
            self.clock.move(self.slow.get(number, 0.0005))
            row[:] = torch.tensor([2 * number, 2 * number + 1])
            keys = [f"{2 * number}.jpg", f"{2 * number + 1}.jpg"]
            yield {self.field: row if self.field == "row" else keys}


@pytest.mark.parametrize(
    ("field", "expected"),
    [("key", [("60.jpg", "61.jpg"), ("20.jpg", "21.jpg")]), ("row", [(60, 61), (20, 21)])],
)
def test_rare_slow_samples_are_named(field: str, expected: list[Any], clock: Clock) -> None:
    reports = Reports()
    loader = Keyed(50, {30: 0.6, 10: 0.3}, clock, field)
    for _ in meter(loader, to=[reports], device="cpu"):
        pass
    [report] = reports
    slow = report.slow[:2]
    assert [each.keys for each in slow] == expected
    assert [each.step for each in slow] == [31, 11]
    assert slow[0].seconds == pytest.approx(0.6)
    assert "rare slow samples: step 31 (" in str(report)
    assert str(expected[0][0]) in str(report)


def delay(source: Any, monkeypatch: pytest.MonkeyPatch, number: int, clock: Clock) -> None:
    """Hold up one batch of a `Loader` or a `DataLoader`."""
    made = type(source).__iter__

    def delayed(loader: Any) -> Iterator[Any]:
        for position, batch in enumerate(made(loader)):
            if position == number:
                clock.move(0.5)
            yield batch

    monkeypatch.setattr(type(source), "__iter__", delayed)


class _Keyed(precache.CachedDataset):
    def __getitem__(self, index: int) -> Any:
        return {"key": f"own {index}", "row": 1 << 40}


def test_an_iterator_that_is_collected_ends_and_publishes_nothing() -> None:
    """The collector runs in the middle of anything, where taking a lock could deadlock.

    Before, a batch lives no longer than the loop has it.
    """
    closed, reports, before = [], Reports(), list[weakref.ref[set[int]]]()

    def loader() -> Iterator[set[int]]:
        try:
            for number in range(9):
                assert not before or before[-1]() is None
                batch = {number}
                before.append(weakref.ref(batch))
                yield batch
                del batch
        finally:
            closed.append(True)

    name = "collected"
    held: list[Any] = [iter(precache.meter(loader(), every=2, to=[reports], name=name))]
    held.append(held)
    for number in range(4):
        assert next(held[0]) == {number}
    del held
    gc.collect()
    precache.meter([], name=name).flush()
    assert closed == [True]
    assert [report.steps for report in reports] == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader": 3}, "loader is 3; give an iterable of batches"),
        ({"every": 0}, "every is 0; give steps such as 100, or a time such as '30s'"),
        ({"every": "soon"}, "every is 'soon'"),
        ({"every": "0s"}, "every is '0s'"),
        ({"every": None}, "every is None"),
        ({"threshold": 2}, "threshold is 2; give a share from 0 to 1"),
        ({"to": ["stalls.jsonl"]}, "to has 'stalls.jsonl'; give a list of callables"),
        ({"to": print}, "to has <built-in function print>; give a list"),
        ({"device": "abacus"}, "device 'abacus' is not one torch knows"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        precache.meter(**{"loader": [], **options})


def test_without_an_output_a_line_goes_to_standard_error_if_the_rank_stalls(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    for _ in meter(Keyed(4, {}, clock), name="train"):
        clock.move(0.001)
    for _ in meter(Keyed(4, {}, clock), name="fast", threshold=0.5):
        clock.move(0.001)
    list(meter(Keyed(4, {}, clock), to=[]))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("train, steps 1 to 4: waited for data 33.3% of the time; 0.5 of 1.5 ms")
    assert "median 0.5" in line


@pytest.mark.parametrize("mixed", [False, True], ids=["loader", "mixture"])
@pytest.mark.parametrize("early", [False, True], ids=["on the loop's thread", "ahead of the loop"])
def test_waiting_for_a_transform_on_the_cpu_is_reported_as_such(
    image_tiles: BuiltStore,
    early: bool,
    mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
) -> None:
    monkeypatch.setattr(readahead, "QUIET_BATCHES", 0)  # one thread alone makes batches

    class Slow(Transform):
        def apply(self, batch: Any, draw: Any) -> Any:
            time.sleep(0.01)  # meanwhile the loop comes to wait for it
            clock.move(1)
            return batch

    transform = Slow() if early else lambda batch: Slow().apply(batch, None)
    loaders: list[Any] = [
        precache.Loader(image_tiles.path, 4, device="cpu", transform=transform, num_threads=1)
    ]
    loader = precache.mix(loaders) if mixed else loaders[0]
    reports = Reports()
    with loader:
        for _ in meter(loader, to=[reports]):
            pass
        stats = loader.stats()
    assert 0 < stats.stall_ratio == pytest.approx(stats.transform_ratio)
    assert 0 < reports[0].stall_ratio == pytest.approx(reports[0].transform_ratio)
    assert reports[0].figures()["transform_ratio"] == reports[0].transform_ratio
    assert f"\n  for transforms  {stats.transform_ratio:6.1%}\n" in str(stats)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns of a fork beside threads
def test_a_process_of_multiprocessing_loses_no_report(tmp_path: Path) -> None:
    path, fork = tmp_path / "reports.jsonl", multiprocessing.get_context("fork")
    metered = precache.meter(range(10), every=5, to=[outputs.jsonl(path)])
    for before in (0, 2):  # the second one has a meter whose thread ran in the parent
        child = fork.Process(target=list, args=(metered,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert len(path.read_text().splitlines()) == 2 * before + 2
        assert list(metered) == list(range(10))
        metered.flush()


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataset", "subclass"])
def test_keys_of_precaches_own_loaders_are_known(
    kind: str, stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    path, reports = stores["raw"].path, Reports()
    dataset = (_Keyed if kind == "subclass" else precache.CachedDataset)(path)
    loader: Any = torch.utils.data.DataLoader(dataset, 2)
    expected = ("own 8", "own 9") if kind == "subclass" else tuple(dataset.keys[8:10])
    if kind in ("dict", "tuple"):
        with precache.Loader(path, 2, seed=5, device="cpu") as plain:
            expected = tuple(plain.keys(list(plain)[4]["row"]))
        loader = precache.Loader(path, 2, seed=5, device="cpu", output=kind)
    delay(loader, monkeypatch, 4, clock)
    for _ in meter(loader, to=[reports]):
        pass
    assert reports[0].slow[0].keys == expected


def test_meters_of_a_name_number_steps_and_reports_through_all_epochs(clock: Clock) -> None:
    """Whether each epoch makes its own meter or not, on one thread; between epochs is no step."""
    reports = Reports()
    metered = precache.meter(Slept([0.0] * 7), every=3, to=[reports], name="shared")
    assert (len(metered), type(metered.loader)) == (7, Slept)
    for each in (metered, metered, meter(range(4), every=3, to=[reports], name="shared")):
        assert list(each) == list(range(len(metered) if each is metered else 4))
        clock.move(0.5)
    assert list(meter([], to=[reports], name="shared")) == []
    assert [report.steps for report in reports] == [3, 3, 1] * 2 + [3, 1]
    assert [report.step for report in reports] == [3, 6, 7, 10, 13, 14, 17, 18]
    assert [report.window for report in reports] == list(range(1, 9))
    assert max(report.iteration.max for report in reports) == 0
    names = [thread.name for thread in threading.enumerate()]
    list(meter([1], to=[], name="shared"))
    assert [thread.name for thread in threading.enumerate()] == names


@pytest.mark.parametrize(("end", "steps"), [("break", 3), ("step fails", 3), ("loader fails", 4)])
def test_a_loop_that_ends_early_reports_its_whole_steps(end: str, steps: int) -> None:
    def loader() -> Iterator[int]:
        yield from range(4)
        raise OSError("no more")

    reports = Reports()
    metered = precache.meter(loader(), to=[reports])
    with contextlib.suppress(ZeroDivisionError, OSError):
        for number in metered:
            if end == "break" and number == 3:
                break
            1 // (3 - number if end == "step fails" else 1)
    gc.collect()
    metered.flush()
    assert [report.steps for report in [*reports, metered.report()] if report.steps] == [steps]


@pytest.mark.parametrize(("every", "times"), [("0.05s", range(2, 21)), ("1h", [1])])
def test_reports_come_by_seconds_or_are_asked_for(every: str, times: Iterable[int]) -> None:
    """One that is asked for leaves out the step that is not over."""
    reports = Reports()
    metered = precache.meter(Slept([0.02] * 20), every, to=[reports], name=f"every {every}")
    list(metered)
    metered.flush()
    assert sum(report.steps for report in reports) == 20
    assert len(reports) in times
    assert reports[0].iteration.max >= reports[0].data.max > 0
    reports.clear()
    metered = precache.meter(Slept([0.001] * 3), to=[reports], name=f"asked {every}")
    asked = [metered.report() for _ in metered]
    metered.flush()
    assert [(report.steps, report.step) for report in asked] == [(0, 0), (1, 1), (1, 2)]
    assert all(report.stall_ratio < 1 for report in asked)
    assert [(report.steps, report.step) for report in reports] == [(1, 3)]
    assert metered.report().steps == 0


@pytest.mark.heavy
def test_an_iterator_that_is_never_closed_does_not_keep_the_process(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """And `precache.meter` is the function, whatever module is imported."""
    done = run_python(
        "import precache.metering.meter, precache\n"
        "held = iter(precache.meter(range(9), every=2, to=[lambda report: print(report.steps)]))\n"
        "print('batch', [next(held) for _ in range(4)])"
    )
    assert "batch [0, 1, 2, 3]" in done.stdout
    assert not done.stderr
