"""A time limit for each sample: a process that hangs at one ends.

A thread cannot be ended from outside, and one that hangs may hold a lock that others need. So its
process handles no more samples: a worker process is replaced, and its task begins again without the
sample; in other processes the work ends with an error that names the sample.

The work runs on a thread of its own, which records its current sample; the caller checks the time
once a second. While the interpreter's lock is held, neither runs, and another process (`watchdog`)
ends this one. Time for which the process was stopped does not count.

If several samples are at work when one is late, any of them may block the others, and they are
retried one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from precache.errors import HangError
from precache_workers.runtime import watchdog
from precache_workers.runtime.watchdog import SLOT_BYTES, SLOTS, explain

Result = TypeVar("Result")

SAMPLE_SECONDS = 300.0
"""Default; more than all attempts at a request may take."""

FETCHING, DECODING = "fetching it took longer than", "decoding it took longer than"
"""Beginnings of the reasons of holes whose samples took too long."""

LOOK_SECONDS = 1.0

GRACE_SECONDS = 3.0
"""Seconds by which a heartbeat may be late, however low the limit of a sample is."""

CLEANUP_SECONDS = 5.0
"""Seconds for a thread to clean up if the caller is interrupted."""

_here = threading.local()


class _AbandonedError(BaseException):
    """Ends the threads of an attempt that was given up."""


class Watchdog:
    """A process that ends this one if work holds the interpreter's lock for too long."""

    def __init__(self) -> None:
        self._report = ""
        notes = os.memfd_create("precache-notes")
        os.ftruncate(notes, SLOTS * SLOT_BYTES)
        self._notes = mmap.mmap(notes, SLOTS * SLOT_BYTES)
        line = [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid()), str(notes)]
        self._process = subprocess.Popen(  # in a group of its own: Ctrl-C is not for it
            line, stdin=subprocess.PIPE, pass_fds=[notes], process_group=0
        )
        os.close(notes)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    @contextlib.contextmanager
    def on_duty(self, report: str = "") -> Iterator[None]:
        """Watch the work for which this thread calls `run_in_time`.

        Parameters
        ----------
        report
            File to write if it ends the process: key -> reason, of the samples at work.
        """
        before = getattr(_here, "watchdog", None)
        self._report, _here.watchdog = report, self
        try:
            yield
        finally:
            _here.watchdog = before

    def note(self, slot: int, *why_and_keys: str) -> None:
        """Write the keys of a thread's samples, and the reason if they are late, into its slot."""
        data = "\0".join(why_and_keys).encode()
        at, size = slot * SLOT_BYTES, 2 + len(data)
        if slot < SLOTS and size <= SLOT_BYTES:
            with contextlib.suppress(ValueError):  # closed, as the thread was given up
                self._notes[at : at + size] = len(data).to_bytes(2, "little") + data

    def beat(self, seconds: float) -> None:
        """Send a heartbeat: the process ends unless the next one comes in time; 0 for no limit."""
        with contextlib.suppress(OSError):  # the other process was ended
            os.write(self._pipe, os.fsencode(f"{seconds} {self._report}\n"))

    def close(self) -> None:
        """End the other process."""
        self._process.kill()
        with self._process:
            self._notes.close()


@contextlib.contextmanager
def watchdog_running() -> Iterator[None]:
    """Start a process that watches the work for which this thread calls `run_in_time`."""
    if not sys.executable:  # Python is embedded in another program
        yield
        return
    with contextlib.closing(Watchdog()) as watcher, watcher.on_duty():
        yield


class Notes:
    """The samples at which the threads of one attempt work, and since when."""

    def __init__(self, seconds: float = SAMPLE_SECONDS, watcher: Watchdog | None = None) -> None:
        self.clock = 0.0
        self._seconds, self._watcher = seconds, watcher
        self._limit = f" {seconds:g} s (--sample-timeout)"
        self.given_up = False
        self._at: dict[int, tuple[float, str, tuple[str, ...], bool]] = {}
        self._slots: dict[int, int] = {}
        self._numbers = itertools.count()

    def begin(self, what: str, *keys: str, foreign: bool = True) -> None:
        """Record that this thread begins to work on samples.

        Parameters
        ----------
        foreign
            Whether code outside precache works on them, which may hold any lock.
        """
        if self.given_up:
            raise _AbandonedError
        thread = threading.get_ident()
        self._at[thread] = self.clock, what, keys, foreign
        if self._watcher and foreign:
            slot = self._slots.get(thread)
            if slot is None:
                slot = self._slots[thread] = next(self._numbers)
            self._watcher.note(slot, what + self._limit, *keys)

    def advance(self) -> None:
        """Restart the time of this thread's samples, of which some are done."""
        thread = threading.get_ident()
        if thread in self._at:
            self._at[thread] = self.clock, *self._at[thread][1:]

    def end(self) -> None:
        """Record that this thread works on no sample."""
        thread = threading.get_ident()
        self._at.pop(thread, None)
        if self._watcher and thread in self._slots:
            self._watcher.note(self._slots[thread])

    def late(self) -> dict[str, str]:
        """Return key -> reason of the samples that may hang; empty if none is late."""
        at = list(self._at.values())
        late = [note for note in at if self.clock - note[0] > self._seconds]
        suspects = [note for note in at if note[-1] or note in late] if late else []
        return {key: what + self._limit for _, what, keys, _ in suspects for key in keys}

    def give_up(self) -> None:
        """End every thread of the attempt at its next note."""
        self.given_up = True

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Collect the notes of this thread here."""
        before, _here.notes = getattr(_here, "notes", None), self
        try:
            yield
        finally:
            self.end()
            _here.notes = before


def notes() -> Notes:
    """Return the notes of this thread; they have no effect outside of `run_in_time`."""
    current: Notes | None = getattr(_here, "notes", None)
    return current or Notes()


def is_late(reason: str) -> bool:
    """Return True if a sample is a hole because it took too long."""
    return reason.startswith((FETCHING, DECODING))


def run_in_time(work: Callable[[], Result], seconds: float) -> Result:
    """Run work with a time limit for each sample.

    Raises
    ------
    HangError
        A sample took longer; its thread runs on until the process ends.
    """
    watcher: Watchdog | None = getattr(_here, "watchdog", None)
    attempt = Notes(seconds, watcher)
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        with attempt.kept():
            try:
                results.append(work())
            except BaseException as error:
                if not attempt.given_up:
                    errors.append(error)
        ended.set()

    def beat(limit: float) -> None:
        if watcher:
            watcher.beat(limit)

    thread = threading.Thread(target=run, name="precache-samples", daemon=True)
    late: dict[str, str] = {}
    try:
        beat(seconds + GRACE_SECONDS)
        thread.start()
        looked = time.monotonic()
        while not (late or ended.wait(LOOK_SECONDS)):
            beat(seconds + GRACE_SECONDS)
            now = time.monotonic()
            attempt.clock += min(now - looked, 2 * LOOK_SECONDS)
            looked = now
            late = attempt.late()
    except BaseException:
        attempt.give_up()
        thread.join(CLEANUP_SECONDS)
        raise
    finally:
        beat(0)
    if late:
        attempt.give_up()
        raise HangError(explain(late), late=late)
    if errors:
        raise errors.pop()  # kept, it would lead to itself by the frame of `run`
    return results.pop()
