"""The stall meter tells what was really waited for, and leaves nothing behind."""

import contextlib
import gc
import itertools
import json
import multiprocessing
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import precache
from precache import Reading, outputs
from precache.metering.publisher import publisher_of
from precache.metering.recorder import keys_in_batch
from precache.reading import readahead
from precache.transforms import Transform
from precache.units import parse_age
from tests.conftest import BuiltStore
from tests.support.building import poll

Reports = list[precache.StallReport]
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

    def loader(self, delays: Iterable[float]) -> Iterator[int]:
        for number, delay in enumerate(delays):
            self.move(delay)
            yield number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


MS = st.integers(0, 40)
EPOCH = st.tuples(
    st.lists(st.tuples(MS, MS, st.booleans()), max_size=12),
    st.sampled_from(["ends", "break", "step fails", "loader fails"]),
)
"""Milliseconds of each batch and step, and whether it asks for a report; and how it ends."""


@given(st.lists(EPOCH, max_size=5), st.integers(1, 7) | st.sampled_from(["0.05s", "1h"]))
def test_a_report_has_the_steps_that_ended_since_the_last_one(
    epochs: list[Any], every: int | str
) -> None:
    """Numbered through all epochs and meters of a name; one that is asked for has no number."""
    clock, reports, right, ended = Clock(), Reports(), list[Any](), list[tuple[int, int]]()
    numbered, limit = publisher_of("history"), parse_age(every) if every in ("0.05s", "1h") else 1e9
    step, window = numbered.steps, numbered.windows

    class Loader:
        def __iter__(self) -> Iterator[int]:
            yield from clock.loader(data / 1e3 for data, _, _ in steps)
            if end == "loader fails":
                raise OSError("no more")

    def take(number: int) -> tuple[Any, ...]:
        nonlocal step
        step += len(ended)
        waited, both = sum(data for data, _ in ended) / 1e3, sum(map(sum, ended)) / 1e3
        means = waited / (both or 1), waited / (len(ended) or 1), both / (len(ended) or 1)
        found = len(ended), step, number, *map(pytest.approx, means)
        ended.clear()
        return found

    def figures(given: precache.StallReport) -> tuple[Any, ...]:
        means = given.stall_ratio, given.data.mean, given.iteration.mean
        return given.steps, given.step, given.window, *means

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock.now)
        metered = precache.meter(Loader(), every, to=[reports.append], name="history", device="cpu")
        for steps, end in epochs:
            requested = since = clock.now
            with contextlib.suppress(OSError, ZeroDivisionError):
                for number, _ in enumerate(metered, 1):
                    data, work, asks = steps[number - 1]
                    if asks:
                        assert figures(metered.report()) == take(0)
                        since = requested
                    if number == len(steps) and end == "break":
                        break
                    1 // (number < len(steps) or end != "step fails")
                    clock.move(work / 1e3)
                    requested = clock.now
                    ended.append((data, work))
                    if len(ended) == every or requested - since >= limit:
                        right.append(take(window := window + 1))
                        since = requested
            if ended:
                right.append(take(window := window + 1))
            clock.move(0.5)
    metered.flush()
    assert [*map(figures, reports)] == right
    assert metered.report().steps == 0


class _OwnKeys(precache.CachedDataset):
    def __getitem__(self, index: int) -> Any:
        return {"key": f"own {index}", "row": 1 << 40}


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataset", "subclass"])
def test_rare_slow_samples_are_named(
    kind: str, stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """By fields of the batch, or as precache's own loaders know them."""
    path, reports = stores["raw"].path, Reports()
    dataset = (_OwnKeys if kind == "subclass" else precache.CachedDataset)(path)
    loader: Any = torch.utils.data.DataLoader(dataset, 2)
    expected = ("own 8", "own 9") if kind == "subclass" else tuple(dataset.keys[8:10])
    if kind in ("dict", "tuple"):
        with precache.Loader(path, 2, seed=5, device="cpu") as plain:
            expected = tuple(plain.keys(list(plain)[4]["row"]))
        loader = precache.Loader(path, 2, seed=5, device="cpu", output=kind)
    iterate = type(loader).__iter__

    def delayed(loader: Any) -> Iterator[Any]:
        for position, batch in enumerate(iterate(loader)):
            clock.move({4: 0.6, 2: 0.3}.get(position, 0.0005))
            yield batch

    monkeypatch.setattr(type(loader), "__iter__", delayed)
    list(meter(loader, to=[reports.append], device="cpu"))
    first, second = reports[0].slow
    assert (first.step, first.keys, second.step) == (5, expected, 3)
    assert first.seconds == pytest.approx(0.6)
    assert f"rare slow samples: step 5 (600 ms: {expected[0]}, " in str(reports[0])


def test_an_iterator_that_is_collected_ends_and_publishes_nothing() -> None:
    """The collector runs in the middle of anything, where taking a lock could deadlock."""
    closed, reports = list[bool](), Reports()

    def loader() -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            closed.append(True)

    held: list[Any] = [iter(precache.meter(loader(), 2, to=[reports.append], name="collected"))]
    held.append(held)
    for number in range(4):
        assert next(held[0]) == number
    del held
    gc.collect()
    precache.meter([], name="collected").flush()
    assert closed == [True]
    assert [report.steps for report in reports] == [2]


def test_without_an_output_a_line_goes_to_standard_error_if_the_rank_stalls(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    for options in ({"name": "train"}, {"name": "fast", "threshold": 0.5}, {"to": []}):
        for _ in meter(clock.loader([0.0005] * 4), **options):
            clock.move(0.001)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("train, steps 1 to 4: waited for data 33.3% of the time; 0.5 of 1.5 ms")
    assert "median 0.5" in line


@pytest.mark.parametrize("mixed", [False, True], ids=["loader", "mixture"])
@pytest.mark.parametrize("early", [False, True], ids=["on the loop's thread", "ahead of the loop"])
def test_waiting_for_a_transform_on_the_cpu_is_reported_as_such(
    image_tiles: BuiltStore, early: bool, mixed: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(readahead.ReadAhead, "advise", lambda *_: None)  # one thread makes batches

    class Slow(Transform):
        def apply(self, batch: Any, draw: Any) -> Any:
            time.sleep(0.01)  # meanwhile the loop comes to wait for it
            clock.move(1)
            return batch

    options: dict[str, Any] = {"device": "cpu", "reading": Reading(num_threads=1)}
    options["transform"] = Slow() if early else lambda batch: Slow().apply(batch, None)
    loader: Any = precache.Loader(image_tiles.path, 4, **options)
    reports = Reports()
    with precache.mix([loader]) if mixed else loader as loader:
        list(meter(loader, to=[reports.append]))
        stats = loader.stats()
    assert 0 < stats.stall_ratio == pytest.approx(stats.transform_ratio)
    assert 0 < reports[0].stall_ratio == pytest.approx(reports[0].transform_ratio)
    assert reports[0].figures()["transform_ratio"] == reports[0].transform_ratio


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


def test_meters_of_a_name_share_a_thread_and_have_the_length_of_their_loader() -> None:
    metered = precache.meter(range(7), to=[], name="shared")
    metered.flush()  # there is nothing to wait for
    assert (len(metered), metered.loader, list(metered)) == (7, range(7), [*range(7)])
    names = [thread.name for thread in threading.enumerate()]
    list(meter([1], to=[], name="shared"))
    assert [thread.name for thread in threading.enumerate()] == names


def test_the_end_of_an_iteration_wakes_no_thread_and_its_report_comes_by_itself() -> None:
    """On a machine whose cores are all busy, a thread that is woken takes that of the training."""
    reports, publisher = Reports(), publisher_of("unhurried")
    for number in precache.meter(range(5), every=2, to=[reports.append], name="unhurried"):
        if number == 0:
            poll(lambda: not publisher._look.is_set(), "the thread has begun")
    assert not publisher._look.is_set()
    poll(lambda: [report.steps for report in reports] == [2, 2, 1], "the last report")


def test_an_output_that_fails_is_logged_and_a_slow_one_holds_up_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free, passed = threading.Event(), []

    def fail(report: precache.StallReport) -> None:
        raise ConnectionError("the dashboard is away")

    def slow(report: precache.StallReport) -> None:
        assert free.wait(60)
        passed.append(report.step)

    metered = precache.meter(range(4), every=2, to=[fail, slow], name="bad outputs")
    assert list(metered) == [0, 1, 2, 3]
    assert passed == []  # two reports are due, and the first is still on its way
    free.set()
    metered.flush()
    assert passed == [2, 4]
    failed = [f"sending the report of step {step} failed" for step in passed]
    assert [record.getMessage() for record in caplog.records] == failed


@pytest.mark.parametrize(
    ("variables", "ranks", "text"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4), ""),
        ({"PMIX_RANK": "17"}, (0, 1), "this process alone, as rank 0 of 1: the launcher gave"),
    ],
)
def test_ranks_without_a_store_report_each_for_itself(
    variables: dict[str, str], ranks: tuple[int, int], text: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """As rank 0 of 1 where that is unclear, which ends no training and is said once."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reports = Reports()
    metered = precache.meter(range(3), 1, to=[reports.append], threshold=1, name=f"alone {ranks}")
    assert list(metered) == list(metered) == [0, 1, 2]
    metered.flush()
    for report in (*reports, metered.report()):
        assert (report.rank, report.world_size) == ranks
        assert [stalls.rank for stalls in report.ranks] == [report.rank]
        assert "worst" not in str(report)
    assert str(reports[0]).startswith(f"{'rank 1: ' * ranks[0]}alone {ranks}, step 1: ")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(text)
    assert all(text in line and "PMIX_RANK='17'" in line for line in said)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"key": ["a", "b"]}, ("a", "b")),
        ({"key": "a"}, ("a",)),
        ({"__key__": ("a",)}, ("a",)),
        ({"row": torch.tensor([3, 4])}, (3, 4)),
        ({"row": np.array([3, 4])}, (3, 4)),
        ({"row": [np.int64(3), 4], "key": [b"a\xff", np.str_("b")]}, ("a\ufffd", "b")),
        ({"key": [np.zeros((2, 3)), np.zeros((2, 4))], "row": [np.int64(3)]}, (3,)),
        ({"key": torch.ones(2, requires_grad=True)}, ()),
        ({"key": [torch.ones(2, requires_grad=True)] * 2}, ()),
        ({"key": [float("nan")]}, ()),
        ({"row": torch.tensor([3]), "key": ["c"]}, ("c",)),
        ({"image": torch.zeros(2)}, ()),
        ((torch.zeros(2), torch.zeros(2)), ()),
        (None, ()),
    ],
)
def test_what_a_batch_says_of_its_samples(batch: Any, expected: tuple[str | int, ...]) -> None:
    """As it was, whatever is written into its memory later."""
    located = keys_in_batch(batch)
    with torch.no_grad():
        for field in batch.values() if isinstance(batch, dict) else ():
            if isinstance(field, torch.Tensor | np.ndarray):
                field[:] = 9
    assert tuple(json.loads(json.dumps(located()))) == expected
