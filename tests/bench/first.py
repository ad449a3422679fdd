"""``python -m tests.bench.first``: how long the first batch of an epoch takes.

A fresh `Loader` each time, of a store that is in memory. The least it could take is the CPU time
of a batch, of warm epochs, over the threads that decode.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

import precache
from tests.bench.common import (
    Machine,
    build_crops,
    cost_of,
    find_photos,
    in_clean_process,
    log,
    multiply,
    touch,
    work_folder,
)

BATCH = 256
ROWS = 16 * BATCH
CODECS = ("raw", "zstd", "image")
TARGET = 1.3


@dataclass(frozen=True)
class First:
    """What was measured of one codec.

    Attributes
    ----------
    threads
        That decode.
    batch_cpu_ms
        CPU time of a batch in warm epochs, of all threads; median.
    first_ms
        Wall time from an epoch's beginning to its first batch; each loader's.
    slots
        That a loader keeps.
    """

    codec: str
    threads: int
    batch_cpu_ms: float
    first_ms: list[float]
    slots: int

    @property
    def median_ms(self) -> float:
        return statistics.median(self.first_ms)

    @property
    def ratio(self) -> float:
        """First batch over the least that it could take."""
        return self.median_ms * self.threads / self.batch_cpu_ms


def _epoch(loader: precache.Loader) -> int:
    return sum(len(batch["row"]) for batch in loader)


def _measure(store: Path, codec: str, rounds: int) -> First:
    """First batches and warm epochs take turns; to be called in a clean process."""
    touch(path for path in store.rglob("*") if path.is_file())
    first, warm = [], []
    for number in range(rounds + 1):
        with precache.Loader(store, BATCH, device="cpu") as loader:
            began = time.perf_counter()
            next(iter(loader))
            if number:
                first.append((time.perf_counter() - began) * 1e3)
            _epoch(loader)
            cost = cost_of(lambda loader=loader: _epoch(loader))  # type: ignore[misc]
            warm.append(cost.cpu_ms_per_1000 * BATCH / 1000)
            threads, slots = loader._stream._threads, loader._stream._pool._keep  # type: ignore[union-attr]
    return First(codec, threads, statistics.median(warm), first, slots)


def measure(photos: Path | None, folder: Path, rounds: int) -> list[First]:
    """Build a store for each codec in `folder`, unless it is there, and read it."""
    root, files = find_photos(photos, folder)
    source = multiply(files, root, ROWS, folder / f"photos-{ROWS}")
    found = []
    for codec in CODECS:
        store = folder / f"{codec}.store"
        if not store.exists():
            log.print(f"{codec}: building {ROWS:,} rows")
            build_crops(source, store, codec)
        found.append(in_clean_process(_measure, store, codec, rounds))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.first", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="loaders of each store (15)")
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--folder", type=Path, help="work there, and keep what is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with work_folder(options.folder) as folder:
        found = measure(options.photos, folder, options.rounds)
    machine = Machine.here()
    if options.json:
        each = [{**dataclasses.asdict(one), "ratio": one.ratio} for one in found]
        print(json.dumps({"machine": dataclasses.asdict(machine), "codecs": each}))
        return
    columns = ("threads", "CPU-ms of a batch", "first batch, ms", "ratio", "slots")
    table = Table(
        "codec",
        *(Column(name, justify="right") for name in columns),
        "target",
        title=f"The first batch of {BATCH} rows, shuffled, on the CPU, and the least it could take",
    )
    for one in found:
        cells = (one.batch_cpu_ms, one.median_ms, one.ratio)
        target = f"ratio ≤ {TARGET}" if one.codec == "image" else ""
        numbers = (str(one.threads), *(f"{cell:.1f}" for cell in cells), str(one.slots))
        table.add_row(one.codec, *numbers, target)
    console = Console(highlight=False)
    console.print(table)
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
