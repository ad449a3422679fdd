"""Write the log of finished shards, which followers of a build read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping

from precache.errors import PrecacheError
from precache.storage.base import Folder
from precache.store.receipts import Receipt
from precache.store.shard_log import (
    FinishedShard,
    close_log,
    entry_name,
    followed_log_name,
    read_entries,
    to_entry,
)
from precache_workers.planning.target_version import SCRATCH, TargetVersion

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
"""Least seconds between two entries of the log."""


class ShardLogWriter:
    """Appends to the log of a version's finished shards, from a thread, until it is ended.

    Several builds of a version may append to one log: a shard is logged once.

    Parameters
    ----------
    done
        Shards that are done already; those that the log lacks are added to it.
    """

    def __init__(self, version: Folder, done: Iterable[Receipt]) -> None:
        self._version = version
        self._entries = 0
        self._logged: set[int] = set()
        self._waiting = sorted(map(FinishedShard.of, done), key=lambda shard: shard.shard)
        self._lock = threading.Lock()
        self._news, self._over = threading.Event(), threading.Event()
        if self._waiting:
            self._news.set()
        self._thread = threading.Thread(target=self._run, name="precache-finished", daemon=True)
        self._thread.start()

    def add(self, receipt: Receipt) -> None:
        """Log a shard that is done, soon."""
        with self._lock:
            self._waiting.append(FinishedShard.of(receipt))
        self._news.set()

    def end(self) -> None:
        """Write what is left, and nothing after this returns; may be called again."""
        self._over.set()
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while True:
            self._news.wait()
            self._news.clear()
            over = self._over.is_set()
            try:
                self._append()
            except PrecacheError as error:
                log.warning("followers of this build wait for its log: %s", error)
            if over:
                return
            # However long a build takes, its log has some hundreds of entries.
            self._over.wait(max(EVERY_SECONDS, 0.01 * (time.monotonic() - began)))

    def _append(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        try:
            while waiting := [shard for shard in waiting if shard.shard not in self._logged]:
                name, data = entry_name(self._entries), to_entry(waiting)
                if self._version.create(name, [data], scratch=SCRATCH):
                    entries = [waiting]
                else:
                    entries = read_entries(self._version, self._entries)
                self._entries += len(entries)
                self._logged.update(shard.shard for entry in entries for shard in entry)
        finally:
            with self._lock:
                self._waiting = waiting + self._waiting


def keep_followed(store: Folder, target: TargetVersion, receipts: Mapping[int, Receipt]) -> None:
    """Keep the whole log in the store, before a commit, if it is followed.

    If not, that of an earlier build of the version is removed.

    Parameters
    ----------
    receipts
        Of every shard, for those that could not be logged.
    """
    if not close_log(target.folder, SCRATCH):
        store.remove(followed_log_name(target.version))  # of one that was built before
        return
    shards = [shard for entry in read_entries(target.folder, 0) for shard in entry]
    logged = {shard.shard for shard in shards}
    shards += [
        FinishedShard.of(receipt) for n, receipt in sorted(receipts.items()) if n not in logged
    ]
    name, scratch = followed_log_name(target.version), f"{target.version}/{SCRATCH}"
    store.put(name, [to_entry(shards)], scratch=scratch)
