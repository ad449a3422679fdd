"""Threads that work ahead of a consumer: joined with their iterator, first error first; the end of
the process lets them go, and does not wait for a server or a disk that does not answer."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from precache.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")


_collecting: set[int] = set()
"""Threads on which the garbage collector runs."""

EXIT_SECONDS = 0.5
"""That the end of the process waits for work under way, of all iterators together."""

_deadlines: list[float] = []
"""When the end of the process goes on without what still works, once it has come to that."""


_computing: set[int] = set()
"""Threads in the middle of work that the end of the process must not cut off."""


def _note(phase: str, info: dict[str, int]) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


gc.callbacks.append(_note)


def collected() -> bool:
    """Whether the garbage collector, or the end of the process, is what ends an iterator.

    The collector runs on any thread, in the middle of anything: to wait there for another thread,
    or for a lock, may be to wait for oneself. At the end of the process, threads that still work
    never end.
    """
    return threading.get_ident() in _collecting or bool(_deadlines)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Mark work that the end of the process waits for, however long it takes.

    Python ends a daemon thread where that next takes the interpreter's lock; within C++ code, such
    as torch's, that aborts the process. Once the process ends, no such work begins any more.
    """
    thread = threading.get_ident()
    _computing.add(thread)  # first, so that either this thread sees the end, or the end sees it
    try:
        if _deadlines:
            _computing.discard(thread)
            threading.Event().wait()
        yield
    finally:
        _computing.discard(thread)


class Threads:
    """A pool of threads for one iterator, whatever becomes of that.

    An iterator may be inherited by a forked process, where the threads are not, and it may be
    collected as garbage on any thread. The end of the process lets its work go, and waits for it
    `EXIT_SECONDS` at most: a server or a disk may not answer for minutes.

    Parameters
    ----------
    stop
        Lets go, at the end of the process, those whose work waits for something.
    """

    def __init__(self, count: int, name: str, stop: Callable[[], None] = lambda: None) -> None:
        self._count, self._name = count, name
        self._queue: _Queue = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        # Not `atexit`: these run last in, first out, so before what their work needs is let go of.
        self._end = weakref.finalize(
            self, _end_at_exit, self._queue, self._threads, stop, self._process
        )

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Have a thread do it."""
        future: Future[Result] = Future()
        self._queue.put((future, partial(work, *arguments)))
        if len(self._threads) < self._count:
            # A daemon: the end of the process would wait for others before anything can be let go.
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_run, args=[self._queue], name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

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
        self._end.detach()
        _cancel(self._queue, len(self._threads))
        for thread in self._threads if wait and not collected() else ():
            thread.join()


_Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _run(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        future, work = item
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del item, future, work


def _cancel(queue: _Queue, threads: int) -> None:
    """Cancel what has not begun, and end the threads."""
    with contextlib.suppress(Empty):
        while item := queue.get_nowait():
            item[0].cancel()
    for _ in range(threads):
        queue.put(None)


def _end_at_exit(
    queue: _Queue, threads: list[threading.Thread], stop: Callable[[], None], process: int
) -> None:
    if os.getpid() != process:
        return
    _cancel(queue, len(threads))
    if threading.main_thread().is_alive():  # only the pool is lost
        return
    _deadlines.append(time.monotonic() + EXIT_SECONDS)
    stop()
    for thread in threads:
        thread.join(max(0.0, _deadlines[0] - time.monotonic()))
        if thread.ident in _computing:
            while thread.ident in _computing:
                thread.join(0.05)
            thread.join(EXIT_SECONDS)  # to let go of what it made


def prefetch(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    ahead: int,
    together: int = 1,
    stop: Callable[[], None] = lambda: None,
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
    """
    remaining = iter(items)
    groups = iter(lambda: deque(islice(remaining, together)), deque())
    pending: deque[_Task[Result]] = deque()
    results: deque[Result] = deque()
    pool = Threads(threads, "precache", stop)
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
