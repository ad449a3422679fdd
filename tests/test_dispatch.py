"""Dispatching: what is under way, what is begun again, and what comes out, with a made engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import BuildError, CrashError
from workers.dispatch import (
    FEWEST_SUBMITTED,
    SUBMITTED_PER_SLOT,
    Done,
    Lost,
    Patience,
    dispatch,
)


@dataclass(frozen=True)
class Work:
    """An item, and whether it is that of a later copy."""

    number: int
    again: bool = False
    memory: int = 0

    def retried(self) -> Self:
        return replace(self, again=True)


@dataclass
class Copy:
    work: Work
    left: float | None
    """Seconds of running that it needs; None where it never ends."""
    end: Done | Lost


@dataclass
class Machines:
    """Slots that work on copies in the order of their coming, in a time of their own."""

    fate: Callable[[Work, int], tuple[float | None, Done | Lost]]
    """(item, copies of it before) -> how long it runs, and how it ends."""
    free: int = 2
    now: float = 0.0
    copies: dict[int, Copy] = field(default_factory=dict)
    begun: list[Work] = field(default_factory=list)
    cancelled: list[Work] = field(default_factory=list)
    most: int = 0

    def clock(self) -> float:
        return self.now

    def slots(self) -> int:
        return self.free

    def submit(self, function: Callable[[Any], Any], item: Work) -> Hashable:
        before = sum(each.number == item.number for each in self.begun)
        self.begun.append(item)
        self.copies[len(self.begun)] = Copy(item, *self.fate(item, before))
        self.most = max(self.most, len(self.copies))
        return len(self.begun)

    def wait(self, seconds: float) -> list[tuple[Hashable, Done | Lost]]:
        running = dict(list(self.copies.items())[: self.free])
        least = min((c.left for c in running.values() if c.left is not None), default=seconds)
        step = min(least, seconds)
        self.now += step
        ended: list[tuple[Hashable, Done | Lost]] = []
        for number, copy in running.items():
            if copy.left is not None:
                copy.left -= step
                if copy.left <= 0:
                    del self.copies[number]
                    ended.append((number, copy.end))
        return ended

    def cancel(self, copy: Any) -> None:
        if copy in self.copies:
            self.cancelled.append(self.copies.pop(copy).work)


def run(machines: Machines, count: int, patience: Patience | None = None) -> list[tuple[int, Any]]:
    items = (Work(number) for number in range(count))
    outcomes = dispatch(machines, str, items, patience, machines.clock)
    return [(work.number, outcome) for work, outcome in outcomes]


def good(work: Work, before: int) -> tuple[float, Done]:
    return 1.0, Done(work.number * 10)


def test_every_item_ends_once_with_its_value() -> None:
    machines = Machines(good)
    assert sorted(run(machines, 20)) == [(n, n * 10) for n in range(20)]
    assert len(machines.begun) == 20
    assert not any(work.again for work in machines.begun)


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_what_is_under_way_is_bounded_by_the_slots(slots: int) -> None:
    machines = Machines(good, slots)
    run(machines, 50)
    assert machines.most == slots * SUBMITTED_PER_SLOT


def test_items_are_taken_only_when_there_is_room() -> None:
    taken: list[int] = []

    def items() -> Any:
        for number in range(100):
            taken.append(number)
            yield Work(number)

    machines = Machines(good, 2)
    outcomes = dispatch(machines, str, items(), None, machines.clock)
    next(outcomes)
    assert len(taken) == 4
    outcomes.close()  # type: ignore[attr-defined]  # a generator, to its callers an iterator
    assert not machines.copies


def test_nodes_come_and_go() -> None:
    machines = Machines(good, 0)
    outcomes = dispatch(machines, str, map(Work, range(60)), None, machines.clock)
    seen: list[int] = []

    def grow(work: Work, before: int) -> tuple[float, Done]:
        seen.append(len(machines.copies))
        machines.free = 1 if len(machines.begun) > 40 else 10 if len(machines.begun) > 7 else 0
        return good(work, before)

    machines.fate = grow
    assert len(list(outcomes)) == 60
    assert max(seen[:8]) == FEWEST_SUBMITTED - 1, "an autoscaler sees some work from the start"
    assert machines.most == 10 * SUBMITTED_PER_SLOT


def test_a_lost_copy_is_begun_again_and_told_so() -> None:
    def fate(work: Work, before: int) -> tuple[float, Done | Lost]:
        return (1.0, Lost("gone", crashed=False)) if before < 2 else good(work, before)

    machines = Machines(fate)
    assert len(run(machines, 3)) == 3
    assert [work.again for work in machines.begun if work.number == 1] == [False, True, True]


def test_a_task_that_crashes_too_often_is_given_up() -> None:
    def fate(work: Work, before: int) -> tuple[float, Done | Lost]:
        return (1.0, Lost("of a cramp", crashed=True)) if work.number == 1 else good(work, before)

    machines = Machines(fate)
    outcomes = dict(run(machines, 3))
    assert isinstance(outcomes[1], CrashError)
    assert str(outcomes[1]) == "its worker died 3 times: of a cramp"
    assert (outcomes[0], outcomes[2]) == (0, 20)


def test_a_task_whose_nodes_all_go_is_given_up() -> None:
    machines = Machines(lambda work, before: (1.0, Lost("its node went", crashed=False)))
    [(_, outcome)] = run(machines, 1, Patience(losses=5))
    assert isinstance(outcome, BuildError)
    assert "5 times with its node: its node went" in str(outcome)


def test_a_copy_of_which_nothing_is_heard_gets_another() -> None:
    """Also while there is other work to do, and though it takes a slot's place."""

    def fate(work: Work, before: int) -> tuple[float | None, Done]:
        return (None if work.number < 2 and not before else 1.0), Done(work.number)

    machines = Machines(fate, 4)
    assert sorted(run(machines, 400)) == [(n, n) for n in range(400)]
    assert [work.number for work in machines.cancelled] == [0, 1]
    assert machines.now < 300


def test_work_that_never_ends_does_not_keep_the_rest_from_being_done() -> None:
    """Copies on a node that was cut off hold all that may be under way; the node is gone."""
    machines = Machines(good, 2)

    def fate(work: Work, before: int) -> tuple[float | None, Done]:
        cut = 10 <= len(machines.begun) <= 13 and not before
        machines.free = 6 if cut else machines.free
        return (None if cut else 1.0), Done(work.number)

    machines.fate = fate
    assert len(run(machines, 40)) == 40
    assert machines.now < 200


def test_copies_of_one_task_are_bounded() -> None:
    def fate(work: Work, before: int) -> tuple[float | None, Done]:
        return (500.0 if work.number else None), Done(work.number)

    machines = Machines(fate, 10)
    patience = Patience(first_late=10, copies=3)
    outcomes = dispatch(machines, str, [Work(0), Work(1)], patience, machines.clock)
    assert next(outcomes) == (Work(1), 1)
    assert [work.number for work in machines.begun].count(0) == 3


def test_a_straggler_gets_a_second_copy_where_a_slot_is_free() -> None:
    def fate(work: Work, before: int) -> tuple[float, Done]:
        return (500.0 if work.number == 5 and not before else 4.0), Done(before)

    machines = Machines(fate, 3)
    outcomes = dict(run(machines, 12))
    assert outcomes[5] == 1, "the second copy was first"
    assert [work.number for work in machines.cancelled] == [5]
    assert machines.now < 60


def test_no_second_copies_where_none_lags() -> None:
    machines = Machines(lambda work, before: (4.0 + work.number % 2, Done(0)), 8)
    run(machines, 60)
    assert len(machines.begun) == 60


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 60),
    slots=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    bad=st.floats(0, 0.6),
)
def test_whatever_happens_every_item_ends_once(
    count: int, slots: int, seed: int, bad: float
) -> None:
    draw = random.Random(seed)

    def fate(work: Work, before: int) -> tuple[float | None, Done | Lost]:
        machines.free = max(1, machines.free + draw.choice((-1, 0, 0, 1)))
        if draw.random() < bad:
            return draw.choice(
                ((1.0, Lost("a", True)), (2.0, Lost("b", False)), (400.0, Done(work.number)))
            )
        return draw.uniform(0.5, 3), Done(work.number)

    machines = Machines(fate, slots)
    found = run(machines, count)
    assert sorted(number for number, _ in found) == list(range(count))
    assert all(value == n or isinstance(value, CrashError) for n, value in found)
    assert not machines.copies
