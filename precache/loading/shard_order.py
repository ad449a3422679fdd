"""The order of the first epoch of a training that begins while its version is built."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator

import numpy as np

from precache.errors import BuildError
from precache.sampling.order import Permutation, Steps
from precache.store.live_version import LiveVersion
from precache.store.row_table import REMOVED
from precache.store.version import Version

log = logging.getLogger(__name__)


class CommittedShards:
    """The shards of a committed version, as `LiveVersion` has those that are finished."""

    def __init__(self, version: Version) -> None:
        self.path, self.valid = version.path, version.valid
        self.rows_per_shard = version.attributes.rows_per_shard
        self.shards = self.finished = -(-version.rows // self.rows_per_shard)
        removed = sum(why == REMOVED for _, why in version.holes.values())
        self.planned = version.rows - removed

    def advance(self) -> bool:
        """Return False: nothing more is finished."""
        return False

    def await_shards(self, stopped: threading.Event) -> None:
        """Return at once."""


class ShardOrder(Steps):
    """Rows of each batch of an epoch, shard after shard.

    The rows of each shard, without holes, are permuted by (seed, epoch, shard). Step k of all ranks
    takes the rows at positions from k times the global batch on, as in `Order`. The length of an
    epoch is known from the beginning: it counts all samples, bad ones included. Positions beyond
    the last valid row begin again, to make up for holes.

    Parameters
    ----------
    stopped
        Ends all waiting once it is set.
    """

    shuffle = None
    by_epoch = True

    def __init__(
        self,
        version: LiveVersion | CommittedShards,
        batch_size: int,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        stopped: threading.Event,
    ) -> None:
        self._version = version
        self.batch_size, self.seed, self.drop_last = batch_size, seed, drop_last
        self.rank, self.world_size = rank, world_size
        self._stopped = stopped
        self._ends = np.empty(0, np.int64)
        self._logged = False

    @property
    def count(self) -> int:
        return self._version.planned

    @property
    def once(self) -> int:
        """Valid rows that are known: those that make up for holes come again."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def epoch(self, epoch: int, first: int = 0) -> Generator[np.ndarray, None, None]:
        """Yield row numbers (int64) of each batch of an epoch, from a position on."""
        for run in self.runs(epoch, first):
            yield from run

    def runs(self, epoch: int, first: int = 0) -> Iterator[Generator[np.ndarray, None, None]]:
        """Yield runs of batches whose shards are finished; wait for the shards of each run.

        Raises
        ------
        BuildError
            The build has stopped, or every sample is bad.
        """
        stop = self.stop(first)
        while first < stop:
            ready = self._ready(first)
            while ready <= first:
                self._version.await_shards(self._stopped)
                if self._stopped.is_set():
                    return
                ready = self._ready(first)
            yield self._run(epoch, first, ready)
            first = ready

    def _ready(self, first: int) -> int:
        """Return the position up to which steps from `first` on have known rows."""
        self._version.advance()
        counted = len(self._ends)
        sizes = [len(self._valid_rows(n)) for n in range(counted, self._version.finished)]
        if sizes:
            before = self._ends[-1:] if counted else np.zeros(1, np.int64)
            self._ends = np.concatenate([self._ends, before + np.cumsum(sizes)])
        if len(self._ends) < self._version.shards:
            return first + max(0, self.once - first) // self.global_batch * self.global_batch
        if not self.once:
            raise BuildError(f"no sample of {self._version.path} could be decoded")
        self._log_holes()
        return self.stop(first)

    def _valid_rows(self, shard: int) -> np.ndarray:
        start = shard * self._version.rows_per_shard
        stop = start + self._version.rows_per_shard
        return start + np.flatnonzero(self._version.valid[start:stop])

    def _log_holes(self) -> None:
        """Log once, on rank 0 alone, how many rows come twice because of holes."""
        holes = self._version.planned - self.once
        if holes and self.rank == 0 and not self._logged:
            again = max(0, min(self.stop(), self._version.planned) - self.once)
            log.warning(
                "%d samples of %s turned out bad: in the first epoch, %d rows come twice so that "
                "it keeps its %d batches",
                holes,
                self._version.path,
                again,
                self.batches(),
            )
        self._logged = True

    def _run(self, epoch: int, first: int, stop: int) -> Generator[np.ndarray, None, None]:
        for start in range(first, stop, self.global_batch):
            yield self._rows(epoch, self.own(start))

    def _rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Rows at positions, which begin again beyond the last row."""
        positions = positions % self.once
        shards = np.searchsorted(self._ends, positions, side="right")
        rows = np.empty(len(positions), np.int64)
        for shard in np.unique(shards).tolist():
            selected, valid = shards == shard, self._valid_rows(shard)
            start = int(self._ends[shard]) - len(valid)
            permute = Permutation(len(valid), "shard", self.seed, epoch, shard)
            rows[selected] = valid[permute(positions[selected] - start)]
        return rows
