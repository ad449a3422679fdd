"""``python -m tests.bench.device_ranks STORE``: several ranks that feed one CUDA device.

Each is a process with a `Loader` of its own, and all begin together. Printed for each way:
samples/s and CPU time of all together, and the page-locked memory of each. ``--rehearse`` does it
on the CPU.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

import precache
from precache.cli.installation import Installation
from tests.bench.common import Cost, cost_of, drain

WAYS: dict[str, dict[str, Any]] = {
    "copied": {},
    "gathered by the device": {"gather": "device"},
    "resident there": {"resident": "device"},
}

PATIENCE_SECONDS = 120.0
"""Limit of the wait for the other ranks, one of which may have failed."""


def _page_locked(loader: precache.Loader) -> int:
    """Bytes that torch and the loader have page-locked in this process."""
    if loader.device.type != "cuda":
        return 0
    own = int(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    slots = getattr(loader._source.stream, "_device", None)
    registered = slots[0]._registered if isinstance(slots, tuple) else None
    return own + (registered._memory.nbytes if registered else 0)


def _rank(
    rank: int, ranks: int, store: Path, batch: int, epochs: int, device: str, together: Barrier
) -> dict[str, tuple[Cost, int]]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    found = {}
    for name, options in WAYS.items():
        with precache.Loader(store, batch, device=device, **options) as loader:
            drain(loader)
            together.wait(PATIENCE_SECONDS)
            cost = cost_of(lambda: sum(drain(loader) for _ in range(epochs)))
            found[name] = cost, _page_locked(loader)
            together.wait(PATIENCE_SECONDS)
    return found


def measure(store: Path, ranks: int, batch: int, epochs: int, device: str) -> dict[str, Any]:
    """Samples/s, CPU-ms per 1,000 and page-locked bytes of each rank, by way."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(ranks, context) as pool:
        rest = ranks, store, batch, epochs, device, manager.Barrier(ranks)
        begun = [pool.submit(_rank, number, *rest) for number in range(ranks)]
        every = [each.result() for each in begun]
    found = {}
    for name in WAYS:
        costs = [each[name][0] for each in every]
        samples = sum(cost.samples for cost in costs)
        found[name] = {
            "samples_per_s": samples / max(cost.wall_seconds for cost in costs),
            "cpu_ms_per_1000": sum(cost.cpu_seconds for cost in costs) * 1e6 / samples,
            "page_locked_bytes": [each[name][1] for each in every],
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.device_ranks", description=__doc__)
    parser.add_argument("store", type=Path, help="of `raw` rows, such as tests.bench.device makes")
    parser.add_argument("--ranks", type=int, default=8, help="processes (8)")
    parser.add_argument("--batch", type=int, default=32, help="samples of each (32)")
    parser.add_argument("--epochs", type=int, default=4, help="after the first (4)")
    parser.add_argument("--out", type=Path, help="write everything there, as JSON")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    options = parser.parse_args(arguments)
    device = "cpu" if options.rehearse else "cuda:0"
    found = measure(options.store, options.ranks, options.batch, options.epochs, device)
    if options.out:
        options.out.write_text(json.dumps(found))
    columns = ("samples/s", "CPU-ms per 1,000", "page-locked MB each")
    table = Table("fed by", *(Column(name, justify="right") for name in columns))
    table.title = f"{options.ranks} ranks, batches of {options.batch} each, one device"
    for name, each in found.items():
        locked = sorted(nbytes / 1e6 for nbytes in each["page_locked_bytes"])
        table.add_row(
            name,
            f"{each['samples_per_s']:,.0f}",
            f"{each['cpu_ms_per_1000']:.1f}",
            f"{locked[0]:,.0f} to {locked[-1]:,.0f}",
        )
    console = Console(highlight=False, width=120)
    console.print(table)
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
