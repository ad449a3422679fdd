"""``precache verify``."""

from __future__ import annotations

import argparse
import dataclasses

from precache.cli.arguments import add_common, add_store
from precache.cli.output import byte_progress, first_ones, show
from precache.maintenance.verify import Verified, verify_version
from precache.runtime.terminal import say
from precache.store.commit_log import ROOT
from precache.store.open import open_unchecked
from precache.units import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Read every byte, check every checksum, and compare the version's small arrays with its row
    table; damage is named by object and key.

    The exit status is 1 if there is any.
    """
    version = open_unchecked(options.store, dict(options.storage_options))
    with byte_progress("Verifying", version, shown=not options.json) as tick:
        result = verify_version(version, tick)
    data = {**dataclasses.asdict(result), "ok": result.ok}
    show(options.json, data, lambda: _print(result))
    return 0 if result.ok else 1


def _print(result: Verified) -> None:
    """Print the damage by shard and key."""
    for damage in result.damage:
        keys = f"; keys {first_ones(damage.keys)}" if damage.keys else ""
        say(f"damaged: {damage.shard}: {damage.reason}{keys}")
    for part in result.unchecked:
        say(f"not checked: {part}")
    checked = f"{result.objects} shards, {result.rows:,} rows, {size(result.nbytes)} read"
    if result.ok:
        say(f"version {result.version[:8]} is whole: {checked}")
        return
    say(f"version {result.version[:8]} is damaged in {len(result.damage)} objects ({checked})")
    say("delete the damaged files and run the same precache build command again to rebuild them")
    if any(damage.shard == ROOT for damage in result.damage):
        say(f"without its {ROOT} the whole version is built again")
