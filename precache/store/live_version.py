"""A version while it is made: its rows are known, and its shards come one after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from precache.errors import BuildError, StoreError
from precache.runtime.process_id import has_ended
from precache.storage.base import Folder
from precache.store.attributes import Attributes, Identity
from precache.store.build_status import DESCRIPTION
from precache.store.commit_log import ROOT
from precache.store.lease import ALIVE_SECONDS, Claims, read_leases
from precache.store.open import open_own
from precache.store.shard_log import Finished, from_entry, kept_name, read_entries
from precache.store.version import Version
from precache.store.zarr_metadata import Array

POLL_LOCAL, POLL_REMOTE = 0.1, 1.0
"""Seconds between two looks for the next entry of a log."""

LIFE_SECONDS = 5.0
"""Between two looks for signs of life of a build."""

COMMIT_SECONDS = 900.0
"""That a build may take to commit, when it shows no sign of life."""


class LiveVersion(Version):
    """A version whose build goes on, or went on a moment ago.

    Everything that is known of it grows with `advance`, in place. Its `labels` and `keys` are those
    of the row table.

    Parameters
    ----------
    keys, labels
        By row, as the frozen row table has them.
    removed
        Rows whose samples the source has no more.
    claims
        Under which it is built.

    Attributes
    ----------
    finished
        Shards in the order of the log, each with the numbers of its rows that are holes.
    planned
        Rows that every shard together would have, were there no bad sample.
    """

    def __init__(
        self,
        store: Folder,
        attributes: Attributes,
        arrays: Mapping[str, tuple[str, Array]],
        keys: Sequence[str],
        labels: np.ndarray,
        removed: frozenset[int],
        claims: Claims,
    ) -> None:
        folder = store.folder(attributes.version)
        super().__init__(folder, attributes.version, attributes, arrays, attributes.rows)
        self._store = store
        self._row_keys = keys
        self._claims = claims
        self.labels = labels.astype(np.int64)
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
        self._poll = POLL_REMOTE if folder.local("") is None else POLL_LOCAL
        self._signs: object = None
        self._looked, self._changed = -np.inf, time.monotonic()

    def _bounds(self, array: Array) -> np.ndarray:
        """Sizes that no object exceeds, until they are known; source: ZSTD_compressBound."""
        raw = self.rows_per_shard * array.row_nbytes
        chunks = self.rows_per_shard // array.chunk_shape[0]
        most = raw + (raw >> 8) + (128 + 16) * chunks + 4
        return np.tile(np.array([[most, 0]], np.uint64), (self.shards, 1))

    @property
    def complete(self) -> bool:
        """Whether all shards are finished."""
        return len(self.finished) == self.shards

    @property
    def keys(self) -> Sequence[str]:
        return self._row_keys

    def shard_table(self, field: str) -> np.ndarray:
        """As of a version that is there; rows of shards that are not finished are bounds."""
        return self._tables[field]

    def is_gone(self) -> bool:
        """As of a version that is there; its group's document comes last."""
        return not self.folder.exists()

    def bring(self, fields: object) -> None:
        """Nothing: it is all here."""

    def rows_of(self, shard: int) -> range:
        """Rows of a shard; the last may be short."""
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.rows))

    def advance(self) -> bool:
        """Take in what the log has more; whether it had any.

        Raises
        ------
        StoreError
            The log is damaged, or gone.
        """
        with self._lock:
            new = self._unread()
            for each in new:
                self._add(each)
        return bool(new)

    def _unread(self) -> list[Finished]:
        entries = [] if self.complete else read_entries(self.folder, self._entries)
        self._entries += len(entries)
        found = [each for entry in entries for each in entry]
        if not found and not self.complete and self.folder.size(ROOT) is not None:
            name = kept_name(self.id)
            data = self._store.get(name)
            if data is None:
                raise StoreError(
                    f"{self.path} is built, and the order in which its shards were finished is not "
                    f"kept in {self._store.path(name)} any more; open the version anew"
                )
            found = from_entry(data, self._store.path(name))
        return [each for each in found if each.shard not in self._seen]

    def _add(self, each: Finished) -> None:
        rows = self.rows_of(each.shard)
        inside = each.shard < self.shards and all(row in rows for row in each.holes)
        labelled = each.labels is None or len(each.labels) == len(rows)
        if each.objects.keys() != self._tables.keys() or not (inside and labelled):
            raise StoreError(
                f"the log of {self.path} is damaged: it has shard {each.shard} of fields "
                f"{', '.join(each.objects)} with holes {list(each.holes)[:5]}"
            )
        for name, table in self._tables.items():
            table[each.shard] = each.objects[name]
        if each.labels is not None:
            fetched = np.array(each.labels, np.int64)
            part = self.labels[rows.start : rows.stop]
            part[:] = np.where(fetched < 0, part, fetched)
        holes = np.array(sorted(each.holes), np.int64)
        self.valid[holes] = False
        self.holes.update({row: (self._row_keys[row], why) for row, why in each.holes.items()})
        self._seen.add(each.shard)
        self.finished.append((each.shard, holes))

    def await_shards(self, stopped: threading.Event) -> None:
        """Wait until the log has more, or until nobody wants it any more.

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
        """The version when it is there; None when nobody wants it any more.

        Raises
        ------
        BuildError
            As `await_shards`.
        """
        while self.folder.size(ROOT) is None:
            self._require_life(COMMIT_SECONDS)
            if stopped.wait(self._poll):
                return None
        return open_own(self.folder)

    def _require_life(self, patience: float) -> None:
        """Raise where the build has ended, or changed nothing for so many seconds.

        By this machine's clock alone: that of the other may be wrong.
        """
        now = time.monotonic()
        if now - self._looked < LIFE_SECONDS:
            return
        self._looked = now
        data, holder = self.folder.get(DESCRIPTION), self._claims.holder()
        leases = read_leases(self.folder)
        signs = data, leases, len(self.finished), holder and holder.time
        if signs != self._signs:
            self._signs, self._changed = signs, now
        if holder is not None or self.folder.size(ROOT) is not None:
            return
        why = ""
        if data is None:
            why = "what tells of it was removed"
        else:
            identity = Identity.read(data, self.folder.path(DESCRIPTION))
            goes_on = any(not has_ended(each.holder) for each in leases.values())
            if identity.failed is not None and not goes_on:
                why = identity.failed
            elif identity.by is not None and has_ended(identity.by) and not goes_on:
                why = f"{identity.by} has ended"
            elif now - self._changed > patience:
                why = f"it shows no sign of life for {now - self._changed:.0f} seconds"
        if why:
            raise BuildError(
                f"the build that this training follows has stopped with {len(self.finished)} of "
                f"{self.shards} shards done: {why}; start the training again: the build goes on "
                f"where it was ({self.path})"
            )
