"""The result of a build: from its receipts, or from a committed version."""

from __future__ import annotations

from collections.abc import Mapping

from precache.recipe.variants import pool_statistics
from precache.store.open import open_own
from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED
from precache_workers.driver.commit import channel_statistics, failures
from precache_workers.driver.totals import Totals
from precache_workers.planning.request import BuildResult
from precache_workers.planning.target_version import TargetVersion


def build_result(
    target: TargetVersion, receipts: Mapping[int, Receipt], total: Totals, ignored: int
) -> BuildResult:
    """Result of a build that succeeded, but for its time.

    Parameters
    ----------
    receipts
        Of all shards of the version.
    total
        Sums over the receipts of this run.
    ignored
        Files of the source that are not images by suffix.
    """
    ordered = list(receipts.values())
    failed = [(target.table.keys[row], why) for row, why in failures(ordered).items()]
    objects = [stored for receipt in ordered for stored in receipt.objects.values()]
    statistics = pool_statistics(*channel_statistics(ordered))
    return BuildResult(
        version=target.version,
        path=str(target.folder),
        samples=target.table.samples,
        failed=len(failed),
        removed=len(target.table.removed),
        shards=target.shards,
        shards_skipped=target.shards - total.shards,
        shards_reused=total.reused,
        rows_reused=total.rows_reused,
        raw_bytes=sum(stored.raw_nbytes for stored in objects),
        stored_bytes=sum(stored.size for stored in objects),
        cpu_seconds=total.cpu_seconds,
        holes=failed,
        ignored=ignored,
        timings={**total.stages, "imports": total.import_seconds},
        classes=target.table.classes,
        mean={name: mean for name, (mean, _) in statistics.items()},
        std={name: std for name, (_, std) in statistics.items()},
        row_types=target.row_types,
    )


def committed_result(target: TargetVersion, ignored: int) -> BuildResult:
    """Result of a build whose version is committed already."""
    version = open_own(target.folder)
    failed = [version.holes[row] for row in sorted(version.holes)]
    failed = [hole for hole in failed if hole[1] != REMOVED]
    fields = version.fields.values()
    return BuildResult(
        version=target.version,
        path=version.path,
        samples=target.table.samples,
        failed=len(failed),
        removed=len(target.table.removed),
        shards=target.shards,
        shards_skipped=target.shards,
        raw_bytes=sum(field.raw_nbytes for field in fields),
        stored_bytes=sum(field.stored_nbytes for field in fields),
        holes=failed,
        ignored=ignored,
        classes=version.classes,
        mean=version.mean,
        std=version.std,
        row_types=target.row_types,
    )
