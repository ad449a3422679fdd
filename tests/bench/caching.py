"""``python -m tests.bench.caching``: what decisions cost in a disk cache of many shards.

The shards are small, and made up: what is measured is holding, making room and letting go.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from precache.cli.installation import Installation
from precache.reading.disk_cache import OVERHEAD, DiskCache, on_disk, share_nbytes
from tests.bench.common import work_folder

SIZE = 100
NEW = 300
FAMILY = "3f2a00c59b7e4d12a8f06c1d5e9b7a34-"


@dataclass(frozen=True)
class Step:
    """Calls of one kind, the time of one, and the bytes under ``users/`` after them."""

    what: str
    calls: int
    median_ms: float
    mean_ms: float
    longest_ms: float
    users_nbytes: int


def _name(number: int) -> str:
    return f"{FAMILY}image-{number}-{number * 0x9E3779B97F4A7C15 % 2**64:016x}"


def _write(descriptor: int) -> None:
    os.pwrite(descriptor, bytes(SIZE), 0)


def measure(folder: Path, shards: int) -> list[Step]:
    """Hold every shard of a cache, as a full shuffle does; bring more; evict for yet more."""
    for place in ("objects", "parts", "users"):
        (folder / place).mkdir()
    for number in range(shards):
        (folder / "objects" / _name(number)).write_bytes(bytes(SIZE))
    room = shards + NEW
    cache = DiskCache(folder, OVERHEAD + share_nbytes(room) + room * on_disk(SIZE))
    lease = cache.join(room * on_disk(SIZE), room, FAMILY)
    old, new, newer = range(shards), range(shards, room), range(room, room + NEW)

    def obtain(number: int) -> None:
        lease.obtain(_name(number), SIZE, _write)

    def let_go(number: int) -> None:
        lease.release(_name(number))

    return [
        _timed("hold what is there", folder, old, obtain),
        _timed("bring what there is room for", folder, new, obtain),
        _timed("let go", folder, range(room), let_go),
        _timed("bring what others must go for", folder, newer, obtain),
        _timed("let go", folder, newer, let_go),
    ]


def _timed(what: str, folder: Path, numbers: Iterable[int], call: Callable[[int], None]) -> Step:
    times = []
    for number in numbers:
        began = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - began) * 1e3)
    nbytes = sum(on_disk(path.stat().st_size) for path in (folder / "users").iterdir())
    median, mean = statistics.median(times), statistics.fmean(times)
    return Step(what, len(times), median, mean, max(times), nbytes)


def _table(steps: Sequence[Step], shards: int) -> Table:
    names = ("calls", "median ms", "mean ms", "longest ms", "bytes in users/")
    table = Table(
        "step",
        *(Column(name, justify="right") for name in names),
        title=f"A cache of {shards:,} shards",
    )
    for step in steps:
        times = (f"{each:.2f}" for each in (step.median_ms, step.mean_ms, step.longest_ms))
        table.add_row(step.what, f"{step.calls:,}", *times, f"{step.users_nbytes:,}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.caching", description=__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="an empty one on the disk to be measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with work_folder(options.folder) as folder:
        steps = measure(folder, options.shards)
    machine = Installation.here()
    if options.json:
        found = [dataclasses.asdict(step) for step in steps]
        print(json.dumps({"machine": dataclasses.asdict(machine), "steps": found}))
        return
    console = Console(highlight=False)
    console.print(_table(steps, options.shards))
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
