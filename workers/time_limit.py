"""A limit of time for each sample: what hangs at one begins again without it.

The work is done on a thread of its own, which notes the sample that it is at; the caller looks on
once a second. No thread can be ended from outside: one that hangs stays behind, and stops at its
next note if it ever gets there. A worker process with such a thread is to be replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SAMPLE_SECONDS = 300.0
"""By default; more than all attempts at a request may take."""

FETCHING, DECODING = "fetching it took longer than", "decoding it took longer than"
"""How a reason begins that a sample like these is a hole for."""

LOOK_SECONDS = 1.0

HELD_SECONDS = 60.0
"""Longer than a sample may take: then something holds the interpreter's lock, and nobody looks."""

ENDING_SECONDS = 5.0
"""For a thread to clean up behind itself where the caller is interrupted."""

_here = threading.local()
_stuck: list[threading.Thread] = []
expendable = False
"""Whether this process may be ended where the interpreter's lock is never let go of."""


class _GivenUp(BaseException):
    """Raised on threads of an attempt that was given up."""


class Notes:
    """The samples that the threads of one attempt are at, and since when.

    Attributes
    ----------
    alone
        Keys to be fetched one by one, so that the one that hangs is known.
    """

    def __init__(self, alone: frozenset[str] = frozenset()) -> None:
        self.alone = alone
        self._over = False
        self._since: dict[int, tuple[float, str, tuple[str, ...]]] = {}

    def begin(self, what: str, *keys: str) -> None:
        """Note that this thread is at samples from now on."""
        if self._over:
            raise _GivenUp
        self._since[threading.get_ident()] = time.monotonic(), what, keys

    def end(self) -> None:
        """Note that this thread is at none."""
        self._since.pop(threading.get_ident(), None)

    def late(self, seconds: float) -> tuple[str, tuple[str, ...]] | None:
        """What takes longer than that, and of which samples."""
        now = time.monotonic()
        for since, what, keys in list(self._since.values()):
            if now - since > seconds:
                return what, keys
        return None

    def give_up(self) -> None:
        """Have every thread of the attempt end at its next note."""
        self._over = True

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Have this thread's notes go here."""
        _here.notes = self
        try:
            yield
        finally:
            self.end()
            del _here.notes


def notes() -> Notes:
    """Where this thread's notes go; nobody reads them outside of `run_in_time`."""
    found: Notes | None = getattr(_here, "notes", None)
    return found or Notes()


def is_late(reason: str) -> bool:
    """Whether a sample is a hole because it took too long."""
    return reason.startswith((FETCHING, DECODING))


def run_in_time(work: Callable[[Mapping[str, str]], Result], seconds: float) -> Result:
    """Do some work again and again, until no sample takes longer than it may.

    Parameters
    ----------
    work
        Is given key -> why, of samples that it is to leave out.
    """
    late: dict[str, str] = {}
    alone: frozenset[str] = frozenset()
    while True:
        attempt = _Attempt(partial(work, dict(late)), Notes(alone))
        found = attempt.watch(seconds)
        if found is None:
            return attempt.future.result()
        what, keys = found
        _stuck.append(attempt.thread)
        logger.warning(
            "%s %g s (--sample-timeout): %s; what works on it cannot be ended, and goes on "
            "in the background",
            *(what, seconds, ", ".join(keys)),
        )
        if len(keys) > 1:
            alone |= set(keys)
        else:
            late[keys[0]] = f"{what} {seconds:g} s (--sample-timeout)"


def has_stuck_thread() -> bool:
    """Whether work that was given up still goes on in this process."""
    return any(thread.is_alive() for thread in _stuck)


class _Attempt(Generic[Result]):
    """Some work on a thread of its own; `future` has what comes of it."""

    def __init__(self, work: Callable[[], Result], notes: Notes) -> None:
        self._work, self._notes = work, notes
        self.future: Future[Result] = Future()
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="precache-samples", daemon=True)

    def _run(self) -> None:
        with self._notes.kept():
            try:
                self.future.set_result(self._work())
            except BaseException as error:
                self.future.set_exception(error)
        self._ended.set()

    def watch(self, seconds: float) -> tuple[str, tuple[str, ...]] | None:
        """Wait for the end; earlier, what takes longer than it may, and of which samples."""
        late = None
        try:
            while late is None:
                if expendable:
                    faulthandler.dump_traceback_later(seconds + HELD_SECONDS, exit=True)
                if self.thread.ident is None:
                    self.thread.start()
                if self._ended.wait(LOOK_SECONDS):
                    return None
                late = self._notes.late(seconds)
            return late
        except BaseException:
            self._notes.give_up()
            self.thread.join(ENDING_SECONDS)
            raise
        finally:
            if expendable:
                faulthandler.cancel_dump_traceback_later()
            if late is not None:
                self._notes.give_up()
