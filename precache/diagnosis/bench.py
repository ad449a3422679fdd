"""Benchmark reading a store against copying plain memory, measured in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.errors import UsageError
from precache.loading.loader import Loader
from precache.loading.options import Cache
from precache.messages import Table, as_text
from precache.runtime.integers import whole
from precache.runtime.spread import Spread
from precache.storage.open import StorageOptions
from precache.store.open import open_version
from precache.units import size

LIMIT_BYTES = 1 << 30
"""Maximum size in bytes of the array that the copy limit is measured on."""


@dataclass(frozen=True)
class ReadCost:
    """Samples per second, and CPU-milliseconds of the process per 1,000 samples."""

    samples_per_s: float
    cpu_ms_per_1000: float


@dataclass(frozen=True)
class BenchResult:
    """Cost of reading a store, and of copying the same number of bytes in memory.

    Attributes
    ----------
    first_epoch
        First epoch; includes verifying checksums and reading from the disk.
    warm
        Median of the following epochs.
    copy_limit
        Median of copying rows of the same size from memory into a reused buffer.
    cpu_ratio
        CPU time of `warm` over that of `copy_limit`.
    compiled
        Whether precache's compiled kernels are installed.
    """

    version: str
    samples: int
    batch_size: int
    row_nbytes: int
    codec: str
    first_epoch: ReadCost
    warm: ReadCost
    copy_limit: ReadCost
    cpu_ratio: float
    compiled: bool

    def __str__(self) -> str:
        costs = {
            "first epoch": self.first_epoch,
            "warm epochs": self.warm,
            "copy limit": self.copy_limit,
        }
        rows = [
            (name, f"{cost.samples_per_s:,.0f}", f"{cost.cpu_ms_per_1000:.1f}")
            for name, cost in costs.items()
        ]
        what = f"{self.samples:,} samples of {size(self.row_nbytes)} decoded, codec {self.codec}"
        ratio = f"{self.cpu_ratio:.2f}"
        lines = [
            f"{what}, batches of {self.batch_size}",
            *Table(("", "samples/s", "CPU-ms per 1,000"), list(rows)).lines(),
            f"a warm epoch takes {ratio} times the CPU time of copying as many plain bytes",
        ]
        return as_text(lines if self.compiled else [*lines, kernels.NO_COMPILED_CODE])


def bench(
    uri: str | os.PathLike[str],
    batch_size: int = 256,
    epochs: int = 3,
    num_threads: int | None = None,
    tick: Callable[[str], None] = lambda name: None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
    storage_options: StorageOptions = None,
    **loader_options: Any,
) -> BenchResult:
    """Benchmark whole shuffled epochs on the CPU, and measure the copy limit between them.

    Parameters
    ----------
    uri
        A store, or ``STORE@prefix`` for a version; path or URL.
    batch_size
        Rows per batch; all rows if the store has fewer.
    epochs
        Epochs after the first.
    num_threads
        Decoding threads; by default those of a `Loader`.
    tick
        Called with the name of each measurement.
    cache_dir, cache_limit
        Local folder for shards of a remote store, and its size, such as ``"200GB"``.
    storage_options
        As in `build`.
    loader_options
        Other options of the `Loader`; not `device`, `output` and `rows`.

    Raises
    ------
    UsageError
        An option makes no sense.
    """
    for name in ("device", "output", "rows"):
        if name in loader_options:
            raise UsageError(
                f"bench has no option {name}: it reads all rows, as dicts, on the CPU; leave it out"
            )
    batch_size, epochs = whole("batch_size", batch_size, 1), whole("epochs", epochs, 1)
    version = open_version(uri, storage_options)
    rows = version.rows - len(version.hole_rows)
    fields = version.fields
    row_nbytes = sum(field.row_nbytes for field in fields.values())
    batch_size = min(batch_size, rows)
    copy = _make_copy(rows, row_nbytes, batch_size)
    if cache_limit is not None and cache_dir is None:
        raise UsageError(f"cache_limit is {cache_limit!r} and there is no cache_dir; give both")
    cache = None if cache_dir is None else Cache(cache_dir, cache_limit)
    loader_options = {
        "device": "cpu", "num_threads": num_threads, "rank": 0, "world_size": 1,
        "cache": cache, "storage_options": storage_options,
        **loader_options,
    }  # fmt: skip
    with Loader(uri, batch_size, **loader_options) as loader:
        tick("first epoch")
        first = _measure(lambda: _read(loader))
        _measure(copy)
        warm, limit = [], []
        for epoch in range(epochs):
            tick(f"epoch {epoch + 1} of {epochs}")
            limit.append(_measure(copy))
            warm.append(_measure(lambda: _read(loader)))
    warm_cost, copy_cost = _median(warm), _median(limit)
    return BenchResult(
        version=version.id,
        samples=rows,
        batch_size=batch_size,
        row_nbytes=row_nbytes,
        codec="+".join(sorted({field.codec for field in fields.values()})),
        first_epoch=first,
        warm=warm_cost,
        copy_limit=copy_cost,
        cpu_ratio=warm_cost.cpu_ms_per_1000 / copy_cost.cpu_ms_per_1000,
        compiled=kernels.compiled().functions is not None,
    )


def _read(loader: Loader) -> int:
    return sum(len(batch["row"]) for batch in loader)


def _make_copy(rows: int, row_nbytes: int, batch_size: int) -> Callable[[], int]:
    count = max(1, min(rows, LIMIT_BYTES // max(1, row_nbytes)))
    source = np.ones((count, row_nbytes), np.uint8)
    buffer = np.empty((batch_size, row_nbytes), np.uint8)

    def copy() -> int:
        order = np.random.default_rng(0).integers(0, count, rows)
        for start in range(0, rows, batch_size):
            part = order[start : start + batch_size]
            kernels.take(source, part, buffer[: len(part)])
        return rows

    return copy


def _measure(work: Callable[[], int]) -> ReadCost:
    wall, cpu = time.perf_counter(), time.process_time()
    samples = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return ReadCost(samples / wall, cpu * 1e6 / samples)


def _median(costs: list[ReadCost]) -> ReadCost:
    return ReadCost(
        Spread.of([cost.samples_per_s for cost in costs]).median,
        Spread.of([cost.cpu_ms_per_1000 for cost in costs]).median,
    )
