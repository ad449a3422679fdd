"""Who of several processes does a thing, agreed upon in a store: on disks and in buckets alike.

A claim is an object of a folder, created under the next number; of several who try, one gets it.
Its holder puts the time into it again and again. Where no sign of life comes any more, the next
number is free to be taken. The last holder removes its own and all below, and the numbers begin
anew; so whoever passed over claims of the dead looks at them again once it has its own. Two may
hold one where a process was stopped for long and goes on: what is done under a claim must bear
that.
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
from precache.store.attributes import Claimed

log = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
"""Between two signs of life."""

STALE_SECONDS = 60.0
"""Without one, after which a claim of another machine's process is void."""

POLL_LOCAL, POLL_REMOTE = 0.25, 2.0
"""Seconds between two looks at a store."""

LOST_SECONDS = 3600.0
"""Without a sign of life by its holder's own clock, after which a claim is looked at for
`SILENT_SECONDS`, so that those who look only once need not wait for `STALE_SECONDS`."""

SILENT_SECONDS = 2.5 * BEAT_SECONDS

CLAIMS = "_claims"
"""Folder of a store with all claims."""

_CLAIM = re.compile(r"[0-9]{6,}\.json")
_CUT_OFF = re.compile(r"\.[0-9a-f]{32}\.tmp")
"""Of a claim that a process was putting; one that goes on puts it again."""


class Claim:
    """A claim that this process holds, until the block ends; a thread shows that it lives.

    Parameters
    ----------
    note
        For whoever waits.
    own
        Whether the object names this process already.
    """

    def __init__(self, store: Folder, name: str, note: str = "", *, own: bool = False) -> None:
        self.name = name
        self._own = own
        self._store = store
        self._note = note
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="precache-claim", daemon=True)

    def __enter__(self) -> Self:
        if not self._own:
            self._put(process_of(os.getpid()))
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(StorageError):  # it goes stale by itself
            _remove_until(self._store, self.name)

    def is_held(self) -> bool:
        """Whether nobody took a later one, believing that this process had ended."""
        _, name, own = self.name.split("/")
        return Claims(self._store, name).holder(above=int(own[:-5])) is None

    def give_to(self, process: Process, note: str) -> None:
        """Have another process hold it, which will enter one of the same name and note."""
        self._note = note
        self._put(process)

    def _put(self, process: Process) -> None:
        self._store.put(self.name, [_document(process, self._note)])

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._put(process_of(os.getpid()))
            except StorageError as error:
                log.warning("cannot show that this process is at work: %s", error)


def deciding(store: Folder, version: str) -> AbstractContextManager[Claim]:
    """Hold the claim to decide about a version: to commit, replace or remove it, or a shard of it.

    Every build passes here once before it makes a shard. So one that finds no other's lease here
    knows that all there is was left by builds that have ended.
    """
    return Claims(store, f"{version}-decide").held()


def remove_ended(store: Folder) -> None:
    """Remove all claims that nobody holds any more."""
    if is_link(store, CLAIMS):
        return
    for name in store.names(CLAIMS):
        if is_link(store, f"{CLAIMS}/{name}"):
            continue
        claims = Claims(store, name)
        if not claims.numbers():
            _remove_until(store, f"{CLAIMS}/{name}/")
        elif claim := claims.take():
            with claim:
                pass  # its end removes those below it
    remove_if_empty(store, CLAIMS)


def _remove_until(store: Folder, last: str) -> None:
    """Remove a claim and those of earlier holders that were killed, and folders left empty."""
    folder, _, own = last.rpartition("/")
    for name in sorted(store.names(folder)):  # whoever passed over one looks whether it is there
        if (_CLAIM.fullmatch(name) and name <= own) or _CUT_OFF.fullmatch(name):
            store.remove(f"{folder}/{name}")
    remove_if_empty(store, folder)
    remove_if_empty(store, CLAIMS)


def _document(process: Process, note: str) -> bytes:
    return Claimed(holder=process, note=note, time=time.time()).model_dump_json().encode()


class Claims:
    """The claims to one thing, looked at again and again by one process."""

    def __init__(self, store: Folder, name: str) -> None:
        self._store = store
        self._name = name
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._silent: dict[str, bytes] = {}

    def take(self) -> Claim | None:
        """A claim to be entered; None where somebody else holds one, or gives one back."""
        numbers = self.numbers()
        passed = {name: self._store.get(name) for name in map(self._path, numbers)}
        if any(data is None or self._held(name, data) for name, data in passed.items()):
            return None
        name = self._path(max(numbers, default=0) + 1)
        if not self._store.create(name, [_document(process_of(os.getpid()), "")]):
            return None
        if any(self._store.get(each) != data for each, data in passed.items()):
            self._store.remove(name)  # somebody was faster, and the numbers began anew
            return None
        return Claim(self._store, name, own=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[Claim]:
        """Wait for the claim, and hold it until the block ends."""
        poll = POLL_REMOTE if self._store.local("") is None else POLL_LOCAL
        while (claim := self.take()) is None:
            time.sleep(poll)  # a store has no notifications
        with claim:
            yield claim

    def holder(self, above: int = 0) -> Claimed | None:
        """Who holds one of a higher number and lives, as far as is known."""
        for name in [self._path(number) for number in self.numbers() if number > above]:
            data = self._store.get(name)
            if data is not None and (found := self._held(name, data)):
                return found
        return None

    def _path(self, number: int) -> str:
        return f"{CLAIMS}/{self._name}/{number:06d}.json"

    def numbers(self) -> list[int]:
        """Of all claims, in any order."""
        names = self._store.names(f"{CLAIMS}/{self._name}")
        return [int(name[:-5]) for name in names if _CLAIM.fullmatch(name)]

    def _held(self, name: str, data: bytes) -> Claimed | None:
        """Who holds the claim that an object with this content is."""
        try:
            found = Claimed.read(data, self._store.path(name))
        except StoreError:
            return None  # cut short, or forged
        if has_ended(found.holder):
            return None
        if time.time() - found.time > LOST_SECONDS and self._is_silent(name, data):
            return None
        # By this machine's clock alone: that of the other may be wrong.
        before, since = self._seen.get(name, (b"", 0.0))
        if before != data:
            since = time.monotonic()
            self._seen[name] = data, since
        return found if time.monotonic() - since < STALE_SECONDS else None

    def _is_silent(self, name: str, data: bytes) -> bool:
        """Whether a claim that looks old shows no sign of life: a clock may be wrong."""
        if self._silent.get(name) != data:
            until = time.monotonic() + SILENT_SECONDS
            while time.monotonic() < until:
                time.sleep(POLL_LOCAL)
                if self._store.get(name) != data:
                    return False
            self._silent[name] = data
        return True
