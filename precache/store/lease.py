"""Leases: objects in a store that show which process works on a version, and that it is alive.

The holder of a lease renews the time in its object, the heartbeat. Two kinds of lease share this.

A build's lease lies in its version's folder. A second build of the version waits until the holder
ends or is silent, and then removes its lease.

An exclusive lease is an object that is created under the next number, which only one of several
processes can do. If its heartbeat ends, another process may create the next number. The last holder
removes its own object and all with lower numbers, and numbering starts again. A process that skips
leases of ended processes therefore reads them again after it has created its own. A process that
was stopped for long and resumes may have lost its lease: it asks before each change (`is_held`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Self

from precache.errors import BuildError, StorageError, StoreError
from precache.runtime.process_id import Process, boottime, has_ended, process_of
from precache.storage.base import FileInfo, Folder
from precache.storage.rename import is_link, remove_if_empty
from precache.store.commit_log import BUILD, NUMBERED, ROOT
from precache.store.json_documents import LeaseDocument
from precache.store.tree import seal_of

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 10.0
"""Seconds between two heartbeats."""

STALE_SECONDS = 6 * RENEWAL_SECONDS
"""Seconds without a heartbeat after which the holder has ended; several renewals may fail."""

ALIVE_SECONDS = STALE_SECONDS + 40.0
"""Like `STALE_SECONDS`, by the clocks of two machines, which may differ."""

HELD_RENEWALS = 2
"""A lease that was renewed within the time of so many heartbeats is held: none is taken earlier."""

QUIET_SECONDS = 900.0
"""Seconds for which a live build or copy may change nothing, for example while it commits. Until
then `gc` keeps it and followers wait."""

POLL_LOCAL, POLL_REMOTE = 0.25, 2.0
"""Seconds between two polls of a store."""

LOST_SECONDS = 3600.0
"""Age of its last heartbeat above which a lease is watched for `OBSERVE_SECONDS` at once: a silent
one counts as ended without a wait for `STALE_SECONDS`."""

OBSERVE_SECONDS = 2.5 * RENEWAL_SECONDS

WAIT_LINE_SECONDS = 10.0
"""Wait for a lease after which the log names its holder."""

BUILD_LEASES = f"{BUILD}/leases"
"""Folder of a version with the leases of the builds that write to it."""

LEASES_FOLDER = "_claims"
"""Folder of a store with all exclusive leases."""

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
    """An object that this process holds; a thread renews it until the lease ends.

    Parameters
    ----------
    note
        Shown to processes that wait for the lease.
    scratch
        Folder for temporary files, as `Folder.put` takes it.
    """

    def __init__(
        self, folder: Folder, name: str, note: str = "", scratch: str | None = None
    ) -> None:
        self.name = name
        self._folder, self._note, self._scratch = folder, note, scratch
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="precache-lease", daemon=True)

    def _put(self, process: Process) -> None:
        self._put_document(_document(process, self._note))

    def _put_document(self, document: bytes) -> None:
        self._folder.put(self.name, [document], scratch=self._scratch)

    def _is_revoked(self) -> bool:
        """Return True if the lease must not be renewed; raises `StorageError`."""
        return False

    def _stop(self) -> None:
        """End the heartbeat."""
        self._over.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._over.wait(RENEWAL_SECONDS):
            try:
                if self._is_revoked():
                    return
                self._put(process_of(os.getpid()))
                if self._is_revoked():  # meanwhile
                    return
            except StorageError as error:
                log.warning("the lease was not renewed: %s", error)


class ExclusiveLease(Lease):
    """An exclusive lease, held until the block ends.

    Its object was created by `create`, or by another process that handed it over.
    """

    def __init__(self, store: Folder, name: str, note: str = "") -> None:
        super().__init__(store, name, note)
        self._renewed = math.inf  # never yet
        # The last documents: one may arrive late, and a read may give one of before.
        self._contents: deque[bytes] = deque(maxlen=64)
        self._is_lost = False

    def _put_document(self, document: bytes) -> None:
        began = boottime()
        self._contents.append(document)
        super()._put_document(document)
        if boottime() - self._renewed > STALE_SECONDS:  # another may have had it meanwhile
            self._is_lost = True
        self._renewed = began

    def create(self) -> bool:
        """Create the object; False if another process was first."""
        began, data = boottime(), _document(process_of(os.getpid()), self._note)
        if not self._folder.create(self.name, [data]):
            return False
        self._contents.append(data)
        self._renewed = began
        return True

    def __enter__(self) -> Self:
        if not self._contents:
            self._put(process_of(os.getpid()))
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop()
        with contextlib.suppress(StorageError):  # it goes stale by itself
            if self.is_held():
                _remove_until(self._folder, self.name)

    def is_held(self) -> bool:
        """Return False if another process took over, because this one seemed to have ended.

        The store is asked only if the last heartbeat is long ago.
        """
        if self._is_lost:
            return False
        if boottime() - self._renewed < HELD_RENEWALS * RENEWAL_SECONDS:
            return True
        _, name, own = self.name.split("/")
        before = [*self._contents]  # the heartbeat may change it as the object is read
        is_own = self._folder.get(self.name) in (*before, *self._contents)
        return is_own and NamedLease(self._folder, name).holder(above=int(own[:-5])) is None

    def require(self) -> None:
        """Raise `BuildError` if another process took over."""
        if not self.is_held():
            raise BuildError(
                f"another process took over the lease {self._folder.path(self.name)}, as this one "
                "did not go on for long; run the same command again"
            )

    def _is_revoked(self) -> bool:
        before = [*self._contents]
        if self._folder.get(self.name) not in (*before, *self._contents):
            self._is_lost = True  # a former holder removed it, and numbers began anew
        return not self.is_held()

    def hand_over_to(self, process: Process, note: str) -> None:
        """Hand the lease to another process, which enters a lease of the same name and note."""
        self._note = note
        self._put(process)


def _edition(version: Folder) -> str | None:
    """Return the digest of a version's root; None before it is committed."""
    return seal_of(version.get(ROOT) or b"")


class BuildLease(Lease):
    """The lease of a build, which its tasks check before they write.

    It ends when the version is committed, or replaced by another of the same id: a commit removes
    the leases of all its builds, which stops their tasks, and one that is renewed at that moment is
    removed again.

    Parameters
    ----------
    version
        Folder of the version. If it was committed already, its shards are repaired.
    """

    def __init__(self, version: Folder, scratch: str) -> None:
        super().__init__(version, f"{BUILD_LEASES}/{uuid.uuid4().hex}.json", scratch=scratch)
        self._edition = _edition(version)
        self._outlasts_commit = False
        self._put(process_of(os.getpid()))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def _is_revoked(self) -> bool:
        if not self._outlasts_commit and _edition(self._folder) != self._edition:
            self._folder.remove(self.name)  # put again while another build's commit removed it
        return self._folder.size(self.name) is None

    def require(self) -> None:
        """Raise `BuildError` if the version was committed, replaced or removed meanwhile."""
        if self._is_revoked():
            raise BuildError(
                f"another process changed {self._folder} meanwhile; run the same command again"
            )

    def outlast_commit(self) -> None:
        """Keep the lease until its end: this build is about to commit the version itself."""
        self._outlasts_commit = True

    def others(self) -> dict[str, LeaseDocument]:
        """Return the leases of other builds that are alive."""
        return live_leases(self._folder, but=self.name)

    def revoke_others(self) -> None:
        """Remove all other leases, which stops the tasks of a build that only seemed to end."""
        for name in self._folder.names(BUILD_LEASES):
            if f"{BUILD_LEASES}/{name}" != self.name:
                self._folder.remove(f"{BUILD_LEASES}/{name}")

    def end(self) -> None:
        """Remove the lease; may be called again."""
        if self._over.is_set():
            return
        self._stop()
        try:
            self._folder.remove(self.name)
        except StorageError as error:
            log.warning("%s; it expires by itself", error)


def read_leases(version: Folder, but: str | None = None) -> dict[str, LeaseDocument]:
    """Return the leases of builds that write to a version, by name; skips unreadable ones."""
    names = [
        f"{BUILD_LEASES}/{name}" for name in version.names(BUILD_LEASES) if name.endswith(".json")
    ]
    names = [name for name in names if name != but]
    leases = {}
    for name, data in zip(names, version.read_many(names, [-1] * len(names)), strict=True):
        if isinstance(data, bytes):
            with contextlib.suppress(StoreError):  # cut short, or forged
                leases[name] = LeaseDocument.read(data, version.path(name))
    return leases


def live_leases(version: Folder, but: str | None = None) -> dict[str, LeaseDocument]:
    """Return the leases whose builds are alive, except the one named `but`.

    Callers look once, so ages are by recorded times and not by `LastChange`. If `but` is given, it
    is a lease that was renewed a moment ago: ages are differences to it, by the store's own times,
    since clocks of machines may be wrong.
    """
    leases = read_leases(version, but)
    others = {name: lease for name, lease in leases.items() if not has_ended(lease.holder)}
    files = _lease_files(version) if others and but is not None else []
    times = {f"{BUILD_LEASES}/{file.name}": file.mtime_ns / 1e9 for file in files}
    if but in times:
        ages = {name: times[but] - times.get(name, 0.0) for name in others}
    else:
        ages = {name: abs(time.time() - lease.time) for name, lease in others.items()}
    return {name: lease for name, lease in others.items() if ages[name] < ALIVE_SECONDS}


def await_builds(version: Folder, leases: Collection[str]) -> None:
    """Wait until the builds of some leases have ended, or were silent for `ALIVE_SECONDS`."""
    poll = POLL_REMOTE if version.local("") is None else POLL_LOCAL
    seen = {name: LastChange() for name in leases}
    while any(
        name in seen and not has_ended(lease.holder) and seen[name].seconds(lease) < ALIVE_SECONDS
        for name, lease in read_leases(version).items()
    ):
        time.sleep(poll)  # a store has no notifications


def _lease_files(version: Folder) -> list[FileInfo]:
    with contextlib.suppress(StorageError):  # all have just been removed
        return list(version.folder(BUILD_LEASES).walk())
    return []


def decision_lease(store: Folder, version: str) -> AbstractContextManager[ExclusiveLease]:
    """Hold the lease to decide about a version: to commit, replace or remove it, or a shard of it.

    A copy into a bucket holds it to its end. Every build holds it as it begins, so that one that
    finds no other lease knows that unfinished objects were left by builds that have ended.
    """
    return NamedLease(store, f"{version}-decide").acquire()


def remove_ended_leases(store: Folder) -> None:
    """Remove all exclusive leases whose holders have ended."""
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
                pass  # its end removes those below it
    remove_if_empty(store, LEASES_FOLDER)


def _remove_until(store: Folder, last: str) -> None:
    """Remove a lease, those of earlier holders that were killed, and folders left empty."""
    folder, _, own = last.rpartition("/")
    for name in sorted(store.names(folder)):  # in order: a process that skipped one reads it again
        if (NUMBERED.fullmatch(name) and name <= own) or _CUT_OFF.fullmatch(name):
            store.remove(f"{folder}/{name}")
    remove_if_empty(store, folder)
    remove_if_empty(store, LEASES_FOLDER)


def _document(process: Process, note: str) -> bytes:
    return LeaseDocument(holder=process, note=note, time=time.time()).model_dump_json().encode()


class NamedLease:
    """The exclusive lease of a name, as one process sees it."""

    def __init__(self, store: Folder, name: str) -> None:
        self._store = store
        self._name = name
        self._seen: dict[str, LastChange] = {}
        self._silent: dict[str, bytes] = {}

    def try_acquire(self) -> ExclusiveLease | None:
        """Take the lease, to be entered; returns None if another process holds or returns one."""
        numbers = self.numbers()
        passed = {name: self._store.get(name) for name in map(self._path, numbers)}
        if any(data is None or self._holder_of(name, data) for name, data in passed.items()):
            return None
        lease = ExclusiveLease(self._store, self._path(max(numbers, default=0) + 1))
        if not lease.create():
            return None
        if any(self._store.get(path) != data for path, data in passed.items()):
            self._store.remove(lease.name)  # another process was faster; the numbers began anew
            return None
        return lease

    @contextlib.contextmanager
    def acquire(self) -> Iterator[ExclusiveLease]:
        """Wait for the lease, and hold it until the block ends; the log names who holds it long."""
        poll = POLL_REMOTE if self._store.local("") is None else POLL_LOCAL
        line_at = time.monotonic() + WAIT_LINE_SECONDS
        while (lease := self.try_acquire()) is None:
            if time.monotonic() > line_at and (holder := self.holder()):
                version = self._store.path(self._name.rpartition("-")[0] or self._name)
                log.warning("waiting for %s, which works on %s", holder.holder, version)
                line_at = math.inf
            time.sleep(poll)  # a store has no notifications
        with lease:
            yield lease

    def holder(self, above: int = 0) -> LeaseDocument | None:
        """Return the live holder under a number above `above`, as far as is known."""
        for name in [self._path(number) for number in self.numbers() if number > above]:
            data = self._store.get(name)
            if data is not None and (lease := self._holder_of(name, data)):
                return lease
        return None

    def _path(self, number: int) -> str:
        return f"{LEASES_FOLDER}/{self._name}/{number:06d}.json"

    def numbers(self) -> list[int]:
        """Return the numbers of all its objects, in any order."""
        names = self._store.names(f"{LEASES_FOLDER}/{self._name}")
        return [int(name[:-5]) for name in names if NUMBERED.fullmatch(name)]

    def _holder_of(self, name: str, data: bytes) -> LeaseDocument | None:
        """Return the holder of a lease with this content, None if it has ended."""
        try:
            lease = LeaseDocument.read(data, self._store.path(name))
        except StoreError:
            return None  # cut short, or forged
        if has_ended(lease.holder):
            return None
        if time.time() - lease.time > LOST_SECONDS and self._is_silent(name, data):
            return None
        silence = self._seen.setdefault(name, LastChange()).seconds(data)
        return lease if silence < STALE_SECONDS else None

    def _is_silent(self, name: str, data: bytes) -> bool:
        """Watch a lease that looks old for a heartbeat: a clock may be wrong."""
        if self._silent.get(name) != data:
            until = time.monotonic() + OBSERVE_SECONDS
            while time.monotonic() < until:
                time.sleep(POLL_LOCAL)
                if self._store.get(name) != data:
                    return False
            self._silent[name] = data
        return True
