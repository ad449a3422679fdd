"""Threads that work ahead of a consumer: always joined, first error first."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from precache.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")


_collecting: set[int] = set()
"""Threads on which the garbage collector runs."""


def _note(phase: str, info: dict[str, int]) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


gc.callbacks.append(_note)


def collected() -> bool:
    """Whether the garbage collector is what ends an iterator.

    It runs on any thread, in the middle of anything: to wait there for another thread, or for a
    lock, may be to wait for oneself.
    """
    return threading.get_ident() in _collecting


class Threads:
    """A pool of threads for one iterator, whatever becomes of that.

    An iterator may be inherited by a forked process, where the threads are not, and it may be
    collected as garbage on any thread.
    """

    def __init__(self, count: int, name: str, *, abandon: bool = False) -> None:
        pool = _DaemonThreads if abandon else ThreadPoolExecutor
        self._pool = pool(count, thread_name_prefix=name)
        self._process = os.getpid()

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Have a thread do it."""
        return self._pool.submit(work, *arguments)

    @property
    def here(self) -> bool:
        """False in a process that was forked since."""
        return os.getpid() == self._process

    def require_here(self) -> None:
        """Raise `UsageError` in a process that was forked since."""
        if not self.here:
            raise UsageError(
                "this iterator was begun before the process forked; begin another one in the child"
            )

    def close(self, *, wait: bool = True) -> None:
        """Cancel what has not begun, and join the threads if asked to `wait`.

        Where the iterator is `collected`, they end by themselves.
        """
        if not self.here:
            return
        self._pool.shutdown(wait=wait and not collected(), cancel_futures=True)


class _DaemonThreads:
    """As far as `Threads` needs it a `ThreadPoolExecutor`, whose threads no exit waits for.

    For work that may never end, and that nothing is lost by ending at any moment.
    """

    def __init__(self, count: int, thread_name_prefix: str) -> None:
        self._count, self._name = count, thread_name_prefix
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        future: Future[Result] = Future()
        self._queue.put((future, partial(work, *arguments)))
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        with contextlib.suppress(Empty):
            while cancel_futures and (item := self._queue.get_nowait()):
                item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def prefetch(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    ahead: int,
    together: int = 1,
    stop: Callable[[], None] = lambda: None,
    abandon: bool = False,
) -> Generator[Result, None, None]:
    """``map(work, items)`` in order, up to `ahead` times `together` results in the making.

    Closing the generator, early or not, cancels what has not begun and joins every thread; an
    error of `work` is raised at its item's turn.

    Parameters
    ----------
    together
        Items that a thread works on before it wakes the consumer, which costs as much as little
        work does.
    stop
        Called before threads are joined, to let go those whose work waits for something.
    abandon
        Whether the end of the process does not wait for threads that still work.
    """
    remaining = iter(items)
    groups = iter(lambda: deque(islice(remaining, together)), deque())
    pending: deque[_Task[Result]] = deque()
    results: deque[Result] = deque()
    pool = Threads(threads, "precache", abandon=abandon)
    try:
        pending.extend(_begin(pool, work, group) for group in islice(groups, ahead))
        while pending:
            pool.require_here()
            pending[0][1].exception()  # waits; the turn of an error comes after what is before it
            results, worked = pending.popleft()
            pending.extend(_begin(pool, work, group) for group in islice(groups, 1))
            while results:
                pool.require_here()
                yield results.popleft()  # and not a name more: what the consumer dropped is gone
            try:
                worked.result()
            finally:
                del worked  # which holds an error that holds this frame
    finally:
        stop()
        pool.close()


_Task = tuple[deque[Result], Future[None]]
"""Results of some items, up to the first that failed, and whether one did."""


def _begin(pool: Threads, work: Callable[[Item], Result], items: deque[Item]) -> _Task[Result]:
    results: deque[Result] = deque()
    return results, pool.submit(_work, work, items, results)


def _work(work: Callable[[Item], Result], items: deque[Item], results: deque[Result]) -> None:
    while items:  # what the pool holds a little longer must not hold them
        results.append(work(items.popleft()))
