"""A time limit for each sample: a process that hangs at one ends.

A thread cannot be ended from outside, and one that hangs may hold a lock that others need. So its
process handles no more samples: a worker process is replaced, and its task begins again; in other
processes the work ends with an error that names the sample.

The work runs on a thread of its own, which notes its current sample; the caller checks the time
once a second. While the interpreter's lock is held, neither runs, and the timer of `faulthandler`,
set anew once a second, ends the process and prints the stack.

A worker's notes are in a folder, a file of each thread: on one line, 1 if code outside precache
works on the samples, else 0; what is done with them; their time limit; and digests of their keys,
with NUL between them. If the process dies, also by a signal, they have the
samples that it worked on (`take_suspects`). If there are several, any of them may have ended it, or
they may have waited for each other, and they are retried one by one.

The timer also counts time for which the process was stopped (`scontrol suspend`, `docker pause`).
The folder has the time at which it expires; a process that ended at another time was stopped, and
its samples are no suspects.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import xxhash

from precache.errors import HangError, Hole, HoleKind

Result = TypeVar("Result")

SAMPLE_SECONDS = 300.0
"""Default; more than all attempts at a request may take."""

FETCHING, DECODING = "fetching it", "decoding it"
LATE, KILLS = "took longer than", "kills the worker"
"""Parts of the reasons of holes."""

LOOK_SECONDS = 1.0

GRACE_SECONDS = 3.0
"""Seconds that the timer waits beyond the limit of a sample."""

CLEANUP_SECONDS = 5.0
"""Seconds for a thread to clean up if the caller is interrupted."""

TIMER, ENDED_LATE = "timer", "late"
"""Files beside the notes: the time at which the timer expires, behind which it writes a stack; and
digest of key -> hole, where the process ends as samples are late."""

EXPIRY = struct.Struct("<d")

EXPIRY_SECONDS = 2.0
"""Most seconds between that time and the end of a process that the timer ended, unless it was
stopped."""

WAY_OUT = (
    "Only the end of its process ends what hangs. Mend or remove the sample, or build with "
    "--address local, whose worker processes are replaced, which leaves a hole"
)

_here = threading.local()
_timed: set[SamplesAtWork] = set()
"""Attempts for which the timer of this process is set."""
_setting = threading.Lock()
_notes: Notes | None = None


class _AbandonedError(BaseException):
    """Ends the threads of an attempt that was given up."""


class Notes:
    """The notes of this process, in a folder that outlives it: a file of each thread."""

    def __init__(self, path: str) -> None:
        self._folder = Path(path)
        self._folder.mkdir(0o700)
        # Appended to, as the timer writes a stack there when it ends the process.
        self.timer = os.open(f"{path}/{TIMER}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()  # no thread writes into a file that is closed

    def write_expiry(self, seconds: float) -> None:
        """Write that the timer expires in so many seconds."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.timer, 0)
            os.write(self.timer, EXPIRY.pack(time.time() + seconds))

    def write(self, note: str) -> None:
        """Write the note of this thread, if the disk has room for it."""
        thread = threading.get_ident()
        with self._lock, contextlib.suppress(OSError):
            if thread not in self._threads:
                name = f"{self._folder}/{thread}"
                self._threads[thread] = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._threads[thread], f"{note}\n".encode(), 0)

    def leave(self) -> None:
        """Remove the note of this thread, which works on no more samples."""
        thread = threading.get_ident()
        with self._lock, contextlib.suppress(KeyError):  # it had none
            os.close(self._threads.pop(thread))
            (self._folder / f"{thread}").unlink(missing_ok=True)

    def write_late(self, late: Mapping[str, Hole]) -> None:
        """Write for which samples the process ends: key -> hole."""
        holes = {key_digest(key): hole for key, hole in late.items()}
        with contextlib.suppress(OSError):
            (self._folder / ENDED_LATE).write_text(json.dumps(holes))

    def close(self) -> None:
        """Remove the folder; threads that go on write no more notes."""
        with self._lock:
            for file in (self.timer, *self._threads.values()):
                os.close(file)
            self._threads.clear()
            shutil.rmtree(self._folder, ignore_errors=True)


def key_digest(key: str) -> str:
    """Return the name of a sample in notes, which is short for any key."""
    return xxhash.xxh3_64_hexdigest(key.encode(errors="surrogatepass"))


@contextlib.contextmanager
def kept_notes(path: str) -> Iterator[Notes | None]:
    """Keep the notes of this process in a folder, for the time of one task."""
    global _notes  # noqa: PLW0603 - the process has one, as it has one timer
    try:
        _notes = Notes(path)
    except OSError:  # then a death is not explained
        yield None
        return
    try:
        yield _notes
    finally:
        _notes.close()
        _notes = None


def late_hole(what: str, limit: str) -> Hole:
    """Return the hole of a sample that takes too long to fetch or decode."""
    return Hole("fetch timed out" if what == FETCHING else "timed out", f"{what} {LATE} {limit}")


def killer_hole(what: str, why: str) -> Hole:
    """Return the hole of a sample that kills its worker while it is fetched or decoded."""
    kind: HoleKind = "fetch killed its worker" if what == FETCHING else "killed its worker"
    return Hole(kind, f"{what} {KILLS}: {why}")


def take_suspects(path: str, why: str) -> dict[str, Hole] | None:
    """Read and remove the notes of a process that died.

    Parameters
    ----------
    why
        How it died.

    Returns
    -------
    dict or None
        Digest of key -> hole, of the samples that may have ended it: those at which code outside
        precache worked, if there are any. None if its timer counted time for which it was stopped.
    """
    files = {file.name: file for file in Path(path).glob("*")}
    data = {name: file.read_bytes() for name, file in files.items()}
    ended = files[TIMER].stat().st_mtime if TIMER in files else 0.0
    shutil.rmtree(path, ignore_errors=True)
    if ENDED_LATE in data:
        with contextlib.suppress(ValueError):  # of a full disk
            return {digest: Hole(*hole) for digest, hole in json.loads(data[ENDED_LATE]).items()}
    timer = data.pop(TIMER, b"")
    expired = len(timer) > EXPIRY.size  # by the stack
    if expired and abs(ended - EXPIRY.unpack_from(timer)[0]) > EXPIRY_SECONDS:
        return None
    texts = (note.partition(b"\n")[0].decode(errors="replace") for note in data.values())
    notes = [parts for text in texts if len(parts := text.split("\0")) > 3]
    suspects = [note for note in notes if note[0] == "1"] or notes
    return {
        digest: late_hole(what, limit) if expired else killer_hole(what, why)
        for _, what, limit, *digests in suspects
        for digest in digests
    }


class SamplesAtWork:
    """The samples at which the threads of one attempt work, and since when."""

    def __init__(self, seconds: float = SAMPLE_SECONDS, timed: bool = False) -> None:
        self.clock = 0.0
        self.seconds = seconds
        self.given_up = False
        self._limit = f"{seconds:g} s (--sample-timeout)"
        self._timed = timed
        self._at: dict[int, tuple[float, str, tuple[str, ...], bool]] = {}

    def begin(self, what: str, *keys: str, foreign: bool = True) -> None:
        """Record that this thread begins to work on samples.

        Parameters
        ----------
        foreign
            Whether code outside precache works on them, which may hold any lock.
        """
        if self.given_up:
            raise _AbandonedError
        self._at[threading.get_ident()] = self.clock, what, keys, foreign
        if not self._timed:
            return
        if _notes is not None:
            _notes.write("\0".join((f"{foreign:d}", what, self._limit, *map(key_digest, keys))))
        if self not in _timed:
            self.set_timer()

    def work(self, what: str, key: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call code that works on a sample, which the stack names if the timer ends the process."""
        self.begin(what, key)
        name = (
            f"{what}, of sample {key!a}, for at most {self._limit}; where it hangs, "
            "--address local leaves a hole"
        )
        result: Result = FunctionType(_call.__code__.replace(co_name=name), {})(call, arguments)
        return result

    def advance(self) -> None:
        """Restart the time of this thread's samples, of which some are done."""
        thread = threading.get_ident()
        if thread in self._at:
            self._at[thread] = self.clock, *self._at[thread][1:]

    def end(self) -> None:
        """Record that this thread works on no sample."""
        self._at.pop(threading.get_ident(), None)
        if self._timed and _notes is not None:
            _notes.write("")

    def late(self) -> dict[str, Hole]:
        """Return key -> hole of the samples that may hang; empty if none is late."""
        at = list(self._at.values())
        late = [note for note in at if self.clock - note[0] > self.seconds]
        suspects = [note for note in at if note[-1] or note in late] if late else []
        return {key: late_hole(what, self._limit) for _, what, keys, _ in suspects for key in keys}

    def set_timer(self) -> None:
        """Set the timer of this process anew, if samples are at work in it, else stop it.

        It is one for all attempts: it expires only where no thread runs, in none of them.
        """
        with _setting:
            (_timed.add if self._at and not self.given_up else _timed.discard)(self)
            if _timed:
                output = 2 if _notes is None else _notes.timer
                seconds = min(attempt.seconds for attempt in _timed) + GRACE_SECONDS
                if _notes is not None:
                    _notes.write_expiry(seconds)
                faulthandler.dump_traceback_later(seconds, exit=True, file=output)
            else:
                faulthandler.cancel_dump_traceback_later()

    def give_up(self) -> None:
        """End every thread of the attempt at its next note."""
        self.given_up = True
        self.set_timer()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Collect the notes of this thread here."""
        before, _here.samples = getattr(_here, "samples", None), self
        try:
            yield
        finally:
            self.end()
            if _notes is not None:
                _notes.leave()
            _here.samples = before


def _call(call: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    return call(*arguments)


def samples_at_work() -> SamplesAtWork:
    """Return the notes of this thread; they have no effect outside of `run_in_time`."""
    current: SamplesAtWork | None = getattr(_here, "samples", None)
    return current or SamplesAtWork()


def fails_sample(error: BaseException) -> bool:
    """Return False for an exception that stops the work, and is not one of the sample's own code.

    Ctrl-C reaches the main thread alone, and samples are at work on others.
    """
    if isinstance(error, Exception | SystemExit):
        return True
    main = threading.current_thread() is threading.main_thread()
    return not (main or samples_at_work().given_up)


def run_in_time(work: Callable[[], Result], seconds: float) -> Result:
    """Run work with a time limit for each sample.

    Raises
    ------
    HangError
        A sample took longer; its thread runs on until the process ends.
    """
    attempt = SamplesAtWork(seconds, timed=True)
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        with attempt.kept():
            try:
                results.append(work())
            except BaseException as error:
                if not attempt.given_up:
                    errors.append(error)

    thread = threading.Thread(target=run, name="precache-samples", daemon=True)
    late: dict[str, Hole] = {}
    try:
        thread.start()
        looked = time.monotonic()
        while not late:
            thread.join(LOOK_SECONDS)
            if not thread.is_alive():
                break
            attempt.set_timer()
            now = time.monotonic()
            attempt.clock += min(now - looked, 2 * LOOK_SECONDS)
            looked = now
            late = attempt.late()
    except BaseException:
        attempt.give_up()
        thread.join(CLEANUP_SECONDS)
        raise
    attempt.give_up()
    if late:
        each = "; or ".join(f"{key}: {why}" for key, why in late.items())
        raise HangError(f"{each}. {WAY_OUT}", late=late)
    if errors:
        raise errors.pop()  # kept, it would lead to itself by the frame of `run`
    return results.pop()
