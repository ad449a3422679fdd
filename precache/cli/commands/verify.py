"""``precache verify``."""

from __future__ import annotations

import argparse
import dataclasses

from precache.building.verify import check_recipe
from precache.cli.arguments import add_common, add_store
from precache.cli.output import byte_progress, show
from precache.maintenance.verify import verify_version
from precache.store.open import open_unchecked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Read every byte, check every checksum, and compare the version's small arrays with its row
    table; damage is named by object and key.

    The exit status is 1 if there is damage.
    """
    version = open_unchecked(options.store, dict(options.storage_options))
    with byte_progress("Verifying", version, shown=not options.json) as tick:
        result = verify_version(version, tick, check_recipe)
    data = {**dataclasses.asdict(result), "ok": result.ok}
    show(options.json, data, result)
    return 0 if result.ok else 1
