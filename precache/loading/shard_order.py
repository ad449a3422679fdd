"""The order of the first epoch of a training that begins while its version is built."""

from __future__ import annotations

import functools
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


class ShardOrder(Steps):
    """Rows of each batch of an epoch, shard after shard.

    The rows of each shard, without holes, are permuted by (seed, epoch, shard). Step k of all ranks
    takes the rows at positions from k times the global batch on, as in `Order`. The length of an
    epoch is known from the beginning: it counts all samples, bad ones included. Positions beyond
    the last valid row begin again, to make up for holes.

    Parameters
    ----------
    version
        A version that is built, or one that was: then nothing waits.
    stopped
        Ends all waiting once it is set.
    """

    shuffle = None
    by_epoch = True

    def __init__(
        self,
        version: Version,
        batch_size: int,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        stopped: threading.Event,
    ) -> None:
        self._version = version
        self._live = version if isinstance(version, LiveVersion) else None
        self._shard_rows = version.attributes.rows_per_shard
        self._shards = -(-version.rows // self._shard_rows)
        self.batch_size, self.seed, self.drop_last = batch_size, seed, drop_last
        self.rank, self.world_size = rank, world_size
        self._stopped = stopped
        self._ends = np.empty(0, np.int64)
        self._logged = False

    @functools.cached_property
    def count(self) -> int:
        if self._live:
            return self._live.planned
        removed = sum(why == REMOVED for _, why in self._version.holes.values())
        return self._version.rows - removed

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
            while ready <= first and self._live:  # of a committed version all shards are there
                self._live.await_shards(self._stopped)
                if self._stopped.is_set():
                    return
                ready = self._ready(first)
            starts = range(first, ready, self.global_batch)
            yield (self._rows(epoch, self.own(start)) for start in starts)
            first = ready

    def _ready(self, first: int) -> int:
        """Return the position up to which steps from `first` on have known rows."""
        finished, counted = self._shards, len(self._ends)
        if self._live:
            self._live.advance()
            finished = self._live.finished
        if sizes := [len(self._valid_rows(number)) for number in range(counted, finished)]:
            before = self._ends[-1:] if counted else np.zeros(1, np.int64)
            self._ends = np.concatenate([self._ends, before + np.cumsum(sizes)])
        if len(self._ends) < self._shards:
            return first + max(0, self.once - first) // self.global_batch * self.global_batch
        if not self.once:
            raise BuildError(f"no sample of {self._version.path} could be decoded")
        self._log_holes()
        return self.stop(first)

    def _valid_rows(self, shard: int) -> np.ndarray:
        start = shard * self._shard_rows
        return start + np.flatnonzero(self._version.valid[start : start + self._shard_rows])

    def _log_holes(self) -> None:
        """Log once, on rank 0 alone, how many rows come twice because of holes."""
        holes = self.count - self.once
        if holes and self.rank == 0 and not self._logged:
            again = max(0, min(self.stop(), self.count) - self.once)
            log.warning(
                "%d samples of %s turned out bad: in the first epoch, %d rows come twice so that "
                "it keeps its %d batches",
                holes,
                self._version.path,
                again,
                self.batches(),
            )
        self._logged = True

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
