"""``python -m tests.bench.listing``: what listing a bucket of a million keys costs the driver.

The bucket is a server in a process of its own, which answers as S3 does, or Azure, after a latency
for each page. What follows the listing until the first shard task is measured as well.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from precache.cli.installation import Installation
from precache_workers.planning.rows import order_rows, sample_for_probe
from precache_workers.sources.base import Listing
from precache_workers.sources.kinds import open_source
from tests.bench.common import Cost, cost_of, in_clean_process, log, peak_bytes
from tests.support.listing_server import AZURES_PAGE, PAGE, AzureListingServer, ListingServer

SERVICES = {"s3": (ListingServer, PAGE), "az": (AzureListingServer, AZURES_PAGE)}
"""Protocol -> its server, and the keys in a page."""

MIB = 1 << 20
WIDTH = 100


def _serve(pipe: Connection, service: str, prefixes: int, keys: int, latency: float) -> None:
    """A bucket of `prefixes` x `keys` photos, with 0 prefixes a flat one."""
    folders = [f"n{number:08d}/" for number in range(prefixes)] or [""]
    names = [f"{folder}{number:08d}_photo.JPEG" for folder in folders for number in range(keys)]
    server, page = SERVICES[service]
    pipe.send(server(names, page, latency).options())
    pipe.recv()


@contextlib.contextmanager
def bucket(
    service: str, prefixes: int, keys: int, latency: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Storage options for s3://bucket, or the like, while a process of its own serves it."""
    pipe, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=[theirs, service, prefixes, keys, latency], daemon=True
    )
    server.start()
    try:
        yield pipe.recv()
    finally:
        server.kill()
        server.join()


@dataclass(frozen=True)
class Run:
    """One way from a bucket to a plan.

    Attributes
    ----------
    steps
        What each took.
    memory
        The process's memory before the first, and its peak by the end of each.
    found
        Samples.
    stored
        Bytes of the row table.
    """

    prefixes: int
    keys: int
    steps: dict[str, Cost]
    memory: dict[str, int]
    found: int
    stored: int


def _run(service: str, prefixes: int, keys: int, latency: float) -> Run:
    """From the bucket to what is known before the first task; to be called in a clean process."""
    with bucket(service, prefixes, keys, latency) as options:
        return _measured(service, prefixes, keys, options)


def _measured(service: str, prefixes: int, keys: int, options: dict[str, Any]) -> Run:
    source = open_source(f"{service}://bucket", options)
    held: dict[str, Any] = {}

    def list_source() -> int:
        listing: Listing = source.list(lambda found: None)
        held["table"] = listing.table
        return len(listing.table)

    def order() -> int:
        held["table"] = order_rows(held["table"], keep_order=False)
        return len(held["table"])

    def plan() -> int:
        held["digest"] = held["table"].digest
        sample_for_probe(held["table"], 24)
        return len(held["table"])

    def freeze() -> int:
        held["stored"] = len(held["table"].to_parquet())
        return len(held["table"])

    steps, memory = {}, {"before": peak_bytes()}
    for step in (list_source, order, plan, freeze):
        steps[step.__name__] = cost_of(step)
        memory[step.__name__] = peak_bytes()
    return Run(prefixes, keys, steps, memory, len(held["table"]), held["stored"])


def _table(runs: Sequence[Run], service: str, latency: float) -> Table:
    numbers = ("s", "CPU-s", "peak MiB")
    _, page = SERVICES[service]
    table = Table(
        "bucket",
        "step",
        *(Column(name, justify="right") for name in numbers),
        title=f"From {service}:// to a plan, {latency * 1e3:.0f} ms a page of {page:,} keys",
        caption="The peak is of the whole process, by the end of the step.",
    )
    for run in runs:
        bucket = f"{run.prefixes:,} x {run.keys:,}" if run.prefixes else f"{run.keys:,}, flat"
        table.add_row(bucket, "before", "", "", f"{run.memory['before'] / MIB:,.0f}")
        for name, cost in run.steps.items():
            cells = f"{cost.wall_seconds:.2f}", f"{cost.cpu_seconds:.2f}"
            table.add_row("", name, *cells, f"{run.memory[name] / MIB:,.0f}")
        wall = sum(cost.wall_seconds for cost in run.steps.values())
        cpu = sum(cost.cpu_seconds for cost in run.steps.values())
        stored = f"{run.stored / run.found:.1f} bytes a row stored"
        table.add_row("", f"all; {stored}", f"{wall:.2f}", f"{cpu:.2f}", "", end_section=True)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.listing", description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000, help="in all (1000000)")
    parser.add_argument(
        "--prefixes",
        type=int,
        nargs="+",
        default=[1000, 0],
        help="that share them; 0 for a flat bucket (1000 and 0)",
    )
    parser.add_argument("--service", choices=SERVICES, default="s3", help="s3 or az (s3)")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds a page (0.02)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if min(options.prefixes) < 0 or options.keys < max(options.prefixes):
        parser.error("give at least 0 prefixes, and a key for each prefix")
    runs = []
    for prefixes in options.prefixes:
        log.print(f"listing {options.keys:,} keys below {prefixes:,} prefixes")
        keys = options.keys // max(1, prefixes)
        runs.append(in_clean_process(_run, options.service, prefixes, keys, options.latency))
    machine = Installation.here()
    if options.json:
        found = [dataclasses.asdict(run) for run in runs]
        told = {"machine": dataclasses.asdict(machine), "service": options.service, "runs": found}
        print(json.dumps(told))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(runs, options.service, options.latency))
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
