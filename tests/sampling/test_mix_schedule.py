"""Turns: exact proportions in every epoch, and places that are a function of the step."""

import contextlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import UsageError
from precache.sampling.mix_schedule import MixSchedule, shares_of

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)
WEIGHTS = st.floats(0.1, 5)


def schedule_of(
    lengths: list[int], weights: list[float] | None, until: str | int, seed: int = 0
) -> MixSchedule:
    shares = tuple(shares_of(weights, len(lengths))) if weights else None
    return MixSchedule(tuple(lengths), shares, until, seed)


SCHEDULES = LENGTHS.flatmap(
    lambda lengths: st.builds(
        schedule_of,
        st.just(lengths),
        st.none() | st.lists(WEIGHTS, min_size=len(lengths), max_size=len(lengths)),
        st.just("all") | st.integers(200, 400),
        st.integers(0, 5),
    )
)


@given(SCHEDULES, st.integers(0, 20))
def test_a_source_has_its_batches_and_is_read_on_without_one_twice_or_left_out(
    schedule: MixSchedule, epoch: int
) -> None:
    """One that is read at least once in an epoch begins it with an epoch of its own."""
    pairs = zip(schedule.epoch(epoch), schedule.epoch(epoch + 1), strict=True)
    columns = [np.concatenate(pair) for pair in pairs]
    sources = columns[0]
    assert len(sources) == 2 * len(schedule)
    assert tuple(np.bincount(sources[: len(schedule)])) == schedule.counts
    for number, (length, count) in enumerate(zip(schedule.lengths, schedule.counts, strict=True)):
        _, epochs, batches = (column[sources == number] for column in columns)
        places = epochs * length + batches
        jumps = np.flatnonzero(np.diff(places) != 1) + 1
        if count < length:
            assert not len(jumps)
        else:
            assert set(jumps) <= {count}
            assert batches[0] == batches[count] == 0
            assert count <= places[count] - places[0] < count + length


@given(LENGTHS, st.data())
def test_rules_hold(lengths: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(WEIGHTS, min_size=len(lengths), max_size=len(lengths)))
    shares = shares_of(weights, len(lengths))
    assert sum(shares) == 1
    every = schedule_of(lengths, weights, "all")
    assert all(n >= length for n, length in zip(every.counts, lengths, strict=True))
    assert any(
        share * (len(every) - 1) < length for share, length in zip(shares, lengths, strict=True)
    )
    for share, count in zip(shares, every.counts, strict=True):
        assert abs(count - share * len(every)) < 1
    first = schedule_of(lengths, weights, "first")
    with contextlib.suppress(UsageError):
        assert all(n <= length for n, length in zip(first.counts, lengths, strict=True))


def test_shares_are_what_they_are_meant_to_be() -> None:
    assert shares_of([1 / 3, 2 / 3], 2) == [Fraction(1, 3), Fraction(2, 3)]
    assert shares_of([0.7, 0.3], 2) == shares_of([7, 3], 2) == [Fraction(7, 10), Fraction(3, 10)]
    assert schedule_of([7, 3], [0.7, 0.3], "first").counts == (7, 3)
    assert schedule_of([7, 3], [0.7, 0.3], "all").counts == (7, 3)
    assert schedule_of([70, 6], [0.7, 0.3], "first").counts == (14, 6)
    assert schedule_of([70, 6], [0.7, 0.3], "all").counts == (70, 30)
    assert schedule_of([70, 6], [0.7, 0.3], 10).counts == (7, 3)
    assert schedule_of([70, 6], None, "all").counts == (70, 6)


def test_turns_are_those_of_earlier_releases_and_differ_by_epoch_and_seed() -> None:
    turns = schedule_of([5, 3], [2, 1], 12, 7)
    assert turns.counts == (8, 4)
    assert turns.epoch(2)[0].tolist() == [1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0]
    schedules = [MixSchedule((50, 50), seed=seed) for seed in range(3)]
    assert len({tuple(one.epoch(epoch)[0]) for one in schedules for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0], r"weights is \[1\.0\] for 2 loaders; give one each"),
        ({1: 1.0, 2: 1.0}, "weights is {1: 1.0, 2: 1.0} for 2 loaders"),  # not its keys
        ([1e308, 1e308], "give a millionth of their sum"),
        ([1.0, 0.0], r"the weight of source 1 is 0\.0; give a number above 0"),
        ([-1.0, 2.0], r"the weight of source 0 is -1\.0"),
        ([1.0, float("nan")], "the weight of source 1 is nan"),
        ([float("inf"), 1.0], "the weight of source 0 is inf"),
        ([1.0, 1e-9], r"the weight of source 1 is 1e-09; give a millionth of their sum"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shares_of(weights, 2)
    with pytest.raises(UsageError, match="source 1 gets no batch in an epoch of 10 steps"):
        len(schedule_of([10, 10], [0.999, 0.001], "first"))
