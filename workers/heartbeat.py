"""A build's sign of life, for those who would remove what nobody makes any more."""

from __future__ import annotations

import logging
import threading
import time

from precache.errors import StorageError
from precache.folder import Folder
from precache.status import HEARTBEAT
from workers.goal import SCRATCH

log = logging.getLogger(__name__)

BEAT_SECONDS = 30.0
"""Between two beats; the first comes so long after the beginning, which tells the time itself."""


class Heartbeat:
    """Puts the time into a version's folder from a thread, until it is ended.

    Receipts tell of life as well, but none comes while a shard takes long or nodes are awaited.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="precache-heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No beat comes after this returns; may be called again."""
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._folder.put(HEARTBEAT, [str(time.time()).encode()], scratch=SCRATCH)
            except StorageError as error:
                log.warning("no heartbeat: %s", error)  # tasks will say whether this ends the build
