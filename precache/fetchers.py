"""Threads that bring shards, and that nobody waits for longer than they like."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from threading import Thread

Queue = SimpleQueue[tuple[int, Future[None]] | None]


class Fetchers:
    """Threads that fetch. At its end the process does not wait for them, as for an executor's: a
    request to a server that does not answer can take minutes to fail.

    What `work` holds is let go of when the last thread ends.
    """

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._queue: Queue = SimpleQueue()
        self._threads = [
            Thread(target=_run, name=f"precache-fetch_{n}", args=(self._queue, work), daemon=True)
            for n in range(count)
        ]

    def submit(self, number: int, there: Future[None]) -> None:
        """Have a thread work on a shard, and say when it is there."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        self._queue.put((number, there))

    def stop(self) -> None:
        """Let the threads end, once they have gone through what was submitted."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads to end; whether they did."""
        limit = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _run(queue: Queue, work: Callable[[int], None]) -> None:
    while (item := queue.get()) is not None:
        number, there = item
        try:
            if not there.done():
                work(number)
        except BaseException as error:
            settle(there, error)
        else:
            settle(there, None)
        del there, item


def settle(there: Future[None], error: BaseException | None) -> None:
    """Say that a shard is there, or why not, unless that was said already."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            there.set_result(None)
        else:
            there.set_exception(error)
