"""What a build answers: from the receipts of what it made, or from a version that was there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from precache.recipe.variants import pool_statistics
from precache.store.open import open_own
from precache.store.receipts import Receipt
from precache.store.row_table import REMOVED
from precache_workers.driver.commit import channel_statistics, failures
from precache_workers.planning.request import BuildResult
from precache_workers.planning.target_version import TargetVersion


def result_of(
    goal: TargetVersion, receipts: Mapping[int, Receipt], made: Sequence[Receipt], ignored: int
) -> BuildResult:
    """Of a build that ends well, but for its time.

    Parameters
    ----------
    receipts
        Of all shards of the version.
    made
        Those that this run made.
    ignored
        Files of the source that are not images by suffix.
    """
    ordered = list(receipts.values())
    failed = [(goal.table.keys[row], why) for row, why in failures(ordered).items()]
    objects = [made for receipt in ordered for made in receipt.objects.values()]
    stages: Counter[str] = Counter()
    for receipt in made:
        stages.update(receipt.seconds)
    statistics = pool_statistics(*channel_statistics(ordered))
    return BuildResult(
        version=goal.version,
        path=str(goal.folder),
        samples=len(goal.table) - len(goal.table.removed),
        failed=len(failed),
        removed=len(goal.table.removed),
        shards=goal.shards,
        shards_skipped=goal.shards - len(made),
        shards_reused=sum(receipt.reused for receipt in made),
        rows_reused=sum(receipt.rows_reused for receipt in made),
        raw_bytes=sum(each.raw_nbytes for each in objects),
        stored_bytes=sum(each.size for each in objects),
        cpu_seconds=sum(receipt.cpu_seconds for receipt in made),
        holes=failed,
        ignored=ignored,
        timings={**stages, "imports": sum(receipt.import_seconds for receipt in made)},
        classes=goal.table.classes,
        mean={name: mean for name, (mean, _) in statistics.items()},
        std={name: std for name, (_, std) in statistics.items()},
    )


def committed_result(goal: TargetVersion, ignored: int) -> BuildResult:
    """Of a build that has nothing to do."""
    version = open_own(goal.folder)
    failed = [version.holes[row] for row in sorted(version.holes)]
    failed = [each for each in failed if each[1] != REMOVED]
    fields = version.fields.values()
    return BuildResult(
        version=goal.version,
        path=version.path,
        samples=version.rows - len(goal.table.removed),
        failed=len(failed),
        removed=len(goal.table.removed),
        shards=goal.shards,
        shards_skipped=goal.shards,
        raw_bytes=sum(each.raw_nbytes for each in fields),
        stored_bytes=sum(each.stored_nbytes for each in fields),
        holes=failed,
        ignored=ignored,
        classes=version.classes,
        mean=version.mean,
        std=version.std,
    )
