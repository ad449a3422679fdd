"""``precache plan``, which is ``precache build --dry-run``."""

from __future__ import annotations

import argparse
import dataclasses

import precache
from precache.cli.arguments import import_from_here
from precache.cli.build_options import add_build_arguments, read_keywords, read_recipe
from precache.cli.output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_build_arguments(parser).add_argument(
        "--no-timing", action="store_true", help="compute no rows to estimate time and size"
    )


def run(options: argparse.Namespace) -> int:
    """Report what precache build, with the same arguments, would do; nothing is written.

    Lists the differences from the current version, the rows that are reused and of which version,
    and the rows to compute. Computes a few dozen rows in memory to estimate time and size.

    example:
      precache plan photos/ photos.store --resize 256 --crop 224
    """
    return show_plan(options, not options.no_timing)


def show_plan(options: argparse.Namespace, timing: bool) -> int:
    """Plan the build of these options, and print the plan; returns the exit status."""
    recipe, keywords = read_recipe(options), read_keywords(options)
    import_from_here(options.source, bool(recipe.functions))
    plan = precache.plan(options.source, options.store, recipe, timing=timing, **keywords)
    data = {**dataclasses.asdict(plan), "shards_to_make": plan.shards_to_make}
    show(options.json, data, plan)
    return int(plan.fails)
