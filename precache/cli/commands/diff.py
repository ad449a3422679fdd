"""``precache diff``."""

from __future__ import annotations

import argparse

from precache.cli.arguments import add_common
from precache.cli.output import show
from precache.maintenance.diff import diff


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("before", "after"):
        parser.add_argument(
            name, metavar=name.upper(), help="STORE@3f2a, or a store for its current version"
        )
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """Compare recipes op by op, samples by key, classes and libraries. The versions may be in
    different stores.

    example:
      precache diff photos.store@3f2a photos.store
    """
    difference = diff(options.before, options.after, dict(options.storage_options))
    show(options.json, difference)
