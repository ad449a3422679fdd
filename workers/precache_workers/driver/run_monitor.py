"""The state of one run of a build, for its report and for followers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from precache.errors import StorageError
from precache.store.receipts import Receipt
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

    def __init__(self, request: Request) -> None:
        self.request = request
        self.began = time.time()
        self.target: TargetVersion | None = None
        self.new_receipts: list[Receipt] = []
        self.receipts: Mapping[int, Receipt] = {}
        self.totals = BuildTotals()

    def begin(
        self, target: TargetVersion, todo: Sequence[int], receipts: Mapping[int, Receipt]
    ) -> None:
        """Prepare for the receipts of the shards to be built; the caller adds to `receipts`."""
        self.target, self.receipts = target, receipts
        self.totals.planned = len(todo)

    def add(self, receipt: Receipt) -> None:
        """Count a shard that is done."""
        self.new_receipts.append(receipt)
        self.totals.add(receipt)

    def fail(self, error: BaseException) -> None:
        """Record that the build failed, so that no follower waits for its next heartbeat."""
        if self.target is not None:
            with contextlib.suppress(StorageError, ValueError):  # the build's own error is raised
                self.target.record_failure(str(error) or type(error).__name__)
