"""What one run of a build makes, told on as receipts come: to the screen, to Prometheus, to gc."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from precache.errors import StorageError
from precache.store.receipts import Receipt
from precache_workers.cluster.nodes import node_cpus
from precache_workers.driver.metrics import BuildMetrics, build_metrics
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.shard_log_writer import FinishedLog
from precache_workers.planning.request import Request
from precache_workers.planning.target_version import TargetVersion


class RunMonitor:
    """One run.

    Attributes
    ----------
    began
        Unix time.
    goal
        None before the version is known, and where nothing is to be made.
    made
        Receipts of this run.
    receipts
        Of all shards of the version that are there, by number.
    shards
        How many this run is to make.
    """

    def __init__(self, request: Request, progress: BuildProgress) -> None:
        self.request = request
        self.began = time.time()
        self.goal: TargetVersion | None = None
        self.made: list[Receipt] = []
        self.receipts: Mapping[int, Receipt] = {}
        self.shards = 0
        self._progress = progress
        self._metrics: BuildMetrics | None = None
        self._finished: FinishedLog | None = None

    def begin(
        self,
        goal: TargetVersion,
        todo: Sequence[int],
        receipts: Mapping[int, Receipt],
        followed: bool = True,
    ) -> None:
        """Shards are to be made; `receipts` is kept, and grows with them.

        Parameters
        ----------
        followed
            Whether others may read the shards meanwhile.
        """
        self.goal, self.receipts, self.shards = goal, receipts, len(todo)
        if followed:
            self._finished = FinishedLog(goal.folder, receipts.values())
        self._progress.watch(self.shards, node_cpus)
        store = self.request.store.rstrip("/").rpartition("/")[2]
        self._metrics = build_metrics(store, goal.version, self.request.address)
        if self._metrics is not None:
            self._metrics.plan(self.shards)

    def add(self, receipt: Receipt) -> None:
        """A shard is made."""
        self.made.append(receipt)
        self._progress.count(receipt)
        if self._finished is not None:
            self._finished.add(receipt)
        if self._metrics is not None:
            self._metrics.add(receipt)
        if len(self.made) == self.shards:
            self.end()  # before the commit, which clears away what tells of a build

    def fail(self, error: BaseException) -> None:
        """The build does not end well: those who wait for it need not wait for its last beat."""
        self.end()
        if self.goal is not None:
            with contextlib.suppress(StorageError, ValueError):  # the build's own error is told
                self.goal.tell_failure(str(error) or type(error).__name__)

    def end(self) -> None:
        """No more shards are made."""
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            with contextlib.suppress(Exception):  # where Ray is lost, the build's own error tells
                metrics.tell(last=True)
        if self._finished is not None:
            self._finished.end()
