"""``precache doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import precache
from precache.cli.arguments import add_json, add_storage_options, import_from_here, take_defaults
from precache.cli.build_options import (
    add_option,
    add_recipe_options,
    add_source,
    read_keywords,
    read_recipe,
)
from precache.cli.output import bench_progress, show
from precache_workers.doctor.text import print_doctor_report
from precache_workers.planning.options import SourceOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_recipe_options(parser)
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--samples", type=int, metavar="N", help="number, drawn at random; default %(default)s"
    )
    measuring.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="time limit; fewer samples are measured if they are slow; default %(default)g",
    )
    measuring.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="samples per second that the training device takes; default %(default)g",
    )
    measuring.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="CPU cores of the build, and of training; default those that this process may use",
    )
    add_option(measuring, "follow_links")
    for name in SourceOptions.model_fields:
        add_option(measuring, name)
    add_storage_options(measuring)
    measuring.add_argument(
        "--html", metavar="FILE", help='write a page; needs pip install "precache[report]"'
    )
    add_json(measuring)
    take_defaults(parser, precache.doctor, "samples", "seconds", "rate")


def run(options: argparse.Namespace) -> None:
    """Measure random samples of SOURCE, stage by stage, and predict what caching would gain.

    Reports the cores that feed a device without a cache and with one, the time and size of a build,
    training from each codec, and which ops to do once and which in every epoch. Nothing is kept:
    trials are written to a temporary folder, on the disk that TMPDIR names. Some local files of the
    source are dropped from the page cache, so that the disk is measured.

    example:
      precache doctor photos/ --resize 256 --crop 224 --rate 4000
    """
    if options.html is not None:
        from precache.html.charts import check_page

        check_page(options.html)
    recipe = read_recipe(options)
    import_from_here(options.source, bool(recipe.functions))
    with bench_progress(shown=not options.json) as tick:
        report = precache.doctor(
            options.source,
            recipe,
            samples=options.samples,
            seconds=options.seconds,
            rate=options.rate,
            cores=options.cores,
            follow_links=options.follow_links,
            storage_options=dict(options.storage_options),
            **read_keywords(options, SourceOptions),
            tick=tick,
        )
    if options.json:
        show(options.json, _plain(dataclasses.asdict(report)), report)
    else:
        print_doctor_report(report)
    if options.html is not None:
        report.html(options.html)


def _plain(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by None."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
