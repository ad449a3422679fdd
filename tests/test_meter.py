"""The stall clock adds up what it is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.meter import WINDOW, StallClock, Times

SECONDS = st.lists(st.floats(0, 10), min_size=1, max_size=50)


def test_times_of_nothing_are_zero() -> None:
    assert Times.of([]) == Times(0.0, 0.0, 0.0, 0.0)


@given(SECONDS)
def test_times_lie_in_order(seconds: list[float]) -> None:
    times = Times.of(seconds)
    assert min(seconds) <= times.median <= times.max == max(seconds)
    assert times.median <= times.p95 <= times.max
    assert times.mean == pytest.approx(sum(seconds) / len(seconds))


def test_the_95th_percentile_leaves_out_the_slowest_twentieth() -> None:
    assert Times.of([1.0] * 95 + [9.0] * 5).p95 == 9.0
    assert Times.of([1.0] * 96 + [9.0] * 4).p95 == 1.0


def test_a_report_sums_batches_and_tells_waiting_from_working() -> None:
    clock = StallClock()
    for waited, worked in [(0.3, 0.1), (0.1, 0.5)]:
        clock.batch(waited, samples=4, nbytes=100)
        clock.step(worked)
    stats = clock.report()
    assert (stats.batches, stats.samples, stats.bytes) == (2, 8, 200)
    assert stats.data == Times.of([0.3, 0.1])
    assert stats.step == Times.of([0.1, 0.5])
    assert stats.stall_ratio == pytest.approx(0.4)


def test_a_report_starts_a_new_one() -> None:
    clock = StallClock()
    clock.batch(1.0, 1, 1)
    clock.report()
    stats = clock.report()
    assert (stats.batches, stats.samples, stats.bytes, stats.stall_ratio) == (0, 0, 0, 0.0)
    assert stats.data == stats.step == Times()


def test_a_clock_that_is_never_asked_keeps_a_bounded_history_and_true_totals() -> None:
    clock = StallClock()
    for _ in range(WINDOW + 10):
        clock.batch(1.0, 1, 1)
        clock.step(1.0)
    assert len(clock._data) == len(clock._step) == WINDOW
    stats = clock.report()
    assert stats.batches == WINDOW + 10
    assert stats.stall_ratio == 0.5
