"""Dispatching with a simulated engine: bounds, retries, second copies, outcomes."""

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import BuildError, CrashError, Hole
from precache_workers.cluster.dispatch import (
    COPIES,
    MAX_ITEMS,
    MIN_SUBMITTED,
    SUBMITTED_PER_SLOT,
    TASK_SECONDS,
    Done,
    Lost,
    dispatch,
)
from precache_workers.runtime.time_limit import key_digest
from precache_workers.shards.samples import FetchAllTask

LIMIT = 300.0
"""Time limit of a sample of the third item."""


@dataclass(frozen=True)
class Work(FetchAllTask):
    """An item; `again` marks that of a later copy."""

    number: int = field(kw_only=True)
    job: Any = None
    again: bool = False
    memory: int = 0
    keys: Sequence[str] = ("waits", "evil", *"abc", *map(str, range(16)))

    @property
    def seconds(self) -> float:
        return LIMIT if self.number == 3 else 0.0

    def retried(self) -> Self:
        return replace(self, again=True)


def work_of(number: int) -> Work:
    return Work(number=number)


End = tuple[float | None, Done | Lost]
"""How long a copy runs, None where it never ends, and how it ends."""


@dataclass
class Copy:
    items: Sequence[Work]
    left: float | None
    end: Done | Lost


@dataclass
class Machines:
    """An engine with simulated time, whose slots run copies in the order of submission."""

    fate: Callable[[Work, int], End]
    """(item, copies of it before) -> what happens to it alone."""
    free: int = 2
    now: float = 0.0
    copies: dict[int, Copy] = field(default_factory=dict)
    begun: list[Work] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    """Items of each task that was begun."""
    cancelled: list[Work] = field(default_factory=list)
    most: int = 0

    def clock(self) -> float:
        return self.now

    def slots(self) -> int:
        return self.free

    def submit(
        self, function: Callable[[Any], Any], items: Sequence[Work], next_one: bool = False
    ) -> Hashable:
        fates = []
        for item in items:
            before = sum(each.number == item.number for each in self.begun)
            self.begun.append(item)
            fates.append(self.fate(item, before))
        self.tasks.append(len(items))
        copy = {len(self.tasks): Copy(items, *together(fates))}
        running = dict(list(self.copies.items())[: self.free])
        self.copies = running | copy | self.copies if next_one else self.copies | copy
        self.most = max(self.most, len(self.copies))
        return len(self.tasks)

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
            self.cancelled += self.copies.pop(copy).items


def together(fates: Sequence[End]) -> End:
    """Return the end of a task of several items, which run one after another."""
    took, values = 0.0, []
    for left, end in fates:
        if left is None:
            return None, end
        took += left
        if isinstance(end, Lost):
            return took, end
        values += end.values
        if took >= 2 * TASK_SECONDS:
            break
    return took, Done(values, took)


def run(machines: Machines, count: int, shared: bool = False) -> list[tuple[int, Any]]:
    outcomes = dispatch(machines, str, map(work_of, range(count)), count * shared, machines.clock)
    return [(work.number, outcome) for work, outcome in outcomes]


def done(seconds: float, value: Any) -> tuple[float, Done]:
    return seconds, Done([value], seconds)


def good(work: Work, before: int) -> End:
    return done(1.0, work.number * 10)


GONE, CRAMP = (1.0, Lost("gone", crashed=False)), (0.01, Lost("cramp", crashed=True))
"""Copies that are lost with their node, and with their process."""


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_what_is_under_way_is_bounded_by_the_slots(slots: int) -> None:
    """Items are taken only when there is room, and no second copy is begun where none lags."""
    taken: list[int] = []

    def items() -> Iterator[Work]:
        for number in range(60):
            taken.append(number)
            yield Work(number=number)

    machines = Machines(lambda work, before: done(4.0 + work.number % 2, work.number), slots)
    outcomes = dispatch(machines, str, items(), 0, machines.clock)
    first, _ = next(outcomes)
    assert len(taken) == slots * SUBMITTED_PER_SLOT
    assert sorted([first.number, *(value for _, value in outcomes)]) == [*range(60)]
    assert machines.most == slots * SUBMITTED_PER_SLOT
    assert len(machines.begun) == 60
    assert not any(work.again for work in machines.begun)


def test_what_is_under_way_is_cancelled_at_the_end() -> None:
    machines = Machines(good)
    outcomes = dispatch(machines, str, map(work_of, range(9)), 0, machines.clock)
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]  # a generator, to its callers an iterator
    assert not machines.copies


def test_nodes_come_and_go() -> None:
    machines = Machines(good, 0)
    seen: list[int] = []

    def grow(work: Work, before: int) -> End:
        seen.append(len(machines.copies))
        machines.free = 1 if len(machines.begun) > 40 else 10 if len(machines.begun) > 7 else 0
        return good(work, before)

    machines.fate = grow
    assert len(run(machines, 60)) == 60
    assert max(seen[:8]) == MIN_SUBMITTED - 1, "an autoscaler sees some work from the start"
    assert machines.most == 10 * SUBMITTED_PER_SLOT


def test_a_lost_copy_is_begun_again_and_told_so() -> None:
    machines = Machines(lambda work, before: GONE if before < 2 else good(work, before))
    assert len(run(machines, 3)) == 3
    assert [work.again for work in machines.begun if work.number == 1] == [False, True, True]


@pytest.mark.parametrize(
    ("end", "kind", "says"),
    [
        (CRAMP, CrashError, "its worker died 3 times: cramp"),
        (GONE, BuildError, "a task was lost 20 times with its node: gone"),
    ],
)
def test_a_task_that_is_lost_too_often_is_given_up(end: End, kind: type, says: str) -> None:
    machines = Machines(lambda work, before: end if work.number == 1 else good(work, before))
    outcomes = dict(run(machines, 3))
    assert (type(outcomes[1]), str(outcomes[1])) == (kind, says)
    assert (outcomes[0], outcomes[2]) == (0, 20)


def test_a_copy_of_which_nothing_is_heard_gets_another() -> None:
    """Also while there is other work to do, and though it takes a slot's place."""

    def fate(work: Work, before: int) -> End:
        return (None if work.number < 2 and not before else 1.0), Done([work.number], 1.0)

    machines = Machines(fate, 4)
    assert sorted(run(machines, 400)) == [(n, n) for n in range(400)]
    assert [work.number for work in machines.cancelled] == [0, 1]
    assert machines.now < 300


def test_work_that_never_ends_does_not_keep_the_rest_from_being_done() -> None:
    """Copies on a node that was cut off hold all that may be under way; the node is gone."""
    machines = Machines(good, 2)

    def fate(work: Work, before: int) -> End:
        cut = 10 <= len(machines.begun) <= 13 and not before
        machines.free = 6 if cut else machines.free
        return (None if cut else 1.0), Done([work.number], 1.0)

    machines.fate = fate
    assert len(run(machines, 40)) == 40
    assert machines.now < 200


def test_copies_of_one_task_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precache_workers.cluster.dispatch.FIRST_LATE", 10)
    end = Done([1], 500.0)
    machines = Machines(lambda work, before: (500.0 if work.number else None, end), 10)
    outcomes = dispatch(machines, str, map(work_of, range(2)), 0, machines.clock)
    assert next(outcomes) == (work_of(1), 1)
    assert [work.number for work in machines.begun].count(0) == COPIES


def test_a_straggler_gets_a_second_copy_where_a_slot_is_free() -> None:
    def fate(work: Work, before: int) -> End:
        return done(500.0 if work.number == 5 and not before else 4.0, before)

    machines = Machines(fate, 3)
    assert dict(run(machines, 12))[5] == 1, "the second copy was first"
    assert [work.number for work in machines.cancelled] == [5]
    assert machines.now < 60


def test_the_first_unfinished_item_gets_a_second_copy_before_later_ones_begin() -> None:
    """The rest keeps all slots busy; a follower of the build waits for the first."""

    def fate(work: Work, before: int) -> End:
        return done(1000.0 if work.number == 3 and not before else 2.0, before)

    machines = Machines(fate)
    outcomes = run(machines, 60)
    assert dict(outcomes)[3] == 1
    assert [number for number, _ in outcomes].index(3) < 15
    begun = [work.number for work in machines.begun]
    assert begun.index(3, begun.index(3) + 1) < 15
    assert len(begun) == 61, "only the one that lagged"
    assert [work.number for work in machines.cancelled] == [3]


def test_what_was_lost_comes_before_second_copies() -> None:
    def fate(work: Work, before: int) -> End:
        if work.number == 5:
            return done(500.0, 0)
        lost = work.number < 3 and not before
        return (11.0, GONE[1]) if lost else done(4.0, 1)

    machines = Machines(fate, 4)
    outcomes = dispatch(machines, str, map(work_of, range(6)), 0, machines.clock)
    assert [work.number for work, _ in itertools.islice(outcomes, 5)] == [3, 4, 0, 1, 2]
    assert [work.number for work in machines.begun if work.again][:3] == [0, 1, 2]


# --- several items in a task --------------------------------------------------------------------


def test_short_items_share_tasks_until_few_are_left() -> None:
    machines = Machines(lambda work, before: done(0.01, work.number))
    assert sorted(run(machines, 1000, shared=True)) == [(n, n) for n in range(1000)]
    assert len(machines.tasks) < 100
    assert max(machines.tasks) == MAX_ITEMS
    assert machines.tasks[-8:] == [1] * 8, "the last ones go to whoever is free first"
    assert machines.now < 1.05 * 1000 * 0.01 / 2


def test_items_of_a_task_that_takes_long_are_done_by_others() -> None:
    """The first are linked, say, in no time, and those that follow, made, have a task each."""
    machines = Machines(lambda work, before: done(0.01 if work.number < 500 else 8.0, work.number))
    assert len(run(machines, 600, shared=True)) == 600
    assert machines.tasks[-90:] == [1] * 90
    assert not machines.cancelled
    assert machines.now < 1.05 * (500 * 0.01 + 100 * 8.0) / 2


def test_one_that_kills_its_worker_is_found_among_those_of_its_task() -> None:
    machines = Machines(lambda work, n: CRAMP if work.number == 400 else done(0.01, n))
    outcomes = dict(run(machines, 1000, shared=True))
    assert str(outcomes.pop(400)) == "its worker died 3 times: cramp"
    assert all(isinstance(outcome, int) for outcome in outcomes.values())
    assert max(outcomes.values()) == 1, "the others run once more at most"
    again = {work.number for work in machines.begun if work.again}
    assert 400 in again
    assert len(again) <= MAX_ITEMS, "and may be found done"


KILLS = Hole("killed its worker", "it kills")


def died(*keys: str) -> tuple[float, Lost]:
    """A worker that dies while it works on samples."""
    return 0.01, Lost("cramp", True, dict.fromkeys(map(key_digest, keys), KILLS))


def test_a_sample_is_left_out_when_a_worker_died_at_it_again_and_alone() -> None:
    def fate(work: Work, before: int) -> End:
        if work.number != 400 or "evil" in work.barred:
            return done(0.01, work.number)
        return died("evil") if "evil" in work.alone else died("waits", "evil")

    machines = Machines(fate)
    assert sorted(run(machines, 1000, shared=True)) == [(n, n) for n in range(1000)]
    tried = [work for work in machines.begun if work.number == 400]
    assert [sorted(work.alone) for work in tried] == [[], ["evil", "waits"], ["evil", "waits"]]
    assert [work.barred for work in tried] == [{}, {}, {"evil": KILLS}]


def test_a_sample_that_hangs_holds_no_other_slot_and_once_known_only_its_own() -> None:
    def fate(work: Work, before: int) -> End:
        if work.number != 3 or "evil" in work.barred:
            return done(2.0, work.number)
        return LIMIT, died("evil")[1]

    machines = Machines(fate)
    assert sorted(run(machines, 400)) == [(n, n) for n in range(400)]
    tried = [work for work in machines.begun if work.number == 3]
    # Only the first task that lags has another copy, for who follows the build.
    assert [sorted(work.alone) for work in tried] == [[], [], ["evil"], ["evil"]]
    assert machines.now < 1.05 * (400 * 2 + 3 * LIMIT) / 2


def test_deaths_at_one_sample_after_another_leave_none_out() -> None:
    """As of workers that are killed from outside."""
    machines = Machines(lambda work, n: died("abc"[n]) if n < 2 else done(0.01, work.number))
    assert sorted(run(machines, 9)) == [(n, n) for n in range(9)]
    assert not any(work.barred for work in machines.begun)
    [(_, outcome)] = run(Machines(lambda work, n: died("abc"[n])), 1)
    assert str(outcome) == "its worker died 3 times: cramp"


@pytest.mark.parametrize(("count", "outcome"), [(15, "0"), (16, "its worker died at 16 samples")])
def test_a_task_is_given_up_that_leaves_out_too_many_samples(count: int, outcome: str) -> None:
    def fate(work: Work, before: int) -> End:
        left = [str(n) for n in range(count) if str(n) not in work.barred]
        return died(left[0]) if left else done(0.01, work.number)

    [(_, value)] = run(Machines(fate), 1)
    assert str(value).partition(":")[0] == outcome


def test_what_a_lost_task_leaves_is_under_the_same_bound() -> None:
    def fate(work: Work, before: int) -> End:
        return (0.01, GONE[1]) if 300 <= work.number < 500 and not before else done(0.01, before)

    machines = Machines(fate, 3)
    assert len(run(machines, 1000, shared=True)) == 1000
    assert machines.most == 3 * SUBMITTED_PER_SLOT


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(0, 120),
    slots=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    bad=st.floats(0, 0.6),
    span=st.sampled_from(((0.5, 3.0), (0.001, 0.01), (0.001, 3.0))),
    shared=st.booleans(),
)
def test_whatever_happens_every_item_ends_once(
    count: int, slots: int, seed: int, bad: float, span: tuple[float, float], shared: bool
) -> None:
    draw = random.Random(seed)

    def fate(work: Work, before: int) -> End:
        machines.free = max(1, machines.free + draw.choice((-1, 0, 0, 1)))
        if draw.random() < bad:
            return draw.choice(
                ((1.0, Lost("a", True)), (2.0, Lost("b", False)), done(400.0, work.number))
            )
        return done(draw.uniform(*span), work.number)

    machines = Machines(fate, slots)
    found = run(machines, count, shared)
    assert sorted(number for number, _ in found) == list(range(count))
    assert all(value == n or isinstance(value, CrashError) for n, value in found)
    assert not machines.copies
