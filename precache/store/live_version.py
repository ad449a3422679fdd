"""A version that is still being built: its rows are known, its shards finish one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from precache.errors import BuildError, StoreError
from precache.runtime.process_id import has_ended
from precache.storage.base import Folder
from precache.store.build_status import DESCRIPTION
from precache.store.commit_log import ROOT
from precache.store.json_documents import Attributes, Identity
from precache.store.labels import are_classes
from precache.store.lease import ALIVE_SECONDS, QUIET_SECONDS, LastChange, NamedLease, read_leases
from precache.store.open import open_own
from precache.store.shard_log import FinishedShard, followed_log_name, from_entry, read_entries
from precache.store.version import Version
from precache.store.zarr_metadata import Array

LOG_POLL_LOCAL, LOG_POLL_REMOTE = 0.1, 1.0
"""Seconds between two polls for the next entry of a log."""

LIVENESS_SECONDS = 5.0
"""Seconds between two checks that a build is alive."""


class LiveVersion(Version):
    """A version whose build is running, or ended a moment ago.

    `advance` updates its contents in place. Its `labels` and `keys` are those of the row table.

    Parameters
    ----------
    keys, labels
        Columns of the frozen row table.
    removed
        Rows whose samples are no longer in the source.
    lease
        The lease under which it is built.

    Attributes
    ----------
    finished
        Shards in the order of the log, each with the numbers of its rows that are holes.
    planned
        Rows of all shards if no sample is bad.
    """

    def __init__(
        self,
        store: Folder,
        *,
        attributes: Attributes,
        arrays: Mapping[str, tuple[str, Array]],
        keys: Sequence[str],
        labels: np.ndarray,
        removed: frozenset[int],
        lease: NamedLease,
    ) -> None:
        folder = store.folder(attributes.version)
        super().__init__(
            folder,
            version_id=attributes.version,
            attributes=attributes,
            arrays=arrays,
            rows=attributes.rows,
        )
        self._store = store
        self._row_keys = keys
        self._lease = lease
        self.labels = labels.copy()
        self.valid = np.ones(self.rows, np.bool_)
        self.valid[list(removed)] = False
        self.holes = {}
        self.planned = self.rows - len(removed)
        self.rows_per_shard = attributes.rows_per_shard
        self.shards = -(-self.rows // self.rows_per_shard)
        self._tables = {name: self._bounds(arrays[name][1]) for name in attributes.fields}
        self.finished: list[tuple[int, np.ndarray]] = []
        self._seen: set[int] = set()
        self._entries = 0
        self._lock = threading.Lock()
        self._poll = LOG_POLL_REMOTE if folder.local("") is None else LOG_POLL_LOCAL
        self._signs, self._looked = LastChange(), -np.inf

    def _bounds(self, array: Array) -> np.ndarray:
        """Upper bounds of object sizes, until these are known. Source: ZSTD_compressBound."""
        raw = self.rows_per_shard * array.row_nbytes
        chunks = self.rows_per_shard // array.chunk_shape[0]
        bound = raw + (raw >> 8) + (128 + 16) * chunks + 4
        return np.tile(np.array([[bound, 0]], np.uint64), (self.shards, 1))

    @property
    def committed(self) -> bool:
        return False

    @property
    def complete(self) -> bool:
        """True once all shards are finished."""
        return len(self.finished) == self.shards

    @property
    def keys(self) -> Sequence[str]:
        return self._row_keys

    def shard_table(self, field: str) -> np.ndarray:
        """Return `Version.shard_table`; unfinished shards have upper bounds for sizes."""
        return self._tables[field]

    def is_gone(self) -> bool:
        """Return whether the version's folder is gone: its group's document is written last."""
        return not self.folder.exists()

    def prefetch(self, fields: object) -> None:
        """Do nothing: all small arrays are in memory."""

    def rows_of(self, shard: int) -> range:
        """Rows of a shard; the last shard may be short."""
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.rows))

    def advance(self) -> bool:
        """Read new entries of the log; return whether there were any.

        Raises
        ------
        StoreError
            The log is damaged, or gone.
        """
        with self._lock:
            new = self._unread()
            for shard in new:
                self._add(shard)
        return bool(new)

    def _unread(self) -> list[FinishedShard]:
        entries = [] if self.complete else read_entries(self.folder, self._entries)
        self._entries += len(entries)
        shards = [shard for entry in entries for shard in entry]
        if not self.complete and self.folder.size(ROOT) is not None:
            name = followed_log_name(self.id)
            data = self._store.get(name)
            if data is None:
                raise StoreError(
                    f"{self.path} is built, and the order in which its shards were finished is no "
                    f"longer kept in {self._store.path(name)}; open the version again"
                )
            shards = from_entry(data, self._store.path(name))
        return [shard for shard in shards if shard.shard not in self._seen]

    def _add(self, shard: FinishedShard) -> None:
        rows = self.rows_of(shard.shard)
        inside = shard.shard < self.shards and all(row in rows for row in shard.holes)
        fitting = are_classes(self.labels) and len(shard.labels or ()) == len(rows)
        labelled = shard.labels is None or fitting
        if shard.objects.keys() != self._tables.keys() or not (inside and labelled):
            raise StoreError(
                f"the log of {self.path} is damaged: it has shard {shard.shard} of fields "
                f"{', '.join(shard.objects)} with holes {list(shard.holes)[:5]}"
            )
        for name, table in self._tables.items():
            table[shard.shard] = shard.objects[name]
        if shard.labels is not None:
            fetched = np.array(shard.labels, np.int64)
            part = self.labels[rows.start : rows.stop]
            part[:] = np.where(fetched < 0, part, fetched)
        holes = np.array(sorted(shard.holes), np.int64)
        self.valid[holes] = False
        self.holes.update({row: (self._row_keys[row], why) for row, why in shard.holes.items()})
        self._seen.add(shard.shard)
        self.finished.append((shard.shard, holes))

    def await_shards(self, stopped: threading.Event) -> None:
        """Wait until the log has new entries, or `stopped` is set.

        Raises
        ------
        BuildError
            The build failed, or shows no sign of life.
        """
        while not self.advance():
            self._require_life(ALIVE_SECONDS)
            if stopped.wait(self._poll):
                return

    def await_commit(self, stopped: threading.Event) -> Version | None:
        """Wait for the committed version and open it; return None if `stopped` is set before.

        Raises
        ------
        BuildError
            The build failed, or shows no sign of life.
        """
        while self.folder.size(ROOT) is None:
            self._require_life(QUIET_SECONDS)
            if stopped.wait(self._poll):
                return None
        return open_own(self.folder)

    def _require_life(self, patience: float) -> None:
        """Raise if the build has ended, or changed nothing for `patience` seconds."""
        now = time.monotonic()
        if now - self._looked < LIVENESS_SECONDS:
            return
        self._looked = now
        data, holder = self.folder.get(DESCRIPTION), self._lease.holder()
        leases = read_leases(self.folder)
        silence = self._signs.seconds((data, leases, len(self.finished), holder and holder.time))
        if holder is not None or self.folder.size(ROOT) is not None:
            return
        reason = ""
        if data is None:
            reason = "its description was removed"
        else:
            identity = Identity.read(data, self.folder.path(DESCRIPTION))
            alive = any(not has_ended(lease.holder) for lease in leases.values())
            if identity.failed is not None and not alive:
                reason = identity.failed
            elif identity.by is not None and has_ended(identity.by) and not alive:
                reason = f"{identity.by} has ended"
            elif silence > patience:
                reason = f"it shows no sign of life for {silence:.0f} seconds"
        if reason:
            raise BuildError(
                f"the build that this training follows has stopped with {len(self.finished)} of "
                f"{self.shards} shards done: {reason}; start the training again: the build goes on "
                f"where it was ({self.path})"
            )
