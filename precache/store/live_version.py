"""A version that is still being built: its rows are known, its shards finish one by one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from precache.errors import BuildError, StorageError, StoreError
from precache.runtime.process_id import has_ended
from precache.storage.base import Folder
from precache.store.arrays import Array, version_arrays
from precache.store.build_status import DESCRIPTION, FROZEN_ROWS, read_description
from precache.store.commit_log import ROOT
from precache.store.json_documents import FORMAT, Attributes, Identity
from precache.store.labels import are_classes
from precache.store.lease import LastChange, Leases
from precache.store.open import open_own
from precache.store.receipts import Receipt, receipt_name
from precache.store.row_table import RowTable, label_attributes, thaw
from precache.store.tree import Leaf
from precache.store.version import Version

RECEIPT_POLL_LOCAL, RECEIPT_POLL_REMOTE = 0.1, 1.0
"""Seconds between two polls for the next receipt."""

RECEIPTS_AT_ONCE = 32
"""Receipts that are requested together where the next one is there."""

LIVENESS_SECONDS = 5.0
"""Seconds between two checks that a build is alive."""

TAKEOVER_SECONDS = 20.0
"""Seconds after the end of a build within which another one that waited for it takes over. The
other polls, and has no lease until then."""


class LiveVersion(Version):
    """A version that was begun and not committed.

    `advance` and `add` update its contents in place. Its `labels` and `keys` are those of the row
    table.

    Parameters
    ----------
    begun
        The description of its build.
    table
        The frozen row table.
    leases
        Those of `ensure`, under which it may be built.

    Attributes
    ----------
    finished
        Shards that a reader can follow: those before the first one without a receipt.
    planned
        Rows of all shards if no sample is bad.
    """

    followed = True

    def __init__(
        self, folder: Folder, begun: Identity, table: RowTable, leases: Leases | None = None
    ) -> None:
        attributes = _attributes(begun, table, folder.path(DESCRIPTION))
        arrays = version_arrays(attributes, str(folder))
        super().__init__(
            folder,
            version_id=folder.name,
            attributes=attributes,
            arrays=arrays,
        )
        self.table = table
        self._leases = [*([leases] if leases else []), Leases(folder)]
        self.labels = table.labels.copy()
        self.valid = ~table.is_removed
        self.holes = {}
        self.planned = table.samples
        self._fields = {name: field.row for name, field in attributes.fields.items()}
        self.rows_per_shard = attributes.rows_per_shard
        self.shards = -(-self.rows // self.rows_per_shard)
        self._shards = {name: self._bounds(name, arrays[name]) for name in attributes.fields}
        self._ends = {
            name: np.zeros((self.shards, arrays[name].object_chunks), np.uint32)
            for name in attributes.fields
        }
        ragged = {name: f for name, f in attributes.fields.items() if f.ragged}
        self._shapes = {n: np.zeros((self.rows, len(f.shape)), np.int64) for n, f in ragged.items()}
        self._sums: dict[str, np.ndarray] = {}
        self.finished = 0
        self._lock = threading.Lock()
        self._poll = RECEIPT_POLL_REMOTE if folder.local("") is None else RECEIPT_POLL_LOCAL
        self._end, self._looked = LastChange(), -np.inf

    def _bounds(self, name: str, array: Array) -> list[Leaf]:
        """Upper bounds of object sizes, until these are known. Source: ZSTD_compressBound."""
        raw = self.rows_per_shard * array.row_nbytes
        bound = raw + (raw >> 8) + (128 + 16) * array.object_chunks + 4
        return [
            Leaf(f"{name}/{array.object_name(number)}", bound, 0) for number in range(self.shards)
        ]

    @property
    def committed(self) -> bool:
        return False

    @property
    def keys(self) -> Sequence[str]:
        return self.table.keys

    def checks(self, array: str, shard: int) -> np.ndarray:
        checks: np.ndarray = self._ends[array][shard]
        return checks

    def shard_sums(self, array: str) -> np.ndarray | None:
        return self._sums.get(array)

    def is_gone(self) -> bool:
        """Return whether the version's folder is gone: its group's document is written last."""
        return not self.folder.exists()

    def prefetch(self, fields: object) -> None:
        """Do nothing: all small arrays are in memory."""

    def advance(self) -> bool:
        """Read the receipts that follow; return whether there were any.

        Raises
        ------
        StoreError
            A receipt is damaged.
        """
        with self._lock:
            before = self.finished
            for receipt in self._next_receipts():
                self.add(receipt, self.finished)
                self.finished += 1
            if self.finished < self.shards and self.folder.size(ROOT) is not None:
                self._add_committed(open_own(self.folder))
            return self.finished > before

    def _next_receipts(self) -> Iterator[Receipt]:
        if self.finished == self.shards:
            return
        found: list[bytes | StorageError | None] = [self.folder.get(receipt_name(self.finished))]
        while found:
            for data in found:
                try:
                    receipt = Receipt.from_json(data if isinstance(data, bytes) else b"")
                except ValueError:  # none yet, or cut off: then its task runs again
                    return
                yield receipt
            last = min(self.finished + RECEIPTS_AT_ONCE, self.shards)
            names = [receipt_name(shard) for shard in range(self.finished, last)]
            found = [*self.folder.read_small(names)]

    def add(self, receipt: Receipt, shard: int) -> range:
        """Take what a receipt tells of its shard; returns its rows.

        Raises
        ------
        StoreError
            It is not that of the shard.
        """
        start = shard * self.rows_per_shard
        rows = range(start, min(start + self.rows_per_shard, self.rows))  # none beyond the last
        labelled = receipt.labels is None or are_classes(self.labels)
        fits = receipt.fits(rows, self._fields, self.rows_per_shard)
        if not (rows and receipt.shard == shard and fits and labelled):
            raise StoreError(
                f"{self.folder.path(receipt_name(shard))} is damaged: it is of shard "
                f"{receipt.shard} with fields {', '.join(receipt.objects)} and holes "
                f"{list(receipt.holes)[:5]}"
            )
        for name, table in self._shards.items():
            stored = receipt.objects[name]
            table[shard] = stored.leaf(table[shard].name)
            self._ends[name][shard] = stored.ends
        for name, sums in receipt.sums.items():
            flat = sums.flat()
            self._sums.setdefault(name, np.zeros((self.shards, len(flat))))[shard] = flat
        for name, shapes in self._shapes.items():
            shapes[rows.start : rows.stop] = receipt.shapes[name]
            self.require_shapes(name, shapes[rows.start : rows.stop])
        if receipt.labels is not None:
            fetched = np.array(receipt.labels, np.int64)
            part = self.labels[rows.start : rows.stop]
            part[:] = np.where(fetched < 0, part, fetched)
        self.valid[list(receipt.holes)] = False
        self.holes.update({row: (self.keys[row], why) for row, why in receipt.holes.items()})
        return rows

    def _add_committed(self, version: Version) -> None:
        """Take all that the committed version tells of its shards; their receipts are gone."""
        for name, table in self._shards.items():
            table[:] = version.shard_leaves(name)
            for shard in range(self.finished, self.shards):
                self._ends[name][shard] = version.checks(name, shard)
        for name, shapes in self._shapes.items():
            shapes[:] = version.row_shapes(name)
        self.labels[:] = version.labels
        self.valid[:] = version.valid
        self.holes.update(version.holes)
        self.finished = self.shards

    def await_shards(self, stopped: threading.Event) -> None:
        """Wait until the next shard is finished, or `stopped` is set.

        Raises
        ------
        BuildError
            The build failed, or shows no sign of life.
        """
        while not self.advance():
            self._require_life()
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
            self._require_life()
            if stopped.wait(self._poll):
                return None
        return open_own(self.folder)

    def _require_life(self) -> None:
        """Raise if the build has ended, or is silent, and no other one has taken over.

        It is looked for every `LIVENESS_SECONDS`, and has ended after `TAKEOVER_SECONDS`.
        """
        now = time.monotonic()
        if now - self._looked < LIVENESS_SECONDS:
            return
        self._looked = now
        held = any(leases.holder() is not None for leases in self._leases)
        reason = "" if held or self.folder.size(ROOT) is not None else self._why_ended()
        if self._end.seconds(reason) >= TAKEOVER_SECONDS and reason:
            raise BuildError(
                f"the build that this training follows has stopped with {self.finished} of "
                f"{self.shards} shards done: {reason}; start the training again: the build goes on "
                f"where it was ({self.path})"
            )

    def _why_ended(self) -> str:
        """Return why no build is running, as far as its processes tell."""
        identity = read_description(self.folder)
        if identity is None:
            return "its description was removed"
        ended = "has ended" if has_ended(identity.by) else "shows no sign of life"
        return identity.failed or f"{identity.by} {ended}"


def open_begun(folder: Folder, leases: Leases | None = None) -> LiveVersion | None:
    """Open a version whose build has begun; None if nothing describes one, as after a commit.

    Parameters
    ----------
    leases
        As in `LiveVersion`.

    Raises
    ------
    StoreError
        The description or the row table is damaged, or of another version.
    """
    begun = read_description(folder)
    if begun is None:
        return None
    frozen = folder.get(FROZEN_ROWS)
    if frozen is None:  # committed at this moment, it has another
        table = open_own(folder).row_table()
    else:
        table = thaw(frozen, folder.path(FROZEN_ROWS))
    if begun.version != folder.name or begun.rows != len(table):
        raise StoreError(f"{folder.path(DESCRIPTION)} is of another version")
    return LiveVersion(folder, begun, table, leases)


def _attributes(begun: Identity, table: RowTable, where: str) -> Attributes:
    """Return what is known of a version before it is committed."""
    own = begun.model_dump(mode="json", include={*Attributes.model_fields})
    for described in own["fields"].values():
        described |= {"raw": 0, "stored": 0}
    for unknown in ("mean", "std", "objects", "libraries", "decides", "behaviours"):
        own[unknown] = {}
    own |= {"format": FORMAT, "digest": "", "version": begun.version.partition(".")[0], "holes": 0}
    own |= {"classes": list(table.classes), "label": label_attributes(table)}
    return Attributes.read(json.dumps(own).encode(), where)
