"""Working ahead: in order, errors at their turn, no thread left over."""

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precache.runtime.threads import prefetch
from tests.support.building import own_threads, poll


@pytest.fixture(autouse=True)
def _threads_go_back_to_before() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert not own_threads()
    assert threading.active_count() <= before  # one of another test may just have ended


@given(st.lists(st.integers(), max_size=30), st.integers(1, 4), st.integers(1, 6))
def test_results_come_in_the_order_of_items(items: list[int], threads: int, ahead: int) -> None:
    assert list(prefetch(lambda x: x * 2, items, threads, ahead)) == [x * 2 for x in items]


def test_several_work_at_once_and_a_slow_item_does_not_let_later_ones_overtake() -> None:
    others_done, meeting = threading.Event(), threading.Barrier(3, timeout=30)
    assert list(prefetch(lambda _: meeting.wait() >= 0, range(6), 3, 3)) == [True] * 6

    def work(item: int) -> int:
        if item == 0:
            assert others_done.wait(30)
        if item == 3:
            others_done.set()
        return item

    assert list(prefetch(work, range(8), threads=2, ahead=4)) == list(range(8))


def test_no_more_than_ahead_items_are_taken_before_the_consumer_asks() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in itertools.count():
            taken.append(i)
            yield i

    work = prefetch(lambda x: x, items(), threads=2, ahead=3)
    assert taken == []
    assert next(work) == 0
    assert len(taken) == 4  # one handed out, three in the making
    assert next(work) == 1
    assert len(taken) == 5
    work.close()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("of", ["items", "work"])
@pytest.mark.parametrize("good", [0, 1, 5])
def test_an_error_comes_after_the_results_before_it_and_holds_nothing(of: str, good: int) -> None:
    held = {"alive"}
    alive = weakref.ref(held)

    def items(held: object = held) -> Iterator[int]:
        yield from range(good if of == "items" else 9)
        raise ValueError(f"item {good}")

    def work(item: int, held: object = held) -> int:
        if item >= good:
            raise ValueError(f"item {item}")
        return item

    results = prefetch(work, items(), threads=2, ahead=3)
    assert [next(results) for _ in range(good)] == list(range(good))
    with pytest.raises(ValueError, match=f"item {good}"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)
    del results, work, items, held
    poll(lambda: alive() is None, "threads that have ended let go of their work")


def test_an_early_close_cancels_what_has_not_begun_and_joins() -> None:
    begun: list[int] = []
    release, blocked = threading.Event(), threading.Event()

    def work(item: int) -> int:
        begun.append(item)
        if item:
            blocked.set()
            assert release.wait(30)
        return item

    results = prefetch(work, range(20), threads=1, ahead=10)
    assert next(results) == 0
    assert blocked.wait(30)
    closer = threading.Thread(target=results.close)
    closer.start()
    release.set()
    closer.join(30)
    assert not closer.is_alive()
    assert len(begun) < 10
    assert list(results) == []


@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_what_nobody_took_is_let_go(taken: int) -> None:
    made: list[weakref.ref[Any]] = []

    def work(item: int) -> set[int]:
        result = {item}
        made.append(weakref.ref(result))
        return result

    results = prefetch(work, range(9), 2, 3)
    for _ in range(taken):
        next(results)
    results.close()
    assert made or not taken
    assert not any(each() for each in made)


def test_a_forgotten_iterator_is_joined_and_a_dropped_result_gone_at_once() -> None:
    results = prefetch(lambda x: x, range(100), threads=3, ahead=5)
    assert not own_threads()
    next(results)
    assert own_threads()
    del results
    assert not own_threads()
    before: weakref.ref[set[int]] | None = None
    # One thread: it lets go of an item's result before it makes the next.
    for result in prefetch(lambda item: {item}, range(6), threads=1, ahead=1):
        assert before is None or before() is None
        before = weakref.ref(result)
        del result


def test_ctrl_c_while_a_thread_starts_is_what_the_caller_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = prefetch(str, range(9), threads=2, ahead=4)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(results)
