"""The stall meter tells what was really waited for, and leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import precache
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
    "steady": [0.002] * 150,
    "bursty": [0.03 if number % 10 == 9 else 0.0 for number in range(150)],
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
    for _ in precache.meter(loader, every=60, to=[reports], device="cpu"):
        loader.step(0.004)
    assert [report.steps for report in reports] == [60, 60, 30]
    assert [report.step for report in reports] == [60, 120, 150]
    truths = [loader.stall_ratio(each.step - each.steps, each.step) for each in reports]
    return max(abs(r.stall_ratio - truth) for r, truth in zip(reports, truths, strict=True))


def test_a_report_is_a_summary_of_all_steps_since_the_last() -> None:
    loader, reports = Slept(DELAYS["bursty"]), Reports()
    for _ in precache.meter(loader, every=100, to=[reports], device="cpu"):
        loader.step(0.001)
    first = reports[0]
    # Between two clocks this process may lose the CPU to others, so it is more than was slept.
    assert first.data.mean > sum(loader.data[:100]) / 100 - 1e-4
    assert first.data.max > max(loader.data[:100]) - 1e-4
    assert first.data.median < 0.01 < 0.03 <= first.data.p95 <= first.data.max
    assert 0.001 < first.iteration.median < first.iteration.max
    assert first.iteration.mean > first.data.mean


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
    for _ in precache.meter(loader, to=[reports], device="cpu"):
        pass
    [report] = reports
    slow = report.slow[:2]
    assert [each.keys for each in slow] == expected
    assert [each.step for each in slow] == [31, 11]
    assert slow[0].seconds == pytest.approx(0.6)
    assert "rare slow samples: step 31 (" in str(report)
    assert str(expected[0][0]) in str(report)


class Delayed:
    """A `Loader` or a `DataLoader`, with one batch held up."""

    def __init__(
        self, source: Any, monkeypatch: pytest.MonkeyPatch, number: int, clock: Clock
    ) -> None:
        kind, made = type(source), type(source).__iter__

        def delayed(loader: Any) -> Iterator[Any]:
            for position, batch in enumerate(made(loader)):
                if position == number:
                    clock.move(0.5)
                yield batch

        monkeypatch.setattr(kind, "__iter__", delayed)


@pytest.mark.parametrize("output", ["dict", "tuple"])
def test_keys_of_precaches_own_loader_are_known(
    output: str, stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    path = stores["raw"].path
    with precache.Loader(path, 2, seed=5, device="cpu") as plain:
        expected = plain.keys(list(plain)[4]["row"])
    reports = Reports()
    with precache.Loader(path, 2, seed=5, device="cpu", output=output) as loader:
        Delayed(loader, monkeypatch, 4, clock)
        for _ in precache.meter(loader, to=[reports]):
            pass
    assert reports[0].slow[0].keys == tuple(expected)


def test_keys_of_a_cached_dataset_are_known(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    dataset = precache.CachedDataset(stores["raw"].path)
    loader = torch.utils.data.DataLoader(dataset, 2, collate_fn=dataset.collate)
    Delayed(loader, monkeypatch, 4, clock)
    reports = Reports()
    for _ in precache.meter(loader, to=[reports]):
        pass
    assert reports[0].slow[0].keys == tuple(dataset.keys[8:10])


class _Keyed(precache.CachedDataset):
    def __getitem__(self, index: int) -> Any:
        return {"key": f"own {index}", "row": 1 << 40}


def test_keys_of_a_subclass_are_its_own(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    loader = torch.utils.data.DataLoader(_Keyed(stores["raw"].path), 2)
    Delayed(loader, monkeypatch, 4, clock)
    reports = Reports()
    for _ in precache.meter(loader, to=[reports]):
        pass
    assert reports[0].slow[0].keys == ("own 8", "own 9")


def test_it_iterates_like_the_loader_for_any_number_of_epochs() -> None:
    loader, reports = Slept([0.0] * 7), Reports()
    metered = precache.meter(loader, every=3, to=[reports])
    assert metered.loader is loader
    assert len(metered) == 7
    assert list(metered) == list(metered) == list(range(7))
    assert [report.steps for report in reports] == [3, 3, 1] * 2
    assert [report.step for report in reports] == [3, 6, 7, 10, 13, 14]


def test_time_between_two_epochs_is_of_no_step(clock: Clock) -> None:
    loader, reports = Slept([0.0] * 5), Reports()
    metered = precache.meter(loader, to=[reports])
    list(metered)
    clock.move(0.5)
    list(metered)
    assert reports[1].iteration.max == 0


def test_an_empty_loader_reports_nothing() -> None:
    reports = Reports()
    assert list(precache.meter([], to=[reports])) == []
    assert reports == []


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("precache-meter")]


def test_a_loop_that_is_left_early_reports_its_whole_steps_and_ends_the_thread() -> None:
    reports = Reports()
    for number in precache.meter(Slept([0.0] * 9), every=2, to=[reports]):
        if number == 3:
            assert _threads()
            break
    assert [report.steps for report in reports] == [2, 1]
    assert not _threads()


def test_the_loops_exception_reports_its_whole_steps_and_ends_the_thread() -> None:
    reports, closed = Reports(), []

    def loader() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    def train() -> None:
        for number in precache.meter(loader(), to=[reports]):
            1 // (3 - number)

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    assert [report.steps for report in reports] == [3]
    assert closed == [True]
    assert not _threads()


def test_an_iterator_that_is_collected_ends_the_thread() -> None:
    held: list[Any] = [iter(precache.meter(range(9), every=2, to=[]))]
    held.append(held)
    assert [next(held[0]) for _ in range(4)] == [0, 1, 2, 3]
    [thread] = [each for each in threading.enumerate() if each.name.startswith("precache-meter")]
    del held
    gc.collect()
    thread.join(60)
    assert not _threads()


def test_the_loaders_exception_is_the_loops() -> None:
    def loader() -> Iterator[int]:
        yield from range(3)
        raise OSError("no more")

    reports = Reports()
    with pytest.raises(OSError, match="no more"):
        list(precache.meter(loader(), to=[reports]))
    assert [report.steps for report in reports] == [3]
    assert not _threads()


def test_a_batch_lives_no_longer_than_the_loop_has_it() -> None:
    class Batch:
        pass

    before: list[weakref.ref[Batch]] = []

    def loader() -> Iterator[Batch]:
        for _ in range(3):
            assert not before or before[-1]() is None
            batch = Batch()
            before.append(weakref.ref(batch))
            yield batch
            del batch

    for batch in precache.meter(loader(), to=[]):
        del batch
    assert len(before) == 3


def test_a_report_may_be_asked_for_at_any_moment() -> None:
    reports = Reports()
    metered = precache.meter(Slept([0.001] * 6), to=[reports])
    assert metered.report().steps == 0
    for number in metered:
        if number == 4:
            asked = metered.report()
    # The fifth batch was there, and its step not over.
    assert (asked.steps, asked.step) == (4, 4)
    assert asked.data.mean >= 0.001
    assert [(report.steps, report.step) for report in reports] == [(2, 6)]
    assert metered.report().steps == 0


def test_a_report_asked_for_in_each_step_leaves_out_that_step() -> None:
    reports = Reports()
    metered = precache.meter(Slept([0.001] * 3), to=[reports])
    asked = [metered.report() for _ in metered]
    assert [(report.steps, report.step) for report in asked] == [(0, 0), (1, 1), (1, 2)]
    assert all(report.stall_ratio < 1 for report in asked)
    assert [(report.steps, report.step) for report in reports] == [(1, 3)]
    assert reports[0].iteration.max >= reports[0].data.max > 0


def test_reports_by_seconds() -> None:
    often, once = Reports(), Reports()
    list(precache.meter(Slept([0.02] * 20), every="0.05s", to=[often]))
    list(precache.meter(Slept([0.02] * 20), every="3600s", to=[once]))
    assert sum(report.steps for report in often) == 20
    assert len(often) >= 2
    assert [report.steps for report in once] == [20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; give steps such as 100, or seconds such as '30s'"),
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
        precache.meter([], **options)


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(UsageError, match="loader is 3; give an iterable of batches"):
        precache.meter(3)  # type: ignore[arg-type]  # the mistake


def test_without_an_output_a_line_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    list(precache.meter(Slept([0.001] * 4), name="train"))
    list(precache.meter(Slept([0.001] * 4), to=[]))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("train, steps 1 to 4: waited for data ")


@pytest.mark.parametrize("mixed", [False, True], ids=["loader", "mixture"])
@pytest.mark.parametrize("early", [False, True], ids=["on the loop's thread", "ahead of the loop"])
def test_waiting_for_a_transform_on_the_cpu_is_reported_as_such(
    tile_store: BuiltStore,
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
        precache.Loader(tile_store.path, 4, device="cpu", transform=transform, num_threads=1)
    ]
    loader = precache.mix(loaders) if mixed else loaders[0]
    reports = Reports()
    with loader:
        for _ in precache.meter(loader, to=[reports]):
            pass
        stats = loader.stats()
    assert 0 < stats.stall_ratio == pytest.approx(stats.transform_ratio)
    assert 0 < reports[0].stall_ratio == pytest.approx(reports[0].transform_ratio)
    assert reports[0].figures()["transform_ratio"] == reports[0].transform_ratio
    assert f"\n  for transforms  {stats.transform_ratio:6.1%}\n" in str(stats)


def test_a_loop_without_transforms_waits_for_loading_alone(tile_store: BuiltStore) -> None:
    with precache.Loader(tile_store.path, 4, device="cpu") as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats.transform_ratio == 0
    assert "transforms" not in str(stats)
    assert str(stats).splitlines()[0].startswith(f"{stats.batches} batches: {stats.samples}")


_LEFT_OPEN = """
import precache
held = iter(precache.meter(range(9), every=2, to=[lambda report: print(report.steps)]))
print("batch", [next(held) for _ in range(4)])
"""


@pytest.mark.heavy
def test_an_iterator_that_is_never_closed_does_not_keep_the_process(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(_LEFT_OPEN)
    assert "batch [0, 1, 2, 3]" in done.stdout
    assert not done.stderr


@pytest.mark.heavy
def test_meter_is_the_function_whatever_is_imported(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = "import precache.metering.meter, precache\nprint(list(precache.meter([1], to=[])))"
    assert run_python(code).stdout == "[1]\n"
