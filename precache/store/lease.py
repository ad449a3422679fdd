"""Leases: which of several processes does a thing, agreed upon in a store on disks or in buckets.

A lease is an object of a folder, created under the next number; of several processes that try, one
gets it. Its holder renews it by writing the time into it (heartbeat). Once a lease is no longer
renewed, the next number may be taken. The last holder removes its own lease and all lower numbers,
and numbering starts again; so a process that passed over expired leases checks, once it has its
own, that they are still there. Two processes may hold a lease at once if one was suspended for long
and resumes: work done under a lease must tolerate that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Self

from precache.errors import StorageError, StoreError
from precache.runtime.process_id import Process, has_ended, process_of
from precache.storage.base import Folder
from precache.storage.rename import is_link, remove_if_empty
from precache.store.documents import LeaseDocument

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 10.0
"""Seconds between two heartbeats."""

STALE_SECONDS = 60.0
"""Seconds without a heartbeat after which a lease of another machine's process is void."""

POLL_LOCAL, POLL_REMOTE = 0.25, 2.0
"""Seconds between two polls of a store."""

LOST_SECONDS = 3600.0
"""Seconds without a heartbeat, by the holder's own clock, after which a lease is only watched for
`OBSERVE_SECONDS`, so that a process that looks once need not wait for `STALE_SECONDS`."""

OBSERVE_SECONDS = 2.5 * RENEWAL_SECONDS

LEASES_FOLDER = "_claims"
"""Folder of a store with all leases but those of builds."""

_LEASE = re.compile(r"[0-9]{6,}\.json")
_CUT_OFF = re.compile(r"\.[0-9a-f]{32}\.tmp")
"""Temporary file of a lease that a process was writing; a live process writes it again."""


class Lease:
    """A lease that this process holds until the block ends; a thread renews it.

    Parameters
    ----------
    note
        Text for processes that wait.
    own
        The object names this process already.
    """

    def __init__(self, store: Folder, name: str, note: str = "", *, own: bool = False) -> None:
        self.name = name
        self._own = own
        self._store = store
        self._note = note
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="precache-claim", daemon=True)

    def __enter__(self) -> Self:
        if not self._own:
            self._put(process_of(os.getpid()))
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StorageError):  # it expires by itself
            _remove_until(self._store, self.name)

    def is_held(self) -> bool:
        """Return whether no later lease was taken by a process that took this one for dead."""
        _, name, own = self.name.split("/")
        return NamedLease(self._store, name).holder(above=int(own[:-5])) is None

    def hand_over_to(self, process: Process, note: str) -> None:
        """Name another process as the holder; it will enter a lease of this name and note."""
        self._note = note
        self._put(process)

    def _put(self, process: Process) -> None:
        self._store.put(self.name, [_document(process, self._note)])

    def _beat(self) -> None:
        while not self._ended.wait(RENEWAL_SECONDS):
            try:
                self._put(process_of(os.getpid()))
            except StorageError as error:
                log.warning("cannot renew the lease of this process: %s", error)


def decision_lease(store: Folder, version: str) -> AbstractContextManager[Lease]:
    """Hold the lease to decide about a version: to commit, replace or remove it, or a shard of it.

    Every build holds it once before it makes a shard. So a build that finds no other build's lease
    while it holds this one knows that everything there was left by builds that have ended.
    """
    return NamedLease(store, f"{version}-decide").acquire()


def remove_ended_leases(store: Folder) -> None:
    """Remove all leases that no process holds any more."""
    if is_link(store, LEASES_FOLDER):
        return
    for name in store.names(LEASES_FOLDER):
        if is_link(store, f"{LEASES_FOLDER}/{name}"):
            continue
        named = NamedLease(store, name)
        if not named.numbers():
            _remove_until(store, f"{LEASES_FOLDER}/{name}/")
        elif lease := named.try_acquire():
            with lease:
                pass  # its end removes those of lower numbers
    remove_if_empty(store, LEASES_FOLDER)


def _remove_until(store: Folder, last: str) -> None:
    """Remove a lease and those of earlier holders that were killed, and folders left empty."""
    folder, _, own = last.rpartition("/")
    for name in sorted(store.names(folder)):  # whoever passed over one looks whether it is there
        if (_LEASE.fullmatch(name) and name <= own) or _CUT_OFF.fullmatch(name):
            store.remove(f"{folder}/{name}")
    remove_if_empty(store, folder)
    remove_if_empty(store, LEASES_FOLDER)


def _document(process: Process, note: str) -> bytes:
    return LeaseDocument(holder=process, note=note, time=time.time()).model_dump_json().encode()


class NamedLease:
    """The lease of one name, which several processes compete for."""

    def __init__(self, store: Folder, name: str) -> None:
        self._store = store
        self._name = name
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._silent: dict[str, bytes] = {}

    def try_acquire(self) -> Lease | None:
        """Return a lease to be entered; None if another process holds one, or is ending it."""
        numbers = self.numbers()
        passed = {name: self._store.get(name) for name in map(self._path, numbers)}
        if any(data is None or self._held(name, data) for name, data in passed.items()):
            return None
        name = self._path(max(numbers, default=0) + 1)
        if not self._store.create(name, [_document(process_of(os.getpid()), "")]):
            return None
        if any(self._store.get(other) != data for other, data in passed.items()):
            self._store.remove(name)  # another process was faster, and numbering started again
            return None
        return Lease(self._store, name, own=True)

    @contextlib.contextmanager
    def acquire(self) -> Iterator[Lease]:
        """Wait for the lease, and hold it until the block ends."""
        poll = POLL_REMOTE if self._store.local("") is None else POLL_LOCAL
        while (lease := self.try_acquire()) is None:
            time.sleep(poll)  # a store has no notifications
        with lease:
            yield lease

    def holder(self, above: int = 0) -> LeaseDocument | None:
        """Return the live holder of a lease numbered above `above`, as far as is known."""
        for name in [self._path(number) for number in self.numbers() if number > above]:
            data = self._store.get(name)
            if data is not None and (document := self._held(name, data)):
                return document
        return None

    def _path(self, number: int) -> str:
        return f"{LEASES_FOLDER}/{self._name}/{number:06d}.json"

    def numbers(self) -> list[int]:
        """Numbers of all leases of this name, in any order."""
        names = self._store.names(f"{LEASES_FOLDER}/{self._name}")
        return [int(name[:-5]) for name in names if _LEASE.fullmatch(name)]

    def _held(self, name: str, data: bytes) -> LeaseDocument | None:
        """Return the lease that an object with this content is; None if it has expired."""
        try:
            document = LeaseDocument.read(data, self._store.path(name))
        except StoreError:
            return None  # cut short, or forged
        if has_ended(document.holder):
            return None
        if time.time() - document.time > LOST_SECONDS and self._is_silent(name, data):
            return None
        # By this machine's clock alone: the holder's may be wrong.
        before, since = self._seen.get(name, (b"", 0.0))
        if before != data:
            since = time.monotonic()
            self._seen[name] = data, since
        return document if time.monotonic() - since < STALE_SECONDS else None

    def _is_silent(self, name: str, data: bytes) -> bool:
        """Watch a lease that looks old: return whether it is not renewed. Clocks may be wrong."""
        if self._silent.get(name) != data:
            until = time.monotonic() + OBSERVE_SECONDS
            while time.monotonic() < until:
                time.sleep(POLL_LOCAL)
                if self._store.get(name) != data:
                    return False
            self._silent[name] = data
        return True
