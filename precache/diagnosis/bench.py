"""Bench: what reading a store costs here, beside the machine's own copy limit in the same run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.codecs import kernels
from precache.loading.loader import Loader
from precache.runtime.integers import whole
from precache.store.open import open_version

LIMIT_BYTES = 1 << 30
"""At most this much memory stands in for a store of plain rows."""


@dataclass(frozen=True)
class ReadCost:
    """Samples a second, and CPU-milliseconds of the process per 1,000 samples (medians)."""

    samples_per_s: float
    cpu_ms_per_1000: float


@dataclass(frozen=True)
class BenchResult:
    """Reading a store against copying as many plain bytes.

    Attributes
    ----------
    first_epoch
        Includes checksums of rows read for the first time, and whatever was not in memory yet.
    warm
        Median of the epochs after it.
    copy_limit
        Rows of the same size from memory into a reused buffer, by the code that copies `raw`.
    cpu_ratio
        CPU time of `warm` over `copy_limit`.
    compiled
        Whether precache's compiled code is there.
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


def bench(
    uri: str | os.PathLike[str],
    batch_size: int = 256,
    epochs: int = 3,
    num_threads: int | None = None,
    tick: Callable[[str], None] = lambda what: None,
    **loader_options: Any,
) -> BenchResult:
    """Read whole epochs, shuffled, on the CPU, with the copy limit measured in between.

    Parameters
    ----------
    batch_size
        Rows a batch; the number of rows where the store has fewer.
    epochs
        After the first.
    num_threads
        As of `Loader`.
    tick
        Told what is being measured.
    loader_options
        Of the `Loader`, such as `cache_dir` and `storage_options` for a remote store.
    """
    batch_size, epochs = whole("batch_size", batch_size, 1), whole("epochs", epochs, 1)
    version = open_version(uri, None, loader_options.get("storage_options"))
    rows = version.rows - len(version.hole_rows)
    fields = version.fields
    row_nbytes = sum(field.row_nbytes for field in fields.values())
    batch_size = min(batch_size, rows)
    copy = _copier(rows, row_nbytes, batch_size)
    with Loader(uri, batch_size, device="cpu", num_threads=num_threads, **loader_options) as loader:
        tick("first epoch")
        first = _measure(lambda: _read(loader))
        _measure(copy)
        warm, limit = [], []
        for epoch in range(epochs):
            tick(f"epoch {epoch + 1} of {epochs}")
            limit.append(_measure(copy))
            warm.append(_measure(lambda: _read(loader)))
    read, floor = _median(warm), _median(limit)
    return BenchResult(
        version.id,
        rows,
        batch_size,
        row_nbytes,
        "+".join(sorted({field.codec for field in fields.values()})),
        first,
        read,
        floor,
        read.cpu_ms_per_1000 / floor.cpu_ms_per_1000,
        kernels.compiled().functions is not None,
    )


def _read(loader: Loader) -> int:
    return sum(len(batch["row"]) for batch in loader)


def _copier(rows: int, row_nbytes: int, batch_size: int) -> Callable[[], int]:
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
        statistics.median(cost.samples_per_s for cost in costs),
        statistics.median(cost.cpu_ms_per_1000 for cost in costs),
    )
