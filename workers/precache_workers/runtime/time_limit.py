"""A time limit for each sample: a process that hangs at one ends.

A thread cannot be ended from outside, and one that hangs may hold a lock that others need. So its
process handles no more samples: a worker process is replaced, and its task begins again; in other
processes the work ends with an error that names the sample.

The work runs on a thread of its own, which notes its current sample; the caller checks the time
once a second. While the interpreter's lock is held, neither runs, and the timer of `faulthandler`,
set anew once a second, ends the process and prints the stack.

A worker's notes are in a file. If its process dies, also by a signal, the file has the samples that
it worked on (`take_suspects`). If there are several, any of them may have ended it, or they may
have waited for each other, and they are retried one by one.

The timer also counts time for which the process was stopped (`scontrol suspend`, `docker pause`).
The file has the time at which it expires; a process that ended at another time was stopped, and
its samples are no suspects.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import xxhash

from precache.errors import HangError

Result = TypeVar("Result")

SAMPLE_SECONDS = 300.0
"""Default; more than all attempts at a request may take."""

FETCHING, DECODING = "fetching it", "decoding it"
LATE, KILLS = "took longer than", "kills the worker"
"""Beginnings of the reasons of holes: one of the first two, and one of these."""

LOOK_SECONDS = 1.0

GRACE_SECONDS = 3.0
"""Seconds that the timer waits beyond the limit of a sample."""

CLEANUP_SECONDS = 5.0
"""Seconds for a thread to clean up if the caller is interrupted."""

SLOT_BYTES = 8 << 10
"""Bytes of a note in the file, one for each thread. A note begins with the length of its contents
(16 bits, little-endian): 1 if code outside precache works on the samples, else 0; the reason if
they are late; the reason if they kill the process; and digests of their keys, with NUL between
them. Anything else in the place of a note says that the process ended because samples were late."""

ENDED_LATE = b"\xff\xff"

EXPIRY = struct.Struct("<d")
"""The time at which the timer expires, in place of the first note; 0 if it was never set."""

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
_setting = threading.RLock()  # a signal may come while this thread holds it
_file: AtWorkFile | None = None


class _AbandonedError(BaseException):
    """Ends the threads of an attempt that was given up."""


class AtWorkFile:
    """The notes of this process, in a file that outlives it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._map: mmap.mmap | None = None
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._lock = threading.Lock()
        self._new_place()

    def write_expiry(self, seconds: float) -> None:
        """Write that the timer expires in so many seconds."""
        if self._map is not None:
            EXPIRY.pack_into(self._map, 0, time.time() + seconds)

    def write(self, note: bytes) -> None:
        """Write the note of this thread, if the disk has room for it."""
        thread = threading.get_ident()
        at = self._places.get(thread) or self._new_place()
        if at is None or self._map is None:
            return
        self._places[thread] = at
        if len(note) > SLOT_BYTES - 2:  # as many keys as there is room for
            note = note[: SLOT_BYTES - 2].rpartition(b"\0")[0]
        self._map[at : at + 2 + len(note)] = len(note).to_bytes(2, "little") + note

    def clear(self) -> None:
        """Remove the note of this thread."""
        thread = threading.get_ident()
        if thread in self._places:
            self.write(b"")
            self._free.append(self._places.pop(thread))

    def write_late(self, late: Mapping[str, str]) -> None:
        """Replace all notes by those of samples for which the process ends: key -> reason."""
        notes = [_note(True, why, "", [key]) for key, why in late.items()]
        slots = [len(note).to_bytes(2, "little") + note for note in notes]
        other = Path(f"{self._path}-late")
        slots = [slot.ljust(SLOT_BYTES, b"\0") for slot in (b"", *slots)]
        other.write_bytes(b"".join(slots) + ENDED_LATE)
        other.replace(self._path)

    def close(self) -> None:
        """Remove the file."""
        os.close(self.descriptor)
        Path(self._path).unlink(missing_ok=True)

    def _new_place(self) -> int | None:
        """Return where a note may be, None if the disk has no room for it."""
        with self._lock:
            if self._free:
                return self._free.pop()
            at = 0 if self._map is None else len(self._map)
            with contextlib.suppress(OSError):  # reserved, as a store on a full disk is a SIGBUS
                if os.write(self.descriptor, bytes(SLOT_BYTES)) == SLOT_BYTES:
                    self._map = mmap.mmap(self.descriptor, at + SLOT_BYTES)
                    return at
            return None


def _note(foreign: bool, late: str, kills: str, keys: Iterable[str]) -> bytes:
    return "\0".join((f"{foreign:d}", late, kills, *map(key_digest, keys))).encode()


def key_digest(key: str) -> str:
    """Return the name of a sample in notes, which is short for any key."""
    return xxhash.xxh3_64_hexdigest(key.encode(errors="surrogatepass"))


@contextlib.contextmanager
def at_work_file(path: str) -> Iterator[AtWorkFile | None]:
    """Keep the notes of this process in a file, for the time of one task."""
    global _file  # noqa: PLW0603 - the process has one, as it has one timer
    try:
        _file = AtWorkFile(path)
    except OSError:  # then a death is not explained
        yield None
        return
    try:
        yield _file
    finally:
        _file.close()
        _file = None


def take_suspects(path: str, why: str) -> dict[str, str] | None:
    """Read and remove the notes of a process that died.

    Parameters
    ----------
    why
        How it died.

    Returns
    -------
    dict or None
        Digest of key -> reason, of the samples that may have ended it: those at which code outside
        precache worked, if there are any. None if its timer counted time for which it was stopped.
    """
    try:
        data, ended = Path(path).read_bytes(), Path(path).stat().st_mtime
    except FileNotFoundError:
        return {}
    Path(path).unlink()
    notes: list[list[str]] = []
    late, place = False, SLOT_BYTES
    while place < len(data) and not late:
        length = int.from_bytes(data[place : place + 2], "little")
        late = length > SLOT_BYTES - 2
        if length and not late:
            note = data[place + 2 : place + 2 + length]
            notes.append(note.decode(errors="replace").split("\0"))
        place += SLOT_BYTES
    expiry = EXPIRY.unpack_from(data)[0] if len(data) >= SLOT_BYTES else 0.0
    if late and expiry and abs(ended - expiry) > EXPIRY_SECONDS:
        return None
    notes = [note for note in notes if len(note) > 3]
    suspects = [note for note in notes if note[0] == "1"] or notes
    return {
        digest: reason if late else f"{kills}: {why}"
        for _, reason, kills, *digests in suspects
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
        if _file is not None:
            _file.write(_note(foreign, f"{what} {LATE} {self._limit}", f"{what} {KILLS}", keys))
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
        if self._timed and _file is not None:
            _file.clear()

    def late(self) -> dict[str, str]:
        """Return key -> reason of the samples that may hang; empty if none is late."""
        at = list(self._at.values())
        late = [note for note in at if self.clock - note[0] > self.seconds]
        suspects = [note for note in at if note[-1] or note in late] if late else []
        return {
            key: f"{what} {LATE} {self._limit}" for _, what, keys, _ in suspects for key in keys
        }

    def set_timer(self) -> None:
        """Set the timer of this process anew, if samples are at work in it, else stop it.

        It is one for all attempts: it expires only where no thread runs, in none of them.
        """
        with _setting:
            (_timed.add if self._at and not self.given_up else _timed.discard)(self)
            if _timed:
                output = 2 if _file is None else _file.descriptor
                seconds = min(attempt.seconds for attempt in _timed) + GRACE_SECONDS
                if _file is not None:
                    _file.write_expiry(seconds)
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
            _here.samples = before


def _call(call: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    return call(*arguments)


def samples_at_work() -> SamplesAtWork:
    """Return the notes of this thread; they have no effect outside of `run_in_time`."""
    current: SamplesAtWork | None = getattr(_here, "samples", None)
    return current or SamplesAtWork()


def ended_workers(reason: str) -> bool:
    """Return True if a sample is a hole because it took too long, or killed its workers."""
    return any(
        reason.startswith(f"{what} {how}") for what in (FETCHING, DECODING) for how in (LATE, KILLS)
    )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Stop the timer, too, if Ctrl-Z stops this process, or it expires once the process goes on.

    Only the main thread can; it does so around the work that its other threads do in time.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return

    def stop(*signalled: object) -> None:
        with _setting:
            faulthandler.cancel_dump_traceback_later()  # `run_in_time` sets it again
            os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


@stoppable()
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
    ended = threading.Event()

    def run() -> None:
        with attempt.kept():
            try:
                results.append(work())
            except BaseException as error:
                if not attempt.given_up:
                    errors.append(error)
        ended.set()

    thread = threading.Thread(target=run, name="precache-samples", daemon=True)
    late: dict[str, str] = {}
    try:
        thread.start()
        looked = time.monotonic()
        while not (late or ended.wait(LOOK_SECONDS)):
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
