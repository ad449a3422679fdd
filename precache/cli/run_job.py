"""The command ``precache job``, which a cluster runs for ``precache submit`` and ``refresh``."""

from __future__ import annotations

import argparse
import json
from typing import Any

import precache
from precache.cli.build_options import import_from_here
from precache.cli.output import build_json, print_build, show
from precache.cli.refresh import print_refreshes
from precache.recipe.recipe import Recipe
from precache_workers.planning.options import BuildOptions, RunOptions, read_options


def add_job(commands: Any) -> None:
    """Add the command to the subparsers of ``precache``; their help does not list it."""
    command = commands.add_parser("job", description=_job.__doc__)
    command.add_argument("document", metavar="JSON")
    command.set_defaults(run=_job)


def _job(options: argparse.Namespace) -> int:
    """Build or refresh as a document says that was submitted, and print JSON."""
    document = json.loads(options.document)
    keywords = document["options"]
    source, store = document["source"], document["store"]
    if document["command"] == "refresh":
        read_options(RunOptions, keywords)
        keywords |= {"times": document["times"], "every": document["every"]}
        print_refreshes(True, store, source, **keywords)
        return 0
    read_options(BuildOptions, keywords)  # an option that only another release has is named
    recipe = Recipe.from_dict(document["recipe"])
    import_from_here(source, bool(recipe.functions))
    result = precache.build(source, store, recipe, **keywords)
    show(True, build_json(result), lambda: print_build(result))
    return 0
