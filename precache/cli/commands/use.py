"""``precache use``."""

from __future__ import annotations

import argparse

from precache.cli.arguments import add_common
from precache.cli.output import show
from precache.maintenance.versions import use


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="STORE@VERSION")
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """Make a committed version current, if it is complete. Processes that have a version open
    keep it.
    """
    used = use(options.version, dict(options.storage_options))
    show(options.json, used)
