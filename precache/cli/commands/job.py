"""``precache job``, which a cluster runs for ``precache submit`` and ``refresh --submit``."""

from __future__ import annotations

import argparse
import json
import sys

import precache
from precache.cli.arguments import import_from_here
from precache.cli.output import build_json, show
from precache.recipe.recipe import Recipe
from precache_workers.planning.options import BuildOptions, RunOptions, read_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("document", metavar="JSON")
    parser.set_defaults(json=sys.stdout)


def run(options: argparse.Namespace) -> None:
    """Run the build or refresh that a submitted document describes, and print JSON."""
    document = json.loads(options.document)
    keywords = document["options"]
    source, store = document["source"], document["store"]
    if document["command"] == "refresh":
        from precache.cli.commands.refresh import print_refreshes

        read_options(RunOptions, keywords)
        keywords |= {"times": document["times"], "every": document["every"]}
        print_refreshes(options.json, store, source, **keywords)
        return
    read_options(BuildOptions, keywords)  # names options that this release lacks
    recipe = Recipe.from_dict(document["recipe"])
    import_from_here(source, bool(recipe.functions))
    result = precache.build(source, store, recipe, **keywords)
    show(options.json, build_json(result), result)
