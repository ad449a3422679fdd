"""Threads that work ahead of a consumer, in order; they end with their iterator.

The end of the process does not wait for them, as a server or a disk may not answer; except for work
that is marked as `computing`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from precache.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

log = logging.getLogger(__name__)

EXIT_SECONDS = 0.5
"""Seconds that the exit of the process waits for running work, over all iterators."""

GRACE = 5.0
"""Seconds that the end of an iterator waits for requests that are not answered."""

PATIENCE_SECONDS = 5.0
"""Seconds after which the exit says what it waits for."""

_collecting: set[int] = set()
"""Threads on which the garbage collector runs."""

_deadlines: list[float] = []
"""Monotonic time at which the exit of the process stops waiting; empty before the exit."""

_computing: set[threading.Thread] = set()
"""Threads whose running work the exit of the process must not cut off."""


@functools.cache
def watch_process() -> None:
    """Watch the garbage collector and the exit of the process, for `collected` and `computing`."""
    gc.callbacks.append(_note_collector)
    # Before the finalizer of any pool, so that it runs after theirs: last in, first out.
    weakref.finalize(_wait_for_computing, _wait_for_computing)


def _note_collector(phase: str, info: dict[str, int]) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


def collected() -> bool:
    """Return whether the garbage collector, or the end of the process, ends an iterator.

    The collector runs on any thread, in the middle of anything: to wait there for another thread,
    or for a lock, may deadlock. At the end of the process, threads that still work never end.
    """
    return threading.get_ident() in _collecting or bool(_deadlines)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Mark work that the end of the process waits for, however long it takes.

    Python ends a daemon thread when it next takes the interpreter's lock; within C++ code, such
    as torch's, that aborts the process.

    Raises
    ------
    UsageError
        The process ends: no such work begins any more.
    """
    thread = threading.current_thread()
    _computing.add(thread)  # first, so that either this thread sees the end, or the end sees it
    try:
        if _deadlines:
            raise UsageError(
                "the process ends, and no batch is made any more; if an atexit function reads "
                "batches, register it after the first Loader was made"
            )
        yield
    finally:
        _computing.discard(thread)


def require_process(pid: int) -> None:
    """Raise `UsageError` in any other process: one that was forked while an iterator ran."""
    if os.getpid() != pid:
        raise UsageError(
            "this iterator was begun before the process forked; begin another one in the child"
        )


class Threads:
    """A pool of threads for one iterator.

    A forked process may inherit the iterator without its threads, and the garbage collector may end
    it on any thread. The end of the process cancels its work, and waits for `EXIT_SECONDS` at most.

    Parameters
    ----------
    stop
        Called at the end of the process, to release threads whose work waits for something.
    """

    def __init__(self, count: int, name: str, stop: Callable[[], None] = lambda: None) -> None:
        watch_process()
        self._count, self._name = count, name
        self._queue: Queue = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        # Not `atexit`: finalizers run last in, first out, so before those of what the work needs.
        self._end = weakref.finalize(
            self, _end_pool, weakref.ref(self), self._queue, self._threads, stop, self._process
        )

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Run ``work(*arguments)`` on a thread."""
        future: Future[Result] = Future()
        self._queue.put((future, functools.partial(work, *arguments)))
        if len(self._threads) < self._count:
            # A daemon: the end of the process would wait for others before it runs finalizers.
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_run_queue, args=[self._queue], name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self, server: str | None = None, *, wait: bool = True) -> None:
        """Cancel work that has not begun, and end the threads; a forked process has none.

        Waits for them with `wait`, but not in the garbage collector.

        Parameters
        ----------
        server
            Path or URL of a server that may never answer the requests of the threads: they are
            waited for `GRACE` seconds, or after Ctrl-C not at all, unless they are `computing`; one
            that is left behind is logged, and ends by itself.
        """
        if os.getpid() != self._process:
            return
        self._end.detach()
        _cancel(self._queue, len(self._threads))
        if collected() or not wait:
            return
        grace = 0.0 if isinstance(sys.exception(), KeyboardInterrupt) else GRACE
        limit = time.monotonic() + grace
        for thread in self._threads:
            _join(thread, None if server is None else max(0.0, limit - time.monotonic()))
            while thread in _computing and thread.is_alive():
                _join(thread, 0.05)
        if grace and any(thread.is_alive() for thread in self._threads):
            log.warning("a request to %s is left behind: it is not answered", server)


Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _run_queue(queue: Queue) -> None:
    while (item := queue.get()) is not None:
        future, work = item
        if not future.done():
            try:
                result = work()
            except BaseException as error:
                fail(future, error)
            else:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(result)
                del result
        del item, future, work


def fail(future: Future[Any], error: BaseException) -> None:
    """Set the error of a future, unless it is done."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _cancel(queue: Queue, threads: int) -> None:
    """Cancel work that has not begun, and end the threads."""
    with contextlib.suppress(Empty):
        while item := queue.get_nowait():
            item[0].cancel()
    for _ in range(threads):
        queue.put(None)


def _join(thread: threading.Thread, seconds: float | None = None) -> None:
    """Join a thread, unless Ctrl+C came before it began: then it finds nothing to do."""
    with contextlib.suppress(RuntimeError):
        thread.join(seconds)


def _end_pool(
    pool: weakref.ref[Threads],
    queue: Queue,
    threads: list[threading.Thread],
    stop: Callable[[], None],
    process: int,
) -> None:
    """Finalize a pool: either nothing refers to it any more, or the process ends."""
    if os.getpid() != process:
        return
    _cancel(queue, len(threads))
    if pool() is None:  # the process goes on
        return
    _deadlines.append(time.monotonic() + EXIT_SECONDS)
    stop()
    for thread in threads:
        _join(thread, max(0.0, _deadlines[0] - time.monotonic()))


def _wait_for_computing() -> None:
    """Wait for all work that is marked, also of iterators that nobody joined."""
    _deadlines.append(time.monotonic())
    patience = time.monotonic() + PATIENCE_SECONDS
    try:
        for thread in list(_computing):
            while thread in _computing and thread.is_alive():  # a forked process has none of them
                _join(thread, 0.05)
                if time.monotonic() > patience:
                    patience = math.inf
                    log.warning("waiting for the last batches to be transformed; Ctrl+C ends this")
            _join(thread, EXIT_SECONDS)  # to release its results
    except BaseException as error:  # Ctrl+C, or a signal's handler: to go on would abort
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        status = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
        os._exit(status if isinstance(status, int) else 1)


def prefetch(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    ahead: int,
    stop: Callable[[], None] = lambda: None,
    server: str | None = None,
) -> Generator[Result, None, None]:
    """``map(work, items)`` in order, with up to `ahead` results in preparation.

    Closing the generator, early or not, cancels work that has not begun and joins every thread. An
    error of `work` or `items` is raised after the results of all items before it.

    Parameters
    ----------
    stop
        Called before threads are joined, to release those whose work waits for something.
    server
        As of `Threads.close`.
    """
    remaining, process = iter(items), os.getpid()
    pending: deque[Future[Result]] = deque()
    pool = Threads(threads, "precache", stop)

    def begin() -> None:
        try:
            for item in remaining:
                pending.append(pool.submit(work, item))
                if len(pending) >= ahead:
                    return
        except Exception as error:  # of `items`: at its turn
            pending.append(Future())
            fail(pending[-1], error)

    try:
        begin()
        while pending:
            require_process(process)
            failed = pending[0].exception() is not None  # waits
            future = pending.popleft()
            if not failed:
                begin()
            try:
                results = [future.result()]
            finally:
                del future  # which holds an error that holds this frame
            yield results.pop()  # without a name, so that a result that is dropped is freed
    finally:
        stop()
        pool.close(server)
