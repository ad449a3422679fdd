"""The command ``precache doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
from typing import Any

import precache
from precache.cli.build_options import (
    add_option,
    add_recipe_options,
    add_source,
    import_from_here,
    read_recipe,
)
from precache.cli.output import bench_progress, show
from precache_workers.doctor.text import print_prognosis


def add_doctor(commands: Any) -> None:
    """Add the command to the subparsers of ``precache``."""
    command = commands.add_parser(
        "doctor",
        help="before caching: what it costs, what it brings, where to cut",
        description=inspect.cleandoc(_doctor.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_doctor)
    add_source(command)
    add_recipe_options(command)
    run = command.add_argument_group("measuring")
    run.add_argument(
        "--samples", type=int, default=200, metavar="N", help="drawn at random; default 200"
    )
    run.add_argument(
        "--seconds",
        type=float,
        default=45.0,
        metavar="N",
        help="that it may take; where samples are slow it measures fewer; default 45",
    )
    run.add_argument(
        "--rate",
        type=float,
        default=1000.0,
        metavar="R",
        help="samples a second that the training device takes; default 1000",
    )
    run.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="of the build, and of training; default those that this process may use",
    )
    add_option(run, "follow_links")
    add_option(run, "storage_options")
    run.add_argument(
        "--html", metavar="FILE", help='write a page; needs pip install "precache[report]"'
    )
    run.add_argument("--png", metavar="FILE", help="write a picture; needs the same")
    run.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _doctor(options: argparse.Namespace) -> int:
    """Time a sample of SOURCE, stage by stage, and tell what caching it would bring.

    Cores to feed a device without a cache and with one, the time and size of a build, training
    from each codec, and where to cut between work that is done once and in every epoch. Nothing
    is kept: trials are in a temporary folder, on the disk that TMPDIR names. The page cache is
    asked to drop some local files of the source, so that the disk is what is measured.
    """
    for path in filter(None, (options.html, options.png)):
        from precache.html.charts import check_page

        check_page(path)
    recipe = read_recipe(options)
    import_from_here(options.source, bool(recipe.functions))
    with bench_progress(shown=not options.json) as tick:
        found = precache.doctor(
            options.source,
            recipe,
            samples=options.samples,
            seconds=options.seconds,
            rate=options.rate,
            cores=options.cores,
            follow_links=options.follow_links,
            storage_options=dict(options.storage_options),
            tick=tick,
        )
    data = dataclasses.asdict(found)
    show(options.json, _plain(data), lambda: print_prognosis(found))
    if options.html is not None:
        found.html(options.html)
    if options.png is not None:
        found.png(options.png)
    return 0


def _plain(value: Any) -> Any:
    """The same with null for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
