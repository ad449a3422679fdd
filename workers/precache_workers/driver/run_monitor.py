"""The state of one run of a build, passed on to the display, Prometheus and followers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from precache.errors import StorageError
from precache.store.receipts import Receipt
from precache_workers.cluster.nodes import node_cpus
from precache_workers.driver.metrics import BuildMetrics, build_metrics
from precache_workers.driver.progress import BuildProgress
from precache_workers.driver.shard_log_writer import ShardLogWriter
from precache_workers.driver.totals import BuildTotals
from precache_workers.planning.request import Request
from precache_workers.planning.target_version import TargetVersion


class RunMonitor:
    """Receipts and totals of one run.

    Attributes
    ----------
    began
        Unix time.
    target
        None before the version is known, and if nothing is to be built.
    new_receipts
        Receipts of this run.
    receipts
        Of all finished shards of the version, by number.
    totals
        Sums over the receipts of this run.
    """

    def __init__(self, request: Request, progress: BuildProgress) -> None:
        self.request = request
        self.began = time.time()
        self.target: TargetVersion | None = None
        self.new_receipts: list[Receipt] = []
        self.receipts: Mapping[int, Receipt] = {}
        self.totals = BuildTotals()
        self._progress = progress
        self._metrics: BuildMetrics | None = None
        self._shard_log: ShardLogWriter | None = None

    def begin(
        self,
        target: TargetVersion,
        todo: Sequence[int],
        receipts: Mapping[int, Receipt],
        followed: bool = True,
    ) -> None:
        """Prepare for the receipts of the shards to be built.

        Parameters
        ----------
        receipts
            The caller adds to it as they arrive.
        followed
            Whether others may read the shards meanwhile.
        """
        self.target, self.receipts = target, receipts
        self.totals.planned = len(todo)
        if followed:
            self._shard_log = ShardLogWriter(target.folder, receipts.values())
        self._progress.watch(self.totals, node_cpus)
        store = self.request.store.rstrip("/").rpartition("/")[2]
        address = self.request.address
        self._metrics = build_metrics(store, target.version, address, self.totals)

    def add(self, receipt: Receipt) -> None:
        """Count a shard that is done."""
        self.new_receipts.append(receipt)
        self._progress.note_node(receipt.host)
        self.totals.add(receipt, time.monotonic())
        if self._shard_log is not None:
            self._shard_log.add(receipt)
        if self._metrics is not None:
            self._metrics.shard_done(receipt.host, receipt.wall_seconds)
        if not self.totals.left:
            self.end()  # before the commit, which removes the shard log

    def fail(self, error: BaseException) -> None:
        """Record that the build failed, so that no follower waits for its next heartbeat."""
        self.end()
        if self.target is not None:
            with contextlib.suppress(StorageError, ValueError):  # the build's own error is raised
                self.target.record_failure(str(error) or type(error).__name__)

    def end(self) -> None:
        """Export and log what is left: no more shards follow."""
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            with contextlib.suppress(Exception):  # if Ray is lost, the build's own error is raised
                metrics.export(last=True)
        if self._shard_log is not None:
            self._shard_log.end()
