"""Trials with sampled rows: CPU time of a build, and the cost of reading a store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precache.diagnosis.bench import BenchResult, bench
from precache.recipe.recipe import Codec, Field, Recipe
from precache.runtime.spread import Spread
from precache.storage.local import LocalFolder
from precache.store.layout import RowShape, rows_per_shard
from precache.store.locations import Locations
from precache.store.receipts import Receipt
from precache.store.row_table import RowTable
from precache_workers.driver.commit import commit
from precache_workers.driver.totals import Totals
from precache_workers.planning.target_version import TargetVersion, VersionSpec
from precache_workers.profiling.stage_times import codec_for
from precache_workers.shards.samples import Job
from precache_workers.shards.shard_task import ShardTask, run_shard
from precache_workers.sources.base import Fetched, Listing, Sample, Tick

MOST_BYTES = 256 << 20
"""Raw bytes of a store to read: more than a processor's caches hold."""
EPOCHS = 5
ROUNDS = 5
"""Trial builds, at most."""


@dataclass(frozen=True)
class HeldRows:
    """Finished rows in memory as a source, repeated until there are `count`."""

    rows: Sequence[Mapping[Any, np.ndarray]]
    count: int
    labels_with_samples: bool = False
    fetch_threads: int = 1
    index_name: str = ""

    def file_of(self, key: str) -> None:
        return None

    def list(self, tick: Tick, seconds: float = 0.0, index: bytes | None = None) -> Listing:
        keys = [str(number) for number in range(self.count)]
        return Listing(RowTable.of_keys(keys, source="memory"))

    def fetch(
        self, keys: Sequence[str], sizes: Sequence[int], locations: Locations | None = None
    ) -> Sequence[Fetched]:
        return [Sample(self.rows[int(key) % len(self.rows)]) for key in keys]


def build_cpu(
    job: Job,
    shapes: Mapping[str, RowShape],
    some: RowTable,
    population: int,
    folder: Path,
    seconds: float,
) -> float:
    """Measure CPU seconds per sample in the tasks of a real build: median of a few.

    Parameters
    ----------
    some
        The samples to build.
    population
        Samples of the whole source, on which the size of a shard depends.
    folder
        Temporary place of the shards.
    seconds
        Time after which no further build is begun.
    """
    nbytes = [row.nbytes for row in shapes.values()]
    per_shard = min(rows_per_shard(population, nbytes), len(some))
    until = time.monotonic() + seconds
    rounds = []
    for number in range(ROUNDS):
        store = LocalFolder(folder / str(number))
        _, receipts = _build(job, shapes, some, per_shard, store)
        store.remove("")
        rounds.append(Totals.of_all(receipts.values()).cpu_seconds / len(some))
        if time.monotonic() > until:
            break
    return Spread.of(rounds).median


@dataclass(frozen=True)
class Read:
    """A store of sampled rows: mean stored bytes of a row, raw bytes, and the cost of reading."""

    stored: float
    raw: int
    cost: BenchResult


def rows_to_read(population: int, sampled: int, row_nbytes: int, most_bytes: float) -> int:
    """Return the number of rows of a store to read.

    As many as the source has, rounded up to whole repetitions of the sampled rows, within the limit
    of bytes; a part of the sampled rows if the limit is smaller.
    """
    most = int(min(MOST_BYTES, most_bytes) // max(1, row_nbytes))
    whole = min(-(-population // sampled), most // sampled) * sampled
    return whole or max(1, most)


def read_codec(
    codec: Codec | None,
    own: Recipe,
    rows: Sequence[Mapping[str, np.ndarray]],
    count: int,
    folder: Path,
) -> Read:
    """Write `count` rows to a store and read epochs of it; the stored bytes are of distinct rows.

    Parameters
    ----------
    codec
        Codec of every field that it can hold; None for each field's own.
    """
    shapes = {name: RowShape(row.shape, row.dtype.name) for name, row in rows[0].items()}
    fields = {
        name: Field(codec=codec_for(codec or own.fields[name].stored_as, row))
        for name, row in shapes.items()
    }
    distinct = min(len(rows), count)
    stored = _write(Recipe(fields=fields), shapes, HeldRows(rows, distinct), folder)
    if count > distinct:  # repeated rows share chunks and compress better than a source's would
        shutil.rmtree(folder)
        _write(Recipe(fields=fields), shapes, HeldRows(rows, count), folder)
    raw = sum(row.nbytes for row in shapes.values())
    return Read(stored / distinct, raw, bench(folder, epochs=EPOCHS))


def _write(recipe: Recipe, shapes: Mapping[str, RowShape], source: HeldRows, folder: Path) -> int:
    """Build a committed store of all rows of a source; returns the bytes of its shards."""
    table = source.list(lambda count: None).table
    per_shard = rows_per_shard(len(table), [row.nbytes for row in shapes.values()])
    store = LocalFolder(folder)
    target, receipts = _build(Job(source, recipe), shapes, table, per_shard, store)
    commit(store, target, receipts)
    return Totals.of_all(receipts.values()).stored


def _build(
    job: Job, shapes: Mapping[str, RowShape], table: RowTable, per_shard: int, store: LocalFolder
) -> tuple[TargetVersion, dict[int, Receipt]]:
    """Build all shards of a table in this process, one after another."""
    spec = VersionSpec(job.recipe, "", table, table.digest)
    target = TargetVersion.of(store, spec, per_shard, shapes)
    receipts = {}
    for shard in range(target.shards):
        part = slice(shard * per_shard, (shard + 1) * per_shard)
        task = ShardTask(
            job,
            list(table.keys[part]),
            table.sizes[part].tolist(),
            table.locations_of(np.arange(len(table))[part]),
            folder=target.folder,
            shapes=shapes,
            objects={name: target.object_name(name, shard) for name in shapes},
            rows_per_shard=per_shard,
            shard=shard,
            accept_missing=True,
        )
        receipts[shard] = run_shard(task)
    return target, receipts
