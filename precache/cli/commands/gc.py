"""``precache gc``."""

from __future__ import annotations

import argparse
import dataclasses

from precache.cli.arguments import add_common, take_defaults
from precache.cli.output import show
from precache.maintenance.gc import gc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="number of newest versions to keep, including the current one; default %(default)s",
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        help="time since a version was replaced, such as 12h or 4w; default %(default)s",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print what would be removed, by this machine's clock",
    )
    add_common(parser)
    take_defaults(parser, gc, "keep", "older_than")


def run(options: argparse.Namespace) -> None:
    """Remove versions that are not current, not among the newest, and were replaced longer ago than
    --older-than; and unfinished builds and copies that have not changed for as long. Ages are
    measured with the store's own times, and only folders that identify themselves as versions are
    removed. gc does not see readers: choose an --older-than longer than a training run.

    example:
      precache gc photos.store --keep 2 --older-than 7d --dry-run
    """
    done = gc(
        options.store,
        options.keep,
        options.older_than,
        options.dry_run,
        dict(options.storage_options),
    )
    data = {**dataclasses.asdict(done), "freed_nbytes": done.freed_nbytes}
    show(options.json, data, done)
