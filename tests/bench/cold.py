"""``python -m tests.bench.cold``: how busy reading ahead keeps a disk, beside plain random preads.

The files of a store are evicted from the page cache before every epoch, which mincore(2) confirms.
A new `Loader` reads all rows then, in turns with plain ``preadv`` of the same stored bytes, in the
order of a full shuffle, by several numbers of threads, each into a buffer of its own.

A queue is as deep as its reader lets it be: a `Loader` has ``ahead`` batches in the making and as
many more advised, for `raw` 512 to 1,024 rows, of which the block layer takes what the disk's queue
holds. So preads run at depths from below that to as many threads, and the best of them counts.
Where a disk is faster than decoding, no reading ahead helps: an epoch of a new `Loader` whose files
are cached shows that limit.

Put ``--folder`` on the disk in question. Eviction is this system's alone: the host of a virtual
machine, or a storage server, may still hold in memory what was just written there.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.sampling.order import Order, ValidRows
from tests.bench.common import (
    CROP,
    Cost,
    build_crops,
    chunk_extents,
    cost_of,
    evict,
    find_photos,
    in_clean_process,
    log,
    median_ratio,
    multiply,
    resident_share,
    share_of_others,
    touch,
    work_folder,
)

BATCH = 256
CODECS = ("raw", "image")
DEPTHS = (8, 32, 128, 512)
FULL, BLOCK, CACHED = "Loader, full", "Loader, block", "Loader, full, cached"
TARGET = 0.7
WIDTH = 100

Extent = tuple[Path, int, int]


@dataclass(frozen=True)
class Reading:
    """What was measured of one codec.

    Attributes
    ----------
    stored_bytes
        Of all rows, as they lie in the shards.
    resident
        Largest share of the files that was in the page cache before a cold epoch.
    costs
        By contender, one a round.
    """

    codec: str
    rows: int
    stored_bytes: int
    resident: float
    costs: Mapping[str, Sequence[Cost]]

    def speed(self, name: str) -> float:
        """Samples/s in the median epoch."""
        return statistics.median(cost.samples_per_s for cost in self.costs[name])

    def ratio(self, name: str, to: str) -> float:
        """Median of the rounds' speeds over those of `to`."""
        own, others = ([cost.samples_per_s for cost in self.costs[n]] for n in (name, to))
        return median_ratio(own, others)

    @property
    def floor(self) -> str:
        """The preads that were fastest."""
        return max(map(_preads, DEPTHS), key=self.speed)

    @property
    def others(self) -> float:
        """Share of the machine's cores that other processes had meanwhile."""
        return share_of_others(itertools.chain.from_iterable(self.costs.values()))


def _preads(depth: int) -> str:
    return f"preads, depth {depth}"


# --- epochs -------------------------------------------------------------------------------------


def _pread_epoch(extents: Sequence[Extent], depth: int, prepare: Callable[[], None]) -> Cost:
    prepare()
    with contextlib.ExitStack() as stack:
        files = {}
        for path in {path for path, _, _ in extents}:
            files[path] = stack.enter_context(path.open("rb", buffering=0)).fileno()
            os.posix_fadvise(files[path], 0, 0, os.POSIX_FADV_RANDOM)
        order = Order(ValidRows(len(extents), np.empty(0, np.int64)), BATCH)
        rows = itertools.chain.from_iterable(batch.tolist() for batch in order.epoch(0))
        ordered = (extents[row] for row in rows)
        places = iter([(files[path], offset, length) for path, offset, length in ordered])
        size = max(length for _, _, length in extents)
        ready = threading.Barrier(depth + 1)
        pool = stack.enter_context(ThreadPoolExecutor(depth))
        readers = [pool.submit(_read, places, size, ready) for _ in range(depth)]
        ready.wait()
        return cost_of(lambda: sum(reader.result() for reader in readers))


def _read(places: Iterator[tuple[int, int, int]], size: int, ready: threading.Barrier) -> int:
    """One thread's share of the places; an iterator over a list may be shared."""
    buffer, count = memoryview(bytearray(size)), 0
    ready.wait()
    for descriptor, offset, length in places:
        if os.preadv(descriptor, [buffer[:length]], offset) != length:
            raise OSError("a read was short")
        count += 1
    return count


def _loader_epoch(store: Path, shuffle: str, prepare: Callable[[], None]) -> Cost:
    """The first epoch of a new loader; it maps shards when it reads them, after `prepare`."""
    with precache.Loader(store, BATCH, shuffle=shuffle, device="cpu") as loader:
        prepare()
        return cost_of(lambda: sum(len(batch["row"]) for batch in loader))


# --- measuring ----------------------------------------------------------------------------------


def _compare(codec: str, store: Path, rounds: int) -> Reading:
    """Contenders take turns; to be called in a clean process."""
    extents = chunk_extents(store)
    files = [path for path in store.rglob("*") if path.is_file()]
    left = []

    def empty() -> None:
        gc.collect()  # pages that are mapped stay
        evict(files)
        left.append(resident_share(files))

    ways: dict[str, Callable[[], Cost]] = {
        _preads(depth): functools.partial(_pread_epoch, extents, depth, empty) for depth in DEPTHS
    }
    ways[FULL] = functools.partial(_loader_epoch, store, "full", empty)
    ways[CACHED] = functools.partial(_loader_epoch, store, "full", lambda: touch(files))
    ways[BLOCK] = functools.partial(_loader_epoch, store, "block", empty)
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            costs[name].append(way())
    stored = sum(length for _, _, length in extents)
    return Reading(codec, len(extents), stored, max(left), costs)


def measure(photos: Path | None, folder: Path, rows: int, rounds: int) -> list[Reading]:
    """Build a store for each codec in `folder`, and read it."""
    root, files = find_photos(photos, folder)
    source = multiply(files, root, rows, folder / f"photos-{rows}")
    readings = []
    for codec in CODECS:
        log.print(f"{codec}: building {rows:,} rows")
        store = build_crops(source, folder / f"{codec}-{rows}.store", codec)
        log.print(f"{codec}: reading {rounds} rounds")
        readings.append(in_clean_process(_compare, codec, store, rounds))
    return readings


# --- results ------------------------------------------------------------------------------------


def _table(readings: Sequence[Reading], rows: int, rounds: int) -> Table:
    names = ("samples/s", "MB/s", "CPU-ms", "read", "of preads", "of cached")
    table = Table(
        "codec",
        Column("read by", no_wrap=True),
        *(Column(name, justify="right") for name in names),
        title=f"{rows:,} rows of {CROP} x {CROP} x 3, batches of {BATCH}, cold",
        caption="Stored MB/s, CPU-ms per 1,000 rows, and bytes read from the disk over those\n"
        f"stored: medians of {rounds} epochs. Speed over that of the fastest preads, and over\n"
        "that of a Loader whose files are cached: medians of the rounds' ratios.",
    )
    for reading in readings:
        for name in reading.costs:
            first = name == next(iter(reading.costs))
            table.add_row(reading.codec if first else "", name, *_cells(reading, name))
        table.add_section()
    return table


def _cells(reading: Reading, name: str) -> Iterator[str]:
    costs = reading.costs[name]
    yield f"{reading.speed(name):,.0f}"
    yield f"{reading.speed(name) * reading.stored_bytes / reading.rows / 1e6:,.0f}"
    yield f"{statistics.median(cost.cpu_ms_per_1000 for cost in costs):.1f}"
    yield f"{statistics.median(cost.disk_bytes for cost in costs) / reading.stored_bytes:.2f}"
    yield f"{reading.ratio(name, reading.floor):.2f}"
    yield f"{reading.ratio(name, CACHED):.2f}"


def _remarks(reading: Reading) -> Iterator[str]:
    if reading.codec == "raw":
        ratio = reading.ratio(FULL, reading.floor)
        yield f"{FULL} is {ratio:.2f} times as fast as {reading.floor} (target ≥ {TARGET})"
    yield f"at most {reading.resident:.2%} resident before an epoch"
    yield f"other processes had {reading.others:.0%} of the cores"


def _as_json(reading: Reading) -> dict[str, Any]:
    return {
        **dataclasses.asdict(reading),
        "others": reading.others,
        "floor": reading.floor,
        "of_preads": {name: reading.ratio(name, reading.floor) for name in reading.costs},
        "of_cached": {name: reading.ratio(name, CACHED) for name in reading.costs},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.cold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=8000, help="of each store (8000)")
    parser.add_argument("--rounds", type=int, default=5, help="of all contenders (5)")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.rows < BATCH or options.rounds < 1:
        parser.error(f"give at least {BATCH} rows and 1 round")
    with work_folder(options.folder) as folder:
        readings = measure(options.photos, folder, options.rows, options.rounds)
    machine = Installation.here()
    if options.json:
        settings = {"rows": options.rows, "batch_size": BATCH, "rounds": options.rounds}
        codecs = [_as_json(reading) for reading in readings]
        print(json.dumps({"machine": dataclasses.asdict(machine), **settings, "codecs": codecs}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(readings, options.rows, options.rounds))
    for reading in readings:
        console.print(f"{reading.codec}: {'; '.join(_remarks(reading))}", soft_wrap=True)
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
