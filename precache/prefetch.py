"""Threads that work ahead of a consumer: always joined, first error first."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
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

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
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

    def close(
        self,
        pending: Iterable[Future[Result]] = (),
        discard: Callable[[Result], None] = lambda result: None,
    ) -> None:
        """Cancel what has not begun, join the threads, and `discard` results nobody took.

        Where the iterator is `collected`, the threads end by themselves.
        """
        if not self.here:
            return

        def done(future: Future[Result]) -> None:
            if not future.cancelled() and future.exception() is None:
                discard(future.result())

        self._pool.shutdown(wait=not collected(), cancel_futures=True)
        for future in pending:
            future.add_done_callback(done)


def prefetch(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    ahead: int,
    discard: Callable[[Result], None] = lambda result: None,
) -> Generator[Result, None, None]:
    """``map(work, items)`` in order, up to `ahead` results in the making.

    Closing the generator, early or not, cancels what has not begun and joins every thread; an
    error of `work` is raised at its item's turn. `discard` is told results that nobody took.
    """
    remaining = iter(items)
    pending: deque[Future[Result]] = deque()
    pool = Threads(threads, "precache")
    try:
        pending.extend(pool.submit(work, item) for item in islice(remaining, ahead))
        while pending:
            pool.require_here()
            result = pending.popleft().result()
            pending.extend(pool.submit(work, item) for item in islice(remaining, 1))
            yield result
            del result  # what the consumer dropped must not live on here
    finally:
        pool.close(pending, discard)
