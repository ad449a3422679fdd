"""Threads for requests to storage; a thread that waits for one can be released at any time."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from precache.errors import StorageError
from precache.runtime.ordered_map import Queue, collected, fail, run_queue, watch_process

Result = TypeVar("Result")
log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that an iterator's end waits for running requests."""


class Fetchers:
    """Threads that make requests.

    Unlike an executor's threads, they do not delay the end of the process: a request to a server
    that does not answer can take minutes to fail. They release what their work holds when it is
    done.

    Parameters
    ----------
    where
        Path or URL of the requests, for the log.
    """

    def __init__(self, count: int, where: str) -> None:
        watch_process()
        self._where = where
        self._queue: Queue = SimpleQueue()
        self._starting = threading.Lock()
        self._threads = [
            Thread(target=run_queue, name=f"precache-fetch_{n}", args=[self._queue], daemon=True)
            for n in range(count)
        ]

    def submit(self, work: Callable[[], Result], future: Future[Result]) -> None:
        """Run `work` on a thread, unless `future` is done by then, and set its result."""
        with self._starting:
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()
        self._queue.put((future, work))

    def stop(self) -> None:
        """End the threads after all submitted work."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> bool:
        """Wait up to `GRACE` seconds for the threads to end; return whether they did.

        Does not wait in the garbage collector, nor after Ctrl-C: the threads end by themselves.
        """
        if collected() or isinstance(sys.exception(), KeyboardInterrupt):
            return False
        limit = time.monotonic() + GRACE
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, limit - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        if not ended:
            log.warning("a request to %s is left behind: it is not answered", self._where)
        return ended


# --- requests of one iterator -------------------------------------------------------------------

_here = threading.local()


class Requests:
    """Requests of one iterator's threads, each of which waits for its own until `stop`."""

    def __init__(self, threads: int, where: str) -> None:
        self._fetchers = Fetchers(threads, where)
        self._waiting: set[Future[Any]] = set()
        self._stopped = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Send calls of `request` on this thread through these requests, in the block."""
        _here.requests = self
        try:
            yield
        finally:
            del _here.requests

    def call(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`; raise `StorageError` as soon as these are stopped."""
        future: Future[Result] = Future()
        self._waiting.add(future)
        try:
            if self._stopped:  # checked once `stop` can find the future
                raise StorageError("stopped")
            self._fetchers.submit(work, future)
            return future.result()
        finally:
            self._waiting.discard(future)

    def stop(self) -> None:
        """Release all threads that wait for a request."""
        self._stopped = True
        self._fetchers.stop()
        for future in list(self._waiting):
            fail(future, StorageError("stopped"))

    def close(self) -> None:
        """End the threads; none may be waiting for a request."""
        self.stop()
        self._fetchers.join()


def request(work: Callable[[], Result]) -> Result:
    """Run `work` as a request of the iterator that this thread works for, if there is one."""
    requests: Requests | None = getattr(_here, "requests", None)
    return work() if requests is None else requests.call(work)
