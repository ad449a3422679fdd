"""``precache bench``."""

from __future__ import annotations

import argparse

from precache.cli.arguments import add_common, add_store, take_defaults
from precache.cli.output import bench_progress, show
from precache.diagnosis.bench import bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_common(parser)
    parser.add_argument("--batch-size", type=int, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--epochs", type=int, metavar="N", help="epochs after the first; default %(default)s"
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
    take_defaults(parser, bench, "batch_size", "epochs")


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
    show(options.json, result)
