"""``precache bench``."""

from __future__ import annotations

import argparse
import dataclasses

from rich.table import Table

from precache.cli.arguments import add_common, add_store
from precache.cli.output import bench_progress, show
from precache.codecs.kernels import NO_COMPILED_CODE
from precache.diagnosis.bench import BenchResult, ReadCost, bench
from precache.runtime.terminal import Terminal, say
from precache.units import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_common(parser)
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument(
        "--epochs", type=int, default=3, metavar="N", help="epochs after the first; default 3"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="decoding threads")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="local folder for shards of a remote store"
    )
    parser.add_argument(
        "--cache-limit", metavar="SIZE", help="size limit of that folder, such as 200GB"
    )
    parser.add_argument(
        "--cache-shared",
        action="store_true",
        help="share that folder with the members of its group",
    )


def run(options: argparse.Namespace) -> None:
    """Read shuffled epochs of a store on the CPU, and compare them with copying plain memory."""
    with bench_progress(shown=not options.json) as tick:
        result = bench(
            options.store,
            options.batch_size,
            options.epochs,
            options.threads,
            tick,
            cache_dir=options.cache_dir,
            cache_limit=options.cache_limit,
            cache_shared=options.cache_shared,
            storage_options=dict(options.storage_options),
        )
    show(options.json, dataclasses.asdict(result), lambda: _print(result))


def _print(result: BenchResult) -> None:
    """Print the cost of reading beside the copy limit."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header, justify in (("", "left"), ("samples/s", "right"), ("CPU-ms per 1,000", "right")):
        table.add_column(header, justify=justify)  # type: ignore[arg-type]  # a literal's type
    rows: dict[str, ReadCost] = {
        "first epoch": result.first_epoch,
        "warm epochs": result.warm,
        "copy limit": result.copy_limit,
    }
    for name, cost in rows.items():
        table.add_row(name, f"{cost.samples_per_s:,.0f}", f"{cost.cpu_ms_per_1000:.1f}")
    say(
        f"{result.samples:,} samples of {size(result.row_nbytes)} decoded, codec {result.codec}, "
        f"batches of {result.batch_size}"
    )
    Terminal().print(table, soft_wrap=True)
    ratio = f"{result.cpu_ratio:.2f}"
    say(f"a warm epoch takes {ratio} times the CPU time of copying as many plain bytes")
    if not result.compiled:
        say(NO_COMPILED_CODE)
