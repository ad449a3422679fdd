"""Threads that bring what is far away, and that nobody waits for longer than they like."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from precache.errors import StorageError
from precache.runtime.ordered_map import collected

Result = TypeVar("Result")
Queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that an iterator's end waits for requests under way."""


class Fetchers:
    """Threads that fetch. At its end the process does not wait for them, as for an executor's: a
    request to a server that does not answer can take minutes to fail.

    What their work holds is let go of when it is done.

    Parameters
    ----------
    where
        Path or URL that they fetch from.
    """

    def __init__(self, count: int, where: str) -> None:
        self._where = where
        self._queue: Queue = SimpleQueue()
        self._starting = threading.Lock()
        self._threads = [
            Thread(target=_run, name=f"precache-fetch_{n}", args=[self._queue], daemon=True)
            for n in range(count)
        ]

    def submit(self, work: Callable[[], Result], there: Future[Result]) -> None:
        """Have a thread do it, and say when it is done, unless that was said already."""
        with self._starting:
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()
        self._queue.put((work, there))

    def stop(self) -> None:
        """Let the threads end, once they have gone through what was submitted."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> bool:
        """Wait a little for the threads to end; whether they did.

        Where the garbage collector ends an iterator, it must not wait, and they end by themselves;
        nor does Ctrl-C wait.
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


def _run(queue: Queue) -> None:
    while (item := queue.get()) is not None:
        work, there = item
        if not there.done():
            try:
                result = work()
            except BaseException as error:
                settle(there, error)
            else:
                with contextlib.suppress(InvalidStateError):
                    there.set_result(result)
                del result
        del work, there, item


def settle(there: Future[Any], error: BaseException) -> None:
    """Say why it will not be there, unless something was said already."""
    with contextlib.suppress(InvalidStateError):
        there.set_exception(error)


# --- requests that are waited for ---------------------------------------------------------------

_here = threading.local()


class Requests:
    """Requests of one iterator's threads, each of which waits for its own until that ends."""

    def __init__(self, threads: int, where: str) -> None:
        self._fetchers = Fetchers(threads, where)
        self._waiting: set[Future[Any]] = set()
        self._stopped = False

    @contextlib.contextmanager
    def made_here(self) -> Iterator[None]:
        """What this thread asks for in the block, by `asked`, is one of them."""
        _here.requests = self
        try:
            yield
        finally:
            del _here.requests

    def call(self, work: Callable[[], Result]) -> Result:
        """What `work` returns; `StorageError` as soon as nobody wants it."""
        there: Future[Result] = Future()
        self._waiting.add(there)
        try:
            if self._stopped:  # looked at when `stop` may find it among those that wait
                raise StorageError("stopped")
            self._fetchers.submit(work, there)
            return there.result()
        finally:
            self._waiting.discard(there)

    def stop(self) -> None:
        """Let go whoever waits for one."""
        self._stopped = True
        self._fetchers.stop()
        for there in list(self._waiting):
            settle(there, StorageError("stopped"))

    def close(self) -> None:
        """End them; nobody may be waiting for one."""
        self.stop()
        self._fetchers.join()


def asked(work: Callable[[], Result]) -> Result:
    """Do it as a request of the iterator that this thread works for, if it does."""
    requests: Requests | None = getattr(_here, "requests", None)
    return work() if requests is None else requests.call(work)
