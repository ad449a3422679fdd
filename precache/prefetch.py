"""Threads that work ahead of a consumer: always joined, first error first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    with ThreadPoolExecutor(threads, thread_name_prefix="precache") as pool:
        try:
            pending.extend(pool.submit(work, item) for item in islice(remaining, ahead))
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(work, item) for item in islice(remaining, 1))
                yield result
                del result  # what the consumer dropped must not live on here
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for future in pending:
                if not future.cancelled() and future.exception() is None:
                    discard(future.result())
