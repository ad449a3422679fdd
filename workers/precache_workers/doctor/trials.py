"""Trial stores of sampled rows: their bytes, and the cost of reading them."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precache.loading.loader import Loader
from precache.recipe.recipe import Codec, Field, Recipe
from precache.storage.local import LocalFolder
from precache.store.commit_log import make_current
from precache.store.layout import RowShape, rows_per_shard
from precache.store.locations import Locations
from precache.store.open import open_version
from precache.store.row_table import RowTable
from precache_workers.doctor.report import CodecFigures
from precache_workers.doctor.stages import codec_for
from precache_workers.driver.commit import commit
from precache_workers.driver.totals import Totals
from precache_workers.planning.target_version import TargetVersion, VersionSpec
from precache_workers.shards.samples import Job
from precache_workers.shards.shard_task import ShardTask, run_shard
from precache_workers.sources.base import Fetched, Listing, Sample, Source, Tick

MOST_BYTES = 256 << 20
"""Raw bytes of a store to read: more than a processor's caches hold."""
EPOCHS = 5
BATCH_SAMPLES = 256


@dataclass(frozen=True)
class HeldRows(Source):
    """Finished rows in memory as a source, repeated until there are `count`."""

    rows: Sequence[Mapping[Any, np.ndarray]]
    count: int
    fetch_threads: int = 1

    def list(self, tick: Tick, seconds: float = 0.0, index: bytes | None = None) -> Listing:
        keys = [str(number) for number in range(self.count)]
        return Listing(RowTable.of_keys(keys, source="memory"))

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        return [Sample(self.rows[int(key) % len(self.rows)]) for key in keys]


def rows_to_read(population: int, sampled: int, row_nbytes: int, most_bytes: float) -> int:
    """Return the number of rows of a store to read.

    As many as the source has, rounded up to whole repetitions of the sampled rows, within the limit
    of bytes; a part of the sampled rows if the limit is smaller.
    """
    most = int(min(MOST_BYTES, most_bytes) // max(1, row_nbytes))
    whole = min(-(-population // sampled), most // sampled) * sampled
    return whole or max(1, most)


def try_codec(
    name: str,
    codecs: Mapping[str, Codec],
    rows: Sequence[Mapping[str, np.ndarray]],
    count: int,
    folder: Path,
) -> CodecFigures:
    """Write the rows to a store, and read epochs of one that has `count` of them.

    Parameters
    ----------
    codecs
        Codec of each field, if it can hold the rows.
    """
    shapes = {field: RowShape(row.shape, row.dtype.name) for field, row in rows[0].items()}
    fields = {field: Field(codec=codec_for(codecs[field], row)) for field, row in shapes.items()}
    recipe = Recipe(fields=fields)
    written = _write(recipe, shapes, HeldRows(rows, len(rows)), folder)
    if count != len(rows):  # repeated rows share chunks and compress better than a source's would
        shutil.rmtree(folder)
        _write(recipe, shapes, HeldRows(rows, count), folder)
    samples_per_s, cpu_ms_per_1000 = read_cost(folder)
    return CodecFigures(
        codec=name,
        stored=written.stored / len(rows),
        raw=sum(row.nbytes for row in shapes.values()),
        write_cpu=written.cpu_seconds / len(rows),
        samples_per_s=samples_per_s,
        cpu_ms_per_1000=cpu_ms_per_1000,
    )


def read_cost(store: Path) -> tuple[float, float]:
    """Read shuffled epochs of a store on the CPU, whatever rank this process has.

    Returns
    -------
    tuple
        Samples per second, and CPU-milliseconds of the process per 1,000 samples: medians of
        `EPOCHS` epochs after a first one, which checks the bytes and reads them from the disk.
    """
    costs = []
    size = min(BATCH_SAMPLES, int(open_version(store).valid.sum()))
    with Loader(store, size, device="cpu", rank=0, world_size=1) as loader:
        for _ in range(1 + EPOCHS):
            wall, cpu = time.perf_counter(), time.process_time()
            samples = sum(len(batch["row"]) for batch in loader)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            costs.append((samples / wall, 1e6 * cpu / samples))
    speeds, cpus = zip(*costs[1:], strict=True)
    return statistics.median(speeds), statistics.median(cpus)


def _write(
    recipe: Recipe, shapes: Mapping[str, RowShape], source: HeldRows, folder: Path
) -> Totals:
    """Build a committed store of all rows of a source in this process."""
    table = source.list(lambda count: None).table
    per_shard = rows_per_shard(len(table), [row.nbytes for row in shapes.values()])
    store, job = LocalFolder(folder), Job(source, recipe)
    spec = VersionSpec(recipe, "", table, table.digest)
    target = TargetVersion.of(store, spec, per_shard, shapes)
    where = {"folder": target.folder, "shapes": shapes, "rows_per_shard": per_shard}
    receipts = {}
    for shard in range(target.shards):
        task = ShardTask.of(job, table, target.rows_of(shard), shard=shard, **where)
        receipts[shard] = run_shard(task)
    commit(target, receipts)
    make_current(store, target.version)
    return Totals.of(receipts.values())
