"""A build's lease on a version: what shows that it goes on, and what its tasks may write under."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from typing import Self

from precache.errors import StorageError
from precache.runtime.process_id import process_of
from precache.storage.base import Folder
from precache.store.build_status import BUILD_LEASES, live_leases
from precache.store.documents import LeaseDocument
from precache_workers.planning.target_version import SCRATCH

log = logging.getLogger(__name__)

BEAT_SECONDS = 30.0
"""Between two heartbeats."""


class BuildLease:
    """An object of the version's folder that this build renews until it ends.

    A commit removes the leases of all builds of its version: tasks of the others stop, since
    each checks its lease before it writes.

    Attributes
    ----------
    name
        Of the object, below the version's folder.
    """

    def __init__(self, folder: Folder) -> None:
        self.name = f"{BUILD_LEASES}/{uuid.uuid4().hex}.json"
        self._folder = folder
        self._over = threading.Event()
        self._put()
        self._thread = threading.Thread(target=self._beat, name="precache-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def others(self) -> dict[str, LeaseDocument]:
        """Leases of other builds that are taken to go on."""
        return live_leases(self._folder, but=self.name)

    def end(self) -> None:
        """Give it back; may be called again."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        try:
            self._folder.remove(self.name)
        except StorageError as error:
            log.warning("%s; it expires by itself", error)

    def _put(self) -> None:
        lease = LeaseDocument(holder=process_of(os.getpid()), time=time.time())
        self._folder.put(self.name, [lease.model_dump_json().encode()], scratch=SCRATCH)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                if self._folder.size(self.name) is None:
                    return  # the version was committed, or removed
                self._put()
            except StorageError as error:
                log.warning("no heartbeat: %s", error)  # tasks will say whether this ends the build
