"""``precache use``."""

from __future__ import annotations

import argparse
import dataclasses

from precache.cli.arguments import add_common
from precache.cli.output import show
from precache.maintenance.versions import UseResult, use
from precache.runtime.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="STORE@VERSION")
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """Make a committed version current, if it is complete. Processes that have a version open
    keep it.
    """
    used = use(options.version, dict(options.storage_options))
    show(options.json, dataclasses.asdict(used), lambda: _print(used))


def _print(result: UseResult) -> None:
    if result.previous == result.version:
        say(f"version {result.version[:12]} is already current")
    else:
        previous = "" if result.previous is None else f"; it replaces {result.previous[:12]}"
        say(f"version {result.version[:12]} is now current{previous}")
