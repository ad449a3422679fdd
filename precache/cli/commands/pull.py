"""``precache pull``."""

from __future__ import annotations

import argparse

from precache.cli.arguments import add_common, add_store
from precache.cli.output import byte_progress, show
from precache.maintenance.transfer import pull, push
from precache.store.open import open_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--to", required=True, metavar="STORE", help="created if missing")
    add_common(parser)


def run(options: argparse.Namespace) -> None:
    """Copy a whole version into another store, local or remote, and make it current there.

    Every object is checked while it is copied. If the target has the version undamaged, it is only
    made current. A damaged version on a local disk is replaced once the copy is complete; one in a
    bucket is repaired. If the command is stopped, run it again to continue.

    examples:
      precache pull gs://bucket/photos.store --to photos.store
      precache push photos.store --to gs://bucket/photos.store
    """
    storage_options = dict(options.storage_options)
    copy = pull if options.command == "pull" else push
    version = open_version(options.store, None, storage_options)
    with byte_progress("Copying", version, shown=not options.json) as tick:
        result = copy(options.store, options.to, tick, storage_options)
    show(options.json, result)
