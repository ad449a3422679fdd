"""Throughput of a source: files at random, one at a time and several."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np

from precache.errors import StorageError
from precache.runtime.machine import MachineReader
from precache.runtime.operating_system import drop_cached
from precache.runtime.spread import Spread
from precache.runtime.threads import prefetch
from precache.store.row_table import RowTable
from precache_workers.doctor.report import Throughput
from precache_workers.sources.base import Sample, Source

DEPTHS = (1, 4, 16)
REMOTE_DEPTHS = (1, 4, 16, 64)
"""Requests in flight; a service has a higher latency, and takes more."""
MOST = 512
"""Files read at each depth, at most."""


def probe_source(
    source: Source, table: RowTable, seconds: float
) -> tuple[list[Throughput], float | None]:
    """Read whole samples of files at several depths; of a `Dataset`, nothing.

    Before each reading, files on a local disk are dropped from the page cache.

    Parameters
    ----------
    table
        All samples, in the order of the listing.
    seconds
        Time for all readings.

    Returns
    -------
    tuple
        The readings; and the share of the time in which a process waited for I/O, None if the
        machine does not report it.
    """
    file = source.file_of(table.keys[0], table.locations_of([0]))
    if file is None:
        return [], None
    depths = DEPTHS if file[0].local("") else REMOTE_DEPTHS
    machine = MachineReader()
    machine.read()
    readings = []
    for depth in depths:
        random = np.random.default_rng(depth)
        some = table.take(random.choice(len(table), min(MOST, len(table)), replace=False))
        _drop(source, some)
        reading = _read(source, some, depth, seconds / len(depths))
        readings += [reading] if reading else []
    return readings, machine.read().io_wait


def _drop(source: Source, some: RowTable) -> None:
    """Drop local files from the page cache; mapped pages stay."""
    found = (source.file_of(key, some.locations_of([row])) for row, key in enumerate(some.keys))
    files = {name: folder for folder, name in filter(None, found)}
    for name, folder in files.items():
        with contextlib.suppress(StorageError):
            if (descriptor := folder.open(name)) is not None:
                drop_cached(descriptor)
                os.close(descriptor)


def _read(source: Source, some: RowTable, depth: int, seconds: float) -> Throughput | None:
    """Read samples, so many at a time; None if none could be read."""
    work = iter(range(len(some)))
    started = time.perf_counter()
    until = started + seconds

    def fetch_some(number: int) -> list[tuple[float, int]]:
        done = []
        for row in work:  # one `next` at a time, which the interpreter makes whole
            sample = [some.keys[row]], [int(some.sizes[row])], some.locations_of([row])
            began = time.perf_counter()
            [fetched] = source.fetch(*sample)
            ended = time.perf_counter()
            if isinstance(fetched, Sample):
                done.append((ended - began, fetched.nbytes))
            if ended > until:
                break
        return done

    parts = prefetch(fetch_some, range(depth), depth, depth)
    done = [request for part in parts for request in part]
    wall = time.perf_counter() - started
    if not done:
        return None
    spread = Spread.of([seconds for seconds, _ in done])
    return Throughput(
        depth=depth,
        requests=len(done),
        requests_per_s=len(done) / wall,
        bytes_per_s=sum(nbytes for _, nbytes in done) / wall,
        median_ms=1e3 * spread.median,
        p95_ms=1e3 * spread.p95,
    )
