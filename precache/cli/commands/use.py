"""``precache use``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

import precache
from precache.cli.arguments import add_json, add_storage_options
from precache.cli.output import show
from precache.runtime.terminal import say

if TYPE_CHECKING:
    from precache.maintenance.versions import UseResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the version and how to print."""
    parser.add_argument("version", metavar="STORE@VERSION")
    add_json(parser)
    add_storage_options(parser)


def run(options: argparse.Namespace) -> int:
    """Make a committed version current, if it is complete. Processes that have a version open
    keep it.
    """
    used = precache.use(options.version, dict(options.storage_options))
    show(options.json, dataclasses.asdict(used), lambda: _print(used))
    return 0


def _print(result: UseResult) -> None:
    if result.previous == result.version:
        say(f"version {result.version[:12]} is already current")
    else:
        previous = "" if result.previous is None else f"; it replaces {result.previous[:12]}"
        say(f"version {result.version[:12]} is now current{previous}")
