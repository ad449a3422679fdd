"""``python -m tests.bench.states``: what saving and resuming costs, by rows of the store.

Nothing is read: loaders of a few real rows get the order of a store with many, since a state does
not depend on what is stored. *resume* is the time to the row numbers of the next batch, from a
state saved in the middle of an epoch; for a mixture of two loaders it counts what each has given.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from precache.loading.position import Position
from precache.sampling.order import Order, Shuffle, ValidRows

ROWS = (10**6, 10**9)
BATCH = 256
SHARD_ROWS = 1000
SHUFFLES = {"full": Shuffle(), "block": Shuffle("block", SHARD_ROWS, 8)}
HOLES = 1000
REPEATS = 200


@dataclass(frozen=True)
class Saving:
    """Milliseconds of each, the median; the state's bytes as JSON."""

    what: str
    shuffle: str
    rows: int
    save_ms: float
    load_ms: float
    resume_ms: float
    nbytes: int


def _milliseconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def _loader(group: str, rows: int, shuffle: Shuffle) -> precache.Loader:
    """A loader with the order of a store of so many rows."""
    loader = precache.Loader(group, BATCH, device="cpu", fields={"x": "x"})
    holes = np.linspace(0, rows - 1, HOLES).astype(np.int64)
    loader._source.order = Order(ValidRows(rows, holes), BATCH, shuffle)
    loader._position = Position(len(loader))
    loader.seek(3, len(loader) // 2)
    return loader


def measure(group: str) -> Iterator[Saving]:
    """A loader, and a mixture of two, with each order."""
    for name, shuffle in SHUFFLES.items():
        for rows in ROWS:
            loaders = [_loader(group, rows, shuffle) for _ in range(2)]
            mixture = precache.mix(loaders, [0.7, 0.3])
            order, schedule = loaders[0]._source.order, mixture._schedule
            resumes: dict[str, tuple[Any, Callable[[], object]]] = {
                "loader": (loaders[0], lambda o=order: next(o.epoch(3, o.batches // 2))),
                "mixture": (mixture, lambda t=schedule: t.positions_at(3, len(t) // 2)),
            }
            for what, (saved, resume) in resumes.items():
                state = saved.state_dict()
                yield Saving(
                    what,
                    name,
                    rows,
                    _milliseconds(saved.state_dict, REPEATS),
                    _milliseconds(lambda s=saved, t=state: s.load_state_dict(t), REPEATS),
                    _milliseconds(resume, 5),
                    len(json.dumps(state)),
                )
            mixture.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = zarr.open_group(folder, mode="w", zarr_format=3)
        root.create_array("x", data=np.zeros((BATCH, 4), np.float32))
        found = list(measure(folder))
    if chosen.json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
        return
    columns = ("rows", "save, ms", "load, ms", "resume, ms", "bytes")
    right = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table("state of a", "shuffle", *right)
    for each in found:
        times = (f"{ms:.3f}" for ms in (each.save_ms, each.load_ms, each.resume_ms))
        table.add_row(each.what, each.shuffle, f"{each.rows:,}", *times, f"{each.nbytes:,}")
    console = Console()
    console.print(table)
    console.print(f"batches of {BATCH}, {HOLES:,} holes; {Installation.here()}")


if __name__ == "__main__":
    main()
