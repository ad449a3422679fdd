"""``precache ls``."""

from __future__ import annotations

import argparse
import dataclasses

from precache.cli.arguments import add_common
from precache.cli.output import show
from precache.maintenance.versions import versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE")
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """List versions with age, rows, size and recipe, and unfinished builds and copies. The total
    counts bytes that versions share by hard links once.
    """
    listing = versions(options.store, dict(options.storage_options))
    data = dataclasses.asdict(listing)
    for version in data["versions"]:
        version["pipeline"] = version["recipe"]  # the older name, for scripts
    show(options.json, data, listing)
