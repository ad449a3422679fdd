"""The stall clock adds up what it is told."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.runtime.spread import Spread
from precache.runtime.step_clock import (
    KEPT_STEPS,
    Counters,
    StallClock,
    ThreadTime,
    _seconds_between,
)


class Hands:
    """A clock that stands where it was put."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = math.inf
        self.clock = StallClock[float](lambda: self.now, self.between)

    def between(self, start: float, end: float) -> float | None:
        """As a device does it: unknown until it has passed the end."""
        return end - start if end <= self.passed else None

    def run(self, *steps: tuple[float, float]) -> None:
        self.clock.begin()
        for waited, worked in steps:
            self.now += waited
            self.clock.arrived(samples=4, nbytes=100)
            self.now += worked
            self.clock.requested()


def test_a_report_sums_the_whole_steps_since_the_last_one() -> None:
    """But not what lies between two epochs, nor a step that is not over, or comes to no end."""
    hands = Hands()
    hands.run((0.25, 0.125))
    hands.now += 100
    hands.run((0.125, 0.5))
    hands.now += 1
    hands.clock.arrived(4, 100)
    stats = hands.clock.take().stats(Counters(cpu_seconds=1.5))
    assert (stats.batches, stats.samples, stats.bytes) == (2, 8, 200)
    assert stats.data == Spread.of([0.25, 0.125])
    assert stats.step == Spread.of([0.125, 0.5])
    assert stats.iteration == Spread.of([0.375, 0.625])
    assert stats.stall_ratio == pytest.approx(0.375)
    assert stats.cpu_seconds == 1.5
    assert Hands().clock.take().stats() == hands.clock.take().stats()
    hands.now += 3
    hands.clock.requested()
    stats = hands.clock.take().stats()
    assert (stats.data.max, stats.step.max, stats.batches, stats.samples) == (1.0, 3.0, 1, 4)
    assert stats.stall_ratio == 0.25
    hands.clock.arrived()
    hands.now += 50
    hands.clock.forget()
    hands.clock.forget()
    assert hands.clock.take().stats().batches == 0


def test_steps_that_the_device_has_not_finished_come_with_a_later_report() -> None:
    hands = Hands()
    hands.passed = 4.0
    hands.run((1.0, 2.0), (1.0, 2.0))
    assert hands.clock.batches == 1
    first = hands.clock.take().stats()
    assert (first.data, first.step, first.samples) == (Spread.of([1.0]), Spread.of([2.0]), 4)
    assert hands.clock.batches == 0
    hands.passed = math.inf
    assert hands.clock.take().stats() == first


class Device:
    """Works through what a host queues, in order; a mark is when it comes by."""

    def __init__(self) -> None:
        self.host = self.free = self.busy = 0.0

    def mark(self) -> float:
        return max(self.host, self.free)

    def between(self, start: float, end: float) -> float | None:
        return end - start if end <= self.host else None

    def queue(self, seconds: float) -> None:
        self.free = self.mark() + seconds
        self.busy += seconds

    def synchronize(self) -> None:
        self.host = self.mark()


Steps = list[tuple[float, float, bool]]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 9), st.booleans()), min_size=1))
def test_a_device_stalls_for_as_long_as_it_has_nothing_to_do(steps: Steps) -> None:
    """Whether the host runs ahead of it or waits for it."""
    device = Device()
    clock = StallClock(device.mark, device.between)
    clock.begin()
    for fetching, working, waits in steps:
        device.host += fetching
        clock.arrived()
        device.queue(working)
        if waits:
            device.synchronize()
        clock.requested()
    device.synchronize()
    stats = clock.take().stats()
    assert stats.stall_ratio == pytest.approx(1 - device.busy / device.free, abs=1e-9)
    assert stats.iteration.mean == pytest.approx(device.free / len(steps))


def test_a_clock_that_is_never_asked_keeps_a_bounded_history_and_true_totals() -> None:
    hands = Hands()
    hands.run(*[(1.0, 1.0)] * (KEPT_STEPS + 10))
    steps = hands.clock.take()
    assert len(steps.data) == len(steps.work) == KEPT_STEPS
    stats = steps.stats()
    assert (stats.batches, stats.stall_ratio) == (KEPT_STEPS + 10, 0.5)


def test_the_time_of_several_threads_adds_up() -> None:
    spent = ThreadTime()

    def work(_: int) -> None:
        with spent.counted():
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                pass

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert 0.15 <= spent.cpu < 1
    assert spent.cpu <= spent.wall


@pytest.mark.parametrize(
    ("work", "transforms"),
    [
        (Counters(), 0.0),
        (Counters(threads=2.0), 0.0),
        (Counters(threads=2.0, transforms=1.5), 3.0),  # three quarters of the threads' time
        (Counters(threads=2.0, loop=1.0), 1.0),
        (Counters(threads=2.0, transforms=1.0, loop=1.0), 2.5),
        (Counters(loop=9.0), 4.0),  # never more than was waited
    ],
)
def test_a_wait_is_divided_into_transforms_and_loading(work: Counters, transforms: float) -> None:
    assert work.wait_for_transforms(4.0) == pytest.approx(transforms)
    hands = Hands()
    hands.run((4.0, 4.0))
    stats = hands.clock.take().stats(made=work)
    assert (stats.stall_ratio, stats.transform_ratio) == (0.5, pytest.approx(transforms / 8))


def test_statistics_are_aligned_lines_for_people() -> None:
    hands = Hands()
    assert str(hands.clock.take().stats()).startswith("no finished batch since the last report")
    hands.run((0.25, 0.125), (0.125, 0.5))
    made = Counters(1.0, 0.5, cpu_seconds=0.5, objects=1200, nbytes=3_000_000)
    stats = hands.clock.take().stats(made)
    assert str(stats).splitlines() == [
        "2 batches: 8 samples, 200 B, 8 samples/s",
        "waiting for data   37.5%  188 ms (median 188, p95 250, max 250) per batch",
        "  for transforms   18.8%",
        "  for loading      18.8%",
        "your own step      62.5%  312 ms (median 312, p95 500, max 500) per batch",
        "loader's threads  0.5 CPU-s",
        "fetched           1,200 objects, 3 MB",
    ]
    begins = "LoaderStats(batches=2, samples=8, bytes=200, data=Spread(mean=0."
    assert repr(stats).startswith(begins)


def test_a_device_that_has_not_come_by_both_events_tells_no_time() -> None:
    """The second may be passed first: they may be on two streams."""
    passed, ahead = (
        Mock(query=Mock(return_value=value), elapsed_time=Mock(return_value=250.0))
        for value in (True, False)
    )
    assert _seconds_between(passed, passed) == 0.25
    assert _seconds_between(passed, ahead) is _seconds_between(ahead, passed) is None
    assert passed.elapsed_time.call_count + ahead.elapsed_time.call_count == 1
