"""``python -m tests.bench.listing``: what listing a bucket of a million keys costs the driver.

The bucket is pretended: every listing of a prefix takes a latency for each page of 1,000 keys, and
gives what s3fs would. What follows the listing until the first shard task is measured as well.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import fsspec
import xxhash
from fsspec.spec import AbstractFileSystem
from rich.console import Console
from rich.table import Column, Table

from tests.bench.common import Cost, Machine, cost_of, in_clean_process, log, peak_bytes
from workers.plan import order_rows, sample_for_probe
from workers.sources import Listing, open_source

PAGE = 1000
MIB = 1 << 20
WIDTH = 100
WRITTEN = datetime(2024, 5, 17, 8, 30, tzinfo=UTC)


class PretendedBucket(AbstractFileSystem):  # type: ignore[misc] - fsspec has no types
    """A bucket of ``prefixes`` x ``keys`` photos, with 0 prefixes a flat one; none can be read."""

    protocol: ClassVar[str] = "pretended"
    cachable = False

    def __init__(self, prefixes: int, keys: int, latency: float, **options: Any) -> None:
        super().__init__(**options)
        self.prefixes, self.keys, self.latency = prefixes, keys, latency

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[dict[str, Any]]:
        """One prefix, page after page."""
        path = self._strip_protocol(path).rstrip("/")
        if "/" in path or not self.prefixes:
            found = [self._photo(path, number) for number in range(self.keys)]
        else:
            found = [_folder(f"{path}/n{number:08d}") for number in range(self.prefixes)]
        for _ in range(0, max(1, len(found)), PAGE):
            time.sleep(self.latency)
        return found

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Each path is a folder."""
        time.sleep(self.latency)
        return _folder(self._strip_protocol(path).rstrip("/"))

    def _photo(self, path: str, number: int) -> dict[str, Any]:
        name, size = f"{path}/{number:08d}_{path[-8:]}.JPEG", 100_000 + number
        return {
            "Key": name,
            "LastModified": WRITTEN.replace(microsecond=number % 10**6),
            "ETag": f'"{xxhash.xxh3_128_hexdigest(name.encode())}"',
            "ChecksumAlgorithm": ["CRC64NVME"],
            "ChecksumType": "FULL_OBJECT",
            "Size": size,
            "StorageClass": "STANDARD",
            "type": "file",
            "size": size,
            "name": name,
        }


def _folder(path: str) -> dict[str, Any]:
    return {"Key": path, "Size": 0, "size": 0, "type": "directory", "name": path}


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


def _run(prefixes: int, keys: int, latency: float) -> Run:
    """From the bucket to what is known before the first task; to be called in a clean process."""
    fsspec.register_implementation("pretended", PretendedBucket)
    bucket = {"prefixes": prefixes, "keys": keys, "latency": latency}
    source = open_source("pretended://bucket", bucket)
    held: dict[str, Any] = {}

    def pretend() -> int:
        """What the bucket itself costs here, without its latency."""
        fs = PretendedBucket(prefixes, min(keys, PAGE), 0.0)
        return sum(
            len(fs.ls(f"bucket/n{n:08d}"))
            for n in range(max(1, prefixes) * keys // min(keys, PAGE))
        )

    def list_source() -> int:
        listing: Listing = source.list(lambda found: None)
        held["table"] = listing.table
        return len(listing.table)

    def order() -> int:
        held["table"] = order_rows(held["table"], keep_order=False)
        return len(held["table"])

    def plan() -> int:
        held["digest"] = held["table"].digest()
        sample_for_probe(held["table"], 24)
        return len(held["table"])

    def freeze() -> int:
        held["stored"] = len(held["table"].to_parquet())
        return len(held["table"])

    steps, memory = {}, {"before": peak_bytes()}
    for step in (pretend, list_source, order, plan, freeze):
        steps[step.__name__] = cost_of(step)
        memory[step.__name__] = peak_bytes()
    return Run(prefixes, keys, steps, memory, len(held["table"]), held["stored"])


def _table(runs: Sequence[Run], latency: float) -> Table:
    numbers = ("s", "CPU-s", "peak MiB")
    table = Table(
        "bucket",
        "step",
        *(Column(name, justify="right") for name in numbers),
        title=f"From a bucket to a plan, {latency * 1e3:.0f} ms for a page of {PAGE:,} keys",
        caption="The peak is of the whole process, by the end of the step.",
    )
    for run in runs:
        bucket = f"{run.prefixes:,} x {run.keys:,}" if run.prefixes else f"{run.keys:,}, flat"
        table.add_row(bucket, "before", "", "", f"{run.memory['before'] / MIB:,.0f}")
        for name, cost in run.steps.items():
            cells = f"{cost.wall_seconds:.2f}", f"{cost.cpu_seconds:.2f}"
            table.add_row("", name, *cells, f"{run.memory[name] / MIB:,.0f}")
        ours = [cost for name, cost in run.steps.items() if name != "pretend"]
        wall = sum(cost.wall_seconds for cost in ours)
        cpu = sum(cost.cpu_seconds for cost in ours) - run.steps["pretend"].cpu_seconds
        stored = f"{run.stored / run.found:.1f} bytes a row stored"
        table.add_row(
            "", f"all but pretend; {stored}", f"{wall:.2f}", f"{cpu:.2f}", "", end_section=True
        )
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
    parser.add_argument("--latency", type=float, default=0.02, help="seconds a page (0.02)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if min(options.prefixes) < 0 or options.keys < max(options.prefixes):
        parser.error("give at least 0 prefixes, and a key for each prefix")
    runs = []
    for prefixes in options.prefixes:
        log.print(f"listing {options.keys:,} keys below {prefixes:,} prefixes")
        keys = options.keys // max(1, prefixes)
        runs.append(in_clean_process(_run, prefixes, keys, options.latency))
    machine = Machine.here()
    if options.json:
        found = [dataclasses.asdict(run) for run in runs]
        print(json.dumps({"machine": dataclasses.asdict(machine), "runs": found}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(runs, options.latency))
    console.print(str(machine), soft_wrap=True)


if __name__ == "__main__":
    main()
