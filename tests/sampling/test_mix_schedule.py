"""Turns: exact proportions in every epoch, and places that are a function of the step."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.errors import UsageError
from precache.sampling.mix_schedule import MixSchedule, shares_of

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)
WEIGHTS = st.floats(0.1, 5)
TURNS = LENGTHS.flatmap(
    lambda lengths: st.builds(
        lambda weights, until, seed: MixSchedule.of(
            lengths, shares_of(weights, len(lengths)) if weights else None, until, seed
        ),
        st.none() | st.lists(WEIGHTS, min_size=len(lengths), max_size=len(lengths)),
        st.just("all") | st.integers(200, 400),
        st.integers(0, 5),
    )
)


def _given(turns: MixSchedule, epoch: int, start: int = 0, stop: int | None = None) -> list[int]:
    """Batches that each source gives in some steps."""
    steps = list(turns.sources(epoch, start))[: None if stop is None else stop - start]
    counts = Counter(source for step in steps for source in step)
    return [counts[source] for source in range(len(turns.lengths))]


@given(TURNS, st.integers(0, 3))
def test_every_epoch_has_exactly_its_batches_of_each_source(turns: MixSchedule, epoch: int) -> None:
    assert len(list(turns.sources(epoch))) == len(turns)
    assert tuple(_given(turns, epoch)) == turns.counts


@given(TURNS, st.integers(0, 3), st.data())
def test_an_epoch_can_begin_at_any_step(
    turns: MixSchedule, epoch: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(turns)))
    whole = list(turns.sources(epoch))
    assert list(turns.sources(epoch, start)) == whole[start:]
    begun = turns.positions_at(epoch)
    taken = [
        place[0] * length + place[1] + batches
        for place, length, batches in zip(
            begun, turns.lengths, _given(turns, epoch, 0, start), strict=True
        )
    ]
    expected = [divmod(batch, n) for batch, n in zip(taken, turns.lengths, strict=True)]
    assert turns.positions_at(epoch, start) == expected


@given(TURNS, st.integers(0, 20))
def test_a_source_never_gives_a_batch_of_one_epoch_twice(turns: MixSchedule, epoch: int) -> None:
    """And one that is gone through in an epoch begins it with an epoch of its own."""
    for now, then, count, length in zip(
        turns.positions_at(epoch),
        turns.positions_at(epoch + 1),
        turns.counts,
        turns.lengths,
        strict=True,
    ):
        end, begin = now[0] * length + now[1] + count, then[0] * length + then[1]
        if count >= length:
            assert now[1] == then[1] == 0
            assert end <= begin < end + length
        else:
            assert begin == end


@given(LENGTHS, st.data())
def test_rules_hold(lengths: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(WEIGHTS, min_size=len(lengths), max_size=len(lengths)))
    shares = shares_of(weights, len(lengths))
    assert sum(shares) == 1
    every = MixSchedule.of(lengths, shares, "all", 0)
    assert all(n >= length for n, length in zip(every.counts, lengths, strict=True))
    assert any(
        share * (len(every) - 1) < length for share, length in zip(shares, lengths, strict=True)
    )
    for share, count in zip(shares, every.counts, strict=True):
        assert abs(count - share * len(every)) < 1
    try:
        first = MixSchedule.of(lengths, shares, "first", 0)
    except UsageError:
        return
    assert all(n <= length for n, length in zip(first.counts, lengths, strict=True))


def test_shares_are_what_they_are_meant_to_be() -> None:
    assert shares_of([1 / 3, 2 / 3], 2) == [Fraction(1, 3), Fraction(2, 3)]
    assert shares_of([0.7, 0.3], 2) == shares_of([7, 3], 2) == [Fraction(7, 10), Fraction(3, 10)]
    assert MixSchedule.of([7, 3], shares_of([0.7, 0.3], 2), "first", 0).counts == (7, 3)
    assert MixSchedule.of([7, 3], shares_of([0.7, 0.3], 2), "all", 0).counts == (7, 3)
    assert MixSchedule.of([70, 6], shares_of([0.7, 0.3], 2), "first", 0).counts == (14, 6)
    assert MixSchedule.of([70, 6], shares_of([0.7, 0.3], 2), "all", 0).counts == (70, 30)
    assert MixSchedule.of([70, 6], shares_of([0.7, 0.3], 2), 10, 0).counts == (7, 3)
    assert MixSchedule.of([70, 6], None, "all", 0).counts == (70, 70)
    assert MixSchedule.of([70, 6], None, "first", 0).counts == (6, 6)


def test_turns_are_those_of_earlier_releases() -> None:
    turns = MixSchedule((5, 3), (8, 4), 7)
    drawn = [source for (source,) in turns.sources(2)]
    assert drawn == [1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0]


def test_turns_differ_by_epoch_and_seed() -> None:
    orders = {
        tuple(MixSchedule((50, 50), (50, 50), seed).sources(epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0], "there are 1 weights for 2 loaders"),
        ([1.0, 0.0], r"the weight of source 1 is 0\.0; give a number above 0"),
        ([-1.0, 2.0], r"the weight of source 0 is -1\.0"),
        ([1.0, float("nan")], "the weight of source 1 is nan"),
        ([float("inf"), 1.0], "the weight of source 0 is inf"),
        ([1.0, 1e-9], r"the weight of source 1 is 1e-09; give a millionth of their sum"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: list[float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shares_of(weights, 2)


def test_a_source_without_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="source 1 gets no batch in an epoch of 10 steps"):
        MixSchedule.of([10, 10], shares_of([0.999, 0.001], 2), "first", 0)
