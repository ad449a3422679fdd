"""``python -m tests.bench.first``: what the first batch and the first epoch of a process take.

A fresh `Loader` each time, of a store whose files are in memory. The least it could take is the
CPU time of that batch over the threads that decode: it is measured by loaders of that batch alone,
which take turns with loaders of all rows. What counts is the fastest round, as a first batch is
over before whatever else a machine does evens out.

A first epoch maps the shards, verifies checksums and takes fresh memory, so each is measured in a
process of its own. On virtual machines with free page reporting (virtio-balloon) it varies by a
factor of three: huge pages that a process frees go back to the host, and the next one to touch them
waits for the host. So the lower quartile counts, and the range is printed.
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
from precache.cli.installation import Installation
from precache.loading.stream import BatchStream
from tests.bench.common import (
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
ROWS = 32 * BATCH
CODECS = ("raw", "zstd", "image")
TARGET = 1.3


@dataclass(frozen=True)
class First:
    """What was measured of one codec.

    Attributes
    ----------
    threads
        That decode.
    slots
        That a loader keeps.
    wall_ms
        From an epoch's beginning to its first batch; of each round.
    cpu_ms
        CPU time of that batch, of all threads, where it is the only one; of each round.
    epochs
        CPU-ms per 1,000 rows of the first two epochs of a process; of each process.
    """

    codec: str
    threads: int
    slots: int
    wall_ms: list[float]
    cpu_ms: list[float]
    epochs: list[tuple[float, float]]

    @property
    def first_epoch(self) -> list[float]:
        return sorted(first for first, _ in self.epochs)

    @property
    def ratio(self) -> float:
        """First batch over the least that it could take."""
        return min(self.wall_ms) * self.threads / min(self.cpu_ms)


def _epochs(store: Path) -> tuple[float, float]:
    """Return what the first two epochs of this process cost; to be called in a clean process."""
    with precache.Loader(store, BATCH, device="cpu") as loader:
        first, second = (cost_of(lambda: sum(len(b["row"]) for b in loader)) for _ in range(2))
    return first.cpu_ms_per_1000, second.cpu_ms_per_1000


def _measure(store: Path, codec: str, rounds: int, epochs: list[tuple[float, float]]) -> First:
    """To be called in a clean process."""
    touch(path for path in store.rglob("*") if path.is_file())
    wall, cpu = [], []
    for _ in range(rounds + 1):
        with precache.Loader(store, BATCH, device="cpu") as loader:
            rows = loader.rows_of_batch(0, 0)
            began = time.perf_counter()
            batches = iter(loader)
            next(batches)
            wall.append((time.perf_counter() - began) * 1e3)
            stream = loader._source.stream
        with precache.Loader(store, BATCH, device="cpu", rows=rows) as loader:
            cost = cost_of(lambda loader=loader: sum(len(b["row"]) for b in loader))  # type: ignore[misc]
            cpu.append(cost.cpu_seconds * 1e3)
    assert isinstance(stream, BatchStream)
    return First(codec, stream._schedule.threads, stream._pool._keep, wall[1:], cpu[1:], epochs)


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
        touch(path for path in store.rglob("*") if path.is_file())
        epochs = [in_clean_process(_epochs, store) for _ in range(max(4, rounds // 2))]
        found.append(in_clean_process(_measure, store, codec, rounds, epochs))
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
    machine = Installation.here()
    if options.json:
        each = [{**dataclasses.asdict(one), "ratio": one.ratio} for one in found]
        print(json.dumps({"machine": dataclasses.asdict(machine), "codecs": each}))
        return
    columns = ("threads", "slots", "CPU-ms", "median ms", "fastest ms", "ratio")
    table = Table(
        "codec",
        *(Column(name, justify="right") for name in columns),
        "target",
        title=f"The first batch of {BATCH} rows, shuffled, on the CPU, and the least it could take",
    )
    for one in found:
        times = (min(one.cpu_ms), statistics.median(one.wall_ms), min(one.wall_ms))
        cells = (str(one.threads), str(one.slots), *(f"{each:.1f}" for each in times))
        target = f"≤ {TARGET}" if one.codec == "image" else ""
        table.add_row(one.codec, *cells, f"{one.ratio:.2f}", target)
    console = Console(highlight=False)
    console.print(table)
    console.print(_epochs_table(found))
    console.print(str(machine), soft_wrap=True)


def _epochs_table(found: Sequence[First]) -> Table:
    table = Table(
        "codec",
        *(Column(name, justify="right") for name in ("first epoch", "range", "second")),
        title=f"CPU-ms per 1,000 of {ROWS:,} rows",
    )
    for one in found:
        epochs = one.first_epoch
        second = statistics.median(second for _, second in one.epochs)
        spread = f"{epochs[0]:.1f} to {epochs[-1]:.1f}"
        table.add_row(one.codec, f"{epochs[len(epochs) // 4]:.1f}", spread, f"{second:.1f}")
    return table


if __name__ == "__main__":
    main()
