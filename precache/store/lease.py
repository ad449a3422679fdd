"""Leases: numbered objects that show which process works on something, and that it is alive.

Whoever creates the highest number holds the lease, and renews the time in its object, the
heartbeat. If that ends, another process takes over by creating the next number, which only one can
do. A holder that was stopped for long finds a higher number when it goes on: it asks before each
change (`Lease.is_held`).

A build holds the lease of its version, in the version's folder. Its numbers only grow until the
commit removes all; who gives it back marks its object. A repair, and a build that `ensure` starts,
which holds a lease of the store, remove the objects at their end: two of these at once are
harmless.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Self

from precache.errors import BuildError, StorageError, StoreError
from precache.runtime.process_id import Process, has_ended, process_of
from precache.storage.base import Folder
from precache.store.commit_log import BUILD, NUMBERED, ROOT
from precache.store.json_documents import LeaseDocument

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 10.0
"""Seconds between two heartbeats."""

ALIVE_SECONDS = 10 * RENEWAL_SECONDS
"""Seconds without a heartbeat after which the holder has ended; several renewals may fail."""

OBSERVE_SECONDS = 2.5 * RENEWAL_SECONDS
"""The same for a lease whose last heartbeat, by its own time, is longer ago than that."""

QUIET_SECONDS = 900.0
"""Seconds for which a live build or copy may change nothing, for example while it commits. Until
then `gc` keeps it and followers wait."""

POLL_LOCAL, POLL_REMOTE = 0.25, 2.0
"""Seconds between two polls of a store."""

BUILD_LEASES = f"{BUILD}/leases"
"""Folder of a version with the leases of the builds that write to it."""

LEASES_FOLDER = "_claims"
"""Folder of a store with the leases of builds that `ensure` starts."""


_CUT_OFF = re.compile(r"\.[0-9a-f]{32}\.tmp")
"""Temporary file of a lease that was being put; a live process puts it again."""


class LastChange:
    """Time since a value that another process renews has changed, as this process observes it.

    It is by this machine's clock alone: that of the other may be wrong.
    """

    def __init__(self) -> None:
        self._value: object = None
        self._since = 0.0

    def seconds(self, value: object) -> float:
        """Return the seconds since the value became this one; 0 at the first call."""
        now = time.monotonic()
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


class Lease:
    """A lease that this process holds, once it is entered; a thread renews it until it ends.

    Its object was created by `Leases.take`, or by another process that handed it over.

    Parameters
    ----------
    folder
        A version, or a store.
    name
        Of its object below the folder.
    note
        Shown to processes that wait for the lease.
    nonce
        As in its object.
    """

    def __init__(self, folder: Folder, name: str, note: str, nonce: str) -> None:
        self.name = name
        self.nonce = nonce
        self._folder, self._note = folder, note
        self._place = name.rpartition("/")[0]
        self._of_build = self._place == BUILD_LEASES
        self._committed = self._of_build and folder.size(ROOT) is not None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="precache-lease", daemon=True)

    def document(self, process: Process, *, released: bool = False) -> bytes:
        """Return the content of its object."""
        document = LeaseDocument(
            holder=process, note=self._note, time=time.time(), nonce=self.nonce, released=released
        )
        return document.model_dump_json().encode()

    def _put(self, process: Process, *, released: bool = False) -> None:
        data = self.document(process, released=released)
        self._folder.put(self.name, [data], scratch=scratch_of(self._place))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def is_held(self) -> bool:
        """Return False if another process took over, or the version was committed or removed."""
        if not is_highest(self._folder, self.name):
            return False
        if self._of_build and (self._folder.size(ROOT) is not None) != self._committed:
            return False
        return self._is_own()

    def _is_own(self) -> bool:
        document = _read(self._folder, self.name)
        return document is not None and document.nonce == self.nonce

    def _remove_own(self) -> None:
        """Remove the object of a lease that was lost, unless another process has its name."""
        if self._is_own():
            self._folder.remove(self.name)

    def require(self) -> None:
        """Raise `BuildError` if the lease is not held any more."""
        if not self.is_held():
            raise BuildError(
                f"another process changed {self._folder} meanwhile, or took over as this one did "
                "not go on for long; run the same command again"
            )

    def hand_over_to(self, process: Process, note: str) -> None:
        """Hand a lease that was not entered to another process, which enters one of that name."""
        self._note = note
        self._put(process)

    def _renew(self) -> None:
        while not self._over.wait(RENEWAL_SECONDS):
            try:
                if not self.is_held():
                    return
                self._put(process_of(os.getpid()))
                if not self.is_held():  # meanwhile
                    self._remove_own()
                    return
            except StorageError as error:
                log.warning("the lease was not renewed: %s", error)

    def end(self) -> None:
        """Give the lease back; may be called again."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            if not self.is_held():
                self._remove_own()
            elif self._of_build and not self._committed:
                self._put(process_of(os.getpid()), released=True)
            else:
                _remove_until(self._folder, self.name)
        except StorageError as error:
            log.warning("%s; it expires by itself", error)


class Leases:
    """The leases of one place, as one process observes them: the highest number counts.

    Parameters
    ----------
    folder
        A version, or a store.
    place
        Folder of their objects below it; by default that of the builds of a version.
    """

    def __init__(self, folder: Folder, place: str = BUILD_LEASES) -> None:
        self._folder, self._place = folder, place
        self._change = LastChange()

    @classmethod
    def named(cls, store: Folder, name: str) -> Leases:
        """Return the leases of a name in a store."""
        return cls(store, f"{LEASES_FOLDER}/{name}")

    def holder(self) -> LeaseDocument | None:
        """Return the live holder, as far as is known."""
        document = latest(self._folder, self._place)
        return document if document is not None and self._is_alive(document) else None

    def take(self, note: str = "", ended: LeaseDocument | None = None) -> Lease | None:
        """Take the lease, to be entered; returns None if another process holds or takes it.

        Parameters
        ----------
        ended
            A lease of which the caller knows that its holder has ended.
        """
        number = _highest(self._folder, self._place)
        passed = _name(self._place, number)
        before = self._folder.get(passed) if number else b""
        if before is None:
            return None  # it is given back at this moment
        last = _parse(before, self._folder.path(passed))
        if last is not None and last != ended and self._is_alive(last):
            return None
        lease = Lease(self._folder, _name(self._place, number + 1), note, uuid.uuid4().hex)
        data = lease.document(process_of(os.getpid()))
        if not self._folder.create(lease.name, [data], scratch=scratch_of(self._place)):
            return None
        begins_anew = self._place != BUILD_LEASES
        if begins_anew and number and self._folder.get(passed) != before:
            self._folder.remove(lease.name)  # another process was faster
            return None
        return lease

    def wait(self, say: Callable[[LeaseDocument], None], note: str = "") -> Lease:
        """Wait for the lease, and take it.

        Parameters
        ----------
        say
            Called with each other process that holds it.
        """
        poll = POLL_REMOTE if self._folder.local("") is None else POLL_LOCAL
        said = ""
        while (lease := self.take(note)) is None:
            holder = self.holder()
            if holder is not None and holder.nonce != said:
                said = holder.nonce
                say(holder)
            time.sleep(poll)  # a store has no notifications
        return lease

    def _is_alive(self, document: LeaseDocument) -> bool:
        if document.released or has_ended(document.holder):
            return False
        # A clock may be wrong, so that one that looks old is watched, too.
        looks_old = time.time() - document.time > ALIVE_SECONDS
        return self._change.seconds(document) < (OBSERVE_SECONDS if looks_old else ALIVE_SECONDS)


def latest(folder: Folder, place: str = BUILD_LEASES) -> LeaseDocument | None:
    """Return the lease with the highest number; None if there is none, or it is unreadable."""
    number = _highest(folder, place)
    return _read(folder, _name(place, number)) if number else None


def is_built(version: Folder) -> bool:
    """Return whether a build of a version seems to be alive, by a look at its lease."""
    lease = latest(version)
    if lease is None or lease.released or has_ended(lease.holder):
        return False
    return abs(time.time() - lease.time) < ALIVE_SECONDS


def is_highest(folder: Folder, name: str) -> bool:
    """Return whether a lease is there, and none of a higher number is."""
    place, _, own = name.rpartition("/")
    return _highest(folder, place) == int(own[:-5])


def remove_ended_leases(store: Folder) -> None:
    """Remove the leases of a store whose holders have ended."""
    if store.is_link(LEASES_FOLDER):
        return
    for name in store.names(LEASES_FOLDER):
        place = f"{LEASES_FOLDER}/{name}"
        if store.is_link(place):
            continue
        if not _highest(store, place):
            store.remove_if_empty(place)
        elif lease := Leases.named(store, name).take():
            lease.end()  # which removes those below it
    store.remove_if_empty(LEASES_FOLDER)


def scratch_of(place: str) -> str | None:
    """Return the folder for temporary files of leases, as `Folder.put` takes it."""
    return f"{BUILD}/tmp" if place == BUILD_LEASES else None


def _name(place: str, number: int) -> str:
    return f"{place}/{number:06d}.json"


def _highest(folder: Folder, place: str) -> int:
    """Return the highest number of a lease; 0 if there is none."""
    names = folder.names(place)
    return max((int(name[:-5]) for name in names if NUMBERED.fullmatch(name)), default=0)


def _read(folder: Folder, name: str) -> LeaseDocument | None:
    return _parse(folder.get(name) or b"", folder.path(name))


def _parse(data: bytes, where: str) -> LeaseDocument | None:
    with contextlib.suppress(StoreError):  # cut short, or forged
        return LeaseDocument.read(data, where)
    return None


def _remove_until(store: Folder, last: str) -> None:
    """Remove a lease, those of earlier holders that were killed, and folders left empty."""
    place, _, own = last.rpartition("/")
    for name in sorted(store.names(place)):  # in order: who passed one over reads it again
        if (NUMBERED.fullmatch(name) and name <= own) or _CUT_OFF.fullmatch(name):
            store.remove(f"{place}/{name}")
    store.remove_if_empty(place)
    store.remove_if_empty(LEASES_FOLDER)
