"""``precache build``."""

from __future__ import annotations

import argparse

import precache
from precache.cli.arguments import import_from_here
from precache.cli.build_options import add_build_arguments, read_keywords, read_recipe
from precache.cli.output import build_json, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_build_arguments(parser).add_argument(
        "--dry-run",
        action="store_true",
        help="only report what would be done, as precache plan",
    )


def run(options: argparse.Namespace) -> int:
    """Decode and resize every sample of SOURCE once, into tensors that training memory-maps.

    If it is killed or fails, run the same command again to continue; if nothing has changed, it
    does nothing. Without flags of the recipe, images are not resized or cropped.

    examples:
      precache build photos/ photos.store --resize 256 --crop 224
      precache build photos/ photos.store --recipe recipe.toml --address ray://head:10001
      precache build val/ val.store --resize 256 --crop 224 --classes photos.store
    """
    if options.dry_run:
        from precache.cli.commands.plan import show_plan

        return show_plan(options, timing=True)
    recipe = read_recipe(options)
    import_from_here(options.source, bool(recipe.functions))
    result = precache.build(options.source, options.store, recipe, **read_keywords(options))
    text = str(result)
    if result.holes:
        text += "\nto retry failed samples, for example after raising a limit, give --retry-failed"
    show(options.json, build_json(result), text)
    return 0
